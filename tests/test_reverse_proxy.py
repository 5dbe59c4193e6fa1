"""A server behind a reverse proxy that gives it a path prefix: clients, the command line, pages, and the address of callers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.harness.browser import running_browser, watched_page, window
from tests.harness.command_line import Line
from tests.harness.reverse_proxy import ReverseProxy, reverse_proxy
from tests.harness.server_process import Server, running
from turtlemq.client import Client
from turtlemq.client.aio import AsyncClient

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("proxy") / "data") as found:
        yield found


@pytest.fixture
def proxy(server: Server) -> Iterator[ReverseProxy]:
    with reverse_proxy(server.url) as found:
        yield found
        assert found.strange == []


def test_both_clients_and_the_command_line_work_under_a_prefix(proxy: ReverseProxy) -> None:
    with Client(proxy.url) as client:
        assert client.put("prefixed", {"n": 1}, id="a-1") == "a-1"
        (message,) = client.fetch("prefixed", wait=10)
        assert (message.id, message.body) == ("a-1", {"n": 1})
        assert client.ack("prefixed", ["a-1"]).acked == 1

    async def story() -> str:
        async with AsyncClient(proxy.url) as client:
            await client.put("prefixed", b"later", id="b", delay=900)
            return (await client.get("prefixed", "b")).state

    assert asyncio.run(story()) == "sleep"
    line = Line(proxy.url)
    assert line.json("list", "prefixed")[0]["id"] == "b"
    assert "prefixed" in line("find", "b")
    line("cancel", "prefixed", "b")
    assert line.json("get", "prefixed", "b")[0]["state"] == "cancelled"
    assert "/v1/topics/prefixed/messages" in proxy.paths


def test_the_server_believes_the_connection_not_x_forwarded_for(server: Server, proxy: ReverseProxy) -> None:
    with Client(proxy.url) as client:
        client.put("audited", b"later", id="c", delay=900)
        client.cancel("audited", "c")
        (event,) = [event for event in client.audit(topic="audited") if event.action == "cancel"]
    assert event.client == "127.0.0.1"
    told = server.call("GET", "/v1/status", headers={"X-Forwarded-For": "198.51.100.1, 10.0.0.1", "Forwarded": "for=10.0.0.1"})
    assert told.status == 200  # no such header keeps a caller out, or lets one in


def test_all_pages_work_under_a_prefix(server: Server, proxy: ReverseProxy) -> None:
    server.put("paged", {"id": "m", "body": 1, "delay": 900})
    with running_browser() as browser, window(browser) as context, watched_page(context) as page:
        page.goto(f"{proxy.url}/")
        page.get_by_role("link", name="paged", exact=True).click()
        page.get_by_role("link", name="Sleeping").click()
        expect(page.locator("tr[data-id]")).to_have_count(1)
        page.get_by_role("link", name="Interface").click()
        expect(page.locator("#produce .curl")).to_contain_text(f"{proxy.url}/v1/topics/orders/messages")
        page.goto(f"{proxy.url}/cluster")
        expect(page.locator("#state")).to_have_text("serving")
    assert any("/v1/topics/paged/messages" in path for path in proxy.paths)
