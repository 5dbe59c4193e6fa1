"""Bugs planted in delivery by priority: nothing is skipped, doubled or forgotten, and no priority starves."""

from __future__ import annotations

from tests.trust.bugs.bug import CRASH, SIM, Bug

BUGS = (
    Bug(
        "a cursor passes a message that was not chosen",
        "broker/delivery.py",
        "            picked.cursors[level] = int(own[-1]) + 1\n",
        "            picked.cursors[level] = int(own[-1]) + 2\n",
        f"priority_delivery {SIM}",
    ),
    Bug(
        "a cursor stays at the last delivered message of its priority",
        "broker/delivery.py",
        "            picked.cursors[level] = int(own[-1]) + 1\n",
        "            picked.cursors[level] = int(own[-1])\n",
        f"priority_delivery {SIM}",
    ),
    Bug(
        "a search that was cut short counts as one up to the end",
        "broker/delivery.py",
        "    picked.cursors[level] = int(offsets[0]) if len(offsets) else end\n",
        "    picked.cursors[level] = int(offsets[0]) if len(offsets) else ready.next_offset\n",
        "priority_delivery",
    ),
    Bug(
        "a search begins anew in each table",
        "broker/ready_columns.py",
        "at, stop = max(first, begin), min(last, end)\n",
        "at, stop = begin, min(last, end)\n",
        f"priority_delivery {SIM}",
    ),
    Bug(
        "the tail keeps the priorities of other messages",
        "broker/ready_tail.py",
        "        return Rows(*columns, restricted, owners, self.levels[first:last])\n",
        "        return Rows(*columns, restricted, owners, self.levels[: last - first])\n",
        f"priority_delivery {SIM}",
    ),
    Bug(
        "messages read back from a file have normal priority",
        "broker/ready_batches.py",
        "    batches.levels[good] = levels_of(prefixes)\n",
        "",
        f"priority_delivery {SIM}",
    ),
    Bug(
        "a table of an older version has normal messages alone",
        "segment/table.py",
        '            raise Damaged(f"{self.path.name}: it knows no priorities. {Damaged.__doc__}", table=self)\n',
        "            return np.zeros(max(last - first, 0), np.uint8)\n",
        "priority_delivery",
    ),
    Bug(
        "retries that do not fit in a fetch are forgotten",
        "broker/delivery.py",
        "    group.retries.put_back(taken[stop:])\n",
        "",
        f"priority_delivery many_groups {SIM}",
    ),
    Bug(
        "a retry with two places is taken twice",
        "broker/retry_queue.py",
        " and place[1] not in self._taken:\n",
        ":\n",
        "priority_delivery",
    ),
    Bug(
        "retries stay due when the clock is set back",
        "broker/retry_queue.py",
        "        if now_ms < self._sorted_ms:\n",
        "        if now_ms < 0:\n",
        "priority_delivery engine_machine",
    ),
    Bug(
        "retries leave their queue before the journal names them",
        "broker/retry_queue.py",
        "                taken.append((place[1], self[place[1]]))\n",
        "                taken.append((place[1], self.pop(place[1])))\n",
        f"priority_delivery {CRASH}",
    ),
    Bug(
        "retries take all of the share of their priority",
        "broker/priorities.py",
        "    retries = max(min(int(exact + 0.5), due, count), count - fresh)\n",
        "    retries = min(due, count)\n",
        "priorities priority_delivery",
    ),
    Bug(
        "low keeps no floor while high pre-empts",
        "broker/priorities.py",
        "        kept = min(int(owed + 1e-9), quotas[level])\n",
        "        kept = 0\n",
        "priorities priority_delivery",
    ),
    Bug(
        "pre-emption never ends",
        "broker/priorities.py",
        "    lasts = state.active and now_ms - state.ready_ms < EMPTY_MS\n",
        "    lasts = state.active\n",
        "priorities priority_delivery",
    ),
    Bug(
        "the weight of high is raised at each look",
        "broker/priorities.py",
        "        if state.above + 1 < RAISE_AFTER:\n            return Weight(state.factor, state.above + 1)\n",
        "",
        "priorities",
    ),
    Bug(
        "large messages of high priority leave no room for low",
        "broker/delivery.py",
        "        owed[first] = owed.get(first, 0.0) - 1\n",
        "",
        "priority_delivery",
    ),
)
