"""The servers of a client: which one gets the next request. In a cluster, its leader. Pure: time and randomness are arguments.

Without a cluster the client stays with one server, and moves on to the next when that one fails. A cluster tells its name in
every answer; then the client reads `GET /v1/cluster`, and sends requests to the leader of their shard, which saves a hop: the
topic tells the shard, and requests without a topic go to any node of a cluster with several. If a leader is lost, any other node
will do: it waits for the next leader, and forwards the request to it. Meanwhile the client asks for the topology again, at most
once in ASK_S.

A server with several shards tells in an answer which process has the topic (`X-Turtlemq-Owner`): further requests about that
topic go there. If that fails, any process will do. Of a topic with partitions it tells the processes of all (`partitions`).

A server that could not be reached is avoided for a while, twice as long each time: a leader behind another network costs a few
tries, and requests go through the other nodes.

>>> servers = Servers(("http://a", "http://b"), random=lambda: 0.0)
>>> servers.target(0.0)
Target(url='http://a', direct=False, topic='', partition='')
>>> servers.failed(servers.target(0.0), 0.0)
>>> servers.target(0.0).url
'http://b'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from turtlemq.client.partitions import PLACES_HEADER, Partitions, shard_of
from turtlemq.client.wire import Answer, Request

ASK_S = 0.2  # between two questions for the topology, at least; at most twice that
REFRESH_S = 60.0  # a client that meets no failure learns of new nodes after this time
AVOID_S = 1.0, 300.0  # a server that failed is avoided so long, at first and at most
DIRECT_HEADER, CLUSTER_HEADER = "X-Turtlemq-Direct", "x-turtlemq-cluster"
OWNER_HEADER = "x-turtlemq-owner"
NO_SHARD = -1  # of a request without a topic in a cluster of several shards, or with a topic whose shard cannot be told
OWNERS_MAX = 10_000  # topics whose process is remembered
_TOPICS = "/v1/topics/"
TOPOLOGY = Request("GET", "/v1/cluster")


class Target(NamedTuple):
    """Where a request goes. `direct`: to the leader, or the process with its topic, which must not forward it. `topic`: of the
    request, as its path has it. `partition`: of that topic, as its header names it."""

    url: str
    direct: bool
    topic: str = ""
    partition: str = ""


class Place(msgspec.Struct, frozen=True):
    """A shard in the answer of a cluster."""

    shard: int
    epoch: int = 0
    url: str | None = None


class Node(msgspec.Struct, frozen=True):
    """A node in the answer of a cluster."""

    url: str


class Topology(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/cluster`, as far as a client needs it."""

    cluster: str
    shards: int
    nodes: dict[str, Node]
    leaders: tuple[Place, ...]


def topic_of(path: str) -> str:
    """The topic of a path, as it is written there; empty if the path has none.

    >>> [topic_of(path) for path in ("/v1/topics/orders/messages?limit=1", "/v1/topics/orders?x", "/v1/topics", "/healthz")]
    ['orders', 'orders', '', '']
    """
    return path[len(_TOPICS) :].partition("?")[0].partition("/")[0] if path.startswith(_TOPICS) else ""


class _Failure(NamedTuple):
    """A server that failed, so many times in a row, at this epoch: it is avoided until then."""

    until_s: float
    times: int
    epoch: int


_decode = msgspec.json.Decoder(Topology).decode


class Servers:
    """The servers of one client, and the facts learned about them. Threads may share it: a race costs one more hop."""

    def __init__(self, urls: Sequence[str], random: Callable[[], float]) -> None:
        self._given, self._random = tuple(urls), random
        self._urls = self._given  # then the nodes of the cluster
        self._index = 0  # of the server to ask, unless a leader is known
        self._in_cluster = False
        self._shards = 1
        self._leaders: dict[int, Place] = {}  # by shard, those that are known; replaced at every change
        self._owners: dict[str, str] = {}  # of topics, in a server with several shards: the addresses of their processes
        self.partitions = Partitions()
        self._failures: dict[str, _Failure] = {}
        self._ask_at = 0.0  # for the topology, if it is wanted
        self._wanted_at = 0.0
        self._tls_only = all(url.startswith("https://") for url in self._given)

    @property
    def has_others(self) -> bool:
        """Another server can be asked, so that an attempt to connect need not take the whole time of a request."""
        return len(self._urls) > 1 or bool(self._owners) or bool(self.partitions) or len(self._leaders) > 1

    def target(self, now_s: float, path: str = "", ids: Sequence[str] = ()) -> Target:
        """Where the next request goes. `path`: of the request; `ids`: of the messages that it is about."""
        topic = topic_of(path)
        if self.partitions and (place := self.partitions.place(topic, ids)) and not self._is_avoided(place[0], now_s):
            return Target(place[0], True, topic, place[1])
        owner = None if topic in self.partitions else self._owners.get(topic)
        if owner is not None and not self._is_avoided(owner, now_s):
            return Target(owner, True, topic)
        leader = self._leaders.get(self._shard_of(topic))
        if leader is not None and leader.url is not None and not self._is_avoided(leader.url, now_s):
            return Target(leader.url, True, topic)
        return Target(self._urls[self._index % len(self._urls)], False, topic)

    def fetch_target(self, now_s: float, path: str) -> Target | None:
        """The partition to fetch from without waiting, before a fetch of all of them; None if that is not worth it."""
        if not self.partitions:
            return None
        topic = topic_of(path)
        place = self.partitions.next_place(topic, path)
        return Target(place[0], True, topic, place[1]) if place is not None and not self._is_avoided(place[0], now_s) else None

    def question(self, now_s: float) -> Target | None:
        """The node to ask for the topology now; None if there is no cluster, or nothing to ask. Counts as asked."""
        if not self._in_cluster or now_s < self._wanted_at or now_s < self._ask_at:
            return None
        self._ask_at = now_s + ASK_S * (1 + self._random())
        return Target(self._urls[self._index % len(self._urls)], False)

    # Answers

    def answered(self, target: Target, answer: Answer, now_s: float) -> None:
        """Learn from an answer. A refusal as unavailable lets the next request go to another server."""
        if CLUSTER_HEADER in answer.headers and not self._in_cluster:
            self._in_cluster, self._wanted_at = True, now_s
        if target.topic:
            self._learn_places(target, answer)
        shard = self._shard_of(target.topic)
        if answer.status in (502, 503):
            self._set_leader(shard, None)
            self._wanted_at = now_s
            self._move_on(target.url, now_s)
        elif answer.status == 421 and not target.partition:
            self._set_leader(shard, self._named(answer))
            self._wanted_at = now_s
        else:
            if target.url in self._failures:
                self._failures = {url: failure for url, failure in self._failures.items() if url != target.url}
            if shard != NO_SHARD and shard not in self._leaders and not target.direct:
                self._wanted_at = min(self._wanted_at, now_s)

    def _shard_of(self, topic: str) -> int:
        """The shard of a request about a topic, as its path has it. With one shard, all requests belong to it."""
        if self._shards == 1:
            return 0
        shard = shard_of(unquote(topic), self._shards) if topic else None
        return NO_SHARD if shard is None else shard

    def _set_leader(self, shard: int, place: Place | None) -> None:
        others = {number: one for number, one in self._leaders.items() if number != shard}
        self._leaders = others if place is None or shard == NO_SHARD else others | {shard: place}

    def _learn_places(self, target: Target, answer: Answer) -> None:
        """Remember the processes with a topic, or its partitions."""
        urls = [url.rstrip("/") for url in answer.headers.get(PLACES_HEADER, "").split() if self._may_use(url)]
        if target.partition:
            if answer.status == 421:
                self.partitions.forget(target.topic)
        elif len(urls) > 1:
            self.partitions.learn(target.topic, urls)
        elif not self._in_cluster:
            self._learn_owner(target, answer)

    def _learn_owner(self, target: Target, answer: Answer) -> None:
        """Remember the process with a topic. One that does not serve is forgotten: others wait for it."""
        owner = answer.headers.get(OWNER_HEADER)
        if answer.status == 421:
            place = self._named(answer)
            owner = None if place is None else place.url
        elif answer.status in (502, 503):
            owner = None
        elif owner is None:
            return
        others = {topic: url for topic, url in self._owners.items() if topic != target.topic}
        if owner is not None and self._may_use(owner) and len(others) < OWNERS_MAX:
            others[target.topic] = owner.rstrip("/")
        if others != self._owners:
            self._owners = others

    def failed(self, target: Target, now_s: float) -> None:
        """No answer came: avoid this server for a while."""
        known = self._failures.get(target.url)
        if known is None or now_s >= known.until_s:  # many requests may fail together: that counts once
            times = 1 if known is None else known.times + 1
            epoch = next((place.epoch for place in self._leaders.values() if place.url == target.url), 0)
            until_s = now_s + min(AVOID_S[1], AVOID_S[0] * 2.0 ** min(times - 1, 30))
            self._failures = self._failures | {target.url: _Failure(until_s, times, epoch)}
        self._wanted_at = now_s
        self._move_on(target.url, now_s)

    def learn(self, answer: Answer, now_s: float) -> None:
        """Take the answer to a question. One that is no topology is not asked for again soon."""
        self._wanted_at = now_s + REFRESH_S
        try:
            told = _decode(answer.body) if answer.status == 200 else None
        except msgspec.DecodeError:
            told = None
        if told is None or not told.cluster:
            self._leaders = {}
            return
        nodes = [url for node in told.nodes.values() if self._may_use(url := node.url.rstrip("/"))]
        current = self._urls[self._index % len(self._urls)]
        self._urls = tuple(dict.fromkeys((*self._given, *nodes)))
        self._index = self._urls.index(current) if current in self._urls else 0
        self._take_leaders(told, now_s)

    def _take_leaders(self, told: Topology, now_s: float) -> None:
        """Keep the leaders of all shards that have one. Those of others are asked for when a request needs them."""
        self._shards = max(1, told.shards)
        known = {place.shard: place for place in told.leaders if place.url is not None and self._may_use(place.url)}
        self._leaders = {shard: Place(shard, place.epoch, str(place.url).rstrip("/")) for shard, place in known.items()}
        if told.shards == 1 and not known:
            self._wanted_at = now_s
        again = [at for place in self._leaders.values() if (at := self._asks_again(place, now_s)) is not None]
        if again:
            self._wanted_at = min(again)

    def _asks_again(self, place: Place, now_s: float) -> float | None:
        """When to ask again because of a leader that has failed; None if it can be trusted."""
        url = str(place.url)
        failure = self._failures.get(url)
        if failure is None or now_s >= failure.until_s:
            return None
        if place.epoch > failure.epoch > 0:  # it was elected since
            self._failures = {name: one for name, one in self._failures.items() if name != url}
            return None
        # a lost leader is named until there is another one; one that is never reached is asked for rarely
        return now_s if failure.times == 1 else failure.until_s

    # The next server

    def _is_avoided(self, url: str, now_s: float) -> bool:
        failure = self._failures.get(url)
        return failure is not None and now_s < failure.until_s

    def _move_on(self, url: str, now_s: float) -> None:
        """Choose the next server, unless another thread has moved on from this one already."""
        urls, index = self._urls, self._index
        if urls[index % len(urls)] != url:
            return
        order = [(index + step) % len(urls) for step in range(1, len(urls) + 1)]
        self._index = next((at for at in order if not self._is_avoided(urls[at], now_s)), order[0])

    def _named(self, answer: Answer) -> Place | None:
        """The leader that a node names which does not lead."""
        try:
            url = msgspec.json.decode(answer.body)["error"]["leader_url"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return None
        return Place(0, 0, url.rstrip("/")) if isinstance(url, str) and self._may_use(url) else None

    def _may_use(self, url: str) -> bool:
        """Tokens of a client that uses TLS alone are not sent without it."""
        return url.startswith("https://" if self._tls_only else ("https://", "http://"))
