"""Move the one-off jobs of an APScheduler into TurtleMQ.

Each job that runs once at a date becomes a message with its function, arguments and due time. Its id is that of the job, so a
second run stores nothing twice. A consumer calls the functions, of which it knows a list: a message cannot name any other. Jobs
that repeat (interval, cron) stay where they are. The job store may be any that APScheduler 3 has; here it is in memory.

    python examples/apscheduler_jobs.py --fast
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.date import DateTrigger

from turtlemq.client import Client, Consumer, Message, NewMessage, new_id

TOPIC = "apscheduler-jobs"


def messages(scheduler: BackgroundScheduler) -> Iterator[NewMessage]:
    """The jobs that run once, as messages. Requires that the scheduler is paused, so that none runs meanwhile."""
    for job in scheduler.get_jobs():
        if isinstance(job.trigger, DateTrigger) and job.next_run_time is not None:
            body = {"call": job.func_ref, "args": job.args, "kwargs": job.kwargs}
            yield NewMessage(body=body, id=job.id, due=job.next_run_time)


def move(scheduler: BackgroundScheduler, client: Client) -> list[str]:
    """Put all one-off jobs, then remove them from the scheduler. Returns the ids of the jobs that stay."""
    scheduler.pause()
    for id_ in client.put_many(TOPIC, list(messages(scheduler))):  # durable when this returns: removed only then
        scheduler.remove_job(id_)
    stay = [job.id for job in scheduler.get_jobs()]
    scheduler.resume()
    return stay


def caller(*functions: Callable[..., Any]) -> Callable[[Message], None]:
    """A handler that calls one of these functions, as APScheduler names it: `module:name`."""
    known = {f"{function.__module__}:{function.__qualname__}": function for function in functions}

    def handle(message: Message) -> None:
        known[message.body["call"]](*message.body["args"], **message.body["kwargs"])

    return handle


# The application

called: set[str] = set()
all_called = threading.Event()


def remind(name: str, *, run: str) -> None:
    print(f"mail to {name}")
    called.add(run + name)
    if {run + "Ada", run + "Bert"} <= called:
        all_called.set()


def tidy() -> None:
    print("tidied")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="address of the server (else TURTLEMQ_URL, else this machine)")
    parser.add_argument("--fast", action="store_true", help="one second in place of three days")
    args = parser.parse_args()
    run = new_id()

    scheduler = BackgroundScheduler(timezone=UTC)
    scheduler.start()
    due = datetime.now(UTC) + (timedelta(seconds=1) if args.fast else timedelta(days=3))
    for name in ("Ada", "Bert"):
        scheduler.add_job(remind, "date", run_date=due, args=[name], kwargs={"run": run}, id=f"remind-{name}-{run}")
    scheduler.add_job(tidy, "cron", hour=3, id="tidy")

    with Client(args.url) as client:
        print(f"stay with APScheduler: {move(scheduler, client)}")
        with Consumer(TOPIC, caller(remind), client, wait=5, concurrency=1):
            all_called.wait()
    scheduler.shutdown()


if __name__ == "__main__":
    main()
