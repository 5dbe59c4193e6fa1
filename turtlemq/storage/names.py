"""File names: the one module that makes and parses them. Pure: text in, text out.

A topic is stored in `topic/{name}/`. Files are named by kind and base offset, zero-padded to ten digits but compared as numbers:

    delay_0000000000.bson            a segment
    delay_0000000000.index           the B+tree of a sealed segment (cache)
    delay_0000000000.0000262144.run  the B+tree of a part of a segment that still grows, named by its first document (cache)
    *.dead                           ended bits: which documents were cancelled or replaced (cache)
    *.tmp, *.deleted                 unfinished work
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from turtlemq.errors import InvalidArgument, InvalidTopic

LOCK = "LOCK"
CLEAN = "CLEAN"
FORMAT = "FORMAT"
HASH_SEED = "HASH_SEED"
CLOCK = "CLOCK"  # the time that a virtual clock has reached
TOPICS = "topic"
BALLAST, RESERVE = "BALLAST", "RESERVE"  # kept disk space
PINNED = "PINNED"  # links that a backup is being made from
READERS = "READERS"  # links that Spark reads from
REPLICA = "REPLICA"  # facts of a copy about itself
REPLICA_SUMS = "REPLICA.sums"  # checksums of files that do not change any more
REPLICA_RING = "REPLICA.ring"  # the newest records of a copy that was stopped properly
SYNC = "SYNC"  # links and files of copies under way
AUDIT, AUDIT_BEFORE = "AUDIT", "AUDIT.1"  # changes that operators have asked for, and the file that was full before
DIVERGED = "DIVERGED"  # tails of an old leader that no answer has told of
NODE = "NODE"  # facts of a cluster's node about itself
SHARDS = "shard"  # in the folder of such a node: the data folders of its replicas; of a server with shards: those of its shards
SHARD_COUNT = "SHARDS"  # how many shards a server has, each with a data folder of its own
SHARDS_MAX = 64
LOCAL = frozenset(  # of one machine alone
    {LOCK, BALLAST, RESERVE, PINNED, READERS, REPLICA, REPLICA_SUMS, REPLICA_RING, SYNC, DIVERGED, AUDIT, AUDIT_BEFORE}
)
SETTINGS = "topic.toml"
PAUSED = "paused.toml"  # whether a topic and its groups are paused
ENDPOINTS = "endpoints.json"  # registered URLs of a topic, with their secrets
REPLAYS = "replays.json"  # copies of a topic's messages into other topics, as jobs
OFFSET = "offset"  # the checkpoint of a Broker
DEAD, SCHEDULES = "dead", "schedules"  # folders of a topic, each with an Index of its own
INNER = (DEAD, SCHEDULES)
TMP = ".tmp"
DELETED = ".deleted"

_TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FILE = re.compile(
    r"(delay|ready|reserve|history|dead)_([0-9]{10,})(?:\.([0-9]{10,}))?\.(bson|index|run|dead|filter)(\.tmp|\.deleted)?"
)


def is_topic(name: str) -> bool:
    """Is this a valid topic name?"""
    return _TOPIC.fullmatch(name) is not None


def dropped(name: str, number: int = 0) -> str:
    """A name of a topic's folder while it is being removed. It is no valid topic name. `number`: for another one, if the folder
    of an earlier topic of this name could not be removed.

    >>> dropped("orders"), is_dropped(dropped("orders")), is_topic(dropped("orders"))
    ('.orders.deleted', True, False)
    >>> dropped("orders", 1)
    '.orders.1.deleted'
    """
    return f".{name}{DELETED}" if number == 0 else f".{name}.{number}{DELETED}"


def is_dropped(name: str) -> bool:
    """Is this a folder whose removal a crash has interrupted?"""
    return name.startswith(".") and name.endswith(DELETED)


def check_topic(name: object) -> str:
    """Return a valid topic name, else raise `InvalidTopic`.

    >>> check_topic("orders.close-30m")
    'orders.close-30m'
    """
    if not isinstance(name, str) or not _TOPIC.fullmatch(name):
        raise InvalidTopic(f"{name!r:.220} is no topic name: {InvalidTopic.__doc__}")
    return name


def check_group(name: object) -> str:
    """Return a valid group name, else raise `InvalidArgument`. Topics and groups have the same grammar."""
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
    """Parse a file name of a topic's folder; None if it is no log and no cache of one.

    >>> parse("delay_1073741824.bson")
    FileName(kind='delay', base=1073741824, first=None, what='bson', suffix='')
    >>> parse("notes.txt") is None
    True
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    kind, base, first, what, suffix = match.groups()
    parsed = FileName(kind, int(base), None if first is None else int(first), what, suffix or "")
    return parsed if make(parsed) == name else None  # with other zeros there would be two names for one file


def make(file: FileName) -> str:
    """The inverse of `parse`."""
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
    """The ended bits that belong to `table`."""
    return f"{kind}_{base:010d}.dead" if first is None else f"{kind}_{base:010d}.{first:010d}.dead"


def filter_(kind: str, base: int, _: int | None = None) -> str:
    """A Bloom filter over the tables of segments up to this one. The file has this name, with TMP, only while it is created; then
    it is unlinked, and lives as a mapping."""
    return f"{kind}_{base:010d}.filter"
