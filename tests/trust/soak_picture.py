"""A soak as a picture: memory, disk, lateness and rates over time, as an SVG that is readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, LEFT, RIGHT, TOP, HEIGHT, GAP = 880, 70, 20, 66, 110, 48
Samples = Sequence[dict[str, Any]]
Across = Callable[[float], float]  # where a time is, from left to right
STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; color: #1f2328; }
text { fill: currentColor; } .small { font-size: 11px; opacity: .75; } .title { font-size: 14px; font-weight: 600; }
line, path { fill: none; stroke: currentColor; } .grid { opacity: .15; } .restart { opacity: .35; stroke-dasharray: 2 3; }
.a { stroke: #0969da; } .b { stroke: #bc4c00; } .c { stroke: #8250df; } path { stroke-width: 1.4; }
text.a { fill: #0969da; stroke: none; } text.b { fill: #bc4c00; stroke: none; } text.c { fill: #8250df; stroke: none; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; color: #e6edf3; } .a { stroke: #58a6ff; } .b { stroke: #f0883e; } .c { stroke: #bc8cff; }
  text.a { fill: #58a6ff; } text.b { fill: #f0883e; } text.c { fill: #bc8cff; }
}
"""


@dataclass(frozen=True)
class Panel:
    """One curve or a few, with a common scale."""

    title: str
    lines: dict[str, str]  # field of a sample → its title
    log: bool = False


PANELS = (
    Panel("memory of the server, MB", {"memory_mb": "anonymous memory"}),
    Panel("disk, MB", {"disk_mb": "all files", "live_mb": "messages not settled yet"}),
    Panel("lateness at the consumer, ms", {"p50_ms": "p50", "p99_ms": "p99", "max_ms": "max"}, log=True),
    Panel("messages a second", {"in_per_s": "put", "out_per_s": "delivered, all groups"}),
)


def nice(top: float) -> float:
    """The next round number.

    >>> nice(0.7), nice(130), nice(2100)
    (1.0, 200.0, 2500.0)
    """
    unit = math.pow(10, math.floor(math.log10(max(top, 1e-9))))
    return next(step * unit for step in (1, 2, 2.5, 5, 10) if step * unit >= top)


def _height(panel: Panel, value: float, top: float) -> float:
    """Of a value, as a part of the panel."""
    return math.log10(max(value, 1)) / math.log10(max(top, 10)) if panel.log else value / top


def _curve(panel: Panel, name: str, samples: Samples, x: Across, floor: float, top: float) -> str:
    """The path of one field; where there is no value the pen is lifted."""
    out, pen = [], "M"
    for sample in samples:
        if sample[name] is None:
            pen = "M"
            continue
        out.append(f"{pen}{x(sample['s']):.1f},{floor - HEIGHT * _height(panel, sample[name], top):.1f}")
        pen = "L"
    return "".join(out)


def _panel(panel: Panel, number: int, samples: Samples, x: Across) -> list[str]:
    floor = TOP + number * (HEIGHT + GAP) + HEIGHT + 20
    values = [sample[name] for sample in samples for name in panel.lines if sample[name] is not None]
    top = nice(max([*values, 1]))
    ticks = [10**power for power in range(1 + math.ceil(math.log10(max(top, 10))))] if panel.log else [0, top / 2, top]
    top = max(ticks)
    out = [f'<text x="{LEFT}" y="{floor - HEIGHT - 8}">{panel.title}</text>']
    for tick in ticks:
        y = floor - HEIGHT * _height(panel, tick, top)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    for at, (name, label) in enumerate(panel.lines.items()):
        letter, place = "abc"[at], WIDTH - RIGHT - 190 * (len(panel.lines) - 1 - at)
        out.append(f'<path class="{letter}" d="{_curve(panel, name, samples, x, floor, top)}"/>')
        out.append(f'<text class="{letter}" x="{place}" y="{floor - HEIGHT - 8}" text-anchor="end">{label}</text>')
    return out


def draw(samples: Samples, restarts: Sequence[float], told: Sequence[str]) -> str:
    """The whole picture. `restarts`: when, in seconds; `told`: lines to stand above it."""
    end = max(float(samples[-1]["s"]), 1.0)
    height = TOP + len(PANELS) * (HEIGHT + GAP) + 30

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / end

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"><style>{STYLE}</style>']
    out.append(f'<text class="title" x="{LEFT}" y="20">A soak of {end / 60:,.1f} minutes; dotted lines are restarts</text>')
    out += [f'<text class="small" x="{LEFT}" y="{38 + 16 * at}">{line}</text>' for at, line in enumerate(told)]
    bottom = TOP + len(PANELS) * (HEIGHT + GAP) - GAP + 20
    out += [f'<line class="restart" x1="{x(s):.1f}" x2="{x(s):.1f}" y1="{TOP}" y2="{bottom}"/>' for s in restarts]
    for number, panel in enumerate(PANELS):
        out += _panel(panel, number, samples, x)
    for part in range(5):
        at = end * part / 4
        out.append(f'<text class="small" x="{x(at):.1f}" y="{bottom + 18}" text-anchor="middle">{at / 60:,.3g} min</text>')
    return "\n".join([*out, "</svg>", ""])
