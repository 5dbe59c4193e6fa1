"""Splits: the units of work that the plan deals out to partitions; each type has a reader that turns it into Arrow batches.

A new kind of split needs a line in `Split` and one in `read_splits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from pyspark_turtlemq import documents, forecast, journals, message_states
from pyspark_turtlemq.options import Options
from pyspark_turtlemq.predicates import Predicates

Split = documents.DocumentSplit | journals.JournalSplit | forecast.ForecastSplit | message_states.MessagesSplit


def read_splits(splits: Iterable[Split], options: Options, predicates: Predicates, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of these splits, in their order, with the columns of the schema."""
    spec = documents.ReadSpec(tuple(schema.names), predicates, options.body, options.mode, options.verify)
    for split in splits:
        if isinstance(split, documents.DocumentSplit):
            yield from documents.read(split, spec, schema)
        elif isinstance(split, journals.JournalSplit):
            yield from journals.read(split, spec, schema)
        elif isinstance(split, forecast.ForecastSplit):
            yield from forecast.read(split, schema)
        else:
            yield from message_states.read(split, schema)
