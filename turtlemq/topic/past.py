"""The view of one message at a past moment, from the files that retention still holds.

Its documents tell when it slept and until when, as far as seals have left them: a seal removes versions that had ended. From the
moment on at which it became ready, `broker.past` finds its deliveries in the journals. `turtlemq.standing` decides the
states, as for the present (`message_view`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from turtlemq import standing
from turtlemq.attempts import of_notes
from turtlemq.broker import past
from turtlemq.broker.past import Letter, Past, Retry
from turtlemq.errors import NotKept, UnknownMessage
from turtlemq.index.group_lookup import GroupDocument
from turtlemq.model import SEQ_COUNTER_BITS
from turtlemq.segment import format as f
from turtlemq.topic import facts
from turtlemq.topic.message_view import Details, MessageView, Moment, moments, summary_of, view_of
from turtlemq.topic.stores import Stores

Sleeping = dict[str, f.Document | GroupDocument]  # by group: the retry that slept


@dataclass(frozen=True, slots=True)
class PastView:
    """One message as it was."""

    view: MessageView
    at_ms: int
    known_from_ms: int  # deliveries before it are in no journal any more; 0: the journals tell of all
    due_known: bool = True  # else the version of the moment is gone, and the due time is that of a later one


@dataclass(frozen=True, slots=True)
class _Life:
    """A message of this id. An id may have had several, one after the other."""

    arrived: int
    versions: dict[int, f.Document]  # by the seq under which each was written
    ready: tuple[int, int, f.Document] | None = None  # its document in the ready log, or the notice that it was cancelled asleep


def message_at(stores: Stores, id_: str, at_ms: int) -> Generator[None, None, PastView]:
    """One message as it was at a moment. Yields between steps. Raises `UnknownMessage` if the topic did not hold it then, and
    `NotKept` if the journals of that moment are gone."""
    lives = _lives(stores, id_)
    chosen = [(i, life) for i, life in enumerate(lives) if life.arrived >> SEQ_COUNTER_BITS <= at_ms]
    journals = stores.broker.journals
    begin = past.known_from(*journals)
    if not chosen:
        raise UnknownMessage(f"the topic held no message {id_!r} at {at_ms}, or has removed it since", known_from_ms=begin)
    i, life = chosen[-1]
    if life.ready is None or life.ready[1] > at_ms:
        return _asleep(life, at_ms, begin)
    offset, ready_ms, document = life.ready
    view = view_of(document, "cancelled" if document.flags & f.NOTICE else "")
    if document.flags & f.NOTICE:
        view.timeline.append(Moment(ready_ms, "cancelled"))
        return PastView(view, at_ms, begin)
    if at_ms < begin:
        raise NotKept(
            f"the journals of {at_ms} are gone: states of delivered messages are known from {begin} on", known_from_ms=begin
        )
    following = lives[i + 1].ready if i + 1 < len(lives) else None
    retries = _retries(stores, id_, offset, stores.broker.ready.next_offset if following is None else following[0])
    due = [one for one in retries if one.ready_ms <= at_ms]
    known = Past(id_, (offset, document.seq), min(document.flags & f.PRIORITY, 2), due, at_ms)
    yield from known.read(*journals, ready_ms)
    known.cancelled |= stores.broker.ready.is_cancelled_ready(offset) and not known.cancelled_later and begin > ready_ms
    view.timeline.append(Moment(ready_ms, "ready"))
    _complete(view, known, _add_present(stores, known, retries))
    return PastView(view, at_ms, begin)


# Documents


def _lives(stores: Stores, id_: str) -> list[_Life]:
    """All messages of this id that files still tell of, oldest first."""
    versions = dict[int, dict[int, f.Document]]()
    ready = stores.broker.ready.documents_of(id_)
    for one in (*stores.index.arrivals.versions(id_), *(document for _, _, document in ready)):
        written = one.order if one.flags & f.MOVED else one.seq  # a copy by compaction is no new version
        own = versions.setdefault(one.arrived, {})
        if not one.flags & f.NOTICE or written not in own:  # a notice has the seq of the message
            own[written] = one
    last = {row[2].arrived: row for row in ready}
    return [_Life(arrived, versions[arrived], last.get(arrived)) for arrived in sorted(versions)]


def _asleep(life: _Life, at_ms: int, begin: int) -> PastView:
    """A message that had not come due."""
    written = [seq for seq in life.versions if seq >> SEQ_COUNTER_BITS <= at_ms]
    known = bool(written)
    document = life.versions[max(written) if known else min(life.versions)]
    view = view_of(document, "sleep")
    if document.flags & f.NOTICE:
        view.timeline = [Moment(view.created_ms, "created")]
    if not known:  # that version is gone; the one that ended it tells its due time, if it was the last before
        of, was = document.of or (0, 0)
        known = document.of is not None and of >> SEQ_COUNTER_BITS <= at_ms
        view.due_ms, view.body = was if known else view.due_ms, None
        view.timeline = [Moment(view.created_ms, "created")]
    return PastView(view, at_ms, begin, known)


def _retries(stores: Stores, id_: str, first: int, end: int) -> list[Retry]:
    """All retries of a message in the ready log, by offset. `first`: its own offset; `end`: of the next message of that id."""
    ready, found = stores.broker.ready, list[Retry]()
    for offset, ready_ms, document in ready.retries_of(id_):
        if first < offset < end:
            found.append(Retry(document.id.partition("/")[0], offset, ready_ms, document))
    return found


def _add_present(stores: Stores, known: Past, retries: Sequence[Retry]) -> Sleeping:
    """Add what documents of today tell of the moment: retries that slept then, which it returns, and dead letters from before the
    journals begin."""
    gathered, at_ms, found = facts.gather(stores, [known.id]), known.at_ms, Sleeping()
    later = [one for one in reversed(retries) if one.ready_ms > at_ms]
    sleeping: list[tuple[str, f.Document | GroupDocument]] = [(one.group, one.document) for one in later]
    sleeping += [(pair[0], retry) for pair, retry in gathered.asleep.items()]
    for name, document in sleeping:
        then = known.groups.get(name)
        if then is None or then.open or _written_ms(document) > at_ms or known.is_void(name, document):
            continue
        left = int(document.meta["offset"])
        then.left = left if then.left is None else then.left
        if then.left == left:
            found[name] = document
    for (name, _), letter in gathered.letters.items():
        if letter.due_ms <= at_ms and name not in known.letters:
            meta = letter.meta
            known.letters[name] = Letter(letter.due_ms, int(meta["attempt"]), str(meta["error"]), int(meta["offset"]))
        if letter.due_ms <= at_ms:
            known.note(name, of_notes(letter.meta))
    return found


def _written_ms(retry: f.Document | GroupDocument) -> int:
    """When a retry began to sleep: its seq may be older than its last attempt."""
    of = retry.of if isinstance(retry, f.Document) and not retry.flags & f.MOVED else None  # woken: a later version of it
    ended = max((one.ended_ms or 0 for one in of_notes(retry.meta)), default=0)
    return max(ended, (retry.order if of is None else of[0]) >> SEQ_COUNTER_BITS)


# The view


def _complete(view: MessageView, known: Past, asleep: Sleeping) -> None:
    """Add the state in every group and over all of them, attempts and timeline."""
    for retry in known.retries:
        known.note(retry.group, of_notes(retry.document.meta))
    for name, document in asleep.items():
        known.note(name, of_notes(document.meta))
    names = [*known.groups, *(name for name in known.letters if name not in known.groups)]
    standings = {name: standing.decide(known.facts(name)) for name in names}
    for name, one in standings.items():
        details = _details(known, name, one, asleep)
        view.groups[name] = {"state": standing.shown(one), **details, "summary": summary_of(one, details)}
    states = {*standings.values()} or {standing.decide(known.facts("") | standing.UNCLAIMED)}
    view.state = standing.over_groups(states)
    view.attempt = max((int(str(entry.get("attempt", 0))) for entry in view.groups.values()), default=0)
    view.attempts = known.attempts
    view.timeline += moments(view.attempts)
    told = {one.ended_ms for _, one in view.attempts}
    view.timeline += [Moment(one.at_ms, "dead", name, one.error) for name, one in known.letters.items() if one.at_ms not in told]
    view.timeline += [Moment(known.cancelled_ms, "cancelled")] if known.cancelled_ms is not None else []
    view.timeline.sort(key=lambda moment: moment.at_ms)


def _details(known: Past, name: str, one: str, asleep: Sleeping) -> Details:
    """The details of a standing in a group, as far as they are known."""
    then = known.groups.get(name)
    if one == "reserve" and then is not None:
        entry = next(entry for entry in then.open.values() if not entry.is_retry)
        return {"attempt": entry.attempt, "consumer": entry.consumer}
    if one == "sleep" and name in asleep:
        retry = asleep[name]
        woken = isinstance(retry, f.Document) and retry.of is not None and retry.seq >> SEQ_COUNTER_BITS > known.at_ms
        error = {"error": retry.meta["error"]} if retry.meta["error"] else {}
        due_ms = retry.of[1] if woken else retry.due_ms  # type: ignore[union-attr, index]
        return {"attempt": int(retry.meta["attempt"]) - 1, "due_ms": due_ms, **error}
    if one == "ready" and then is not None:
        waiting = next((entry for entry in then.open.values() if entry.is_retry), None)
        if waiting is not None:
            return {"attempt": waiting.attempt - 1, "due_ms": waiting.until_ms, "error": waiting.error}
        retries = known.valid_retries(name)
        return {"attempt": int(retries[-1].document.meta["attempt"]) - 1 if retries else 0}
    if one == "dead":
        return {"attempt": known.letters[name].attempt, "error": known.letters[name].error}
    if one == "history" and name in known.settled:
        last = known.settled[name]
        return {"attempt": last.attempt, "settled_ms": last.ended_ms, "outcome": last.outcome}
    return {} if one == "cancelled" else {"attempt": 0}
