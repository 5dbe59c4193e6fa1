"""Prometheus' text format, version 0.0.4, and OpenMetrics: families of samples as lines. Pure.

>>> print("\\n".join(family("up", "gauge", "1 while it serves.", [({}, 1)])))
# HELP up 1 while it serves.
# TYPE up gauge
up 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from turtlemq.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
Labels = Mapping[str, str]


def family(name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float | None]]) -> Iterator[str]:
    """A gauge or a counter with its samples. A sample of None is left out."""
    yield from _head(name, kind, text)
    for labels, value in samples:
        if value is not None:
            yield f"{name}{_braces(labels)} {_number(value)}"


def histogram(name: str, text: str, samples: Iterable[tuple[Labels, Histogram]], unit: float = 1) -> Iterator[str]:
    """A histogram; bounds and sums are multiplied by `unit`.

    >>> h = Histogram((5, 50)); h.add(7)
    >>> list(histogram("t_seconds", "Time.", [({"topic": "a"}, h)], 0.001))[2:4]
    ['t_seconds_bucket{topic="a",le="0.005"} 0', 't_seconds_bucket{topic="a",le="0.05"} 1']
    """
    yield from _head(name, "histogram", text)
    for labels, counted in samples:
        inner = _inner(labels)
        comma = "," if inner else ""
        seen = 0
        for bound, count in zip(counted.bounds, counted.counts, strict=False):
            seen += count
            yield f'{name}_bucket{{{inner}{comma}le="{_number(round(bound * unit, 9))}"}} {seen}'
        seen += counted.counts[-1]
        yield f'{name}_bucket{{{inner}{comma}le="+Inf"}} {seen}'
        yield f"{name}_sum{_braces(labels)} {_number(round(counted.total * unit, 9))}"
        yield f"{name}_count{_braces(labels)} {seen}"


def exemplar(name: str, labels: Labels, bound: float, trace_id: str, value: float, at_s: float) -> tuple[str, str]:
    """The bucket of a histogram (`bound`: its upper one), and the exemplar behind its count.

    >>> exemplar("t_seconds", {"route": "/"}, 0.5, "4bf9", 0.25, 1.5)
    ('t_seconds_bucket{route="/",le="0.5"}', '# {trace_id="4bf9"} 0.25 1.5')
    """
    le = "+Inf" if bound == math.inf else _number(round(bound, 9))
    return f"{name}_bucket{_braces({**labels, 'le': le})}", f'# {{trace_id="{trace_id}"}} {_number(value)} {_number(at_s)}'


def open_metrics(lines: Iterable[str], exemplars: Mapping[str, str]) -> Iterator[str]:
    """Lines of the text format as OpenMetrics: a family of counters has a name without `_total`, buckets have exemplars.

    >>> list(open_metrics(["# TYPE a_total counter", "a_total 1"], {}))
    ['# TYPE a counter', 'a_total 1']
    """
    for line in lines:
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            yield f"# {word} {name.removesuffix('_total')} {rest}"
        elif exemplars and (given := exemplars.get(line.rpartition(" ")[0])) is not None:
            yield f"{line} {given}"
        else:
            yield line


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _inner(labels: Labels) -> str:
    return ",".join([f'{name}="{_escaped(value)}"' for name, value in labels.items()])


def _braces(labels: Labels) -> str:
    return f"{{{_inner(labels)}}}" if labels else ""


def _escaped(text: str) -> str:
    r"""The value of a label, escaped.

    >>> _escaped('a"b')
    'a\\"b'
    """
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return text


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) or value % 1 else str(int(value))
