"""Bugs planted by hand, each in a copy of the code: typical mistakes of storage systems, which the suite must notice.

A bug is a piece of text in one file and its replacement. `tests` are those that should find it, fastest first; where
they do not, everything that is fast is run before a bug counts as a survivor. A survivor is a test that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake."""

    name: str
    file: str  # below turtlemq/, or beginning with ../spark/
    old: str
    new: str
    tests: str = ""  # files of tests/, without test_ and .py


_CRASH = "powercut engine_faults trust:powercuts"
_SIM = "engine_machine trust:simulation"

BUGS = (
    # Durability: an answered request is on the disk
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
        "            await done\n",
        "",
        "commit server_kill trust:kills",
    ),
    Bug(
        "the name of a new segment is not synced",
        "segment/log.py",
        "        with door.durable_names(path.parent):\n            fd = door.create(path)\n",
        "        if True:\n            fd = door.create(path)\n",
        _CRASH,
    ),
    Bug(
        "a replaced file is renamed before it is synced",
        "storage/door.py",
        "                if durable:\n                    self.sync(fd, tmp)\n",
        "",
        f"door {_CRASH}",
    ),
    Bug(
        "the rename of a replaced file is not synced",
        "storage/door.py",
        "        with self.durable_names(path.parent) if durable else nullcontext():\n",
        "        with nullcontext():\n",
        f"door {_CRASH}",
    ),
    Bug("a sealed segment is not synced", "index/seal.py", "        door.sync(fd, tmp)\n", "", _CRASH),
    Bug(
        "a seal is adopted without a sync of the folder, and the old files go",
        "index/maintenance.py",
        "            with door.durable_names(segments.folder):\n                door.rename(part.path, path)\n",
        "            if True:\n                door.rename(part.path, path)\n",
        _CRASH,
    ),
    Bug(
        "the Index lets go of what was handed off before that is synced",
        "topic/handoff.py",
        "        index.advance(due)\n",
        "        index.advance(due)\n        index.release(broker.progress)\n",
        _CRASH,
    ),
    Bug(
        "a log that gives way to others is closed without a sync",
        "segment/log.py",
        "        if self.stopped is None:\n            self.sync()\n        self.close()\n",
        "        self.close()\n",
        "descriptors trust:simulation",
    ),
    Bug(
        "a checkpoint is written before the logs it speaks of are synced",
        "broker/save.py",
        "        for kind, fd, path in self.syncs:\n",
        "        door.replace(self.path, self.data)\n        for kind, fd, path in self.syncs:\n",
        _CRASH,
    ),
    Bug(
        "what opening found is served without a sync",
        "index/recover.py",
        "    log.make_durable(segments.door, segment.path, segment.size, end)\n",
        (
            "    fd = segments.door.open_write(segment.path)\n"
            "    if end < segment.size:\n"
            "        segments.door.truncate(fd, segment.path, end)\n"
            "    segments.door.close(fd)\n"
        ),
        _CRASH,
    ),
    Bug(
        "a cancel of a ready message is answered before it is synced",
        "broker/state.py",
        "        self.logs.sync()\n        self.visibility.cancel(",
        "        self.visibility.cancel(",
        f"engine_states {_CRASH}",
    ),
    Bug(
        "dead letters that are about to go are not noted durably",
        "broker/state.py",
        "        self.logs.history.sync()\n",
        "",
        f"dead {_CRASH}",
    ),
    Bug(
        "at most once: handed out before the settlement is synced",
        "broker/broker.py",
        "for lease in leases])\n            self.sync()\n",
        "for lease in leases])\n",
        f"engine_faults {_CRASH}",
    ),
    Bug(
        "acks with ack_durability fsync are answered before the sync",
        "broker/settling.py",
        "if not failed and not unknown and not fsync:",
        "if not failed and not unknown:",
        f"engine_faults {_CRASH}",
    ),
    Bug(
        "a long back-off is noted as moved before it sleeps",
        "broker/failures.py",
        (
            "            self._schedule_retries(self._ended(group, messages, error, when_ms.tolist()))\n"
            "        except Exhausted:\n"
            "            return False\n"
        ),
        (
            "            self._ended(group, messages, error, when_ms.tolist())\n"
            "        except Exhausted:\n"
            "            return False\n"
        ),
        f"{_SIM}",
    ),
    # Split events
    Bug(
        "a checkpoint that lacks a part is believed",
        "broker/events.py",
        'follows = parts > 0 and fields["part"] == parts and number == journal[i - 1][0] + 1\n',
        "follows = parts > 0\n",
        "bounded_events trust:damage",
    ),
    Bug(
        "a crash may leave a part of a split event",
        "broker/journal.py",
        "        flags = [f.CONTINUES] * len(batch)\n",
        "        flags = [0] * len(batch)\n",
        f"bounded_events {_SIM}",
    ),
    Bug(
        "replaced letters are counted in every piece of a settlement",
        "broker/events.py",
        "Int64(0 if rows.start else replaced)",
        "Int64(replaced)",
        f"bounded_events {_SIM}",
    ),
    Bug(
        "a long checkpoint fills its file, so that each event begins another",
        "broker/journal.py",
        "        return self.size + size <= 2 * self._state_end\n",
        "        return False\n",
        "bounded_events",
    ),
    # Errors
    Bug(
        "writing goes on after a failed sync",
        "index/writer.py",
        "heard = error if isinstance(error, Exhausted) else self.stop(error)",
        "heard = error",
        "faults engine_faults trust:refusals",
    ),
    Bug(
        "a write that failed leaves its bytes behind",
        "storage/door.py",
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
        "small_keys(cursors, (now_ms + 1) << ORDINAL_BITS)",
        "small_keys(cursors, (now_ms + 2) << ORDINAL_BITS)",
        f"firing index {_SIM}",
    ),
    Bug(
        "what is due now waits until it is late",
        "index/segments.py",
        "heap[0][0] <= now_ms:\n            distinct",
        "heap[0][0] < now_ms:\n            distinct",
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
        "            tombstones.append(tombstone(document))\n",
        "            pass\n",
        f"compaction index_machine {_SIM}",
    ),
    Bug(
        "tombstones are lost when their segment is dropped",
        "index/maintenance.py",
        "        self._keep_tombstones(segment)\n        deleted",
        "        deleted",
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
        "        saved.cancelled |= set(offsets[there].tolist())\n",
        "",
        f"engine_states {_SIM}",
    ),
    Bug(
        "a seal drops what was handed off but is not safe yet",
        "index/maintenance.py",
        "            progress=segments.durable,\n",
        "            progress=segments.progress,\n",
        f"compaction index_machine {_CRASH}",
    ),
    Bug(
        "compaction moves a sleeper whose cancel is being committed",
        "index/maintenance.py",
        "                    elif document.seq not in ending:\n",
        "                    else:\n",
        "compaction commit",
    ),
    # Consuming
    Bug(
        "the cursor of a group is saved before its leases",
        "broker/replay.py",
        "            mark.open[offset] = c.OpenMessage(seq, attempt, end_ms, at_ms, consumer, event=number)\n",
        "            pass\n",
        f"{_SIM} server_kill",
    ),
    Bug(
        "an ack under an expired lease ends the new lease",
        "broker/group.py",
        "            if slots.get(ids[i]) == first + i:\n                del slots[ids[i]]",
        "            slots.pop(ids[i], None)",
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
        "topic/topic.py",
        "        known = partial(facts.known_ids, self.stores) if self._broker.ready.next_offset else None\n",
        "        known = None\n",
        f"{_SIM} server",
    ),
    Bug(
        "settled messages come back when replay begins without a checkpoint",
        "broker/replay.py",
        "            for offset in offsets[there].tolist():\n                mark.open.pop(offset, None)\n            lost +=",
        "            lost +=",
        f"{_SIM} server_kill",
    ),
    # The door to the world
    Bug(
        "a token's secret is not compared",
        "server/auth.py",
        "if not hmac.compare_digest(_digest(parts[0]), digest) or token is None:",
        "if token is None:",
        "server_security trust:hostile",
    ),
    Bug(
        "a token for one topic is good for all",
        "server/auth.py",
        "isdisjoint(token.rights) and bool(self._fits[token.name](topic))",
        "isdisjoint(token.rights)",
        "server_security trust:hostile",
    ),
    Bug(
        "a compressed body may be as large as it likes",
        "server/incoming/decompress.py",
        "            if size > limit:\n",
        "            if size > limit << 20:\n",
        "server_bad server_encodings hostile trust:hostile",
    ),
    # At edges and in moments that only chance would meet
    Bug(
        "a checkpoint claims events that came after it began",
        "broker/journal.py",
        "        self._dirty &= self.number != number\n",
        "        self._dirty, number = False, self.number\n",
        "engine_trust",
    ),
    Bug(
        "a checkpoint claims handoffs that came after it began",
        "broker/save.py",
        "    logs.ready.note_synced(*done.ready)\n",
        "    logs.ready.note_synced(logs.ready.progress, logs.ready.next_offset)\n",
        "engine_trust",
    ),
    Bug(
        "compaction forgets when a message expires",
        "index/maintenance.py",
        "    keep = f.USER_FLAGS | f.OPTIONAL | f.META\n",
        "    keep = f.USER_FLAGS | f.HEADERS | f.META\n",
        "engine_trust",
    ),
    Bug(
        "a ready message is found by the hash of its id alone",
        "broker/ready_lookup.py",
        "            for offset, id_ in zip(offsets.tolist(), documents.ids(), strict=False):\n",
        "            for offset, id_ in zip(offsets.tolist(), sorted(wanted), strict=False):\n",
        "engine_trust",
    ),
    Bug(
        "many sleepers are found by the hashes of their ids alone",
        "index/lookup.py",
        "            for k, id_ in enumerate(read.ids()):\n",
        "            for k, id_ in enumerate(ids[: len(chosen)]):\n",
        "engine_trust",
    ),
    Bug(
        "a sleeper is found by the hash of its id alone",
        "index/lookup.py",
        "            if document is not None and document.id == id_:\n",
        "            if document is not None:\n",
        "engine_trust",
    ),
    Bug(
        "a checkpoint forgets who holds a message",
        "broker/checkpoint.py",
        '        "consumers": [lease.consumer for lease in leases],\n',
        '        "consumers": ["" for _ in leases],\n',
        "engine_trust",
    ),
    Bug(
        "a checkpoint mixes up why messages failed",
        "broker/checkpoint.py",
        '        "waiting_errors": pack([errors[retry.error] for retry in retries]),\n',
        '        "waiting_errors": pack([0 for _ in retries]),\n',
        "engine_trust",
    ),
    Bug(
        "what no group has seen yet is retained away",
        "broker/retention.py",
        "for group in state.groups.values()), default=0)\n",
        "for group in state.groups.values()), default=ready.next_offset)\n",
        "engine_trust",
    ),
    Bug(
        "a group whose consumer holds messages expires",
        "broker/retention.py",
        "if group.in_flight or group.seen_ms is None or",
        "if group.seen_ms is None or",
        "engine_trust",
    ),
    Bug(
        "a fetch that finds nothing does not count as use of its group",
        "broker/broker.py",
        "        group.use(now_ms)\n        room = ",
        "        room = ",
        "groups trust:simulation",
    ),
    Bug(
        "a fetch asks the engine only where something is ready",
        "server/fetches.py",
        "        return self._reserve(fetch, now_ms, clock)\n",
        (
            "        known = self._engine.topic(fetch.topic).view.has_group(fetch.group)\n"
            "        if known and not self._has_ready(fetch.topic, fetch.group, now_ms, clock):\n"
            "            return Reserved()\n"
            "        return self._reserve(fetch, now_ms, clock)\n"
        ),
        "fetches trust:simulation",
    ),
    Bug(
        "a group expires while a fetch waits for its messages",
        "server/fetches.py",
        "self._engine.tick(now_ms, self._waiting.groups)",
        "self._engine.tick(now_ms)",
        "fetches trust:simulation",
    ),
    Bug(
        "a clock that jumps ahead makes groups old",
        "broker/retention.py",
        "min(now_ms - group.seen_ms, IDLE_STEP_MS, math.ceil(limit_ms / 2))",
        "now_ms - group.seen_ms",
        "groups trust:clocks",
    ),
    Bug(
        "polls of a deleted group wait on, and make it anew",
        "server/fetches.py",
        "        self._end(self._waiting.of_group(topic, group))\n",
        "",
        "fetches trust:simulation",
    ),
    Bug(
        "polls of a deleted topic wait on, and take messages of the next one",
        "server/fetches.py",
        "                self._end(self._waiting.of_topic(topic))\n",
        "                pass\n",
        "fetches",
    ),
    Bug(
        "dead letters go before their time",
        "topic/dead_letters.py",
        "(old := self.page(Filter(to_ms=limit_ms), _PAGE)[0])",
        "(old := self.page(Filter(to_ms=now_ms), _PAGE)[0])",
        "engine_trust",
    ),
    Bug(
        "no checkpoint comes after the clock went back",
        "topic/checkpoints.py",
        "not now_ms < self._due_ms <= now_ms + self._stores.settings.beat_ms",
        "self._due_ms <= now_ms",
        "engine_trust",
    ),
    Bug(
        "no maintenance runs after the clock went back",
        "topic/maintenance.py",
        "self.due_ms is not None and not now_ms < self.due_ms <= now_ms + MAINTENANCE_MS\n",
        "self.due_ms is not None and self.due_ms <= now_ms\n",
        "engine_trust",
    ),
    Bug(
        "nothing is retained away after the clock went back",
        "topic/maintenance.py",
        "        if not now_ms < self.due_ms <= now_ms + RETENTION_MS:\n",
        "        if self.due_ms <= now_ms:\n",
        "engine_trust",
    ),
    Bug(
        "a duplicate is answered before what it repeats is synced",
        "index/writer.py",
        "        return self._group or self._flying\n",
        "        return self._group\n",
        "server_moments",
    ),
    Bug(
        "a poll that ends keeps the messages it was just given",
        "server/service.py",
        "                self.give_back(fetch, future.result())  # the client",
        "                pass  # the client",
        "server_moments",
    ),
    Bug(
        "labels of groups go by the rank of their names",
        "server/metrics/labels.py",
        "        self._own &= tallies.keys()\n",
        "        self._own = set()\n",
        "metrics",
    ),
    Bug(
        "a time budget that is spent is not looked at",
        "server/request.py",
        "    if DEADLINE in request and time_left(request) <= 0:\n        raise DeadlineExceeded\n",
        "    return\n",
        "server_moments",
    ),
    Bug(
        "messages in BSON that could not be sent are not given back",
        "server/handlers/consume.py",
        "        return Reply(fetched_bson(messages), 200, BSON, undo, messages.lease)\n",
        "        return Reply(fetched_bson(messages), 200, BSON, None, messages.lease)\n",
        "server_time",
    ),
    Bug(
        "dead letters of a second page come all at once",
        "server/handlers/dead.py",
        "        due_ms = start + int(count * 1000 / asked.per_s) if asked.per_s else start\n",
        "        due_ms = start\n",
        "server_moments",
    ),
    Bug(
        "a seal forgets the tombstone of the last document",
        "index/seal.py",
        "        if any(low <= of <= high and document",
        "        if any(low <= of < high and document",
        "compaction_trust",
    ),
    Bug(
        "a dropped segment forgets the tombstone of the first document",
        "index/segments.py",
        "any(part.first_seq <= of <= part.last_seq for",
        "any(part.first_seq < of <= part.last_seq for",
        "compaction_trust",
    ),
    Bug(
        "a segment goes when a part of it is safe",
        "index/maintenance.py",
        "                if not segments.durable.covers(f.key_dues(keys), seqs).all():\n",
        "                if not segments.durable.covers(f.key_dues(keys), seqs).any():\n",
        "compaction_trust",
    ),
    Bug(
        "ready times fall with the clock",
        "broker/ready_log.py",
        "        ready_ms = max(now_ms, self.tail.last_ready_ms)\n",
        "        ready_ms = now_ms\n",
        "compaction_trust",
    ),
    Bug(
        "a backup links files that are as long",
        "backup.py",
        "(entry.bytes, entry.source) == (file[1], door.identity(file[0]))",
        "entry.bytes == file[1]",
        "backup_trust",
    ),
    Bug(
        "a backup copies what came after its moment",
        "backup.py",
        "            data = door.read(source, at, min(_CHUNK, length - at))\n",
        "            data = door.read(source, at, _CHUNK)\n",
        "backup_trust",
    ),
    Bug(
        "a restore does not sync its folders",
        "backup.py",
        "    for made in folders:\n        door.sync_folder(made)\n",
        "",
        "backup_trust",
    ),
    Bug(
        "a backup does not sync its copies",
        "backup.py",
        "        door.sync(fd, target)\n",
        "        pass\n",
        "backup_trust",
    ),
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
        "an unforeseen error in one topic takes the wake-ups of others",
        "engine.py",
        "            except Exception as error:  # noqa: BLE001 - kept in `trouble`: the other topics go on\n",
        "            except (TurtleError, OSError) as error:\n",
        "engine_tick",
    ),
    Bug(
        "a full bucket of ids denies some of them",
        "segment/table.py",
        "        if width == _BUCKET_WINDOW:\n",
        "        if False:\n",
        "check_trust",
    ),
    Bug(
        "check passes over dead letters",
        "topic/check.py",
        '    found += [f"dead letters of {line}" for line in stores.dead_letters.index.check()]\n',
        "",
        "check_trust",
    ),
    Bug(
        "check passes over the journals",
        "broker/check.py",
        "    yield from _check_journals(state)\n",
        "",
        "check_trust",
    ),
    # Standing: where a message is for a group
    Bug(
        "a retry that a move of its group made void still counts",
        "standing.py",
        "    return epoch < born or any(order <= seq and first <= left for seq, first in moves)\n",
        "    return epoch < born\n",
        "standing standing_cases trust:standing",
    ),
    Bug(
        "a retry of an earlier group of the same name counts",
        "standing.py",
        "    return epoch < born or any(order <= seq and first <= left for seq, first in moves)\n",
        "    return any(order <= seq and first <= left for seq, first in moves)\n",
        "standing standing_cases trust:standing",
    ),
    Bug(
        "the older retry that comes again after a move is overlooked",
        "broker/ready_view.py",
        '            offset = min(int(retry.meta["offset"]), offset - 1)\n',
        "            return None\n",
        "standing_cases trust:standing",
    ),
    Bug(
        "an id is free although a retry of its message sleeps",
        "standing.py",
        "_TRACES = RETAINED | ASLEEP | LETTER\n",
        "_TRACES = RETAINED | LETTER\n",
        "standing_cases trust:standing",
    ),
    Bug(
        "a requeue delivers a message that its group gets in any case",
        "standing.py",
        "    return decide(facts & ~LETTER) in _PENDING\n",
        "    return False\n",
        "standing standing_cases trust:standing",
    ),
    Bug(
        "a message that a consumer holds can be cancelled",
        "standing.py",
        "    blocking = standings - _CANCELLABLE\n",
        '    blocking = standings - _CANCELLABLE - {"reserve"}\n',
        "standing lifecycle trust:standing",
    ),
    # Spark shows the states that the engine tells
    Bug(
        "the tombstone of a replaced version does not say so",
        "index/seal.py",
        "f.TOMBSTONE | document.flags & f.REPLACES\n",
        "f.TOMBSTONE\n",
        "spark_states",
    ),
    Bug(
        "a snapshot takes the length of each log when it links it",
        "../spark/pyspark_turtlemq/moments.py",
        "        if lengths != self._measure() or _truths(listed) != _truths(self._list()):\n            return False\n",
        "        lengths = {}\n",
        "spark_moments trust:moments",
    ),
    Bug(
        "a snapshot does not look again whether a log has grown",
        "../spark/pyspark_turtlemq/moments.py",
        "        if lengths != self._measure() or _truths",
        "        if _truths",
        "trust:moments",
    ),
    Bug(
        "a snapshot does not look again whether segments were replaced",
        "../spark/pyspark_turtlemq/moments.py",
        " or _truths(listed) != _truths(self._list()):",
        ":",
        "spark_moments trust:moments",
    ),
    Bug(
        "a read takes a batch whose end is missing",
        "../spark/pyspark_turtlemq/parts.py",
        "view, whole = file.map(), clean or not last",
        "view, whole = file.map(), True",
        "spark_files trust:moments",
    ),
)
