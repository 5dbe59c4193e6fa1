"""The one module that makes and parses file names. Pure: text in, text out.

A topic lives in `topic/{name}/`. Files are named by kind and base offset, zero-padded to ten digits but compared as numbers:

    delay_0000000000.bson            a segment
    delay_0000000000.index           the B+tree of a sealed segment (cache)
    delay_0000000000.0000262144.run  the same for a part of a segment that still grows, by its first document (cache)
    *.dead                           which of its documents were cancelled or moved (cache)
    *.tmp, *.deleted                 unfinished work
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from turtlemq.errors import InvalidTopic

LOCK = "LOCK"
CLEAN = "CLEAN"
FORMAT = "FORMAT"
TOPICS = "topic"
SETTINGS = "topic.toml"
TMP = ".tmp"
DELETED = ".deleted"

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FILE = re.compile(r"(delay|ready|reserve|history)_(\d{10,})(?:\.(\d{10,}))?\.(bson|index|run|dead)(\.tmp|\.deleted)?")


def check_topic(name: str) -> str:
    """The name itself, if it is one.

    >>> check_topic("orders.close-30m")
    'orders.close-30m'
    """
    if not _TOPIC.fullmatch(name):
        raise InvalidTopic(f"{name[:220]!r} is no topic name: {InvalidTopic.__doc__}")
    return name


@dataclass(frozen=True, slots=True)
class FileName:
    """A parsed name. `first` is the first document of a run, None for whole-segment files."""

    kind: str
    base: int
    first: int | None
    what: str  # bson | index | run | dead
    suffix: str  # "", ".tmp" or ".deleted"


def parse(name: str) -> FileName | None:
    """What a file is, or None for a file that is not of a topic's logs.

    >>> parse("delay_1073741824.bson")
    FileName(kind='delay', base=1073741824, first=None, what='bson', suffix='')
    >>> parse("notes.txt") is None
    True
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    kind, base, first, what, suffix = match.groups()
    return FileName(kind, int(base), None if first is None else int(first), what, suffix or "")


def segment(kind: str, base: int) -> str:
    """The segment that begins at `base`.

    >>> segment("delay", 0)
    'delay_0000000000.bson'
    """
    return f"{kind}_{base:010d}.bson"


def table(kind: str, base: int, first: int | None) -> str:
    """The index of a whole segment (first is None) or of the run that begins with document `first`.

    >>> table("delay", 0, 262144)
    'delay_0000000000.0000262144.run'
    """
    return f"{kind}_{base:010d}.index" if first is None else f"{kind}_{base:010d}.{first:010d}.run"


def dead(kind: str, base: int, first: int | None) -> str:
    """The cancelled bits that belong to `table`."""
    return f"{kind}_{base:010d}.dead" if first is None else f"{kind}_{base:010d}.{first:010d}.dead"
