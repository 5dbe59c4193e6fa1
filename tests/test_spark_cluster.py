"""Spark over a cluster of several shards: each machine has some of them, and one folder leads to all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.etcd_process import MISSING, is_installed
from tests.harness.shard_nodes import ShardNodes, shard_nodes
from tests.harness.shard_process import topic_in
from tests.harness.spark_session import MARKS, need_spark, spark

need_spark()
__all__ = ["spark"]
pytestmark = [*MARKS, pytest.mark.skipif(not is_installed(), reason=MISSING)]
SHARDS = 2
TOPICS = [topic_in(shard, SHARDS) for shard in range(SHARDS)]


def together(nodes: ShardNodes, folder: Path) -> Path:
    """A folder with a link to each shard, on the machine that has its only copy."""
    (folder / "shard").mkdir(parents=True)
    (folder / "SHARDS").write_text('{"shards":2}')
    for number, shard in nodes.view.shards.items():
        (node,) = shard.wanted
        (folder / "shard" / f"{number:02}").symlink_to(nodes.homes[node].home / "data" / "shard" / f"{number:02}")
    return folder


def test_spark_reads_the_shards_of_two_machines(spark: Any, tmp_path: Path) -> None:
    from turtlemq.client import Client, NewMessage

    with shard_nodes(tmp_path, "ab", shards=SHARDS, replicas=1) as nodes:
        nodes.start()
        view = nodes.until_whole("a", "b", copies=1)
        assert {shard.wanted for shard in view.shards.values()} == {("a",), ("b",)}
        with Client([home.url for home in nodes.homes.values()]) as client:
            for topic in TOPICS:
                client.put_many(topic, [NewMessage(body=n, id=f"{topic}-{n}", delay=3600) for n in range(100)])
            got = client.put(TOPICS[0], 1, id="due")
            assert [message.id for message in client.fetch(TOPICS[0], wait=10)] == [got]
        table = spark.read.format("turtlemq").option("kind", "messages").load(str(together(nodes, tmp_path / "all")))
        found = {(row["topic"], row["id"], row["state"]) for row in table.select("topic", "id", "state").collect()}
    assert found == {*((topic, f"{topic}-{n}", "sleep") for topic in TOPICS for n in range(100)), (TOPICS[0], "due", "reserve")}
