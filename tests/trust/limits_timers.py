"""Walks to the limits of batches that may replace or reschedule messages."""

from __future__ import annotations

from typing import Any

from tests.trust.limits_ground import MESSAGES, TOPIC, Ground, Limit
from tests.trust.model import Broken
from turtlemq.model import KEPT_BYTES_MAX, VERSIONS_MAX

PATH = f"/v1/topics/{TOPIC}"


def _counts(ground: Ground, outcome: str, wanted: int, batch: dict[str, Any]) -> None:
    if (got := ground.ok("POST", MESSAGES, batch)[outcome]) != wanted:
        raise Broken(f"{got:,} of {wanted:,} messages {outcome}")


def _versions(many: int, mode: str, body: str = "x") -> dict[str, Any]:
    messages = [{"id": f"{n:0200d}", "body": body, "delay": 3_600} for n in range(many)]
    return {"messages": messages, "if_exists": mode}


def _versions_edge(ground: Ground) -> None:
    """Messages that sleep, that were delivered and settled, and that are new, with the longest ids."""
    for mode in ("replace", "reschedule", "replace"):
        ground.ok("POST", MESSAGES, _versions(VERSIONS_MAX, mode))
    ids = ground.put({"id": f"{n:0200d}", "body": "x", "if_exists": "replace"} for n in range(VERSIONS_MAX))
    ground.ok("POST", f"{PATH}/ack", ground.fetch(len(ids), wait=5))
    _counts(ground, "replaced", VERSIONS_MAX, _versions(VERSIONS_MAX, "replace"))


def _versions_beyond(ground: Ground) -> None:
    for mode in ("replace", "reschedule", "error"):
        ground.refuses(413, "TOO_LARGE", "POST", MESSAGES, _versions(VERSIONS_MAX + 1, mode))
    one = _versions(VERSIONS_MAX + 1, "keep")
    one["messages"][-1]["if_exists"] = "replace"
    ground.refuses(413, "TOO_LARGE", "POST", MESSAGES, one)
    ground.refuses(413, "TOO_LARGE", "POST", "/v1/topics/new/messages", one)


def _kept_edge(ground: Ground) -> None:
    ground.ok("POST", MESSAGES, _versions(256, "keep", "x" * ((KEPT_BYTES_MAX >> 8) - 2)))
    _counts(ground, "rescheduled", 256, _versions(256, "reschedule"))


def _kept_beyond(ground: Ground) -> None:
    ground.ok("POST", MESSAGES, {"id": f"{256:0200d}", "body": "x", "delay": 3_600})
    ground.refuses(413, "TOO_LARGE", "POST", MESSAGES, _versions(257, "reschedule"))


TIMERS = (
    Limit("messages of a batch with `if_exists`", _versions_edge, _versions_beyond),
    Limit("stored bodies that a batch reschedules", _kept_edge, _kept_beyond),
)
