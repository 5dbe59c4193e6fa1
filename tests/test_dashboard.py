"""The dashboard in a real browser: Chromium on a real server, as support and operators use it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect

from tests.harness.browser import NASTY, running_browser, watched_page, window
from tests.harness.cluster_process import eventually
from tests.harness.server_process import Server, damaged_folder, running
from turtlemq.server.auth import hash_of, new_token
from turtlemq.server.history_ring import COLUMNS

pytestmark = pytest.mark.slow
RETRY = "/v1/topics/{topic}/messages/{id}/retry"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("dashboard") / "data") as found:
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


def die(server: Server, topic: str, *ids: str, error: str = "no connection", attempts: int = 1) -> None:
    """Messages that a consumer fails until they are dead."""
    server.ok("PUT", f"/v1/topics/{topic}", {"max_attempts": attempts, "backoff": {"base": 0, "jitter": "none"}})
    server.put(topic, *({"id": id_, "body": {"order": id_}} for id_ in ids))

    def all_dead() -> bool:
        for message in server.fetch(topic, wait=1):
            server.ack(topic, "-" + message["id"], error=error)
        return bool(server.ok("GET", f"/v1/topics/{topic}")["stats"]["dead"] == len(ids))

    eventually(all_dead)


def rows(page: Page) -> Locator:
    return page.locator(".messages tbody tr[data-id]")


def faked(page: Page, path: str, change: Callable[[Any], Any]) -> None:
    """Change the answers of the server to GETs of a path."""

    def answer(route: Route) -> None:
        if route.request.method != "GET":
            route.fallback()
        else:
            route.fulfill(json=change(route.fetch().json()))

    page.route(path, answer)


# The first view


def test_one_field_filters_topics_and_finds_ids(server: Server, page: Page) -> None:
    server.put("find.orders", {"id": "order-17", "body": 1, "delay": 900}, {"body": 2, "delay": 900})
    server.put("find.mail", {"id": "order-17", "body": 1, "delay": 900}, {"id": "only-1", "body": {"a": NASTY}, "delay": 900})
    page.goto(server.url + "/")
    expect(page.locator("#state")).to_have_text("serving")
    asleep = server.ok("GET", "/v1/status")["states"]["sleep"]
    card = page.locator(".card", has_text="Sleeping").locator(".value")
    expect(card).to_have_text(f"{asleep:,}")
    page.keyboard.press("/")
    page.keyboard.type("find.ma")
    expect(page.locator("#topics tbody tr")).to_have_count(1)
    expect(page.locator("#topics tbody th")).to_have_text("find.mail")
    expect(page.locator("#found")).to_contain_text("No message has the id “find.ma”")
    expect(card).to_have_text(f"{asleep:,}")
    page.locator("#search").fill("order-17")
    expect(page.locator("#found li")).to_have_count(2)
    expect(page.locator("#topics")).to_contain_text("No topic matches “order-17”")
    expect(card).to_have_text(f"{asleep:,}")
    page.reload()  # the address has the search
    expect(page.locator("#search")).to_have_value("order-17")
    page.locator("#search").fill("only-1")
    expect(page.locator("#found li")).to_have_count(1)
    page.locator("#search").press("Enter")
    expect(page.locator("#drawer-title")).to_contain_text("only-1")
    expect(page.locator(".drawer pre").first).to_contain_text("<img src=x")  # as text, not as markup
    expect(page.locator(".drawer img")).to_have_count(0)
    assert urlsplit(page.url).fragment == "/t/find.mail?message=only-1"
    assert page.title() == "find.mail · TurtleMQ"


def test_enter_opens_a_message_also_before_it_is_found(server: Server, page: Page) -> None:
    server.put("enter", {"id": "enter-1", "body": 1, "delay": 900}, {"id": "enter-2", "body": 2})
    server.fetch("enter", wait=5)
    server.ok("POST", "/v1/topics/enter/ack", {"acks": ["-enter-2"], "retry_delay": 3_000})
    held: list[Route] = []
    is_entered = False
    page.route("**/v1/find?*", lambda route: route.continue_() if is_entered else held.append(route))
    page.goto(server.url + "/")
    page.keyboard.press("/")
    page.keyboard.type("enter-1")
    page.keyboard.press("Enter")
    expect(page.locator("#found")).to_contain_text("Looking for")
    is_entered = True
    for route in held:
        route.continue_()
    expect(page.locator("#drawer-title")).to_contain_text("enter-1")
    page.goto(server.url + "/#/?q=enter-2")  # without Enter: the list, which tells the next attempt
    expect(page.locator("#found li")).to_contain_text("next attempt")
    expect(page.locator(".drawer")).to_have_count(0)


def test_rates_are_differences_and_colours_can_be_chosen(server: Server, page: Page) -> None:
    server.put("rates", {"body": 1, "delay": 900})
    page.goto(server.url + "/")
    row = page.locator("#topics tr[data-topic=rates]")
    expect(row.locator("td").nth(5)).to_have_text("0")  # needs two looks
    server.put("rates", *({"body": i, "delay": 900} for i in range(500)))
    expect(row.locator("td").nth(5)).to_have_text(re.compile(r"^[1-9][\d.,k]*$"))
    expect(row.locator("td").nth(0)).to_have_text("501")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before  # it is kept


def test_a_full_disk_refusals_and_charts_are_seen(server: Server, page: Page) -> None:
    looks = 0

    def status(found: dict[str, Any]) -> dict[str, Any]:
        nonlocal looks
        looks += 1
        refused = {"DISK_FULL": 40 * looks, "RATE_LIMITED": 0, "INVALID_JSON": 9 * looks}
        memory = {"memory_bytes": 7 << 30, "memory_free_bytes": 90 << 20, "memory_total_bytes": 8 << 30}
        return found | {"disk_free_bytes": 5 << 20, "disk_bytes": 9 << 30, "rejected": refused} | memory

    def history(_: object) -> dict[str, list[float]]:
        now = int(time.time() * 1000)
        columns: dict[str, list[float]] = {name: [60.0] * 90 for name in COLUMNS}
        return columns | {
            "at_ms": [now - (90 - i) * 60_000 for i in range(90)],
            "produced": [7_200.0] * 90,
            "sleep": [12_345.0] * 90,
        }

    faked(page, "**/v1/status?*", status)
    faked(page, "**/v1/status/history?*", history)
    page.goto(server.url + "/")
    expect(page.locator("#warnings")).to_contain_text("The disk is nearly full: 5.0 MiB of 9.0 GiB are free")
    expect(page.locator("#warnings")).to_contain_text("507: the disk is full (DISK_FULL)")
    expect(page.locator(".card.bad", has_text="Free disk")).to_contain_text("5.0 MiB")
    expect(page.locator(".card.bad", has_text="Memory")).to_contain_text("90.0 MiB free")
    expect(page.locator("#warnings")).to_contain_text("The memory is nearly used up: 90.0 MiB of 8.0 GiB are free")
    expect(page.locator(".chart")).to_have_count(3)
    expect(page.locator(".chart").nth(0)).to_contain_text("in 120/s")
    expect(page.locator(".chart").nth(1)).to_contain_text("sleeping 12.3k")
    expect(page.locator(".chart canvas")).to_have_count(3)
    page.locator(".chart .u-over").nth(1).hover()
    expect(page.locator(".chart .when").nth(1)).not_to_have_text("now")


# Support


def test_support_follows_a_dead_letter_to_its_successful_retry(server: Server, page: Page) -> None:
    die(server, "story", "order-4711", error=f"{NASTY} refused\nTraceback: line 12", attempts=3)
    page.goto(server.url + "/")
    page.locator("#search").fill("order-4711")
    page.locator("#found a").click()
    drawer = page.locator(".drawer")
    default = drawer.locator("[data-group=default]")
    expect(default.locator(".state")).to_have_text("Dead")
    expect(default).to_contain_text("3")  # attempts
    expect(default.locator("pre.error")).to_contain_text("Traceback: line 12")
    expect(drawer.locator("#timeline li").last).to_contain_text("dead")
    retries = RETRY in server.ok("GET", "/openapi.json")["paths"]
    if retries:
        expect(drawer.locator("#attempts li")).to_have_count(3)
        default.get_by_role("button", name="Retry now").click()
        page.get_by_role("dialog", name="Retry order-4711 now?").get_by_role("button", name="Retry now").click()
    else:
        default.get_by_role("button", name="Requeue").click()
        page.get_by_role("dialog", name="Requeue order-4711?").get_by_role("button", name="Requeue").click()
    expect(page.locator("#toasts .good")).to_contain_text("order-4711 is ready" if retries else "1 requeued")
    expect(default.locator(".state")).not_to_have_text("Dead")
    (message,) = server.fetch("story", wait=30)
    server.ack("story", message["id"])
    expect(default.locator(".state")).to_have_text("Done")  # without a reload
    drawer.locator("#timeline .dead button").click()  # the message as it was then
    expect(drawer.locator(".moment")).to_contain_text("As it was at")
    expect(default.locator(".state")).to_have_text("Dead")
    expect(default.get_by_role("button")).to_have_count(0)
    drawer.get_by_role("button", name="Back to now").click()
    expect(default.locator(".state")).to_have_text("Done")
    page.keyboard.press("Escape")
    expect(drawer).to_have_count(0)
    assert page.title() == "story · TurtleMQ"


def test_dead_letters_are_requeued_by_cause_some_and_one(server: Server, page: Page) -> None:
    die(server, "causes", *(f"a-{n}" for n in range(33)), error=NASTY)
    server.put("causes", *({"id": f"b-{n}", "body": n} for n in range(5)))
    for message in server.fetch("causes", wait=30, max=5):
        server.ack("causes", "-" + message["id"], error="timeout")
    page.goto(server.url + "/#/t/causes/dead")
    expect(page.locator("#causes .error")).to_have_text([NASTY, "timeout"])
    page.locator("#causes li", has_text=NASTY).get_by_role("button", name="Requeue 33").click()
    page.get_by_role("button", name="Requeue", exact=True).last.click()
    expect(page.locator("#toasts")).to_contain_text("33 requeued")
    expect(rows(page)).to_have_count(5)
    page.get_by_label("Select b-1").check()
    page.get_by_label("Select b-3").check()
    page.get_by_role("button", name="Requeue selected").click()
    page.get_by_role("dialog").get_by_role("button", name="Requeue").click()
    expect(page.locator("#toasts")).to_contain_text("2 requeued")
    expect(rows(page)).to_have_count(3)
    page.locator("tr[data-id=b-4]").get_by_role("button", name="Requeue").click()
    page.keyboard.press("Escape")  # changed one's mind
    expect(page.locator("dialog")).to_have_count(0)
    page.get_by_label("Select all of this page").check()
    page.get_by_role("button", name="Delete selected").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#toasts")).to_contain_text("3 deleted")
    expect(page.locator(".messages")).to_contain_text("No dead letters. Good.")
    expect(page.locator("#toasts .toast")).to_have_count(3)  # they stay
    page.locator("#toasts").get_by_label("Close").first.click()
    expect(page.locator("#toasts .toast")).to_have_count(2)


def test_causes_are_named_and_groups_that_never_had_it_too(server: Server, page: Page) -> None:
    trace = "Traceback (most recent call last):\n  File \"work.py\", line 3, in work\nKeyError: 'customer'\n"
    id_ = "order-" + "3f2c9a7e" * 9  # is not cut
    die(server, "traced", id_, error=trace)
    server.ok("PUT", "/v1/topics/traced/groups/later", {"start": "latest"})
    assert server.ok("GET", "/v1/topics/traced/dead/summary")["errors"] == {"KeyError: 'customer'": 1}
    assert len(server.ok("GET", "/v1/topics/traced/dead?error=KeyError:%20%27customer%27")["messages"]) == 1
    page.goto(server.url + "/#/t/traced/dead")
    expect(page.locator("#causes .error")).to_have_text("KeyError: 'customer'")
    expect(rows(page).locator(".error")).to_have_text("KeyError: 'customer'")
    assert rows(page).locator("th").evaluate("cell => cell.scrollWidth <= cell.clientWidth")
    assert rows(page).locator(".cause").evaluate("cell => cell.clientWidth") >= 280  # the body and others leave it room
    rows(page).locator("th a").click()
    expect(page.locator(".drawer-head .state")).to_have_text(["Dead"])
    expect(page.locator("[data-group=later]")).to_contain_text("Not seen")
    expect(page.locator("[data-group=later]")).not_to_contain_text("Done")
    expect(page.locator("[data-group=default] pre.error")).to_contain_text("line 3, in work")


def test_pages_filters_and_the_forecast_lead_to_messages(server: Server, page: Page) -> None:
    server.put("lists", *({"id": f"{'ab'[n % 2]}-{n:03}", "body": n, "delay": 3_600 + n} for n in range(120)))
    page.goto(server.url + "/#/t/lists/sleep")
    expect(rows(page)).to_have_count(50)
    first = rows(page).first.get_attribute("data-id")
    page.get_by_role("button", name="Next →").click()
    expect(page.locator("tr[data-id=a-050]")).to_have_count(1)
    page.get_by_role("button", name="Next →").click()
    expect(rows(page)).to_have_count(20)
    expect(page.get_by_role("button", name="Next →")).to_be_disabled()
    page.get_by_role("button", name="← Previous").click()
    page.get_by_role("button", name="← Previous").click()
    expect(page.locator(f"tr[data-id={first}]")).to_have_count(1)
    page.get_by_label("Id begins with").fill("b-11")
    expect(rows(page)).to_have_count(5)
    page.reload()
    expect(page.get_by_label("Id begins with")).to_have_value("b-11")
    expect(rows(page)).to_have_count(5)
    page.get_by_label("Id begins with").fill("c")
    expect(page.locator(".messages")).to_contain_text("No message matches.")
    page.get_by_role("link", name="Overview").click()
    expect(page.locator("#forecast .marks span")).to_have_text([re.compile(r"\d\d:[03]0")] * 4)
    column = page.locator("#forecast .bars a").first
    count = int(column.get_attribute("data-count") or 0)
    assert 0 < count <= 120
    page.get_by_label("as it would be with a spread of").select_option("1 h")
    expect(page.locator("#forecast")).to_contain_text(re.compile(r"at most \d+ in 30 min instead of \d+"))
    expect(page.locator("#forecast .bars a i.before").first).to_be_visible()
    page.get_by_label("as it would be with a spread of").select_option("10 min")
    expect(page.locator("#forecast")).to_contain_text("This spread is shorter than a column")
    page.get_by_label("as it would be with a spread of").select_option("none")
    expect(page.locator("#forecast")).not_to_contain_text("instead of")
    expect(page.locator("#forecast .bars i.before")).to_have_count(0)
    column.click()
    expect(rows(page)).to_have_count(min(50, count))
    assert "from=" in page.url
    for message in server.fetch("lists", max=200):
        server.ack("lists", message["id"])
    server.put("lists", *({"id": f"done-{n}", "body": n} for n in range(3)))
    for message in server.fetch("lists", wait=30, max=3):
        server.ack("lists", message["id"])
    page.get_by_role("link", name="Done").click()
    expect(rows(page).locator("a")).to_have_text(["done-2", "done-1", "done-0"])
    page.get_by_label("Order").select_option("oldest")
    expect(rows(page).first).to_have_attribute("data-id", "done-0")


def test_a_message_is_put_rescheduled_edited_and_cancelled(server: Server, page: Page) -> None:
    server.put("acts", {"id": "raw", "body_base64": "AAH/", "delay": 900})
    page.goto(server.url + "/#/t/acts/sleep")
    page.get_by_role("button", name="Put a message").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Id").fill("hand-1")
    dialog.get_by_label("Body").fill('{"by": "hand"}')
    dialog.get_by_label("Delay").fill("2h")
    dialog.get_by_role("button", name="Put").click()
    expect(page.locator("#toasts")).to_contain_text("hand-1 was put")
    page.locator("tr[data-id=hand-1] a").click()
    drawer = page.locator(".drawer")
    expect(drawer.locator("pre")).to_have_text('{\n  "by": "hand"\n}')
    drawer.get_by_role("button", name="Reschedule").click()
    page.get_by_role("dialog").get_by_label("Due").fill("2031-05-06T07:08:09")
    page.get_by_role("dialog", name="Reschedule hand-1").get_by_role("button", name="Reschedule").click()
    expect(drawer.locator(".facts")).to_contain_text("06 May 2031, 07:08:09")
    drawer.get_by_role("button", name="Edit body").click()
    page.get_by_role("dialog").get_by_label("Body").fill('{"by": "two hands"}')
    page.get_by_role("button", name="Save").click()
    expect(drawer.locator("pre")).to_contain_text("two hands")
    assert server.ok("GET", "/v1/topics/acts/messages/hand-1")["body"] == {"by": "two hands"}
    drawer.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Keep as it is").click()
    drawer.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel it").click()
    expect(page.locator("#toasts")).to_contain_text("hand-1 is cancelled")
    expect(drawer.locator(".state")).to_have_text("Cancelled")
    drawer.get_by_label("Close").click()
    page.locator("tr[data-id=raw] a").click()
    expect(drawer.locator(".hex")).to_contain_text("00 01 ff")
    expect(drawer).to_contain_text("3 bytes, no JSON")


def test_attempts_and_pauses_are_shown_where_the_server_has_them(server: Server, page: Page) -> None:
    server.put("later", {"id": "m", "body": 1, "delay": 900})
    server.ok("PUT", "/v1/topics/later/groups/g", {"start": "earliest"})
    sent: list[str] = []

    def operations(found: dict[str, Any]) -> dict[str, Any]:
        for path in (RETRY, "/v1/topics/{topic}/pause", "/v1/topics/{topic}/groups/{group}/pause"):
            found["paths"][path] = {"post": {}}
        return found

    def message(found: dict[str, Any]) -> dict[str, Any]:
        failed = {"group": "g", "attempt": 1, "consumer": "w1", "reserved_ms": 1_000, "ended_ms": 3_000, "outcome": "failed"}
        running_ = {"group": "g", "attempt": 2, "consumer": "w2", "reserved_ms": 9_000, "ended_ms": None, "outcome": None}
        attempts = [failed | {"error": NASTY, "next_ms": 8_000}, running_ | {"error": None, "next_ms": None}]
        return found | {"attempts": attempts, "groups": {"g": {"state": "dead", "attempt": 2, "error": NASTY}}}

    def act(route: Route) -> None:
        sent.append(f"{urlsplit(route.request.url).path} {route.request.post_data}")
        route.fulfill(json={"paused": True, "outcome": "ready"})

    page.goto(server.url + "/#/t/later")
    shown = page.get_by_role("button", name="Pause")
    has_pause = "/v1/topics/{topic}/pause" in server.ok("GET", "/openapi.json")["paths"]
    expect(page.get_by_role("button", name="Put a message")).to_be_visible()
    expect(shown).to_have_count(int(has_pause))
    faked(page, "**/openapi.json", operations)
    faked(page, "**/messages/m", message)
    page.route(re.compile("/(pause|retry)$"), act)
    page.reload()
    shown.click()
    page.get_by_role("dialog", name="Pause later?").get_by_role("button", name="Pause").click()
    expect(page.locator("#toasts")).to_contain_text("later is paused")
    page.goto(server.url + "/#/t/later/sleep?message=m")
    expect(page.locator("#attempts li")).to_have_count(2)
    expect(page.locator("#attempts li").first).to_contain_text("Attempt 1 failed g, w1")
    expect(page.locator("#attempts li").first).not_to_contain_text("next")  # which has begun
    expect(page.locator("#attempts pre")).to_have_text(NASTY)
    expect(page.locator("#attempts li").last).to_contain_text("under way")
    page.get_by_role("button", name="Retry now").click()
    page.get_by_role("dialog", name="Retry m now?").get_by_role("button", name="Retry now").click()
    expect(page.locator("#toasts")).to_contain_text("m is ready")
    assert sent == ["/v1/topics/later/pause {}", '/v1/topics/later/messages/m/retry {"group":"g"}']


# Operators


def test_a_group_is_replayed_and_settings_are_changed(server: Server, context: BrowserContext) -> None:
    with watched_page(context, "status of 400") as page:
        _replay_and_change(server, page)


def _replay_and_change(server: Server, page: Page) -> None:
    server.put("ops", *({"body": n} for n in range(4)))
    for message in server.fetch("ops", wait=30):
        server.ack("ops", message["id"])
    page.goto(server.url + "/#/t/ops/groups")
    group = page.locator("[data-group=default]")
    expect(group).to_contain_text("Done4")
    group.get_by_role("button", name="Replay").click()
    page.get_by_role("dialog").get_by_label("From").select_option("earliest")
    page.get_by_role("button", name="Move the group").click()
    expect(page.locator("#toasts")).to_contain_text("4 ready for it now")
    assert server.ok("GET", "/v1/topics/ops")["groups"]["default"]["ready"] == 4
    page.get_by_role("link", name="Settings").click()
    page.locator("[name='backoff.base']").fill("7.5")
    page.locator("[name=delivery]").select_option("at-most-once")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_contain_text("backoff.base: 1 → 7.5")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.locator("#toasts")).to_contain_text("Settings saved")
    found = server.ok("GET", "/v1/topics/ops")["settings"]
    assert (found["backoff"]["base"], found["delivery"], found["ttr"]) == (7.5, "at-most-once", 60)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog", name="Pause ops?").get_by_role("button", name="Pause").click()
    expect(page.locator("#toasts")).to_contain_text("ops is paused")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(page.locator(".title .pill.bad")).to_have_text("paused")
    page.locator("[name=max_attempts]").fill("-3")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.locator("#toasts .bad")).to_contain_text("max_attempts")  # the server's own words


def test_a_schedule_is_put_triggered_paused_changed_and_deleted(server: Server, page: Page) -> None:
    server.ok("PUT", "/v1/topics/timed/schedules/hourly", {"every": 3600, "body": NASTY})
    page.goto(server.url + "/#/t/timed/schedules")
    expect(rows(page)).to_have_count(1)
    page.get_by_role("button", name="Put a schedule").click()
    page.locator("#ask-name").fill("report")
    page.locator("#ask-times").fill("0 9 * * MON-FRI")
    page.locator("#ask-zone").fill("Europe/Berlin")
    page.locator("#ask-body").fill('{"report": "daily"}')
    page.get_by_role("dialog").get_by_role("button", name="Put").click()
    expect(page.locator("#toasts .good")).to_contain_text("report was put")
    detail = page.locator("#schedule")
    expect(detail.locator(".times li")).to_have_count(10)
    expect(detail).to_contain_text("0 9 * * MON-FRI")
    expect(detail).to_contain_text(f"as clocks show them in {page.evaluate('Intl.DateTimeFormat().resolvedOptions().timeZone')}")
    first = server.ok("GET", "/v1/topics/timed/schedules/report/next")["next_ms"][0]
    expect(detail.locator(".times time").first).to_have_attribute("datetime", page.evaluate(f"new Date({first}).toISOString()"))
    expect(rows(page)).to_have_count(2)
    detail.get_by_role("button", name="Trigger").click()
    page.get_by_role("dialog").get_by_role("button", name="Trigger").click()
    expect(page.locator("#toasts")).to_contain_text("was put")
    assert server.fetch("timed", wait=10)[0]["body"] == {"report": "daily"}
    detail.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    expect(detail.locator(".pill")).to_have_text("paused")
    expect(detail).to_contain_text("if it was resumed now")
    detail.get_by_role("button", name="Change").click()
    page.locator("#ask-body").fill('{"report": "short"}')
    page.get_by_role("dialog").get_by_role("button", name="Put").click()
    expect(detail.locator("pre")).to_contain_text("short")
    expect(detail.locator(".pill")).to_have_text("paused")
    detail.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    expect(detail.locator(".pill")).to_have_count(0)
    page.goto(server.url + "/#/t/timed/schedules?schedule=hourly")
    expect(detail.locator("pre")).to_contain_text("<img src=x")  # as text, not as markup
    detail.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog", name="Delete hourly?").get_by_role("button", name="Delete").click()
    expect(detail).to_have_count(0)
    expect(rows(page)).to_have_count(1)
    assert [one["name"] for one in server.ok("GET", "/v1/topics/timed/schedules")["schedules"]] == ["report"]


def test_a_bad_schedule_is_refused_in_words(server: Server, context: BrowserContext) -> None:
    server.ok("PUT", "/v1/topics/untimed", {})
    with watched_page(context, expected="status of 400") as page:
        page.goto(server.url + "/#/t/untimed/schedules")
        expect(page.locator(".messages")).to_contain_text("No schedule yet")
        page.get_by_role("button", name="Put a schedule").click()
        page.locator("#ask-name").fill("report")
        page.locator("#ask-times").fill("0 9 * * MON-FRI")
        page.locator("#ask-zone").fill("Europe/Atlantis")
        page.get_by_role("dialog").get_by_role("button", name="Put").click()
        expect(page.locator("#toasts .bad")).to_contain_text("'Europe/Atlantis' is no time zone")


def test_live_updates_keep_focus_and_selection(server: Server, page: Page) -> None:
    server.put("live", *({"id": f"m{n}", "body": n, "delay": 900 + n} for n in range(5)))
    page.goto(server.url + "/#/t/live/sleep")
    page.get_by_label("Select m2").check()
    page.locator("tr[data-id=m1] a").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("tr[data-id=m2] a")).to_be_focused()
    server.put("live", {"id": "new", "body": 1, "delay": 600})
    expect(rows(page).first).to_have_attribute("data-id", "new")
    expect(page.locator("tr[data-id=m2] a")).to_be_focused()
    expect(page.get_by_label("Select m2")).to_be_checked()
    page.keyboard.press("Enter")
    expect(page.locator("#drawer-title")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".drawer")).to_have_count(0)
    expect(page.locator("tr[data-id=m2] a")).to_be_focused()
    page.get_by_role("button", name="Cancel selected").click()
    page.get_by_role("button", name="Cancel them").click()
    expect(page.locator("#toasts")).to_contain_text("1 cancelled")
    expect(page.locator("tr[data-id=m2]")).to_have_count(0)


def test_a_login_card_tells_that_a_token_is_not_accepted(tmp_path: Path, context: BrowserContext) -> None:
    damaged_folder(tmp_path / "data")
    token, reader, config = new_token(), new_token(), tmp_path / "turtle.toml"
    config.write_text(
        f'[[tokens]]\nname = "me"\nhash = "{hash_of(token)}"\nrights = ["produce", "consume", "admin"]\n'
        f'[[tokens]]\nname = "reader"\nhash = "{hash_of(reader)}"\nrights = ["consume"]\n'
    )
    with running(tmp_path / "data", "--config", str(config)) as server, watched_page(context, "status of 40") as page:
        page.goto(server.url + "/")
        expect(page.locator("#state")).to_have_text("needs a token")
        expect(page.locator("#login .warning")).to_have_count(0)
        for given, accepted in (("wrong", False), (new_token(), False), (token, True)):
            page.locator("#token").fill(given)
            page.get_by_role("button", name="Sign in").click()
            expect(page.locator("#login .warning")).to_have_count(0 if accepted else 1)
        expect(page.locator("#warnings")).to_contain_text("Damage in t: delay_0000000000.bson")
        page.reload()
        expect(page.locator("#state")).to_have_text("serving")
        assert context.cookies() == []
        assert page.evaluate("JSON.stringify(localStorage)").find(token) == -1
        other = context.new_page()
        other.goto(server.url + "/")
        expect(other.locator("#state")).to_have_text("needs a token")
        assert token not in server.log
        page.get_by_role("button", name="Sign out").click()
        page.locator("#token").fill(reader)
        page.get_by_role("button", name="Sign in").click()
        page.locator("#topics a").first.click()
        page.get_by_role("link", name="Settings").click()
        page.locator("[name=max_attempts]").fill("5")
        page.get_by_role("button", name="Save").click()
        page.get_by_role("dialog").get_by_role("button", name="Save").click()
        expect(page.locator("#toasts .bad")).to_contain_text("token 'reader' has no right to admin on topic")


def test_a_phone_shows_every_view_without_scrolling_sideways(server: Server, browser: Browser) -> None:
    die(server, "phone", "x" * 120, error="a very long error " * 20)
    server.put("phone", {"id": "p" * 150, "body": {"text": "w" * 500}, "headers": {"h": "v" * 300}, "delay": 900})
    server.ok("PUT", "/v1/topics/phone/schedules/s", {"cron": "*/5 8-18 1-15 JAN-NOV MON-FRI", "body": "w" * 500})
    views = [
        "",
        "#/?q=nothing",
        *(f"#/t/phone/{tab}" for tab in ("overview", "sleep", "dead", "groups", "schedules?schedule=s", "settings")),
    ]
    views += [f"#/t/phone/sleep?message={'p' * 150}", f"#/t/phone/dead?message={'x' * 120}"]
    with window(browser, 390, 844, has_touch=True) as context, watched_page(context) as page:
        for view in views:
            page.goto(f"{server.url}/{view}")
            expect(page.locator("#state")).to_have_text("serving")
            expect(page.locator(".drawer-body" if "message" in view else "main .panel, main .card").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
            if "message" in view:
                assert page.locator(".drawer-body").evaluate("one => one.scrollWidth <= one.clientWidth"), view
