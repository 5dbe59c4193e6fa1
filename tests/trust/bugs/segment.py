"""Bugs planted in `segment`: logs and scans."""

from __future__ import annotations

from tests.trust.bugs.bug import CRASH, Bug

BUGS = (
    # Durability: an answered request is on the disk
    Bug(
        "the name of a new segment is not synced",
        "segment/log.py",
        "        with door.durable_names(path.parent):\n            fd = door.create(path)\n",
        "        if True:\n            fd = door.create(path)\n",
        CRASH,
    ),
    Bug(
        "a log that gives way to others is closed without a sync",
        "segment/log.py",
        "        if self.stopped is None:\n            self.sync()\n        self.close()\n",
        "        self.close()\n",
        "descriptors trust:simulation",
    ),
    # Errors
    Bug(
        "a journal is written on after a failed sync",
        "segment/log.py",
        "        self.stopped = self.stopped or error\n",
        "",
        "engine_faults trust:refusals",
    ),
    # Damage
    Bug(
        "documents are served without a look at their checksums",
        "segment/log.py",
        "        good = f.checksums_match(memoryview(buffer), at, heads)\n    else",
        "        good = good & True\n    else",
        "damage engine_damage trust:damage",
    ),
    Bug(
        "few documents are served without a look at their checksums",
        "segment/format.py",
        "    good = fits and named and crc32(memoryview(data)[at + CHECKED_FROM : at + length]) == crc\n",
        "    good = fits and named\n",
        "format damage engine_damage trust:damage",
    ),
    Bug(
        "a scan takes documents without a look at their checksums",
        "segment/scan.py",
        "    good[good] = f.checksums_match(view, positions[good], heads[good])\n    return heads, good",
        "    return heads, good",
        "scan damage trust:damage",
    ),
    Bug(
        "half a batch is taken for a whole one",
        "segment/scan.py",
        "    whole = tail[(flags[tail] & f.CONTINUES) == 0]\n",
        "    whole = tail\n",
        "scan powercut",
    ),
    # At edges and in moments that only chance would meet
    Bug(
        "a full bucket of ids denies some of them",
        "segment/table.py",
        "        if width == _BUCKET_WINDOW:\n",
        "        if False:\n",
        "check_trust",
    ),
    # Standing: where a message is for a group
    Bug(
        "a message is not found in the groups that retry it",
        "segment/ids.py",
        "        hashes[rows] = np.maximum(shared | hashes[rows] & _GROUP, np.uint64(1))\n",
        "        hashes[rows] = np.maximum(hashes[rows], np.uint64(1)) | shared & 0\n",
        "group_ids many_groups standing_cases",
    ),
)
