"""A snapshot of a data folder that several reads share, pinned until it is released. For example:

with turtlemq_snapshot("data") as snapshot:
    sleepers = spark.read.format("turtlemq").option("snapshot", snapshot.name).load("data")
    settled = spark.read.format("turtlemq").option("snapshot", snapshot.name).option("kind", "history").load("data")
"""

from __future__ import annotations

from pathlib import Path

from pyspark_turtlemq import pins
from pyspark_turtlemq.options import parse_options
from pyspark_turtlemq.pin_owners import FOLDER
from pyspark_turtlemq.shard_layout import ShardLayout
from pyspark_turtlemq.snapshot_files import ALL_LOGS, Vanished


def turtlemq_snapshot(path: str | Path, topic: str = "*") -> pins.Snapshot:
    """Pin all logs of the topics at one moment. Requires a data folder that can be written to."""
    options = parse_options({"path": str(path), "topic": topic})
    snapshot = pins.take_snapshot(options.path, ShardLayout.of(options.path).names_of(options.topics()), ALL_LOGS)
    if snapshot.folder is None:
        raise Vanished(f"no links can be made in {options.path / FOLDER}: a snapshot needs a folder that can be written to")
    return snapshot
