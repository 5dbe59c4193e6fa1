"""The name of a new topic is durable, wherever the process that made it has ended."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.trust.simulation_disk import Crash, Drive, Process
from turtlemq.engine import Engine
from turtlemq.errors import Stopped
from turtlemq.model import Message

CALLS = 30  # changes of files until a first message is stored, and a few more


def put(drive: Drive, id_: str, ends_in: int = -1) -> bool:
    """Start, store a message, and be killed: behind the answer, or at a change of a file. Returns whether it was stored."""
    process = Process(drive)
    process.ends_in = ends_in
    try:
        Engine.open(drive.root, door=process).submit("t", [Message(b"x", 10**12, id_)], 0)
        return True
    except (Crash, Stopped):
        return False
    finally:
        process.die()


@pytest.mark.parametrize("ends_in", range(CALLS))
def test_an_answered_message_outlives_a_kill_and_a_power_cut(ends_in: int, tmp_path: Path) -> None:
    for seed in range(5):
        drive = Drive(tmp_path / str(seed))
        answered = [id_ for id_, end in (("first", ends_in), ("second", -1)) if put(drive, id_, end)]
        drive.cut(Random(seed))
        engine = Engine.open(drive.root, door=Process(drive))
        assert answered
        assert all(engine.message("t", id_) for id_ in answered)
        engine.close()
