"""Output commit: no answer leaves a leader before the required copies have everything that it may tell of.

One wait, behind every handler, for refusals as well: that a message is unknown, or was cancelled, is a fact that a failover must
not take back. Refusals that tell nothing about stored messages do not wait. Without a cluster nothing here is called.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from aiohttp import web

from turtlemq.server.outgoing.reply import Answered, Reply
from turtlemq.server.request import SERVICE, time_left
from turtlemq.server.trace import STARTED

if TYPE_CHECKING:
    from turtlemq.replica.lead import Lead

_TOPICS, _COMMAND = "/v1/topics", "/v1/command"
_TELLS_NOTHING = frozenset({401, 403, 405, 408, 413, 415, 429})  # and all errors of the server


def applies(request: web.Request) -> bool:
    """Is this a request about stored messages?"""
    return request.path.startswith((_TOPICS, _COMMAND))


def check_writable(request: web.Request, lead: Lead) -> None:
    """Raise `NotEnoughReplicas` for a request that may change something while too few copies are in sync."""
    if applies(request) and request.method not in ("GET", "HEAD"):
        lead.check_writable()


def tells(status: int) -> bool:
    """Whether an answer of this status may tell of stored messages."""
    return status < 500 and status not in _TELLS_NOTHING


async def confirm(request: web.Request, lead: Lead, answered: Answered) -> None:
    """Return when an answer may go out. Raises `NotReplicated`, and takes back a fetch, if it may not."""
    if not applies(request) or not tells(answered.status):
        return
    if STARTED in request:  # a stream: each of its pages has waited
        return
    lsn = lead.stream.lsn
    try:
        await wait(request, lead, lsn)
    except BaseException:  # also if the client is gone meanwhile
        if isinstance(answered, Reply) and answered.undo is not None:
            answered.undo()
        raise
    if isinstance(answered, Reply) and answered.counts_copies:
        answered.add_copies(1 if lead.options.acks == "local" else lead.copies(lsn))


async def wait(request: web.Request, lead: Lead, lsn: int) -> None:
    """Return when the required copies have everything up to a record, or if answers do not wait for them."""
    if lead.options.acks == "local":
        lead.check_may_answer()
        return
    begun = perf_counter()
    await lead.covered(lsn, time_left(request))
    request.app[SERVICE].meter.answer_wait.add(perf_counter() - begun)


async def confirm_page(request: web.Request) -> None:
    """Return when the next page of a stream may be sent."""
    lead = request.app[SERVICE].lead
    if lead is not None:
        await wait(request, lead, lead.stream.lsn)
