"""Shards: independent parts of the topics of one server or cluster. A topic lives in one shard, which its name alone tells. Pure.

The server, the client and Spark use this function, so all of them find a topic without a look-up. Its result for a name never
changes: files that exist depend on it.
"""

from __future__ import annotations

import xxhash

HASH = "xxh3_64"


def shard_of(topic: str, shards: int) -> int:
    """The shard of a topic, of so many.

    >>> [shard_of("orders", shards) for shards in (1, 4, 16)]
    [0, 3, 11]
    """
    return int(xxhash.xxh3_64_intdigest(topic.encode()) % shards)
