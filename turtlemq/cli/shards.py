"""`turtlemq shards`: the data folder of a server with several shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from turtlemq.cli.output import fail, print_json, progress
from turtlemq.cli.parameters import AsJson
from turtlemq.cli.placeholders import Verbs

app = typer.Typer(cls=Verbs)


@app.callback()
def shards() -> None:
    """The data folder of a server with several processes: split one into shards."""


@app.command()
def split(
    count: Annotated[int, typer.Option("--shards", help="How many; this cannot be changed later.", min=2, max=64)],
    data: Annotated[Path, typer.Option("--data", help="The data folder of a server that is stopped.")] = Path("data"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show where each topic would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Split the folder of a stopped server into shards, by renaming the folders of its topics.

    No message is copied. If this is interrupted, no server starts with the folder until the same command has finished it.

    turtlemq shards split --data data --shards 4 --dry-run

    turtlemq shards split --data data --shards 4
    """
    from turtlemq.errors import TurtleError
    from turtlemq.shard_split import plan
    from turtlemq.shard_split import split as carry_out
    from turtlemq.storage import names
    from turtlemq.storage.door import Door

    if not data.is_dir():
        fail(f"there is no folder {data}")
    door = Door(folder_mode=data.stat().st_mode & 0o755 | 0o700)
    os.umask(0o777 & ~door.folder_mode)
    try:
        lock = door.lock(data / names.LOCK)
        try:
            planned = plan(door, data, count)
            if not dry_run:
                with progress() as shown:
                    task = shown.add_task("split", total=len(planned.topics))
                    carry_out(door, data, planned, lambda _: shown.advance(task))
        finally:
            os.close(lock)
    except (TurtleError, OSError) as error:
        fail(str(error))
    if as_json:
        print_json({"shards": count, "topics": planned.topics, "done": not dry_run})
    elif planned.is_done:
        print(f"{data} has {count} shards already")
    elif dry_run:
        print(*(f"{topic}: shard {shard}" for topic, shard in planned.topics.items()), sep="\n")
        print(f"{len(planned.topics)} topics would be in {count} shards; nothing was changed")
    else:
        print(f"{data}: {count} shards, {len(planned.topics)} topics moved")
        print(f"start with: turtlemq serve --data {data} --shards {count}")
