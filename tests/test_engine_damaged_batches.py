"""Damaged heads of batches and cut documents: no offset shifts, later messages stay, none gets the body of another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.damaged_folder import Bare, drain, flip, folder, handed_off, positions, reopen
from tests.harness.engine_disk import Quick, abandon, messages
from turtlemq.broker.retry_queue import Retry
from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.segment import format as f
from turtlemq.segment import table as t
from turtlemq.segment.scan import scan
from turtlemq.settings import Settings
from turtlemq.topic.dead_letters import Filter


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
    assert drain(engine) == []
    engine.close()


def test_messages_come_once_though_the_ready_logs_end_is_garbage(tmp_path: Path) -> None:
    path = handed_off(tmp_path)
    tables = sorted(folder(tmp_path).glob("ready_*.run"))
    assert len(tables) >= 3
    found = t.open_table(Bare(), tables[-2])
    assert found is not None
    data = path.read_bytes()
    path.write_bytes(data[: found.cover.start + 20].ljust(len(data), b"\x99"))
    engine = reopen(tmp_path)
    assert {damage.file for damage in engine.damage()["t"]} == {path.name}
    assert sorted(drain(engine)) == sorted(f"m{n}" for n in range(48)), "what is gone there still sleeps, the rest is there once"
    engine.close()


def test_a_head_of_a_batch_is_no_message_wherever_it_stands(tmp_path: Path) -> None:
    path = handed_off(tmp_path)
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
    got = drain(engine)
    assert "handoff" not in got
    assert len(got) == len(set(got)) >= 48 - 2
    engine.close()


def test_what_is_before_a_cut_between_two_messages_is_served(tmp_path: Path) -> None:
    engine = reopen(tmp_path)
    engine.move_group("t", "g", "earliest", 0)
    engine.submit("t", messages(5), 0)
    engine.tick(10)
    engine.close()
    path = folder(tmp_path) / "ready_0000000000.bson"
    os.truncate(path, positions(path)[1 + 3])  # the head, and three messages
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
    head, _, _, other, _, last_but_one, _ = positions(path)
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
    engine.topic("t").stores.broker.groups["g"].retries.add(1, Retry(20, 2, "no"))
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
    assert drain(engine) == ["old0", "m0", "m1", "m2"]
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
    _, first, second, third = positions(path)
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
        os.truncate(path, positions(path)[-1])
    else:
        flip(path, positions(path)[-3] + 70)
    for _ in range(3):
        engine = reopen(tmp_path, max_attempts=1)
        assert kind != "delay" or engine.stats("t").sleep == 5
        abandon(engine)
    engine = reopen(tmp_path, max_attempts=1)
    dead = {letter.id for letter in engine.topic("t").view.dead_letters.all(Filter())}
    acked = {*ids} if kind == "ready" else set()
    assert {*drain(engine), *dead} == {f"m{n}" for n in range(6)} - acked - {"m5" if cut else "m3"}
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
