"""The table of HTTP operations for operators of topics: pause and resume. Its entries belong to the table in `operations`."""

from __future__ import annotations

from turtlemq.server.auth import OPERATE
from turtlemq.server.handlers import topics
from turtlemq.server.operation import Operation
from turtlemq.server.outgoing import answers

_TOPIC = "/v1/topics/{topic}"


def _pausing(base: str, suffix: str, what: str) -> list[Operation]:
    """Pause and resume: of a topic, or of a group."""
    return [
        Operation(
            f"POST {base}/pause",
            topics.pause,
            OPERATE,
            f"pause{suffix}",
            f"Deliver nothing of {what} until it is resumed",
            answers.Paused,
            "Messages still come due; puts, acks and extends work, leases end and retries are scheduled. A fetch answers "
            "`paused`; a long poll waits its time, or until there are messages after a resume. It survives restarts.",
            errors=(404, 507),
            answer_example={"paused": True},
        ),
        Operation(
            f"POST {base}/resume",
            topics.resume,
            OPERATE,
            f"resume{suffix}",
            f"Deliver messages of {what} again",
            answers.Paused,
            errors=(404, 507),
            answer_example={"paused": False},
        ),
    ]


PAUSES = [*_pausing(_TOPIC, "Topic", "a topic"), *_pausing(_TOPIC + "/groups/{group}", "Group", "a group")]
