"""Pins: hard links that keep the files of one snapshot, so that no query loses a file while it runs.

A pin is a hard link in `READERS/{name}/` beside the data, and a length. A segment only grows at its end or is replaced as a
whole, so link and length keep their content under seals, compaction and retention. Where links cannot be made (a read-only mount,
another file system), files are read in place, and a read fails if one was replaced. The files of a topic are pinned as they
were at one moment (`moments`); topics share nothing, so each has a moment of its own.

Pins are removed by `release`, by the next snapshot after the session that made them has ended, or after hours (`pin_owners`).
Not here: reading logs (`parts`), and the public function `turtlemq_snapshot` (`snapshot`).
"""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

from pyspark_turtlemq import pin_owners
from pyspark_turtlemq.moments import NO_LINKS, pin_topic
from pyspark_turtlemq.pin_owners import FOLDER, OWNER
from pyspark_turtlemq.shard_layout import ShardLayout, is_name, topic_of
from pyspark_turtlemq.snapshot_files import ALL_LOGS, CHECKPOINT, INNER, File, TopicFiles, Vanished
from turtlemq.segment import format as f
from turtlemq.storage import names

MANIFEST = "MANIFEST.json"  # names and lengths of the pinned files; written last
_ATTEMPTS = 5  # to make a folder while other readers remove the empty one


class Snapshot:
    """The files of a data folder, made by `take_snapshot`: those of each topic at one moment. As a context manager it releases
    its pins."""

    def __init__(self, root: Path, name: str, folder: Path | None) -> None:
        self.root, self.name, self.folder = root, name, folder
        self.topics: dict[str, TopicFiles] = {}  # by the names that `ShardLayout` gives to their folders

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the pins, so that the server can free the space of removed files. The snapshot cannot be read afterwards."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            pin_owners.remove_if_empty(self.root / FOLDER)


def take_snapshot(root: Path, topics: list[str], logs: tuple[str, ...], *, pin: bool = True) -> Snapshot:
    """Pin these logs of these topics, by the names of their folders; with `pin=False` only note the files. 20 µs a file. Raises
    `Unavailable` for a copy that is not complete, also if it began to be replaced meanwhile.

    A server removes the clean-shutdown mark before it writes, so a mark that is there before and after belongs to these files."""
    layout = ShardLayout.of(root)
    layout.check_complete()
    pin_owners.remove_stale(root)
    name = pin_owners.new_name()
    snapshot = Snapshot(root, name, _make_folder(root, name) if pin else None)
    marks = {data: _read_clean_mark(data) for data in layout.folders}
    try:
        for name_ in topics:
            folder = None if snapshot.folder is None else snapshot.folder / names.TOPICS / name_
            snapshot.topics[name_] = pin_topic(layout.topic_folder(name_), folder, topic_of(name_), logs)
        layout.check_complete()
    except BaseException:
        snapshot.release()
        raise
    for data, mark in marks.items():
        if mark and mark == _read_clean_mark(data):
            clean_marks = _decode_clean_mark(mark)
            for files in snapshot.topics.values():
                if files.source.parent == data / names.TOPICS:
                    files.clean_mark = clean_marks.get(files.topic)
    if snapshot.folder is not None:
        _write_manifest(snapshot, snapshot.folder)
    return snapshot


def _write_manifest(snapshot: Snapshot, folder: Path) -> None:
    sizes = {
        topic: {log: {name: file.size for name, file in files.items()} for log, files in pinned.files.items()}
        for topic, pinned in snapshot.topics.items()
    }
    offsets = [topic for topic, pinned in snapshot.topics.items() if pinned.offset is not None]
    clean = {topic: pinned.clean_mark for topic, pinned in snapshot.topics.items() if pinned.clean_mark}
    (folder / MANIFEST).write_text(json.dumps({"topics": sizes, "offsets": offsets, "clean": clean}))


def load_snapshot(root: Path, name: str) -> Snapshot:
    """An existing snapshot, from its manifest. Raises `Vanished` if it was released, or if its manifest is none of ours."""
    folder = root / FOLDER / name
    try:
        if not pin_owners.is_name(name):
            raise ValueError(name)
        manifest = json.loads((folder / MANIFEST).read_text())
        snapshot = Snapshot(root, name, folder)
        layout = ShardLayout.of(root)
        snapshot.topics = {topic: _load_topic(layout, folder, topic, manifest) for topic in manifest["topics"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Vanished(
            f"there is no snapshot {name!r} in {root / FOLDER}. It was released, or is too old: take another."
        ) from None
    return snapshot


def _load_topic(layout: ShardLayout, folder: Path, topic: str, manifest: dict[str, Any]) -> TopicFiles:
    """The files of a topic. Raises `ValueError` for names that no topic, log or file of a log has: they could lead elsewhere."""
    if not is_name(topic):
        raise ValueError(topic)
    pins = folder / names.TOPICS / topic
    pinned = TopicFiles(topic_of(topic), layout.topic_folder(topic), pins, {}, clean_mark=manifest["clean"].get(topic))
    for log, sizes in manifest["topics"][topic].items():
        kind, inside = ("delay", pins / log) if log in INNER else (log, pins)
        parsed = {name: names.parse(name) for name in sizes}
        if log not in ALL_LOGS or any(at is None or at.kind != kind or at.suffix for at in parsed.values()):
            raise ValueError(log)
        pinned.files[log] = {name: File(str(inside / name), int(size)) for name, size in sizes.items()}
    if topic in manifest["offsets"]:
        pinned.offset = File(str(pins / CHECKPOINT), (pins / CHECKPOINT).stat().st_size)
    return pinned


def _read_clean_mark(root: Path) -> bytes:
    """The clean-shutdown mark; empty if the server runs or was killed."""
    try:
        return (root / names.CLEAN).read_bytes()
    except OSError:
        return b""


def _decode_clean_mark(mark: bytes) -> dict[str, Any]:
    """Ends of logs by topic; empty if the mark is damaged."""
    try:
        return dict(f.decode_checked(mark)[0]["topics"])
    except (ValueError, KeyError, TypeError):
        return {}


def _make_folder(root: Path, name: str) -> Path | None:
    """A folder for the pins of a snapshot; None if none can be made."""
    folder = root / FOLDER / name
    for attempt in range(_ATTEMPTS):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / OWNER).write_text(pin_owners.session_label())
            pin_owners.note_root(root)
            return folder
        except OSError as error:
            if error.errno in NO_LINKS:
                return None
            if error.errno != errno.ENOENT or attempt == _ATTEMPTS - 1:  # another reader has just removed the empty folder
                raise
    return None
