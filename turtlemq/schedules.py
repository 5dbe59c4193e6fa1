"""Recurring schedules: the times at which one fires, and the effect of a firing, a pause or an outage on them. Pure.

A schedule has a timing (a cron expression in a zone, a fixed interval, or a list of growing delays) and a place in it: the next
time, and the last one that was fired. A firing is a message whose id is `name@due_ms`, so that one time is never stored twice.

Times that passed while the server did not run, or while its clock leapt, are *missed* once a schedule is more than a minute
late: `catch_up` says whether they are left out (`skip`), made up for by one firing (`one`), or all fired, late (`all`). So a
restart or a failover within a minute misses none. In a server that runs, a time is fired however busy the server is.

A firing is put `LEAD_MS` ahead, and sleeps like a message with that due time until then, so it is as punctual as one. With
`overlap: skip`, it is decided at the time itself whether the firing before is done with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import xxhash

from turtlemq import cron
from turtlemq.errors import InvalidId, InvalidSchedule
from turtlemq.model import DUE_MS_MAX, ID_BYTES_MAX

CatchUp = Literal["skip", "one", "all"]
Overlap = Literal["allow", "skip"]
LEAD_MS = 3_000  # 10,000 schedules of one moment are put within a second
LATE_MS = 60_000  # a time that is reached later than this was missed: in an outage, or the clock has leapt
AT_ONCE = 500  # times of one schedule that are fired or left out in one step: 5 ms, and syncs are few in a long backlog
NAME_BYTES_MAX = ID_BYTES_MAX - len("@1770000000000")
EVERY_MS_MIN, EVERY_MS_MAX = 100, 3_660 * 86_400_000
DELAYS_MAX = 1_000
COUNT_MAX = 1_000_000_000
JITTER_MS_MAX = 86_400_000
_TIME_MS_MIN = 10**11  # below, a time looks like seconds


@dataclass(frozen=True, slots=True)
class Timing:
    """When a schedule fires: exactly one of `cron`, `every_ms` and `delays_ms` is given."""

    cron: str = ""
    zone: str = "UTC"
    every_ms: int = 0
    delays_ms: tuple[int, ...] = ()  # from the start to the first firing, from there to the second, …
    start_ms: int | None = None  # no firing before
    end_ms: int | None = None  # no firing after
    count: int | None = None  # of firings
    jitter_ms: int = 0  # each firing is later by up to so much, but before the next one

    def check(self) -> None:
        """Raise `InvalidSchedule` for a timing that is none."""
        given = [name for name in ("cron", "every_ms", "delays_ms") if getattr(self, name)]
        if len(given) != 1:
            raise InvalidSchedule("give one of cron, every and delays" + (f", not {len(given)}" if given else ""))
        if self.cron:
            cron.parse(self.cron)
            cron.zone_of(self.zone)
        if self.every_ms:
            _check_range("every", self.every_ms, EVERY_MS_MIN, EVERY_MS_MAX)
        if len(self.delays_ms) > DELAYS_MAX:
            raise InvalidSchedule(f"a schedule has at most {DELAYS_MAX:,} delays, this one {len(self.delays_ms):,}")
        for delay_ms in self.delays_ms:
            _check_range("delays", delay_ms, 1, EVERY_MS_MAX)
        for name, at_ms in (("start_ms", self.start_ms), ("end_ms", self.end_ms)):
            if at_ms is not None and not _TIME_MS_MIN <= at_ms <= DUE_MS_MAX:
                seconds = " It looks like seconds." if 0 <= at_ms < _TIME_MS_MIN else ""
                raise InvalidSchedule(f"{name} is a time in epoch milliseconds up to May 2109, not {at_ms}.{seconds}")
        if self.count is not None and not 1 <= self.count <= COUNT_MAX:
            raise InvalidSchedule(f"count is 1 to {COUNT_MAX:,}, not {self.count}")
        _check_range("jitter", self.jitter_ms, 0, JITTER_MS_MAX)

    def anchor(self, now_ms: int) -> int:
        """The time from which intervals and delays are counted, for a schedule that is made now."""
        if self.start_ms is not None:
            return self.start_ms
        return now_ms + self.every_ms

    def after(self, at_ms: int, anchor_ms: int) -> int | None:
        """The first time after `at_ms`, without jitter. None: there is none."""
        if self.cron:
            found = cron.parse(self.cron).after(max(at_ms, (self.start_ms or 0) - 1), cron.zone_of(self.zone))
        elif self.every_ms:
            found = anchor_ms + max(0, (at_ms - anchor_ms) // self.every_ms + 1) * self.every_ms
        else:
            found = next((time_ms for time_ms in self._delayed(anchor_ms) if time_ms > at_ms), None)
        return None if found is None or found > (DUE_MS_MAX if self.end_ms is None else self.end_ms) else found

    def _delayed(self, anchor_ms: int) -> Iterator[int]:
        for delay_ms in self.delays_ms:
            anchor_ms += delay_ms
            yield anchor_ms


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule, and its place in time."""

    name: str
    timing: Timing
    catch_up: CatchUp = "one"
    overlap: Overlap = "allow"
    paused: bool = False
    anchor_ms: int = 0  # see `Timing.anchor`
    time_ms: int | None = None  # the next time that is not fired, without jitter; None: there is none
    next_ms: int | None = None  # the same with jitter
    last_ms: int | None = None  # the newest firing; it may lie up to LEAD_MS ahead
    fired: int = 0
    ended_ms: int | None = None  # when the last time was fired or missed

    @property
    def wake_ms(self) -> int:
        """When the schedule has something to do next: it is put ahead, but not before the firing before it is due."""
        if self.paused or self.next_ms is None:
            return DUE_MS_MAX
        return self.next_ms if self.overlap == "skip" else max(self.next_ms - LEAD_MS, self.last_ms or 0)

    def shown_next(self, now_ms: int) -> int | None:
        """When the next firing is due, one that sleeps already included. None: paused or ended."""
        if self.last_ms is not None and self.last_ms > now_ms:
            return self.last_ms
        return None if self.paused else self.next_ms

    @property
    def has_ended(self) -> bool:
        return self.next_ms is None

    def upcoming(self, now_ms: int, count: int) -> list[int]:
        """The next times, as they would be if the schedule ran on from now."""
        sleeping = [self.last_ms] if self.last_ms is not None and self.last_ms > now_ms else []
        schedule = self._from(now_ms) if self.paused or (self.next_ms or 0) <= now_ms else self
        while len(sleeping) < count and schedule.next_ms is not None:
            sleeping.append(schedule.next_ms)
            schedule = schedule._fired_next()
        return sleeping[:count]

    # Changes: each gives another schedule

    def begun(self, now_ms: int) -> Schedule:
        """Count the times from now on."""
        return replace(self, anchor_ms=self.timing.anchor(now_ms), time_ms=now_ms, last_ms=None, fired=0)._from(now_ms)

    def replacing(self, old: Schedule, now_ms: int) -> Schedule:
        """This schedule where `old` was: with the same timing it goes on where that stood, so that putting it again does not
        shift it or begin its `count` anew."""
        if old.timing != self.timing:
            return replace(self.begun(now_ms), last_ms=old.last_ms)
        kept = replace(old, catch_up=self.catch_up, overlap=self.overlap)
        return kept.with_pause(self.paused, now_ms)

    def with_pause(self, paused: bool, now_ms: int) -> Schedule:
        """Pause or resume: times that pass in a pause are left out."""
        if paused == self.paused:
            return self
        return replace(self, paused=True) if paused else replace(self, paused=False)._from(now_ms)

    def without_last(self, now_ms: int) -> Schedule:
        """The newest firing was taken back before it was due: its time comes again."""
        taken_back = replace(self, last_ms=None, fired=self.fired - 1, ended_ms=None, time_ms=now_ms - self.timing.jitter_ms)
        return taken_back._from(now_ms)

    def step(
        self, now_ms: int, since_ms: int, late_ms: int | None = None, made_up: bool = False, busy: bool = False
    ) -> tuple[list[int], Schedule]:
        """The times to fire now, and the schedule after them. `since_ms`: since when the server has run. `late_ms`: a schedule
        whose next time is before it has missed that; by default LATE_MS ago. `made_up`: a firing that slept over the outage is
        late already, and counts as the one of `catch_up: one`. `busy`: the last firing is not done with, so `overlap: skip`
        leaves these times out."""
        times: list[int] = []
        late_ms = now_ms - LATE_MS if late_ms is None else late_ms
        schedule, boundary_ms = self, late_ms if (self.next_ms or 0) >= late_ms else max(since_ms, late_ms)
        for _ in range(AT_ONCE):
            next_ms = schedule.next_ms
            if next_ms is None or schedule.wake_ms > now_ms:
                break
            missed = next_ms < boundary_ms and self.catch_up != "all"
            if busy:
                schedule = schedule.skipped()
            elif not missed or (self.catch_up == "one" and not made_up):
                times.append(next_ms)
                schedule, busy = schedule._fired_next(), self.overlap == "skip"
            if missed:
                schedule = schedule._from(boundary_ms - 1)
        return times, schedule if schedule.next_ms is not None else replace(schedule, ended_ms=now_ms)

    def skipped(self) -> Schedule:
        """The next time is left out."""
        assert self.time_ms is not None
        return self._at(self.timing.after(self.time_ms, self.anchor_ms))

    def _fired_next(self) -> Schedule:
        fired = replace(self, last_ms=self.next_ms, fired=self.fired + 1)
        if self.timing.count is not None and fired.fired >= self.timing.count:
            return fired._at(None)
        return fired.skipped()

    def _from(self, at_ms: int) -> Schedule:
        """At the first time that is due after `at_ms`, jitter included, and not fired."""
        if self.time_ms is None:
            return self
        back_ms = 0
        while back_ms < self.timing.jitter_ms:  # jitter never reaches the next time, so one time before `at_ms` is enough
            back_ms = min(8 * back_ms + 1_000, self.timing.jitter_ms)
            before = self.timing.after(at_ms - back_ms, self.anchor_ms)
            if before is None or before <= at_ms:
                break
        found = self._at(self.timing.after(max(at_ms - back_ms, self.time_ms - 1), self.anchor_ms))
        while found.next_ms is not None and found.next_ms <= at_ms:
            found = found.skipped()
        return found

    def _at(self, time_ms: int | None) -> Schedule:
        """With another next time."""
        return replace(self, time_ms=time_ms, next_ms=None if time_ms is None else self._with_jitter(time_ms))

    def _with_jitter(self, time_ms: int) -> int:
        width_ms = self.timing.jitter_ms + 1
        if width_ms == 1:
            return time_ms
        following = self.timing.after(time_ms, self.anchor_ms)
        end_ms = DUE_MS_MAX if self.timing.end_ms is None else self.timing.end_ms
        width_ms = min(width_ms, end_ms - time_ms + 1 if following is None else following - time_ms)
        place = xxhash.xxh32_intdigest(f"{self.name}@{time_ms}".encode())
        return time_ms + (place * width_ms >> 32)

    # As stored

    def to_fields(self) -> dict[str, Any]:
        """As numbers and texts by name; defaults are left out."""
        timing = {name: getattr(self.timing, name) for name in Timing.__dataclass_fields__}
        own = {name: getattr(self, name) for name in Schedule.__dataclass_fields__ if name not in ("name", "timing")}
        fields = {name: value for name, value in (timing | own).items() if value not in (None, "", 0, (), False)}
        return fields | ({"delays_ms": list(self.timing.delays_ms)} if self.timing.delays_ms else {})

    @classmethod
    def from_fields(cls, name: str, fields: Mapping[str, Any]) -> Schedule:
        """The inverse of `to_fields`."""
        timing = {key: _plain(fields[key]) for key in Timing.__dataclass_fields__ if key in fields}
        own = {key: _plain(fields[key]) for key in Schedule.__dataclass_fields__ if key in fields}
        return cls(name=name, timing=Timing(**timing), **cast("Any", own))


def _plain(value: Any) -> Any:
    """A field as it was before it was stored: BSON has numbers of a type of its own, and lists for tuples."""
    if isinstance(value, list):
        return tuple(map(int, value))
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def firing_id(name: str, due_ms: int) -> str:
    """The id of the message that a schedule makes for one time.

    >>> firing_id("report", 1770000000000)
    'report@1770000000000'
    """
    return f"{name}@{due_ms}"


def check_name(name: str) -> None:
    """Raise `InvalidId` for a name with which firings would have no valid id."""
    if (
        name in ("", ".", "..")  # clients take dots out of the path of a request, which is another request then
        or name[0] == "-"
        or "/" in name
        or not name.isprintable()
        or len(name.encode()) > NAME_BYTES_MAX
    ):
        raise InvalidId(
            f"{name!r:.220} is no name of a schedule: 1 to {NAME_BYTES_MAX} bytes of printable text that does not start with "
            "'-', holds no '/', and is not '.' or '..'"
        )


def _check_range(name: str, value_ms: int, least_ms: int, most_ms: int) -> None:
    if not least_ms <= value_ms <= most_ms:
        raise InvalidSchedule(f"{name}: give {least_ms / 1000:g} to {most_ms / 1000:,.0f} seconds, not {value_ms / 1000:g}")
