"""Prometheus' text format, version 0.0.4: families of samples as lines. Pure.

>>> print("\\n".join(family("up", "gauge", "1 while it serves.", [({}, 1)])))
# HELP up 1 while it serves.
# TYPE up gauge
up 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from turtlemq.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
