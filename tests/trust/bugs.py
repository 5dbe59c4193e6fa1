"""Bugs planted by hand, each in a copy of the code: what storage systems get wrong, and what the suite must therefore notice.

A bug is a piece of text in one file and what stands in its place. `tests` are those that should find it, fastest first; where
they do not, everything that is fast is run before a bug counts as a survivor. A survivor is a test that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake."""

    name: str
    file: str  # below turtlemq/
    old: str
    new: str
    tests: str = ""  # files of tests/, without test_ and .py


_CRASH = "powercut engine_faults trust:powercuts"
_SIM = "engine_machine trust:simulation"

BUGS = (
    # Durability: what is answered is on the disk
    Bug(
        "a commit is not synced",
        "index/writer.py",
        "        if sync:\n            self.door.sync(self.fd, self.path)\n",
        "",
        _CRASH,
    ),
    Bug(
        "requests are answered before their group is written",
        "server/commit.py",
        "        await done\n",
        "",
        "commit server_kill trust:kills",
    ),
    Bug(
        "the name of a new segment is not synced",
        "segment/log.py",
        "        door.sync_folder(path.parent)\n    except",
        "    except",
        _CRASH,
    ),
    Bug(
        "a replaced file is renamed before it is synced",
        "door.py",
        "            if durable:\n                self.sync(fd, tmp)\n",
        "",
        f"door {_CRASH}",
    ),
    Bug(
        "the rename of a replaced file is not synced",
        "door.py",
        "        self.rename(tmp, path)\n        if durable:\n            self.sync_folder(path.parent)\n",
        "        self.rename(tmp, path)\n",
        f"door {_CRASH}",
    ),
    Bug("a sealed segment is not synced", "index/seal.py", "        door.sync(fd, tmp)\n", "", _CRASH),
    Bug(
        "a seal is adopted without a sync of the folder, and the old files go",
        "index/care.py",
        "        door.sync_folder(shelf.folder)\n    except OSError as error:  # the old file may come back",
        "        pass\n    except OSError as error:  # the old file may come back",
        _CRASH,
    ),
    Bug(
        "the Index lets go of what was handed off before that is synced",
        "topic.py",
        "        self.index.advance(due)\n        self.stir(now_ms)\n",
        "        self.index.advance(due)\n        self.index.settle(self.broker.ready.progress)\n        self.stir(now_ms)\n",
        _CRASH,
    ),
    Bug(
        "a checkpoint is written before the logs it speaks of are synced",
        "broker/replay.py",
        "        for kind, fd, path in self.syncs:\n",
        "        door.replace(self.path, self.data)\n        for kind, fd, path in self.syncs:\n",
        _CRASH,
    ),
    Bug(
        "what opening found is served without a sync",
        "index/recover.py",
        "        shelf.door.sync(fd, segment.path)\n    finally",
        "        pass\n    finally",
        _CRASH,
    ),
    Bug(
        "a cancel of a ready message is answered before it is synced",
        "broker/cancel.py",
        '    broker.history.append(now_ms, "", fields)\n    broker.sync()\n',
        '    broker.history.append(now_ms, "", fields)\n',
        f"engine_states {_CRASH}",
    ),
    Bug(
        "dead letters that are about to go are not noted durably",
        "broker/broker.py",
        "        self.history.append(now_ms, name, fields)\n        self.history.sync()\n",
        "        self.history.append(now_ms, name, fields)\n",
        f"dead {_CRASH}",
    ),
    Bug(
        "at most once: handed out before the settlement is synced",
        "broker/broker.py",
        "            group.close(taken)\n            self.sync()\n",
        "            group.close(taken)\n",
        f"engine_faults {_CRASH}",
    ),
    Bug(
        "acks with ack_durability fsync are answered before the sync",
        "broker/broker.py",
        'if not failed and not unknown and self.settings.ack_durability != "fsync":',
        "if not failed and not unknown:",
        f"engine_faults {_CRASH}",
    ),
    Bug(
        "a long back-off is noted as moved before it sleeps",
        "broker/ends.py",
        "        broker.resleep(ended(broker, group, held, error, when.tolist()))\n    except DiskFull:\n        return False\n",
        "        late = ended(broker, group, held, error, when.tolist())\n    except DiskFull:\n        return False\n",
        f"{_SIM}",
    ),
    # Errors
    Bug(
        "writing goes on after a failed sync",
        "index/writer.py",
        "heard = error if isinstance(error, DiskFull) else self.stop(error)",
        "heard = error",
        "faults engine_faults trust:refusals",
    ),
    Bug(
        "a write that failed leaves its bytes behind",
        "door.py",
        "            self.truncate(fd, path, offset)\n            raise\n        return at - offset",
        "            raise\n        return at - offset",
        "door faults trust:refusals",
    ),
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
        "an index that names other due times than the documents is believed",
        "index/firing.py",
        'if (heads["due"] != self.due_ms[good]).any():',
        "if False:",
        "firing damage trust:damage",
    ),
    Bug(
        "half a batch is taken for a whole one",
        "segment/scan.py",
        "    whole = tail[(flags[tail] & f.CONTINUES) == 0]\n",
        "    whole = tail\n",
        "scan powercut",
    ),
    # Time
    Bug(
        "a message fires a millisecond early",
        "index/firing.py",
        "    limit = (now_ms + 1) << ORDINAL_BITS\n    slices",
        "    limit = (now_ms + 2) << ORDINAL_BITS\n    slices",
        f"firing index {_SIM}",
    ),
    Bug(
        "few messages fire a millisecond early",
        "index/firing.py",
        "few_keys(cursors, (now_ms + 1) << ORDINAL_BITS)",
        "few_keys(cursors, (now_ms + 2) << ORDINAL_BITS)",
        f"firing index {_SIM}",
    ),
    Bug(
        "what is due now waits until it is late",
        "index/shelf.py",
        "heap[0][0] <= now_ms:\n            found",
        "heap[0][0] < now_ms:\n            found",
        "firing index",
    ),
    Bug(
        "a lease that ends now is kept",
        "broker/group.py",
        "lease.left and lease.until_ms <= now_ms]",
        "lease.left and lease.until_ms < now_ms]",
        f"groups {_SIM}",
    ),
    Bug(
        "sequence numbers follow the clock when it goes back",
        "index/writer.py",
        "return max(self.last_seq + 1, now_ms << SEQ_COUNTER_BITS)",
        "return (now_ms << SEQ_COUNTER_BITS) or self.last_seq + 1",
        f"index server_time trust:clocks {_SIM}",
    ),
    # Cancel, replace, move
    Bug(
        "tombstones are lost when their segment is sealed",
        "index/seal.py",
        "            stones.append(tombstone(document))\n",
        "            pass\n",
        f"compaction index_machine {_SIM}",
    ),
    Bug(
        "tombstones are lost when their segment is dropped",
        "index/care.py",
        "    _keep_tombstones(index, segment)\n    deleted",
        "    deleted",
        f"compaction index_machine {_SIM}",
    ),
    Bug(
        "a cancelled sleeper fires if its cancel is being committed",
        "index/firing.py",
        "    stop = taken.first_of(held_back) if held_back else taken.count\n",
        "    stop = taken.count\n",
        "commit index server",
    ),
    Bug(
        "cancels of ready messages are forgotten by a restart",
        "broker/replay.py",
        "    saved.cancelled |= set(offsets[real].tolist())\n",
        "",
        f"engine_states {_SIM}",
    ),
    Bug(
        "a seal drops what was handed off but is not safe yet",
        "index/care.py",
        "        progress=index.durable,\n",
        "        progress=index.shelf.progress,\n",
        f"compaction index_machine {_CRASH}",
    ),
    Bug(
        "compaction moves a sleeper whose cancel is being committed",
        "index/care.py",
        "                elif document.seq not in ending:\n",
        "                else:\n",
        "compaction commit",
    ),
    # Consuming
    Bug(
        "the cursor of a group is saved before its leases",
        "broker/replay.py",
        "        mark.open[offset] = c.Open(seq, attempt, end_ms, event.at_ms, consumer)\n",
        "        pass\n",
        f"{_SIM} server_kill",
    ),
    Bug(
        "an ack of somebody's expired lease ends the new one's",
        "broker/group.py",
        "            if ids.get(held[i]) == slot + i:\n                del ids[held[i]]",
        "            ids.pop(held[i], None)",
        f"groups {_SIM}",
    ),
    Bug(
        "retention drops what a group has not settled",
        "broker/retention.py",
        "following.first_offset <= settled",
        "True",
        f"engine_states {_SIM}",
    ),
    Bug(
        "an id that is ready already is taken for a new one",
        "topic.py",
        "held = self.broker.ready.find_many if self.broker.ready.next_offset else None",
        "held = None",
        f"{_SIM} server",
    ),
    Bug(
        "settled messages come back when replay begins without a checkpoint",
        "broker/replay.py",
        "        for offset in offsets[real].tolist():\n            mark.open.pop(offset, None)\n    mark.changed_ms",
        "    mark.changed_ms",
        f"{_SIM} server_kill",
    ),
    # The door to the world
    Bug(
        "a token's secret is not compared",
        "server/guard.py",
        "if not hmac.compare_digest(_digest(found[0]), digest) or token is None:",
        "if token is None:",
        "server_security trust:hostile",
    ),
    Bug(
        "a token for one topic is good for all",
        "server/guard.py",
        "if set(rights).isdisjoint(who.rights) or not self._fits[who.name](topic):",
        "if set(rights).isdisjoint(who.rights):",
        "server_security trust:hostile",
    ),
    Bug(
        "a compressed body may be as large as it likes",
        "server/unpack.py",
        "            if size > limit:\n",
        "            if size > limit << 20:\n",
        "server_bad server_encodings hostile trust:hostile",
    ),
)
