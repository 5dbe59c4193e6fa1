"""Which files of a data folder are replicated. Pure. The leader ships no other ones, and a standby touches no other ones.

>>> is_shared("topic/orders/delay_0000000000.bson"), is_shared("LOCK"), is_shared("topic/../FORMAT")
(True, False, False)
>>> is_shared("topic/orders/schedules/delay_0000000000.bson"), is_shared("topic/orders/others/delay_0000000000.bson")
(True, False)
"""

from __future__ import annotations

import re
from functools import lru_cache

from turtlemq.errors import Corrupt
from turtlemq.storage import names

_TOP = re.compile(rf"({names.FORMAT}|{names.CLEAN}|{names.HASH_SEED})(\.tmp)?|")
_INNER = f"(/({'|'.join(names.INNER)}))?"
_INSIDE = re.compile(rf"topic(/(?P<topic>[^/]+){_INNER}(/(?P<file>[^/]+))?)?")
_PLAIN = {  # beside logs and their caches
    name + suffix
    for name in (names.SETTINGS, names.PAUSED, names.ENDPOINTS, names.REPLAYS, names.OFFSET)
    for suffix in ("", names.TMP)
}
_LOCAL = re.compile(
    rf"({'|'.join(map(re.escape, sorted(names.LOCAL)))})(\.tmp|/.*)?"
    rf"|topic/[^/]+{_INNER}/[^/]+\.(damaged(\.tmp)?|filter\.tmp)"
)


@lru_cache(1 << 14)
def is_shared(path: str) -> bool:
    """Is this a file or folder that all copies have? `path`: relative to the data folder, which itself is the empty path.
    A dropped topic may hold anything: it is about to be removed."""
    if _TOP.fullmatch(path):
        return True
    match = _INSIDE.fullmatch(path)
    if match is None or _LOCAL.fullmatch(path) or not {".", ".."}.isdisjoint(path.split("/")):
        return False
    topic, file = match["topic"], match["file"]
    if topic is None or file is None or file in names.INNER:
        return topic is None or names.is_topic(topic) or names.is_dropped(topic)
    known = names.parse(file)
    plain = file in _PLAIN or (known is not None and known.what != "filter")
    return (plain and names.is_topic(topic)) or names.is_dropped(topic)


@lru_cache(1 << 14)
def must_ship(path: str) -> bool:
    """Is a change of this file for all copies? Raises `Corrupt` for a file that is neither shared nor known to be local: a file
    that copies lack would be missed only after a failover."""
    if is_shared(path):
        return True
    if _LOCAL.fullmatch(path):
        return False
    raise Corrupt(f"{path!r} is neither a replicated file nor one of this machine alone")
