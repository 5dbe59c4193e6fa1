"""Pauses of a topic: whether all its groups are paused, and which groups are paused by themselves. Kept in paused.toml.

A paused group is given no messages; messages come due, leases end and retries are scheduled as always. The file is written, and
durable, before a pause or a resume takes effect, so both survive a restart, a backup and a failover.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from turtlemq.errors import Corrupt, InvalidArgument
from turtlemq.storage import names
from turtlemq.storage.door import Door


class Pauses:
    """The pauses of one topic. The constructor reads the file, if there is one."""

    def __init__(self, door: Door, folder: Path) -> None:
        self._door, self._path = door, folder / names.PAUSED
        self.topic, self.groups = _read(door, self._path)

    def holds(self, group: str) -> bool:
        """Whether a group is given no messages: it is paused itself, or its topic is."""
        return self.topic or group in self.groups

    def set(self, group: str | None, paused: bool) -> None:
        """Pause or resume a group; None: the topic. Durable when this returns."""
        topic, groups = self.topic, self.groups
        if group is None:
            topic = paused
        else:
            groups = groups | {group} if paused else groups - {group}
        if (topic, groups) != (self.topic, self.groups):
            text = f"topic = {json.dumps(topic)}\ngroups = {json.dumps(sorted(groups))}\n"
            self._door.replace(self._path, text.encode())
            self.topic, self.groups = topic, groups


def _read(door: Door, path: Path) -> tuple[bool, frozenset[str]]:
    """The content of the file. An unreadable file is refused: a topic that was paused must not go on by itself."""
    if not door.exists(path):
        return False, frozenset()
    try:
        given = tomllib.loads(door.read_all(path).decode())
        topic, groups = given["topic"], given["groups"]
        if not isinstance(topic, bool) or not isinstance(groups, list):
            raise TypeError("topic is true or false, groups is a list")
        return topic, frozenset(map(names.check_group, groups))
    except (ValueError, TypeError, KeyError, RecursionError, InvalidArgument) as error:
        text = f"{names.PAUSED} of topic {path.parent.name!r} cannot be read ({error}). Mend or remove that file."
        raise Corrupt(text) from error
