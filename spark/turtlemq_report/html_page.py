"""The HTML page of a report: charts, the tables behind them, and how it was made. One file, without scripts or external links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from turtlemq_report import jobs
from turtlemq_report.svg import SERIES_MAX, Series, bars, columns, legend, lines

if TYPE_CHECKING:
    from turtlemq_report.model import Report

Row = dict[str, Any]
Shown = dict[str, tuple[str, Callable[[Any], str]]]  # columns of a table: title and formatter
TABLE_ROWS_MAX = 200  # of a table on the page; its Parquet file has all
BARS_MAX = 12
_LOGS = (("asleep", 0), ("ended, not freed yet", 1), ("ready", 2), ("journals", 4), ("dead letters", 3), ("tables", 5))


def span(ms: float | None) -> str:
    """A time span in the largest unit that fits.

    >>> span(0), span(850), span(2_500), span(5_400_000), span(None)
    ('0 ms', '850 ms', '2.5 s', '1.5 h', '–')
    """
    if ms is None:
        return "–"
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if abs(ms) >= size:
            return f"{ms / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{ms:.0f} ms"


def room(count: float) -> str:
    """
    >>> room(0), room(1536), room(5 << 30)
    ('0 B', '1.5 KiB', '5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.1f}".removesuffix(".0") + f" {unit}"
        count /= 1024
    return f"{count:.1f}".removesuffix(".0") + " TiB"


def when(at_ms: int, form: str = "%Y-%m-%d %H:%M") -> str:
    """
    >>> when(1_790_000_000_000)
    '2026-09-21 14:13'
    """
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime(form)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


# Aggregation for charts


def sums_by(rows: Iterable[Row], *keys: str, value: str = "messages") -> dict[Any, float]:
    """Sums by key.

    >>> sums_by([{"a": 1, "messages": 2}, {"a": 1, "messages": 3}], "a")
    {1: 5}
    """
    sums: dict[Any, float] = {}
    for row in rows:
        key = row[keys[0]] if len(keys) == 1 else tuple(row[name] for name in keys)
        sums[key] = sums.get(key, 0) + (row[value] or 0)
    return sums


def stacked(
    rows: Sequence[Row], by: Callable[[Row], str], times: Sequence[int], order: Sequence[str] = (), at: str = "start_ms"
) -> list[Series]:
    """Series over times for the largest names, and one for all others. `order` keeps the colour of a name on all charts."""
    named: dict[str, dict[int, float]] = {}
    for row in rows:
        values = named.setdefault(by(row), {})
        values[row[at]] = values.get(row[at], 0) + row["messages"]
    ranked = list(order) or sorted(named, key=lambda name: (-sum(named[name].values()), name))
    largest = ranked if len(ranked) <= SERIES_MAX else ranked[: SERIES_MAX - 1]
    series = [Series(name, [named[name].get(time, 0) for time in times], n) for n, name in enumerate(largest) if name in named]
    rest = [name for name in named if name not in largest]
    if rest:
        sums = [sum(named[name].get(time, 0) for name in rest) for time in times]
        series.append(Series(rest[0] if len(rest) == 1 else f"{len(rest)} others", sums, SERIES_MAX - 1))
    return series


def ranking(tables: dict[str, list[Row]]) -> list[str]:
    """Topics by their number of messages, the largest first."""
    counts = sums_by([row for row in tables["throughput"] if row["what"] == "ready"], "topic")
    for topic, count in sums_by([row for row in tables["forecast"] if row["unit"] != "minute"], "topic").items():
        counts[topic] = counts.get(topic, 0) + count
    return sorted(counts, key=lambda topic: (-counts[topic], topic))


def time_steps(report: Report) -> list[int]:
    """The time steps of charts about the past."""
    if report.range_ms is None:
        return []
    first = report.range_ms[0] - report.range_ms[0] % report.width_ms
    return list(range(first, report.range_ms[1], report.width_ms))


def clocks(times: Sequence[int], width_ms: int) -> list[str]:
    """Labels for times, as short as possible: with the date only if they span days."""
    days = len(times) * width_ms > 36 * jobs.HOUR_MS
    return [when(time, ("%d %b" if width_ms >= 24 * jobs.HOUR_MS else "%d %b %H:%M") if days else "%H:%M") for time in times]


# HTML elements


def table(rows: Sequence[Row], name: str, shown: Shown) -> str:
    """The table behind a chart, collapsed."""
    if not rows:
        return ""
    texts = [column for column in shown if isinstance(next((r[column] for r in rows if r[column] is not None), ""), str)]
    head = "".join(f"<th{'' if c in texts else ' class=n'}>{escape(title)}</th>" for c, (title, _) in shown.items())
    body = "".join(
        "<tr>"
        + "".join(f"<td{'' if c in texts else ' class=n'}>{escape(format_(row[c]))}</td>" for c, (_, format_) in shown.items())
        + "</tr>"
        for row in rows[:TABLE_ROWS_MAX]
    )
    more = (
        f"<p class=quiet>{len(rows) - TABLE_ROWS_MAX:,} more in <code>{name}.parquet</code></p>"
        if len(rows) > TABLE_ROWS_MAX
        else ""
    )
    return (
        f'<details><summary>{len(rows):,} rows</summary><div class="scroll"><table id="table-{name}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}</details>"
    )


def section(name: str, title: str, intro: str, *parts: str) -> str:
    inside = "".join(parts) or "<p class=nothing>Nothing yet.</p>"
    return f'<section id="{name}"><h2>{escape(title)}</h2><p class="quiet">{intro}</p>{inside}</section>'


def figure(title: str, chart: str, names: Sequence[Series | tuple[str, int]] = ()) -> str:
    entries = [(name.name, name.colour) if isinstance(name, Series) else name for name in names]
    keys = legend(entries) if len(entries) > 1 else ""
    return f"<figure><figcaption>{escape(title)}{keys}</figcaption>{chart}</figure>"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _named(row: Row) -> str:
    return f"{row['topic']} / {row['group']}" if row.get("group") else str(row["topic"])


# Sections


def _forecast(report: Report, rows: list[Row], order: Sequence[str]) -> str:
    intro = "Messages that sleep, by when they are due. From the index alone: no message is read."
    charts = []
    for unit, width, count, title in (
        ("minute", jobs.MINUTE_MS, jobs.MINUTES, "The next two hours, by minute"),
        ("hour", jobs.HOUR_MS, jobs.HOURS, "The next seven days, by hour"),
    ):
        first = report.now_ms - report.now_ms % width
        times = [first + i * width for i in range(count)]
        series = stacked([row for row in rows if row["unit"] == unit], lambda row: str(row["topic"]), times, order)
        if series:
            charts.append(figure(title, columns(series, clocks(times, width), title), series))
    other = sums_by((row for row in rows if row["unit"] in ("overdue", "later")), "unit")
    texts = {"overdue": "are overdue: no server has handed them off", "later": "come due later than that"}
    notes = " ".join(f"{number(count)} {texts[unit]}." for unit, count in sorted(other.items()))
    notes = f"<p>{notes}</p>" if notes else ""
    shown: Shown = {"unit": ("unit", _text), "start_ms": ("from (UTC)", lambda at: when(at) if at else "–"),
             "topic": ("topic", _text), "messages": ("messages", number)}  # fmt: skip
    return (
        section(
            "forecast", "What comes due", intro, '<div class="pair">', *charts, "</div>", notes, table(rows, "forecast", shown)
        )
        if rows
        else section("forecast", "What comes due", intro)
    )


def _lateness(report: Report, rows: list[Row]) -> str:
    intro = (
        "Scheduler: from when a message was due until it was ready. Consumers: from then until one fetched it for the first "
        "time. Two causes, two cures: a busy server, or too few consumers."
    )
    times, charts = time_steps(report), []
    for part, title in (("scheduler", "Scheduler: ready − due"), ("consumer", "Consumers: reserved − ready")):
        over = {
            row["start_ms"]: row for row in rows if row["part"] == part and row["topic"] is None and row["start_ms"] is not None
        }
        if over:
            ranks = (("p50_ms", "half", 0), ("p90_ms", "90 %", 2), ("p99_ms", "99 %", 1), ("max_ms", "slowest", 3))
            series = [Series(name, [over[t][key] if t in over else None for t in times], n) for key, name, n in ranks]
            charts.append(figure(title, lines(series, clocks(times, report.width_ms), title, span), series))
    whole = [row for row in rows if row["topic"] is not None and row["start_ms"] is None]
    shown: Shown = {
        "topic": ("topic", _text),
        "part": ("part", _text),
        "messages": ("messages", number),
    }
    shown |= {
        key: (name, span) for key, name in (("p50_ms", "half"), ("p90_ms", "90 %"), ("p99_ms", "99 %"), ("max_ms", "slowest"))
    }
    inside = ('<div class="pair">', *charts, "</div>", table(whole, "lateness", shown)) if charts else ()
    return section("lateness", "How late", intro, *inside)


def _delays(rows: list[Row], order: Sequence[str]) -> str:
    intro = "How long messages were asked to sleep, of all that came due."
    edges = [span(edge) if edge else "at once" for edge in jobs.DELAY_EDGES_MS] + [f"> {span(jobs.DELAY_EDGES_MS[-1])}"]
    labels = [edge if i in (0, len(edges) - 1) else f"≤ {edge}" for i, edge in enumerate(edges)]
    series = stacked(rows, lambda row: str(row["topic"]), range(len(labels)), order, "delay_class")
    shown: Shown = {"topic": ("topic", _text), "delay_class": ("delay", lambda n: labels[n]), "messages": ("messages", number)}
    charts = [figure("Messages by delay", columns(series, labels, "Messages by delay"), series)] if rows else []
    return section("delays", "How long they sleep", intro, *charts, table(rows, "delays", shown))


def _throughput(report: Report, rows: list[Row], order: Sequence[str]) -> str:
    intro = f"In steps of {span(report.width_ms)}: what came due in each topic, and what consumers settled in each group."
    times, charts = time_steps(report), []
    came = [row for row in rows if row["what"] == "ready"]
    done = [row for row in rows if row["what"] in ("acked", "dead", "expired")]
    both: list[tuple[str, list[Row], Callable[[Row], str], Sequence[str]]] = [
        ("Came due, by topic", came, lambda row: str(row["topic"]), order),
        ("Settled, by topic and group", done, _named, ()),
    ]
    for title, counted, by, ranked in both:
        series = stacked(counted, by, times, ranked)
        if series:
            chart = columns(series, clocks(times, report.width_ms), title)
            charts.append(figure(title, chart, series))
    sums = [
        {"topic": t, "group": g, "what": w, "messages": n} for (t, g, w), n in sums_by(rows, "topic", "group", "what").items()
    ]
    shown: Shown = {
        "topic": ("topic", _text),
        "group": ("group", _text),
        "what": ("what", _text),
        "messages": ("messages", number),
    }
    inside = ('<div class="pair">', *charts, "</div>", table(sums, "throughput", shown)) if charts else ()
    return section("throughput", "How much goes through", intro, *inside)


def _failures(rows: list[Row]) -> str:
    intro = "Errors by their kind: numbers, ids and quoted texts are left out, so that the same cause is one line."
    kinds: dict[str, list[float]] = {}
    for row in rows:
        known = kinds.setdefault(row["error"], [0, 0])
        known[0] += row["retries"]
        known[1] += row["died"]
    most = sorted(kinds.items(), key=lambda item: (-sum(item[1]), item[0]))[:BARS_MAX]
    names = (("tried again", 1), ("died", 3))
    chart = bars([(e, v, f"{number(v[0])} again, {number(v[1])} died") for e, v in most], names, "Failures by error")
    order = sorted(rows, key=lambda row: -(row["retries"] + row["died"]))
    shown: Shown = {"error": ("error", _text), "topic": ("topic", _text), "group": ("group", _text),
                    "retries": ("tried again", number), "died": ("died", number),
                    "letters": ("dead letters now", number)}  # fmt: skip
    return section(
        "failures", "What fails, and why", intro, *([figure("", chart, names)] if most else []), table(order, "failures", shown)
    )


def _storage(rows: list[Row]) -> str:
    intro = "The room that each topic takes. Ended messages leave it when their segment is sealed or compacted."
    topics: dict[str, list[float]] = {}
    for row in rows:
        at = topics.setdefault(row["topic"], [0.0] * len(_LOGS))
        place = {"delay": 0, "ready": 2, "reserve": 3, "history": 3, "dead": 4}[row["log"]]
        at[place] += row["bytes"] - row["ended_bytes"]
        at[1] += row["ended_bytes"]
        at[5] += row["table_bytes"]
    most = sorted(topics.items(), key=lambda item: (-sum(item[1]), item[0]))[:BARS_MAX]
    chart = bars([(name, values, room(sum(values))) for name, values in most], _LOGS, "Room by topic", room)
    segments = [row for row in rows if row["log"] == "delay"]
    advised = [row for row in segments if row["advice"] not in ("", "grows")]
    notes = "".join(
        f"<li><b>{escape(row['topic'])}</b> {escape(row['segment'])}: {row['live_ratio'] or 0:.0%} of {number(row['documents'])} "
        f"still asleep, {room(row['ended_bytes'])} to be freed: {escape(row['advice'])}</li>"
        for row in sorted(advised, key=lambda row: -row["ended_bytes"])[:BARS_MAX]
    )
    shown: Shown = {"topic": ("topic", _text), "log": ("log", _text), "segment": ("segment", _text), "bytes": ("bytes", number),
             "table_bytes": ("tables", number), "documents": ("documents", number), "live": ("asleep", number),
             "live_ratio": ("live", lambda part: "–" if part is None else f"{part:.0%}"),
             "advice": ("advice", _text)}  # fmt: skip
    advice = f"<ul class=advice>{notes}</ul>" if notes else ""
    return section(
        "storage",
        "Who fills the disk",
        intro,
        *([figure("", chart, _LOGS)] if most else []),
        advice,
        table(rows, "storage", shown),
    )


def _consumers(rows: list[Row]) -> str:
    intro = (
        "Who took how much, and how long they worked on it. Slow: three times the middle consumer of its group. Hot: more "
        "than twice its fair share. Failing: a fifth of its deliveries."
    )
    order = sorted(rows, key=lambda row: (row["verdict"] == "", -(row["taken"] + row["holds"])))
    parts = [
        (
            f"{_named(row)} / {row['consumer'] or '(no name)'}",
            (row["acked"], row["failed"], row["lapsed"], row["holds"]),
            " · ".join(filter(None, (span(row["p50_ms"]), row["verdict"]))),
        )
        for row in order[:BARS_MAX]
    ]
    names = (("handled", 0), ("failed", 3), ("let the time run out", 1), ("holds now", 2))
    shown: Shown = {name: (name, _text) for name in ("topic", "group", "consumer")}
    shown |= {name: (name, number) for name in ("taken", "acked", "failed", "lapsed", "holds")}
    shown |= {"share": ("share", lambda share: f"{share or 0:.0%}"), "p50_ms": ("half", span), "p99_ms": ("99 %", span)}
    shown |= {"verdict": ("verdict", _text)}
    chart = [figure("Deliveries, and the median of the work on one", bars(parts, names, "Consumers"), names)] if parts else []
    return section("consumers", "Who does the work", intro, *chart, table(order, "consumers", shown))


# The page


def headline(report: Report) -> list[tuple[str, str, bool]]:
    """The figures at the top: name, value, and whether it is bad."""
    tables = {name: table.to_pylist() for name, table in report.tables.items()}
    due = sums_by(tables["forecast"], "unit")
    now_hour = report.now_ms + jobs.HOUR_MS
    soon = sum(row["messages"] for row in tables["forecast"] if row["unit"] == "minute" and row["start_ms"] < now_hour)
    asleep = due.get("hour", 0) + due.get("later", 0) + due.get("overdue", 0)
    whole = {row["part"]: row for row in tables["lateness"] if row["topic"] is None and row["start_ms"] is None}
    ways = sums_by(tables["throughput"], "what")
    letters = sum(row["letters"] for row in tables["failures"])
    size = sum(row["bytes"] + row["table_bytes"] for row in tables["storage"])
    return [
        ("asleep", number(asleep), False),
        ("due within the hour", number(soon), False),
        ("came due", number(ways.get("ready", 0)), False),
        ("handled", number(ways.get("acked", 0)), False),
        ("scheduler p99", span(whole.get("scheduler", {}).get("p99_ms")), False),
        ("consumers p99", span(whole.get("consumer", {}).get("p99_ms")), False),
        ("dead letters", number(letters), letters > 0),
        ("on disk", room(size), False),
        ("damaged", number(report.damaged), report.damaged > 0),
    ]


def _about(report: Report) -> str:
    asked, ends = report.options, report.range_ms
    what = f"{len(report.topics)} topics" + ("" if asked.topic == "*" else f" ({escape(asked.topic)})")
    lasts = f"{when(ends[0])} to {when(ends[1])} UTC" if ends else "nothing has happened yet"
    fresh = "everything was read" if report.first else "only what is new was read"
    return (
        f"<p><code>{escape(str(asked.data))}</code> · {what} · {lasts}</p>"
        f"<p class=quiet>Made at {when(report.now_ms, '%Y-%m-%d %H:%M:%S')} UTC in {report.seconds:.1f} s; "
        f"{fresh}: {room(report.read_bytes)}.</p>"
    )


def _warnings(report: Report) -> str:
    lines_ = [f"Damaged: {line}. `turtlemq check` reads every byte." for line in report.damage[:BARS_MAX]]
    if report.damaged > len(report.damage):
        lines_.append(f"{number(report.damaged - len(report.damage))} documents could not be read and are left out.")
    lines_ += [f"Removed by retention before any report read it: {line}." for line in report.missed[:BARS_MAX]]
    if not report.pinned:
        lines_.append("The data folder cannot be written to, so files were not pinned: the sections may be of different moments.")
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in lines_)


def html(report: Report) -> str:
    """The page as HTML text."""
    tables = {name: table.to_pylist() for name, table in report.tables.items()}
    cards = "".join(
        f'<div class="card{" bad" if bad else ""}"><div class="value">{escape(value)}</div>'
        f'<div class="name">{escape(name)}</div></div>'
        for name, value, bad in headline(report)
    )
    order = ranking(tables)
    sections = (
        _forecast(report, tables["forecast"], order),
        _lateness(report, tables["lateness"]),
        _throughput(report, tables["throughput"], order),
        '<div class="halves">' + _delays(tables["delays"], order) + _failures(tables["failures"]) + "</div>",
        '<div class="halves">' + _consumers(tables["consumers"]) + _storage(tables["storage"]) + "</div>",
    )
    style = files("turtlemq_report").joinpath("page.css").read_text("utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>TurtleMQ report</title><style>{style}</style></head>'
        f"<body><header>{_TURTLE}<div><h1>TurtleMQ report</h1>{_about(report)}</div></header>"
        f'<main>{_warnings(report)}<div class="cards">{cards}</div>{"".join(sections)}</main>'
        '<footer class="quiet">Every table is a Parquet file beside this page. Times are UTC.</footer></body></html>'
    )


_TURTLE = (
    '<svg class="turtle" viewBox="0 0 32 32" aria-hidden="true"><g fill="#3f9d6a"><ellipse cx="27" cy="17" rx="4" ry="3.4"/>'
    '<ellipse cx="9" cy="24" rx="3" ry="2.4"/><ellipse cx="21" cy="24" rx="3" ry="2.4"/><path d="M4 21 1 23l4 1z"/>'
    "</g>"
    '<path d="M3.5 22a11.5 11.5 0 0 1 23 0z" fill="#23704a"/><g fill="none" stroke="#9be0b8" stroke-width="1.4" '
    'stroke-linecap="round"><circle cx="15" cy="16.5" r="4.2"/><path d="M15 14.2v2.5l1.7 1"/></g><circle cx="28.4" cy="16.2" '
    'r=".7" fill="#fff"/></svg>'
)
