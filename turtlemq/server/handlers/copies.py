"""Handlers of the copies of a shard: the comparison of all of them with the leader's files."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from aiohttp import web
from msgspec import Struct

from turtlemq.errors import NoCluster, UnknownShard
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, time_left

if TYPE_CHECKING:
    from turtlemq.replica.verify import CopyFound, Report, Verifier

VERIFY_S_MAX = 30  # then the request is answered, and the comparison goes on
MARGIN_S = 0.5  # before the end of the caller's time


class DifferingFile(Struct):
    """A file of a copy that is not as the leader's. `ranges`: its bytes that differ, from and to, by pieces of 4 MiB."""

    path: str
    ranges: list[tuple[int, int]]
    why: str


class ComparedCopy(Struct):
    """One copy in a comparison."""

    node: str
    replica: str
    state: Literal["equal", "differs", "not reached"]
    why: str
    files: list[DifferingFile]


class Comparison(Struct):
    """A comparison of all copies with the leader's files."""

    shard: int
    state: Literal["none", "running", "done", "failed"]
    lsn: int = 0
    last_lsn: int = 0
    files: int = 0
    bytes: int = 0
    bytes_total: int = 0
    seconds: float = 0.0
    why: str = ""
    copies: list[ComparedCopy] = []


async def verify(request: web.Request) -> web.Response:
    """POST /v1/cluster/shards/{shard}/verify: compare, and answer when it is done or the time is over."""
    shard, verifier = _verifier_of(request)
    comparing = verifier.begin()
    await asyncio.wait([comparing], timeout=max(0.0, min(VERIFY_S_MAX, time_left(request) - MARGIN_S)))
    return answer(_comparison(shard, verifier.report))


async def verification(request: web.Request) -> web.Response:
    """GET /v1/cluster/shards/{shard}/verify"""
    shard, verifier = _verifier_of(request)
    return answer(_comparison(shard, verifier.report))


def _verifier_of(request: web.Request) -> tuple[int, Verifier]:
    service = request.app[SERVICE]
    if service.lead is None and service.cluster is None and service.standby is None:
        raise NoCluster
    shard, given = 0 if service.cluster is None else service.cluster.shard, request.match_info["shard"]
    if given != str(shard):
        raise UnknownShard(f"there is no shard {given:.40}: the cluster has shard {shard}")
    assert service.engine is not None, "it leads: else this raises"
    assert service.care is not None
    return shard, service.care.verifier


def _comparison(shard: int, report: Report | None) -> Comparison:
    if report is None:
        return Comparison(shard, "none")
    copies = [_copy(copy) for copy in report.copies.values()]
    fields = {name: getattr(report, name) for name in Comparison.__struct_fields__ if name not in ("shard", "copies")}
    return Comparison(shard, copies=copies, **fields)


def _copy(copy: CopyFound) -> ComparedCopy:
    files = [DifferingFile(file.path, file.ranges, file.why) for file in copy.files]
    return ComparedCopy(copy.node, copy.member, copy.state, copy.why, files)  # type: ignore[arg-type]
