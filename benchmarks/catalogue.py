"""All benchmarks in the order of their runs: those that only read the big states come before those that change them."""

from __future__ import annotations

from benchmarks import flow
from benchmarks.append import append, durable
from benchmarks.broker import broker
from benchmarks.cluster import cluster, failover
from benchmarks.cluster_moves import moves
from benchmarks.cluster_shards import sharded
from benchmarks.codec import codec
from benchmarks.fire import cold, fire
from benchmarks.growth import growth
from benchmarks.grpc import grpc, push
from benchmarks.http import http_hold, http_in, http_late, http_out
from benchmarks.lookups import cancel, forecast, lookup, tick
from benchmarks.maintenance import compact, seal
from benchmarks.memory import disk, memory
from benchmarks.partitions import partitions
from benchmarks.restart import restart
from benchmarks.run import Benchmark
from benchmarks.schedules import schedules
from benchmarks.transactions import transactions

LONG = (*(scenario.name for scenario in flow.SCENARIOS), "http-hold")  # minutes at full size: they run only if they are named
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
    sharded,
    moves,
    grpc,
    push,
    growth,
    cold,
    http_in,
    http_out,
    http_late,
    partitions,
    schedules,
    transactions,
    *flow.SCENARIOS,
    http_hold,
)
