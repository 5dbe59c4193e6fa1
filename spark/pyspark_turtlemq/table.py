"""Reading without Spark: the same rows as an Arrow table, in this process. For small things, and for tests.

read_table("data", topic="orders", columns="id,due,state").to_pandas()
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_turtlemq import columns as c
from pyspark_turtlemq import documents, forecast, journals, message_states, options, plan
from pyspark_turtlemq.predicates import Predicates

_TYPES = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"),
    "binary": pa.binary(),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}


def rows(pieces: list[Any], told: options.Options, wanted: Predicates, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a task's pieces."""
    how = documents.ReadSpec(tuple(schema.names), wanted, told.body, told.mode, told.verify)
    for piece in pieces:
        if isinstance(piece, documents.DocumentSplit):
            yield from documents.read(piece, how, schema)
        elif isinstance(piece, journals.JournalSplit):
            yield from journals.read(piece, how, schema)
        elif isinstance(piece, forecast.ForecastSplit):
            yield from forecast.read(piece, schema)
        elif isinstance(piece, message_states.MessagesSplit):
            yield from message_states.read(piece, schema)


def schema_of(told: options.Options) -> pa.Schema:
    """The columns of a read, with Arrow's types. JSON needs Spark."""
    there = c.available_columns(told.kind, told.body, told.body_schema)
    wanted = told.columns or tuple(name for name in there if name != c.DAMAGE)
    return pa.schema([(name, _TYPES[there[name]]) for name in wanted])


def read_table(path: str | Path, wanted: Predicates | None = None, **given: Any) -> pa.Table:
    """What `spark.read.format("turtlemq").options(**given).load(path)` reads; `wanted`: filters as if pushed down."""
    told = options.parse_options({"path": str(path), **{name: str(value) for name, value in given.items()}})
    wanted, schema = wanted or told.where, schema_of(told)
    made = plan.make_plan(told, wanted)
    try:
        found = [batch for pieces in made.partitions for batch in rows(pieces, told, wanted, schema)]
        return pa.Table.from_batches(found, schema)
    finally:
        made.release()
