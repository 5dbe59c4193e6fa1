"""Damaged headers, events and whole files: named, contained, never served; and crash cuts at every byte of a short story."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.damaged_folder import drain, flip, folder, heads, lived, reopen, several
from tests.harness.engine_disk import abandon, messages
from turtlemq.errors import Corrupt, NotOurs, Unavailable
from turtlemq.model import Message, Priority
from turtlemq.segment import format as f
from turtlemq.topic.dead_letters import Filter


@pytest.mark.parametrize("kind", ["ready", "reserve", "history", "delay", "dead/delay"])
@pytest.mark.parametrize("at", [6, 30, 120])
def test_a_damaged_header_is_named_and_everything_behind_it_is_served(tmp_path: Path, kind: str, at: int) -> None:
    expected = lived(tmp_path)
    path = folder(tmp_path) / f"{kind}_0000000000.bson"
    flip(path, at)
    (folder(tmp_path) / "offset").unlink()
    engine = reopen(tmp_path)
    assert any(d.file == path.name and d.position == 0 for d in engine.damage()["t"])
    assert [letter.id for letter in engine.topic("t").view.dead_letters.all(Filter())] == ["m2"]
    assert sorted(drain(engine)) == sorted(expected)
    assert engine.stats("t").history == 2 + len(expected)
    abandon(engine)
    engine = reopen(tmp_path)
    assert drain(engine) == [], "what was written since is there as well"
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
    assert drain(engine) == ["m0", "m1"]
    engine.close()


@pytest.mark.parametrize("kind", ["ready", "reserve", "history", "delay"])
def test_a_file_that_was_never_ours_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    lived(tmp_path)
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
    lived(tmp_path)
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
    lived(tmp_path)
    (tmp_path / "data" / "FORMAT").write_text(text)
    with pytest.raises(Corrupt, match="FORMAT should hold a format number"):
        reopen(tmp_path)


@pytest.mark.parametrize("kind", ["reserve", "history"])
def test_documents_without_an_event_are_named_and_left_out(tmp_path: Path, kind: str) -> None:
    """Those of another kind of file, which stands there under a wrong name and has lost its head."""
    lived(tmp_path)
    path = folder(tmp_path) / f"{kind}_0000000000.bson"
    path.write_bytes((folder(tmp_path) / "delay_0000000000.bson").read_bytes())
    flip(path, 0)
    (folder(tmp_path) / "offset").unlink()
    engine = reopen(tmp_path)
    assert any(d.file == path.name and d.reason == "it tells of no event" for d in engine.damage()["t"])
    assert {"m20", "m21", "m22"} <= set(drain(engine))
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
    assert drain(engine) == [f"m{n}" for n in range(12) if n != 9], "nothing was handed off a second time"
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
    flip(path, heads(path)[-1] + 20)
    engine = reopen(tmp_path)
    assert any(d.file == path.name for d in engine.damage()["t"])
    if crash:
        abandon(engine)
        engine = reopen(tmp_path)
    assert drain(engine) == [f"m{n}" for n in range(12)]
    engine.close()


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("tables", [False, True])
def test_a_damaged_batch_head_in_an_older_segment_loses_nothing(tmp_path: Path, which: int, tables: bool) -> None:
    files = several(tmp_path)
    assert len(files) > 2
    flip(files[1], heads(files[1])[which] + 20)
    if not tables:
        for table in folder(tmp_path).glob("ready_*.run"):
            table.unlink()
        (folder(tmp_path) / "offset").unlink()
    engine = reopen(tmp_path, segment_bytes=4096)
    assert drain(engine) == [f"m{n}" for n in range(80)]
    assert tables or any(d.file == files[1].name for d in engine.damage()["t"])
    engine.close()


@pytest.mark.parametrize("which", [0, 1])
def test_an_emptied_older_segment_costs_its_own_messages_only(tmp_path: Path, which: int) -> None:
    """Its messages are known to have been there, and are nowhere: no place in a file is asked for them."""
    files = several(tmp_path)
    lost = {f"m{n}" for n in range(80) if b"\0m%d\0" % n in files[which].read_bytes()}
    assert 0 < len(lost) < 80
    os.truncate(files[which], 0)
    for cache in (*folder(tmp_path).glob("ready_*.run"), *folder(tmp_path).glob("ready_*.index"), folder(tmp_path) / "offset"):
        cache.unlink()
    engine = reopen(tmp_path, segment_bytes=4096)
    assert any(d.file == files[which].name for d in engine.damage()["t"])
    assert isinstance(engine.check(), list)
    assert set(drain(engine)) == {f"m{n}" for n in range(80)} - lost
    engine.close()


@pytest.mark.parametrize("kind", ["reserve", "history"])
def test_after_a_clean_stop_a_flipped_last_event_is_reported(tmp_path: Path, kind: str) -> None:
    expected = lived(tmp_path)
    path = folder(tmp_path) / f"{kind}_0000000000.bson"
    flip(path, path.stat().st_size - 30)
    size = path.stat().st_size
    engine = reopen(tmp_path)
    assert path.stat().st_size == size, "nothing is cut off"
    assert sorted(drain(engine)) == sorted(expected)
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
        got = [id_ for id_ in drain(engine) if id_ != "later"]
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
    lived(tmp_path)
    for name in ("delay_0000000000.bson", "dead/delay_0000000000.bson", "history_0000000000.bson"):
        (folder(tmp_path) / name).unlink()
        engine = reopen(tmp_path)
        assert any(d.file == name for d in engine.damage()["t"]), name
        engine.close()


def test_after_a_kill_a_missing_file_between_others_is_named(tmp_path: Path) -> None:
    files = several(tmp_path)
    lost = {f"m{n}" for n in range(80) if b"\0m%d\0" % n in files[1].read_bytes()}
    files[1].unlink()
    (tmp_path / "data" / "CLEAN").unlink()
    engine = reopen(tmp_path, segment_bytes=4096)
    assert any(d.file == files[1].name and "missing" in d.reason for d in engine.damage()["t"])
    assert set(drain(engine)) == {f"m{n}" for n in range(80)} - lost
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
    got = drain(engine)
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
    assert {"m20", "m21", "m22"} <= set(drain(engine))
    engine.close()
