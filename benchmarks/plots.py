"""SVG plots of a comparison, readable on light and dark pages: transparent, in middle tones, with text as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ranking
from benchmarks.comparison import Comparison
from benchmarks.model import Figure
from benchmarks.peers.all_queues import OURS, SERVER_IDS
from benchmarks.workloads import EXTENTS, SHARES

FOLDER = Path(__file__).resolve().parent / "plots"
GREY = "#7f8790"
_OURS = ("#2e9e5b", "#57c98a")
_PEERS = ("#d9822b", "#c26a6a", "#5b8dd9", "#9a7fd1", "#4fa3a5", "#b58a2e", "#8c8c8c")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "turtlemq",  # equal figures give equal files
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
Draw = Callable[..., None]  # of axes, and by keyword `comparison` and `size`


def colour(name: str, comparison: Comparison) -> str:
    """The colour of a queue, the same in all plots."""
    if name in OURS:
        return _OURS[OURS.index(name)]
    peers = [queue.name for queue in comparison.queues if queue.name not in (*OURS, *SERVER_IDS)]
    return _PEERS[peers.index(name) % len(_PEERS)]


def draw(comparison: Comparison, size: str, folder: Path = FOLDER) -> dict[str, Path]:
    """Draw all plots. Returns their files by title; nothing if matplotlib is not installed."""
    files = {}
    for title, (file, work) in _PICTURES.items():
        path = save(folder / f"{file}.svg", title, partial(work, comparison=comparison, size=size))
        if path is not None:
            files[title] = path
    return files


def save(path: Path, title: str, paint: Callable[[Any], None]) -> Path | None:
    """Draw one plot: `paint` gets its axes. Returns its file; None if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("svg")
    from matplotlib import pyplot

    path.parent.mkdir(exist_ok=True)
    with mpl.rc_context(rc=_STYLE):
        figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
        paint(axes)
        axes.set_title(title, loc="left", fontsize=10)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    path.write_text(_lean(path.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def _lean(svg: str) -> str:
    """The SVG without metadata and trailing spaces."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r"[ \t]+\n", "\n", svg)


def _figures(comparison: Comparison, part: str, row: str, size: str) -> dict[str, Figure]:
    row_figures = ranking.table(comparison, part, EXTENTS[size].connections)[row]
    return {name: figure for name, figure in row_figures.items() if name not in SERVER_IDS}


def _bars(axes: Any, comparison: Comparison, values: dict[str, float], text: Callable[[str], str]) -> None:
    """A bar for each queue, the longest on top, with its label."""
    names = sorted(values, key=lambda name: values[name])
    bars = axes.barh(names, [values[name] for name in names], color=[colour(name, comparison) for name in names])
    axes.bar_label(bars, map(text, names), padding=4, color=GREY, fontsize=9)
    axes.margins(x=0.2)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _ingest(axes: Any, comparison: Comparison, size: str) -> None:
    values = {
        name: figure.value for name, figure in _figures(comparison, "in", "in batches of 1,000, bodies of 100 B", size).items()
    }
    _bars(axes, comparison, values, lambda name: f"{values[name]:,.0f}")


def _restart(axes: Any, comparison: Comparison, size: str) -> None:
    del size
    first_rounds = {name: rounds[0] for name, rounds in comparison.found.get("grow", {}).items()}
    values = {name: figures["restart"] for name, figures in first_rounds.items()}
    _bars(axes, comparison, values, lambda name: f"{values[name]:.2f} s with {first_rounds[name]['stored']:,.0f}")


def _late(axes: Any, comparison: Comparison, size: str) -> None:
    """A line for each queue: lateness over the share of messages."""
    shares = [f"beside, {share}" for share in SHARES]
    lines = [_figures(comparison, "late", share, size) for share in shares]
    for name in lines[0]:
        values = [max(0.1, line[name].value) for line in lines if name in line]
        axes.plot(list(SHARES)[: len(values)], values, marker="o", label=name, color=colour(name, comparison))
    axes.set_yscale("log")
    _counts(axes.yaxis)
    axes.set_ylabel("ms")
    axes.grid(axis="y", which="major")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _growth_lines(axes: Any, comparison: Comparison, key: Callable[[dict[str, float], int], float]) -> None:
    for name, rounds in comparison.found.get("grow", {}).items():
        counts = range(ranking.last_count(rounds[0]) + 1)
        points = [(rounds[0][f"sleepers {at}"], key(rounds[0], at)) for at in counts]
        axes.plot(*zip(*points, strict=True), marker="o", label=name, color=colour(name, comparison))
    axes.set_xscale("log")
    axes.set_xlabel("sleepers")
    _counts(axes.xaxis)
    axes.grid(axis="y", which="major")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _counts(axis: Any) -> None:
    """Axis labels such as 10 k and 1 M, only at powers of ten."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    axis.set_major_formatter(EngFormatter())
    axis.set_minor_formatter(NullFormatter())


def _memory(axes: Any, comparison: Comparison, size: str) -> None:
    del size
    _growth_lines(
        axes, comparison, lambda figures, at: max(0.1, (figures[f"ram {at}"] - figures["empty"]) / figures[f"sleepers {at}"])
    )
    axes.set_yscale("log")
    _counts(axes.yaxis)
    axes.set_ylabel("B for each sleeper")


def _rate(axes: Any, comparison: Comparison, size: str) -> None:
    del size
    _growth_lines(axes, comparison, lambda figures, at: figures[f"rate {at}"])
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
