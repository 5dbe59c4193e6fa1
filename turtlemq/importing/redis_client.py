"""The connection to a Redis server, by the package redis, and scans of its keys that remove nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from turtlemq.importing.fields import Unusable


def connect(url: str) -> Any:
    """A client of redis-py for redis://, rediss:// or unix:// that returns bytes. Raises `Unusable` if there is no answer."""
    try:
        import redis
    except ImportError:
        raise Unusable("this needs the package redis: pip install 'turtlemq[redis]'") from None
    try:
        client = redis.Redis.from_url(url)
    except ValueError as error:
        raise Unusable(f"--redis: {error}") from None
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        client.close()
        raise Unusable(f"no answer from {_without_password(url)}: {error}") from error
    return client


@contextmanager
def redis_errors() -> Iterator[None]:
    """Errors of redis-py become `Unusable`."""
    import redis

    try:
        yield
    except redis.RedisError as error:
        raise Unusable(f"Redis: {error}") from error


def _without_password(url: str) -> str:
    """An address for error messages.

    >>> _without_password("redis://me:secret@queue:6379/0")
    'redis://queue:6379/0'
    """
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def scan_zset(client: Any, key: str | bytes, count: int) -> Iterator[list[tuple[bytes, float]]]:
    """Members and scores of a sorted set, some at a time.

    Every member that stays in the set during the scan is shown, perhaps twice; members may come and go meanwhile.
    """
    cursor = 0
    while True:
        cursor, found = client.zscan(key, cursor, count=count)
        for start in range(0, len(found), count):
            yield found[start : start + count]
        if cursor == 0:
            return


def check_type(client: Any, key: str | bytes, wanted: str) -> bool:
    """Whether the key is there. Raises `Unusable` if it is of another type."""
    kind = client.type(key).decode()
    if kind not in (wanted, "none"):
        raise Unusable(f"the key {key!r} is a {kind}, not a {wanted}")
    return bool(kind == wanted)
