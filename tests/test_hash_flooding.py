"""Ids that were made to share one hash: the hash has a secret seed, and lookups stay linear all the same.

Asserted are counts of documents, or bytes, that are read; never times."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import Quick, abandon
from tests.harness.server_process import running
from turtlemq import backup
from turtlemq.engine import Engine
from turtlemq.index.parts import Part, TablePart
from turtlemq.model import Message
from turtlemq.segment import ids as id_hashes
from turtlemq.segment import log
from turtlemq.segment.ids import hash_id, server_ids, server_seq
from turtlemq.segment.table import open_table
from turtlemq.settings import Settings
from turtlemq.storage.door import Door
from turtlemq.topic.dead_letters import Filter

UNSEEDED = Path(__file__).resolve().parent / "golden" / "unseeded"  # a data folder of the last version without a secret
NOW = 1_700_000_000_000
ALL = (1 << 64) - 1


def flood(count: int) -> list[str]:
    """Ids whose unseeded hashes have the same upper 42 bits, which are all that a table has: splitmix64 backwards."""
    ids: list[str] = []
    for low in range(1 << 22):
        z = 0x5DEECE66D << 22 | low
        z ^= z >> 31 ^ z >> 62
        z = z * pow(0x94D049BB133111EB, -1, 1 << 64) & ALL
        z ^= z >> 27 ^ z >> 54
        z = z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & ALL
        z ^= z >> 30 ^ z >> 60
        if (seq := (z - 0x9E3779B97F4A7C15) & ALL) < NOW << 20:  # else the server is going to give this id
            ids += server_ids(seq, 1)
            if len(ids) == count:
                break
    return ids


@dataclass
class Reads:
    """Documents that were read: all together, and the most at once."""

    documents: int = 0
    most: int = 0

    def note(self, count: int) -> None:
        self.documents += count
        self.most = max(self.most, count)


@pytest.fixture(name="reads")
def count_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads = Reads()
    read_document, read_documents = log.read_document, log.read_documents

    def one(*args: Any) -> Any:
        reads.note(1)
        return read_document(*args)

    def many(door: Door, path: Path, starts: Any, ends: Any) -> Any:
        reads.note(len(starts))
        return read_documents(door, path, starts, ends)

    monkeypatch.setattr(log, "read_document", one)
    monkeypatch.setattr(log, "read_documents", many)
    return reads


@pytest.fixture(name="one_hash")
def give_all_ids_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_hashes, "_xxh3", lambda data, seed: 0x0123_4567_89AB_CDEF)


def start(tmp_path: Path, **changes: Any) -> Engine:
    engine = Engine.open(tmp_path / "data", door=Quick(), settings=Settings(**changes))
    engine.move_group("t", "g", "earliest", 0)
    return engine


def messages(ids: list[str], due_ms: int = NOW + 1_000_000) -> list[Message]:
    return [Message(b"body", due_ms, id=id_) for id_ in ids]


def names(count: int, first: int = 0) -> list[str]:
    return [f"m{n}" for n in range(first, first + count)]


def without_secret(data: Path) -> None:
    """Hashes as of versions before the secret of the folder."""
    data.mkdir(parents=True, exist_ok=True)
    (data / "HASH_SEED").write_text("0" * 16 + "\n")


# The secret


def test_made_ids_share_their_unseeded_hashes_and_no_others() -> None:
    ids = flood(500)
    assert len(set(ids)) == 500
    assert all(server_seq(id_) is not None for id_ in ids)
    assert len({hash_id(id_, 0) >> 22 for id_ in ids}) == 1
    assert len({hash_id(id_, 7) >> 22 for id_ in ids}) == 500


def test_flood_of_ids_over_http_reads_no_document_again(tmp_path: Path) -> None:
    """Bytes read by the process, with every put of ids that shared a hash before there was a secret."""
    (tmp_path / "data" / "topic" / "t").mkdir(parents=True)
    (tmp_path / "data" / "topic" / "t" / "topic.toml").write_text("run_messages = 500\n")
    ids = flood(1_500)
    with running(tmp_path / "data") as server:

        def read_by_server() -> int:
            fields = Path(f"/proc/{server.process.pid}/io").read_text().split()
            return int(fields[fields.index("rchar:") + 1])

        for first in (0, 500):
            server.put("t", *({"id": id_, "body": 0, "delay": 9_000} for id_ in ids[first : first + 500]))
        assert list((tmp_path / "data" / "topic" / "t").glob("*.run")), "the first ids are in tables"
        before = read_by_server()
        server.put("t", *({"id": id_, "body": 0, "delay": 9_000} for id_ in ids[1_000:]))
        assert read_by_server() - before < 1_000_000, "1,000 documents for each of 500 ids would be 50 MB"


def test_hash_of_an_id_differs_between_folders_and_stays(tmp_path: Path) -> None:
    def hashes(name: str) -> list[int]:
        engine = Engine.open(tmp_path / name)
        engine.submit("t", messages(names(3)), 0)
        found = [int(h) for h in engine.topic("t").stores.index._segments.memtable.hashes[:3]]
        engine.close()
        return found

    one, other = hashes("one"), hashes("other")
    assert len({*one, *other}) == 6
    assert hashes("one") == one, "also at the next opening: nothing was appended"
    secret = tmp_path / "one" / "HASH_SEED"
    assert (secret.stat().st_mode & 0o777, len(secret.read_text())) == (0o600, 17)


def known_everywhere(engine: Engine, sleeping: list[str], ready: list[str]) -> None:
    """All these ids are found by every way, and none is stored twice."""
    assert engine.check() == []
    assert [engine.get("t", id_) is not None for id_ in sleeping] == [True] * len(sleeping)
    assert [engine.message("t", id_) is not None for id_ in ready] == [True] * len(ready)
    assert engine.submit("t", messages([*sleeping, *ready]), NOW).created == [False] * len(sleeping + ready)
    assert engine.cancel("t", sleeping[::2], NOW) == dict.fromkeys(sleeping[::2], "cancelled")
    assert engine.submit("t", messages(sleeping[1::2]), NOW).created == [False] * len(sleeping[1::2])


def store(engine: Engine) -> tuple[list[str], list[str]]:
    """Ids that sleep in a sealed segment, in runs and in the memtable, and ids that are ready, in tables and in the tail."""
    ready = names(20, 1_000)
    for first in range(0, 20, 4):
        engine.submit("t", messages(ready[first : first + 4], 10), 0)
        engine.tick(10)
    sleeping = [*names(40), "t0000000000000"]
    for first in range(0, 41, 4):
        engine.submit("t", messages(sleeping[first : first + 4]), NOW)
    engine.topic("t").compact()
    return sleeping, ready


def parts_of(engine: Engine) -> list[Part]:
    return engine.topic("t").stores.index._segments.parts


SMALL = {"run_messages": 8, "segment_messages": 30}


@pytest.mark.parametrize("secret", [None, "", "x" * 16 + "\n", "00f0" * 4 + "\n", "f" * 16 + "\n", "0" * 16 + "\n"])
@pytest.mark.parametrize("killed", [False, True])
def test_lost_or_changed_secret_loses_and_doubles_no_id(tmp_path: Path, secret: str | None, killed: bool) -> None:
    engine = start(tmp_path, **SMALL)
    sleeping, ready = store(engine)
    seeds = {part.seed for part in parts_of(engine)}
    abandon(engine) if killed else engine.close()
    (tmp_path / "data" / "HASH_SEED").unlink()
    if secret is not None:
        (tmp_path / "data" / "HASH_SEED").write_text(secret)
    engine = start(tmp_path, **SMALL)
    assert len(seeds) == 1
    assert len({part.seed for part in parts_of(engine)}) == 2, "tables of the old secret are used on"
    known_everywhere(engine, sleeping, ready)
    engine.close()


def test_full_disk_does_not_keep_a_folder_without_secret_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_secret(tmp_path / "data")
    engine = start(tmp_path, **SMALL)
    sleeping, ready = store(engine)
    engine.close()
    (tmp_path / "data" / "HASH_SEED").unlink()
    replace = Door.replace

    def full(self: Door, path: Path, *args: Any, **more: Any) -> None:
        if path.name == "HASH_SEED":
            raise OSError("no room")
        replace(self, path, *args, **more)

    monkeypatch.setattr(Door, "replace", full)
    engine = start(tmp_path, **SMALL)
    assert not (tmp_path / "data" / "HASH_SEED").exists()
    known_everywhere(engine, sleeping, ready)
    engine.close()


def test_secret_travels_with_a_backup(tmp_path: Path) -> None:
    engine = start(tmp_path, **SMALL)
    sleeping, ready = store(engine)
    engine.close()
    door = Door()
    name, _ = backup.make(door, backup.files_of_stopped(door, tmp_path / "data"), tmp_path / "backups", NOW)
    backup.restore(door, tmp_path / "backups" / name, tmp_path / "new" / "data")
    secrets = {(root / "data" / "HASH_SEED").read_bytes() for root in (tmp_path, tmp_path / "new")}
    assert len(secrets) == 1
    engine = start(tmp_path / "new", **SMALL)
    assert len({part.seed for part in parts_of(engine)}) == 1
    known_everywhere(engine, sleeping, ready)
    engine.close()


# Folders of older versions


def test_folder_of_a_version_without_secret_is_used_and_migrates(tmp_path: Path) -> None:
    data = Path(shutil.copytree(UNSEEDED, tmp_path / "data"))
    tables = {path: path.stat().st_ino for path in data.glob("topic/t/*") if path.suffix in (".run", ".index")}
    assert {path.name[:5] for path in tables} == {"delay", "ready"}
    engine = start(tmp_path, **SMALL)
    logs = logs_of(engine)
    assert {path: path.stat().st_ino for path in tables} == tables, "no table was built again"
    assert [part.seed for part in parts_of(engine) if isinstance(part, TablePart)].count(0) >= 2
    assert {table.seed for segment in logs.ready.segments for table in segment.tables} == {0}
    known_everywhere(engine, [*names(40), "t0000000000000"], names(20, 1_000))
    engine.submit("t", messages(names(40, 2_000)), NOW + 1)
    for segment in list(engine.topic("t").stores.index._segments.by_base.values()):
        engine.topic("t").stores.index.maintenance.compact(segment.base, 1_000)
    engine.compact("t")
    assert 0 not in {part.seed for part in parts_of(engine)}, "compaction and seals make tables with the secret"
    assert engine.check() == []
    engine.close()


@pytest.mark.parametrize("store_name", ["sleeping", "ready"])
def test_flooded_table_without_secret_is_built_again(tmp_path: Path, reads: Reads, store_name: str) -> None:
    ids = flood(1_200)
    without_secret(tmp_path / "data")
    engine = start(tmp_path, run_messages=500)
    due_ms = NOW + 10**9 if store_name == "sleeping" else NOW
    for first in range(0, 1_200, 300):
        engine.submit("t", messages(ids[first : first + 300], due_ms), NOW)
        engine.tick(NOW)
    engine.close()
    (tmp_path / "data" / "HASH_SEED").unlink()
    engine = start(tmp_path, run_messages=500)
    reads.documents = 0
    assert engine.submit("t", messages(ids), NOW).created == [False] * 1_200
    assert reads.documents < 5 * 1_200, "and not 500 for each id"
    suffix = "delay" if store_name == "sleeping" else "ready"
    tables = [open_table(Door(), path) for path in (tmp_path / "data" / "topic" / "t").glob(f"{suffix}*.run")]
    assert tables
    assert 0 not in {table.seed for table in tables if table is not None}
    assert engine.check() == []
    engine.close()


# Costs, if all ids have one hash in spite of the seed

COUNT, ASKED = 2_000, 300


@pytest.fixture(name="flooded")
def an_engine(tmp_path: Path, one_hash: None) -> Iterator[Engine]:
    engine = start(tmp_path, run_messages=1_500)
    yield engine
    engine.close()


def test_colliding_sleepers_are_read_once_for_all_ids(flooded: Engine, reads: Reads) -> None:
    flooded.submit("t", messages(names(COUNT)), NOW)
    reads.documents = reads.most = 0
    wanted = [*names(ASKED), *names(ASKED, COUNT)]
    assert flooded.submit("t", messages(wanted), NOW).duplicates == ASKED
    assert reads.documents <= 2 * (COUNT + ASKED), "once to see that some are known, once to see which"
    reads.documents = 0
    flooded.cancel("t", wanted, NOW)
    assert reads.documents <= 2 * (COUNT + 2 * ASKED)
    assert flooded.get("t", "m1999") is not None
    assert flooded.check() == []


def test_colliding_ready_ids_are_read_once_for_all_ids(flooded: Engine, reads: Reads) -> None:
    flooded.submit("t", messages(names(COUNT), NOW), NOW)
    while flooded.stats("t").sleep:
        flooded.tick(NOW)
    reads.documents = reads.most = 0
    wanted = [*names(ASKED), *names(ASKED, COUNT)]
    assert flooded.submit("t", messages(wanted), NOW).duplicates == ASKED
    assert reads.documents <= 5 * (COUNT + ASKED), "the Index holds them still: both stores are asked twice"
    assert flooded.check() == []


def test_many_candidates_are_read_in_slices(flooded: Engine, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turtlemq.index.segments._READ_DOCUMENTS", 100)
    monkeypatch.setattr("turtlemq.broker.ready_lookup._READ_DOCUMENTS", 100)
    flooded.submit("t", messages(names(COUNT), NOW), NOW)
    reads.most = 0
    assert flooded.submit("t", messages(names(ASKED, COUNT // 2)), NOW).duplicates == ASKED
    assert reads.most == 100
    monkeypatch.setattr("turtlemq.index.segments._READ_BYTES", 1_000)
    reads.most = 0
    assert flooded.get("t", "m5") is not None
    assert reads.most < 20, "bytes have a limit, too"
    while flooded.stats("t").sleep:
        flooded.tick(NOW)
    reads.most = 0
    flooded.message("t", "m5")
    assert 0 < reads.most <= 100


def test_colliding_retries_and_dead_letters_are_read_once(flooded: Engine, reads: Reads) -> None:
    flooded.configure("t", max_attempts=2, backoff_base_ms=3_600_000, backoff_jitter="none")
    flooded.submit("t", messages(names(400), NOW), NOW)
    flooded.tick(NOW)
    later = NOW + 4_000_000
    for now_ms in (NOW, later):
        flooded.tick(now_ms)
        taken = flooded.reserve("t", "g", 400, now_ms).ids
        reads.documents = 0
        flooded.ack("t", "g", [f"-{id_}" for id_ in taken], now_ms)
        assert reads.documents < 10 * 400
    assert flooded.stats("t").dead == 400
    reads.documents = 0
    view = flooded.message("t", "m0")
    assert view is not None
    assert view.groups["g"]["state"] == "dead"
    assert reads.documents < 10 * 400
    letters = [letter for letter in flooded.topic("t").view.dead_letters.all(Filter()) if int(letter.id[1:]) % 2]
    reads.documents = 0
    assert flooded.requeue("t", letters, later) == 200
    assert reads.documents < 20 * 400
    assert flooded.stats("t").dead == 200
    assert flooded.check() == []


def test_groups_of_candidates_give_the_newest_document_of_each_id(flooded: Engine) -> None:
    """An older document with the wanted id, behind a newer one with the same hash."""
    chance = random.Random(1)
    ids = names(50)
    chance.shuffle(ids)
    for id_ in ids:
        flooded.submit("t", messages([id_], NOW), NOW)
        flooded.tick(NOW)
    ready = flooded.topic("t").stores.broker.ready
    assert ready.find_ids(names(60)) == {id_: offset for offset, id_ in enumerate(ids)}
