"""A topic under load while it is backed up: producers and consumers whose every answer is written down."""

from __future__ import annotations

import threading

from typer.testing import CliRunner

from tests.harness.server_process import Server
from turtlemq.cli.verbs import command_line


def line(*args: object, code: int = 0, url: str = "http://127.0.0.1:9") -> str:
    """The command line in this process."""
    found = CliRunner().invoke(command_line(), [str(arg) for arg in args], env={"TURTLEMQ_URL": url, "COLUMNS": "300"})
    assert found.exit_code == code, (args, found.exit_code, found.output, found.exception)
    return found.output


class Traffic:
    """A producer and a consumer on a server, and the answers that they got."""

    def __init__(self, server: Server) -> None:
        self.server, self.stop = server, threading.Event()
        self.put: set[str] = set()
        self.acked: set[str] = set()
        self.threads = [threading.Thread(target=work) for work in (self._produce, self._consume)]
        self.failed: list[Exception] = []

    def __enter__(self) -> Traffic:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert not self.failed

    def _produce(self) -> None:
        try:
            for n in range(1_000_000):
                if self.stop.is_set():
                    return
                ids = [f"t{n}-{i}" for i in range(50)]
                delays = (0, 0.05, 0.3, 3600)
                self.server.put("busy", *({"body": "y" * 100, "id": id_, "delay": delays[i % 4]} for i, id_ in enumerate(ids)))
                self.put.update(ids)
        except (OSError, AssertionError) as error:
            self.failed.append(error)

    def _consume(self) -> None:
        try:
            while not self.stop.is_set():
                ids = [message["id"] for message in self.server.fetch("busy", max=100, wait=0.2)]
                if ids:
                    self.server.ack("busy", *ids)
                    self.acked.update(ids)
        except (OSError, AssertionError) as error:
            self.failed.append(error)
