"""Retry now: a message that waits for its next attempt, or is a dead letter, becomes ready at once.

A retry that waits in memory becomes due by an event of the Broker. A sleeping retry gets a new version in the Index that is due
now, and a dead letter is requeued (`requeue`): the next handoff makes both ready.
"""

from __future__ import annotations

from collections.abc import Sequence

from turtlemq.attempts import of_notes
from turtlemq.broker.failures import EndedDelivery
from turtlemq.errors import Conflict, UnknownGroup, UnknownMessage
from turtlemq.index.group_lookup import GroupDocument
from turtlemq.segment import format as f
from turtlemq.standing import shown
from turtlemq.topic import facts, message_view
from turtlemq.topic.dead_letters import read_letter
from turtlemq.topic.group_documents import retry_columns
from turtlemq.topic.requeue import requeue
from turtlemq.topic.stores import Stores


def retry_now(stores: Stores, id_: str, group: str | None, now_ms: int) -> list[str]:
    """Make a message ready in one group, or in each that waits for its next attempt or has a dead letter of it. Returns their
    names. Raises `Conflict` if there is none, `UnknownMessage` and `UnknownGroup`."""
    view = message_view.message(stores, id_)
    if view is None:
        raise UnknownMessage(f"{id_!r}: {UnknownMessage.__doc__}")
    if group is not None and view.groups and group not in view.groups:
        raise UnknownGroup(f"there is no group {group!r}")
    gathered = facts.gather(stores, [id_])
    names = [name for name in view.groups if group in (None, name)]
    asleep = [gathered.asleep[name, id_] for name in names if view.groups[name]["state"] == "sleep"]
    dead = [(name, id_) for name in names if view.groups[name]["state"] == "dead"]
    waiting = {name: offset for name in names if (offset := _waiting(stores, name, id_, gathered, now_ms)) is not None}
    if not asleep and not dead and not waiting:
        _refuse(view, group)
    for name, offset in waiting.items():
        stores.broker.retry_now(name, offset, now_ms)
    if asleep:
        _wake(stores, asleep, now_ms)
    if dead:
        letters = stores.dead_letters.find_many(dead).values()
        requeue(stores, [read_letter(letter) for letter in letters], now_ms, None, reset_attempts=True, per_s=None)
    return [*waiting, *(retry.pair[0] for retry in asleep), *(name for name, _ in dead)]


def _refuse(view: message_view.MessageView, group: str | None) -> None:
    """Raise the reason why there is nothing to retry."""
    state = view.state if group is None or group not in view.groups else shown(str(view.groups[group]["state"]))
    hint = ". It has not come due yet: reschedule it instead" if state == "sleep" else ""
    raise Conflict(f"{view.id!r} does not wait for another attempt: it is in state {state}{hint}", state=state)


def _waiting(stores: Stores, name: str, id_: str, gathered: facts.Gathered, now_ms: int) -> int | None:
    """The ready offset of a message whose back-off in memory is not over."""
    group = stores.broker.groups.get(name)
    for offset in (gathered.located.retries.get((name, id_)), gathered.located.documents.get(id_)):
        retry = None if group is None or offset is None else group.retries.get(offset)
        if retry is not None and retry.when_ms > now_ms:
            return offset
    return None


def _wake(stores: Stores, retries: Sequence[GroupDocument], now_ms: int) -> None:
    """Give sleeping retries a new version that is due now, durably. The same document ends the old version."""
    documents = [document for retry in retries if (document := stores.index.find(retry.id)) is not None]
    for renewed in (False, True):
        own = [document for document in documents if bool(document.meta.get("renewed")) == renewed]
        if own:
            attempts = [int(document.meta["attempt"]) for document in own]
            ended = [_as_ended(document, now_ms) for document in own]
            stores.index.store(retry_columns(ended, attempts, renewed, dict(enumerate(own))))


def _as_ended(retry: f.Document, when_ms: int) -> EndedDelivery:
    """A sleeping retry as it was when its last delivery ended, but due at another time."""
    (name, _, id_), meta = retry.id.partition("/"), retry.meta
    attempt, error = int(meta["attempt"]) - 1, str(meta["error"])
    notes = (int(meta["due"]), int(meta["offset"]), int(meta["epoch"]))
    return EndedDelivery(name, id_, retry, attempt, error, when_ms, *notes, of_notes(meta))
