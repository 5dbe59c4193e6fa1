"""`turtlemq bench`: load on a running server, with live figures and a verdict.

The verdict is ok if every message was received and acked, none of them early, without errors. The load itself is in `load`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.call import URL, auth_headers, call, path
from turtlemq.cli.output import console, fail, format_bytes, new_table, print_json, print_table
from turtlemq.cli.parameters import AsJson, Url, duration_option

if TYPE_CHECKING:
    from turtlemq.cli.load import Counts, LatencyHistogram, Load, Plan

LIVE_S = 0.5  # between two updates of the live table
QUANTILES = (0.5, 0.99, 0.999)


def bench(
    duration: Annotated[float, duration_option("How long to send.", show_default=True)] = 10,
    batch: Annotated[int, typer.Option(help="Messages in one request; 1: single posts.", min=1, max=100_000)] = 1000,
    body_bytes: Annotated[int, typer.Option(help="Size of a body.", min=0, max=1 << 20)] = 100,
    kind: Annotated[str, typer.Option("--format", metavar="json|bson", help="How messages travel.")] = "json",
    connections: Annotated[int, typer.Option(help="Producers, each with a connection.", min=0, max=10_000)] = 4,
    consumers: Annotated[int, typer.Option(help="Consumers, each with a connection.", min=0, max=10_000)] = 2,
    rate: Annotated[float, typer.Option(help="Messages a second in all; 0: as many as go.", min=0)] = 0,
    delay: Annotated[float, duration_option("How long each message sleeps.", show_default=True)] = 1,
    topic: Annotated[
        str | None, typer.Option(help="The topic; by default a new one, which is deleted at the end.", show_default=False)
    ] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Put load on a running server and watch rates and lateness live. Exits with 1 if one is missing, early, or met an error.
    Ctrl-C ends the sending early.

    turtlemq bench --duration 10

    turtlemq bench --format bson --batch 1000

    turtlemq bench --batch 1 --connections 64 --duration 5

    turtlemq bench --rate 2000 --batch 10 --consumers 4 --json
    """
    if kind not in ("json", "bson"):
        fail(f"--format is json or bson, not {kind!r}", 2)
    from turtlemq.cli.load import Plan

    address = url if "://" in url else f"http://{url}"
    temporary = topic is None
    name = topic or f"bench-{time.time_ns() // 1_000_000}"
    if not temporary and any(other["topic"] == name for other in call(url, "GET", path())["topics"]):
        fail(f"there is a topic {name!r} already, and its messages would be counted; give another, or none", 2)
    plan = Plan(address, name, batch, body_bytes, kind == "bson", connections, consumers, rate, duration, delay)
    call(url, "PUT", path(name), {})
    try:
        load = _run(plan, as_json)
        stats = call(url, "GET", path(name))["stats"]
    finally:
        if temporary:
            call(url, "DELETE", path(name))
    summary = _summary(plan, load, stats)
    print_json(summary) if as_json else _print_summary(summary)
    raise typer.Exit(0 if summary["ok"] else 1)


def _run(plan: Plan, quiet: bool) -> Load:
    """Run the load on an event loop, uvloop if it is installed; with a live table on a terminal unless `quiet`. The first Ctrl-C
    ends the sending, a second one the program."""
    import asyncio
    import gc
    import signal

    from turtlemq.cli.load import Load

    async def run_load() -> Load:
        load = Load(plan, auth_headers())
        loop = asyncio.get_running_loop()

        def stop() -> None:
            load.stop()
            loop.remove_signal_handler(signal.SIGINT)

        loop.add_signal_handler(signal.SIGINT, stop)
        running = asyncio.create_task(load.run())
        if not quiet and console(stderr=True).is_terminal:
            await _watch(load, running)
        await running
        return load

    gc.freeze()
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_load())
    except ImportError:
        return asyncio.run(run_load())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        gc.unfreeze()


async def _watch(load: Load, running: Any) -> None:
    import asyncio

    from rich.live import Live

    with Live(console=console(stderr=True), refresh_per_second=4, transient=True) as live:
        before, at = (0, 0, 0), time.perf_counter()
        while not running.done():
            await asyncio.wait([running], timeout=LIVE_S)
            counts, now = load.counts, time.perf_counter()
            totals = (counts.sent, counts.received, counts.acked)
            rates = [(new - old) / (now - at) for new, old in zip(totals, before, strict=True)]
            live.update(_live_table(counts, rates, now - load.started))
            before, at = totals, now


def _live_table(counts: Counts, rates: list[float], passed_s: float) -> Any:
    table = new_table(f"{passed_s:.0f} s", "in all", "a second")
    for name, count, rate in zip(("sent", "received", "acked"), (counts.sent, counts.received, counts.acked), rates, strict=True):
        table.add_row(name, f"{count:,}", f"{rate:,.0f}")
    table.add_row("lateness ms", _quantiles(counts.lateness), "p50 / p99 / p99.9")
    table.add_row("put ms", _quantiles(counts.put_ms), "p50 / p99 / p99.9")
    table.add_row("refused, errors", f"{counts.refused:,}, {counts.errors.total():,}", "")
    return table


def _quantiles(histogram: LatencyHistogram) -> str:
    return " / ".join("-" if (value := histogram.quantile(q)) is None else f"{value:.1f}" for q in QUANTILES)


def _summary(plan: Plan, load: Load, stats: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run and its verdict, as `--json` prints them. `stats`: the figures of the topic after the run."""
    counts, sending_s = load.counts, max(load.sending_s, 1e-9)
    receiving_s = max((load.last_ms - load.first_ms) / 1000, 0.001)
    complete = plan.consumers == 0 or (counts.received == counts.sent and counts.acked == counts.sent)
    stored = sum(stats[state] for state in ("sleep", "ready", "reserve", "history", "dead"))
    quantiles = {f"p{100 * q:g}": q for q in QUANTILES}
    return {
        "ok": complete and counts.early == 0 and not counts.errors and stored == counts.sent and counts.sent > 0,
        "sent": counts.sent,
        "received": counts.received,
        "acked": counts.acked,
        "stored": stored,
        "again": counts.again,
        "early": counts.early,
        "refused": counts.refused,
        "errors": dict(counts.errors),
        "seconds": round(sending_s, 3),
        "sent_per_s": round(counts.sent / sending_s),
        "received_per_s": round(counts.received / receiving_s),
        "body_bytes_per_s": round(counts.sent * plan.body_bytes / sending_s),
        "lateness_ms": {name: counts.lateness.quantile(q) for name, q in quantiles.items()},
        "put_ms": {name: counts.put_ms.quantile(q) for name, q in quantiles.items()},
        "rate": plan.rate,
        "batch": plan.batch,
        "body_bytes": plan.body_bytes,
        "format": "bson" if plan.bson else "json",
        "connections": plan.connections,
        "consumers": plan.consumers,
    }


def _print_summary(summary: dict[str, Any]) -> None:
    counts = new_table("", "messages", "a second")
    bodies = format_bytes(summary["body_bytes_per_s"])
    counts.add_row("sent", f"{summary['sent']:,}", f"{summary['sent_per_s']:,} ({bodies} of bodies)")
    counts.add_row("received", f"{summary['received']:,}", f"{summary['received_per_s']:,}")
    counts.add_row("acked", f"{summary['acked']:,}", "")
    print_table(counts)
    times = new_table("ms", "p50", "p99", "p99.9")
    for name, key in (("lateness", "lateness_ms"), ("put", "put_ms")):
        times.add_row(name, *("-" if value is None else f"{value:.1f}" for value in summary[key].values()))
    print_table(times)
    out = console()
    if summary["ok"]:
        balance = "sent = received = acked" if summary["consumers"] else "sent = stored"
        if not summary["rate"] and summary["consumers"]:
            out.print(
                "as fast as it goes, so messages queue up; for lateness give a --rate that the server can keep", style="dim"
            )
        out.print(f"ok: {balance}, none early, no errors", style="green")
        return
    reasons = [", ".join(f"{summary[name]:,} {name}" for name in ("sent", "stored", "received", "acked"))]
    reasons += [f"{summary['early']:,} early"] * bool(summary["early"])
    reasons += [f"{count:,} × {code}" for code, count in summary["errors"].items()]
    out.print(f"NOT ok: {'; '.join(reasons)}", style="bold red")
