"""TurtleMQ's files as Spark DataFrames: `spark.read.format("turtlemq").load("data")`.

Spark finds this package by its name and looks for `DefaultSource`. See docs/SPARK.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_turtlemq.session import turtlemq_session
    from pyspark_turtlemq.snapshot import turtlemq_snapshot
    from pyspark_turtlemq.source import Source as DefaultSource

__all__ = ["DefaultSource", "turtlemq_session", "turtlemq_snapshot"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: finding Java needs no Spark."""
    if name == "DefaultSource":
        from pyspark_turtlemq.source import Source

        return Source
    if name == "turtlemq_session":
        from pyspark_turtlemq.session import turtlemq_session

        return turtlemq_session
    if name == "turtlemq_snapshot":
        from pyspark_turtlemq.snapshot import turtlemq_snapshot

        return turtlemq_snapshot
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
