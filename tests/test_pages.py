"""The pages, in a real browser: Chromium on a real server, as a person uses them. Without a browser only the plain tests run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from tests.harness.browser import NASTY, running_browser, watched_page, window
from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import cluster_of
from tests.harness.server_process import ROOT, Server, running
from turtlemq.server.auth import hash_of, new_token

PAGES = ROOT / "turtlemq" / "server" / "pages"
VENDOR = PAGES / "vendor"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("pages") / "data") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as started:
        yield started


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with window(browser) as found:
        yield found


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    with watched_page(context) as found:
        yield found


# Without a browser


def test_pages_are_served_with_a_policy_that_forbids_everything_foreign(server: Server) -> None:
    files = (
        "dashboard.js",
        "cluster.js",
        "style.css",
        "turtle.svg",
        "standalone.module.js",
        "uPlot.iife.min.js",
        "uPlot.min.css",
    )
    for path in ("/", "/cluster", "/docs", *(f"/pages/{file}" for file in files)):
        answer = server.call("GET", path)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        again = server.call("GET", path, headers={"If-None-Match": answer.headers["ETag"]})
        assert (again.status, again.data) == (304, b"")


@pytest.mark.parametrize(
    "name",
    [
        "..%2f__init__.py",
        "__init__.py",
        "%2e%2e%2f%2e%2e%2fapp.py",
        "nothing.js",
        "..",
        "vendor",
        "README.md",
        "vendor%2FREADME.md",
    ],
)
def test_nothing_else_is_served(server: Server, name: str) -> None:
    assert server.call("GET", f"/pages/{name}").status == 404


class _Inline(HTMLParser):
    """Notes every script and style that stands inside a page, and every address."""

    def __init__(self) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        self.addresses += [value for name, value in given.items() if name in ("src", "href") and value]


def test_pages_hold_no_inline_script_and_no_foreign_address() -> None:
    for file in PAGES.glob("*.html"):
        found = _Inline()
        found.feed(file.read_text())
        assert found.inline == []
        assert all(re.match(r"[a-z.]", address) and ":" not in address for address in found.addresses), "relative: a prefix works"
    for file in PAGES.glob("*.js"):
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), file.name
        assert not re.search(r"https?://", text), file.name


def test_files_of_other_projects_are_as_they_were_published() -> None:
    """`vendor/README.md` has versions, licences and checksums; the files are changed by an update alone."""
    told = dict(re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.MULTILINE))
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.iterdir() if file.name != "README.md"}
    assert told == found
    assert {name.partition("-")[0] for name in found if name.endswith("LICENSE.txt")} == {"htm", "preact", "uPlot"}


# With one


@pytest.mark.slow
def test_the_interface_page_shows_every_operation_with_a_command(server: Server, page: Page) -> None:
    page.goto(server.url + "/docs")
    document = server.ok("GET", "/openapi.json")
    wanted = {operation["operationId"] for methods in document["paths"].values() for operation in methods.values()}
    expect(page.locator("#operations article")).to_have_count(len(wanted))
    assert set(page.locator("#operations article").evaluate_all("found => found.map(one => one.id)")) == wanted
    produce = page.locator("#produce .curl").inner_text()
    assert produce.startswith("curl --json '{")
    assert produce.endswith(f"{server.url}/v1/topics/orders/messages")
    page.locator("#produce").get_by_text("Answers:").click()
    expect(page.locator("#produce")).to_contain_text("INVALID_FIRE_AT")
    links = page.locator("#operations a, #contents a").evaluate_all("found => found.map(one => one.getAttribute('href'))")
    missing = page.evaluate("links => links.filter(link => !document.getElementById(link.slice(1)))", links)
    assert missing == []


@pytest.mark.slow
def test_the_interface_page_sends_requests_with_the_token_of_the_tab(tmp_path: Path, context: BrowserContext) -> None:
    token, config = new_token(), tmp_path / "turtle.toml"
    config.write_text(f'[[tokens]]\nname = "me"\nhash = "{hash_of(token)}"\nrights = ["produce", "consume", "admin"]\n')
    with running(tmp_path / "data", "--config", str(config)) as server:
        page = context.new_page()
        page.goto(server.url + "/docs")
        produce = page.locator("#produce")
        produce.get_by_text("Try it").click()
        produce.get_by_role("button", name="Send").click()
        expect(produce.locator(".answer .pill")).to_have_text("401 Unauthorized")
        page.locator("#token").fill(token)
        page.get_by_role("button", name="Use").click()
        produce.get_by_label("topic").fill("tried")
        produce.get_by_label("body").fill(json.dumps({"id": "t1", "body": NASTY}))
        expect(produce.locator(".curl")).to_contain_text("/v1/topics/tried/messages")
        produce.get_by_role("button", name="Send").click()
        expect(produce.locator(".answer .pill")).to_have_text("201 Created")
        listed = page.locator("#listMessages")
        listed.get_by_text("Try it").click()
        listed.get_by_label("topic").fill("tried")
        listed.get_by_label("state").select_option("ready")
        expect(listed.locator(".curl")).to_have_text(f"curl '{server.url}/v1/topics/tried/messages?state=ready'")
        listed.get_by_role("button", name="Send").click()
        expect(listed.locator(".answer pre")).to_contain_text("<img src=x")  # as text, not as markup
        expect(listed.locator(".answer img")).to_have_count(0)
        drop = page.locator("#dropTopic")
        drop.get_by_text("Try it").click()
        drop.get_by_label("topic").fill("tried")
        drop.get_by_role("button", name="Send").click()
        drop.get_by_role("button", name="Really delete?").click()
        expect(drop.locator(".answer .pill")).to_have_text("200 OK")
        assert page.title() == "TurtleMQ: the HTTP interface"


@pytest.mark.slow
def test_the_cluster_page_of_a_single_node_says_so(server: Server, page: Page) -> None:
    page.goto(server.url + "/")
    page.get_by_role("link", name="Cluster").click()
    expect(page.locator("#state")).to_have_text("serving")
    expect(page.locator("#single")).to_contain_text("turtlemq cluster init --help")
    expect(page.locator("#cluster")).to_be_hidden()
    page.get_by_role("link", name="Dashboard").click()
    expect(page.locator("#cards")).to_contain_text("Sleeping")


ALIGNED = "cells => cells.map((cell) => getComputedStyle(cell).textAlign)"


def _cluster(drained: bool) -> dict[str, Any]:
    """Answers of a node whose cluster has lost one node, and copies its files to another one."""
    node = {"peer": "h:1", "zone": "", "version": "1", "drain": False, "format": 1, "free_bytes": 5 << 30, "clock_ms": 1}
    copy = {"replica": "r1", "state": "leads", "in_sync": True, "lsn": 900, "lag_bytes": 0, "lag_s": 0.0}
    copy |= {"clock_skew_ms": None, "copying": None}
    other = copy | {"node": "b", "state": "in sync", "lsn": 880, "lag_bytes": 2048, "lag_s": 1.5, "clock_skew_ms": 7}
    third = copy | {
        "node": NASTY,
        "state": "copies",
        "in_sync": False,
        "copying": {"bytes_done": 1 << 20, "bytes_total": 4 << 20},
    }
    place = {"shard": 0, "epoch": 3, "node": "a", "url": "http://127.0.0.1:1", "isr": ["a", "b"], "want": ["a", "b", "c"]}
    nodes = {"a": node | {"url": "http://127.0.0.1:1", "drain": drained}, "b": node | {"url": "http://127.0.0.1:2"}}
    topology = {"cluster": "prod", "revision": 7, "shards": 1, "replicas": 3, "min_isr": 2, "nodes": nodes, "leaders": [place]}
    own = {"cluster": "prod", "node": "a", "role": "leader", "state": "lead", "why": "", "name_server": True}
    shard = {"shard": 0, "node": "a", "epoch": 3, "lsn": 900, "covered_lsn": 880, "copies": [copy | {"node": "a"}, other, third]}
    return {"/v1/cluster": topology, "/v1/cluster/replica": own, "/v1/cluster/shards/0": shard}


@pytest.mark.slow
def test_the_cluster_page_shows_copies_and_lag(server: Server, page: Page) -> None:
    sent: list[str] = []
    drained = False

    def answer(route: Route) -> None:
        nonlocal drained
        path = urlsplit(route.request.url).path
        if route.request.method != "GET":
            sent.append(f"{route.request.method} {path} {route.request.post_data or ''}".strip())
            drained = route.request.method == "POST" if path.endswith("drain") else drained
        route.fulfill(json=_cluster(drained).get(path, {"outcome": "done"}))

    page.route("**/v1/cluster**", answer)
    page.goto(server.url + "/cluster")
    expect(page.locator("#name")).to_have_text("prod, revision 7")
    copies = page.locator("#copies tbody tr")
    expect(copies).to_have_count(3)
    expect(page.locator("#copies tr[data-node=b] td").nth(4)).to_have_text("2.0 KiB")
    expect(page.locator("#copies tr[data-node=b] td").nth(5)).to_have_text("1.5 s")
    expect(page.locator("#copies tr[data-node=b] td").nth(6)).to_have_text("+7 ms")
    expect(copies.nth(2)).to_contain_text("1.0 MiB of 4.0 MiB")
    expect(copies.nth(2).locator("th")).to_have_text(NASTY)
    expect(page.locator("#cards")).to_contain_text("2 of 3")
    expect(page.locator("#cards")).to_contain_text("25 %")
    expect(page.locator("#warnings")).to_contain_text("2 of 3 copies are in sync")
    expect(page.locator("#nodes tr[data-node=c]")).to_contain_text("gone")
    for table in ("#copies", "#nodes"):
        sides = [page.eval_on_selector_all(f"{table} {row} > *", ALIGNED) for row in ("thead tr", "tbody tr[data-node=b]")]
        assert sides[0] == sides[1], f"columns of {table} stand under their names"
    page.get_by_role("button", name="Let it lead").click()
    page.get_by_role("button", name="Let b lead?").click()
    expect(page.get_by_role("button", name="Let it lead")).to_be_visible()
    page.locator("#nodes tr[data-node=a]").get_by_role("button", name="Drain").click()
    page.get_by_role("button", name="Let a lead nothing?").click()
    expect(page.locator("#nodes tr[data-node=a]")).to_contain_text("drained")
    page.get_by_role("button", name="Undrain").click()
    page.get_by_role("button", name="Let a lead again?").click()
    expect(page.locator("#nodes tr[data-node=a]")).not_to_contain_text("drained")
    wanted = [
        'POST /v1/cluster/shards/0/handover {"to":"b"}',
        "POST /v1/cluster/nodes/a/drain {}",
        "DELETE /v1/cluster/nodes/a/drain",
    ]
    assert sent == wanted
    assert page.title() == "TurtleMQ: the cluster"


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason=MISSING)
def test_leadership_is_moved_on_the_page_of_a_standby(tmp_path: Path, context: BrowserContext) -> None:
    with running_etcd(tmp_path) as endpoint, cluster_of(tmp_path, endpoint, "abc") as cluster:
        cluster.start()
        leader = cluster.leader()
        cluster.until_in_sync()
        standby = next(node for node in cluster.nodes.values() if node is not leader)
        page = context.new_page()
        page.goto(f"{standby.server.url}/cluster")
        expect(page.locator("#copies tbody tr")).to_have_count(3)
        expect(page.locator("#cards")).to_contain_text("3 of 3")
        expect(page.locator("#warnings p")).to_have_count(0)
        expect(page.locator(f"#copies tr[data-node={leader.name}]")).to_contain_text("leader")
        row = page.locator(f"#copies tr[data-node={standby.name}]")
        row.get_by_role("button", name="Let it lead").click()
        page.get_by_role("button", name=f"Let {standby.name} lead?").click()
        expect(row).to_contain_text("leader")
        expect(page.locator("#foot")).to_contain_text("It is a leader")
        assert cluster.leader().name == standby.name
