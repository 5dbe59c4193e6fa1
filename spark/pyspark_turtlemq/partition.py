"""An input partition as Spark ships it to a task, for batch reads and for streams; and Spark's schema in Arrow's types.

Only modules that need Spark import this one: planning and reading (`plan`, `table`) need pyarrow alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType


@dataclass
class Partition(InputPartition):
    """The splits that one task reads."""

    splits: list[Any]


def arrow_schema(schema: StructType) -> pa.Schema:
    """Spark's schema in Arrow's types, with timestamps in UTC."""
    return to_arrow_schema(schema, timezone="UTC")
