"""Bugs planted in `topic`."""

from __future__ import annotations

from tests.trust.bugs.bug import CRASH, SIM, Bug

BUGS = (
    # Pauses
    Bug(
        "a pause is ignored by fetches and long polls",
        "topic/topic.py",
        "        if self.stores.pauses.holds(group):\n            count = 0\n",
        "",
        f"pause {SIM}",
    ),
    Bug(
        "a resume does not wake the long polls",
        "server/handlers/topics.py",
        '    request.app[SERVICE].answer_polls_soon(topic)\n    return answer({"paused": paused})\n',
        '    return answer({"paused": paused})\n',
        "pause",
    ),
    Bug(
        "a pause is not written",
        "topic/pauses.py",
        "            self._door.replace(self._path, text.encode())\n",
        "",
        f"pause {SIM}",
    ),
    Bug(
        "a new group of a deleted one's name is paused",
        "topic/topic.py",
        "        if group in self.stores.pauses.groups:\n            self._set_paused(group, False)\n",
        "",
        f"pause {SIM}",
    ),
    Bug(
        "a paused group expires",
        "topic/topic.py",
        "waiting=self._unforgettable(waiting))",
        "waiting=waiting)",
        "pause",
    ),
    # Durability: an answered request is on the disk
    Bug(
        "the Index lets go of what was handed off before that is synced",
        "topic/handoff.py",
        "        index.advance(due)\n",
        "        index.advance(due)\n        index.release(broker.progress)\n",
        CRASH,
    ),
    Bug(
        "a sleeping retry ends before its cancel is durable",
        "topic/stores.py",
        "            self.broker.sync()  # a cancel that a power cut takes back in the journal must not end a retry\n",
        "",
        "log_syncs",
    ),
    # Ids as timers
    Bug(
        "a message that gave way is not ended after a crash between the two logs",
        "topic/recover.py",
        "    replaced = _end_replaced(stores, interrupted.noted_seq)\n",
        "    replaced = False\n",
        "if_exists",
    ),
    Bug(
        "a settled message that gave way comes again if its group is moved back",
        "topic/superseded.py",
        "    ended = stores.broker.supersede(documents, retries, ids, now_ms)\n",
        "    ended = False\n",
        "if_exists",
    ),
    Bug(
        "a message is delivered although it is about to be replaced",
        "topic/topic.py",
        "        if self.stores.replacing:\n            self.stores.land_replacements()\n",
        "",
        "if_exists",
    ),
    Bug(
        "a transaction counts sleepers as cancelled that go on",
        "topic/transaction.py",
        "now_ms, moved, ended, sleepers, new)",
        "now_ms, moved, [], sleepers, new)",
        "transaction trust:simulation",
    ),
    Bug(
        "puts of a transaction are not found by their ids",
        "index/versions.py",
        "        hashes[:first] = columns.hashes\n",
        "        hashes[:first] = 0\n",
        "transaction trust:simulation",
    ),
    Bug(
        "a moved message loses its optional fields",
        "segment/fields.py",
        "raw[begin:end], body)",
        'b"", body)',
        "transaction fields",
    ),
    Bug(
        "a spread message is early",
        "topic/spread.py",
        "later: I64 = due + offsets(",
        "later: I64 = due - offsets(",
        "spread trust:simulation",
    ),
    Bug(
        "retries of before a move of their group count in the past",
        "broker/past.py",
        "        if then.left is not None and offset <= then.left:\n            then.left = None\n",
        "",
        "past",
    ),
    Bug(
        "a crash leaves half of a transaction",
        "index/versions.py",
        "f.TOMBSTONE | f.CONTINUES, elements",
        "f.TOMBSTONE, elements",
        "transaction",
    ),
    Bug(
        "a message of a consumer gives way",
        "if_exists.py",
        '    if mode == IfExists.ERROR or state == "reserve":\n',
        "    if mode == IfExists.ERROR:\n",
        "if_exists",
    ),
    Bug(
        "the id of a cancelled message stays taken",
        "topic/facts.py",
        "        known = {i for i, offset in offsets.items() if offset not in cancelled}\n",
        "",
        "if_exists",
    ),
    # Split events
    Bug(
        "a busy topic has its next turn before the others",
        "topic/wake_queue.py",
        "self.schedule_earlier(topic, max(when_ms, now_ms))",
        "self.schedule_earlier(topic, when_ms)",
        "ended_deliveries",
    ),
    # Consuming
    Bug(
        "a requeued letter keeps its old expiry",
        "topic/requeue.py",
        "            _expiring(letter.document, expires_ms),\n",
        "            letter.document,\n",
        f"engine_trust server_expiry {SIM}",
    ),
    Bug(
        "an id that is ready already is taken for a new one",
        "topic/facts.py",
        "    return partial(known_ids, stores) if stores.broker.ready.next_offset else None\n",
        "    return None\n",
        f"{SIM} server",
    ),
    # At edges and in moments that only chance would meet
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
        "check passes over dead letters",
        "topic/check.py",
        '    found += [f"dead letters of {line}" for line in stores.dead_letters.index.check()]\n',
        "",
        "check_trust",
    ),
    # Standing: where a message is for a group
    Bug(
        "a listing leaves out messages that a step did not come to",
        "topic/listing.py",
        "    if undecided is not None:\n        at = undecided + newest\n",
        "",
        "steps_of_pairs trust:limits",
    ),
    # Membership
    Bug(
        "dead letters are sealed by the thread of the engine",
        "topic/maintenance.py",
        "        self._others = [IndexUpkeep(stores.dead_letters.index, stores.door, worker)]\n",
        "        from turtlemq.storage.workers import Inline\n\n"
        "        self._others = [IndexUpkeep(stores.dead_letters.index, stores.door, Inline())]\n",
        "dead",
    ),
)
