"""Health, reflection and the administration of dead letters over gRPC; and gRPC's own library as a client of a real server."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from tests.harness.cluster_process import eventually
from tests.harness.grpc_peer import CONNECT, ClientMessage, Peer, ServerMessage, Site, site, soon
from tests.harness.grpc_process import grpc_running
from tests.harness.server_process import PATIENCE_S, ROOT, environment, running
from turtlemq.server.auth import Token, hash_of, new_token
from turtlemq.server.grpc import statuses
from turtlemq.server.grpc.framing import frame
from turtlemq.server.grpc.messages import DESCRIPTORS, message, services

Check, Health = message("grpc.health.v1.HealthCheckRequest"), message("grpc.health.v1.HealthCheckResponse")
ADMIN = "/delay.DelayAdmin"
REGISTER = {"register": {"route_key": "t"}}


def run(folder: Path, story: Any, **settings: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(120), site(folder, **settings) as made:
            await story(made)

    asyncio.run(whole())


def test_health_tells_whether_the_server_serves(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer = await made.peer()
        assert (await peer.unary("/grpc.health.v1.Health/Check", Check(), Health)).status == 1
        refused = await peer.unary("/grpc.health.v1.Health/Check", Check(service="no.Such"), Health)
        assert refused["grpc-status"] == str(statuses.NOT_FOUND)
        stream = peer.begin("/grpc.health.v1.Health/Watch")
        peer.send_raw(stream, frame([Check(service="delay.DelayScheduler").SerializeToString()]), end=True)
        await soon(lambda: peer.messages[stream])
        made.service.stopping = True
        await soon(lambda: len(peer.messages[stream]) == 2)
        made.service.stopping = False
        assert [Health.FromString(data).status for data in peer.messages[stream][:2]] == [1, 2]

    run(tmp_path, story)


def test_reflection_describes_every_service(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer = await made.peer()
        for version in ("v1", "v1alpha"):
            asked = message(f"grpc.reflection.{version}.ServerReflectionRequest")
            answer = message(f"grpc.reflection.{version}.ServerReflectionResponse")
            stream = peer.begin(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            sent = [asked(list_services="*"), asked(file_containing_symbol="delay.Delivery"), asked(file_by_filename="no")]
            peer.send_raw(stream, frame([one.SerializeToString() for one in sent]))
            await soon(partial(_has, peer, stream, 3))
            listed, file, missing = (answer.FromString(data) for data in peer.messages[stream])
            assert [one.name for one in listed.list_services_response.service] == services()
            stored = [one.SerializeToString() for one in DESCRIPTORS.file if one.name == "delay.proto"]
            assert list(file.file_descriptor_response.file_descriptor_proto) == stored
            assert missing.error_response.error_code == statuses.NOT_FOUND

    run(tmp_path, story)


def test_every_described_method_is_served(tmp_path: Path) -> None:
    async def story(made: Site) -> None:
        peer = await made.peer()
        names = [
            f"/{file.package}.{service.name}/{method.name}"
            for file in DESCRIPTORS.file
            for service in file.service
            for method in service.method
        ]
        streams = [peer.begin(name) for name in names]
        await peer.unary("/grpc.health.v1.Health/Check", Check(), Health)
        assert not [peer.trailers[stream] for stream in streams if peer.trailers.get(stream, {}).get("grpc-status") == "12"]
        refused = await peer.unary("/delay.DelayScheduler/Nothing", Check(), Health)
        assert refused["grpc-status"] == str(statuses.UNIMPLEMENTED)

    run(tmp_path, story)


async def _kill(made: Site, peer: Peer, *ids: str) -> None:
    """Let messages fail until they are dead."""
    made.engine.configure("t", max_attempts=1)
    made.put(ids)
    stream = peer.begin()
    peer.send(stream, REGISTER)
    await peer.until(stream, "delivery", len(ids))
    peer.send(stream, *({"ack": {"id": id_, "failed": True, "error": "broken\nat line 1"}} for id_ in ids))
    await soon(lambda: all(made.state(id_) == "dead" for id_ in ids))
    peer.half_close(stream)


def _has(peer: Peer, stream: int, count: int) -> bool:
    return len(peer.messages[stream]) == count


def _kinds(*names: str) -> list[Any]:
    return [message(f"delay.{name}") for name in names]


def test_dead_letters_are_listed_counted_exported_requeued_and_deleted(tmp_path: Path) -> None:
    listing, page, choice, summary, requeue, chosen, changed, letter = _kinds(
        "ListDead", "DeadPage", "DeadFilter", "DeadSummary", "RequeueDead", "ChosenDead", "Changed", "DeadLetter"
    )

    async def story(made: Site) -> None:
        peer = await made.peer()
        await _kill(made, peer, "a", "b", "c")
        every = {"route_key": "t"}
        found = await peer.unary(f"{ADMIN}/List", listing(filter=every, limit=2), page)
        assert [(one.id, one.route_key, one.last_error, one.attempts) for one in found.letters] == [
            ("a", "t", "broken\nat line 1", 1),
            ("b", "t", "broken\nat line 1", 1),
        ]
        rest = await peer.unary(f"{ADMIN}/List", listing(filter=every, cursor=found.cursor), page)
        assert [one.id for one in rest.letters] == ["c"]
        counted = await peer.unary(f"{ADMIN}/Summarize", choice(**every), summary)
        assert (counted.total, dict(counted.errors)) == (3, {"broken": 3})
        stream = peer.begin(f"{ADMIN}/Export")
        peer.send_raw(stream, frame([choice(**every).SerializeToString()]), end=True)
        assert await peer.status(stream) == statuses.OK
        assert [letter.FromString(data).id for data in peer.messages[stream]] == ["a", "b", "c"]
        again = requeue(chosen={**every, "ids": ["a", "x"]}, new_fire_at_ms=4 * 10**12)
        done = await peer.unary(f"{ADMIN}/Requeue", again, changed)
        assert (done.count, list(done.unknown)) == (1, ["x"])
        assert made.state("a") == "sleep"
        assert (await peer.unary(f"{ADMIN}/Delete", chosen(**every, filter={}), changed)).count == 2
        assert (await peer.unary(f"{ADMIN}/Delete", chosen(**every), changed))["turtlemq-code"] == "INVALID_ARGUMENT"

    run(tmp_path, story)


def test_administration_needs_its_rights(tmp_path: Path) -> None:
    token = new_token()
    tokens = (Token("reader", hash_of(token), ("consume",), ("t",)),)
    choice, summary, chosen, changed = _kinds("DeadFilter", "DeadSummary", "ChosenDead", "Changed")

    async def story(made: Site) -> None:
        made.put(["m"])
        peer, who = await made.peer(), {"authorization": f"Bearer {token}"}
        assert (await peer.unary(f"{ADMIN}/Summarize", choice(route_key="t"), summary, **who)).total == 0
        refused = await peer.unary(f"{ADMIN}/Delete", chosen(route_key="t", filter={}), changed, **who)
        assert refused["grpc-status"] == str(statuses.PERMISSION_DENIED)
        bare = await peer.unary(f"{ADMIN}/Summarize", choice(route_key="t"), summary)
        assert bare["grpc-status"] == str(statuses.UNAUTHENTICATED)
        assert (await peer.unary("/grpc.health.v1.Health/Check", Check(), Health)).status == 1

    run(tmp_path, story, tokens=tokens)


# A real server, and gRPC's own library


def test_grpcio_talks_to_a_real_server(tmp_path: Path) -> None:
    with grpc_running(tmp_path / "data", TURTLEMQ_GRPC_PAST_GRACE_MS="-1") as (server, port):
        with grpc.insecure_channel(f"127.0.0.1:{port}", compression=grpc.Compression.Gzip) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check", Check.SerializeToString, Health.FromString)
            assert check(Check(), timeout=PATIENCE_S, wait_for_ready=True).status == 1
            connect = channel.stream_stream(CONNECT, ClientMessage.SerializeToString, ServerMessage.FromString)
            sent = [ClientMessage(schedule={"id": f"m{n}", "payload": b"x" * 500, "route_key": "t"}) for n in range(200)]
            answers = list(connect(iter(sent), metadata=(("x-request-id", "mine"),), timeout=PATIENCE_S))
            assert [one.ack.id for one in answers] == [f"m{n}" for n in range(200)]
            assert server.ok("GET", "/v1/topics/t/messages/m199")["body_base64"]
            call = connect(iter(sent[:1]), metadata=(("x-request-id", "mine"),), timeout=PATIENCE_S)
            assert [one.ack.duplicate for one in call] == [True]
            assert dict(call.trailing_metadata())["x-request-id"] == "mine"
        example = [sys.executable, str(ROOT / "examples" / "grpc" / "stream.py"), f"127.0.0.1:{port}"]
        done = subprocess.run(example, capture_output=True, text=True, timeout=PATIENCE_S, env=environment())
        assert sorted(done.stdout.splitlines()) == ["due: call 0", "due: call 1", "due: call 2"], done.stderr
        metrics = server.call("GET", "/metrics").data.decode()
        assert 'turtlemq_grpc_messages_total{service="delay.DelayScheduler",kind="schedule"} 204' in metrics
        assert 'turtlemq_grpc_streams_ended_total{why="half_close"} 3' in metrics


def test_the_effect_of_a_killed_consumer_happens_once(tmp_path: Path) -> None:
    count, file = 200, tmp_path / "orders.db"

    def closed() -> list[str]:
        with closing(sqlite3.connect(file)) as database:
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'closed'").fetchone():
                return []  # the consumer has not begun
            return [number for (number,) in database.execute("SELECT number FROM closed")]

    with grpc_running(tmp_path / "data") as (server, port):
        server.ok("PUT", "/v1/topics/orders", {"max_attempts": 100})
        orders = [{"id": f"m{n}", "body_base64": base64.b64encode(b"%d" % n).decode()} for n in range(count)]
        server.put("orders", *orders[: count // 2])
        command = [sys.executable, str(ROOT / "examples" / "grpc" / "exactly_once.py"), f"127.0.0.1:{port}", str(file)]
        consumer = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
        eventually(lambda: file.exists() and len(closed()) > 20)
        consumer.kill()
        consumer.wait()
        server.put("orders", *orders[count // 2 :])  # the next consumer has something to do, however quick the first one was
        assert subprocess.run(command, env=environment(COUNT=str(count)), timeout=PATIENCE_S).returncode == 0
        assert sorted(closed(), key=int) == [str(n) for n in range(count)]
        eventually(lambda: server.ok("GET", "/v1/topics/orders")["stats"]["history"] == count)


def test_a_server_without_grpc_loads_nothing_of_it(tmp_path: Path) -> None:
    program = (
        "import sys, turtlemq.server.run; print([name for name in sys.modules if name.startswith(('h2', 'google.protobuf'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]", done.stderr
    with running(tmp_path / "data") as server:
        assert "turtlemq_grpc" not in server.call("GET", "/metrics").data.decode()
