"""kill -9, again and again, in the middle of any work of the engine: answers given before are true afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from turtlemq.engine import Engine
from turtlemq.settings import Settings

ROUNDS = 5
# Both processes need the same limit of attempts: a lease held at the kill would otherwise die with the lower one.
SETTINGS = Settings(segment_bytes=65536, run_messages=64, max_attempts=1_000_000, backoff_base_ms=0)
WORK = """
import itertools, sys, time
from pathlib import Path
from turtlemq.engine import Engine
from turtlemq.model import Message
from tests.test_engine_kill import SETTINGS

root, first = Path(sys.argv[1]), int(sys.argv[2])
engine = Engine.open(root, settings=SETTINGS)
now = int(time.time() * 1000)
print("open", flush=True)
for n in itertools.count(first):
    ids = [f"m{n}-{i}" for i in range(20)]
    engine.submit("t", [Message(b"x" * 50, now + n % 3, id=i) for i in ids], now)
    print("put", *ids, flush=True)
    now += 1
    engine.tick(now)
    got = engine.reserve("t", "g", 15, now, ttr_ms=50).ids
    failed = set(got[::5])
    engine.ack("t", "g", [f"-{i}" if i in failed else i for i in got], now)
    print("ack", *(i for i in got if i not in failed), flush=True)
"""


def test_nothing_answered_is_forgotten_by_a_killed_process(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    put: set[str] = set()
    acked: set[str] = set()
    for number in range(ROUNDS):
        command = [sys.executable, "-c", WORK, str(tmp_path), str(number * 1_000_000)]
        child = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        time.sleep(0.2 + 0.1 * number)
        child.kill()
        told = child.stdout.read().split("\n")[:-1]  # the last line may be torn
        child.stdout.close()
        child.wait()
        for line in told:
            word, *ids = line.split()
            (put if word == "put" else acked).update(ids)
    engine = Engine.open(tmp_path, settings=SETTINGS)
    assert engine.check() == []
    now, seen = int(time.time() * 1000) + 10**7, set()
    while True:
        engine.tick(now)
        got = engine.reserve("t", "g", 10_000, now).ids
        stats = engine.stats("t")
        if not got and not stats.sleep:
            break
        seen.update(got)
        assert engine.ack("t", "g", got, now).acked == len(got)
        now += 100_000
    assert len(put) > 100, "it did something"
    assert not acked & seen, "an answered acknowledgement is never forgotten"
    assert put <= acked | seen | _settled(engine, put - acked - seen), "what was accepted is not lost"
    assert engine.check() == []
    engine.close()


def _settled(engine: Engine, ids: set[str]) -> set[str]:
    """Acknowledged, but killed before it could say so."""
    views = {id_: engine.message("t", id_) for id_ in ids}
    return {id_ for id_, view in views.items() if view is not None and view.state == "history"}
