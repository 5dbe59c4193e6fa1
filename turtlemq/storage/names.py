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

from turtlemq.errors import InvalidArgument, InvalidTopic

LOCK = "LOCK"
CLEAN = "CLEAN"
FORMAT = "FORMAT"
TOPICS = "topic"
SETTINGS = "topic.toml"
TMP = ".tmp"
DELETED = ".deleted"

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FILE = re.compile(
    r"(delay|ready|reserve|history|dead)_([0-9]{10,})(?:\.([0-9]{10,}))?\.(bson|index|run|dead|filter)(\.tmp|\.deleted)?"
)


def is_topic(name: str) -> bool:
    """May a topic be called so?"""
    return _TOPIC.fullmatch(name) is not None


def dropped(name: str) -> str:
    """What the folder of a topic is called while it is being removed: no topic's name.

    >>> dropped("orders"), is_dropped(dropped("orders")), is_topic(dropped("orders"))
    ('.orders.deleted', True, False)
    """
    return f".{name}{DELETED}"


def is_dropped(name: str) -> bool:
    """Is this what is left of such a folder after a crash?"""
    return name.startswith(".") and name.endswith(DELETED)


def check_topic(name: object) -> str:
    """The name itself, if it is one.

    >>> check_topic("orders.close-30m")
    'orders.close-30m'
    """
    if not isinstance(name, str) or not _TOPIC.fullmatch(name):
        raise InvalidTopic(f"{name!r:.220} is no topic name: {InvalidTopic.__doc__}")
    return name


def check_group(name: object) -> str:
    """The name itself, if it is one that a group may have: the same grammar as a topic's."""
    if not isinstance(name, str) or not _TOPIC.fullmatch(name):
        raise InvalidArgument(f"{name!r:.220} is no group name: 1 to 200 of A-Z a-z 0-9 . _ -, beginning with a letter or digit")
    return name


@dataclass(frozen=True, slots=True)
class FileName:
    """A parsed name. `first` is the first document of a run, None for whole-segment files."""

    kind: str
    base: int
    first: int | None
    what: str  # bson | index | run | dead | filter
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
    found = FileName(kind, int(base), None if first is None else int(first), what, suffix or "")
    return found if make(found) == name else None  # with other zeros or numbers there would be two names for one thing


def make(file: FileName) -> str:
    """The name that `parse` takes apart."""
    maker = {"bson": lambda kind, base, _: segment(kind, base), "dead": ended_bits, "filter": filter_}.get(file.what, table)
    return maker(file.kind, file.base, file.first) + file.suffix


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


def ended_bits(kind: str, base: int, first: int | None) -> str:
    """The cancelled bits that belong to `table`."""
    return f"{kind}_{base:010d}.dead" if first is None else f"{kind}_{base:010d}.{first:010d}.dead"


def filter_(kind: str, base: int, _: int | None = None) -> str:
    """A filter over tables of segments up to this one. It has this name, with TMP, for a moment when it is begun, then none."""
    return f"{kind}_{base:010d}.filter"
