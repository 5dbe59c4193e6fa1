"""Celery: tasks with an ETA or a countdown sleep in TurtleMQ, and go to Celery's broker when they are due.

Without it, a worker fetches such tasks at once and holds them in memory until they are due. `TurtleCelery` is used in place of
`Celery`. `python -m turtlemq.integrations.celery shop.tasks:app` is the relay; any number of them may run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery, uuid
from celery.utils.time import maybe_make_aware
from kombu.serialization import dumps, loads, prepare_accept_content

from turtlemq.client import Consumer, Message
from turtlemq.integrations.delayed_tasks import DelayedTasks, run_relay

TOPIC = "celery-eta"
_OF_THIS_PROCESS = ("producer", "publisher", "connection", "router", "result_cls", "task_type", "add_to_parent")


class TurtleCelery(Celery):
    """A Celery app whose delayed tasks sleep in TurtleMQ, retries with a countdown included.

    turtlemq: where its tasks sleep; else in the topic `celery-eta` of the server in TURTLEMQ_URL.
    """

    def __init__(self, *args: Any, turtlemq: DelayedTasks | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turtlemq = DelayedTasks(TOPIC) if turtlemq is None else turtlemq

    def send_task(
        self, name: str, args: Any = None, kwargs: Any = None, countdown: Any = None, eta: Any = None, **options: Any
    ) -> Any:
        """Send a task. One that is due later is stored by TurtleMQ before this returns."""
        due_s = self._due_s(countdown, eta)
        if due_s is None or due_s < time.time() + self.turtlemq.min_delay:
            return super().send_task(name, args, kwargs, countdown=countdown, eta=eta, **options)
        task_id = options["task_id"] = options.get("task_id") or uuid()
        parent = self.current_worker_task
        result = (options.get("result_cls") or self.AsyncResult)(task_id)
        result.ignored = bool(options.get("ignore_result"))
        body, headers = self._pack(name, args, kwargs, options, parent)
        retries = options.get("retries") or 0
        self.turtlemq.put(f"{task_id}.{retries}" if retries else task_id, body, round(due_s * 1000), headers)
        if parent is not None and options.get("add_to_parent", True):
            parent.add_trail(result)
        return result

    def _due_s(self, countdown: Any, eta: Any) -> float | None:
        if eta is not None:
            when = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
            return float(maybe_make_aware(when, self.timezone).timestamp())
        return None if countdown is None else time.time() + float(countdown)

    def _pack(self, name: str, args: Any, kwargs: Any, options: dict[str, Any], parent: Any) -> tuple[bytes, dict[str, str]]:
        """A task as bytes, by Celery's own serializer, and the headers that say how to read it."""
        kept = {key: value for key, value in options.items() if key not in _OF_THIS_PROCESS and value is not None}
        for key in ("queue", "exchange"):
            if hasattr(kept.get(key), "name"):
                kept[key] = kept[key].name
        if isinstance(kept.get("expires"), int | float):  # it counts from now, not from the relay
            kept["expires"] = datetime.now(UTC) + timedelta(seconds=kept["expires"])
        kept.setdefault("reply_to", self.thread_oid)
        if parent is not None:
            kept.setdefault("parent_id", parent.request.id)
            kept.setdefault("root_id", parent.request.root_id or parent.request.id)
        serializer = kept.get("serializer") or self.conf.task_serializer
        kind, encoding, data = dumps([name, args, kwargs, kept], serializer)
        headers = {"celery-task": name, "content-type": kind, "content-encoding": encoding}
        return data.encode() if isinstance(data, str) else data, headers

    def forward(self, message: Message) -> None:
        """Send a due task to the broker. Formats that the app does not accept are refused."""
        headers: Mapping[str, str] = message.headers
        accept = prepare_accept_content(self.conf.accept_content)
        found = loads(message.body, headers["content-type"], headers["content-encoding"], accept=accept)
        name, args, kwargs, options = found
        super().send_task(name, args, kwargs, **options)

    def relay(self, **options: Any) -> Consumer:
        """The consumer that forwards due tasks; `run` it in a process of its own."""
        return self.turtlemq.relay(self.forward, **options)


if __name__ == "__main__":
    run_relay("turtlemq.integrations.celery", "Give sleeping tasks of a TurtleCelery app to its broker when they are due.")
