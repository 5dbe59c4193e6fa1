"""Bugs planted in the modules at the top of the package: engine, backup, data folder, standing."""

from __future__ import annotations

from tests.trust.bugs.bug import Bug

BUGS = (
    # At edges and in moments that only chance would meet
    Bug(
        "ids are hashed without the secret",
        "data_folder.py",
        "            return int(text, 16) & SEED_MAX\n",
        "            return 0\n",
        "hash_flooding",
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
        "a deleted topic writes a last checkpoint",
        "engine.py",
        "            self.topic(name).discard()\n",
        "            self.topic(name).close()\n",
        "full_disk",
    ),
    Bug(
        "an unforeseen error in one topic takes the wake-ups of others",
        "engine.py",
        "        except Exception as error:  # noqa: BLE001 - kept in `trouble`: the other topics go on\n",
        "        except (TurtleError, OSError) as error:\n",
        "engine_tick",
    ),
    # Standing: where a message is for a group
    Bug(
        "an ack of unknown ids makes a checkpoint due",
        "engine.py",
        "        if out.acked or out.failed or out.dead:\n",
        "        if out is not None:\n",
        "many_topics",
    ),
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
    # Membership
    Bug(
        "a standby that becomes leader removes the pins of a backup under way",
        "backup.py",
        "    if _is_in_use(door, root / PINNED):\n",
        "    if False:\n",
        "standby_at_work",
    ),
)
