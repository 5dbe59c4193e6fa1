"""Disks under a whole engine that fail, lose unsynced writes or sync at once, and the messages that tests put on them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from turtlemq.engine import Engine
from turtlemq.model import Message
from turtlemq.settings import Settings
from turtlemq.storage import names
from turtlemq.storage.door import Door

T = TypeVar("T")


SETTINGS = Settings(segment_bytes=16_384, run_messages=8, backoff_base_ms=10, backoff_jitter="none", max_attempts=2, ttr_ms=1_000)


class Disk(Door):
    """Full while `full` says so of a file; without its ballast it has room for journals. Syncs of files in `rotten` fail."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.rotten = ""

    def fresh(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        file = "" if path is None else path.name
        if self.rotten and name == "fdatasync" and self.rotten in str(path):
            raise OSError(errno.EIO, "made to fail")
        if self.full and name == "write":
            root = next(p for p in (path or Path()).parents if p.name == "data")
            if (root / names.BALLAST).exists() or not file.startswith(("reserve", "history")):
                raise OSError(errno.ENOSPC, "made to fail")
        return action(*args)


def messages(count: int, first: int = 0, due: int = 10) -> list[Message]:
    return [Message(b"body", due, id=f"m{n}") for n in range(first, first + count)]


def start(tmp_path: Path, door: Door | None = None, **changes: Any) -> Engine:
    engine = Engine.open(tmp_path / "data", door=door, settings=Settings(**{**_fields(SETTINGS), **changes}))
    engine.move_group("t", "g", "earliest", 0)
    return engine


def _fields(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Settings.__dataclass_fields__}


def abandon(engine: Engine) -> None:
    """The process ends as it stands."""
    engine.door.shut()
    engine.folder.unlock()


class Quick(Door):
    """Syncs nothing."""

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        return None if name in ("fdatasync", "fsync_dir") else action(*args)  # type: ignore[return-value]


class SameSecret(Door):
    """Every folder gets the same secret, so that files can be compared."""

    def random_bytes(self, count: int) -> bytes:
        return b"s" * count


class Syncing(Door):
    """Remembers how long files were when they were last synced."""

    def __init__(self) -> None:
        super().__init__()
        self.durable: dict[Path, int] = {}

    def fresh(self) -> Door:
        return self

    def _call(self, name: str, path: Path | None, action: Callable[..., T], *args: Any) -> T:
        if name == "fdatasync" and path is not None:
            self.durable[path] = os.fstat(args[0]).st_size
        return action(*args)


def cut_power(engine: Engine, door: Syncing) -> None:
    """The synced bytes of each log are left, and no others."""
    abandon(engine)
    for path, size in door.durable.items():
        if path.exists() and path.suffix == ".bson":
            os.truncate(path, size)
