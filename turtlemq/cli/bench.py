"""`turtlemq bench`: load on a running server, with live figures, and a verdict: did everything come, and nothing early?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turtlemq.cli.call import URL, auth_headers, call, path
from turtlemq.cli.output import console, fail, format_bytes, new_table, print_json, print_table
from turtlemq.cli.parameters import AsJson, Url, duration_option

if TYPE_CHECKING:
    from turtlemq.cli.load import Counts, Load, Plan

LIVE_S = 0.5


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

    turtlemq bench --duration 10

    turtlemq bench --format bson --batch 1000

    turtlemq bench --batch 1 --connections 64 --duration 5

    turtlemq bench --rate 2000 --batch 10 --consumers 4 --json
    """
    if kind not in ("json", "bson"):
        fail(f"--format is json or bson, not {kind!r}", 2)
    from turtlemq.cli.load import Plan

    address = url if "://" in url else f"http://{url}"
    own = topic is None
    name = topic or f"bench-{time.time_ns() // 1_000_000}"
    if not own and any(one["topic"] == name for one in call(url, "GET", path())["topics"]):
        fail(f"there is a topic {name!r} already, and its messages would be counted; give another, or none", 2)
    plan = Plan(address, name, batch, body_bytes, kind == "bson", connections, consumers, rate, duration, delay)
    call(url, "PUT", path(name), {})
    try:
        load = _run(plan, as_json)
        left = call(url, "GET", path(name))["stats"]
    finally:
        if own:
            call(url, "DELETE", path(name))
    summary = _summary(plan, load, left)
    print_json(summary) if as_json else _print(summary)
    raise typer.Exit(0 if summary["ok"] else 1)


def _run(plan: Plan, quiet: bool) -> Load:
    import asyncio
    import gc

    from turtlemq.cli.load import Load

    async def watched() -> Load:
        load = Load(plan, auth_headers())
        running = asyncio.create_task(load.run())
        if not quiet and console(stderr=True).is_terminal:
            await _watch(load, running)
        await running
        return load

    gc.freeze()
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(watched())
    except ImportError:
        return asyncio.run(watched())
    except KeyboardInterrupt:
        raise typer.Exit(1) from None
    finally:
        gc.unfreeze()


async def _watch(load: Load, running: Any) -> None:
    import asyncio

    from rich.live import Live

    with Live(console=console(stderr=True), refresh_per_second=4, transient=True) as live:
        before, at = (0, 0, 0), time.perf_counter()
        while not running.done():
            await asyncio.wait([running], timeout=LIVE_S)
            seen, now = load.counts, time.perf_counter()
            counts = (seen.sent, seen.received, seen.acked)
            rates = [(new - old) / (now - at) for new, old in zip(counts, before, strict=True)]
            live.update(_live_table(seen, rates, now - load.started))
            before, at = counts, now


def _live_table(seen: Counts, rates: list[float], passed_s: float) -> Any:
    made = new_table(f"{passed_s:.0f} s", "in all", "a second")
    for name, count, rate in zip(("sent", "received", "acked"), (seen.sent, seen.received, seen.acked), rates, strict=True):
        made.add_row(name, f"{count:,}", f"{rate:,.0f}")
    made.add_row("lateness ms", _quantiles(seen.lateness), "p50 / p99 / p99.9")
    made.add_row("put ms", _quantiles(seen.put_ms), "p50 / p99 / p99.9")
    made.add_row("refused, errors", f"{seen.refused:,}, {seen.errors.total():,}", "")
    return made


def _quantiles(late: Any) -> str:
    return " / ".join("-" if (q := late.quantile(part)) is None else f"{q:.1f}" for part in (0.5, 0.99, 0.999))


def _summary(plan: Plan, load: Load, left: dict[str, Any]) -> dict[str, Any]:
    """The run in figures, and whether all is well."""
    seen, took = load.counts, max(load.sending_s, 1e-9)
    receiving = max((load.last_ms - load.first_ms) / 1000, 0.001)
    every = plan.consumers == 0 or (seen.received == seen.sent and seen.acked == seen.sent)
    stored = sum(left[state] for state in ("sleep", "ready", "reserve", "history", "dead"))
    quantiles = {f"p{100 * part:g}": part for part in (0.5, 0.99, 0.999)}
    return {
        "ok": every and seen.early == 0 and not seen.errors and stored == seen.sent and seen.sent > 0,
        "sent": seen.sent,
        "received": seen.received,
        "acked": seen.acked,
        "stored": stored,
        "again": seen.again,
        "early": seen.early,
        "refused": seen.refused,
        "errors": dict(seen.errors),
        "seconds": round(took, 3),
        "sent_per_s": round(seen.sent / took),
        "received_per_s": round(seen.received / receiving),
        "body_bytes_per_s": round(seen.sent * plan.body_bytes / took),
        "lateness_ms": {name: seen.lateness.quantile(part) for name, part in quantiles.items()},
        "put_ms": {name: seen.put_ms.quantile(part) for name, part in quantiles.items()},
        "rate": plan.rate,
        "batch": plan.batch,
        "body_bytes": plan.body_bytes,
        "format": "bson" if plan.bson else "json",
        "connections": plan.connections,
        "consumers": plan.consumers,
    }


def _print(found: dict[str, Any]) -> None:
    made = new_table("", "messages", "a second")
    made.add_row("sent", f"{found['sent']:,}", f"{found['sent_per_s']:,} ({format_bytes(found['body_bytes_per_s'])} of bodies)")
    made.add_row("received", f"{found['received']:,}", f"{found['received_per_s']:,}")
    made.add_row("acked", f"{found['acked']:,}", "")
    print_table(made)
    times = new_table("ms", "p50", "p99", "p99.9")
    for name, key in (("lateness", "lateness_ms"), ("put", "put_ms")):
        times.add_row(name, *("-" if value is None else f"{value:.1f}" for value in found[key].values()))
    print_table(times)
    out = console()
    if found["ok"]:
        came = "sent = received = acked" if found["consumers"] else "sent = stored"
        if not found["rate"] and found["consumers"]:
            out.print(
                "as fast as it goes, so messages queue up; for lateness give a --rate that the server can keep", style="dim"
            )
        out.print(f"ok: {came}, none early, no errors", style="green")
        return
    told = [f"{found['sent']:,} sent, {found['stored']:,} stored, {found['received']:,} received, {found['acked']:,} acked"]
    told += [f"{found['early']:,} early"] * bool(found["early"])
    told += [f"{count:,} × {code}" for code, count in found["errors"].items()]
    out.print(f"NOT ok: {'; '.join(told)}", style="bold red")
