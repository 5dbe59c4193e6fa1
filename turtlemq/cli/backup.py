"""`turtlemq backup` and `turtlemq restore`: a data folder that is stopped, or that a server is using."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.call import URL, call
from turtlemq.cli.output import console, fail, format_bytes, print_json, printable, progress
from turtlemq.cli.parameters import AsJson, Url

if TYPE_CHECKING:
    from turtlemq.backup import Files, Manifest
    from turtlemq.storage.door import Door


def backup(
    into: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder for backups: new, empty, or with earlier ones.", show_default=False)
    ],
    data: Annotated[Path, typer.Option("--data", help="The data folder.")] = Path("data"),
    keep: Annotated[int, typer.Option(help="Remove all but so many of the newest backups; 0 keeps all.", min=0)] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Make none: read the newest one again, every byte.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Copy a data folder, stopped or in use: consistent, verified, and only what is new since the last backup in DIR.

    Of a folder in use the server at --url pins the files for a moment's picture. Exits with 1 if something is damaged.

    turtlemq backup backups --data data --keep 7

    turtlemq backup backups --verify
    """
    from turtlemq import backup as b
    from turtlemq.storage.door import Door

    door = Door()
    with _readable_errors():
        if verify:
            _verify(door, b.choose(door, into), as_json)
            return
        b.check_format(door, data)
        door.make_folder(into)
        b.check_room(door, into)
        with _locked(door, into / "LOCK"), _files_to_copy(door, data, url) as (files, live), progress() as shown:
            task = shown.add_task("backup", total=sum(length for _, length in files.values()))
            name, made = b.make(door, files, into, _now_ms(), live=live, shown=lambda what, n: shown.update(task, advance=n))
            gone = b.prune(door, into, keep) if keep else []
    _print_result(into / name, made, gone, as_json)
    raise typer.Exit(1 if made.damage else 0)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _print_result(place: Path, made: Manifest, gone: list[str], as_json: bool) -> None:
    if as_json:
        told = {"backup": str(place), "live": made.live, "files": len(made.files), "bytes": made.bytes, "copied": made.copied}
        print_json(told | {"damage": made.damage, "removed": gone})
        return
    print(f"{place}: {len(made.files)} files, {format_bytes(made.bytes)}, {format_bytes(made.copied)} of them new")
    for line in made.damage:
        console().print(f"damaged in the data folder already: {printable(line)}", style="red")
    if gone:
        print(f"removed: {', '.join(gone)}")


@contextmanager
def _readable_errors() -> Iterator[None]:
    from turtlemq.errors import TurtleError

    try:
        yield
    except TurtleError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}")


@contextmanager
def _locked(door: Door, path: Path) -> Iterator[None]:
    """Hold a file; if we are killed, the kernel lets go of it."""
    lock = door.lock(path)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def _files_to_copy(door: Door, data: Path, url: str) -> Iterator[tuple[Files, bool]]:
    """What to copy, held in place for as long as it takes; and whether a server is using it."""
    from turtlemq import backup as b
    from turtlemq.errors import Locked

    try:
        lock = door.lock(data / "LOCK")
    except Locked as held:
        with _locked(door, data / b.PINNED / "LOCK"), _pinned(door, data, url, held) as files:
            yield files, True
        return
    try:
        yield b.lying(door, data), False
    finally:
        os.close(lock)


@contextmanager
def _pinned(door: Door, data: Path, url: str, held: Exception) -> Iterator[Files]:
    from turtlemq import backup as b

    try:
        pins: dict[str, Any] = call(url, "POST", "/v1/backup")
    except typer.Exit:
        console(stderr=True).print(f"turtlemq: {held} Or give the address of its server with --url.")
        raise
    try:
        if not (data / b.PINNED / pins["name"]).is_dir():
            fail(f"the server at {url} uses {Path(pins['folder']).parent.parent}, not {data.absolute()}; see --data and --url")
        yield b.pinned(door, data, pins["name"])
    finally:
        try:
            call(url, "DELETE", "/v1/backup")
        except typer.Exit:
            pass  # it is gone, and has said so; its next start lets go of the pins


def _verify(door: Door, folder: Path, as_json: bool) -> None:
    from turtlemq import backup as b

    with progress() as shown:
        task = shown.add_task("verify", total=b.load(door, folder).bytes)
        problems = b.verify(door, folder, lambda what, n: shown.update(task, advance=n))
    if as_json:
        print_json({"backup": str(folder), "problems": problems})
    else:
        print(*problems, sep="\n") if problems else print(f"{folder}: every byte is as it was written")
    raise typer.Exit(1 if problems else 0)


def restore(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder with backups (the newest is taken), or one backup.", show_default=False),
    ],
    data: Annotated[
        Path, typer.Option("--data", help="The new data folder; it must be empty or not be there.", show_default=False)
    ],
    damaged_too: Annotated[
        bool,
        typer.Option("--damaged-too", help="Restore what can be read of a damaged backup. See then what 'turtlemq check' says."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a backup, every byte of it, and write it to a new data folder.

    turtlemq restore backups --data data-restored
    """
    from turtlemq import backup as b
    from turtlemq.storage.door import Door

    door = Door()
    with _readable_errors():
        folder = b.choose(door, source)
        if data.exists() and any(data.iterdir()):
            fail(f"{data} is not empty. Restore into a new folder, then let the server use that.")
        with progress() as shown:
            task = shown.add_task("verify", total=b.load(door, folder).bytes * 2)
            problems = b.verify(door, folder, lambda what, n: shown.update(task, advance=n))
            for line in problems:
                console(stderr=True).print(f"turtlemq: {printable(line)}", style="red")
            if problems and not damaged_too:
                fail(f"{folder} is damaged: nothing was written. Take an older backup, or what is left with --damaged-too.")
            missing = [line.split(":")[0] for line in problems if line.endswith("is missing")]
            shown.update(task, description="restore")
            made = b.restore(door, folder, data, leave_out=missing, shown=lambda what, n: shown.update(task, advance=n))
    if as_json:
        print_json(
            {"backup": str(folder), "data": str(data), "files": len(made.files), "bytes": made.bytes, "problems": problems}
        )
    else:
        print(f"{data}: {len(made.files)} files, {format_bytes(made.bytes)}, from {folder.name}")
        print(f"start with: turtlemq serve --data {data}")
    raise typer.Exit(1 if problems else 0)
