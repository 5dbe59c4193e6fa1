"""All benchmarks in the order of their runs: those that only read the big states come before those that change them."""

from __future__ import annotations

from benchmarks.append import append, durable
from benchmarks.broker import broker
from benchmarks.cluster import cluster, failover
from benchmarks.codec import codec
from benchmarks.fire import cold, fire
from benchmarks.growth import growth
from benchmarks.grpc import grpc, push
from benchmarks.http import http_hold, http_in, http_late, http_out
from benchmarks.lookups import cancel, forecast, lookup, tick
from benchmarks.maintenance import compact, seal
from benchmarks.memory import disk, memory
from benchmarks.restart import restart
from benchmarks.run import Benchmark

LONG = ("http-hold",)  # ten minutes at full size: runs only if it is named
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
    cluster,
    failover,
    grpc,
    push,
    growth,
    cold,
    http_in,
    http_out,
    http_late,
    http_hold,
)
