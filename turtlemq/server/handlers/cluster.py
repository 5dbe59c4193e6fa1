"""Handlers about the cluster: its nodes, and the leaders of its shards."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct, structs

from turtlemq import __version__
from turtlemq.server import trace
from turtlemq.server.auth import AUTH
from turtlemq.server.outgoing.answers import ClusterAnswer, ClusterNode, ClusterShard
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, query, time_left, urls_of
from turtlemq.server.topology_watch import WATCH

ALONE = "single"  # the name of a node without a cluster


class ClusterQuery(Struct, forbid_unknown_fields=True):
    """A long poll: the answer waits so many seconds, or until something has changed since the `revision` of an earlier one."""

    revision: Annotated[int, Meta(ge=0)] | None = None
    wait: Annotated[float, Meta(ge=0, le=60)] = 0


async def topology(request: web.Request) -> web.Response:
    """GET /v1/cluster"""
    asked, cluster, watch = query(request, ClusterQuery), request.app[SERVICE].cluster, request.app[WATCH]
    if cluster is not None:
        watch.use(cluster)
    if asked.revision is not None and asked.wait:
        await trace.waited(request, watch.after(asked.revision, min(asked.wait, time_left(request))))
    router, auth = request.app[SERVICE].router, request.app[AUTH]
    met = {} if router is None else router.partitioned()
    topics = {name: count for name, count in sorted(met.items()) if auth.may(request, name)}
    if cluster is not None:
        return answer(structs.replace(cluster.topology(), topics=topics))
    url = str(request.url.origin())
    urls = urls_of(request, request.app[SERVICE].siblings)
    return answer(
        ClusterAnswer(
            cluster="",
            revision=0,
            shards=len(urls),
            replicas=1,
            min_isr=1,
            hash="xxh3_64",
            nodes={ALONE: ClusterNode(url, version=__version__)},
            leaders=[ClusterShard(n, node=ALONE, url=own, isr=[ALONE], want=[ALONE]) for n, own in enumerate(urls)],
            topics=topics,
            problems=[],
        )
    )
