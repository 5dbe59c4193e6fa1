"""A running server for the walks of `limits`: the requests that it must accept or refuse, and the checks after them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.probe import anonymous_bytes
from tests.harness.server_process import Answer, Server
from tests.trust.model import Broken

TOPIC = "t"
MESSAGES = f"/v1/topics/{TOPIC}/messages"
MEMORY_BYTES = 900 << 20  # of the server, with the largest requests that it takes: 64 MiB of JSON, and what becomes of it


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit by its name in the documents, a walk that reaches it, and one that goes beyond."""

    name: str
    edge: Callable[[Ground], None]
    beyond: Callable[[Ground], None]
    config: dict[str, str] = field(default_factory=dict)  # of the server: variables of its environment
    files: int = 0  # that it may have open; 0: as many as the system allows

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `running`."""
        return {"files": self.files, **self.config}


@dataclass
class Ground:
    """A running server."""

    server: Server
    refused: int = 0

    def ok(self, method: str, path: str, value: Any = None, **more: Any) -> Any:
        """The JSON of an answer, which must be a good one."""
        return self._good(self.server.call(method, path, value, **more), f"{method} {path[:80]}").json

    def _good(self, answer: Answer, asked: str) -> Answer:
        if answer.status >= 300:
            raise Broken(f"{asked} is within the limits, and answered with {answer.status}: {answer.data[:300]!r}")
        if anonymous_bytes(self.server.process.pid) > MEMORY_BYTES:
            raise Broken(f"{asked} took more than {MEMORY_BYTES >> 20} MiB")
        return answer

    def refuses(self, status: int, code: str, method: str, path: str, value: Any = None, **more: Any) -> None:
        """A request beyond a limit: the documented error, and nothing has changed."""
        before = self.figures()
        answer = self.server.call(method, path, value, **more)
        got = answer.json.get("error", {}).get("code") if answer.data else ""
        if (answer.status, got) != (status, code):
            raise Broken(f"{method} {path[:80]}: {answer.status} {got}, not {status} {code}: {answer.data[:300]!r}")
        if (after := self.figures()) != before:
            raise Broken(f"{method} {path[:80]} is refused with {code}, and changed {before} to {after}")
        self.refused += 1

    def figures(self) -> dict[str, Any]:
        """The messages of every topic by state."""
        topics = self.ok("GET", "/v1/topics")["topics"]
        return {topic["topic"]: _counts(topic["stats"]) for topic in topics}

    def put(self, messages: Iterable[Mapping[str, Any]], topic: str = TOPIC) -> list[str]:
        """One batch. Its ids."""
        ids: list[str] = self.ok("POST", f"/v1/topics/{topic}/messages", {"messages": list(messages)})["ids"]
        return ids

    def fetch(self, many: int, group: str = "default", **asked: Any) -> list[str]:
        """So many messages, with as many requests as it takes. Their ids."""
        got: list[str] = []
        while len(got) < many:
            came = self.ok("POST", f"/v1/topics/{TOPIC}/groups/{group}/fetch", {"max": min(10_000, many - len(got)), **asked})
            if not came["messages"]:
                raise Broken(f"{len(got):,} of {many:,} messages came to group {group}")
            got += [message["id"] for message in came["messages"]]
        return got

    def works(self) -> None:
        """Another topic takes and gives messages."""
        (id_,) = self.put([{"body": "still here"}], "other")
        (message,) = self.ok("POST", "/v1/topics/other/fetch", {"wait": 10, "max": 1})["messages"]
        if message["id"] != id_ or self.ok("POST", "/v1/topics/other/ack", [id_])["acked"] != 1:
            raise Broken(f"another topic gave {message} for {id_}")


def _counts(stats: Mapping[str, int]) -> dict[str, int]:
    """Figures that no timer changes: a sleeper may become ready meanwhile."""
    counts = {state: stats[state] for state in ("reserve", "history", "dead", "cancelled")}
    return {"to come": stats["sleep"] + stats["ready"], **counts}


def long_ids(many: int) -> list[str]:
    """Ids of the greatest length."""
    return [f"{n:0200d}" for n in range(many)]


def as_json(value: Any) -> bytes:
    """A body without spaces, so that its size is known."""
    return json.dumps(value, separators=(",", ":")).encode()
