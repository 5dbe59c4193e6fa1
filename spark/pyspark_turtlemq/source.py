"""The data source as Spark sees it: schema, batch reader, stream reader, writers. Thin: every method hands on to another module.

Reads are planned in `plan` and done by the readers of the splits (`splits`); streams live in `stream`, writes in `writer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition, Not
from pyspark.sql.types import StructType

from pyspark_turtlemq.kinds import available_columns
from pyspark_turtlemq.options import Options, parse_options, schema_ddl
from pyspark_turtlemq.partition import Partition, arrow_schema
from pyspark_turtlemq.plan import make_plan
from pyspark_turtlemq.predicates import push_filter
from pyspark_turtlemq.splits import read_splits
from turtlemq.errors import InvalidArgument


class Source(DataSource):
    """`spark.read.format("turtlemq")`."""

    @classmethod
    def name(cls) -> str:
        return "turtlemq"

    def schema(self) -> str:
        return schema_ddl(parse_options(self.options))

    def reader(self, schema: StructType) -> Reader:
        options = parse_options(self.options)
        return PushdownReader(options, schema) if options.pushdown else Reader(options, schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from pyspark_turtlemq.stream import StreamReader

        return StreamReader(check_schema(parse_options(self.options), schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from pyspark_turtlemq.writer import Writer, write_options

        return Writer(write_options(self.options, schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        from pyspark_turtlemq.writer import StreamWriter, write_options

        return StreamWriter(write_options(self.options, schema, overwrite, streaming=True))


class Reader(DataSourceReader):
    """A batch read."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options, self.schema = check_schema(options, schema), schema
        self.predicates = options.where

    def partitions(self) -> list[InputPartition]:
        plan = make_plan(self.options, self.predicates)
        return [Partition(splits) for splits in plan.partitions] or [Partition([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        yield from read_splits(partition.splits, self.options, self.predicates, arrow_schema(self.schema))


class PushdownReader(Reader):
    """A batch read that takes Spark's own filters (option `pushdown`). Not the default: Spark 4.3 keeps the plan of a filtered
    read with the DataFrame that was filtered, and uses it again for that DataFrame without the filter; rows are missing then."""

    def pushFilters(self, filters: list[Any]) -> Iterator[Any]:  # noqa: N802 - Spark's name
        """Narrow the read. Returns every filter to Spark, which applies them all again: predicates may keep too many rows."""
        for filter_ in filters:
            if not isinstance(filter_, Not):
                push_filter(self.predicates, type(filter_).__name__, tuple(filter_.attribute), getattr(filter_, "value", None))
            yield filter_


def check_schema(options: Options, schema: StructType) -> Options:
    """Check a user's schema against the columns of the kind. Returns the options with the body form that the schema implies."""
    body = options.body
    if "body" in schema.names and body == "none":
        forms = {"binary": "binary", "string": "string"}
        body = forms.get(schema["body"].dataType.simpleString(), "json")
    options = replace(options, body=body)
    available = available_columns(options.kind, options.body, options.body_schema)
    for column in schema:
        if column.name not in available:
            raise InvalidArgument(f"kind {options.kind!r} has no column {column.name!r}; it has: {', '.join(available)}")
        type_ = column.dataType.simpleString()
        if type_ != available[column.name] and column.name != "body":
            raise InvalidArgument(f"column {column.name!r} is of type {available[column.name]}, not {type_}")
    return options
