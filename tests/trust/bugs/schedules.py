"""Bugs planted in recurring schedules: their times, their store, their firing and their requests."""

from __future__ import annotations

from tests.trust.bugs.bug import Bug

BUGS = (
    Bug(
        "the version of a schedule is written before its firing",
        "topic/scheduler.py",
        "        self._fire(times, now_ms)\n        store.stage(versions, now_ms)\n",
        "        store.stage(versions, now_ms)\n        store.commit()\n        self._fire(times, now_ms)\n",
        "scheduler trust:simulation",
    ),
    Bug(
        "a firing has an id of the server, and is put again after a crash",
        "topic/scheduler.py",
        "            ids=[firing_id(one.name, at_ms) for one, at_ms in times],\n",
        "            ids=None,\n",
        "scheduler",
    ),
    Bug(
        "a firing that slept over an outage comes although missed times are left out",
        "topic/scheduler.py",
        '        self._cancel([id_ for id_ in asleep if late[id_].catch_up == "skip"], now_ms)\n',
        "",
        "scheduler",
    ),
    Bug(
        "a firing ahead stays if its schedule is changed or deleted",
        "topic/scheduler.py",
        "            store.commit()\n            self._cancel(sleeping, now_ms)\n",
        "            store.commit()\n",
        "scheduler schedules_server schedules_walk",
    ),
    Bug(
        "a second trigger at one time is lost",
        "topic/scheduler.py",
        "            at_ms -= 1\n",
        "            break\n",
        "schedules_server trust:simulation",
    ),
    Bug(
        "a schedule with an overlap fires on",
        "topic/scheduler.py",
        "        return last is not None and last.state in _UNDONE\n",
        "        return False\n",
        "scheduler",
    ),
    Bug(
        "the next schedule is not looked for",
        "topic/schedule_store.py",
        "            self._find_first(self.wake_ms)  # no schedule",
        "            self.wake_ms = None  # no schedule",
        "scheduler trust:simulation",
    ),
    Bug(
        "a time in a skipped hour of daylight saving is left for the next day",
        "cron.py",
        "            if local is not None and (found := _first_instant(local, zone)) > at:\n",
        "            if local is not None and (found := _first_instant(local, zone)) > at:\n"
        "                if _offset(found, zone) != _offset(at, zone):\n                    continue\n",
        "cron schedules_server",
    ),
    Bug(
        "a time of a doubled hour is fired the second time",
        "cron.py",
        "    return before if before <= after else _change(after, before, zone)\n",
        "    return after if before <= after else _change(after, before, zone)\n",
        "cron",
    ),
    Bug(
        "a schedule that is put again begins anew",
        "schedules.py",
        "        if old.timing != self.timing:\n",
        "        if old.timing:\n",
        "schedules schedules_server",
    ),
    Bug(
        "times in a pause are made up for",
        "schedules.py",
        "        return replace(self, paused=True) if paused else replace(self, paused=False)._from(now_ms)\n",
        "        return replace(self, paused=paused)\n",
        "schedules schedules_server",
    ),
    Bug(
        "a put without `paused` wakes a paused schedule",
        "server/incoming/schedules.py",
        "    paused = was_paused if asked.paused is None else asked.paused\n",
        "    paused = bool(asked.paused)\n",
        "schedules_server",
    ),
    Bug(
        "a quick restart counts as an outage",
        "schedules.py",
        "late_ms if (self.next_ms or 0) >= late_ms else max(since_ms, late_ms)",
        "max(since_ms, late_ms)",
        "schedules scheduler",
    ),
    Bug(
        "times that wait for room on the disk are missed",
        "topic/scheduler.py",
        "        if self._late_ms is None:  #",
        "        if True:  #",
        "scheduler",
    ),
    Bug(
        "one schedule whose zone has gone stops its topic",
        "topic/scheduler.py",
        "            except InvalidSchedule as error:\n",
        "            except ZeroDivisionError as error:\n",
        "scheduler",
    ),
)
