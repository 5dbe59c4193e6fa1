"""Bugs planted in `storage`: doors, ballast, damage."""

from __future__ import annotations

from tests.trust.bugs.bug import CRASH, Bug

BUGS = (
    # Durability: an answered request is on the disk
    Bug(
        "a replaced file is renamed before it is synced",
        "storage/door.py",
        "                if durable:\n                    self.sync(fd, tmp)\n",
        "",
        f"door {CRASH}",
    ),
    Bug(
        "the rename of a replaced file is not synced",
        "storage/door.py",
        "        with self.durable_names(path.parent) if durable else nullcontext():\n",
        "        with nullcontext():\n",
        f"door {CRASH}",
    ),
    # Errors
    Bug(
        "a write that failed leaves its bytes behind",
        "storage/door.py",
        "            self.truncate(fd, path, offset)\n            raise\n        return at - offset",
        "            raise\n        return at - offset",
        "door faults trust:refusals",
    ),
    # At edges and in moments that only chance would meet
    Bug(
        "a dropped topic comes back with a power cut",
        "storage/door.py",
        "        with self.durable_names(path.parent):\n            self.rename(path, gone)\n",
        "        if True:\n            self.rename(path, gone)\n",
        "backup_trust",
    ),
    Bug(
        "removing a folder follows links",
        "storage/door.py",
        "        if self.is_link(path) or not self.is_folder(path):\n",
        "        if not self.is_folder(path):\n",
        "data_folder",
    ),
    Bug(
        "a server does not notice that its lock is gone",
        "storage/lock.py",
        "    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)\n",
        "    return True\n",
        "data_folder",
    ),
    Bug(
        "new files can be read by every user",
        "storage/door.py",
        "folder_mode: int = 0o700",
        "folder_mode: int = 0o755",
        "data_folder",
    ),
    Bug(
        "the reserve is not filled up again",
        "storage/ballast.py",
        "        if self._reserve >= RESERVE_BYTES:\n",
        "        if True:\n",
        "full_disk",
    ),
    # Membership and reconcile, as the simulated cluster meets them
    Bug(
        "a backup takes the identity of its replica along",
        "storage/names.py",
        "READERS, REPLICA, REPLICA_SUMS,",
        "READERS, REPLICA_SUMS,",
        "backup_trust replica",
    ),
)
