"""Clocks: the wall clock is set back and forth by seconds, hours and years under a whole engine, as in `simulation`; and a real
server is stopped with SIGSTOP while messages come due and leases run out.

A message is early if the clock has never shown its due time since it was sent. Due messages stay ready when the clock goes
back.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from tests.harness.server_process import Server, running
from tests.trust.model import Broken, Figures, Part, figures
from tests.trust.simulation_scenes import StoryWithScenes

SERVER_EVERY = 100  # of so many cases, one is about a real server
_DAY_MS = 86_400_000
_EARLIEST, _LATEST = 40 * 365 * _DAY_MS, 110 * 365 * _DAY_MS  # 2009 to 2079: the clock may be wrong, but it is a clock
_JUMPS = [2_000, 60_000, 3_600_000, _DAY_MS, 365 * _DAY_MS, 5 * 365 * _DAY_MS]


class Jumping(StoryWithScenes):
    """A story in which the clock is set."""

    def __init__(self, root: Path, case: str, seed: int) -> None:
        super().__init__(root, case, seed, history_hours=1e7, history_bytes=1 << 40, dead_ttl_hours=1e7)
        self.uses_schedules = False  # one of every second that catches up on years has millions of firings

    def tick(self, *_: object) -> None:
        if self.chance.random() < 0.3:
            jump = self.chance.choice(_JUMPS) * self.chance.choice([-1, 1])
            self.now = min(max(_EARLIEST, self.now + jump), _LATEST)
            self.seen["clock set back" if jump < 0 else "clock set ahead"] += 1
        super().tick()

    def drain(self) -> None:
        """Wherever the clock was, everything is due in the end."""
        self.now = max(self.now, *(max(audit.clocks) for audit in self.topics.values())) + _DAY_MS
        super().drain()


class Stopped:
    """A server that stands still for a while."""

    def __init__(self, server: Server, case: int, seconds: float) -> None:
        self.server, self.case, self.seconds = server, case, seconds
        self.chance = Random(case)
        self.sent: dict[str, int] = {}  # when they are due
        self.got: dict[str, dict[str, Any]] = {}

    def expect(self, promise: str, *about: object, holds: bool) -> None:
        if not holds:
            raise Broken(f"case {self.case}: {promise}: {', '.join(map(repr, about))}")

    def run(self) -> Figures:
        """Leases are taken, messages are due before, during and after the stop; then it goes on."""
        server = self.server
        server.put("held", *({"id": f"l{i}", "body": i} for i in range(10)))
        short, long = (server.fetch("held", max=5, wait=5, ttr=ttr) for ttr in (0.5, 3600))
        span = int(1000 * self.seconds)
        now = time.time_ns() // 1_000_000
        self.sent = {f"m{i}": now + self.chance.randint(100, span + 1_500) for i in range(200)}
        server.put("t", *({"id": id_, "body": due, "due_ms": due} for id_, due in self.sent.items()))
        server.process.send_signal(signal.SIGSTOP)
        began = time.time()
        time.sleep(self.seconds)
        ended = time.time()
        server.process.send_signal(signal.SIGCONT)
        self._fetch_all()
        self._check_lateness(began, ended)
        self._check_leases(short, long)
        meanwhile = sum(1000 * began < due < 1000 * ended for due in self.sent.values())
        return figures(servers_stopped=1, due_meanwhile=meanwhile, leases_run_out=len(short))

    def _fetch_all(self) -> None:
        """Each comes once, and not before its time."""
        while len(self.got) < len(self.sent):
            found = self.server.fetch("t", wait=10, ttr=600)
            seen = time.time_ns() // 1_000_000
            self.expect("nothing accepted is lost", self.sent.keys() - self.got.keys(), holds=bool(found))
            for message in found:
                id_, due = message["id"], self.sent[message["id"]]
                self.expect("never early", message, seen, holds=due == message["due_ms"] <= message["ready_ms"] <= seen)
                self.expect("no second firing", message, holds=id_ not in self.got and message["attempt"] == 1)
                self.got[id_] = message
        acked = self.server.ack("t", *self.got)["acked"]
        self.expect("what was delivered can be acknowledged", acked, holds=acked == len(self.sent))
        self.expect("no second firing", holds=self.server.fetch("t", wait=1) == [])

    def _check_lateness(self, began: float, ended: float) -> None:
        """Messages that came due while it stood still were late until it went on, and are reported so."""
        late = [message["ready_ms"] - message["due_ms"] for message in self.got.values()]
        for id_, message in self.got.items():
            if 1000 * began + 100 < self.sent[id_] < 1000 * ended:  # the signal may take a moment
                self.expect("nothing is ready during a stop", message, ended, holds=message["ready_ms"] >= 1000 * ended - 1)
        text = self.server.call("GET", "/metrics").data.decode()
        told = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if _about_lateness(line)}
        count, total = (told[f"turtlemq_scheduler_lateness_seconds_{name}"] for name in ("count", "sum"))
        self.expect("lateness is counted once for each", count, holds=count == len(late))
        self.expect("lateness is reported truly", total, sum(late), holds=abs(1000 * total - sum(late)) < 1)

    def _check_leases(self, short: list[dict[str, Any]], long: list[dict[str, Any]]) -> None:
        again = self.server.fetch("held", wait=5)
        self.expect("leases that ran out come again", again, holds={m["id"] for m in again} == {m["id"] for m in short})
        self.expect("as another attempt", again, holds=all(m["attempt"] == 2 for m in again))
        held = self.server.ack("held", *(m["id"] for m in long))["acked"]
        self.expect("leases that did not run out are held", held, holds=held == len(long))


def _about_lateness(line: str) -> bool:
    return line.startswith("turtlemq_scheduler_lateness_seconds_") and 'topic="t"' in line and "_bucket" not in line


def run(cases: range, folder: Path) -> Figures:
    """Clocks that are set; and now and then a server that is stopped, shortly in the first case, for 30 s in others."""
    seen: Counter[str] = Figures()
    for case in cases:
        root = folder / str(case)
        if case % SERVER_EVERY:
            seen += Jumping(root, f"case {case}", case).tell(Random(case).choice([20, 40, 80]))
        else:
            root.mkdir()
            with running(root / "data") as server:
                seen += Stopped(server, case, 30 if case else 2).run()
        shutil.rmtree(root)
    return seen


PART = Part(
    name="clocks",
    unit="cases",
    about="The clock is set back and forth by seconds, hours and years, and a server stands still while messages come due: "
    "never early, no second firing, lateness reported truly, leases that ran out come again.",
    run=run,
    quick=SERVER_EVERY,
    full=1_000,
)
