"""The pages, in a real browser: Chromium on a real server, as a person uses them. Without a browser only the plain tests run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from tests.harness.etcd_process import MISSING, is_installed, running_etcd
from tests.harness.replica_nodes import cluster_of
from tests.harness.server_process import ROOT, Server, damaged_folder, running
from turtlemq.server.auth import hash_of, new_token

PAGES = ROOT / "turtlemq" / "server" / "pages"
NASTY = "<img src=x onerror=\"document.title='pwned'\">"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("pages") / "data") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium here: `make browser` installs it where that is allowed (Debian: apt-get install chromium)")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A window that fails the test for any error on the console and any request to somewhere else."""
    found = browser.new_context(viewport={"width": 1280, "height": 900})
    found.set_default_timeout(8_000)
    yield found
    found.close()


@pytest.fixture
def page(context: BrowserContext, server: Server) -> Iterator[Page]:
    found = context.new_page()
    wrong: list[str] = []
    found.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda asked: None if asked.url.startswith("http://127.0.0.1:") else wrong.append(asked.url))
    yield found
    assert wrong == []


# Without a browser


def test_pages_are_served_with_a_policy_that_forbids_everything_foreign(server: Server) -> None:
    for path in ("/", "/cluster", "/docs", "/pages/dashboard.js", "/pages/cluster.js", "/pages/style.css", "/pages/turtle.svg"):
        answer = server.call("GET", path)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        again = server.call("GET", path, headers={"If-None-Match": answer.headers["ETag"]})
        assert (again.status, again.data) == (304, b"")


@pytest.mark.parametrize("name", ["..%2f__init__.py", "__init__.py", "%2e%2e%2f%2e%2e%2fapp.py", "nothing.js", ".."])
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
        assert all(address.startswith("/") for address in found.addresses)
    for file in PAGES.glob("*.js"):
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), file.name
        assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}


# With one


@pytest.mark.slow
def test_the_dashboard_shows_a_topic_and_requeues_dead_letters(server: Server, page: Page) -> None:
    server.ok("PUT", "/v1/topics/orders", {"max_attempts": 1})
    server.put("orders", *({"body": i, "delay": 600 * i} for i in range(1, 6)), *({"id": f"d{i}", "body": i} for i in range(3)))
    while server.ok("GET", "/v1/topics/orders")["stats"]["dead"] < 3:
        for message in server.fetch("orders", wait=5):
            server.ack("orders", "-" + message["id"], error=NASTY)
    page.goto(server.url + "/")
    expect(page.locator("#state")).to_have_text("serving")
    row = page.locator("#topics tr[data-topic=orders]")
    expect(row.locator("td").nth(0)).to_have_text("5")  # asleep
    expect(row.locator("td").nth(4)).to_have_text("3")  # dead
    row.get_by_role("link", name="orders").click()
    expect(page.locator("#forecast .bar")).to_have_count(48)
    counts = page.locator("#forecast .front").evaluate_all("bars => bars.map(bar => Number(bar.dataset.count))")
    assert sum(counts) == 5
    expect(page.locator("#groups tbody th")).to_have_text("default")
    expect(page.locator("#lateness")).to_contain_text("scheduler")
    expect(page.locator("#dead .error")).to_have_text(NASTY)  # as text, not as markup
    expect(page.locator("#dead img")).to_have_count(0)
    page.get_by_role("button", name="Requeue all").click()
    page.get_by_role("button", name="Requeue 3?").click()
    expect(page.locator("#dead")).to_have_text("None.")
    assert server.ok("GET", "/v1/topics/orders")["stats"]["dead"] == 0
    assert page.title() == "TurtleMQ"


@pytest.mark.slow
def test_rates_are_differences_and_colours_can_be_chosen(server: Server, page: Page) -> None:
    server.put("rates", {"body": 1, "delay": 900})
    page.goto(server.url + "/#rates")
    row = page.locator("#topics tr[data-topic=rates]")
    expect(row.locator("td").nth(6)).to_have_text("0/s")  # needs two looks
    server.put("rates", *({"body": i, "delay": 900} for i in range(500)))
    expect(row.locator("td").nth(6)).to_have_text(re.compile(r"^[1-9][\d.,]*/s$"))
    expect(row.locator("td").nth(0)).to_have_text("501")
    page.locator("#filter").fill("no such name")
    expect(page.locator("#topics tbody tr[data-topic]")).to_have_count(0)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before  # it is kept


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
        page.goto(server.url + "/")
        page.get_by_role("link", name="Interface").click()
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
def test_damage_is_shown_once_the_tab_has_a_token(tmp_path: Path, context: BrowserContext) -> None:
    damaged_folder(tmp_path / "data")
    token = new_token()
    config = tmp_path / "turtle.toml"
    config.write_text(f'[[tokens]]\nname = "me"\nhash = "{hash_of(token)}"\nrights = ["produce", "consume", "admin"]\n')
    with running(tmp_path / "data", "--config", str(config)) as server:
        page = context.new_page()
        page.goto(server.url + "/")
        expect(page.locator("#state")).to_have_text("needs a token")
        page.locator("#token").fill(token)
        page.get_by_role("button", name="Use").click()
        expect(page.locator("#state")).to_have_text("serving")
        expect(page.locator("#warnings")).to_contain_text("Damage in t: delay_0000000000.bson")
        page.reload()
        expect(page.locator("#state")).to_have_text("serving")
        assert context.cookies() == []
        assert page.evaluate("JSON.stringify(localStorage)").find(token) == -1
        other = context.new_page()
        other.goto(server.url + "/")
        expect(other.locator("#state")).to_have_text("needs a token")
        assert token not in server.log


@pytest.mark.slow
def test_the_cluster_page_of_a_single_node_says_so(server: Server, page: Page) -> None:
    page.goto(server.url + "/")
    page.get_by_role("link", name="Cluster").click()
    expect(page.locator("#state")).to_have_text("serving")
    expect(page.locator("#single")).to_contain_text("turtlemq cluster init --help")
    expect(page.locator("#cluster")).to_be_hidden()
    page.get_by_role("link", name="Dashboard").click()
    expect(page.locator("#single")).to_have_count(0)


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
        expect(row).to_contain_text("leader", timeout=20_000)
        expect(page.locator("#foot")).to_contain_text("It is a leader", timeout=20_000)
        assert cluster.leader().name == standby.name
