"""The server as handlers of gRPC see it: service, configuration, rights, limits of topics and groups, and output commit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter

from turtlemq.errors import NotEnoughReplicas
from turtlemq.server.audit import Action, AuditEvent, AuditLog
from turtlemq.server.auth import CHANGE, CONSUME, Access, Auth
from turtlemq.server.clock import now_ms
from turtlemq.server.config import Config
from turtlemq.server.errors import Forbidden
from turtlemq.server.forward import leads
from turtlemq.server.grpc.connection import Call
from turtlemq.server.handlers.messages import cancel_ids
from turtlemq.server.metrics.meter import GrpcFigures
from turtlemq.server.request import allowed_group, allowed_topic
from turtlemq.server.service import Service
from turtlemq.settings import Settings

PAUSE_S = 10.0  # a stream waits so long for a rate, a budget or copies before its messages are refused
TROUBLE_S = 0.1  # between two looks whether enough copies are in sync
COVERED_S = 30.0  # time for the copies of a cluster to confirm an answer


@dataclass(slots=True)
class Context:
    """The parts that all handlers of one server share."""

    service: Service
    config: Config
    auth: Auth
    audit: AuditLog
    figures: GrpcFigures = field(default_factory=GrpcFigures)
    in_cluster: bool = False

    def topic(self, call: Call, name: str, rights: Access, may_create: bool = False) -> str:
        """A topic's name, if the call's token has one of these rights on it, and it exists or may be created."""
        self.auth.check(call.token, name, rights)
        return allowed_topic(self.service.engine, self.config, name, may_create)

    def may_consume(self, call: Call, topic: str) -> bool:
        """Whether the call's token may consume a topic."""
        try:
            self.auth.check(call.token, topic, CONSUME)
        except Forbidden:
            return False
        return True

    def group(self, topic: str, name: str) -> str:
        """A group's name, which may be new."""
        return allowed_group(self.service.engine, self.config, topic, name)

    def settings(self, topic: str) -> Settings:
        """The settings of a topic; of one that does not exist, those that it would have."""
        found = self.service.engine.topics.get(topic)
        return self.service.engine.settings if found is None else found.settings

    def client_of(self, call: Call) -> str:
        """The name under which rate limits count a call."""
        return self.auth.client_name(call.token, call.peer)

    def note(self, call: Call, action: Action, topic: str, count: int, target: str = "") -> None:
        """Note in the audit log that a call has changed so many messages of a topic. `target`: the id of one of them."""
        token = "" if call.token is None else call.token.name
        self.audit.note(AuditEvent(now_ms(), token, call.peer or "", action, topic, count, call.request_id, target))

    async def cancel(self, call: Call, topic: str, ids: list[str]) -> tuple[int, dict[str, str]]:
        """Cancel messages, if the call's token may. Returns how many are cancelled now, and the state of each that was not."""
        topic = self.topic(call, topic, CHANGE)
        count, missed = await cancel_ids(self.service, topic, ids)
        self.note(call, "cancel", topic, count, ids[0] if len(ids) == 1 else "")
        await self.confirmed()
        return count, missed

    @property
    def has_other_leader(self) -> bool:
        """Whether this is a node of a cluster, and does not lead."""
        return self.in_cluster and not leads(self.service)

    def check_writable(self) -> None:
        """Raise `NotEnoughReplicas` before a change while too few copies are in sync."""
        if self.service.lead is not None:
            self.service.lead.check_writable()

    async def until_writable(self) -> None:
        """Return when enough copies are in sync for a change. Raises `NotEnoughReplicas` after PAUSE_S: a client that reads
        no errors waits, and loses no message."""
        end = perf_counter() + PAUSE_S
        while True:
            try:
                self.check_writable()
                return
            except NotEnoughReplicas:
                if perf_counter() > end:
                    raise
            await asyncio.sleep(TROUBLE_S)

    async def confirmed(self) -> None:
        """Return when the required copies have all changes so far; at once without a cluster."""
        lead = self.service.lead
        if lead is None:
            return
        if lead.options.acks == "local":
            lead.check_may_answer()
            return
        begun = perf_counter()
        await lead.covered(lead.stream.lsn, COVERED_S)
        self.service.meter.answer_wait.add(perf_counter() - begun)
