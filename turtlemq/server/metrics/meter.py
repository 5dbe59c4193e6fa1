"""Counters and histograms of the server itself: requests, refusals, batches, commits, ticks, lag of the event loop.

One object, made with the service; the code that does the work adds to it, once for a request or a batch. Counters of the engine
(`turtlemq.histogram`) are not repeated here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from turtlemq.histogram import FINE_SECONDS, Histogram
from turtlemq.server.metrics.delivery_steps import DeliverySteps
from turtlemq.server.metrics.loop_lag import LoopLag

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
MESSAGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000)
BYTES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)


class SocketFigures:
    """Accepted sockets: open ones and their limit, and how many were refused and how often accepting was paused since the
    start."""

    def __init__(self) -> None:
        self.open = self.most = self.refused = self.pauses = 0


@dataclass(frozen=True, slots=True)
class CopyFigures:
    """Figures of a replica's care for its copy, since the start of the process."""

    scrubbed_bytes: int = 0
    healed_files: int = 0
    skews_s: dict[str, float] = field(default_factory=dict)  # by node: the distance of its clock from the others'


class PushFigures:
    """Figures of callbacks, since the start of the process."""

    def __init__(self, outcomes: Iterable[str], breakers_open: Callable[[], int]) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(outcomes, 0))
        self.seconds = Histogram(SECONDS)
        self.breakers_open = breakers_open


@dataclass(slots=True)
class GrpcFigures:
    """Figures of gRPC since the start of the process."""

    streams: Counter[str] = field(default_factory=Counter)  # calls under way, by service
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)  # of streams, by service and kind
    ended: Counter[str] = field(default_factory=Counter)  # streams of consumers, by reason
    paused_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # reading stopped, by reason
    unknown_acks: int = 0
    sockets: SocketFigures = field(default_factory=SocketFigures)
    passed_on: Callable[[], int] | None = None  # open connections that the leader of the cluster serves; None: a single node
    gauges: Callable[[], dict[tuple[str, str], tuple[int, int]]] = dict  # by topic and group: unacknowledged, and the windows


class Meter:
    """All counters and histograms of a server since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by method, route and status
        self.durations: dict[str, Histogram] = {}  # by route, in seconds, without the wait of a long poll
        self.exemplars: dict[tuple[str, int], tuple[str, float, float]] = {}  # by route and bucket: trace id, seconds, Unix time
        self.rejected: Counter[str] = Counter()  # by error code
        self.in_flight = 0
        self.sockets = SocketFigures()
        self.produce_batch = Histogram(MESSAGES)
        self.fetch_batch = Histogram(MESSAGES)
        self.ack_batch = Histogram(MESSAGES)
        self.commit = Histogram(FINE_SECONDS)  # one write and one fdatasync
        self.commit_bytes = Histogram(BYTES)
        self.tick = Histogram(FINE_SECONDS)
        self.steps = DeliverySteps()
        self.answer_wait = Histogram(FINE_SECONDS)  # of an answer for the copies of a cluster
        self.proxied: Counter[str] = Counter()  # requests for another node's ears, by outcome
        self.etcd = Histogram(FINE_SECONDS)  # requests to the name server
        self.elections = self.handovers = self.isr_changes = 0  # of this process as leader
        self.copies: CopyFigures | None = None  # None: a single node
        self.push: PushFigures | None = None  # None: callbacks are off
        self.grpc: GrpcFigures | None = None  # None: gRPC is off
        self.transactions = Counter(done=0, conflict=0)  # by outcome
        self.replays = self.replayed = 0  # replays that run, and copies that they have made
        self.loop = LoopLag()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self.requests[method, route, status] += 1
        durations = self.durations.get(route)
        if durations is None:
            durations = self.durations[route] = Histogram(SECONDS)
        durations.add(seconds)

    def traced(self, route: str, seconds: float, trace_id: str, at_s: float) -> None:
        """Note the trace of an answered request: the exemplar of its bucket, until a later one is."""
        self.exemplars[route, bisect_left(SECONDS, seconds)] = (trace_id, seconds, at_s)
