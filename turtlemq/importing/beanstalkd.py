"""Source: the delayed and ready jobs of a tube of beanstalkd, read with `stats-job` and `peek`, which remove nothing.

beanstalkd lists no jobs, but it numbers them in order. So all numbers up to the newest are asked for, a pipelined batch at a
time. The newest is learned by putting a job into a tube of its own, which is deleted at once.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from turtlemq.client.options import NewMessage
from turtlemq.importing.fields import BodyKind, Unusable, body_of, message_id

PROBE_TUBE = b"turtlemq-import-probe"
URGENT = 1024  # beanstalkd itself calls a job with a smaller priority urgent
ASK_MAX = 1000  # jobs that are asked for at once
TIMEOUT_S = 30.0
_STATES = ("delayed", "ready")


class Connection:
    """A connection to beanstalkd."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._socket = socket.create_connection((host, port), TIMEOUT_S)
        except OSError as error:
            raise Unusable(f"no answer from beanstalkd at {host}:{port}: {error}") from error
        self._reader: BinaryIO = self._socket.makefile("rb")

    def ask(self, *commands: bytes) -> list[tuple[list[bytes], bytes]]:
        """Send commands together. Returns the words of each answer, and its data."""
        try:
            self._socket.sendall(b"".join(commands))
            return [self._answer() for _ in commands]
        except OSError as error:
            raise Unusable(f"the connection to beanstalkd broke: {error}") from error

    def _answer(self) -> tuple[list[bytes], bytes]:
        line = self._reader.readline()
        if not line.endswith(b"\r\n"):
            raise Unusable("beanstalkd closed the connection")
        words = line.split()
        if words[0] not in (b"OK", b"FOUND"):
            return words, b""
        size = int(words[-1])
        return words, self._reader.read(size + 2)[:size]

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


@dataclass
class Beanstalkd:
    """The delayed and ready jobs of a tube; with `buried`, also its buried ones, as due now."""

    connection: Connection
    tube: str
    prefix: str = ""
    buried: bool = False
    last_id: int | None = None
    kind: BodyKind = "auto"
    skipped: Counter[str] = field(default_factory=Counter)

    def total(self) -> int:
        """The number of the newest job."""
        if self.last_id is None:
            use = b"use %b\r\n"
            (_, (words, _), _) = self.connection.ask(use % PROBE_TUBE, b"put 0 0 60 0\r\n\r\n", use % b"default")
            if words[0] != b"INSERTED":
                raise Unusable(f"beanstalkd takes no jobs ({words[0].decode()}): name its newest one with --last-id")
            self.connection.ask(b"delete %d\r\n" % int(words[1]))
            self.last_id = int(words[1]) - 1
        return self.last_id

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def batches(self, count: int) -> Iterator[tuple[int, list[NewMessage]]]:
        """All jobs of the tube by their numbers, those of a batch of numbers at a time."""
        last, step = self.total(), min(count, ASK_MAX)
        for first in range(1, last + 1, step):
            ids = range(first, min(first + step, last + 1))
            yield len(ids), self._messages(list(ids))

    def _messages(self, ids: list[int]) -> list[NewMessage]:
        answers = self.connection.ask(*(b"stats-job %d\r\n" % id_ for id_ in ids))
        facts = {id_: _facts(data) for id_, (words, data) in zip(ids, answers, strict=True) if words[0] == b"OK"}
        wanted = [id_ for id_, job in facts.items() if self._wants(job)]
        found = []
        for id_, (words, body) in zip(wanted, self.connection.ask(*(b"peek %d\r\n" % id_ for id_ in wanted)), strict=True):
            if words[0] == b"FOUND":
                found.append(self._message(id_, facts[id_], body))
        return [message for message in found if message is not None]

    def _wants(self, job: dict[str, str]) -> bool:
        if job["tube"] != self.tube:
            return False
        if job["state"] in _STATES or (self.buried and job["state"] == "buried"):
            return True
        self.skipped[f"{job['state']}: {'a worker has it' if job['state'] == 'reserved' else 'ask for it with --buried'}"] += 1
        return False

    def _message(self, id_: int, job: dict[str, str], body: bytes) -> NewMessage | None:
        now_ms = time.time_ns() // 1_000_000
        left_s = int(job["time-left"]) if job["state"] == "delayed" else min(0, int(job["delay"]) - int(job["age"]))
        try:
            return NewMessage(
                body=body_of(body, self.kind),
                id=message_id(self.prefix, str(id_)),
                due=now_ms + left_s * 1000,
                ttr=float(job["ttr"]),
                priority="high" if int(job["pri"]) < URGENT else None,
                headers={"beanstalkd-pri": job["pri"]},
            )
        except Unusable as why:
            self.skipped[str(why)] += 1
            return None


def _facts(yaml: bytes) -> dict[str, str]:
    """The answer to stats-job, lines of `name: value`.

    >>> _facts(b"---\\nid: 8\\ntube: \\"orders\\"\\n")
    {'id': '8', 'tube': 'orders'}
    """
    lines = (line.partition(": ") for line in yaml.decode().splitlines())
    return {name: value.strip('"') for name, colon, value in lines if colon}
