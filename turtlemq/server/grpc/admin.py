"""`delay.DelayAdmin`: dead letters over gRPC, with the rights and the work of their HTTP operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from turtlemq.errors import InvalidArgument, headline
from turtlemq.model import BATCH_MESSAGES_MAX, DUE_MS_MAX
from turtlemq.server.auth import OPERATE, READ
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc.connection import Call
from turtlemq.server.grpc.context import Context
from turtlemq.server.grpc.messages import message
from turtlemq.server.grpc.storing import COMPRESSION, mark_of
from turtlemq.server.grpc.unary import Handler, streamed, unary
from turtlemq.server.handlers.dead import letters_by_id, pages_of
from turtlemq.server.incoming.batches import check_due
from turtlemq.server.request import distinct_ids, rules_for
from turtlemq.topic.dead_letters import DeadLetter, Filter

LIMIT, LIMIT_MAX = 100, 10_000
_Letter, _Page, _Summary, _Changed = (message(f"delay.{name}") for name in ("DeadLetter", "DeadPage", "DeadSummary", "Changed"))


def methods(context: Context) -> dict[str, Handler]:
    """All methods of this service, by path."""
    admin = Admin(context)
    one = {"List": ("ListDead", admin.page), "Summarize": ("DeadFilter", admin.summarize)}
    two = {"Requeue": ("RequeueDead", admin.requeue), "Delete": ("ChosenDead", admin.delete)}
    found = {name: unary(message(f"delay.{kind}"), handle) for name, (kind, handle) in (one | two).items()}
    found["Export"] = streamed(message("delay.DeadFilter"), admin.export)
    return {f"/delay.DelayAdmin/{name}": handler for name, handler in found.items()}


class Admin:
    """The handlers of the service."""

    def __init__(self, context: Context) -> None:
        self._context, self._service = context, context.service
        self._prefix = context.config.grpc_topic_prefix

    def _topic(self, call: Call, route_key: str, rights: tuple[str, ...]) -> str:
        return self._context.topic(call, self._prefix + route_key, rights)

    async def page(self, call: Call, asked: Any) -> Any:
        """A page of dead letters."""
        topic = self._topic(call, asked.filter.route_key, READ)
        limit = asked.limit or LIMIT
        if limit > LIMIT_MAX:
            raise InvalidArgument(f"limit is at most {LIMIT_MAX:,}")
        self._service.flow.answer_bytes.refuse_if_full()
        view = self._service.engine.topic(topic).view
        letters, cursor = view.dead_letters.page(_filter(asked.filter), limit, asked.cursor or None)
        await self._context.confirmed()
        return _Page(letters=[self._letter(topic, letter) for letter in letters], cursor=cursor or "")

    async def summarize(self, call: Call, asked: Any) -> Any:
        """Counts of dead letters by the headline of the error."""
        counts: Counter[str] = Counter()
        async for page in pages_of(self._service, self._topic(call, asked.route_key, READ), _filter(asked)):
            counts.update(headline(letter.error) for letter in page)
        await self._context.confirmed()
        return _Summary(total=counts.total(), errors=counts)

    async def export(self, call: Call, asked: Any) -> AsyncIterator[list[Any]]:
        """All dead letters of a filter."""
        topic = self._topic(call, asked.route_key, READ)
        async for page in pages_of(self._service, topic, _filter(asked)):
            await self._context.confirmed()
            yield [self._letter(topic, letter) for letter in page]

    async def requeue(self, call: Call, asked: Any) -> Any:
        """Let dead letters sleep again."""
        self._context.check_writable()
        topic, now = self._topic(call, asked.chosen.route_key, OPERATE), now_ms()
        start = asked.new_fire_at_ms or now + asked.delay_ms
        found = self._service.engine.topic(topic)
        check_due(start, now, rules_for(self._context.config, found.settings))
        last = start + (len(found.view.dead_letters) / asked.per_s * 1000 if asked.per_s > 0 else 0)
        if asked.per_s < 0 or last > DUE_MS_MAX:
            raise InvalidArgument("per_s is 0 or more, and the last of them must be due before May 2109")
        unknown, count, per_s = list[str](), 0, asked.per_s or None
        try:
            async for page in await self._chosen(topic, asked.chosen, unknown):
                due_ms = start + int(count * 1000 / per_s) if per_s else start
                engine = self._service.engine
                count += engine.requeue(topic, page, now_ms(), due_ms=due_ms, reset_attempts=not asked.keep_attempts, per_s=per_s)
                self._service.answer_polls_soon()
        finally:
            self._context.note(call, "requeue", topic, count, _only(asked.chosen.ids))
        await self._context.confirmed()
        return _Changed(count=count, unknown=unknown)

    async def delete(self, call: Call, asked: Any) -> Any:
        """Delete dead letters."""
        self._context.check_writable()
        topic, unknown, count = self._topic(call, asked.route_key, OPERATE), list[str](), 0
        try:
            async for page in await self._chosen(topic, asked, unknown):
                count += self._service.engine.delete_dead(topic, page, now_ms())
        finally:
            self._context.note(call, "dead_deleted", topic, count, _only(asked.ids))
        await self._context.confirmed()
        return _Changed(count=count, unknown=unknown)

    async def _chosen(self, topic: str, chosen: Any, unknown: list[str]) -> AsyncIterator[list[DeadLetter]]:
        """The chosen letters in pages: by id, or by filter. Messages that die meanwhile are left out."""
        if bool(chosen.ids) == chosen.HasField("filter"):
            raise InvalidArgument("give ids, or a filter: an empty one for all")
        if not chosen.ids:
            until = min(chosen.filter.to_ms or DUE_MS_MAX, now_ms())
            return pages_of(self._service, topic, _filter(chosen.filter, until))
        if len(chosen.ids) > BATCH_MESSAGES_MAX:
            raise InvalidArgument(f"at most {BATCH_MESSAGES_MAX:,} ids at once")
        return letters_by_id(self._service, topic, await distinct_ids(list(chosen.ids)), None, unknown)

    def _letter(self, topic: str, letter: DeadLetter) -> Any:
        mark = mark_of(letter.headers)
        return _Letter(
            id=letter.id,
            route_key=topic.removeprefix(self._prefix),
            payload=letter.body,
            compression=mark,
            original_fire_at_ms=letter.due_ms,
            attempts=letter.attempts,
            last_error=letter.error,
            created_at_ms=letter.created_ms,
            dropped_at_ms=letter.dropped_ms,
            group=letter.group,
            headers={name: value for name, value in letter.headers.items() if not mark or name != COMPRESSION},
        )


def _filter(asked: Any, to_ms: int = 0) -> Filter:
    return Filter(asked.group or None, asked.from_ms, to_ms or asked.to_ms or DUE_MS_MAX, asked.error or None)


def _only(ids: Sequence[str]) -> str:
    """The id of a request that is about one message alone; else empty."""
    return ids[0] if len(ids) == 1 else ""
