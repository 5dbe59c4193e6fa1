"""The data source itself: what Spark calls. Reading is planned in `plan`, done in `documents`, `journals` and `lives`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition, Not
from pyspark.sql.types import StructType

from pyspark_turtlemq import columns as c
from pyspark_turtlemq import options, plan
from pyspark_turtlemq.partition import Partition, arrow_schema
from pyspark_turtlemq.predicates import push_filter
from pyspark_turtlemq.table import rows
from turtlemq.errors import InvalidArgument


class Source(DataSource):
    """`spark.read.format("turtlemq")`."""

    @classmethod
    def name(cls) -> str:
        return "turtlemq"

    def schema(self) -> str:
        return options.schema_ddl(options.parse_options(self.options))

    def reader(self, schema: StructType) -> Reader:
        told = options.parse_options(self.options)
        return PushingReader(told, schema) if told.pushdown else Reader(told, schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from pyspark_turtlemq.stream import StreamReader

        return StreamReader(checked(options.parse_options(self.options), schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from pyspark_turtlemq.writer import Writer, write_options

        return Writer(write_options(self.options, schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        from pyspark_turtlemq.writer import StreamWriter, write_options

        return StreamWriter(write_options(self.options, schema, overwrite, streaming=True))


class Reader(DataSourceReader):
    """A batch read."""

    def __init__(self, told: options.Options, schema: StructType) -> None:
        self.options, self.schema = checked(told, schema), schema
        self.predicates = told.where

    def partitions(self) -> list[InputPartition]:
        made = plan.make_plan(self.options, self.predicates)
        return [Partition(pieces) for pieces in made.partitions] or [Partition([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        yield from rows(partition.splits, self.options, self.predicates, arrow_schema(self.schema))


class PushingReader(Reader):
    """One that takes Spark's own filters (option `pushdown`). Not the default: Spark 4.3 keeps the plan of a filtered read with
    the DataFrame that was filtered, and takes it again for one without a filter, which then lacks rows."""

    def pushFilters(self, filters: list[Any]) -> Iterator[Any]:  # noqa: N802 - Spark's name
        """Filters narrow what is read. All go back to Spark too, for they may let through more than was asked for."""
        for one in filters:
            if not isinstance(one, Not):
                push_filter(self.predicates, type(one).__name__, tuple(one.attribute), getattr(one, "value", None))
            yield one


def checked(told: options.Options, schema: StructType) -> options.Options:
    """Options for the schema that was asked for: some of the columns that there are, with their types."""
    body = told.body
    if "body" in schema.names and body == "none":
        kinds = {"binary": "binary", "string": "string"}
        body = kinds.get(schema["body"].dataType.simpleString(), "json")
    told = replace(told, body=body)
    there = c.available_columns(told.kind, told.body, told.body_schema)
    for one in schema:
        if one.name not in there:
            raise InvalidArgument(f"kind {told.kind!r} has no column {one.name!r}; it has: {', '.join(there)}")
        type_ = one.dataType.simpleString()
        if type_ != there[one.name] and one.name != "body":
            raise InvalidArgument(f"column {one.name!r} is of type {there[one.name]}, not {type_}")
    return told
