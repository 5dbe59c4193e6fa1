"""Evaluation of a comparison: rows with medians of the rounds, ratios against the best peers, goals of TurtleMQ. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from benchmarks.comparison import Comparison
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.peers.all_queues import OURS, SERVER_IDS
from benchmarks.workloads import SHARES, Figures

JSON, BSON = OURS


@dataclass(frozen=True, slots=True)
class Row:
    """One figure that all queues are measured by."""

    part: str
    name: str
    unit: str
    more: bool  # more is better
    value: Callable[[Figures], float | None]


def _row(part: str, name: str, unit: str, key: str, *, more: bool = False) -> Row:
    return Row(part, name, unit, more, lambda figures: figures.get(key))


def _last_count_row(name: str, unit: str, key: str, *, more: bool = False, by: float = 1.0) -> Row:
    return Row("grow", name, unit, more, lambda figures: by * figures[f"{key} {last_count(figures)}"])


def last_count(figures: Figures) -> int:
    """The number of the last count of sleepers that a queue reached."""
    return max(int(key.split()[-1]) for key in figures if key.startswith("sleepers "))


def _growth(figures: Figures) -> float:
    """Memory for one more sleeper, between the last two counts, or from the empty queue if it reached one count only."""
    end = last_count(figures)
    begin = (figures[f"sleepers {end - 1}"], figures[f"ram {end - 1}"]) if end else (0, figures["empty"])
    return (figures[f"ram {end}"] - begin[1]) / (figures[f"sleepers {end}"] - begin[0])


def _memory(figures: Figures) -> float:
    return (figures["ram 0"] - figures["empty"]) / figures["sleepers 0"]


def _disk(figures: Figures) -> float:
    return figures[f"disk {last_count(figures)}"] / figures[f"sleepers {last_count(figures)}"]


def _lost(figures: Figures) -> float:
    return max(0.0, figures["stored"] - figures["cancelled"] - figures["left"])


def _uncancelled(figures: Figures) -> float:
    return max(0.0, figures["left"] + figures["cancelled"] - figures["stored"])


def _faults(figures: Figures) -> float:
    return sum(figures[key] for key in _FAULTS.values())


def one_by_one(connections: int) -> str:
    return f"one by one, {connections} connection{'s' if connections > 1 else ''}"


def rows(connections: Iterable[int]) -> list[Row]:
    """All rows, in the order of the report."""
    return [
        _row("in", "in batches of 1,000, bodies of 100 B", "msg/s", "in, 100 B", more=True),
        _row("in", "in batches of 1,000, bodies of 1,000 B", "msg/s", "in, 1000 B", more=True),
        *(_row("in", one_by_one(some), "msg/s", f"one by one, {some}", more=True) for some in connections),
        _row("in", _CPU, "s", "cpu, 100 B"),
        _row("in", "server CPU for a million, bodies of 1,000 B", "s", "cpu, 1000 B"),
        _row("sleep", "sleepers put", "", "sleepers 0", more=True),
        Row("sleep", "memory for each, beyond the empty server", "B", False, _memory),
        _row("sleep", "memory of the empty server", "B", "empty"),
        Row("sleep", "disk for each", "B", False, lambda f: f["disk 0"] / f["sleepers 0"]),
        _row("sleep", "cancel one by id, p50", "ms", "cancel p50 0"),
        _row("sleep", "cancel one by id, p99", "ms", "cancel p99 0"),
        _row("sleep", "not found to cancel", "", "not cancelled"),
        _row("sleep", "restart after kill -9", "s", "restart"),
        Row("sleep", "restart after kill -9, for a million", "s", False, lambda f: f["restart"] / f["stored"] * 1e6),
        Row("sleep", "lost by kill -9", "", False, _lost),
        Row("sleep", "cancelled, and there again after kill -9", "", False, _uncancelled),
        _row("drain", "due at one instant", "", "count", more=True),
        _row("drain", "fetched and acknowledged", "msg/s", "rate", more=True),
        *(_row("drain", name, "", key) for name, key in _FAULTS.items()),
        Row("drain", ANY_FAULT, "", False, _faults),
        *(_row("late", f"{phase}, {share}", "ms", f"{phase} {share}") for phase in ("alone", "beside") for share in SHARES),
        _row("late", "came in beside", "msg/s", "load", more=True),
        _row("late", "against the due time asked for, p50", "ms", "alone asked p50"),
        *(_row("late", name, "", key) for name, key in _FAULTS.items()),
        Row("late", ANY_FAULT, "", False, _faults),
        _last_count_row("sleepers, at the most", "", "sleepers", more=True),
        _last_count_row("rate in, at the most", "msg/s", "rate", more=True),
        _last_count_row("rate in, at the most, against a fresh queue's", "×", "ratio", more=True),
        _last_count_row("memory of the server, at the most", "MB", "ram", by=1e-6),
        Row("grow", "memory for one more sleeper", "B", False, _growth),
        Row("grow", "disk for each, at the most", "B", False, _disk),
        _row("grow", "restart after kill -9, at the most", "s", "restart"),
        Row("grow", "lost by kill -9, at the most", "", False, _lost),
        _last_count_row("cancel one by id, at the most, p50", "ms", "cancel p50"),
        _last_count_row("cancel one by id, at the most, p99", "ms", "cancel p99"),
    ]


_FAULTS = {"lost": "lost", "delivered twice": "twice", "delivered, never put": "strange", "delivered early": "early"}
ANY_FAULT = "lost, twice, never put or early, together"
PARTS = {
    "in": "Messages in, durable as far as each queue's setting goes",
    "sleep": "Asleep",
    "drain": "Drain: due at one instant, fetched 1,000 at a time and acknowledged",
    "late": "Lateness: milliseconds from due to received, at a steady rate",
    "grow": "Growth",
}
Table = dict[str, dict[str, Figure]]  # row, queue


def table(comparison: Comparison, part: str, connections: Iterable[int]) -> Table:
    """The rows of a part: medians of all rounds, by queue."""
    by_row: Table = {}
    for row in rows(connections):
        if row.part == part:
            by_row[row.name] = {
                name: of_rounds(row.name, values, row.unit)
                for name, rounds in comparison.found.get(part, {}).items()
                if (values := _values(row, rounds))
            }
    return by_row


def _values(row: Row, rounds: Sequence[Figures]) -> list[float]:
    values = [row.value(figures) for figures in rounds]
    return [value for value in values if value is not None and isfinite(value)]


# Goals


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal: the figures of TurtleMQ and of the best peers, and whether the goal is met."""

    work: str
    ours: Figure | None
    goal: str
    best: tuple[str, float] | None  # of all peers
    durable: tuple[str, float] | None  # of those that fsync before they answer
    met: bool | None  # None if it could not be measured
    more: bool

    def ratio(self, peer: tuple[str, float] | None) -> float | None:
        """How many times better than a peer: 1 is equal, whether more or less is better."""
        if self.ours is None or peer is None or not self.ours.value or not peer[1]:
            return None
        return self.ours.value / peer[1] if self.more else peer[1] / self.ours.value


@dataclass(frozen=True, slots=True)
class Aim:
    """A goal of the project: a row of one of our queues must reach a value, or so many times a peer."""

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
_LATE = {"alone": {"p50": 1.0, "p99": 4.0, "p99.9": 8.0}, "beside": {"p50": 1.2, "p99": 6.0, "p99.9": 12.0}}


def aims(connections: Sequence[int]) -> list[Aim]:
    """All goals of TurtleMQ, in the order of the project's table."""
    few, many = one_by_one(connections[0]), one_by_one(connections[-1])
    late = [(f"{phase}, {share}", ms) for phase, shares in _LATE.items() for share, ms in shares.items()]
    return [
        Aim("in", _SMALL, SERVER_IDS[0], times=3, durable=True),
        Aim("in", _SMALL, JSON, times=2, durable=True),
        Aim("in", _SMALL, SERVER_IDS[1], times=4, durable=True),
        Aim("in", _SMALL, BSON, times=2.5, durable=True),
        Aim("in", _BIG, SERVER_IDS[0], times=2, durable=True),
        Aim("in", _BIG, SERVER_IDS[1], times=3, durable=True),
        Aim("in", _CPU, SERVER_IDS[0], Goal("≤", 1.8)),
        Aim("in", _CPU, JSON, Goal("≤", 2.5)),
        Aim("in", few, JSON, times=1, durable=True),
        Aim("in", many, JSON, Goal("≥", 12_000)),
        Aim("in", many, JSON, times=0.6, durable=True),
        Aim("grow", "memory for one more sleeper", BSON, Goal("≤", 1)),
        Aim("grow", "memory of the server, at the most", BSON, Goal("≤", 160)),
        Aim("grow", "restart after kill -9, at the most", BSON, Goal("≤", 0.7)),
        Aim("grow", "lost by kill -9, at the most", BSON, _ZERO),
        Aim("drain", _DRAIN, JSON, times=2),
        Aim("drain", _DRAIN, BSON, times=3),
        *(Aim("drain", ANY_FAULT, ours, _ZERO) for ours in OURS),
        *(Aim("late", row, JSON, Goal("≤", ms)) for row, ms in late),
        *(Aim("late", ANY_FAULT, ours, _ZERO) for ours in OURS),
        Aim("grow", "disk for each, at the most", BSON, Goal("≤", 200)),
        Aim("grow", "rate in, at the most, against a fresh queue's", BSON, Goal("≥", 0.9)),
        Aim("grow", "cancel one by id, at the most, p50", BSON, Goal("≤", 0.6)),
    ]


def verdicts(comparison: Comparison, connections: Sequence[int]) -> list[Verdict]:
    """The verdicts of all goals, with the best peers."""
    tables = {part: table(comparison, part, connections) for part in PARTS}
    better = {row.name: row.more for row in rows(connections)}
    return [_verdict(comparison, aim, tables[aim.part][aim.row], better[aim.row]) for aim in aims(connections)]


def _verdict(comparison: Comparison, aim: Aim, figures: dict[str, Figure], more: bool) -> Verdict:
    peers = {name: figure.value for name, figure in figures.items() if name not in (*OURS, *SERVER_IDS)}
    synced = {queue.name for queue in comparison.queues if queue.durable}
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
    if aim.part == "grow" and aim.ours in comparison.found.get("grow", {}):
        most = comparison.found["grow"][aim.ours][0]
        work = work.replace("at the most", f"at {most[f'sleepers {last_count(most)}']:,.0f} sleepers")
    return Verdict(work, ours, aim.text, best, durable, met, more)


_SHORT = {"in": "", "sleep": "", "drain": "drain: ", "late": "late: ", "grow": ""}


def _best(peers: Iterable[tuple[str, float]], more: bool) -> tuple[str, float] | None:
    return (max if more else min)(peers, key=lambda peer: peer[1], default=None)
