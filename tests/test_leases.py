"""Leases have a token: it names one fetch, over extends, restarts and power cuts, and a late holder touches no other lease."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness.broker_insides import logs_of
from tests.harness.engine_disk import SETTINGS, Quick, Syncing, abandon, cut_power, messages, start
from turtlemq.broker import checkpoint
from turtlemq.broker.group import Group, Lease
from turtlemq.broker.results import Extended
from turtlemq.engine import Engine
from turtlemq.model import Message

GOLDEN = Path(__file__).resolve().parent / "golden" / "leases_1"
NOW = 1_700_000_000_000


def group_of(engine: Engine, name: str = "g") -> Group:
    return engine.topic("t").stores.broker.groups[name]


def tokens(engine: Engine) -> dict[str, str]:
    """The token of each message in flight."""
    group = group_of(engine)
    out = {}
    for id_ in sorted(group.reserved_ids):
        held = group.lease_of(id_)
        assert held is not None
        out[id_] = held[0].token
    return out


def open_leases(engine: Engine) -> list[Lease]:
    return [lease for lease in group_of(engine).leases.values() if lease.left]


# Tokens


def test_each_fetch_has_a_token_of_its_own(tmp_path: Path) -> None:
    engine = start(tmp_path)
    engine.submit("t", [*messages(3), Message(b"body", 10, id="slow", ttr_ms=9_000)], 0)
    engine.tick(10)
    first, second = engine.reserve("t", "g", 1, 10), engine.reserve("t", "g", 9, 10)
    assert first.lease != second.lease
    assert tokens(engine) == {"m0": first.lease, "m1": second.lease, "m2": second.lease, "slow": second.lease}
    assert engine.reserve("t", "g", 9, 11).lease == "", "nothing was handed out"
    assert engine.reserve("t", "other", 9, 11, auto=True).lease == "", "nothing is leased"
    engine.close()


@pytest.mark.parametrize("how", ["stop", "kill", "kill before a checkpoint", "rolled"])
def test_a_token_outlives_a_restart(tmp_path: Path, how: str) -> None:
    engine = start(tmp_path, Quick(), segment_bytes=4_096)
    engine.submit("t", messages(40), 0)
    engine.tick(10)
    given = {}
    for now in range(10, 40):
        out = engine.reserve("t", "g", 1, now, ttr_ms=10**6)
        given[out.ids[0]] = out.lease
    engine.extend("t", "g", ["m3", "m4"], 2 * 10**6, 50)
    if how == "kill":
        engine.tick(60_000)
    if how == "rolled":
        assert len(logs_of(engine, "t").reserve.bases) > 1, "checkpoints are in the journal"
        (tmp_path / "data" / "topic" / "t" / checkpoint.FILE).unlink(missing_ok=True)
    if how == "stop":
        engine.close()
    else:
        abandon(engine)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert len(set(given.values())) == 30
    assert tokens(engine) == given
    assert engine.check() == []
    engine.close()


def test_a_power_cut_makes_no_two_fetches_share_a_token(tmp_path: Path) -> None:
    """The number of the lost event is used again: the time makes the difference."""
    door = Syncing()
    engine = start(tmp_path, door)
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    engine.topic("t").stores.broker.sync()
    lost = engine.reserve("t", "g", 1, 20).lease
    cut_power(engine, door)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    again = engine.reserve("t", "g", 1, 30).lease
    assert again.split("-")[0] == lost.split("-")[0], "the number is used again"
    assert again != lost
    engine.close()


def test_a_folder_whose_leases_have_no_numbers_is_opened(tmp_path: Path) -> None:
    engine = Engine.open(Path(shutil.copytree(GOLDEN, tmp_path / "data")))
    assert tokens(engine) == {"m0": "", "m1": "", "m2": ""}
    assert engine.reserve("t", "g", 9, NOW + 10).ids == ["m3"]
    assert engine.ack("t", "g", ["m0", "-m2"], NOW + 20, retry_delay_ms=0).acked == 1
    engine.tick(NOW + 90_001)
    assert engine.reserve("t", "g", 1, NOW + 90_001).ids == ["m2"]
    engine.tick(NOW + 90_002)
    assert "m1" in engine.reserve("t", "g", 9, NOW + 120_002).ids
    assert engine.check() == []
    engine.close()


# Extend


def test_an_extend_of_all_messages_joins_no_leases(tmp_path: Path) -> None:
    engine = start(tmp_path, Quick())
    engine.submit("t", messages(30), 0)
    engine.tick(10)
    for now in range(10, 20):
        engine.reserve("t", "g", 3, now)
    before, ids = tokens(engine), [f"m{n}" for n in range(30)]
    for now in range(100, 1_000, 100):
        assert engine.extend("t", "g", ids, 5_000, now) == Extended(30, [])
    assert tokens(engine) == before
    assert [lease.left for lease in open_leases(engine)] == [3] * 10
    assert group_of(engine).next_deadline() == 5_900
    engine.tick(5_899)
    assert len(tokens(engine)) == 30
    engine.tick(5_900)
    assert tokens(engine) == {}
    assert engine.check() == []
    engine.close()


def test_an_extend_of_some_messages_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    engine = start(tmp_path, Quick())
    engine.submit("t", messages(4), 0)
    engine.tick(10)
    token = engine.reserve("t", "g", 4, 10).lease
    assert engine.extend("t", "g", ["m1", "m3"], 5_000, 20) == Extended(2, [])
    assert tokens(engine) == dict.fromkeys(["m0", "m1", "m2", "m3"], token)
    assert sorted(lease.until_ms for lease in open_leases(engine)) == [1_010, 5_020]
    abandon(engine)
    engine = Engine.open(tmp_path / "data", settings=SETTINGS)
    assert tokens(engine) == dict.fromkeys(["m0", "m1", "m2", "m3"], token)
    engine.tick(1_010)
    assert sorted(tokens(engine)) == ["m1", "m3"]
    engine.close()


def test_a_lease_that_was_extended_often_costs_no_memory(tmp_path: Path) -> None:
    engine = start(tmp_path, Quick())
    engine.submit("t", messages(1), 0)
    engine.tick(10)
    engine.reserve("t", "g", 1, 10)
    for now in range(20, 1_000):
        engine.extend("t", "g", ["m0"], 1_000, now)
    assert len(group_of(engine)._deadlines) < 100
    assert group_of(engine).next_deadline() == 1_999
    engine.close()
