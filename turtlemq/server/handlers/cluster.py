"""Handlers about the cluster: its nodes, and the leaders of its shards."""

from __future__ import annotations

from aiohttp import web

from turtlemq import __version__
from turtlemq.server.outgoing.answers import ClusterAnswer, ClusterNode, ClusterShard
from turtlemq.server.outgoing.reply import answer
from turtlemq.server.request import SERVICE, urls_of

ALONE = "single"  # the name of a node without a cluster


async def topology(request: web.Request) -> web.Response:
    """GET /v1/cluster"""
    cluster = request.app[SERVICE].cluster
    if cluster is not None:
        return answer(cluster.topology())
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
            topics={},
            problems=[],
        )
    )
