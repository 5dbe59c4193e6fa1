"""Moving a virtual clock: the engine does all work that lies on the way, each piece at its own time.

A lease of 30 s ends after 30 s, and not at the end of the move, and a message is ready from its due time on.
Checkpoints, maintenance and retention are done by the ticks that take place, and need none of their own.
"""

from __future__ import annotations

from turtlemq.engine import Engine
from turtlemq.server.fetches import Fetches


def advance(engine: Engine, fetches: Fetches, now_ms: int, to_ms: int) -> None:
    """Tick at every time, from `now_ms` to `to_ms`, at which a message comes due, a lease ends or a back-off is over. Long polls
    are not answered: they get their messages at `to_ms`, so that no lease of theirs ends on the way."""
    while (event_ms := _next_event(engine, now_ms)) is not None and event_ms <= to_ms:
        now_ms = max(now_ms, event_ms)
        fetches.tick(now_ms, lambda: True)
        if not engine.woken:
            break  # a topic that cannot work now: the last tick reports it
    fetches.tick(to_ms, lambda: True)


def _next_event(engine: Engine, now_ms: int) -> int | None:
    """The next time at which a message changes its state by itself. Topics in trouble are left out: their ticks fail."""
    times = (topic.next_event(now_ms) for name, topic in engine.topics.items() if name not in engine.trouble)
    return min((at for at in times if at is not None), default=None)
