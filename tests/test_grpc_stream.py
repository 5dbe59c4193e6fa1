"""The stream of the Hyper Delay Server: schedule, deliver, acknowledge, and each way in which a stream can end."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.committer import Slow
from tests.harness.grpc_peer import ClientMessage, Site, site, soon
from turtlemq.model import Message, Priority
from turtlemq.server.auth import Token, hash_of, new_token
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc import statuses

REGISTER = {"register": {"route_key": "t"}}
FAR = 4 * 10**12
Story = Callable[[Site], Awaitable[None]]


def run(folder: Path, story: Story, **settings: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(120), site(folder, **settings) as made:
            await story(made)

    asyncio.run(whole())


def test_a_message_is_scheduled_delivered_and_acknowledged(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer, stream = await made.stream(REGISTER)
        (registered,) = await peer.until(stream, "registered")
        assert (registered.route_key, registered.group, registered.window) == ("t", "default", 256)
        due = now_ms() + 50
        headers, sent = {"a": "b"}, {"id": "m", "fire_at_epoch_ms": due, "payload": b"\0x", "compression": 7}
        peer.send(stream, {"schedule": {**sent, "headers": headers}})
        (ack,) = await peer.until(stream, "ack")
        assert (ack.id, ack.fire_at_epoch_ms, ack.duplicate, ack.route_key) == ("m", due, False, "t")
        (delivery,) = await peer.until(stream, "delivery")
        assert now_ms() >= due
        assert (delivery.id, delivery.payload, delivery.compression, delivery.attempt) == ("m", b"\0x", 7, 1)
        assert dict(delivery.headers) == headers
        assert made.state("m") == "reserve"
        peer.send(stream, {"ack": {"id": "m"}})
        await soon(lambda: made.state("m") == "history")
        peer.half_close(stream)
        assert await peer.status(stream) == statuses.OK

    run(tmp_path, story)


def test_an_ack_waits_for_the_sync(tmp_path: Path) -> None:
    door = Slow()

    async def story(made: Site) -> None:
        peer, stream = await made.stream(
            {"schedule": {"id": "m", "fire_at_epoch_ms": FAR, "route_key": "t"}}, {"beat": {"number": 7}}
        )
        peer.send(second := peer.begin(), {"beat": {"number": 8}})
        await peer.until(second, "beat")
        await asyncio.sleep(0.1)
        assert peer.received(stream, "ack") == [], "not answered before it is durable"
        door.gate.set()
        await peer.until(stream, "ack")

    try:
        run(tmp_path, story, door=door)
    finally:
        door.gate.set()


def test_messages_of_one_read_are_one_commit(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        one = {"fire_at_epoch_ms": FAR, "route_key": "t", "payload": b"x" * 20}
        peer, stream = await made.stream(*({"schedule": {**one, "id": f"m{n}"}} for n in range(300)))
        acks = await peer.until(stream, "ack", 300)
        assert [ack.id for ack in acks] == [f"m{n}" for n in range(300)]
        assert made.service.meter.commit.count < 10

    run(tmp_path, story)


def test_a_bad_message_is_refused_alone(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        good = {"fire_at_epoch_ms": FAR, "route_key": "t"}
        sent = [
            {**good, "id": "a"},
            {**good, "id": "-b"},
            {**good, "id": "c", "priority": 9},
            {**good, "id": "d", "fire_at_epoch_ms": 1},
            {**good, "id": "e", "fire_at_epoch_ms": 1 << 60},
            {**good, "id": "f", "route_key": "no topic"},
            {**good, "id": "g"},
        ]
        peer, stream = await made.stream(*({"schedule": one} for one in sent))
        assert sorted(ack.id for ack in await peer.until(stream, "ack", 2)) == ["a", "g"]
        errors = {error.id: error.code for error in await peer.until(stream, "error", 5)}
        wanted = {
            "-b": "INVALID_ID",
            "c": "INVALID_MESSAGE",
            "d": "INVALID_FIRE_AT",
            "e": "INVALID_FIRE_AT",
            "f": "INVALID_TOPIC",
        }
        assert errors == wanted

    run(tmp_path, story, grpc_past_grace_ms=500)


def test_a_late_repetition_of_a_known_id_is_a_duplicate(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["known"], due_ms=FAR)
        late = {"fire_at_epoch_ms": now_ms() - 10_000, "route_key": "t"}
        peer, stream = await made.stream({"schedule": {**late, "id": "known"}}, {"schedule": {**late, "id": "new"}})
        (ack,) = await peer.until(stream, "ack")
        assert (ack.id, ack.duplicate) == ("known", True)
        (error,) = await peer.until(stream, "error")
        assert (error.id, error.code) == ("new", "INVALID_FIRE_AT")

    run(tmp_path, story, grpc_past_grace_ms=500)


def test_a_delay_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer, stream = await made.stream({"schedule": {"id": "m", "delay_ms": 2 * 86_400_000, "route_key": "t"}})
        (error,) = await peer.until(stream, "error")
        assert error.code == "EXCEEDS_MAX_DELAY"

    run(tmp_path, story, max_delay_days=1)


# Ends of a stream


@pytest.mark.parametrize("end", ["half_close", "leave", "reset", "lost"])
def test_unacknowledged_deliveries_of_an_ended_stream_go_to_others(tmp_path: Path, end: str) -> None:
    async def story(made: Site) -> None:
        made.put(["a", "b"])
        peer, stream = await made.stream(REGISTER)
        await peer.until(stream, "delivery", 2)
        other, second = await made.stream(REGISTER)
        await other.until(second, "registered")
        if end == "half_close":
            peer.half_close(stream)
        elif end == "leave":
            peer.send(stream, {"leave": {"give_back": True}})
        elif end == "reset":
            peer.reset(stream)
        else:
            peer.transport.abort()
        again = await other.until(second, "delivery", 2)
        assert sorted(one.id for one in again) == ["a", "b"]
        is_same = end in ("half_close", "leave")
        assert {one.attempt for one in again} == {1 if is_same else 2}

    run(tmp_path, story)


def test_deliveries_that_the_socket_never_had_keep_their_attempt(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["big"], body=b"x" * 200_000)
        peer = await made.peer(reads=False)
        peer.send(stream := peer.begin(), REGISTER)
        await soon(lambda: made.state("big") == "reserve")
        await asyncio.sleep(0.05)
        assert peer.received(stream, "delivery") == [], "its window is full"
        peer.transport.abort()
        other, second = await made.stream(REGISTER)
        (again,) = await other.until(second, "delivery")
        assert again.attempt == 1

    run(tmp_path, story)


def test_a_failed_delivery_comes_again_after_its_delay(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["m"])
        peer, stream = await made.stream(REGISTER)
        await peer.until(stream, "delivery")
        peer.send(stream, {"ack": {"id": "m", "failed": True, "error": "no paper", "retry_delay_ms": 0}})
        again = (await peer.until(stream, "delivery", 2))[1]
        assert (again.id, again.attempt) == ("m", 2)

    run(tmp_path, story)


def test_a_stopping_server_drains_its_streams(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["a", "b"])
        peer, stream = await made.stream(REGISTER)
        await peer.until(stream, "delivery", 2)
        stop = asyncio.create_task(made.grpc.stop())
        await peer.until(stream, "drain")
        peer.send(stream, {"ack": {"id": "a"}})
        await soon(lambda: made.state("a") == "history")
        await stop
        assert await peer.status(stream) == statuses.UNAVAILABLE
        assert made.state("b") == "ready", "given back"

    run(tmp_path, story)


def test_a_silent_connection_is_given_up(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["m"])
        peer, stream = await made.stream(REGISTER)
        await peer.until(stream, "delivery")
        peer.transport.pause_reading()
        await soon(lambda: made.state("m") != "reserve")
        assert made.service.meter.grpc is not None
        assert made.service.meter.grpc.ended == {"silent": 1}

    run(tmp_path, story, grpc_beat_s=0.2)


def test_a_client_that_answers_pings_is_kept(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer, stream = await made.stream(REGISTER)
        await asyncio.sleep(4)
        assert not peer.is_lost
        peer.send(stream, {"beat": {"number": 3}})
        assert [beat.number for beat in await peer.until(stream, "beat")] == [3]

    run(tmp_path, story, grpc_beat_s=1)


# Windows and sharing


def test_a_window_bounds_unacknowledged_deliveries(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        ids = [f"m{n}" for n in range(20)]
        made.put(ids)
        peer, stream = await made.stream({"register": {"route_key": "t", "window": 3}})
        first = await peer.until(stream, "delivery", 3)
        await asyncio.sleep(0.1)
        assert len(peer.received(stream, "delivery")) == 3
        peer.send(stream, *({"ack": {"id": one.id}} for one in first))
        await peer.until(stream, "delivery", 6)
        await asyncio.sleep(0.1)
        assert len(peer.received(stream, "delivery")) == 6

    run(tmp_path, story)


def test_the_last_quarter_of_a_window_is_not_for_low_priority(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        low = [Message(b"x", due_ms=5, id=f"l{n}", priority=Priority.LOW) for n in range(20)]
        made.engine.submit("t", low, now_ms())
        peer, stream = await made.stream({"register": {"route_key": "t", "window": 8}})
        first = await peer.until(stream, "delivery", 6)
        await asyncio.sleep(0.1)
        assert len(peer.received(stream, "delivery")) == 6
        peer.send(stream, {"ack": {"id": first[0].id, "failed": True, "retry_delay_ms": 0}})
        again = (await peer.until(stream, "delivery", 7))[6]
        assert (again.id, again.attempt) == (first[0].id, 2), "a retry takes one of their places"
        await asyncio.sleep(0.1)
        assert len(peer.received(stream, "delivery")) == 7
        made.put(["a", "b"])
        assert [one.id for one in await peer.until(stream, "delivery", 9)][7:] == ["a", "b"]

    run(tmp_path, story)


def test_streams_of_one_key_share_its_messages(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peers = [await made.stream(REGISTER) for _ in range(4)]
        for peer, stream in peers:
            await peer.until(stream, "registered")
        made.put([f"m{n}" for n in range(20)])
        await soon(lambda: sum(len(peer.received(stream, "delivery")) for peer, stream in peers) == 20)
        assert [len(peer.received(stream, "delivery")) for peer, stream in peers] == [5, 5, 5, 5]

    run(tmp_path, story)


def test_messages_without_a_consumer_stay_ready(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer, stream = await made.stream({"schedule": {"id": "m", "route_key": "t"}})
        await peer.until(stream, "ack")
        await soon(lambda: made.state("m") == "ready")
        assert peer.received(stream, "delivery") == [], "scheduling does not subscribe"
        peer.send(stream, REGISTER)
        (delivery,) = await peer.until(stream, "delivery")
        assert delivery.attempt == 1

    run(tmp_path, story)


def test_an_ack_on_a_later_stream_counts(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["m"])
        peer, stream = await made.stream(REGISTER)
        await peer.until(stream, "delivery")
        other, second = await made.stream(REGISTER, {"ack": {"id": "m"}}, {"ack": {"id": "never"}})
        await soon(lambda: made.state("m") == "history")
        (error,) = await other.until(second, "error")
        assert (error.code, error.id) == ("UNKNOWN_MESSAGE", "never")

    run(tmp_path, story)


def test_a_lease_is_extended_and_a_message_cancelled(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.put(["m"])
        made.put(["s"], due_ms=FAR)
        peer, stream = await made.stream({"register": {"route_key": "t", "ttr_ms": 2_000}})
        await peer.until(stream, "delivery")
        peer.send(stream, {"extend": {"ids": ["m", "x"], "ttr_ms": 600_000}}, {"cancel": {"id": "s"}}, {"cancel": {"id": "m"}})
        states = {one.id: one.state for one in await peer.until(stream, "cancelled", 2)}
        assert states == {"s": "cancelled", "m": "reserve"}
        (error,) = await peer.until(stream, "error")
        assert (error.code, error.id) == ("UNKNOWN_MESSAGE", "x")
        await asyncio.sleep(2.5)
        assert made.state("m") == "reserve", "its first lease is over"

    run(tmp_path, story)


def test_a_rate_slows_the_client_and_refuses_nothing(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.engine.configure("t", rate_produce_per_s=20.0, rate_burst=10)
        one = {"fire_at_epoch_ms": FAR, "route_key": "t"}
        peer, stream = await made.stream(*({"schedule": {**one, "id": f"m{n}"}} for n in range(60)))
        await peer.until(stream, "ack", 60)  # a batch passes, and leaves a debt of some seconds
        peer.send(stream, {"schedule": {**one, "id": "next"}})
        await peer.until(stream, "ack", 61)
        assert peer.received(stream, "error") == []
        assert made.service.meter.grpc is not None
        assert made.service.meter.grpc.paused_s["rate"] > 0

    run(tmp_path, story)


# Access


def test_tokens_decide_on_each_message(tmp_path: Path) -> None:
    token = new_token()
    tokens = (Token("one", hash_of(token), ("produce",), ("t",)),)

    async def story(made: Site) -> None:
        bare, stream = await made.stream()
        assert await bare.status(stream) == statuses.UNAUTHENTICATED
        assert bare.trailers[stream]["turtlemq-code"] == "UNAUTHENTICATED"
        far = {"fire_at_epoch_ms": FAR}
        sent = REGISTER, {"schedule": {**far, "id": "a", "route_key": "t"}}, {"schedule": {**far, "id": "b", "route_key": "u"}}
        peer, stream = await made.stream(*sent, authorization=f"Bearer {token}")
        assert [ack.id for ack in await peer.until(stream, "ack")] == ["a"]
        errors = await peer.until(stream, "error", 2)
        assert [(error.code, error.route_key) for error in errors] == [("FORBIDDEN", "t"), ("FORBIDDEN", "u")]

    run(tmp_path, story, tokens=tokens)


def test_a_host_that_is_not_allowed_gets_permission_denied(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.grpc._auth.allows = lambda remote: False  # type: ignore[assignment]
        peer, stream = await made.stream(REGISTER)
        assert await peer.status(stream) == statuses.PERMISSION_DENIED

    run(tmp_path, story)


def test_compressed_messages_are_understood(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer, stream = await made.stream(grpc_encoding="gzip")
        packed = gzip.compress(ClientMessage(beat={"number": 5}).SerializeToString())
        peer.send_raw(stream, b"\1" + len(packed).to_bytes(4, "big") + packed)
        assert [beat.number for beat in await peer.until(stream, "beat")] == [5]

    run(tmp_path, story)


@pytest.mark.parametrize("raw", [b"\0\0\0\0\2\xff\xff", b"\2\0\0\0\0", b"\1\0\0\0\0", b"\0\0\0\0\5abc"])
def test_garbage_ends_the_stream(tmp_path: Path, raw: bytes) -> None:
    async def story(made: Site) -> None:
        peer, stream = await made.stream()
        peer.send_raw(stream, raw, end=True)
        assert await peer.status(stream) == statuses.INTERNAL

    run(tmp_path, story)


def test_a_deadline_ends_the_call(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer, stream = await made.stream(REGISTER, grpc_timeout="100m")
        assert await peer.status(stream) == statuses.DEADLINE_EXCEEDED

    run(tmp_path, story)
