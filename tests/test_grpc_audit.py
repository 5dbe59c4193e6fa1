"""Changes over gRPC in the audit log: each as the same change over HTTP, with its token, address and request id."""

from __future__ import annotations

from pathlib import Path

from tests.harness.grpc_peer import ClientMessage, Site, run_site
from turtlemq.server.audit import AuditEvent
from turtlemq.server.auth import Token, hash_of, new_token
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc import statuses
from turtlemq.server.grpc.framing import frame
from turtlemq.server.grpc.messages import message

FAR = 4 * 10**12
QUEUE, ADMIN = "/turtlemq.v1.Queue", "/delay.DelayAdmin"
Named, Cancelled, When = (message(f"turtlemq.v1.{name}") for name in ("Named", "Cancelled", "When"))
Requeue, Chosen, Changed = (message(f"delay.{name}") for name in ("RequeueDead", "ChosenDead", "Changed"))


def noted(made: Site) -> list[AuditEvent]:
    return made.audit.read(0, 100, lambda topic: True).result()


def kill(made: Site, *ids: str) -> None:
    """Let messages die."""
    made.engine.configure("t", max_attempts=1)
    made.put(ids)
    made.engine.tick(now_ms())
    made.engine.reserve("t", "default", len(ids), now_ms())
    made.engine.ack("t", "default", [f"-{id_}" for id_ in ids], now_ms())


def test_changes_are_noted_with_token_address_and_count(tmp_path: Path) -> None:
    secret = new_token()
    tokens = (Token("boss", hash_of(secret), ("admin", "consume"), ("*",)),)

    async def story(made: Site) -> None:
        kill(made, "d1", "d2", "d3")
        made.put(["a", "b", "c", "e", "f"], due_ms=FAR)
        who = {"authorization": f"Bearer {secret}", "x-request-id": "asked-1"}
        peer = await made.peer()
        moved = await peer.unary(f"{QUEUE}/Reschedule", When(topic="t", id="a", due_ms=FAR + 1), When, **who)
        assert moved.due_ms == FAR + 1
        for ids in (["a", "b", "x"], ["x"], ["c"]):  # the second changes nothing
            await peer.unary(f"{QUEUE}/Cancel", Named(topic="t", ids=ids), Cancelled, **who)
        stream = peer.begin(**who)
        cancels = [ClientMessage(cancel={"id": id_, "route_key": "t"}).SerializeToString() for id_ in ("e", "f")]
        peer.send_raw(stream, frame(cancels))
        await peer.until(stream, "cancelled", 2)
        again = Requeue(chosen={"route_key": "t", "ids": ["d1"]}, new_fire_at_ms=FAR)
        assert (await peer.unary(f"{ADMIN}/Requeue", again, Changed, **who)).count == 1
        for count in (2, 0):  # the second changes nothing
            chosen = Chosen(route_key="t", filter={})
            assert (await peer.unary(f"{ADMIN}/Delete", chosen, Changed, **who)).count == count
        found = noted(made)
        assert [(one.action, one.target, one.count) for one in found] == [
            ("reschedule", "a", 1),
            ("cancel", "", 2),
            ("cancel", "c", 1),
            ("cancel", "", 2),
            ("requeue", "d1", 1),
            ("dead_deleted", "", 2),
        ]
        assert {(one.token, one.client, one.topic, one.request_id) for one in found} == {("boss", "127.0.0.1", "t", "asked-1")}

    run_site(tmp_path, story, tokens=tokens)


def test_refused_calls_are_not_noted(tmp_path: Path) -> None:
    secret = new_token()
    tokens = (Token("reader", hash_of(secret), ("read",), ("t",)),)

    async def story(made: Site) -> None:
        made.put(["a"], due_ms=FAR)
        peer, who = await made.peer(), {"authorization": f"Bearer {secret}"}
        refused = [
            await peer.unary(f"{QUEUE}/Cancel", Named(topic="t", ids=["a"]), Cancelled, **who),
            await peer.unary(f"{QUEUE}/Reschedule", When(topic="t", id="a", due_ms=FAR), When, **who),
            await peer.unary(f"{ADMIN}/Delete", Chosen(route_key="t", filter={}), Changed, **who),
        ]
        assert [one["grpc-status"] for one in refused] == [str(statuses.PERMISSION_DENIED)] * 3
        assert noted(made) == []

    run_site(tmp_path, story, tokens=tokens)


def test_a_message_that_comes_too_slowly_exceeds_its_deadline() -> None:
    assert statuses.status_of("REQUEST_TIMEOUT") == statuses.DEADLINE_EXCEEDED
