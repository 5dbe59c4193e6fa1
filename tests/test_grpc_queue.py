"""Publishing through `turtlemq.v1.Queue`: columns, batches as a whole, streams of requests, rights; cancel and reschedule."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.committer import Slow
from tests.harness.grpc_peer import CONNECT, ClientMessage, Peer, ServerMessage, Site, run_site, soon
from turtlemq.message_fields import NAMES
from turtlemq.model import Batch
from turtlemq.segment import format as f
from turtlemq.server.auth import Token, hash_of, new_token
from turtlemq.server.clock import now_ms
from turtlemq.server.grpc import batch_columns, statuses
from turtlemq.server.grpc.framing import frame
from turtlemq.server.grpc.http2 import CONNECTION_WINDOW
from turtlemq.server.grpc.messages import message
from turtlemq.server.handlers.produce import HEAVY_BYTES
from turtlemq.server.incoming import large_batches
from turtlemq.server.incoming.batches import DueRules
from turtlemq.server.pace import RATE_MIN

QUEUE, FAR, NOW = "/turtlemq.v1.Queue", 4 * 10**12, 1_800_000_000_000
Columns, Request, Reply, Named, Cancelled, When = (
    message(f"turtlemq.v1.{name}") for name in ("Batch", "PublishRequest", "PublishReply", "Named", "Cancelled", "When")
)


async def publish(peer: Peer, topic: str, number: int = 0, metadata: dict[str, str] | None = None, **columns: Any) -> Any:
    """The reply to one request, or the trailers of a refusal."""
    request = Request(topic=topic, number=number, batch=columns)
    return await peer.unary(f"{QUEUE}/Publish", request, Reply, **(metadata or {}))


async def replies(peer: Peer, stream: int, count: int) -> list[Any]:
    await soon(lambda: len(peer.messages[stream]) >= count)
    return [Reply.FromString(data) for data in peer.messages[stream]]


# Columns


def decode(columns: Any, rules: DueRules | None = None) -> Batch:
    steps = batch_columns.decode_slices(columns, NOW, rules or DueRules())
    while True:
        try:
            next(steps)
        except StopIteration as done:
            batch: Batch = done.value
            return batch


def by_row(columns: Any, i: int) -> tuple[Any, ...]:
    """One message of a batch, decoded on its own."""

    def value(column: Any, default: Any) -> Any:
        return default if not column else column[0] if len(column) == 1 else column[i]

    headers = value(columns.headers, None)
    return (
        columns.bodies[i],
        value(columns.ids, "") or None,
        value(columns.due_ms, 0) or NOW + value(columns.delay_ms, 0),
        value(columns.ttr_ms, 0),
        value(columns.flags, 0),
        value(columns.expires_ms, 0) or None,
        dict(headers.fields) or None if headers else None,
    )


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    def column(values: Any, default: Any) -> list[Any]:
        return [default] * len(batch) if values is None else list(values)

    optional = [column(getattr(batch, name), None) for name in NAMES]
    named = column(batch.ids, None), list(batch.due_ms), column(batch.ttr_ms, 0), column(batch.flags, 0)
    return list(zip(batch.bodies, *named, *optional, strict=True))


@st.composite
def batches(draw: st.DrawFn) -> Any:
    count = draw(st.integers(1, 30))

    def column(values: st.SearchStrategy[Any], one_for_all: bool = True) -> list[Any]:
        sizes = [0, count, 1] if one_for_all else [0, count]
        size = draw(st.sampled_from(sizes))
        return draw(st.lists(values, min_size=size, max_size=size))

    is_due = draw(st.booleans())
    texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=3)
    return Columns(
        bodies=[draw(st.sampled_from([b"1", b'"x"', b"[]", b'{"a": 1}'])) for _ in range(count)],
        ids=column(st.sampled_from(["", "a", "b"]), one_for_all=False),
        due_ms=column(st.sampled_from([0, 10**11, NOW, FAR])) if is_due else [],
        delay_ms=[] if is_due else column(st.integers(0, 10**9)),
        ttr_ms=column(st.integers(0, 10**6)),
        flags=column(st.sampled_from([0, 1, 2, 4, 5, 6])),
        expires_ms=column(st.sampled_from([0, FAR])),
        headers=[message("turtlemq.v1.Headers")(fields=one) for one in column(st.dictionaries(texts, texts, max_size=2))],
    )


@settings(deadline=None)
@given(batches())
def test_columns_mean_what_their_rows_mean(columns: Any) -> None:
    whole = Columns.FromString(columns.SerializeToString())
    assert rows_of(decode(whole)) == [by_row(columns, i) for i in range(len(columns.bodies))]


BAD: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "no messages": ({}, "INVALID_ARGUMENT", None),
    "too few values": ({"bodies": [b"1"] * 4, "ttr_ms": [1, 2, 3]}, "INVALID_MESSAGE", 3),
    "too many values": ({"bodies": [b"1"] * 4, "flags": [0] * 5}, "INVALID_MESSAGE", 4),
    "one id for all": ({"bodies": [b"1"] * 2, "ids": ["a"]}, "INVALID_ID", 1),
    "a bad id": ({"bodies": [b"1"] * 2, "ids": ["a", "b/c"]}, "INVALID_ID", 1),
    "seconds": ({"bodies": [b"1"] * 2, "due_ms": [FAR, 1_800_000_000]}, "INVALID_FIRE_AT", 1),
    "a time beyond all": ({"bodies": [b"1"] * 2, "due_ms": [FAR, (1 << 64) - 1]}, "INVALID_FIRE_AT", 1),
    "a delay beyond all": ({"bodies": [b"1"] * 2, "delay_ms": [(1 << 64) - 1]}, "INVALID_FIRE_AT", 0),
    "two times": ({"bodies": [b"1"] * 2, "due_ms": [0, FAR], "delay_ms": [1]}, "INVALID_FIRE_AT", 1),
    "a long lease": ({"bodies": [b"1"] * 2, "ttr_ms": [5, (1 << 32) - 1]}, "INVALID_MESSAGE", 1),
    "no such priority": ({"bodies": [b"1"] * 2, "flags": [0, 3]}, "INVALID_MESSAGE", 1),
    "no such flag": ({"bodies": [b"1"] * 2, "flags": [0, 8]}, "INVALID_MESSAGE", 1),
    "an expiry beyond all": ({"bodies": [b"1"] * 2, "expires_ms": [0, 1 << 63]}, "INVALID_MESSAGE", 1),
    "it could only die": ({"bodies": [b"1"] * 2, "due_ms": [FAR], "expires_ms": [0, NOW]}, "INVALID_MESSAGE", 1),
    "a bad header": ({"bodies": [b"1"] * 2, "headers": [{}, {"fields": {"": "x"}}]}, "INVALID_MESSAGE", 1),
    "no JSON": ({"bodies": [b"1", b"{"], "flags": [4]}, "INVALID_JSON", 1),
    "JSON of two bodies": ({"bodies": [b"1,2", b"[3", b"4]"], "flags": [4]}, "INVALID_JSON", 0),
    "no UTF-8": ({"bodies": [b"1", b'"\xff"'], "flags": [0, 4]}, "INVALID_JSON", 1),
    "deep JSON": ({"bodies": [b"1", b"1", b"[" * 101 + b"]" * 101], "flags": [4]}, "INVALID_JSON", 2),
    "a bad topic": ({"bodies": [b"1"]}, "INVALID_TOPIC", None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_column_names_the_index_and_stores_nothing(name: str, tmp_path: Path) -> None:
    columns, code, index = BAD[name]
    topic = "no topic" if code == "INVALID_TOPIC" else "t"

    async def story(made: Site) -> None:
        peer = await made.peer()
        refused = await publish(peer, topic, **columns)
        assert refused["turtlemq-code"] == code
        assert refused.get("turtlemq-index") == (None if index is None else str(index))
        stream = peer.begin(f"{QUEUE}/PublishStream")
        peer.send_raw(stream, frame([Request(topic=topic, number=7, batch=columns).SerializeToString()]))
        (told,) = await replies(peer, stream, 1)
        assert (told.number, told.error.code, told.error.topic) == (7, code, topic)
        assert (told.error.index if told.error.HasField("index") else None) == index
        assert list(made.engine.topics) == []

    run_site(tmp_path, story)


# Publishing


def test_a_batch_is_stored_with_all_of_its_columns(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer = await made.peer()
        columns: dict[str, Any] = {
            "ids": ["a", "b", "a"],
            "due_ms": [FAR],
            "ttr_ms": [5_000],
            "flags": [1, 4, 0],
            "expires_ms": [FAR + 1],
        }
        reply = await publish(peer, "t", 9, bodies=[b"\0", b'{"x": 1}', b"z"], headers=[{"fields": {"h": "v"}}], **columns)
        assert (reply.number, list(reply.ids), list(reply.duplicates)) == (9, ["a", "b", "a"], [2])
        found = [made.engine.get("t", id_) for id_ in "ab"]
        assert [one and (one.body, one.flags, one.ttr_ms, one.due_ms, one.expires_ms, one.headers) for one in found] == [
            (b"\0", 1, 5_000, FAR, FAR + 1, {"h": "v"}),
            (b'{"x": 1}', f.JSON, 5_000, FAR, FAR + 1, {"h": "v"}),
        ]
        given = await publish(peer, "t", bodies=[b"", b""], delay_ms=[0, 10**9])
        assert [made.state(id_) for id_ in given.ids] == ["ready", "sleep"]

    run_site(tmp_path, story)


def test_a_large_batch_is_stored_as_a_whole(tmp_path: Path) -> None:
    count = large_batches.LARGE + 7_000

    async def story(made: Site) -> None:
        peer = await made.peer()
        for ids in ([], [f"m{n}" for n in range(count)]):
            reply = await publish(peer, "t", bodies=[b"x"] * count, ids=ids, due_ms=[FAR])
            assert len(set(reply.ids)) == count
            assert list(reply.ids) == ids or not ids
        assert made.engine.stats("t").sleep == 2 * count
        again = await publish(peer, "t", bodies=[b"x"] * count, ids=[*ids[:-1], "new"], due_ms=[FAR])
        assert len(again.duplicates) == count - 1

    run_site(tmp_path, story)


@pytest.mark.parametrize("method", ["Publish", "PublishStream"])
def test_a_reply_waits_for_the_sync(method: str, tmp_path: Path) -> None:
    door = Slow()

    async def story(made: Site) -> None:
        peer = await made.peer()
        stream = peer.begin(f"{QUEUE}/{method}")
        peer.send_raw(stream, frame([Request(topic="t", batch={"bodies": [b"x"]}).SerializeToString()]), end=True)
        other = await made.peer()
        assert (await publish(other, "no topic"))["turtlemq-code"] == "INVALID_TOPIC", "others are served meanwhile"
        await asyncio.sleep(0.1)
        assert peer.messages[stream] == [], "not answered before it is durable"
        door.gate.set()
        await replies(peer, stream, 1)

    try:
        run_site(tmp_path, story, door=door)
    finally:
        door.gate.set()


def test_requests_of_one_read_share_a_commit_and_keep_their_order(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer = await made.peer()
        stream = peer.begin(f"{QUEUE}/PublishStream")
        sent = [
            Request(topic=("t", "u", "no topic")[n % 3], number=n, batch={"bodies": [b"x"] * (n + 1), "due_ms": [FAR]})
            for n in range(60)
        ]
        peer.send_raw(stream, frame([one.SerializeToString() for one in sent]), end=True)
        got = await replies(peer, stream, 60)
        assert [one.number for one in got] == list(range(60))
        assert [len(one.ids) for one in got] == [0 if n % 3 == 2 else n + 1 for n in range(60)]
        assert {one.error.code for one in got} == {"", "INVALID_TOPIC"}
        assert made.service.meter.commit.count <= 4, "two topics"
        assert await peer.status(stream) == statuses.OK

    run_site(tmp_path, story)


def test_heavy_and_light_requests_keep_their_order(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer = await made.peer()
        stream = peer.begin(f"{QUEUE}/PublishStream")
        for n in range(12):
            size = 200 if n % 3 else HEAVY_BYTES + 1
            batch = {"bodies": [b"x" * size], "ids": [f"m{n}"], "due_ms": [FAR]}
            peer.send_raw(stream, frame([Request(topic="t", number=n, batch=batch).SerializeToString()]))
        got = await replies(peer, stream, 12)
        assert [(one.number, list(one.ids)) for one in got] == [(n, [f"m{n}"]) for n in range(12)]
        assert made.engine.stats("t").sleep == 12

    run_site(tmp_path, story)


@pytest.mark.parametrize("end", ["answered", "refused", "reset"])
def test_ended_calls_give_the_window_of_their_connection_back(end: str, tmp_path: Path) -> None:
    door = Slow()

    async def story(made: Site) -> None:
        if end == "answered":
            door.gate.set()
        peer = await made.peer()
        body = b"x" * 16_000  # in one frame
        if end == "reset":
            for _ in range(6):
                stream = peer.begin(f"{QUEUE}/PublishStream")
                peer.send_raw(stream, frame([Request(topic="t", batch={"bodies": [body]}).SerializeToString()] * 60))
                await soon(lambda: not peer.unsent)
                peer.reset(stream)
        else:
            for _ in range(CONNECTION_WINDOW // len(body) + 10):
                await publish(peer, "no topic" if end == "refused" else "t", bodies=[body])
        door.gate.set()
        assert list((await publish(peer, "t", bodies=[body], ids=["last"])).ids) == ["last"]

    try:
        run_site(tmp_path, story, door=door)
    finally:
        door.gate.set()


def test_a_rate_slows_a_stream_and_refuses_a_call(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.engine.configure("t", rate_produce_per_s=20.0, rate_burst=10)
        peer = await made.peer()
        stream = peer.begin(f"{QUEUE}/PublishStream")
        request = Request(topic="t", batch={"bodies": [b"x"] * 10, "due_ms": [FAR]}).SerializeToString()
        peer.send_raw(stream, frame([request] * 3))
        got = await replies(peer, stream, 3)
        assert [one.error.code for one in got] == [""] * 3
        assert made.service.meter.grpc is not None
        assert made.service.meter.grpc.paused_s["rate"] > 0
        refused = await publish(peer, "t", bodies=[b"x"] * 10)
        assert (refused["turtlemq-code"], refused["grpc-status"]) == ("RATE_LIMITED", str(statuses.RESOURCE_EXHAUSTED))
        assert int(refused["grpc-retry-pushback-ms"]) > 0

    run_site(tmp_path, story)


@pytest.mark.parametrize(
    ("timeout", "flags", "is_late"), [("900m", 0, True), ("1500m", 2, True), ("1500m", 1, False), ("", 2, False)]
)
def test_a_call_whose_answer_would_come_too_late_is_refused(timeout: str, flags: int, is_late: bool, tmp_path: Path) -> None:
    """A second of work waits. Low priority may use half of a call's time."""

    async def story(made: Site) -> None:
        peer, pace = await made.peer(), made.service.flow.pace
        work = pace.begin(int(RATE_MIN), 0.0)
        metadata = {"grpc-timeout": timeout} if timeout else {}
        found = await publish(peer, "t", metadata=metadata, bodies=[b"x"], ids=["a"], due_ms=[FAR], flags=[flags])
        assert pace.waiting == work
        if is_late:
            assert (found["turtlemq-code"], int(found["grpc-retry-pushback-ms"]) > 900) == ("OVERLOADED", True)
            assert "t" not in made.engine.topics
            pace.end(work, 0.01)
            found = await publish(peer, "t", metadata=metadata, bodies=[b"x"], ids=["a"], due_ms=[FAR], flags=[flags])
        assert list(found.ids) == ["a"]

    run_site(tmp_path, story)


@pytest.mark.parametrize("over", ["call", "stream", "scheduler"])
def test_low_priority_leaves_a_fifth_of_a_rate_to_others(over: str, tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        made.engine.configure("t", rate_produce_per_s=0.02, rate_burst=10)
        peer = await made.peer()
        stream = peer.begin(CONNECT if over == "scheduler" else f"{QUEUE}/PublishStream")

        async def put(count: int, low: bool) -> str:
            """The code of the refusal, if it was refused."""
            columns: Any = {"bodies": [b"x"] * count, "due_ms": [FAR], "flags": [2 * low]}
            if over == "call":
                found = await publish(peer, "t", **columns)
                return str(found["turtlemq-code"]) if isinstance(found, dict) else ""
            if over == "stream":
                peer.send_raw(stream, frame([Request(topic="t", batch=columns).SerializeToString()]))
                return str((await replies(peer, stream, len(peer.messages[stream]) + 1))[-1].error.code)
            before = len(peer.messages[stream])
            one = {"route_key": "t", "fire_at_epoch_ms": FAR, "priority": 2 * low}
            peer.send_raw(stream, frame([ClientMessage(schedule=one).SerializeToString()] * count))
            await soon(lambda: len(peer.messages[stream]) >= before + count)
            return str(ServerMessage.FromString(peer.messages[stream][-1]).error.code)

        assert [await put(8, True), await put(1, True), await put(2, False)] == ["", "RATE_LIMITED", ""]

    run_site(tmp_path, story)


def test_a_server_that_refuses_the_past_and_long_delays(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer, now = await made.peer(), now_ms()
        late = await publish(peer, "t", bodies=[b"x"] * 2, due_ms=[now + 10_000, now - 10_000])
        assert (late["turtlemq-code"], late["turtlemq-index"]) == ("INVALID_FIRE_AT", "1")
        long = await publish(peer, "t", bodies=[b"x"] * 2, delay_ms=[0, 2 * 86_400_000])
        assert (long["turtlemq-code"], long["turtlemq-index"]) == ("EXCEEDS_MAX_DELAY", "1")

    run_site(tmp_path, story, reject_past=True, max_delay_days=1)


# Changes


def test_sleepers_are_cancelled_and_rescheduled(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer = await made.peer()
        made.put(["a", "b"], due_ms=FAR)
        made.put(["r"])
        moved = await peer.unary(f"{QUEUE}/Reschedule", When(topic="t", id="a", due_ms=FAR + 5), When)
        assert (moved.topic, moved.id, moved.due_ms) == ("t", "a", FAR + 5)
        for due_ms in (0, 1_800_000_000, 1 << 63):
            refused = await peer.unary(f"{QUEUE}/Reschedule", When(topic="t", id="a", due_ms=due_ms), When)
            assert refused["turtlemq-code"] == "INVALID_FIRE_AT"
        found = made.engine.get("t", "a")
        assert found is not None
        assert found.due_ms == FAR + 5
        done = await peer.unary(f"{QUEUE}/Cancel", Named(topic="t", ids=["a", "b", "x"]), Cancelled)
        assert (done.cancelled, dict(done.missed)) == (2, {"x": "unknown"})
        gone = await peer.unary(f"{QUEUE}/Reschedule", When(topic="t", id="x", due_ms=FAR), When)
        assert gone["turtlemq-code"] == "UNKNOWN_MESSAGE"
        missing = await peer.unary(f"{QUEUE}/Cancel", Named(topic="none", ids=["a"]), Cancelled)
        assert missing["turtlemq-code"] == "UNKNOWN_TOPIC"

    run_site(tmp_path, story)


# Rights


@pytest.mark.parametrize("right", ["read", "produce", "consume", "operate", "admin"])
def test_rights_decide_as_over_http(right: Any, tmp_path: Path) -> None:
    token = new_token()
    tokens = (Token("one", hash_of(token), (right,), ("t",)),)
    may_produce, may_change = right in ("produce", "admin"), right in ("produce", "operate", "admin")

    async def story(made: Site) -> None:
        made.put(["a", "b"], due_ms=FAR)
        peer, who = await made.peer(), {"authorization": f"Bearer {token}"}
        told = {
            "Publish": await publish(peer, "t", metadata=who, bodies=[b"x"]),
            "Reschedule": await peer.unary(f"{QUEUE}/Reschedule", When(topic="t", id="a", due_ms=FAR), When, **who),
            "Cancel": await peer.unary(f"{QUEUE}/Cancel", Named(topic="t", ids=["a"]), Cancelled, **who),
        }
        refused = {name: answer.get("turtlemq-code") for name, answer in told.items() if isinstance(answer, dict)}
        allowed = {"Publish": may_produce, "Reschedule": may_change, "Cancel": may_change}
        assert refused == {name: "FORBIDDEN" for name, may in allowed.items() if not may}
        elsewhere = await publish(peer, "other", metadata=who, bodies=[b"x"])
        assert elsewhere["turtlemq-code"] == "FORBIDDEN"
        stream = peer.begin(f"{QUEUE}/PublishStream", **who)
        sent = [Request(topic=topic, batch={"bodies": [b"x"]}).SerializeToString() for topic in ("t", "other")]
        peer.send_raw(stream, frame(sent))
        codes = [one.error.code for one in await replies(peer, stream, 2)]
        assert codes == ["" if may_produce else "FORBIDDEN", "FORBIDDEN"]
        bare = await publish(peer, "t", bodies=[b"x"])
        assert bare["turtlemq-code"] == "UNAUTHENTICATED"

    run_site(tmp_path, story, tokens=tokens)
