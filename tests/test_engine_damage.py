"""Damaged bytes in the files of the broker: named, contained, never served; and crash cuts at every byte of a short story."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import SETTINGS, Quick, _fields, abandon, messages
from turtlemq.broker.group import Retry
from turtlemq.engine import Engine
from turtlemq.errors import Corrupt, NotOurs, Unavailable
from turtlemq.model import Message, Priority
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.scan import scan
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import Filter


class Bare(Quick):
    """Syncs nothing, and keeps no ballast."""

    keeps_room = False


def reopen(root: Path, **changes: Any) -> Engine:
    return Engine.open(root / "data", door=Bare(), settings=Settings(**{**_fields(SETTINGS), **changes}))


def folder(root: Path) -> Path:
    return root / "data" / "topic" / "t"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x41
    path.write_bytes(data)


def _lived(root: Path) -> list[str]:
    """A topic with something in every file, stopped properly. Returns the ids that are still to come."""
    engine = reopen(root)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(9), 0)
    engine.tick(10)
    ids = engine.reserve("t", "g", 5, 10, ttr_ms=100).ids
    engine.ack("t", "g", [*ids[:2], f"-{ids[2]}"], 11, error="no")
    again = engine.reserve("t", "g", 9, 50, ttr_ms=100).ids
    assert again[0] == "m2"
    engine.ack("t", "g", ["-m2"], 51, error="no")
    assert engine.stats("t").dead == 1
    engine.submit("t", messages(3, 20, due=500_000), 60)
    engine.close()
    return [*ids[3:], *again[1:], "m20", "m21", "m22"]


def _drain(engine: Engine) -> list[str]:
    got: list[str] = []
    for now in (600_000, 700_000, 800_000):
        engine.tick(now)
        out = engine.reserve("t", "g", 100, now).ids
        engine.ack("t", "g", out, now)
        got += out
    return got


@pytest.mark.parametrize("kind", ["ready", "reserve", "history", "delay", "dead/delay"])
@pytest.mark.parametrize("at", [6, 30, 120])
def test_a_damaged_header_is_named_and_everything_behind_it_is_served(tmp_path: Path, kind: str, at: int) -> None:
    expected = _lived(tmp_path)
    path = folder(tmp_path) / f"{kind}_0000000000.bson"
    flip(path, at)
    (folder(tmp_path) / "offset").unlink()
    engine = reopen(tmp_path)
    assert any(d.file == path.name and d.position == 0 for d in engine.damage()["t"])
    assert [letter.id for letter in engine.topic("t").view.dead_letters.all(Filter())] == ["m2"]
    assert sorted(_drain(engine)) == sorted(expected)
    assert engine.stats("t").history == 2 + len(expected)
    abandon(engine)
    engine = reopen(tmp_path)
    assert _drain(engine) == [], "what was written since is there as well"
    assert engine.stats("t").history == 2 + len(expected)
    engine.close()


@pytest.mark.parametrize("name", ["delay_0000000000.bson", "dead/delay_0000000000.bson"])
@pytest.mark.parametrize("at", [0, 6, 40])
def test_a_damaged_header_of_an_empty_file_costs_nothing(tmp_path: Path, name: str, at: int) -> None:
    engine = reopen(tmp_path)
    engine.topic("t", create=True)
    engine.close()
    flip(folder(tmp_path) / name, at)
    engine = reopen(tmp_path)
    assert len(engine.damage()["t"]) == 1
    engine.submit("t", messages(2), 0)
    engine.move_group("t", "g", "earliest", 0)
    assert _drain(engine) == ["m0", "m1"]
    engine.close()


@pytest.mark.parametrize("kind", ["ready", "reserve", "history", "delay"])
def test_a_file_that_was_never_ours_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    _lived(tmp_path)
    (folder(tmp_path) / f"{kind}_0000000000.bson").write_bytes(b"%PDF-1.7 something else altogether" * 40)
    engine = reopen(tmp_path)
    with pytest.raises(Unavailable, match=kind):
        engine.topic("t", create=True)
    with pytest.raises(Unavailable, match=kind):
        engine.configure("t", max_attempts=3)
    assert isinstance(engine.trouble["t"], NotOurs)
    assert [kind in line for line in engine.check()] == [True]
    engine.submit("other", messages(1), 0)
    assert engine.stats("other").sleep == 1, "the other topics are served"
    engine.close()
    assert "t" in f.decode_checked((tmp_path / "data" / "CLEAN").read_bytes())[0]["topics"], "its own mark is kept"


def test_unreadable_settings_close_their_topic_only(tmp_path: Path) -> None:
    _lived(tmp_path)
    for text in (
        "max_attempts = ",
        "max_attempts = -1",
        "nonsense = 1",
        "\udcff",
        f"ttr_ms = {'[' * 9_000}",
        f"ttr_ms = {'9' * 5_000}",
    ):
        (folder(tmp_path) / "topic.toml").write_text(text, errors="surrogateescape")
        engine = reopen(tmp_path)
        assert "topic.toml" in str(engine.trouble["t"])
        engine.submit("other", messages(1), 0)
        engine.close()


@pytest.mark.parametrize("text", ["", "one", "\u00b2", "9" * 5_000])
def test_a_format_that_is_no_number_is_named(tmp_path: Path, text: str) -> None:
    _lived(tmp_path)
    (tmp_path / "data" / "FORMAT").write_text(text)
    with pytest.raises(Corrupt, match="FORMAT should hold a format number"):
        reopen(tmp_path)


@pytest.mark.parametrize("kind", ["reserve", "history"])
def test_documents_without_an_event_are_named_and_left_out(tmp_path: Path, kind: str) -> None:
    """Those of another kind of file, which stands there under a wrong name and has lost its head."""
    _lived(tmp_path)
    path = folder(tmp_path) / f"{kind}_0000000000.bson"
    path.write_bytes((folder(tmp_path) / "delay_0000000000.bson").read_bytes())
    flip(path, 0)
    (folder(tmp_path) / "offset").unlink()
    engine = reopen(tmp_path)
    assert any(d.file == path.name and d.reason == "it tells of no event" for d in engine.damage()["t"])
    assert {"m20", "m21", "m22"} <= set(_drain(engine))
    engine.close()


def test_after_a_clean_stop_a_flipped_last_batch_is_damage(tmp_path: Path) -> None:
    engine = reopen(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    for n in range(3):
        engine.submit("t", messages(4, 4 * n, due=10 + n), 0)
        engine.tick(10 + n)
    engine.close()
    path = folder(tmp_path) / "ready_0000000000.bson"
    flip(path, path.read_bytes().rindex(b"m9\0") + 12)
    engine = reopen(tmp_path)
    assert [d.file for d in engine.damage()["t"]] == [path.name]
    assert _drain(engine) == [f"m{n}" for n in range(12) if n != 9], "nothing was handed off a second time"
    assert engine.groups("t")["g"].ready == 0
    engine.close()


@pytest.mark.parametrize("crash", [False, True])
def test_a_damaged_head_of_the_last_batch_hands_nothing_off_twice(tmp_path: Path, crash: bool) -> None:
    engine = reopen(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    for n in range(3):
        engine.submit("t", messages(4, 4 * n, due=10 + n), 0)
        engine.tick(10 + n)
    engine.close()
    path = folder(tmp_path) / "ready_0000000000.bson"
    flip(path, _heads(path)[-1] + 20)
    engine = reopen(tmp_path)
    assert any(d.file == path.name for d in engine.damage()["t"])
    if crash:
        abandon(engine)
        engine = reopen(tmp_path)
    assert _drain(engine) == [f"m{n}" for n in range(12)]
    engine.close()


def _heads(path: Path) -> list[int]:
    data = path.read_bytes()
    found = scan(data, f.decode_header(data, path.name)[1], len(data), sealed=True)
    return [int(at) for at, flags in zip(found.positions, found.flags, strict=True) if flags & f.HANDOFF]


def _several(root: Path) -> list[Path]:
    """Eighty messages handed off, four at a time, and a proper stop. Returns the files of the ready log."""
    engine = reopen(root, segment_bytes=4096)
    engine.move_group("t", "g", "earliest", 0)
    for n in range(0, 80, 4):
        engine.submit("t", messages(4, n, due=10 + n), n)
        engine.tick(10 + n)
    engine.close()
    return sorted(folder(root).glob("ready_*.bson"))


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("tables", [False, True])
def test_a_damaged_batch_head_in_an_older_segment_loses_nothing(tmp_path: Path, which: int, tables: bool) -> None:
    files = _several(tmp_path)
    assert len(files) > 2
    flip(files[1], _heads(files[1])[which] + 20)
    if not tables:
        for table in folder(tmp_path).glob("ready_*.run"):
            table.unlink()
        (folder(tmp_path) / "offset").unlink()
    engine = reopen(tmp_path, segment_bytes=4096)
    assert _drain(engine) == [f"m{n}" for n in range(80)]
    assert tables or any(d.file == files[1].name for d in engine.damage()["t"])
    engine.close()


@pytest.mark.parametrize("which", [0, 1])
def test_an_emptied_older_segment_costs_its_own_messages_only(tmp_path: Path, which: int) -> None:
    """Its messages are known to have been there, and are nowhere: no place in a file is asked for them."""
    files = _several(tmp_path)
    lost = {f"m{n}" for n in range(80) if b"\0m%d\0" % n in files[which].read_bytes()}
    assert 0 < len(lost) < 80
    os.truncate(files[which], 0)
    for cache in (*folder(tmp_path).glob("ready_*.run"), *folder(tmp_path).glob("ready_*.index"), folder(tmp_path) / "offset"):
        cache.unlink()
    engine = reopen(tmp_path, segment_bytes=4096)
    assert any(d.file == files[which].name for d in engine.damage()["t"])
    assert isinstance(engine.check(), list)
    assert set(_drain(engine)) == {f"m{n}" for n in range(80)} - lost
    engine.close()


@pytest.mark.parametrize("kind", ["reserve", "history"])
def test_after_a_clean_stop_a_flipped_last_event_is_reported(tmp_path: Path, kind: str) -> None:
    expected = _lived(tmp_path)
    path = folder(tmp_path) / f"{kind}_0000000000.bson"
    flip(path, path.stat().st_size - 30)
    size = path.stat().st_size
    engine = reopen(tmp_path)
    assert path.stat().st_size == size, "nothing is cut off"
    assert sorted(_drain(engine)) == sorted(expected)
    assert engine.stats("t").history == 2 + len(expected)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ready", "reserve", "history", "delay"])
def test_a_crash_at_any_byte_leaves_old_or_new_state(tmp_path: Path, kind: str) -> None:
    """Files grow one after the other; here the last write to each is cut at every byte, or every fifth; the others are whole."""
    engine = reopen(tmp_path / "story")
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", [*messages(3), Message(b"", 90_000, id="later")], 0)
    engine.tick(10)
    engine.ack("t", "g", engine.reserve("t", "g", 1, 10).ids, 11)
    engine.topics["t"].checkpoint()
    before = {path.name: path.stat().st_size for path in folder(tmp_path / "story").glob("*.bson")}
    steps: dict[str, Callable[[], object]] = {
        "delay": lambda: engine.submit("t", messages(2, 3, due=20), 12),
        "ready": lambda: (engine.submit("t", messages(2, 3, due=20), 12), engine.tick(20)),
        "reserve": lambda: engine.reserve("t", "g", 2, 21, ttr_ms=50),
        "history": lambda: engine.ack("t", "g", engine.reserve("t", "g", 2, 21, ttr_ms=50).ids, 22),
    }
    steps[kind]()
    abandon(engine)
    name = f"{kind}_0000000000.bson"
    whole = (folder(tmp_path / "story") / name).stat().st_size
    for cut in [*range(before[name], whole, 1 if kind in ("ready", "history") else 5), whole]:
        shutil.copytree(tmp_path / "story", tmp_path / "cut")
        os.truncate(folder(tmp_path / "cut") / name, cut)
        engine = reopen(tmp_path / "cut")
        assert engine.check() == [], cut
        assert "t" not in engine.damage(), cut
        got = [id_ for id_ in _drain(engine) if id_ != "later"]
        assert len(got) == len(set(got)), (cut, got)
        assert "m0" not in got, "it was acknowledged before the last sync"
        sent = {"m3", "m4"} if kind == "ready" or (kind == "delay" and cut == whole) else set()
        acked = {"m1", "m2"} if kind == "history" and cut == whole else set()
        assert set(got) == {"m1", "m2", *sent} - acked, cut
        engine.close()
        shutil.rmtree(tmp_path / "cut")


def test_messages_of_a_lease_whose_record_is_damaged_come_again(tmp_path: Path) -> None:
    engine = reopen(tmp_path, ack_durability="fsync", max_attempts=5)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", [*messages(10), *(Message(b"", 10, id=f"h{n}", priority=Priority.HIGH) for n in range(3))], 0)
    engine.tick(10)
    engine.topics["t"].checkpoint()
    path = folder(tmp_path) / "reserve_0000000000.bson"
    begins = path.stat().st_size
    first = engine.reserve("t", "g", 4, 11, ttr_ms=10**6).ids
    engine.ack("t", "g", first[:1], 12)
    second = engine.reserve("t", "g", 4, 13, ttr_ms=10**6).ids
    engine.ack("t", "g", second[:1], 14)
    abandon(engine)
    flip(path, begins + 100)
    engine = reopen(tmp_path, ack_durability="fsync", max_attempts=5)
    assert any(d.file == path.name for d in engine.damage()["t"])
    assert engine.groups("t")["g"].reserve == 3, "those of the second lease"
    got = engine.reserve("t", "g", 100, 20).ids
    everybody = {f"m{n}" for n in range(10)} | {f"h{n}" for n in range(3)}
    assert len(got) == len(set(got))
    assert set(got) == everybody - set(second) - set(first[:1])
    assert {line.split(":")[0] for line in engine.check()} == {f"t/{path.name}"}, "and nothing else"
    engine.close()


def test_after_a_clean_stop_a_cut_log_is_reported(tmp_path: Path) -> None:
    engine = reopen(tmp_path)
    engine.submit("t", messages(4, due=500_000), 0)
    engine.submit("t", messages(4, 4, due=500_000), 0)
    engine.close()
    path = folder(tmp_path) / "delay_0000000000.bson"
    os.truncate(path, path.stat().st_size - 10)
    engine = reopen(tmp_path)
    assert engine.stats("t").sleep == 7, "not the whole batch, as if it had been torn"
    assert any(d.file == path.name and "shorter" in d.reason for d in engine.damage()["t"])
    engine.close()


def test_after_a_proper_stop_a_missing_file_is_named(tmp_path: Path) -> None:
    _lived(tmp_path)
    for name in ("delay_0000000000.bson", "dead/delay_0000000000.bson", "history_0000000000.bson"):
        (folder(tmp_path) / name).unlink()
        engine = reopen(tmp_path)
        assert any(d.file == name for d in engine.damage()["t"]), name
        engine.close()


def test_after_a_kill_a_missing_file_between_others_is_named(tmp_path: Path) -> None:
    files = _several(tmp_path)
    lost = {f"m{n}" for n in range(80) if b"\0m%d\0" % n in files[1].read_bytes()}
    files[1].unlink()
    (tmp_path / "data" / "CLEAN").unlink()
    engine = reopen(tmp_path, segment_bytes=4096)
    assert any(d.file == files[1].name and "missing" in d.reason for d in engine.damage()["t"])
    assert set(_drain(engine)) == {f"m{n}" for n in range(80)} - lost
    engine.close()


@pytest.mark.parametrize("kind", ["history", "reserve"])
def test_after_a_kill_a_missing_journal_between_others_is_named(tmp_path: Path, kind: str) -> None:
    engine = reopen(tmp_path, segment_bytes=4096)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(400), 0)
    engine.tick(10)
    for _ in range(100):
        engine.ack("t", "g", engine.reserve("t", "g", 4, 10).ids, 11)
    abandon(engine)
    files = sorted(folder(tmp_path).glob(f"{kind}_*.bson"))
    assert len(files) > 2
    files[1].unlink()
    engine = reopen(tmp_path, segment_bytes=4096)
    assert [d.file for d in engine.damage()["t"] if "missing" in d.reason] == [files[1].name]
    engine.close()


def test_copied_documents_behind_the_end_are_not_served(tmp_path: Path) -> None:
    engine = reopen(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(6, due=500_000), 0)
    engine.submit("t", messages(6, 6), 0)
    engine.tick(10)
    engine.close()
    for kind in ("delay", "ready"):
        path = folder(tmp_path) / f"{kind}_0000000000.bson"
        data = path.read_bytes()
        path.write_bytes(data + data[f.decode_header(data, path.name)[1] :])
    engine = reopen(tmp_path)
    assert engine.check() == [] or any("copy" in line for line in engine.check())
    assert len(engine.damage()["t"]) > 0
    got = _drain(engine)
    assert sorted(got) == sorted(f"m{n}" for n in range(12))
    engine.close()


def test_a_missing_ready_log_hides_no_later_message(tmp_path: Path) -> None:
    """Its offsets begin anew: no group may stand behind them."""
    engine = reopen(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(6), 0)
    engine.tick(10)
    engine.ack("t", "g", engine.reserve("t", "g", 6, 11).ids, 12)
    engine.submit("t", messages(3, 20, due=500_000), 12)
    engine.topics["t"].checkpoint()
    abandon(engine)
    (folder(tmp_path) / "ready_0000000000.bson").unlink()
    engine = reopen(tmp_path)
    assert any(d.file.startswith("ready") for d in engine.damage()["t"])
    assert {"m20", "m21", "m22"} <= set(_drain(engine))
    engine.close()


def test_a_damaged_batch_head_is_no_document_of_its_batch(tmp_path: Path) -> None:
    """Else all others would seem to have moved on by one, and those that consumers hold would be taken for lost."""
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(run_messages=100))
    engine.move_group("t", "g", "earliest", 0)
    for first in (0, 6):
        engine.submit("t", [Message(b"body", 10 + first, id=f"m{n}") for n in range(first, first + 6)], 0)
        engine.tick(10 + first)
        logs_of(engine).ready.sync()
    assert len(engine.reserve("t", "g", 12, 20).ids) == 12
    abandon(engine)
    path = next((tmp_path / "topic" / "t").glob("ready_*.bson"))
    data = bytearray(path.read_bytes())
    spots = [data.index(name) for name in (b"handoff", b"m0\0", b"m3\0")]
    for at in spots:
        data[at] ^= 1
    path.write_bytes(data)
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(run_messages=100))
    assert engine.ack("t", "g", ["m1", "m2", "m4", "m5", "m6", "m11"], 21).unknown == []
    abandon(engine)


def test_older_documents_at_a_batch_start_shift_no_offset(tmp_path: Path) -> None:
    """Both heads of the last batches are damaged, and between them stand more documents than there were: of an older page."""
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(run_messages=100))
    engine.move_group("t", "g", "earliest", 0)
    for first, count, body in ((0, 6, b"x"), (6, 2, b"y" * 300), (8, 6, b"z"), (14, 1, b"last")):
        engine.submit("t", [Message(body, 10 + first, id=f"m{n:02}") for n in range(first, first + count)], 0)
        engine.tick(10 + first)
        logs_of(engine).ready.sync()
    assert len(engine.reserve("t", "g", 15, 30).ids) == 15
    abandon(engine)
    path = next((tmp_path / "topic" / "t").glob("ready_*.bson"))
    data = bytearray(path.read_bytes())
    found = scan(memoryview(data), f.decode_header(bytes(data), "")[1], len(data), sealed=True)
    heads = [int(found.positions[i]) for i in range(len(found)) if found.flags[i] & f.HANDOFF]
    old, size = int(found.positions[1]), int(found.lengths[1])
    behind = heads[1] + 50
    data[heads[1] + 4 : heads[1] + 9] = b"\x99" * 5
    data[behind : behind + 3 * size] = data[old : old + 3 * size]
    data[behind + 3 * size : heads[2] + 60] = b"\x99" * (heads[2] + 60 - behind - 3 * size)
    path.write_bytes(data)
    engine = Engine.open(tmp_path, door=Quick(), settings=Settings(run_messages=100))
    assert engine.ack("t", "g", [f"m{n:02}" for n in range(8, 15)], 31).unknown == []
    abandon(engine)


def test_a_checkpoint_in_the_journal_outweighs_earlier_damage(tmp_path: Path) -> None:
    """The event that made a group is damaged, behind the last checkpoint; but a later file of the journal begins with one."""
    engine = reopen(tmp_path, segment_bytes=4096)
    engine.submit("t", messages(1), 0)
    engine.topic("t").checkpoint()
    kept = (folder(tmp_path) / "offset").read_bytes()
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(60, 1), 0)
    engine.tick(10)
    while ids := engine.reserve("t", "g", 2, 10).ids:
        engine.ack("t", "g", ids, 11)
    files = sorted(folder(tmp_path).glob("reserve_*.bson"))
    assert len(files) > 1
    abandon(engine)
    (folder(tmp_path) / "offset").write_bytes(kept)  # as if no checkpoint had come since
    start = f.decode_header(files[0].read_bytes(), "")[1]
    flip(files[0], start + 60)
    engine = reopen(tmp_path, segment_bytes=4096)
    assert [damage.file for damage in engine.damage()["t"]] == [files[0].name]
    assert _drain(engine) == []
    engine.close()


def _handed_off(root: Path) -> Path:
    """Six batches of eight in the ready log, each with a table but for the last; none is fetched. Returns its file."""
    engine = reopen(root)
    engine.move_group("t", "g", "earliest", 0)
    for k in range(6):
        engine.submit("t", [Message(b"x" * 200, 10 + k, f"m{n}") for n in range(8 * k, 8 * k + 8)], 0)
        engine.tick(10 + k)
    engine.topic("t").checkpoint()
    abandon(engine)
    return folder(root) / "ready_0000000000.bson"


def test_messages_come_once_though_the_ready_logs_end_is_garbage(tmp_path: Path) -> None:
    path = _handed_off(tmp_path)
    tables = sorted(folder(tmp_path).glob("ready_*.run"))
    assert len(tables) >= 3
    found = t.open_table(Bare(), tables[-2])
    assert found is not None
    data = path.read_bytes()
    path.write_bytes(data[: found.cover.start + 20].ljust(len(data), b"\x99"))
    engine = reopen(tmp_path)
    assert {damage.file for damage in engine.damage()["t"]} == {path.name}
    assert sorted(_drain(engine)) == sorted(f"m{n}" for n in range(48)), "what is gone there still sleeps, the rest is there once"
    engine.close()


def test_a_head_of_a_batch_is_no_message_wherever_it_stands(tmp_path: Path) -> None:
    path = _handed_off(tmp_path)
    engine = reopen(tmp_path)
    assert len(engine.reserve("t", "g", 48, 20, ttr_ms=10)) == 48  # they come again later, by their offsets
    engine.topic("t").checkpoint()
    abandon(engine)
    data = bytearray(path.read_bytes())
    found = scan(memoryview(data), f.decode_header(bytes(data), "")[1], len(data), sealed=True)
    heads = [i for i in range(len(found.positions)) if found.flags[i] & f.HANDOFF]
    begin = int(found.positions[heads[1]])
    head = data[begin : begin + int(found.lengths[heads[1]])]
    at = int(found.positions[heads[3] + 2])  # where the second message of a later batch begins
    assert len(head) < found.lengths[heads[3] + 2]
    data[at : at + len(head)] = head
    path.write_bytes(data)
    engine = reopen(tmp_path)
    got = _drain(engine)
    assert "handoff" not in got
    assert len(got) == len(set(got)) >= 48 - 2
    engine.close()


def _positions(path: Path) -> list[int]:
    """Where the documents of a segment begin, the heads of batches among them."""
    data = path.read_bytes()
    _, start = f.decode_header(data, path.name)
    return [int(at) for at in scan(memoryview(data), start, len(data), sealed=True).positions]


def test_what_is_before_a_cut_between_two_messages_is_served(tmp_path: Path) -> None:
    engine = reopen(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(5), 0)
    engine.tick(10)
    engine.close()
    path = folder(tmp_path) / "ready_0000000000.bson"
    os.truncate(path, _positions(path)[1 + 3])  # the head, and three messages
    engine = reopen(tmp_path)
    assert engine.reserve("t", "g", 9, 20).ids == ["m0", "m1", "m2"]
    assert path.name in str(engine.damage()["t"][0])
    engine.submit("t", messages(1, 7), 30)
    engine.tick(40)
    assert engine.reserve("t", "g", 9, 40).ids == ["m7"]
    engine.close()


def test_messages_keep_offsets_between_damaged_heads(tmp_path: Path) -> None:
    engine = reopen(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    for first, count in ((0, 2), (2, 3)):
        engine.submit("t", messages(count, first), 0)
        engine.tick(10 + first)
    engine.ack("t", "g", engine.reserve("t", "g", 3, 20).ids, 20)
    engine.close()
    path = folder(tmp_path) / "ready_0000000000.bson"
    head, _, _, other, _, last_but_one, _ = _positions(path)
    for at in (head, other, last_but_one):
        flip(path, at + f.PREFIX_BYTES - 30)
    engine = reopen(tmp_path)
    assert engine.reserve("t", "g", 9, 30).ids == ["m4"], "m3 is damaged, and nothing comes again"
    engine.close()


def test_a_scrambled_empty_segment_is_named_and_the_topic_served(tmp_path: Path) -> None:
    engine = reopen(tmp_path)
    engine.submit("t", messages(2), 0)
    engine.close()
    path = folder(tmp_path) / "dead" / "delay_0000000000.bson"
    data = path.read_bytes()
    path.write_bytes(data[64:128] + data[:64] + data[128:])
    (tmp_path / "data" / "CLEAN").unlink()
    engine = reopen(tmp_path)
    assert any(path.name in str(one) for one in engine.damage()["t"])
    engine.tick(10)
    assert engine.reserve("t", "g", 9, 20).ids == ["m0", "m1"]
    engine.close()


def test_what_waits_to_be_tried_again_is_no_notice(tmp_path: Path) -> None:
    """Where the ready log is damaged, a retry may stand for a document that is not its own."""
    engine = reopen(tmp_path)
    engine.submit("t", [*messages(1), *messages(1, 1, due=500_000)], 0)
    engine.tick(10)
    assert engine.reserve("t", "g", 9, 10).ids == ["m0"]
    assert engine.cancel("t", ["m1"], 11) == {"m1": "cancelled"}
    engine.topic("t").stores.broker.groups["g"].add_retry(1, Retry(20, 2, "no"))
    assert engine.reserve("t", "g", 9, 30).ids == []
    engine.close()


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("cut", [1, 40, 250, 310])
def test_messages_put_behind_a_cut_document_stay(tmp_path: Path, cut: int, killed: bool) -> None:
    """The length of the cut document reaches over them: to a scan, they would be its end."""
    engine = reopen(tmp_path)
    engine.submit("t", [Message(b"x" * 300, 500_000, id=f"old{n}") for n in range(2)], 0)
    engine.close()
    path = folder(tmp_path) / "delay_0000000000.bson"
    os.truncate(path, path.stat().st_size - cut)
    engine = reopen(tmp_path)
    assert any(d.file == path.name for d in engine.damage()["t"])
    engine.submit("t", messages(3, due=500_000), 1)
    (abandon if killed else Engine.close)(engine)
    for run in folder(tmp_path).glob("*.run"):
        run.unlink()
    engine = reopen(tmp_path)
    engine.move_group("t", "g", "earliest", 2)
    assert _drain(engine) == ["old0", "m0", "m1", "m2"]
    engine.close()


def test_a_dead_letter_behind_a_cut_one_stays(tmp_path: Path) -> None:
    engine = reopen(tmp_path, max_attempts=1)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", [Message(b"x" * 400, 10, id=f"m{n}") for n in range(5)], 0)
    engine.tick(10)
    ids = engine.reserve("t", "g", 5, 10).ids
    engine.ack("t", "g", ["-m0", "-m1"], 11, error="no")
    engine.close()
    path = folder(tmp_path) / "dead" / "delay_0000000000.bson"
    os.truncate(path, path.stat().st_size - 300)
    engine = reopen(tmp_path, max_attempts=1)
    engine.ack("t", "g", [f"-{id_}" for id_ in ids[2:]], 12, error="no")
    engine.close()
    for run in path.parent.glob("*.run"):
        run.unlink()
    engine = reopen(tmp_path, max_attempts=1)
    assert {letter.id for letter in engine.topic("t").view.dead_letters.all(Filter())} == {*ids} - {"m1"}
    engine.close()


def test_a_notice_in_a_leased_messages_place_becomes_no_letter(tmp_path: Path) -> None:
    """It is no message of any group: none was sent like that."""
    engine = reopen(tmp_path, max_attempts=1)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", [Message(b"", 10, id="m0"), Message(b"", 500_000, id="m1")], 0)
    engine.cancel("t", ["m1"], 1)
    engine.tick(10)
    assert engine.reserve("t", "g", 9, 10, ttr_ms=100).ids == ["m0"]
    engine.close()
    path = folder(tmp_path) / "ready_0000000000.bson"
    data = bytearray(path.read_bytes())
    found = scan(memoryview(data), f.decode_header(bytes(data), "")[1], len(data), sealed=True)
    spans = [slice(int(at), int(at + size)) for at, size in zip(found.positions, found.lengths, strict=True)]
    (notice,) = (span for span, flags in zip(spans, found.flags, strict=True) if flags & f.NOTICE)
    (leased,) = (span for span in spans if b"m0\0" in data[span])
    data[leased] = data[notice]
    path.write_bytes(data)
    engine = reopen(tmp_path, max_attempts=1)
    engine.tick(1_000)
    assert engine.reserve("t", "g", 9, 1_000).ids == []
    assert list(engine.topic("t").view.dead_letters.all(Filter())) == []
    engine.close()


@pytest.mark.parametrize("delay_ms", [None, 60_000])
def test_a_failed_message_never_gets_the_body_of_another(tmp_path: Path, delay_ms: int | None) -> None:
    """Two sound documents change places while both are leased; then they become dead letters, or sleep until their retry."""
    engine = reopen(tmp_path, max_attempts=1 if delay_ms is None else 2)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", [Message(f"of {id_}".encode(), 10, id=id_) for id_ in ("m0", "m1", "m2")], 0)
    engine.tick(10)
    ids = engine.reserve("t", "g", 9, 10, ttr_ms=10**6).ids
    path = folder(tmp_path) / "ready_0000000000.bson"
    data = bytearray(path.read_bytes())
    _, first, second, third = _positions(path)
    data[first:second], data[second:third] = data[second:third], data[first:second]
    path.write_bytes(data)
    logs_of(engine).ready.sync()
    engine.ack("t", "g", [f"-{id_}" for id_ in ids], 11, retry_delay_ms=delay_ms, error="no")
    found = {(d.position, d.reason) for d in engine.damage()["t"]}
    assert found == {(at, "another document stands in its place") for at in (first, second)}
    engine.tick(100_000)
    again = [(message.id.rpartition("/")[2], message.body) for message in engine.reserve("t", "g", 9, 100_000).documents()]
    dead = [(letter.id, letter.body) for letter in engine.topic("t").view.dead_letters.all(Filter())]
    assert again + dead == [("m2", b"of m2")]
    engine.close()


@pytest.mark.parametrize("kind", ["delay", "dead/delay", "ready"])
@pytest.mark.parametrize("cut", [False, True])
def test_damage_of_one_document_does_not_spread_with_a_kill(tmp_path: Path, kind: str, cut: bool) -> None:
    """A proper stop, damage in the last batch, and a kill before anything more is written: the rest of the batch is not torn."""
    engine = reopen(tmp_path, max_attempts=1)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(6, due=500_000 if kind == "delay" else 10), 0)
    engine.tick(10)
    ids = engine.reserve("t", "g", 2 if kind == "ready" else 6, 10).ids
    engine.ack("t", "g", [f"-{id_}" for id_ in ids] if kind == "dead/delay" else ids, 11)
    engine.close()
    path = folder(tmp_path) / f"{kind}_0000000000.bson"
    if cut:
        os.truncate(path, _positions(path)[-1])
    else:
        flip(path, _positions(path)[-3] + 70)
    for _ in range(3):
        engine = reopen(tmp_path, max_attempts=1)
        assert kind != "delay" or engine.stats("t").sleep == 5
        abandon(engine)
    engine = reopen(tmp_path, max_attempts=1)
    dead = {letter.id for letter in engine.topic("t").view.dead_letters.all(Filter())}
    acked = {*ids} if kind == "ready" else set()
    assert {*_drain(engine), *dead} == {f"m{n}" for n in range(6)} - acked - {"m5" if cut else "m3"}
    assert not dead or kind == "dead/delay"
    engine.close()


@pytest.mark.parametrize("killed", [False, True])
def test_a_topic_opens_again_after_a_file_without_header_and_documents(tmp_path: Path, killed: bool) -> None:
    """The first opening knows the file by its torn tail, and cuts that off."""
    engine = reopen(tmp_path)
    engine.submit("t", messages(1, due=500_000), 0)
    abandon(engine)
    path = folder(tmp_path) / "delay_0000000000.bson"
    data = path.read_bytes()
    _, begin = f.decode_header(data, path.name)
    path.write_bytes(b"\x7f" * begin + data[begin:])
    flip(path, len(data) - 3)
    engine = reopen(tmp_path)
    assert any(d.file == path.name for d in engine.damage()["t"])
    (abandon if killed else Engine.close)(engine)
    engine = reopen(tmp_path)
    assert engine.submit("t", messages(1, due=500_000), 1).created == [True]
    engine.close()
