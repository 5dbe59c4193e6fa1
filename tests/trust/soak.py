"""`python -m tests.trust.soak`: a real server at a steady mixed load for hours, with restarts; its resources, and a picture.

As many messages a second as `--rate` says, 1,500 without it, if the machine gets that far, on four topics with two groups each;
delays up to a minute, a tenth cancelled, a twentieth moved, some that fail and die; a stop or a kill -9 every few minutes. Every
message is accounted for to the end, and in an hour or more memory must not grow. Written to the folder of `--out`:
`samples.jsonl`, `soak.svg`, `summary.json`, and the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.probe import anonymous_bytes
from tests.harness.server_process import Server, running
from tests.trust.kills import calm
from tests.trust.load_wire import run_loop
from tests.trust.model import Broken
from tests.trust.soak_audit import FAULTS
from tests.trust.soak_load import HISTORY_S, House, Load
from tests.trust.soak_picture import draw

RATE = 1_500
SAMPLE_S, RESTART_S, LONGEST_S, TTR_S = 5.0, 180.0, 60.0, 20.0  # in a long run; a short one has all of it sooner
RESTARTS_MIN = 2  # one of each kind, however short the run
OVERDUE_S = 60.0  # beyond delay and lease: then the server is asked about a message
MEMORY_BYTES = 500 << 20
LONG_MIN = 60.0  # a run of so many minutes tells how memory grows; in a shorter one that is chance
SLOPE_MB = 20.0  # an hour, at most: four bytes for each message that was put in it would be more


class Soak:
    """One run."""

    def __init__(self, minutes: float, rate: int, out: Path) -> None:
        self.seconds, self.out, self.data = minutes * 60, out, out / "data"
        part = min(1.0, self.seconds / 240)
        self.sample_s, self.ttr_s = max(0.5, SAMPLE_S * part), max(2.0, TTR_S * part)
        self.restart_s, self.longest_s = max(4.0, min(RESTART_S, self.seconds / 4)), max(3.0, LONGEST_S * part)
        self.rate, self.house = rate, House()
        self.load = Load(self.house, rate, self.longest_s, self.ttr_s)
        self.samples: list[dict[str, Any]] = []
        self.restarts: list[tuple[float, str]] = []
        self.begin, self._before = 0.0, Counter[str]()
        self._server = ExitStack()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self.house.open(await loop.run_in_executor(None, self._server.enter_context, running(self.data)))

    async def _restart(self, number: int) -> None:
        """A proper stop, or none."""
        server, how = self._running(), "stop" if number % 2 else "kill"
        self.restarts.append((round(self._now(), 1), how))
        self.house.shut()
        loop = asyncio.get_running_loop()
        code = await loop.run_in_executor(None, server.stop, signal.SIGTERM if how == "stop" else signal.SIGKILL)
        if how == "stop" and code != 0:
            raise Broken(f"a stop ended with {code}")
        await loop.run_in_executor(None, self._server.close)
        await self._start()

    def _running(self) -> Server:
        assert self.house.server is not None
        return self.house.server

    def _now(self) -> float:
        return time.monotonic() - self.begin

    async def run(self) -> dict[str, Any]:
        """All of it. Returns the summary."""
        async with AsyncExitStack() as stack:
            stack.callback(self._server.close)
            await self._start()
            await self.load.prepare()
            self.begin = time.monotonic()
            self.load.start()
            stack.push_async_callback(self.load.close)
            with (self.out / "samples.jsonl").open("w", encoding="utf-8") as file:
                await self._steady(file)
                self.load.sending = False
                await self._drain(file)
        calm(self.out, "soak")
        return self.summary()

    async def _steady(self, file: Any) -> None:
        next_restart, asked = self.restart_s, 0.0
        while self._now() < self.seconds or len(self.restarts) < RESTARTS_MIN:
            await self._sample(file)
            if self._now() >= next_restart:
                await self._restart(len(self.restarts))
                next_restart = self._now() + self.restart_s
            if self._now() > asked + OVERDUE_S:
                asked = self._now()
                await self.load.ask(self._patience_s())

    def _patience_s(self) -> float:
        """When a message should be settled, after it was due, even if its consumers died with it in every attempt."""
        return self.ttr_s * 4 + OVERDUE_S

    async def _drain(self, file: Any) -> None:
        """Everything comes. About missing messages the server is asked after a while: they may have died with a last lease."""
        end = self._now() + self.longest_s + self._patience_s()
        while any(audit.open for audit in self.load.audits.values()):
            await self._sample(file)
            due = self.ttr_s + self.longest_s
            await self.load.ask(due if self._now() < end else 0)
            if self._now() > end:
                break
        for audit in self.load.audits.values():
            for id_ in [id_ for id_, entry in audit.open.items() if entry.answered]:
                audit.fault("lost", f"{id_} has not come: {audit.open[id_]}")

    async def _sample(self, file: Any) -> None:
        """Wait for the next one, take it, write it down, say it."""
        await asyncio.sleep(self.sample_s)
        self.load.check()
        counts, late = Counter[str](), np.array([], np.int64)
        for audit in self.load.audits.values():
            counts.update(audit.counts)
            late = np.append(late, audit.late_ms)
            audit.late_ms.clear()
            audit.forget()
        was = self.samples[-1]["s"] if self.samples else 0.0
        passed = max(self._now() - was, 1e-3)
        quantiles = [round(float(np.quantile(late, part)), 1) if len(late) else None for part in (0.5, 0.99, 1.0)]
        self.samples.append(
            {
                "s": round(self._now(), 1),
                "memory_mb": round(anonymous_bytes(self._running().process.pid) / 1e6, 1),
                "disk_mb": round(used_bytes(self.data) / 1e6, 2),
                "live_mb": round(sum(audit.live_bytes for audit in self.load.audits.values()) / 1e6, 2),
                "p50_ms": quantiles[0],
                "p99_ms": quantiles[1],
                "max_ms": quantiles[2],
                "in_per_s": round((counts["accepted"] - self._before["accepted"]) / passed),
                "out_per_s": round((counts["deliveries"] - self._before["deliveries"]) / passed),
                "restarted": bool(self.restarts) and self.restarts[-1][0] >= was,
                **self.faults(),
            }
        )
        self._before = counts
        file.write(json.dumps(self.samples[-1]) + "\n")
        file.flush()
        self._say()

    def faults(self) -> dict[str, int]:
        """How many of each kind so far."""
        return {kind: sum(audit.faults[kind] for audit in self.load.audits.values()) for kind in FAULTS}

    def _say(self) -> None:
        last, tty = self.samples[-1], sys.stderr.isatty()
        if not tty and len(self.samples) % 12:
            return
        wrong = ", ".join(f"{count} {kind}" for kind, count in self.faults().items() if count) or "nothing wrong"
        said = (
            f"{last['s'] / 60:6.1f} of {self.seconds / 60:.1f} min",
            f"{last['in_per_s']:,}/s in, {last['out_per_s']:,}/s out",
            f"{last['memory_mb']:.0f} MB, disk {last['disk_mb']:.0f} MB, live {last['live_mb']:.0f} MB",
            f"p99 {last['p99_ms']} ms",
            f"{len(self.restarts)} restarts, {wrong}",
        )
        print(*("\r" if tty else "", " | ".join(said)), sep="", end="   " if tty else "\n", file=sys.stderr, flush=True)

    def summary(self) -> dict[str, Any]:
        """The figures that interest a reader."""
        steady = [sample for sample in self.samples if self.seconds / 5 <= sample["s"] <= self.seconds] or self.samples
        undisturbed = [s["p99_ms"] for s in steady if not s["restarted"] and s["p99_ms"] is not None]
        counts = sum((audit.counts for audit in self.load.audits.values()), Counter[str]())
        hours = np.array([sample["s"] / 3600 for sample in steady])
        memory = np.array([sample["memory_mb"] for sample in steady])
        slope = float(np.polyfit(hours, memory, 1)[0]) if len(steady) > 2 else math.nan
        amplified = [sample["disk_mb"] / sample["live_mb"] for sample in steady if sample["live_mb"] > 1]
        return {
            "minutes": round(self.seconds / 60, 2),
            "rate": self.rate,
            "in_per_s_median": float(np.median([sample["in_per_s"] for sample in steady])),
            **counts,
            "kills": sum(how == "kill" for _, how in self.restarts),
            "stops": sum(how == "stop" for _, how in self.restarts),
            "memory_mb_max": float(memory.max()),
            "memory_slope_mb_per_hour": round(slope, 2),
            "disk_mb_max": max(sample["disk_mb"] for sample in steady),
            "amplification_median": round(float(np.median(amplified)), 2) if amplified else None,
            "p50_ms_median": float(np.median([s["p50_ms"] for s in steady if s["p50_ms"] is not None])),
            "p99_ms_median": float(np.median(undisturbed)) if undisturbed else None,
            **self.faults(),
        }


def used_bytes(folder: Path) -> int:
    """Of all files below it; they come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(f"{place}/{name}").st_size
            except FileNotFoundError:
                continue
    return total


def told(summary: dict[str, Any]) -> tuple[str, str]:
    """The summary in words: the work done, and the resources used."""
    faults = ", ".join(f"{summary[kind]} {kind}" for kind in FAULTS)
    done = (
        f"{summary['accepted']:,} messages, {summary['in_per_s_median']:,.0f} a second, {summary['deliveries']:,} deliveries",
        f"{summary['kills']} kills and {summary['stops']} stops: {faults}",
    )
    taken = (
        f"memory {summary['memory_slope_mb_per_hour']:+.1f} MB an hour, at most {summary['memory_mb_max']:.0f} MB",
        f"all files ×{summary['amplification_median']} of the bytes not settled yet, {HISTORY_S} s of history included",
        f"late p50 {summary['p50_ms_median']:.0f} ms, p99 {summary['p99_ms_median']} ms",
    )
    return "; ".join(done), "; ".join(taken)


def wrong(summary: dict[str, Any]) -> list[str]:
    """Resources beyond their limits."""
    out, slope = [], summary["memory_slope_mb_per_hour"]
    if summary["memory_mb_max"] > MEMORY_BYTES / 1e6:
        out.append(f"memory: {summary['memory_mb_max']:.0f} MB; {MEMORY_BYTES / 1e6:.0f} are the most")
    if summary["minutes"] >= LONG_MIN and not slope <= SLOPE_MB:
        out.append(f"memory grows by {slope:.1f} MB an hour; {SLOPE_MB:.0f} are the most")
    return out


def soak(minutes: float, rate: int, out: Path) -> dict[str, Any]:
    """Run it and write everything into `out`, the data excepted, which goes."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "data", ignore_errors=True)
    run = Soak(minutes, rate, out)
    summary = run_loop(run.run())
    (out / "soak.svg").write_text(draw(run.samples, [s for s, _ in run.restarts], told(summary)), encoding="utf-8")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    texts = wrong(summary) + [text for audit in run.load.audits.values() for text in audit.texts]
    if texts:
        raise Broken("; ".join([*told(summary), *texts[:5]]))
    shutil.rmtree(out / "data", ignore_errors=True)  # of a run that failed it stays
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.trust.soak", description="A server at a steady mixed load, with restarts."
    )
    parser.add_argument("--minutes", type=float, default=240, metavar="N", help="how long (default: 240)")
    parser.add_argument("--rate", type=int, default=RATE, metavar="N", help=f"messages a second (default: {RATE})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: a new temporary folder)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a second copy of the picture, such as docs/soak.svg")
    options = parser.parse_args(arguments)
    out = options.out or Path(tempfile.mkdtemp(prefix="turtlemq-soak-"))
    try:
        summary = soak(options.minutes, options.rate, out)
    except Broken as error:
        print(f"\nFAILED: {error}\nEverything is in {out}.", file=sys.stderr)
        return 1
    if options.picture:
        shutil.copy(out / "soak.svg", options.picture)
    print(f"\n{'; '.join(told(summary))}\nWritten: {out / 'soak.svg'}, samples.jsonl, summary.json.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
