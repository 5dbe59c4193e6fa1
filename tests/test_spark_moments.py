"""A snapshot is of one moment: operations while links are made, snapshots between the system calls of an engine, live servers."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.spark_session import need_packages

need_packages()

from pyspark_turtlemq import moments, pins  # noqa: E402 - only where pyarrow is
from pyspark_turtlemq.snapshot_files import LOGS  # noqa: E402
from pyspark_turtlemq.table import read_table  # noqa: E402
from tests.harness.replica_nodes import running_pair  # noqa: E402
from tests.harness.server_process import running  # noqa: E402
from tests.harness.spark_data import rows  # noqa: E402
from tests.harness.spark_live import Clients, rows_of  # noqa: E402
from tests.harness.spark_moments import Beside  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.model import Message  # noqa: E402
from turtlemq.settings import Settings  # noqa: E402

LATER = 90_000


def batch_of_which_half_is_due(engine: Engine, mark: str, now: int) -> None:
    engine.submit("t", [Message(b"", now, id=f"{mark}-1"), Message(b"", now + LATER, id=f"{mark}-2")], now)
    engine.tick(now)


def due_and_acknowledged(engine: Engine, mark: str, now: int) -> None:
    batch_of_which_half_is_due(engine, mark, now)
    engine.ack("t", "g", engine.reserve("t", "g", 9, now).ids, now)


def a_lease_becomes_a_sleeping_retry(engine: Engine, mark: str, now: int) -> None:
    engine.ack("t", "g", ["-b"], now, retry_delay_ms=LATER)


def a_lease_becomes_a_dead_letter(engine: Engine, mark: str, now: int) -> None:
    engine.configure("t", max_attempts=1)
    assert engine.ack("t", "g", ["-b"], now).dead == 1


def everything_is_sealed_and_moved(engine: Engine, mark: str, now: int) -> None:
    engine.cancel("t", [f"s{n}" for n in range(30) if n % 4], now)
    engine.submit("t", [Message(b"x" * 3_000, now + LATER, id=mark)], now)
    engine.compact("t")


OPERATIONS = (
    batch_of_which_half_is_due,
    due_and_acknowledged,
    a_lease_becomes_a_sleeping_retry,
    a_lease_becomes_a_dead_letter,
    everything_is_sealed_and_moved,
)


@contextmanager
def before_link(number: int, operation: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Do something before the link of this number is made. Yields the names of the linked files."""
    link, made = os.link, list[str]()

    def linked(source: Any, target: Any, **options: Any) -> None:
        made.append(Path(source).name)
        if len(made) == number:
            with monkeypatch.context() as patch:
                patch.setattr(os, "link", link)
                operation()
        link(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", linked)
        yield made


def shown(root: Path) -> dict[str, list[str]]:
    return {kind: sorted(map(str, rows(root, kind=kind))) for kind in ("messages", "delay", "history")}


def lived(root: Path) -> Engine:
    """Sleepers in several segments, messages that a group has handled, and one that it holds."""
    engine = Engine.open(root, settings=Settings(segment_bytes=4096, compact_live_ratio=0.5))
    for n in range(30):
        engine.submit("t", [Message(b"x" * 200, LATER + n, id=f"s{n}")], 10)
    engine.submit("t", [Message(b"", 10, id="a"), Message(b"", 10, id="b")], 10)
    engine.tick(10)
    engine.reserve("t", "g", 2, 20)
    engine.ack("t", "g", ["a"], 30)
    return engine


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_operation_while_links_are_made_shows_whole_or_not_at_all(
    tmp_path: Path, operation: Callable[[Engine, str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, number = [""], 0
    while number < len(files):  # each link is once the one before which it happens
        number += 1
        root = tmp_path / str(number)
        engine = lived(root)
        before = shown(root)
        with before_link(number, lambda: operation(engine, "n", 40), monkeypatch) as files:  # noqa: B023 - called in this round
            snapshot = pins.take_snapshot(root, ["t"], LOGS)
        with snapshot:
            found = {kind: sorted(map(str, rows(root, kind=kind, snapshot=snapshot.name))) for kind in before}
        after = shown(root)
        assert found in (before, after), f"before {files[number - 1]}"
        engine.close()
    assert number > 6


def test_a_snapshot_that_never_settles_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lived(tmp_path)
    measure = moments._length

    def grown(file: Any) -> int:
        engine.submit("t", [Message(b"", LATER)], 40)
        return measure(file)

    monkeypatch.setattr(moments, "_length", grown)
    monkeypatch.setattr(moments, "_SECONDS_MAX", 0.2)
    with pytest.raises(moments.Unsettled, match="'t'"):
        pins.take_snapshot(tmp_path, ["t"], LOGS)
    assert not (tmp_path / "READERS").exists()
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_snapshot_is_one_of_the_moments_between_system_calls(tmp_path: Path, seed: int) -> None:
    walk = Beside(tmp_path, seed)
    walk.run_snapshots(30, rows_every=6)
    assert walk.seen["snapshots"] == 30
    assert walk.seen["of a later moment than their beginning"] > 5


@pytest.mark.slow
def test_reads_of_a_busy_server_show_whole_batches(tmp_path: Path) -> None:
    root = tmp_path / "data"
    with running(root) as server, Clients(server) as clients:
        for _ in range(40):
            clients.judge(lambda: rows_of(read_table(root, kind="messages", columns="id,group,state")))
        assert len(clients.acked) > 20


def test_a_standby_that_follows_is_read(tmp_path: Path) -> None:
    """Answers wait for its copy, so a read of its folder shows all that were given."""
    seen: Counter[str] = Counter()
    with running_pair(tmp_path) as (_, leader, standby), Clients(leader.server) as clients:
        end, folder = time.monotonic() + 3, standby.data
        while time.monotonic() < end:
            seen += clients.judge(lambda: rows_of(read_table(folder, kind="messages", columns="id,group,state")))
    assert seen["reads"] > 2
    assert seen["rows"] > 10
