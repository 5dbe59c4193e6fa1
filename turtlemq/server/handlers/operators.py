"""Handlers for operators of a cluster: the state of copies, handover, drain.

`/v1/cluster/replica` is about the process that answers; paths below `/v1/cluster/shards/` are answered by the shard's leader.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from aiohttp import web
from msgspec import Meta, Struct

from turtlemq.errors import InvalidArgument, NoCluster, Unavailable, UnknownShard
from turtlemq.server.auth import TOKEN_KEY
from turtlemq.server.incoming.body import read_as
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE

if TYPE_CHECKING:  # a single node loads nothing of replication
    from turtlemq.replica.cluster_state import Audit
    from turtlemq.replica.cluster_view import ClusterView
    from turtlemq.replica.lead import Lead
    from turtlemq.server.cluster_part import ClusterPart
    from turtlemq.server.service import Service


class Copied(Struct):
    """A copy whose files are made equal to the leader's: bytes in place, of so many in this round."""

    bytes_done: int
    bytes_total: int


class ReplicaStatus(Struct, kw_only=True):
    """The process that answers, and its copy of a shard. A single node has neither cluster nor replica."""

    cluster: str = ""
    node: str = ""
    shard: int = 0
    replica: str = ""
    role: str = "single"
    state: str = ""
    epoch: int = 0
    lsn: int | None = None
    complete: bool = True
    healthy: bool = True
    why: str = ""
    clock_ms: int = 0
    name_server: bool = False
    copying: Copied | None = None


class CopyStatus(Struct, kw_only=True):
    """One copy of a shard, as its leader knows it."""

    replica: str
    node: str
    state: str
    in_sync: bool
    lsn: int | None = None
    lag_bytes: int = 0
    lag_s: float = 0.0
    clock_skew_ms: int | None = None
    copying: Copied | None = None


class ShardStatus(Struct, kw_only=True):
    """A shard, as its leader knows it."""

    shard: int
    node: str
    epoch: int
    lsn: int
    covered_lsn: int
    copies: list[CopyStatus]


class HandoverTo(Struct, forbid_unknown_fields=True):
    """The node that should lead."""

    to: Annotated[str, Meta(min_length=1, max_length=64)]


async def replica(request: web.Request) -> web.Response:
    """GET /v1/cluster/replica"""
    return answer(replica_status(request.app[SERVICE]))


def replica_status(service: Service) -> ReplicaStatus:
    """The state of this process."""
    part, clock_ms = service.cluster, time.time_ns() // 1_000_000
    if part is None:
        return ReplicaStatus(state="serving" if service.serving else "starting", clock_ms=clock_ms)
    told = ReplicaStatus(
        cluster=part.options.name,
        node=part.options.node,
        shard=part.shard,
        role=part.role,
        clock_ms=clock_ms,
        name_server=part.view.is_fresh,
        why=part.refusal,
    )
    member, standby = part.member, part.standby
    if member is None:
        told.complete = False
        return told
    told.replica, told.state, told.complete = member.me, member.state.value, member.complete
    told.healthy = member.healthy and member.state.value != "stuck"
    told.epoch = max(member.epoch, member.seen.epoch)
    if part.lead is not None:
        told.lsn = part.lead.stream.lsn
    elif standby is not None:
        told.lsn = standby.lsn if member.complete and standby.is_known else None
        made = standby.progress
        told.copying = None if made is None else Copied(made.bytes_done, made.bytes_total)
    if member.state.value != "attach":  # a copy that is not attached tells why the leader was not followed
        told.why = service.not_serving if member.state.value == "stuck" else ""
    return told


async def shard(request: web.Request) -> web.Response:
    """GET /v1/cluster/shards/{shard}"""
    part, number = _shard_of(request)
    service = request.app[SERVICE]
    assert service.engine is not None, "it leads: else this raises"
    assert part.lead is not None
    return answer(shard_status(part, part.lead, number))


def shard_status(part: ClusterPart, lead: Lead, number: int) -> ShardStatus:
    """The copies of the shard that this process leads. Its own one is the first."""
    keys = part.decoded().shard(number)
    own = "" if part.member is None else part.member.me
    known = dict(keys.state.nodes) if keys.state is not None else {}
    attached = {**lead.copying, **lead.standbys}
    known |= {replica: each.hello.node for replica, each in attached.items()}
    busy = {each.hello.node for each in attached.values()} | {part.options.node}
    if part.shards > 1:  # a copy that has moved away is none of the shard any more
        known = {replica: node for replica, node in known.items() if node in keys.wanted or replica in {*attached, *keys.in_sync}}
    shown = {*attached, *keys.in_sync, *(replica for replica, node in known.items() if node not in busy)} - {own}
    copies = [CopyStatus(replica=own, node=part.options.node, state="leads", in_sync=True, lsn=lead.stream.lsn)]
    copies += [_copy(lead, replica, known[replica], replica in keys.in_sync) for replica in sorted(shown)]
    return ShardStatus(
        shard=number,
        node=part.options.node,
        epoch=lead.stream.epoch,
        lsn=lead.stream.lsn,
        covered_lsn=lead.covered_lsn,
        copies=copies,
    )


def _copy(lead: Lead, replica: str, node: str, in_sync: bool) -> CopyStatus:
    told = CopyStatus(replica=replica, node=node, state="away", in_sync=in_sync)
    if (each := lead.standbys.get(replica)) is not None:
        told.state, told.lsn = "in sync" if in_sync else "follows", each.acked
        told.lag_bytes, told.lag_s = lead.lag_bytes(replica), round(lead.lag_s(replica), 3)
        if (skew := lead.clocks.skews().get(replica)) is not None:
            told.clock_skew_ms = round(skew.ms)
    elif (each := lead.copying.get(replica)) is not None:
        told.state, told.copying = "copies", Copied(each.copied, each.to_copy)
    elif in_sync:
        told.lag_bytes, told.lag_s = lead.lag_bytes(replica), round(lead.lag_s(replica), 3)
    return told


async def handover(request: web.Request) -> web.Response:
    """POST /v1/cluster/shards/{shard}/handover: let another node lead, which must be in sync."""
    part, number = _shard_of(request)
    node = (await read_as(request, HandoverTo)).to
    await part.handover(node)
    return answer({"outcome": "handed over", "shard": number, "node": node})


async def drain(request: web.Request) -> web.Response:
    """POST /v1/cluster/nodes/{node}/drain: the node should lead nothing from now on."""
    from turtlemq.replica.intervene import intervene
    from turtlemq.replica.interventions import plan_drain

    part, node = _cluster_of(request), request.match_info["node"]
    by = _signed(request, part, "drain", node)
    with _name_server():
        done = await intervene(part.etcd, part.keys, lambda view: plan_drain(view, node, by))
    return _drained(node, "drained", done.view)


async def undrain(request: web.Request) -> web.Response:
    """DELETE /v1/cluster/nodes/{node}/drain: the node may lead again."""
    from turtlemq.replica.intervene import intervene
    from turtlemq.replica.interventions import plan_undrain

    part, node = _cluster_of(request), request.match_info["node"]
    with _name_server():
        done = await intervene(part.etcd, part.keys, lambda view: plan_undrain(view, node))
    return _drained(node, "may lead", done.view)


@contextmanager
def _name_server() -> Iterator[None]:
    """Turn failures of the name server into an answer that asks for another try."""
    from turtlemq.replica.etcd import EtcdError

    try:
        yield
    except EtcdError as error:
        raise Unavailable(f"{error}. Try again when the name server answers.") from error


def _drained(node: str, outcome: str, view: ClusterView) -> web.Response:
    leads = [number for number, shard in view.shards.items() if shard.lead is not None and shard.lead.node == node]
    return answer({"outcome": outcome, "node": node, "leads": leads})


def _signed(request: web.Request, part: ClusterPart, action: str, node: str) -> Audit:
    """A note about an intervention, with the name of the token."""
    from turtlemq.replica.cluster_state import Audit

    token = request.get(TOKEN_KEY)
    user = token.name if token is not None else ""
    at_ms = time.time_ns() // 1_000_000
    return Audit(at_ms=at_ms, node=part.options.node, user=user, action=action, details={"node": node})


def _cluster_of(request: web.Request) -> ClusterPart:
    part = request.app[SERVICE].cluster
    if part is None:
        raise NoCluster
    return part


def _shard_of(request: web.Request) -> tuple[ClusterPart, int]:
    part, given = _cluster_of(request), request.match_info["shard"]
    if not given.isascii() or not given.isdigit() or len(given) > 4:
        raise InvalidArgument(f"a shard is a number from 0 on, not {given!r:.40}")
    if int(given) != part.shard:
        raise UnknownShard(f"there is no shard {given}: the cluster has shard {part.shard}")
    return part, int(given)
