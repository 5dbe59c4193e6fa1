"""Cron expressions in time zones: the moments at which they are due. Pure.

Five fields (minute, hour, day of month, month, day of week), or six with seconds before them; `*`, lists, ranges, steps, names,
`L` (the last day of a month, or the last such weekday: `5L`), `LW` (the last weekday of a month), `MON#2` (the second Monday),
and `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`. Days are joined as in Debian's cron: if day of month or day of week
begins with `*`, both must match, else one of them.

Daylight saving is treated as in Debian's cron, too. If minute and hour are given, a job is due once a day: in a skipped hour at
the end of the gap, in a doubled hour the first time. If one of them begins with `*`, the job follows the clock: not at all in a
skipped hour, and twice in a doubled one. tests/test_cron.py compares this with the library cronsim, over many zones; that takes
ten times as long for one time, and misses some where the clocks change by half an hour.
"""

from __future__ import annotations

from bisect import bisect_right
from calendar import monthrange
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from turtlemq.errors import InvalidSchedule
from turtlemq.model import DUE_MS_MAX

LENGTH_MAX = 200  # characters of an expression
_YEARS_MAX = 50  # 29 February as the fifth Sunday comes every 28 years, but for 2100
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # local times are counted from it, too, as if they were UTC
_SECOND, _DAY = timedelta(seconds=1), timedelta(days=1)
_FIELDS = ("second", "minute", "hour", "day of month", "month", "day of week")
_LIMITS = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_MONTHS = {name: i for i, name in enumerate("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC".split(), 1)}
_WEEKDAYS = {name: i for i, name in enumerate("SUN MON TUE WED THU FRI SAT".split())}
_NAMES: tuple[dict[str, int], ...] = ({}, {}, {}, {}, _MONTHS, _WEEKDAYS)
_MACROS = {
    "@HOURLY": "0 * * * *",
    "@DAILY": "0 0 * * *",
    "@MIDNIGHT": "0 0 * * *",
    "@WEEKLY": "0 0 * * 0",
    "@MONTHLY": "0 0 1 * *",
    "@YEARLY": "0 0 1 1 *",
    "@ANNUALLY": "0 0 1 1 *",
}
_LOCAL = ("localtime", "posixrules")
_Time = tuple[int, int, int]  # hour, minute, second


@dataclass(frozen=True, slots=True)
class Cron:
    """A parsed expression. Weekdays are 0 (Sunday) to 6."""

    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    last_day: bool  # the last day of the month
    last_weekday: bool  # the last day of the month that is none of a weekend
    months: frozenset[int]
    weekdays: frozenset[int]
    nth_weekdays: frozenset[tuple[int, int]]  # weekday and its number in the month; 0: the last one
    both_days: bool  # day of month and day of week must match; False: one of them
    follows_clock: bool  # minute or hour begin with `*`

    def after(self, at_ms: int, zone: ZoneInfo) -> int | None:
        """The first moment after `at_ms` at which the job is due. None: there is none within 50 years."""
        found = self._running_after(at_ms // 1000, zone) if self.follows_clock else self._fixed_after(at_ms // 1000, zone)
        return None if found is None or found * 1000 > DUE_MS_MAX else found * 1000

    def _fixed_after(self, at: int, zone: ZoneInfo) -> int | None:
        """The next second that is due, for a job at fixed times of the day."""
        local: datetime | None = _EPOCH + timedelta(seconds=at + _offset(at, zone))
        while local is not None:
            local = self._local_after(local)
            if local is not None and (found := _first_instant(local, zone)) > at:
                return found
        return None

    def _running_after(self, at: int, zone: ZoneInfo) -> int | None:
        """The next second that is due, for a job that follows the clock: from one change of the clocks to the next, local time
        runs like time itself."""
        offset = _offset(at, zone)
        while True:
            local = self._local_after(_EPOCH + timedelta(seconds=at + offset))
            found = None if local is None else _seconds(local) - offset
            reach = at + 86_400 if found is None else min(found, at + 86_400)  # a change further away repeats no time before `at`
            if _offset(reach, zone) == offset:
                if found is None or reach == found:
                    return found
                at = max(reach, found - 86_400)
                offset = _offset(at, zone)
            else:
                at = _change(at, reach, zone)
                offset = _offset(at, zone)
                at -= 1  # the moment of the change may be due itself

    def _local_after(self, after: datetime) -> datetime | None:
        """The next local time that matches, without regard to changes of the clocks."""
        day = after.date()
        if self._matches(day) and (found := self._time_after(after.hour, after.minute, after.second)) is not None:
            return datetime(day.year, day.month, day.day, *found, tzinfo=UTC)
        for later in self._days_after(day):
            if self._matches(later):
                first = self.hours[0], self.minutes[0], self.seconds[0]
                return datetime(later.year, later.month, later.day, *first, tzinfo=UTC)
        return None

    @property
    def has_times(self) -> bool:
        """Is there any day that matches?"""
        return self._local_after(datetime(2000, 1, 1, tzinfo=UTC)) is not None

    def _time_after(self, hour: int, minute: int, second: int) -> _Time | None:
        """The next time of the same day that matches."""
        if hour in self.hours:
            if minute in self.minutes and (i := bisect_right(self.seconds, second)) < len(self.seconds):
                return hour, minute, self.seconds[i]
            if (i := bisect_right(self.minutes, minute)) < len(self.minutes):
                return hour, self.minutes[i], self.seconds[0]
        i = bisect_right(self.hours, hour)
        return (self.hours[i], self.minutes[0], self.seconds[0]) if i < len(self.hours) else None

    def _days_after(self, day: date) -> Iterator[date]:
        """Days behind this one, in months that match."""
        last = day.year + _YEARS_MAX
        while day.year <= last:
            day += _DAY
            while day.month not in self.months:
                day = (day.replace(day=1) + timedelta(days=31)).replace(day=1)
            yield day

    def _matches(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        if self.both_days:
            return self._matches_day_of_month(day) and self._matches_weekday(day)
        return self._matches_day_of_month(day) or self._matches_weekday(day)

    def _matches_day_of_month(self, day: date) -> bool:
        if day.day in self.days:
            return True
        if not (self.last_day or self.last_weekday) or day.day < 26:
            return False
        first, last = monthrange(day.year, day.month)
        friday = last - max(0, (first + last - 1) % 7 - 4)  # the last day, or the Friday before its weekend
        return (self.last_day and day.day == last) or (self.last_weekday and day.day == friday)

    def _matches_weekday(self, day: date) -> bool:
        weekday = day.isoweekday() % 7
        if weekday in self.weekdays:
            return True
        if not self.nth_weekdays:
            return False
        is_last = day.day + 7 > monthrange(day.year, day.month)[1]
        return (weekday, (day.day + 6) // 7) in self.nth_weekdays or (is_last and (weekday, 0) in self.nth_weekdays)


@lru_cache(4096)
def parse(expression: str) -> Cron:
    """A cron expression. Raises `InvalidSchedule`.

    >>> from zoneinfo import ZoneInfo
    >>> parse("0 9 * * MON-FRI").after(0, ZoneInfo("Europe/Berlin"))  # 2 January 1970 was a Friday
    28800000
    """
    if len(expression) > LENGTH_MAX:
        raise InvalidSchedule(f"a cron expression has at most {LENGTH_MAX} characters, this one {len(expression)}")
    text = expression.strip().upper()
    fields = _MACROS.get(text, text).split()
    if len(fields) not in (5, 6):
        raise InvalidSchedule(
            f"cron {expression!r}: it has {len(fields)} fields; give 5 (minute, hour, day of month, month, day of week), or 6 "
            "with seconds before them"
        )
    second, minute, hour, day, month, weekday = fields if len(fields) == 6 else ["0", *fields]
    seconds, minutes, hours, months = (
        tuple(sorted(_numbers(expression, i, term))) for i, term in ((0, second), (1, minute), (2, hour), (4, month))
    )
    days = [term for term in day.split(",") if term not in ("L", "LW")]
    nth = [term for term in weekday.split(",") if "#" in term or term.endswith("L")]
    plain = [term for term in weekday.split(",") if term not in nth]
    cron = Cron(
        seconds=seconds,
        minutes=minutes,
        hours=hours,
        days=_numbers(expression, 3, ",".join(days)) if days else frozenset(),
        last_day="L" in day.split(","),
        last_weekday="LW" in day.split(","),
        months=frozenset(months),
        weekdays=frozenset(number % 7 for number in _numbers(expression, 5, ",".join(plain))) if plain else frozenset(),
        nth_weekdays=frozenset(_nth(expression, term) for term in nth),
        both_days=day[0] in "*?" or weekday[0] in "*?",
        follows_clock=minute[0] == "*" or hour[0] == "*",
    )
    if not cron.has_times:
        raise InvalidSchedule(f"cron {expression!r}: there is no such day")
    return cron


def _numbers(expression: str, i: int, text: str) -> frozenset[int]:
    """The numbers of field `i`."""
    return frozenset(number for term in text.split(",") for number in _term(expression, i, term))


def _term(expression: str, i: int, term: str) -> range:
    """One term of a field: a number, a range or `*`, each with or without a step."""
    low, high = _LIMITS[i]
    body, slash, step = term.partition("/")
    first, dash, last = body.partition("-")
    if body == "*" or (body == "?" and i in (3, 5)):
        numbers = range(low, high + 1)
    elif dash:
        start, end = _number(expression, i, first), _number(expression, i, last)
        end = 7 if i == 5 and end == 0 < start else end  # FRI-SUN
        numbers = range(start, end + 1)
    else:
        start = _number(expression, i, first)
        numbers = range(start, (high if slash else start) + 1)
    if not numbers or (slash and not (step.isascii() and step.isdigit() and 0 < int(step) <= 1 << 16)):
        raise _bad(expression, i, term)
    return numbers[:: int(step)] if slash else numbers


def _number(expression: str, i: int, text: str) -> int:
    number = _NAMES[i].get(text)
    if number is None:
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else -1
    if not _LIMITS[i][0] <= number <= _LIMITS[i][1]:
        raise _bad(expression, i, text)
    return number


def _nth(expression: str, term: str) -> tuple[int, int]:
    """`MON#2` or `5L`: a weekday and its number in the month, 0 for the last one."""
    day, _, number = (term[:-1], "", "0") if term.endswith("L") else term.partition("#")
    if number not in ("0", "1", "2", "3", "4", "5") or (number == "0" and "#" in term):
        raise _bad(expression, 5, term)
    return _number(expression, 5, day) % 7, int(number)


def _bad(expression: str, i: int, term: str) -> InvalidSchedule:
    low, high = _LIMITS[i]
    return InvalidSchedule(f"cron {expression!r}: {term!r} is no {_FIELDS[i]} ({low} to {high})")


@lru_cache(1024)
def zone_of(name: str) -> ZoneInfo:
    """A time zone of the IANA database. Raises `InvalidSchedule`, also for the local zone, which differs by machine."""
    try:
        if name not in _LOCAL:
            return ZoneInfo(name)
        raise KeyError(name)
    except (KeyError, ValueError, OSError):  # unknown; no name at all; a folder of zones
        text = f"{name!r:.80} is no time zone; give a name of the IANA database, such as Europe/Berlin or UTC"
        if not _has_zones():
            text = f"{name!r:.80}: the server finds no time zones at all; install tzdata there, of the system or of Python"
        raise InvalidSchedule(text) from None


def _has_zones() -> bool:
    """Is there a database of time zones?"""
    try:
        ZoneInfo("UTC")
    except KeyError:
        return False
    return True


def _seconds(local: datetime) -> int:
    """The seconds of a local time, as if it were UTC."""
    return (local - _EPOCH) // _SECOND


def _offset(at: int, zone: ZoneInfo) -> int:
    """Seconds that local time is ahead of UTC at this moment."""
    offset = datetime.fromtimestamp(at, zone).utcoffset()
    return 0 if offset is None else offset // _SECOND


def _first_instant(local: datetime, zone: ZoneInfo) -> int:
    """The moment of a local time: the first one if it comes twice, the end of the gap if it is skipped."""
    before, after = (_seconds(local) - _fold_offset(local, zone, fold) for fold in (0, 1))
    return before if before <= after else _change(after, before, zone)


def _fold_offset(local: datetime, zone: ZoneInfo, fold: int) -> int:
    offset = local.replace(tzinfo=zone, fold=fold).utcoffset()
    return 0 if offset is None else offset // _SECOND


def _change(before: int, after: int, zone: ZoneInfo) -> int:
    """The moment of a change of the clocks, given one before it and one not before it."""
    offset = _offset(before, zone)
    while after - before > 1:
        middle = (before + after) // 2
        before, after = (middle, after) if _offset(middle, zone) == offset else (before, middle)
    return after
