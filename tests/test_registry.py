"""One registry for streams and callbacks: listings, shares over both transports, and clients that are lost or deleted."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.harness.browser import running_browser, watched_page, window
from tests.harness.cluster_process import eventually
from tests.harness.grpc_peer import Peer, site, soon
from tests.harness.grpc_process import grpc_running
from tests.harness.receiver import Reply, Request, receiving
from tests.harness.server_process import Server, run

LOOPBACK: dict[str, Any] = {"TURTLEMQ_PUSH_HOSTS": "127.0.0.0/8:*"}
CLIENTS = "/v1/topics/t/groups/default/clients"


def clients(server: Server) -> dict[str, dict[str, Any]]:
    """The clients of the group, by transport: there is one of each at most."""
    return {one["transport"]: one for one in server.ok("GET", CLIENTS)["clients"]}


def register(server: Server, url: str, **asked: Any) -> None:
    asked = {"url": url, "name": "hook", **asked}
    server.ok("POST", CLIENTS, asked)
    eventually(lambda: clients(server)["http"]["state"] == "active")


def test_streams_and_callbacks_share_messages_by_free_room(tmp_path: Path) -> None:
    done = threading.Event()

    def hold(_: Request) -> Reply:
        done.wait(60)
        return Reply()

    async def story(server: Server, port: int, receiver_url: str) -> None:
        peer = await Peer.connect(port)
        stream = peer.begin()
        peer.send(stream, {"register": {"route_key": "t", "client": "worker", "window": 4}})
        await peer.until(stream, "registered")
        await asyncio.to_thread(register, server, receiver_url)
        await asyncio.sleep(0.5)  # until both wait for messages
        server.put("t", *({"id": f"m{n}", "body": n} for n in range(6)))
        await soon(lambda: sum(one["unacked"] for one in clients(server).values()) == 6)
        found = clients(server)
        assert {transport: one["unacked"] for transport, one in found.items()} == {"grpc": 3, "http": 3}
        assert (found["grpc"]["name"], found["grpc"]["state"], found["grpc"]["window"]) == ("worker", "active", 4)
        assert found["grpc"]["beat_ms"] >= found["grpc"]["since_ms"]
        running_ones = [server.ok("GET", f"/v1/topics/t/messages/m{n}")["attempts"][-1]["consumer"] for n in range(6)]
        assert sorted(running_ones) == ["hook"] * 3 + ["worker"] * 3
        shown = run("clients", "t", "--url", server.url).stdout
        assert "worker" in shown
        assert receiver_url in shown
        peer.transport.abort()  # its deliveries go to the callback, as far as that has room
        await soon(lambda: set(clients(server)) == {"http"} and clients(server)["http"]["unacked"] == 4)
        done.set()
        await soon(lambda: server.ok("GET", "/v1/topics/t")["stats"]["history"] == 6)

    with grpc_running(tmp_path / "data", **LOOPBACK) as (server, port), receiving(hold) as receiver:
        asyncio.run(story(server, port, receiver.url))


def test_a_registration_that_leaves_or_is_deleted_is_listed_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(60), site(tmp_path) as made:
            registry = made.service.clients
            peer, stream = await made.stream({"register": {"route_key": "t"}}, x_request_id="mine")
            await peer.until(stream, "registered")
            other, second = await made.stream({"register": {"route_key": "t"}}, x_request_id="mine")
            (told,) = await other.until(second, "registered")
            assert [one.client for one in registry.of_topic("t")] == ["mine", told.stream]
            peer.send(stream, {"leave": {}})
            await soon(lambda: registry.get("t", "default", "mine").state == "leaving")
            peer.send(stream, {"register": {"route_key": "t"}})
            await soon(lambda: registry.get("t", "default", "mine").state == "active")
            made.service.fetches.drop_group("t", "default", 1)
            registry.drop("t", "default")
            for one, at in ((peer, stream), (other, second)):
                (error,) = await one.until(at, "error")
                assert error.code == "UNKNOWN_GROUP"
            assert registry.counts() == {"grpc": 0, "http": 0}
            peer.send(stream, {"register": {"route_key": "t"}})
            await soon(lambda: registry.counts()["grpc"] == 1)
            peer.half_close(stream)
            await soon(lambda: registry.counts()["grpc"] == 0)

    asyncio.run(story())


@pytest.mark.slow
def test_the_dashboard_shows_clients_with_share_and_state(tmp_path: Path) -> None:
    done = threading.Event()

    def hold(_: Request) -> Reply:
        done.wait(60)
        return Reply()

    async def register_stream(port: int) -> Peer:
        peer = await Peer.connect(port)
        peer.send(peer.begin(), {"register": {"route_key": "t", "client": "worker", "window": 8}})
        await peer.until(1, "registered")
        return peer

    patient = LOOPBACK | {"TURTLEMQ_GRPC_BEAT_S": "600"}  # the stream's event loop stands still, and answers no ping
    with grpc_running(tmp_path / "data", **patient) as (server, port), receiving(hold) as receiver, asyncio.Runner() as runner:
        peer = runner.run(register_stream(port))
        register(server, receiver.url, ttl=600)
        server.put("t", *({"id": f"m{n}", "body": n} for n in range(6)))
        runner.run(peer.until(1, "delivery", 3))
        with running_browser() as browser, window(browser) as context, watched_page(context) as page:
            page.goto(f"{server.url}/#/t/t/clients")
            rows = page.locator("#clients tbody tr")
            expect(rows).to_have_count(2)
            expect(rows.filter(has_text="gRPC stream")).to_contain_text("worker")
            expect(rows.filter(has_text="gRPC stream")).to_contain_text(re.compile("of [1248]"))  # it halves while messages wait
            expect(rows.filter(has_text="callback")).to_contain_text("active")
            expect(rows.filter(has_text="callback")).to_contain_text("%")
            page.screenshot(path=tmp_path / "clients.png")
            server.ok("PUT", f"{CLIENTS}/hook", {"paused": True})
            expect(rows.filter(has_text="callback")).to_contain_text("paused")
        done.set()
        peer.transport.abort()
        runner.run(soon(lambda: peer.is_lost))
