"""From what each round found to rows, medians, ratios and goals: who leads, and does TurtleMQ reach what it must? Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from benchmarks.contest import Contest
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.peers.every import GIVEN, OURS
from benchmarks.works import SHARES, Figures

JSON, BSON = OURS


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that all queues are measured by."""

    part: str
    name: str
    unit: str
    more: bool  # is more better?
    value: Callable[[Figures], float | None]


def _plain(part: str, name: str, unit: str, key: str, *, more: bool = False) -> Row:
    return Row(part, name, unit, more, lambda found: found.get(key))


def _grown(name: str, unit: str, key: str, *, more: bool = False, by: float = 1.0) -> Row:
    return Row("grow", name, unit, more, lambda found: by * found[f"{key} {last(found)}"])


def last(found: Figures) -> int:
    """Which of its counts a queue got to."""
    return max(int(key.split()[-1]) for key in found if key.startswith("sleepers "))


def _growth(found: Figures) -> float:
    """Memory for one more sleeper, between the last two counts; for a queue that got to one only, from nothing on."""
    end = last(found)
    begin = (found[f"sleepers {end - 1}"], found[f"ram {end - 1}"]) if end else (0, found["empty"])
    return (found[f"ram {end}"] - begin[1]) / (found[f"sleepers {end}"] - begin[0])


def _memory(found: Figures) -> float:
    return (found["ram 0"] - found["empty"]) / found["sleepers 0"]


def _disk(found: Figures) -> float:
    return found[f"disk {last(found)}"] / found[f"sleepers {last(found)}"]


def _gone(found: Figures) -> float:
    return max(0.0, found["stored"] - found["cancelled"] - found["left"])


def _back(found: Figures) -> float:
    return max(0.0, found["left"] + found["cancelled"] - found["stored"])


def _wrong(found: Figures) -> float:
    return sum(found[key] for key in _WRONG.values())


def one_by_one(connections: int) -> str:
    return f"one by one, {connections} connection{'s' if connections > 1 else ''}"


def rows(connections: Iterable[int]) -> list[Row]:
    """All of them, in the order of the report."""
    return [
        _plain("in", "in batches of 1,000, bodies of 100 B", "msg/s", "in, 100 B", more=True),
        _plain("in", "in batches of 1,000, bodies of 1,000 B", "msg/s", "in, 1000 B", more=True),
        *(_plain("in", one_by_one(some), "msg/s", f"one by one, {some}", more=True) for some in connections),
        _plain("in", _CPU, "s", "cpu, 100 B"),
        _plain("in", "server CPU for a million, bodies of 1,000 B", "s", "cpu, 1000 B"),
        _plain("sleep", "sleepers put", "", "sleepers 0", more=True),
        Row("sleep", "memory for each, beyond the empty server", "B", False, _memory),
        _plain("sleep", "memory of the empty server", "B", "empty"),
        Row("sleep", "disk for each", "B", False, lambda f: f["disk 0"] / f["sleepers 0"]),
        _plain("sleep", "cancel one by id, p50", "ms", "cancel p50 0"),
        _plain("sleep", "cancel one by id, p99", "ms", "cancel p99 0"),
        _plain("sleep", "not found to cancel", "", "not cancelled"),
        _plain("sleep", "restart after kill -9", "s", "restart"),
        Row("sleep", "restart after kill -9, for a million", "s", False, lambda f: f["restart"] / f["stored"] * 1e6),
        Row("sleep", "lost by kill -9", "", False, _gone),
        Row("sleep", "cancelled, and there again after kill -9", "", False, _back),
        _plain("drain", "due at one instant", "", "count", more=True),
        _plain("drain", "fetched and acknowledged", "msg/s", "rate", more=True),
        *(_plain("drain", name, "", key) for name, key in _WRONG.items()),
        Row("drain", ANY_WRONG, "", False, _wrong),
        *(_plain("late", f"{phase}, {share}", "ms", f"{phase} {share}") for phase in ("alone", "beside") for share in SHARES),
        _plain("late", "came in beside", "msg/s", "load", more=True),
        _plain("late", "against the due time asked for, p50", "ms", "alone asked p50"),
        *(_plain("late", name, "", key) for name, key in _WRONG.items()),
        Row("late", ANY_WRONG, "", False, _wrong),
        _grown("sleepers, at the most", "", "sleepers", more=True),
        _grown("rate in, at the most", "msg/s", "rate", more=True),
        _grown("rate in, at the most, against a fresh queue's", "×", "ratio", more=True),
        _grown("memory of the server, at the most", "MB", "ram", by=1e-6),
        Row("grow", "memory for one more sleeper", "B", False, _growth),
        Row("grow", "disk for each, at the most", "B", False, _disk),
        _plain("grow", "restart after kill -9, at the most", "s", "restart"),
        Row("grow", "lost by kill -9, at the most", "", False, _gone),
        _grown("cancel one by id, at the most, p50", "ms", "cancel p50"),
        _grown("cancel one by id, at the most, p99", "ms", "cancel p99"),
    ]


_WRONG = {"lost": "lost", "delivered twice": "twice", "delivered, never put": "strange", "delivered early": "early"}
ANY_WRONG = "lost, twice, never put or early, together"
PARTS = {
    "in": "Messages in, durable as far as each queue's setting goes",
    "sleep": "Asleep",
    "drain": "Drain: due at one instant, fetched 1,000 at a time and acknowledged",
    "late": "Lateness: milliseconds from due to received, at a steady rate",
    "grow": "Growth",
}
Table = dict[str, dict[str, Figure]]  # row, queue


def table(contest: Contest, part: str, connections: Iterable[int]) -> Table:
    """Medians of all rounds, for the queues that were there."""
    found: Table = {}
    for row in rows(connections):
        if row.part == part:
            found[row.name] = {
                name: of_rounds(row.name, values, row.unit)
                for name, rounds in contest.found.get(part, {}).items()
                if (values := _values(row, rounds))
            }
    return found


def _values(row: Row, rounds: Sequence[Figures]) -> list[float]:
    values = [row.value(found) for found in rounds]
    return [value for value in values if value is not None and isfinite(value)]


# Goals


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal: what TurtleMQ did, what the best peers did, and whether that is enough."""

    work: str
    ours: Figure | None
    goal: str
    best: tuple[str, float] | None  # of all peers
    durable: tuple[str, float] | None  # of those that fsync before they answer
    met: bool | None  # None where it could not be measured
    more: bool

    def ratio(self, peer: tuple[str, float] | None) -> float | None:
        """How many times better than a peer; 1 is the same, whether more or less is better."""
        if self.ours is None or peer is None or not self.ours.value or not peer[1]:
            return None
        return self.ours.value / peer[1] if self.more else peer[1] / self.ours.value


@dataclass(frozen=True, slots=True)
class Aim:
    """A goal of the project: a row of one of our queues, against a value, or so many times a peer."""

    part: str
    row: str
    ours: str
    goal: Goal | None = None
    times: float = 0.0
    durable: bool = False  # the peer must fsync

    @property
    def text(self) -> str:
        if self.goal is not None:
            return f"{self.goal.sign} {self.goal.value:g}"
        return f"≥ {self.times:g} × the best {'durable peer' if self.durable else 'peer'}"


_SMALL, _BIG = "in batches of 1,000, bodies of 100 B", "in batches of 1,000, bodies of 1,000 B"
_CPU = "server CPU for a million, bodies of 100 B"
_DRAIN, _ZERO = "fetched and acknowledged", Goal("≤", 0)
_LATE = {"p50": 1.5, "p99": 5.0, "p99.9": 10.0}


def aims(connections: Sequence[int]) -> list[Aim]:
    """Everything that TurtleMQ must reach, in the order of the project's own table."""
    few, many = one_by_one(connections[0]), one_by_one(connections[-1])
    return [
        Aim("in", _SMALL, JSON, times=3, durable=True),
        Aim("in", _SMALL, BSON, times=5, durable=True),
        Aim("in", _BIG, JSON, times=2, durable=True),
        Aim("in", _BIG, BSON, times=4, durable=True),
        Aim("in", _CPU, JSON, Goal("≤", 3)),
        Aim("in", _SMALL, GIVEN[0], times=3, durable=True),
        Aim("in", _SMALL, GIVEN[1], times=5, durable=True),
        Aim("in", _BIG, GIVEN[0], times=2, durable=True),
        Aim("in", _BIG, GIVEN[1], times=4, durable=True),
        Aim("in", _CPU, GIVEN[0], Goal("≤", 3)),
        Aim("in", few, JSON, times=1, durable=True),
        Aim("in", many, JSON, Goal("≥", 6_000)),
        Aim("grow", "memory for one more sleeper", BSON, Goal("≤", 1)),
        Aim("grow", "memory of the server, at the most", BSON, Goal("≤", 200)),
        Aim("grow", "restart after kill -9, at the most", BSON, Goal("≤", 1)),
        Aim("grow", "lost by kill -9, at the most", BSON, _ZERO),
        Aim("drain", _DRAIN, JSON, times=1.5),
        Aim("drain", _DRAIN, BSON, times=3),
        *(Aim("drain", ANY_WRONG, ours, _ZERO) for ours in OURS),
        *(Aim("late", f"{phase}, {share}", JSON, Goal("≤", ms)) for phase in ("alone", "beside") for share, ms in _LATE.items()),
        *(Aim("late", ANY_WRONG, ours, _ZERO) for ours in OURS),
        Aim("grow", "disk for each, at the most", BSON, Goal("≤", 210)),
        Aim("grow", "rate in, at the most, against a fresh queue's", BSON, Goal("≥", 0.9)),
        Aim("grow", "cancel one by id, at the most, p50", BSON, Goal("≤", 1)),
    ]


def verdicts(contest: Contest, connections: Sequence[int]) -> list[Verdict]:
    """Each goal, with the best peers beside it."""
    tables = {part: table(contest, part, connections) for part in PARTS}
    better = {row.name: row.more for row in rows(connections)}
    return [_verdict(contest, aim, tables[aim.part][aim.row], better[aim.row]) for aim in aims(connections)]


def _verdict(contest: Contest, aim: Aim, figures: dict[str, Figure], more: bool) -> Verdict:
    peers = {name: figure.value for name, figure in figures.items() if name not in (*OURS, *GIVEN)}
    synced = {queue.name for queue in contest.queues if queue.durable}
    best = _best(peers.items(), more)
    durable = _best([(name, value) for name, value in peers.items() if name in synced], more)
    ours = figures.get(aim.ours)
    rival = durable if aim.durable else best
    if ours is None or (aim.goal is None and rival is None):
        met = None
    elif aim.goal is not None:
        met = aim.goal.met(ours.value)
    else:
        assert rival is not None
        met = ours.value >= aim.times * rival[1]
    work = f"{_SHORT[aim.part]}{aim.row}, {aim.ours.removeprefix('TurtleMQ, ')}"
    if aim.part == "grow" and aim.ours in contest.found.get("grow", {}):
        most = contest.found["grow"][aim.ours][0]
        work = work.replace("at the most", f"at {most[f'sleepers {last(most)}']:,.0f} sleepers")
    return Verdict(work, ours, aim.text, best, durable, met, more)


_SHORT = {"in": "", "sleep": "", "drain": "drain: ", "late": "late: ", "grow": ""}


def _best(peers: Iterable[tuple[str, float]], more: bool) -> tuple[str, float] | None:
    return (max if more else min)(peers, key=lambda peer: peer[1], default=None)
