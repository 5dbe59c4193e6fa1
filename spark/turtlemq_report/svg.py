"""Charts as SVG text: stacked columns and lines over time, stacked bars.

Colours are CSS classes, so the page decides on light or dark. The `<title>` of a mark is its tooltip in browsers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 600, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 10, 24
_ROW = 36  # height of a bar with its name
_NAME_CHARS = 52  # of a bar's name
SERIES_MAX = 6  # number of colours; further series are summed into one


@dataclass(frozen=True, slots=True)
class Series:
    """A name, its values (None: no value), and the number of its colour."""

    name: str
    values: Sequence[float | None]
    colour: int = 0


Text = Callable[[float], str]


def short(number: float) -> str:
    """
    >>> [short(n) for n in (0, 7, 0.25, 1234, 56_000, 7_800_000)]
    ['0', '7', '0.25', '1.2k', '56k', '7.8M']
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.1f}".removesuffix(".0") + unit
    return f"{number:.2f}".rstrip("0").rstrip(".") if number % 1 else f"{number:.0f}"


def steps(top: float, count: int = 4) -> list[float]:
    """Round numbers for an axis, from 0 to at least `top`.

    >>> steps(7), steps(930), steps(0), steps(1)
    ([0.0, 2.0, 4.0, 6.0, 8.0], [0.0, 250.0, 500.0, 750.0, 1000.0], [0.0, 1.0], [0.0, 1.0])
    """
    if top <= 1:
        return [0.0, 1.0]
    rough = top / count
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * by for by in (1, 2, 2.5, 5, 10) if size * by >= rough)
    step = max(float(step), 1.0)
    return [i * step for i in range(math.ceil(top / step) + 1)]


def _frame(body: str, label: str, height: int = HEIGHT) -> str:
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _grid(marks: Sequence[tuple[float, str]]) -> str:
    """Horizontal lines with their labels, at the given heights."""
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
        for y, text in marks
    )


def _times(labels: Sequence[str], shown: int = 11) -> str:
    """Labels below the columns; only as many as fit."""
    room = WIDTH - _LEFT - _RIGHT
    longest = max(map(len, labels), default=0)
    each = max(1, math.ceil(len(labels) / max(2, min(shown, room // (longest * 7 + 12)))))
    texts = []
    for i in range(each // 2, len(labels), each):
        x = _LEFT + room * (i + 0.5) / len(labels)
        texts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(labels[i])}</text>')
    return "".join(texts)


def columns(series: Sequence[Series], labels: Sequence[str], label: str, text: Text = short) -> str:
    """Stacked columns, one for each label."""
    heights = [sum(s.values[i] or 0 for s in series) for i in range(len(labels))]
    marks = steps(max(heights, default=0))
    room, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    each = room / max(len(labels), 1)
    wide = max(each - (1.5 if each > 4 else 0.4), 0.8)
    out = [_grid([(_TOP + high * (1 - mark / marks[-1]), text(mark)) for mark in marks])]
    for i, name in enumerate(labels):
        x, below = _LEFT + each * i + (each - wide) / 2, 0.0
        parts = [(s.colour, s.name, s.values[i] or 0) for s in series if s.values[i]]
        tooltip = "\n".join([name, *(f"{part}: {text(value)}" for _, part, value in parts)])
        rects = ""
        for n, _, value in parts:
            tall = high * value / marks[-1]
            rects += (
                f'<rect class="s{n}" x="{x:.1f}" y="{_TOP + high - below - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
            )
            below += tall
        if parts:
            back = f'<rect class="back" x="{_LEFT + each * i:.1f}" y="{_TOP}" width="{each:.1f}" height="{high}"/>'
            out.append(f'<g class="mark"><title>{escape(tooltip)}</title>{back}{rects}</g>')
    return _frame("".join([*out, _times(labels)]), label)


_SPANS_MS = (0, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 36_000_000, 86_400_000, 864_000_000, 8_640_000_000)


def lines(series: Sequence[Series], labels: Sequence[str], label: str, text: Text = short) -> str:
    """Time spans as lines on a logarithmic scale, from a millisecond to days."""
    known = [value for s in series for value in s.values if value is not None]
    top = next((i for i, mark in enumerate(_SPANS_MS) if i and mark >= max(known, default=0)), len(_SPANS_MS) - 1)
    room, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    each = room / max(len(labels), 1)

    def y(value: float) -> float:
        return _TOP + high * (1 - math.log10(value / 5 + 1) / math.log10(_SPANS_MS[top] / 5 + 1))

    out = [_grid([(y(mark), text(mark)) for mark in _SPANS_MS[: top + 1]])]
    for s in series:
        points = [(_LEFT + each * (i + 0.5), y(value)) for i, value in enumerate(s.values) if value is not None]
        out.append(f'<polyline class="l{s.colour}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>')
        if len(points) <= 40:
            out += [f'<circle class="s{s.colour}" cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in points]
    for i, name in enumerate(labels):
        parts = [f"{s.name}: {text(value)}" for s in series if (value := s.values[i]) is not None]
        if parts:
            tooltip = "\n".join([name, *parts])
            back = f'<rect class="back" x="{_LEFT + each * i:.1f}" y="{_TOP}" width="{each:.1f}" height="{high}"/>'
            out.append(f'<g class="mark"><title>{escape(tooltip)}</title>{back}</g>')
    return _frame("".join([*out, _times(labels)]), label)


def bars(
    rows: Sequence[tuple[str, Sequence[float], str]], names: Sequence[tuple[str, int]], label: str, text: Text = short
) -> str:
    """A stacked bar for each row, with a name and a note above it. `names`: those of the parts, with colours."""
    top = max((sum(values) for _, values, _ in rows), default=0) or 1
    out = []
    for i, (name, values, note) in enumerate(rows):
        y, x = i * _ROW, 0.0
        tooltip = "\n".join([name, *(f"{part}: {text(value)}" for (part, _), value in zip(names, values, strict=True) if value)])
        cut = name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…"
        rects = ""
        for (_, colour), value in zip(names, values, strict=True):
            wide = WIDTH * value / top
            rects += f'<rect class="s{colour}" x="{x:.1f}" y="{y + 19}" width="{wide:.1f}" height="9"/>' if value else ""
            x += wide
        out.append(
            f'<g class="mark"><title>{escape(tooltip)}</title>'
            f'<rect class="back" x="0" y="{y}" width="{WIDTH}" height="{_ROW - 4}"/>'
            f'<text class="name" x="0" y="{y + 13}">{escape(cut)}</text>'
            f'<text x="{WIDTH}" y="{y + 13}" text-anchor="end">{escape(note)}</text>'
            f'<rect class="rail" x="0" y="{y + 19}" width="{WIDTH}" height="9"/>{rects}</g>'
        )
    return _frame("".join(out), label, len(rows) * _ROW + 2)


def legend(names: Sequence[tuple[str, int]]) -> str:
    """The legend of a chart: names with their colours."""
    keys = "".join(f'<li><i class="b{colour}"></i>{escape(name)}</li>' for name, colour in names)
    return f'<ul class="legend">{keys}</ul>'
