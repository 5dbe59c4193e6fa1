"""Bugs planted in `index`: sleeping messages, seals, recovery."""

from __future__ import annotations

from tests.trust.bugs.bug import CRASH, SIM, Bug

BUGS = (
    # Durability: an answered request is on the disk
    Bug(
        "a commit is not synced",
        "index/writer.py",
        "        if sync:\n            self.door.sync(self.fd, self.path)\n",
        "",
        CRASH,
    ),
    Bug("a sealed segment is not synced", "index/seal.py", "        door.sync(fd, tmp)\n", "", CRASH),
    Bug(
        "a seal is adopted without a sync of the folder, and the old files go",
        "index/maintenance.py",
        "            with door.durable_names(segments.folder):\n                door.rename(part.path, path)\n",
        "            if True:\n                door.rename(part.path, path)\n",
        CRASH,
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
        CRASH,
    ),
    # Errors
    Bug(
        "writing goes on after a failed sync",
        "index/writer.py",
        "heard = error if isinstance(error, Exhausted) else self.stop(error)",
        "heard = error",
        "faults engine_faults trust:refusals",
    ),
    # Damage
    Bug(
        "an index that names other due times than the documents is believed",
        "index/firing.py",
        'if (heads["due"] != self.due_ms[good]).any():',
        "if False:",
        "firing damage trust:damage",
    ),
    # Time
    Bug(
        "a message fires a millisecond early",
        "index/firing.py",
        "    limit = (now_ms + 1) << ORDINAL_BITS\n    slices",
        "    limit = (now_ms + 2) << ORDINAL_BITS\n    slices",
        f"firing index {SIM}",
    ),
    Bug(
        "few messages fire a millisecond early",
        "index/firing.py",
        "small_keys(cursors, (now_ms + 1) << ORDINAL_BITS)",
        "small_keys(cursors, (now_ms + 2) << ORDINAL_BITS)",
        f"firing index {SIM}",
    ),
    Bug(
        "what is due now waits until it is late",
        "index/segments.py",
        "heap[0][0] <= now_ms:\n            distinct",
        "heap[0][0] < now_ms:\n            distinct",
        "firing index",
    ),
    Bug(
        "sequence numbers follow the clock when it goes back",
        "logical_clock.py",
        "return max(last + 1, now_ms << SEQ_COUNTER_BITS)",
        "return (now_ms << SEQ_COUNTER_BITS) or last + 1",
        f"index server_time trust:clocks {SIM}",
    ),
    # Cancel, replace, move
    Bug(
        "tombstones are lost when their segment is sealed",
        "index/seal.py",
        "            tombstones.append(tombstone(document))\n",
        "            pass\n",
        f"compaction index_machine {SIM}",
    ),
    Bug(
        "tombstones are lost when their segment is dropped",
        "index/maintenance.py",
        "        self._keep_tombstones(segment)\n        deleted",
        "        deleted",
        f"compaction index_machine {SIM}",
    ),
    Bug(
        "a cancelled sleeper fires if its cancel is being committed",
        "index/firing.py",
        "    stop = taken.first_of(held_back) if held_back else taken.count\n",
        "    stop = taken.count\n",
        "commit index server",
    ),
    Bug(
        "a seal drops what was handed off but is not safe yet",
        "index/maintenance.py",
        "            progress=segments.durable,\n",
        "            progress=segments.progress,\n",
        f"compaction index_machine {CRASH}",
    ),
    Bug(
        "compaction moves a sleeper whose cancel is being committed",
        "index/maintenance.py",
        "                    elif document.seq not in ending:\n",
        "                    else:\n",
        "compaction commit",
    ),
    # At edges and in moments that only chance would meet
    Bug(
        "compaction forgets when a message expires",
        "index/maintenance.py",
        "    keep = f.USER_FLAGS | f.OPTIONAL | f.META\n",
        "    keep = f.USER_FLAGS | f.HEADERS | f.META\n",
        "engine_trust",
    ),
    Bug(
        "ids are looked up in old tables with the new secret",
        "index/lookup.py",
        "            query = queries[None, part.seed] = IdQuery(hash_any(ids, part.seed))\n",
        "            query = queries[None, part.seed] = queries[None, max(seed for _, seed in queries)]\n",
        "hash_flooding trust:simulation",
    ),
    Bug(
        "one id is looked up in old tables with the new secret",
        "index/lookup.py",
        "hash_ = hashes[part.seed] = hash_id(id_, part.seed)\n",
        "hash_ = hashes[part.seed] = hash_id(id_, segments.seed)\n",
        "hash_flooding trust:simulation",
    ),
    Bug(
        "a seal makes tables without the secret that say they have it",
        "index/seal.py",
        "scanned, 0, len(scanned), job.seed)[order]",
        "scanned, 0, len(scanned), 0)[order]",
        "hash_flooding trust:simulation",
    ),
    Bug(
        "many sleepers are found by the hashes of their ids alone",
        "index/lookup.py",
        "zip(read.ids(), *fields, chosen.tolist(), strict=True)",
        "zip(ids, *fields, chosen.tolist(), strict=False)",
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
        "a duplicate is answered before what it repeats is synced",
        "index/writer.py",
        "        return self._group or self._flying\n",
        "        return self._group\n",
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
    # Standing: where a message is for a group
    Bug(
        "one step looks up messages with any number of retries",
        "index/group_lookup.py",
        "    while count_max is not None and count > 1",
        "    while count_max is not None and count < 1",
        "steps_of_pairs trust:limits",
    ),
    # Spark shows the states that the engine tells
    Bug(
        "the tombstone of a replaced version does not say so",
        "index/seal.py",
        "f.TOMBSTONE | document.flags & f.REPLACES\n",
        "f.TOMBSTONE\n",
        "spark_states",
    ),
    # Membership
    Bug(
        "a new leader gives ids again that the lost one gave",
        "index/recover.py",
        "max(_last_seq(segments), door.seq_floor)",
        "_last_seq(segments)",
        "replica cluster_pair",
    ),
    Bug(
        "documents are appended behind one that has lost its end",
        "index/recover.py",
        "segment.generation >= 0 and not _ends_badly(scanned)\n",
        "segment.generation >= 0\n",
        "engine_damage trust:damage",
    ),
    Bug(
        "half a batch that a proper stop vouched for is torn after the next kill",
        "index/recover.py",
        "bool(scanned.damaged) or bool(len(scanned) and scanned.flags[-1] & f.CONTINUES)\n",
        "bool(scanned.damaged)\n",
        "engine_damage trust:damage",
    ),
)
