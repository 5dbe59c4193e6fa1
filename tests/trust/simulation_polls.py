"""Long polls of a story: fetches that wait in simulated time, through the server's own code for fetches.

A poll is answered by a tick, ends when its time is up, or is lost with its process. If it still waits after a tick, that says as
much as an empty answer: nothing is ready for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.trust.simulation_auditor import Fetch
from turtlemq.broker.results import Reserved
from turtlemq.server.fetches import Fetches
from turtlemq.server.long_polls import FetchRequest, LongPoll


def request_of(topic: str, asked: Fetch) -> FetchRequest:
    """A consumer's request, as the server sees it."""
    return FetchRequest(topic, asked.group, asked.count, asked.ttr_ms, asked.consumer, asked.auto)


@dataclass(eq=False)
class Poll:
    """A fetch that waits until `until`, in steady time. Plays the part of an `asyncio.Future`."""

    topic: str
    asked: Fetch
    until: int
    answers: list[tuple[Poll, Reserved]]  # of all polls, in the order in which they are answered
    result: Reserved | None = None
    error: Exception | None = None
    entry: LongPoll = field(init=False)

    def __post_init__(self) -> None:
        self.entry = LongPoll(request_of(self.topic, self.asked), self)

    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def set_result(self, result: Reserved, /) -> None:
        assert not self.done()
        self.result = result
        self.answers.append((self, result))

    def set_exception(self, exception: Exception, /) -> None:
        assert not self.done()
        self.error = exception


class Polls:
    """The long polls that wait for one process."""

    def __init__(self) -> None:
        self.waiting: list[Poll] = []
        self.answers: list[tuple[Poll, Reserved]] = []

    def add(self, fetches: Fetches, topic: str, asked: Fetch, until: int) -> Poll:
        poll = Poll(topic, asked, until, self.answers)
        self.waiting.append(poll)
        fetches.wait(poll.entry)
        return poll

    def groups(self, topic: str) -> set[str]:
        """The groups of a topic for which a poll waits."""
        return {poll.asked.group for poll in self.waiting if poll.topic == topic}

    def end_late(self, fetches: Fetches, steady: int) -> None:
        """The time of some polls is up."""
        for poll in self.waiting:
            if poll.until <= steady:
                poll.entry.end()
                fetches.leave(poll.entry)

    def take_answers(self) -> list[tuple[Poll, Reserved]]:
        """The answers since the last time. Raises the error with which a poll was answered."""
        for poll in self.waiting:
            if poll.error is not None:
                raise poll.error
        answers = list(self.answers)
        self.answers.clear()
        self.waiting = [poll for poll in self.waiting if not poll.done()]
        return answers

    def lose(self) -> list[Poll]:
        """The process is gone, and with it all answers that were not sent."""
        lost = list(self.waiting)
        self.waiting.clear()
        self.answers.clear()
        return lost
