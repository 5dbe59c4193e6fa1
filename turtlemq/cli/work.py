"""The verb `work`: a consumer that runs a command for each message, and acknowledges it by the exit code.

Body and error output of a command go through temporary files, so a command may ignore its stdin, start others that live longer,
or write much, and no thread waits for a pipe. Commands run in sessions of their own: a Ctrl-C reaches the worker alone, which
lets them finish.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.call import URL, unreachable
from turtlemq.cli.output import fail, print_error
from turtlemq.cli.parameters import Group, Topic, Url, duration_option

if TYPE_CHECKING:
    from turtlemq.client import Message

log = logging.getLogger("turtlemq.work")
KILL_S = 5.0  # between SIGTERM and SIGKILL for a command that does not end
ACKS_S = 5.0  # for the last acks, after all commands have ended
ERROR_LINES, ERROR_BYTES = 10, 2_000  # of a command's error output, kept with the message
_NOT_IN_NAMES = re.compile(r"[^A-Z0-9_]")


def work(
    topic: Topic,
    command: Annotated[str, typer.Option("--exec", metavar="CMD", help="A command line, run by sh.", show_default=False)],
    group: Group = "default",
    concurrency: Annotated[int, typer.Option(metavar="N", help="Commands at the same time.", min=1, max=1000)] = 1,
    ttr: Annotated[float, duration_option("Seconds of a lease. It is extended while a command runs.", show_default=True)] = 30,
    limit: Annotated[float | None, duration_option("Seconds that a command may take; then it is ended, and has failed.")] = None,
    retry_delay: Annotated[
        float | None, duration_option("Seconds until a failed message comes again. (default: the topic's back-off)")
    ] = None,
    drain: Annotated[
        float, duration_option("Seconds that commands may still take after SIGTERM or Ctrl-C.", show_default=True)
    ] = 30,
    count: Annotated[
        int, typer.Option("--max", metavar="N", help="End after so many messages; 0: never.", min=0, show_default=False)
    ] = 0,
    name: Annotated[str, typer.Option(help="The name of this consumer, for the record.")] = "",
    url: Url = URL,
) -> None:
    """Run a command for each message: body on stdin, id and the rest in the environment. Exit code 0 acknowledges it.

    Any other exit code has failed: the last lines of stderr become the error of the message, which comes again after the topic's
    back-off, and is a dead letter after its max_attempts. A text is written to stdin as it is, bytes likewise, any other body as
    JSON. The environment has MESSAGE_ID, MESSAGE_TOPIC, MESSAGE_GROUP, MESSAGE_ATTEMPT, MESSAGE_PRIORITY, MESSAGE_DUE_MS,
    MESSAGE_CREATED_MS, MESSAGE_BODY_KIND (json, text or bytes), MESSAGE_HEADERS (JSON), and MESSAGE_HEADER_LANG for a header
    'lang'. SIGTERM and Ctrl-C fetch no more and let running commands finish; a second one ends them.

    turtlemq work orders --exec ./close-order.sh --concurrency 4

    turtlemq work mails --exec 'jq -r .to | xargs -n1 send-reminder' --group mailer --limit 5m
    """
    from turtlemq.client import Consumer, errors

    logging.basicConfig(format="turtlemq: %(message)s", level=logging.WARNING)
    commands = Commands(command, url, limit, retry_delay)
    try:
        consumer = Consumer(
            topic, commands.handle, group=group, concurrency=concurrency, prefetch=concurrency, ttr=ttr, name=name, url=url
        )
        commands.stop_after(count, lambda: consumer.stop(wait=False))
        with _signals() as signals:
            _warn_if_unreachable(url)
            threading.Thread(target=_on_signals, args=(signals, consumer, commands, drain), daemon=True).start()
            consumer.run(timeout=drain + KILL_S + ACKS_S)
    except (errors.ClientError, ValueError) as error:
        fail(str(error), 2 if isinstance(error, ValueError | errors.InvalidArgument) else 1)


def _warn_if_unreachable(url: str) -> None:
    """Say that no server answers, and why. The worker waits for one: it may be started before it."""
    if why := unreachable(url):
        print_error(f"{why} The worker goes on trying.")


@contextmanager
def _signals() -> Iterator[SimpleQueue[int]]:
    """A queue of the SIGTERM and SIGINT that come meanwhile. A `SimpleQueue`, since its `put` is safe in a signal handler."""
    signals: SimpleQueue[int] = SimpleQueue()
    before = {number: signal.signal(number, lambda given, _: signals.put(given)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_signals(signals: SimpleQueue[int], consumer: Any, commands: Commands, drain_s: float) -> None:
    """Wait for a signal and stop the consumer; end its commands after `drain_s` seconds, or at a second signal."""
    signals.get()
    consumer.stop(wait=False)
    with suppress(Empty):
        signals.get(timeout=drain_s)
    commands.end_all()


class Commands:
    """Runs the command for each message, in any number of threads, and knows which processes run."""

    def __init__(self, command: str, url: str, limit_s: float | None, retry_delay_s: float | None) -> None:
        self._command, self._url, self._limit_s, self._retry_delay_s = command, url, limit_s, retry_delay_s
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ending = False
        self._left = 0
        self._stop: Callable[[], None] = lambda: None

    def stop_after(self, count: int, stop: Callable[[], None]) -> None:
        """Call `stop` when so many messages have begun; 0: never."""
        self._left, self._stop = count, stop

    def handle(self, message: Message) -> None:
        """Run the command for a message. Raises `Retry` with the end of its error output if it fails."""
        self._count()
        with ExitStack() as files:
            given, said = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            given.write(_body(message)[1])
            given.seek(0)
            try:
                process = self._start(message, given, said)
            except OSError as error:  # headers that are too large for an environment, no more processes
                raise self._failed(message, f"the command did not start: {error}") from error
            how = self._wait(process)
            _pass_on(said)
            if process.returncode:
                raise self._failed(message, f"{how or _how(process.returncode)}{_last_lines(said)}")

    def _failed(self, message: Message, error: str) -> Exception:
        from turtlemq.client import Retry

        log.warning("event=command_failed id=%s attempt=%d error=%s", message.id, message.attempt, error.partition(": ")[0])
        return Retry(error, delay=self._retry_delay_s)

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._stop()

    def _start(self, message: Message, given: IO[bytes], said: IO[bytes]) -> subprocess.Popen[bytes]:
        env = os.environ | environment(message) | {"TURTLEMQ_URL": self._url}
        with self._lock:  # a command is either refused here, or seen by `end_all`
            if self._ending:
                raise OSError("the worker stops")
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command], stdin=given, stderr=said, env=env, start_new_session=True
            )
            self._running.add(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for a process. Returns why it was ended, if it was."""
        try:
            process.wait(self._limit_s)
            return ""
        except subprocess.TimeoutExpired:
            _end(process)
            return f"ended after {self._limit_s:g} s"
        finally:
            with self._lock:
                self._running.discard(process)

    def end_all(self) -> None:
        """End all commands that run, and begin no more."""
        with self._lock:
            self._ending = True
            running = list(self._running)
        for process in running:
            threading.Thread(target=_end, args=(process,), daemon=True).start()


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM for a command and its children, SIGKILL after a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)
            return


def environment(message: Message) -> dict[str, str]:
    """The variables that describe a message. A header with a NUL is only in MESSAGE_HEADERS.

    >>> from turtlemq.client import Message
    >>> environment(Message(id="o1", headers={"trace-id": "7"}, attempt=2))["MESSAGE_HEADER_TRACE_ID"]
    '7'
    """
    headers = {f"MESSAGE_HEADER_{_NOT_IN_NAMES.sub('_', key.upper())}": text for key, text in message.headers.items()}
    return {
        **{name: text for name, text in headers.items() if "\0" not in text},
        "MESSAGE_ID": message.id,
        "MESSAGE_TOPIC": message.topic,
        "MESSAGE_GROUP": message.group,
        "MESSAGE_ATTEMPT": str(message.attempt),
        "MESSAGE_PRIORITY": message.priority,
        "MESSAGE_DUE_MS": str(message.due_ms),
        "MESSAGE_CREATED_MS": str(message.created_ms),
        "MESSAGE_BODY_KIND": _body(message)[0],
        "MESSAGE_HEADERS": json.dumps(message.headers),
    }


def _body(message: Message) -> tuple[str, bytes]:
    """The kind of a body, and its bytes for stdin."""
    import msgspec

    body = message.body
    if isinstance(body, bytes):
        return "bytes", body
    if isinstance(body, str):
        return "text", body.encode(errors="surrogatepass")
    return "json", msgspec.json.Encoder(decimal_format="number").encode(body)


def _how(code: int) -> str:
    """An exit code in words.

    >>> _how(3), _how(-9)
    ('exit code 3', 'ended by SIGKILL')
    """
    return f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def _last_lines(said: IO[bytes]) -> str:
    """The last lines of the error output, behind a colon."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - ERROR_BYTES))
    lines = said.read().decode(errors="replace").strip().splitlines()
    return ": " + "\n".join(lines[-ERROR_LINES:]) if lines else ""


def _pass_on(said: IO[bytes]) -> None:
    """Copy the error output of a command to our own."""
    said.seek(0)
    target = getattr(sys.stderr, "buffer", None)
    if target is not None:
        shutil.copyfileobj(said, target)
        target.flush()
