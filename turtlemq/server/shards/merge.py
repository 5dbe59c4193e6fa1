"""One answer out of those of all shards. Pure.

Counts are summed, times and quantiles are those of the worst shard, rows are put together in the order of a single server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from turtlemq.histogram import LATENESS_MS, Histogram
from turtlemq.server.shards.unite import json_of, united

Row = dict[str, Any]
LEFT_OUT = "down"  # state of a shard that does not answer
ROW_MS = 60_000  # of a row of the history


class _Topic(Struct):
    topic: str


class _Topics(Struct):
    topics: list[Raw]


def topics(parts: Sequence[bytes]) -> bytes:
    """Listings of topics: ordered by name, each as its shard wrote it. The rows of one topic's partitions become one."""
    rows: dict[str, list[bytes]] = {}
    for part in parts:
        for row in msgspec.json.decode(part, type=_Topics).topics:
            rows.setdefault(msgspec.json.decode(row, type=_Topic).topic, []).append(bytes(row))
    return b'{"topics":[' + b",".join(same[0] if len(same) == 1 else json_of(same) for _, same in sorted(rows.items())) + b"]}"


def found(parts: Sequence[bytes]) -> bytes:
    """Messages with an id, ordered by topic.

    >>> found([b'{"found":[{"topic":"b"}]}', b'{"found":[{"topic":"a"}]}'])
    b'{"found":[{"topic":"a"},{"topic":"b"}]}'
    """
    rows = [row for part in parts for row in msgspec.json.decode(part)["found"]]
    return msgspec.json.encode({"found": sorted(rows, key=lambda row: str(row["topic"]))})


def events(parts: Sequence[bytes], limit: int) -> bytes:
    """Events of audit logs: the newest, the newest last. Those of one request to all partitions of a topic become one."""
    rows: dict[tuple[object, ...], Row] = {}
    for part in parts:
        met = Counter[tuple[object, ...]]()
        for row in msgspec.json.decode(part)["events"]:
            key = (row["request_id"], row["action"], row["topic"], row.get("target", ""))
            same = rows.setdefault((*key, met[key]), row)
            met[key] += 1
            if same is not row:
                same["count"] += row["count"]
    return msgspec.json.encode({"events": sorted(rows.values(), key=lambda row: int(row["at_ms"]))[-limit:]})


_LIMITS = ("name", "topics", "weight", "produce_per_s", "bytes_per_s", "max_in_flight", "max_bytes")  # of a tenant


def tenants(parts: Sequence[bytes]) -> bytes:
    """Tenants: the limits of each process, and the sums of figures.

    >>> tenants([b'{"tenants":[{"name":"a","held_bytes":1,"refused":{"held":1}}]}'] * 2)
    b'{"tenants":[{"name":"a","held_bytes":2,"refused":{"held":2}}]}'
    """
    out: list[Row] = []
    for rows in zip(*(msgspec.json.decode(part)["tenants"] for part in parts), strict=True):
        sums: Row = {name: value for name, value in rows[0].items() if name in _LIMITS}
        for name in rows[0].keys() - {*_LIMITS, "refused"}:
            sums[name] = sum(row[name] for row in rows)
        refused: dict[str, int] = {}
        for row in rows:
            for limit, count in row["refused"].items():
                refused[limit] = refused.get(limit, 0) + count
        out.append({name: sums[name] for name in rows[0] if name in sums} | {"refused": refused})
    return msgspec.json.encode({"tenants": out})


def ready(parts: Sequence[bytes]) -> bytes:
    """Answers of shards that are ready, all of them."""
    rows: list[Row] = [msgspec.json.decode(part) for part in parts]
    sums = {name: sum(row[name] for row in rows) for name in ("topics", "damaged", "stopped", "trouble")}
    return msgspec.json.encode(
        {"status": "ready", "was_clean": all(row["was_clean"] for row in rows), **sums, "shards": len(rows)}
    )


def pins(parts: Sequence[bytes]) -> bytes:
    """Pins for a backup: the folder of each shard's pins, by number."""
    rows: list[Row] = [msgspec.json.decode(part) for part in parts]
    sums = {name: sum(row[name] for row in rows) for name in ("files", "bytes")}
    return msgspec.json.encode({"name": rows[0]["name"], "folder": rows[0]["folder"], **sums, "shards": rows})


# The state of the server

_SUMS = ("topics_total", "long_polls", "requests_in_flight", "requests", "memory_bytes", "bytes")
_WORST = ("now_ms", "commit_p50_ms", "commit_p99_ms", "loop_lag_p99_ms", "disk_bytes", "memory_total_bytes")
_LEAST = ("uptime_s", "disk_free_bytes", "memory_free_bytes")
_COUNTS = ("rejected", "states", "totals")


def status(parts: Sequence[bytes | None], limit: int, damage_max: int) -> bytes:
    """The state of all shards that answer, at least one. `limit`: of topics; the busiest come first."""
    rows: list[Row] = [msgspec.json.decode(part) for part in parts if part is not None]
    out = dict(rows[0])
    for names, chosen in ((_SUMS, sum), (_WORST, max), (_LEAST, min)):
        out |= {name: _of(chosen, [row[name] for row in rows]) for name in names}
    out |= {name: _summed([row[name] for row in rows]) for name in _COUNTS}
    out["was_clean"] = all(row["was_clean"] for row in rows)
    out["lateness"] = _lateness([row["lateness"] for row in rows])
    out["topics"] = sorted(_by_name(topic for row in rows for topic in row["topics"]), key=_busy)[:limit]
    out["damage"] = [hit for row in rows for hit in row["damage"]][:damage_max]
    out["shards"] = [{"shard": n, "state": LEFT_OUT if part is None else "serving"} for n, part in enumerate(parts)]
    return msgspec.json.encode(out)


def _of(chosen: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    known = [value for value in values if value is not None]
    return chosen(known) if known else None


def _summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(count.get(name, 0) for count in counts) for name in dict.fromkeys(n for count in counts for n in count)}


def _by_name(rows: Iterable[Row]) -> list[Row]:
    """The rows of topics, those of one topic's partitions as one."""
    named: dict[str, list[Row]] = {}
    for row in rows:
        named.setdefault(row["topic"], []).append(row)
    return [
        same[0] if len(same) == 1 else united(same) | {"lateness": _lateness([row["lateness"] for row in same])}
        for same in named.values()
    ]


def _busy(topic: Row) -> tuple[int, str]:
    return -(topic["totals"]["produced"] + topic["states"]["sleep"]), topic["topic"]


def _lateness(rows: Sequence[Row]) -> Row:
    out: Row = {"bounds_ms": rows[0]["bounds_ms"]}
    for name in ("scheduler", "consumer_wait"):
        histogram = Histogram(LATENESS_MS)
        histogram.counts = [sum(counts) for counts in zip(*(row[name] for row in rows), strict=True)]
        quantiles = {f"{name}_p50_ms": histogram.quantile(0.5), f"{name}_p99_ms": histogram.quantile(0.99)}
        out |= {name: histogram.counts} | {key: value and round(value, 3) for key, value in quantiles.items()}
    return out


def history(parts: Sequence[bytes]) -> bytes:
    """Rows of the last 24 hours: those of one minute are put together, and those of the minute that has not ended.

    >>> columns = '{"at_ms":[%s],"seconds":[%s],"sleep":[%s],"scheduler_p99_ms":[%s]}'
    >>> history([(columns % c).encode() for c in [("60001,70000", "60,10", "1,2", "3,null"), ("70002", "10", "5", "4")]])
    b'{"at_ms":[60001,70002],"seconds":[60,10],"sleep":[1,7],"scheduler_p99_ms":[3,4]}'
    """
    tables: list[dict[str, list[Any]]] = [msgspec.json.decode(part) for part in parts]
    names = list(tables[0])
    by_minute: dict[int, list[Row]] = {}
    for table in tables:
        rows = [dict(zip(names, row, strict=True)) for row in zip(*(table[name] for name in names), strict=True)]
        for row in rows[:-1]:
            by_minute.setdefault(int(row["at_ms"]) // ROW_MS, []).append(row)
        for row in rows[-1:]:
            by_minute.setdefault(1 << 62, []).append(row)  # the last one
    merged = [_row(rows) for _, rows in sorted(by_minute.items())]
    return msgspec.json.encode({name: [row[name] for row in merged] for name in names})


def _row(rows: Sequence[Row]) -> Row:
    worst = ("at_ms", "seconds", "scheduler_p99_ms", "consumer_wait_p99_ms")
    return {name: _of(max if name in worst else sum, [row[name] for row in rows]) for name in rows[0]}


# Metrics


def metrics(parts: Sequence[str | None], shards: Sequence[int] | None = None) -> str:
    """The text format of Prometheus, or OpenMetrics: each sample gets the label `shard`. One that does not answer is not up.
    `shards`: their numbers; by default all from 0 on.

    >>> print(metrics(['# HELP turtlemq_up 1 while it serves.\\n# TYPE turtlemq_up gauge\\nturtlemq_up 1\\n', None]), end="")
    # HELP turtlemq_up 1 while it serves.
    # TYPE turtlemq_up gauge
    turtlemq_up{shard="0"} 1
    turtlemq_up{shard="1"} 0
    """
    families: dict[str, list[str]] = {}  # by the line that begins them; its other lines
    is_open = False
    for shard, part in zip(range(len(parts)) if shards is None else shards, parts, strict=True):
        lines: list[str] = []
        for line in (part or "# HELP turtlemq_up 1 while it serves.\n# TYPE turtlemq_up gauge\nturtlemq_up 0").splitlines():
            if line == "# EOF":
                is_open = True
            elif line.startswith("# HELP "):
                lines = families.setdefault(line, [])
            elif line.startswith("#"):
                if line not in lines:
                    lines.append(line)
            else:
                lines.append(_labelled(line, shard))
    out = [line for head, lines in families.items() for line in (head, *lines)]
    return "\n".join([*out, *(["# EOF"] if is_open else [])]) + "\n"


def _labelled(line: str, shard: int) -> str:
    """A sample with the label of its shard.

    >>> _labelled('a{b="x y"} 1', 3), _labelled("a 1", 3)
    ('a{shard="3",b="x y"} 1', 'a{shard="3"} 1')
    """
    name, space, value = line.partition(" ")
    if "{" in name:
        name, _, rest = line.partition("{")
        return f'{name}{{shard="{shard}",{rest}'
    return f'{name}{{shard="{shard}"}}{space}{value}'
