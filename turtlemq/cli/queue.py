"""Client verbs that move messages through their life cycle: put, fetch, ack, extend, cancel."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from turtlemq.cli.call import URL, CallFailed, asked, call, json_error, json_with_body, path
from turtlemq.cli.output import body_text, console, fail, print_error, print_json, printable, progress
from turtlemq.cli.parameters import AsJson, Group, Topic, Url, choice, duration_option, time_option
from turtlemq.cli.times import TIME_HELP, format_time
from turtlemq.if_exists import MODES

LINES = 1_000  # of a file in one request at most
LINE_BYTES = 4 << 20  # of a file in one request, about
Lease = Annotated[
    str | None, typer.Option(help="The lease that fetch showed: messages that another consumer has by now are left alone.")
]
IfKnown = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(MODES),
        help="If the id is known: keep the stored message (default), replace it, reschedule it if it sleeps, or fail.",
        show_default=False,
        autocompletion=choice(*MODES),
    ),
]
Priority = Annotated[
    str | None,
    typer.Option(
        metavar="high|normal|low",
        help="Which ones come first.",
        show_default=False,
        autocompletion=choice("high", "normal", "low"),
    ),
]
Header = Annotated[list[str] | None, typer.Option(metavar="NAME=TEXT", help="A header; may be repeated.", show_default=False)]
AsText = Annotated[bool, typer.Option("--text", help="The body is text, also if it looks like JSON.")]
DUE = f"When it is due: {TIME_HELP}."
_FILE_HELP = 'A file of messages, a JSON object a line (NDJSON), as {"id": "a", "body": 1, "delay": 30}.'


def put(
    topic: Topic,
    body: Annotated[
        str | None, typer.Argument(help="The body: JSON, or any other text. '-' reads messages from stdin.", show_default=False)
    ] = None,
    delay: Annotated[float | None, duration_option("Seconds to sleep, or 30m, 2h, 3d.")] = None,
    due: Annotated[int | None, time_option(DUE)] = None,
    id_: Annotated[str | None, typer.Option("--id", help="An id of your own.", show_default=False)] = None,
    ttr: Annotated[float | None, duration_option("Seconds that a consumer may take.")] = None,
    priority: Priority = None,
    expires: Annotated[int | None, time_option("Not delivered by then, it is dead.")] = None,
    spread: Annotated[float | None, duration_option("Due between then and so many seconds later, evenly.")] = None,
    if_exists: IfKnown = None,
    header: Header = None,
    file: Annotated[Path | None, typer.Option(help=_FILE_HELP, show_default=False)] = None,
    text: AsText = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Store a message, or many from a file or stdin. Prints its id.

    turtlemq put orders '{"close": 17}' --id order-17 --delay 30m

    turtlemq put timers '{"user": 17}' --id user-17 --delay 3d --if-exists replace

    turtlemq put mails hello --due 2030-01-31T08:00 --priority high --header lang=en

    turtlemq put orders --file orders.ndjson
    """
    if (body is None) == (file is None):
        fail("give a BODY, or --file F.ndjson, or '-' for stdin", 2)
    given = {"id": id_, "delay": delay, "due_ms": due, "spread": spread, "ttr": ttr, "priority": priority, "expires_ms": expires}
    message: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if header:
        message["headers"] = headers_of(header)
    target = _target(topic, if_exists)
    if body is not None and body != "-":
        warn_of_broken_json(body, text)
        _print_stored(call(url, "POST", target, json_with_body(message, body, text)), as_json)
        return
    if message or text:
        fail("options like --delay and --id are for one BODY; a file says them in its lines", 2)
    _put_file(url, target, topic, Path("-") if file is None else file, as_json)


def _target(topic: str, if_exists: str | None) -> str:
    """The path of a put."""
    if if_exists is not None and if_exists not in MODES:
        fail(f"--if-exists {if_exists}: it is one of {', '.join(MODES)}", 2)
    return path(topic, "messages") + ("" if if_exists is None else f"?if_exists={if_exists}")


def _print_stored(answer: dict[str, Any], as_json: bool) -> None:
    """Print the answer to one message, or its id, and say so if the topic knew that."""
    if as_json:
        print_json(answer)
        return
    print(*answer["ids"], sep="\n")
    if answer["duplicates"]:
        console(stderr=True).print("this id is there already; the first message is kept", style="yellow")
    for outcome in ("replaced", "rescheduled"):
        if answer.get(outcome):
            console(stderr=True).print(f"this id was there already; its message was {outcome}", style="yellow")


def warn_of_broken_json(body: str, text: bool) -> None:
    """Say that a body which looks like JSON is stored as text."""
    if not text and body.lstrip()[:1] in ("{", "[") and (why := json_error(body)):
        warning = f"the body is no JSON ({why}), so it is stored as text; --text says that you mean that"
        console(stderr=True).print(f"turtlemq: {warning}", style="yellow")


def headers_of(given: list[str]) -> dict[str, str]:
    """Headers from texts like NAME=TEXT."""
    for header in given:
        if "=" not in header:
            fail(f"--header {header}: write NAME=TEXT", 2)
    return {name: text for name, _, text in (header.partition("=") for header in given)}


def _put_file(url: str, target: str, topic: str, file: Path, as_json: bool) -> None:
    """Put the messages of an NDJSON file, or of stdin if it is called `-`."""
    if file == Path("-"):
        _put_lines(url, target, topic, sys.stdin.buffer, 0, as_json)
        return
    try:
        with file.open("rb") as source:
            _put_lines(url, target, topic, source, file.stat().st_size, as_json)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")


def _put_lines(url: str, target: str, topic: str, source: BinaryIO, size: int, as_json: bool) -> None:
    """Put the messages of an NDJSON file, a batch a request. `size`: bytes of the file, 0 if unknown."""
    counts = dict.fromkeys(("created", "duplicates", "replaced", "rescheduled"), 0)
    with progress() as shown:
        task = shown.add_task(f"put {topic}", total=size or None)
        for numbers, lines in _batches(source):
            data = b"".join(lines)
            try:
                answer = json.loads(asked(url, "POST", target, data, "application/x-ndjson"))
            except CallFailed as failed:
                first, last, bad = numbers[0], numbers[-1], failed.index
                print_error(str(failed) if bad is None else f"line {numbers[bad]}: {failed}")
                which, are = (f"lines {first} to {last}", "are") if last > first else (f"line {first}", "is")
                refused = f"nothing of {which} is stored"
                stored = f"whether {which} {are} stored is not known" if _unanswered(failed) else refused
                text = f"turtlemq: {_counted(counts, ' and ')} before; {stored}"
                console(stderr=True).print(text, style="red")
                raise typer.Exit(1 if failed.status else failed.exit_code) from None
            counts = {name: count + answer.get(name, 0) for name, count in counts.items()}
            shown.advance(task, len(data))
    if as_json:
        print_json(counts)
    else:
        print(_counted(counts))


def _counted(counts: dict[str, int], between: str = ", ") -> str:
    """Counts as text; replaced and rescheduled messages only if there are any."""
    return between.join(f"{n} {name}" for name, n in counts.items() if n or name in ("created", "duplicates"))


def _unanswered(failed: CallFailed) -> bool:
    """Whether the connection broke before an answer came."""
    cause = failed.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, ConnectionRefusedError)


def _batches(source: BinaryIO) -> Iterator[tuple[list[int], list[bytes]]]:
    """Batches of lines with their numbers, from 1. Memory does not grow with the file."""
    numbers, lines, room = list[int](), list[bytes](), LINE_BYTES
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        numbers.append(number)
        lines.append(line if line.endswith(b"\n") else line + b"\n")
        room -= len(line)
        if len(lines) == LINES or room <= 0:
            yield numbers, lines
            numbers, lines, room = [], [], LINE_BYTES
    if lines:
        yield numbers, lines


def fetch(
    topic: Topic,
    count: Annotated[int, typer.Option("--max", help="How many at most.", min=1, max=10_000)] = 100,
    wait: Annotated[float, duration_option("Seconds to wait for the first, up to 60.", show_default=True)] = 0,
    ttr: Annotated[float | None, duration_option("Seconds that you may take; then they come again.")] = None,
    group: Group = "default",
    consumer: Annotated[str, typer.Option(help="Your name, for the record.")] = "",
    ack_: Annotated[
        str,
        typer.Option(
            "--ack",
            metavar="manual|auto",
            help="auto: settled before you get them, at most once.",
            autocompletion=choice("manual", "auto"),
        ),
    ] = "manual",
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Fetch messages that are due. With --json an object a line.

    turtlemq fetch orders --max 10 --wait 30

    turtlemq fetch orders --group audit --ack auto --json
    """
    if ack_ not in ("manual", "auto"):
        fail(f"--ack is manual or auto, not {ack_!r}", 2)
    fields: dict[str, Any] = {"max": count, "wait": wait, "consumer": consumer, "ack": ack_}
    if ttr is not None:
        fields["ttr"] = ttr
    out = console()
    answer = call(url, "POST", path(topic, "groups", group, "fetch"), fields)
    lease = answer.get("lease", "")
    for message in answer["messages"]:
        if as_json:
            print_json(message | ({"lease": lease} if lease else {}))
            continue
        line = (
            printable(message["id"]),
            f"attempt {message['attempt']}",
            f"due {format_time(message['due_ms'])}",
            body_text(message),
            *([f"lease {lease}"] if lease else []),
        )
        if out.is_terminal:
            out.print("  ".join(line), style="yellow" if message["attempt"] > 1 else None)
        else:
            print(*line, sep="\t")


def ack(
    topic: Topic,
    ids: Annotated[
        list[str], typer.Argument(help="ID for a message that was handled, -ID for one that failed.", show_default=False)
    ],
    group: Group = "default",
    lease: Lease = None,
    error: Annotated[str, typer.Option(help="Why the failed ones failed.")] = "",
    retry_delay: Annotated[float | None, duration_option("Seconds until the failed ones come again.")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Acknowledge messages: ID was handled, -ID failed. Exits with 1 if the group does not hold one, or holds it under another
    lease.

    turtlemq ack orders order-17 -order-18 --error "no connection"

    turtlemq ack orders order-17 --lease 1c-1a0d3e2b400
    """
    if unknown := [word for word in ids if word.startswith("--")]:  # ids have no leading dash, so it is no failed id
        fail(f"there is no option {unknown[0]}", 2)
    fields: dict[str, Any] = {"acks": ids, "error": error, **_lease(lease)}
    if retry_delay is not None:
        fields["retry_delay"] = retry_delay
    answer = call(url, "POST", path(topic, "groups", group, "ack"), fields)
    if as_json:
        print_json(answer)
    else:
        counts = f"{answer['acked']} acked, {answer['failed']} failed, {answer['dead']} dead, {len(answer['unknown'])} unknown"
        print(counts + _late(answer))
        _print_unheld(answer)
    raise typer.Exit(1 if answer["unknown"] or answer.get("late") else 0)


def _lease(given: str | None) -> dict[str, str]:
    return {} if given is None else {"lease": given}


def _late(answer: dict[str, Any]) -> str:
    return f", {len(answer['late'])} late" if "late" in answer else ""


def _print_unheld(answer: dict[str, Any]) -> None:
    """Name the messages for which nothing was done, on stderr."""
    for id_ in answer["unknown"]:
        print(f"{printable(id_)}: not held by the group", file=sys.stderr)
    for id_ in answer.get("late", ()):
        print(f"{printable(id_)}: held under another lease by now", file=sys.stderr)


def extend(
    topic: Topic,
    ids: Annotated[list[str], typer.Argument(help="Ids of messages that you hold.", show_default=False)],
    ttr: Annotated[float, duration_option("Seconds from now that you may still take.", show_default=True)] = 60,
    group: Group = "default",
    lease: Lease = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """More time for messages that were fetched. Exits with 1 if the group does not hold one, or holds it under another lease.

    turtlemq extend orders order-17 --ttr 2m
    """
    answer = call(url, "POST", path(topic, "groups", group, "extend"), {"ids": ids, "ttr": ttr, **_lease(lease)})
    if as_json:
        print_json(answer)
    else:
        print(f"{answer['extended']} extended, {len(answer['unknown'])} unknown{_late(answer)}")
        _print_unheld(answer)
    raise typer.Exit(1 if answer["unknown"] or answer.get("late") else 0)


def cancel(
    topic: Topic,
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of messages.", show_default=False)] = None,
    due_from: Annotated[int | None, time_option("Instead of ids: all that are due from here on …")] = None,
    due_to: Annotated[int | None, time_option(f"… up to here: {TIME_HELP}.")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Cancel messages that are not fetched yet. Exits with 1 if one could not be cancelled.

    turtlemq cancel orders order-17 order-18

    turtlemq cancel orders --due-from +1h --due-to +2h
    """
    times = {"due_from_ms": due_from, "due_to_ms": due_to}
    due_range: dict[str, Any] = {name: value for name, value in times.items() if value is not None}
    if bool(ids) == bool(due_range):
        fail("give ids, or --due-from and --due-to", 2)
    answer = call(url, "POST", path(topic, "cancel"), {"ids": ids} if ids else due_range)
    if as_json:
        print_json(answer)
    else:
        print(f"{answer['cancelled']} cancelled")
        for id_, state in answer["missed"].items():
            print(f"{printable(id_)}: {state}", file=sys.stderr)
    raise typer.Exit(1 if answer["missed"] else 0)
