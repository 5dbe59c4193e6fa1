"""Pictures of a contest as SVG, readable on light and on dark pages: nothing behind them, middle tones, text as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ranking
from benchmarks.contest import Contest
from benchmarks.model import Figure
from benchmarks.peers.every import GIVEN, OURS
from benchmarks.works import EXTENTS, SHARES

FOLDER = Path(__file__).resolve().parent / "plots"
_GREY = "#7f8790"
_OURS = ("#2e9e5b", "#57c98a")
_PEERS = ("#d9822b", "#c26a6a", "#5b8dd9", "#9a7fd1", "#4fa3a5", "#b58a2e", "#8c8c8c")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "turtlemq",  # the same figures make the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _GREY,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _GREY,
    "axes.titlecolor": _GREY,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
Draw = Callable[[Any, Contest, str], None]


def colour(name: str, contest: Contest) -> str:
    """One for each queue, the same in all pictures."""
    if name in OURS:
        return _OURS[OURS.index(name)]
    peers = [queue.name for queue in contest.queues if queue.name not in (*OURS, *GIVEN)]
    return _PEERS[peers.index(name) % len(_PEERS)]


def draw(contest: Contest, size: str, folder: Path = FOLDER) -> dict[str, Path]:
    """All pictures that there are figures for, by title. Nothing where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return {}
    mpl.use("svg")
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    found = {}
    for title, (file, work) in _PICTURES.items():
        with mpl.rc_context(rc=_STYLE):
            figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
            work(axes, contest, size)
            axes.set_title(title, loc="left", fontsize=10)
            path = folder / f"{file}.svg"
            figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
            pyplot.close(figure)
        path.write_text(_lean(path.read_text(encoding="utf-8")), encoding="utf-8")
        found[title] = path
    return found


def _lean(svg: str) -> str:
    """Without what no reader needs, and without spaces at the ends of lines."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r"[ \t]+\n", "\n", svg)


def _figures(contest: Contest, part: str, row: str, size: str) -> dict[str, Figure]:
    found = ranking.table(contest, part, EXTENTS[size].connections)[row]
    return {name: figure for name, figure in found.items() if name not in GIVEN}


def _bars(axes: Any, contest: Contest, values: dict[str, float], text: Callable[[str], str]) -> None:
    """A bar for each queue, the longest on top, with what is to be said of it."""
    names = sorted(values, key=lambda name: values[name])
    bars = axes.barh(names, [values[name] for name in names], color=[colour(name, contest) for name in names])
    axes.bar_label(bars, map(text, names), padding=4, color=_GREY, fontsize=9)
    axes.margins(x=0.2)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _ingest(axes: Any, contest: Contest, size: str) -> None:
    values = {
        name: figure.value for name, figure in _figures(contest, "in", "in batches of 1,000, bodies of 100 B", size).items()
    }
    _bars(axes, contest, values, lambda name: f"{values[name]:,.0f}")


def _restart(axes: Any, contest: Contest, size: str) -> None:
    del size
    found = {name: rounds[0] for name, rounds in contest.found.get("grow", {}).items()}
    values = {name: figures["restart"] for name, figures in found.items()}
    _bars(axes, contest, values, lambda name: f"{values[name]:.2f} s with {found[name]['stored']:,.0f}")


def _late(axes: Any, contest: Contest, size: str) -> None:
    """A line for each queue: the larger the share of messages, the later."""
    shares = [f"beside, {share}" for share in SHARES]
    lines = [_figures(contest, "late", share, size) for share in shares]
    for name in lines[0]:
        values = [max(0.1, line[name].value) for line in lines if name in line]
        axes.plot(list(SHARES)[: len(values)], values, marker="o", label=name, color=colour(name, contest))
    axes.set_yscale("log")
    _counts(axes.yaxis)
    axes.set_ylabel("ms")
    axes.grid(axis="y", which="major")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _grown(axes: Any, contest: Contest, key: Callable[[dict[str, float], int], float]) -> None:
    for name, rounds in contest.found.get("grow", {}).items():
        counts = range(ranking.last(rounds[0]) + 1)
        points = [(rounds[0][f"sleepers {at}"], key(rounds[0], at)) for at in counts]
        axes.plot(*zip(*points, strict=True), marker="o", label=name, color=colour(name, contest))
    axes.set_xscale("log")
    axes.set_xlabel("sleepers")
    _counts(axes.xaxis)
    axes.grid(axis="y", which="major")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _counts(axis: Any) -> None:
    """Big numbers as 10 k, 1 M; no numbers between the powers of ten."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    axis.set_major_formatter(EngFormatter())
    axis.set_minor_formatter(NullFormatter())


def _memory(axes: Any, contest: Contest, size: str) -> None:
    del size
    _grown(axes, contest, lambda found, at: max(0.1, (found[f"ram {at}"] - found["empty"]) / found[f"sleepers {at}"]))
    axes.set_yscale("log")
    _counts(axes.yaxis)
    axes.set_ylabel("B for each sleeper")


def _rate(axes: Any, contest: Contest, size: str) -> None:
    del size
    _grown(axes, contest, lambda found, at: found[f"rate {at}"])
    _counts(axes.yaxis)
    axes.set_ylabel("msg/s")
    axes.set_ylim(bottom=0)


_PICTURES: dict[str, tuple[str, Draw]] = {
    "Messages a second in, batches of 1,000 with bodies of 100 B (more is better)": ("ingest", _ingest),
    "Lateness beside an ingest, milliseconds (less is better)": ("lateness", _late),
    "Memory for each sleeping message, beyond the empty server (less is better)": ("memory", _memory),
    "Messages a second in, as sleepers gather (flat is good)": ("growth", _rate),
    "Restart after kill -9, seconds with so many sleepers (less is better)": ("restart", _restart),
}
