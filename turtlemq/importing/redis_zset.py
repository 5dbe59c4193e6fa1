"""Source: a sorted set of Redis whose scores are due times.

The member is the body itself, or it is an id, and the body is a field of a hash or a key of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from turtlemq.client.options import NewMessage
from turtlemq.importing.fields import BodyKind, ScoreUnit, Unusable, body_of, due_of_number, message_id
from turtlemq.importing.redis_client import check_type, redis_errors, scan_zset


@dataclass
class RedisZset:
    """The members of a sorted set.

    hash_key: a hash with the bodies by member. body_key: a pattern such as `job:{}` for keys with the bodies.
    """

    client: Any
    key: str
    prefix: str = ""
    hash_key: str | None = None
    body_key: str | None = None
    unit: ScoreUnit = "auto"
    kind: BodyKind = "auto"
    skipped: Counter[str] = field(default_factory=Counter)

    def total(self) -> int:
        """The number of members. Raises `Unusable` if there is no such sorted set."""
        with redis_errors():
            if not check_type(self.client, self.key, "zset"):
                raise Unusable(f"there is no key {self.key!r}")
            return int(self.client.zcard(self.key))

    def close(self) -> None:
        """Close the connection."""
        self.client.close()

    def batches(self, count: int) -> Iterator[tuple[int, list[NewMessage]]]:
        """All members, some at a time."""
        with redis_errors():
            for members in scan_zset(self.client, self.key, count):
                bodies = self._bodies([member for member, _ in members])
                found = [self._message(member, score, body) for (member, score), body in zip(members, bodies, strict=True)]
                yield len(members), [message for message in found if message is not None]

    def _bodies(self, members: list[bytes]) -> list[bytes | None]:
        if self.hash_key is not None:
            return list(self.client.hmget(self.hash_key, members))
        if self.body_key is not None:
            before, _, after = self.body_key.encode().partition(b"{}")
            return list(self.client.mget([before + member + after for member in members]))
        return list(members)

    def _message(self, member: bytes, score: float, body: bytes | None) -> NewMessage | None:
        if body is None:
            self.skipped["no body"] += 1
            return None
        try:
            due_ms = due_of_number(score, self.unit)
            return NewMessage(body=body_of(body, self.kind), id=message_id(self.prefix, member), due=due_ms)
        except Unusable as why:
            self.skipped[str(why)] += 1
            return None
