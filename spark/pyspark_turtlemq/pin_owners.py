"""Owners of pins: the session that made a snapshot, and removal of the pins of sessions that have ended.

A snapshot is a folder in `READERS/` of the data folder, with the label of its session in the file OWNER. A session may be several
processes: a Java process, and Python processes below it, which make the pins. So that the program that started the session can
release them all, a file for each session lists the data folders with its pins. It lies in a temporary folder that only this user
can write to.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from pathlib import Path

FOLDER = "READERS"
OWNER = "OWNER"
PIN_SECONDS = 6 * 3600
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{12}")  # of a snapshot


def new_name() -> str:
    """A name for a snapshot: the time, and a part that no other has."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:12]}"


def is_name(text: str) -> bool:
    """Can a snapshot have this name? A name never leads out of the folder of the snapshots.

    >>> is_name("20261116T062922-0123456789ab"), is_name("../20261116T062922-0123456789ab")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


def session_label() -> str:
    """The session of this process, as `process_label` writes it: the Java process above this one, or else this one."""
    pid = os.getpid()
    above = pid
    for _ in range(8):
        process = _stat(above)
        if process is None or above <= 1:
            break
        if process[0] == "java":
            pid = above
            break
        above = process[1]
    return process_label(pid)


def process_label(pid: int) -> str:
    """A process by host, pid and start time, since pids are reused."""
    process = _stat(pid)
    return f"{os.uname().nodename} {pid} {process[2] if process else 0}"


def _roots_file(label: str) -> Path | None:
    """The file that lists the data folders in which a session has pins; None if there is no safe place for it."""
    folder = Path(tempfile.gettempdir()) / f"turtlemq-readers-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder / "-".join(label.split()[1:]) if private else None


def note_root(root: Path) -> None:
    """Note that this session has pins in a data folder."""
    path, line = _roots_file(session_label()), f"{root}\n"
    try:
        if path is not None and line not in (path.read_text() if path.exists() else ""):
            with path.open("a") as file:
                file.write(line)
    except OSError:
        return  # the next snapshot of that data folder removes the pins


def release_session(label: str) -> None:
    """Remove all pins of a session, in every data folder."""
    path = _roots_file(label)
    try:
        for root in path.read_text().splitlines() if path is not None else ():
            remove_stale(Path(root), owner=label)
        if path is not None:
            path.unlink()
    except OSError:
        return


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Name, parent and start time of a process; None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return name, int(rest[1]), int(rest[19])


def _has_ended(label: str) -> bool:
    """True if a session has surely ended. One on another host counts as running: it cannot be checked from here."""
    host, _, rest = label.partition(" ")
    if host != os.uname().nodename or _stat(os.getpid()) is None:
        return False
    pid, _, began = rest.partition(" ")
    process = _stat(int(pid)) if pid.isdigit() else None
    return process is None or str(process[2]) != began


def remove_stale(root: Path, *, owner: str = "") -> int:
    """Remove snapshots whose session has ended, that are too old, or that belong to `owner`. Returns how many."""
    removed = 0
    try:
        folders = [root / FOLDER / name for name in sorted(os.listdir(root / FOLDER)) if is_name(name)]
    except OSError:
        return 0
    for folder in folders:
        try:
            old = time.time() - folder.stat().st_mtime > PIN_SECONDS
            label = (folder / OWNER).read_text() if not old else ""
        except OSError:
            continue  # another reader is making or removing it
        if old or _has_ended(label) or label == owner:
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
    remove_if_empty(root / FOLDER)
    return removed


def remove_if_empty(folder: Path) -> None:
    """Remove a folder unless other readers use it."""
    try:
        folder.rmdir()
    except OSError:
        return
