"""Coverage of the stories inside the engine, which no client sees: a run that never seals anything says nothing about seals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tests.trust.model import Broken, Figures
from turtlemq.broker import events
from turtlemq.index import firing, seal
from turtlemq.index.maintenance import Maintenance

STORIES_MIN = 200  # in fewer, something may be missing by chance
PLACES = (
    "seals",
    "compactions",
    "bulk handoffs",
    "tombstones sealed",
    "late acks",
    "of them for another's lease",
    "late acks told so",
    "split events",
    "split checkpoints",
    "split checkpoints read",
    "weak hashes",
    "changed secrets",
    "polls woken",
    "polls of deleted groups",
    "asked on a quiet topic",
    "attempts told",
    "retried now",
    "schedules put",
    "schedules fired",
    "transactions",
    "transactions found",
    "spread messages",
    "clock moves",
)


@contextmanager
def counting(seen: Figures) -> Iterator[None]:
    """Count into `seen` the jobs that finish meanwhile."""
    with (
        _counted(Maintenance, "adopt", lambda done: seen.update({"seals": bool(done)})),
        _counted(Maintenance, "compact", lambda moved: seen.update({"compactions": bool(moved)})),
        _counted(firing, "_merge", lambda _: seen.update({"bulk handoffs": 1})),
        _counted(seal, "_tombstones", lambda stones: seen.update({"tombstones sealed": len(stones)})),
        _counted(events, "_split", lambda pieces: seen.update({"split events": len(pieces) > 1})),
        _counted(events, "state", lambda pieces: seen.update({"split checkpoints": len(pieces) > 1})),
        _counted(
            events, "find_states", lambda states: seen.update({"split checkpoints read": any(len(state) > 1 for state in states)})
        ),
    ):
        yield


def _counted(owner: ModuleType | type, name: str, note: Callable[[Any], None]) -> Any:
    """A function of a module, or a method of a class, also reports its result to `note`."""
    function = getattr(owner, name)

    def told(*args: Any) -> Any:
        answer = function(*args)
        note(answer)
        return answer

    return patch.object(owner, name, told)


def reached(seen: Figures) -> str:
    """How many of these places the stories came to; a whole run that has missed one is a failure.

    >>> reached(Figures(stories=1, seals=3))
    '1 of 23 rare places reached'
    >>> reached(Figures(dict.fromkeys(PLACES[1:], 1), stories=STORIES_MIN))
    Traceback (most recent call last):
    tests.trust.model.Broken: 200 stories, and none came to: seals
    """
    missed = [place for place in PLACES if not seen[place]]
    if missed and seen["stories"] >= STORIES_MIN:
        raise Broken(f"{seen['stories']} stories, and none came to: {', '.join(missed)}")
    return f"{len(PLACES) - len(missed)} of {len(PLACES)} rare places reached"
