"""Folders of several shards: split from one, at every crash point; backed up, restored, checked, compacted and read by Spark."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.harness.doors import Failing
from tests.harness.server_process import run, running
from tests.harness.shard_process import topic_in
from turtlemq.engine import Engine
from turtlemq.errors import Corrupt, InvalidArgument
from turtlemq.model import Message
from turtlemq.shard_folders import Layout, data_folders, prepare, read_layout, refuse_shards, shard_folder, write_layout
from turtlemq.shard_split import plan, split
from turtlemq.shards import shard_of, shards_of
from turtlemq.storage.door import Door

NOW, SHARDS = 1_790_000_000_000, 3
TOPICS = [topic_in(shard, SHARDS, base) for shard in range(SHARDS) for base in ("a", "b")]
FEW = TOPICS[::3]


def made(root: Path, clean: bool = True, topics: list[str] = TOPICS) -> Path:
    """The folder of a server without shards: each topic has a sleeper, a ready message and one in reserve."""
    engine = Engine.open(root)
    for topic in topics:
        engine.submit(topic, [Message(topic.encode(), NOW + n * 100_000, f"m{n}") for n in range(3)], NOW)
        engine.tick(NOW + 150_000)
        engine.reserve(topic, "default", 1, NOW + 150_000)
    if clean:
        engine.close()
        return root
    left = root.with_name("killed")
    shutil.copytree(root, left, ignore=shutil.ignore_patterns("LOCK"))
    engine.close()
    return left


def contents(folders: list[Path]) -> dict[str, tuple[int, int, int]]:
    """Sleeping, ready and reserved messages of every topic in these data folders. Opens them."""
    found = {}
    for folder in folders:
        engine = Engine.open(folder)
        assert not engine.trouble
        for topic in engine.topics:
            assert topic not in found, "a topic is in two shards"
            stats = engine.stats(topic)
            found[topic] = stats.sleep, stats.ready, stats.reserve
        engine.close()
    return found


EXPECTED = dict.fromkeys(TOPICS, (1, 1, 1))


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
def test_a_split_folder_holds_every_message(tmp_path: Path, clean: bool) -> None:
    root, door = made(tmp_path / "data", clean), Door()
    split(door, root, plan(door, root, SHARDS))
    folders = data_folders(door, root)
    assert [folder.name for folder in folders] == ["00", "01", "02"]
    assert all((folder / "CLEAN").exists() == clean for folder in folders)
    assert sorted(os.listdir(root)) == ["SHARDS", "shard"] if not clean else ["LOCK", "SHARDS", "shard"]
    assert contents(folders) == EXPECTED
    for number, folder in enumerate(folders):
        assert {shard_of(name, SHARDS) for name in os.listdir(folder / "topic")} == {number}
    assert plan(door, root, SHARDS).is_done


def test_a_split_is_finished_after_a_crash_at_any_call(tmp_path: Path) -> None:
    original, at, crashes = made(tmp_path / "data", topics=FEW), 0, 0
    while True:
        root, door = tmp_path / f"at{at}", Failing(at, "EIO")
        shutil.copytree(original, root)
        try:
            split(door, root, plan(door, root, SHARDS))
        except OSError:
            crashes += 1
        else:
            break
        layout = read_layout(Door(), root)
        if layout is not None and layout.unfinished:
            with pytest.raises(InvalidArgument, match=f"turtlemq shards split --data .* --shards {SHARDS}"):
                prepare(Door(), root, SHARDS)
            with pytest.raises(InvalidArgument, match=f"turtlemq shards split --data .* --shards {SHARDS}"):
                refuse_shards(root)
        split(Door(), root, plan(Door(), root, SHARDS))
        if at % 30 == 0:
            assert contents(data_folders(Door(), root)) == dict.fromkeys(FEW, (1, 1, 1))
        else:
            names = {path.name for path in root.glob("shard/*/topic/*")}
            assert (names, (root / "topic").exists()) == (set(FEW), False)
        shutil.rmtree(root)
        at += 1
    assert crashes > 40


def test_other_numbers_and_folders_are_refused(tmp_path: Path) -> None:
    root, door = made(tmp_path / "data"), Door()
    for shards in (0, 1, 65):
        with pytest.raises(InvalidArgument, match="into 2 to 64 shards"):
            plan(door, root, shards)
    with pytest.raises(InvalidArgument, match="is no data folder"):
        plan(door, tmp_path, 2)
    split(door, root, plan(door, root, 2))
    with pytest.raises(InvalidArgument, match="was split into 2 shards"):
        plan(door, root, 3)
    with pytest.raises(InvalidArgument, match="holds 2 shards, not 3"):
        prepare(door, root, 3)
    (root / "SHARDS").unlink()
    with pytest.raises(InvalidArgument, match="no file SHARDS"):
        prepare(door, root, 2)
    (root / "SHARDS").write_text("many")
    with pytest.raises(Corrupt, match="write the number"):
        prepare(door, root, 2)


def test_links_to_topics_go_on_leading_to_them(tmp_path: Path) -> None:
    root, door, topic = made(tmp_path / "data"), Door(), TOPICS[0]
    (root / "topic" / topic).rename(tmp_path / "elsewhere")
    (root / "topic" / topic).symlink_to("../../elsewhere")
    with pytest.raises(InvalidArgument, match="absolute"):
        plan(door, root, SHARDS)
    assert read_layout(door, root) is None
    (root / "topic" / topic).unlink()
    (root / "topic" / topic).symlink_to(tmp_path / "elsewhere")
    split(door, root, plan(door, root, SHARDS))
    assert contents(data_folders(door, root)) == EXPECTED


# The command line


def test_split_on_the_command_line_serves_what_was_there(tmp_path: Path) -> None:
    data = made(tmp_path / "data")
    dry = run("shards", "split", "--data", str(data), "--shards", str(SHARDS), "--dry-run")
    assert (dry.returncode, read_layout(Door(), data)) == (0, None)
    assert f"{TOPICS[-1]}: shard {SHARDS - 1}" in dry.stdout
    done = run("shards", "split", "--data", str(data), "--shards", str(SHARDS))
    assert (done.returncode, f"--shards {SHARDS}" in done.stdout) == (0, True), done.stderr
    assert "already" in run("shards", "split", "--data", str(data), "--shards", str(SHARDS)).stdout
    assert run("shards", "split", "--data", str(data), "--shards", "9").returncode == 1
    with running(data, "--shards", str(SHARDS)) as server:
        assert [row["topic"] for row in server.ok("GET", "/v1/topics")["topics"]] == sorted(TOPICS)
        assert all(server.fetch(topic) for topic in TOPICS)
        busy = run("shards", "split", "--data", str(data), "--shards", str(SHARDS))
        assert (busy.returncode, "in use by process" in busy.stderr) == (1, True)


def test_files_of_all_shards_are_backed_up_checked_and_compacted(tmp_path: Path) -> None:
    data, backups, restored = tmp_path / "data", tmp_path / "backups", tmp_path / "restored"
    with running(data, "--shards", str(SHARDS)) as server:
        for topic in TOPICS:
            server.put(topic, {"id": "m", "body": topic, "delay": 3600}, {"body": 1})
        live = run("backup", str(backups), "--data", str(data), "--url", server.url, "--json")
        assert live.returncode == 0, live.stderr
        assert json.loads(live.stdout)["live"]
        assert not list(data.glob("shard/*/PINNED/1*"))
    stopped = run("backup", str(backups), "--data", str(data), "--json")
    assert (stopped.returncode, json.loads(stopped.stdout)["live"]) == (0, False)
    for backup in sorted(backups.glob("2*")):
        again = restored / backup.name
        assert run("backup", str(backup), "--verify").returncode == 0
        told = run("restore", str(backup), "--data", str(again))
        assert f"--shards {SHARDS}" in told.stdout, told.stderr
        checked = run("check", "--data", str(again), "--json")
        assert json.loads(checked.stdout) == {"topics": len(TOPICS), "problems": [], "notes": []}
        assert contents(data_folders(Door(), again)) == dict.fromkeys(TOPICS, (1, 1, 0))
    assert run("compact", TOPICS[-1], "--data", str(data)).returncode == 0
    assert run("compact", "nothing", "--data", str(data)).returncode == 1
    victim = next((data / "shard/02/topic").glob("*/delay_*.bson"))
    victim.write_bytes(victim.read_bytes()[:-20] + b"x" * 20)
    found = run("check", "--data", str(data))
    assert (found.returncode, found.stdout.startswith("shard/02/")) == (1, True), found.stdout


def test_an_interrupted_restore_is_never_served(tmp_path: Path) -> None:
    write_layout(Door(), tmp_path, Layout(2, unfinished="restore"))
    for words in (["serve", "--port", "0", "--shards", "2"], ["serve", "--port", "0"]):
        refused = run(*words, "--data", str(tmp_path))
        assert (refused.returncode, "did not come to its end" in refused.stderr) == (2, True)
    assert run("check", "--data", str(tmp_path)).returncode == 1


def test_spark_reads_the_topics_of_all_shards(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="not run: Spark's packages are not installed")
    pytest.importorskip("pyspark", reason="not run: Spark's packages are not installed")
    from pyspark_turtlemq.snapshot import turtlemq_snapshot
    from tests.harness.spark_data import rows

    root, door = made(tmp_path / "data"), Door()
    before = rows(root, columns="topic,id,state", kind="messages")
    split(door, root, plan(door, root, SHARDS))
    after = rows(root, columns="topic,id,state", kind="messages")
    assert sorted(map(str, after)) == sorted(map(str, before))
    assert {row["topic"] for row in rows(root, topic=TOPICS[1], columns="topic")} == {TOPICS[1]}
    with turtlemq_snapshot(root) as snapshot:
        for file in (shard_folder(root, 0) / "topic" / TOPICS[0]).glob("*.bson"):
            file.unlink()
        pinned = rows(root, columns="topic,id,state", kind="messages", snapshot=snapshot.name)
        assert TOPICS[0] in {row["topic"] for row in pinned}


def test_files_of_a_topic_with_partitions_are_those_of_one_topic(tmp_path: Path) -> None:
    data, backup, restored = tmp_path / "data", tmp_path / "backups", tmp_path / "restored"
    with running(data, "--shards", str(SHARDS)) as server:
        server.ok("PUT", "/v1/topics/clicks", {"partitions": SHARDS, "ttr": 7})
        server.put("clicks", *({"id": f"m{n}", "body": n, "delay": 3600} for n in range(30)))
        assert run("backup", str(backup), "--data", str(data), "--url", server.url).returncode == 0
    assert run("restore", str(backup), "--data", str(restored)).returncode == 0
    assert json.loads(run("check", "--data", str(restored), "--json").stdout)["problems"] == []
    assert json.loads(run("compact", "clicks", "--data", str(restored), "--json").stdout)["bytes"] > 0
    with running(restored, "--shards", str(SHARDS)) as again:
        shown = again.ok("GET", "/v1/topics/clicks")
        assert (shown["stats"]["sleep"], shown["settings"]["ttr"], shown["settings"]["partitions"]) == (30, 7, SHARDS)
    home = shards_of("clicks", SHARDS, SHARDS)[0]
    topic = shard_folder(restored, home) / "topic/clicks"
    topic.rename(tmp_path / "lost")
    checked = run("check", "--data", str(restored))
    assert (checked.returncode, checked.stdout.count("has no partition 0")) == (1, SHARDS - 1)


def test_spark_reads_all_partitions_of_a_topic(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="not run: Spark's packages are not installed")
    pytest.importorskip("pyspark", reason="not run: Spark's packages are not installed")
    from pyspark_turtlemq.snapshot import turtlemq_snapshot
    from tests.harness.spark_data import rows

    with running(tmp_path / "data", "--shards", str(SHARDS)) as server:
        server.ok("PUT", "/v1/topics/clicks", {"partitions": SHARDS})
        server.put("clicks", *({"id": f"m{n}", "body": n, "delay": 3600 * (n % 2)} for n in range(30)))
        server.put("other", {"id": "x", "body": 1})
        server.ack("clicks", *(message["id"] for message in server.fetch("clicks", max=5)))
        root = server.data
        with turtlemq_snapshot(root) as snapshot:
            pinned = rows(root, topic="clicks", columns="topic,id,state", kind="messages", snapshot=snapshot.name)
        found = rows(root, topic="clicks", columns="topic,id,state", kind="messages")
    assert sorted(map(str, found)) == sorted(map(str, pinned))
    assert sorted(row["id"] for row in found) == sorted(f"m{n}" for n in range(30))
    assert {row["topic"] for row in found} == {"clicks"}
    assert len([row for row in found if row["state"] == "history"]) == 5
    assert len(rows(root, topic="clicks", kind="ready", columns="id")) == 15
