"""All benchmarks, in the order in which they run: those that change the big states come after those that only look."""

from __future__ import annotations

from benchmarks.append import append, durable
from benchmarks.broker import broker
from benchmarks.care import compact, seal
from benchmarks.codec import codec
from benchmarks.fire import cold, fire
from benchmarks.growth import growth
from benchmarks.http import http_hold, http_in, http_late, http_out
from benchmarks.look import cancel, forecast, lookup, tick
from benchmarks.memory import disk, memory
from benchmarks.restart import restart
from benchmarks.run import Benchmark

LONG = ("http-hold",)  # ten minutes at full size: only when it is named
ALL: tuple[Benchmark, ...] = (
    append,
    durable,
    fire,
    seal,
    compact,
    memory,
    disk,
    tick,
    forecast,
    lookup,
    cancel,
    restart,
    broker,
    codec,
    growth,
    cold,
    http_in,
    http_out,
    http_late,
    http_hold,
)
