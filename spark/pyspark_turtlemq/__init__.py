"""A Spark data source for TurtleMQ's files: `spark.read.format("turtlemq").load("data")`.

Spark finds this package by its name and looks for `DefaultSource`. Public: the names in `__all__`, and `table.read_table`.
How to use it: docs/SPARK.md. Words: docs/GLOSSARY.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_turtlemq.session import turtlemq_session
    from pyspark_turtlemq.snapshot import turtlemq_snapshot
    from pyspark_turtlemq.source import Source as DefaultSource

__all__ = ["DefaultSource", "turtlemq_session", "turtlemq_snapshot"]


def __getattr__(name: str) -> Any:
    """Import lazily: `python -m pyspark_turtlemq.java` must work without Spark."""
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
