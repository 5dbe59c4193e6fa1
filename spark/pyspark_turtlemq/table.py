"""Reading without Spark and without Java: rows of the data source as an Arrow table, in this process. For tests and small data.

read_table("data", topic="orders", columns="id,due,state").to_pandas()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from pyspark_turtlemq import attempts_column
from pyspark_turtlemq.options import Options, parse_options
from pyspark_turtlemq.plan import make_plan
from pyspark_turtlemq.predicates import Predicates
from pyspark_turtlemq.splits import read_splits

_TYPES = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"),
    "binary": pa.binary(),
    attempts_column.SPARK_TYPE: attempts_column.ARROW_TYPE,
    "array<bigint>": pa.list_(pa.int64()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}


def arrow_schema_of(options: Options) -> pa.Schema:
    """The schema of a read in Arrow's types. Bodies as JSON (`variant`, `struct`) are not supported without Spark."""
    return pa.schema([(name, _TYPES[type_]) for name, type_ in options.schema().items()])


def read_table(path: str | Path, predicates: Predicates | None = None, **given: Any) -> pa.Table:
    """The rows of `spark.read.format("turtlemq").options(**given).load(path)`. `predicates` replace the option `where`."""
    options = parse_options({"path": str(path), **{name: str(value) for name, value in given.items()}})
    predicates, schema = predicates or options.where, arrow_schema_of(options)
    plan = make_plan(options, predicates)
    try:
        batches = [batch for splits in plan.partitions for batch in read_splits(splits, options, predicates, schema)]
        return pa.Table.from_batches(batches, schema)
    finally:
        plan.release()
