"""`turtlemq backup` and `turtlemq restore`.

A folder whose server is stopped is locked while it is copied. Of a folder in use, the server first pins the files: it makes hard
links that keep them as they are until the copy is done. The work itself is in `turtlemq.backup`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.call import URL, call
from turtlemq.cli.files import data_folders
from turtlemq.cli.output import console, fail, format_bytes, print_json, printable, progress
from turtlemq.cli.parameters import AsJson, Url
from turtlemq.storage.names import SHARD_COUNT

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
    """Copy a data folder, stopped or in use: consistent, verified, and only files that are new since the last backup in DIR.

    Of a folder in use, the server at --url pins the files as they are at one moment. Exits with 1 if something is damaged.

    turtlemq backup backups --data data --keep 7

    turtlemq backup backups --verify
    """
    from turtlemq import backup as b
    from turtlemq import shard_backup
    from turtlemq.storage.door import Door

    door = Door()
    with _readable_errors():
        if verify:
            _verify(door, b.choose(door, into), as_json)
            return
        data = data if (data / SHARD_COUNT).is_file() else data_folders(data)[0]
        shard_backup.check_format(door, data)
        door.make_folder(into)
        b.check_backups_folder(door, into)
        with _locked(door, into / "LOCK"), _files_to_copy(door, data, url) as (files, live), progress() as shown:
            task = shown.add_task("backup", total=sum(length for _, length in files.values()))
            name, manifest = b.make(
                door, files, into, _now_ms(), live=live, progress=lambda what, n: shown.update(task, advance=n)
            )
            removed = b.prune(door, into, keep) if keep else []
    _print_result(into / name, manifest, removed, as_json)
    raise typer.Exit(1 if manifest.damage else 0)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _print_result(folder: Path, manifest: Manifest, removed: list[str], as_json: bool) -> None:
    if as_json:
        sizes = {"files": len(manifest.files), "bytes": manifest.bytes, "copied": manifest.copied}
        state = {"damage": manifest.damage, "removed": removed}
        print_json({"backup": str(folder), "live": manifest.live, **sizes, **state})
        return
    print(f"{folder}: {len(manifest.files)} files, {format_bytes(manifest.bytes)}, {format_bytes(manifest.copied)} of them new")
    for line in manifest.damage:
        console().print(f"damaged in the data folder already: {printable(line)}", style="red")
    if removed:
        print(f"removed: {', '.join(removed)}")


@contextmanager
def _readable_errors() -> Iterator[None]:
    """End the program with an error message instead of a traceback."""
    from turtlemq.errors import TurtleError

    try:
        yield
    except TurtleError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}")


@contextmanager
def _locked(door: Door, path: Path) -> Iterator[None]:
    """Hold the lock of a file. The kernel releases it if this process is killed."""
    lock = door.lock(path)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def _files_to_copy(door: Door, data: Path, url: str) -> Iterator[tuple[Files, bool]]:
    """The files to copy, locked or pinned until the copy is done, and whether a server is using them."""
    from turtlemq import backup as b
    from turtlemq import shard_backup
    from turtlemq.errors import Locked
    from turtlemq.shard_folders import data_folders

    folders = data_folders(door, data)
    with ExitStack() as locks:
        try:
            for folder in dict.fromkeys((data, *folders)):
                locks.enter_context(_locked(door, folder / "LOCK"))
        except Locked as in_use:
            locks.close()
            for folder in folders:
                locks.enter_context(_locked(door, folder / b.PINNED / "LOCK"))
            with _pinned(door, data, url, in_use) as files:
                yield files, True
            return
        yield shard_backup.files_of_stopped(door, data), False


@contextmanager
def _pinned(door: Door, data: Path, url: str, in_use: Exception) -> Iterator[Files]:
    """The files of a folder in use, pinned by its server at `url`."""
    from turtlemq import backup as b
    from turtlemq import shard_backup
    from turtlemq.shard_folders import data_folders

    try:
        pins: dict[str, Any] = call(url, "POST", "/v1/backup")
    except typer.Exit:
        console(stderr=True).print(f"turtlemq: {in_use} Or give the address of its server with --url.")
        raise
    try:
        shards = [each["name"] for each in pins.get("shards", [pins])]
        folders = data_folders(door, data)
        if len(shards) != len(folders) or not (folders[0] / b.PINNED / shards[0]).is_dir():
            fail(f"the server at {url} uses {Path(pins['folder']).parent.parent}, not {data.absolute()}; see --data and --url")
        yield shard_backup.pinned(door, data, shards)
    finally:
        try:
            call(url, "DELETE", "/v1/backup")
        except typer.Exit:
            pass  # the error was printed; the server's next start removes the pins


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
    from turtlemq import shard_backup
    from turtlemq.shard_folders import read_layout
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
            shown.update(task, description="restore")
            manifest = shard_backup.restore(door, folder, data, progress=lambda what, n: shown.update(task, advance=n))
    if as_json:
        sizes = {"files": len(manifest.files), "bytes": manifest.bytes}
        print_json({"backup": str(folder), "data": str(data), **sizes, "problems": problems})
    else:
        print(f"{data}: {len(manifest.files)} files, {format_bytes(manifest.bytes)}, from {folder.name}")
        layout = read_layout(door, data)
        print(f"start with: turtlemq serve --data {data}" + (f" --shards {layout.shards}" if layout else ""))
    raise typer.Exit(1 if problems else 0)
