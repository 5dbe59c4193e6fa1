"""dramatiq: delayed messages sleep in TurtleMQ, and go to dramatiq's broker when they are due.

Without it, workers fetch delayed messages at once and hold them in memory, and RedisBroker refuses delays of more than a week.
`SleepingDelays` is a mixin for any broker. `python -m turtlemq.integrations.dramatiq shop.tasks:broker` is the relay; any number
of them may run.
"""

from __future__ import annotations

import time
from typing import Any

import dramatiq

from turtlemq.client import Consumer, Message
from turtlemq.integrations.delayed_tasks import DelayedTasks, run_relay

TOPIC = "dramatiq-delayed"


class SleepingDelays(dramatiq.Broker):
    """A mixin for brokers: `class Broker(SleepingDelays, RedisBroker)`. Retries with a back-off sleep in TurtleMQ, too.

    turtlemq: where its tasks sleep; else in the topic `dramatiq-delayed` of the server in TURTLEMQ_URL.
    """

    def __init__(self, *args: Any, turtlemq: DelayedTasks | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turtlemq = DelayedTasks(TOPIC) if turtlemq is None else turtlemq

    def enqueue(self, message: dramatiq.Message[Any], *, delay: int | None = None) -> dramatiq.Message[Any]:
        """Enqueue a message. One with a delay, in milliseconds, is stored by TurtleMQ before this returns."""
        if delay is None or delay < self.turtlemq.min_delay * 1000:
            return super().enqueue(message, delay=delay)
        self.emit_before("enqueue", message, delay)
        retries = message.options.get("retries") or 0
        key = f"{message.message_id}.{retries}" if retries else message.message_id
        headers = {"dramatiq-actor": message.actor_name, "dramatiq-queue": message.queue_name}
        self.turtlemq.put(key, message.encode(), time.time_ns() // 1_000_000 + delay, headers)
        self.emit_after("enqueue", message, delay)
        return message

    def forward(self, message: Message) -> None:
        """Enqueue a due message, without a delay."""
        super().enqueue(dramatiq.Message.decode(message.body))

    def relay(self, **options: Any) -> Consumer:
        """The consumer that forwards due messages; `run` it in a process of its own."""
        return self.turtlemq.relay(self.forward, **options)


if __name__ == "__main__":
    run_relay("turtlemq.integrations.dramatiq", "Give sleeping messages of a broker with SleepingDelays to it when they are due.")
