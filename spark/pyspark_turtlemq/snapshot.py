"""One moment of a data folder for many reads, held until it is let go:

with turtlemq_snapshot("data") as moment:
    sleepers = spark.read.format("turtlemq").option("snapshot", moment.name).load("data")
    settled = spark.read.format("turtlemq").option("snapshot", moment.name).option("kind", "history").load("data")
"""

from __future__ import annotations

from pathlib import Path

from pyspark_turtlemq import options, pins


def turtlemq_snapshot(path: str | Path, topic: str = "*") -> pins.Snapshot:
    """Pin all logs of the topics, at one moment. Needs a data folder that can be written to."""
    told = options.parse_options({"path": str(path), "topic": topic})
    found = pins.take_snapshot(told.path, told.topics(), pins.ORDER)
    if found.folder is None:
        raise pins.Vanished(
            f"no links can be made in {told.path / pins.FOLDER}: a snapshot needs a folder that can be written to"
        )
    return found
