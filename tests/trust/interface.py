"""The interface as its own description tells it: schemathesis sends a real server all that the OpenAPI document allows, much
that it does not, and, along the document's links, requests about subjects of earlier answers. Every answer is one that the
document knows, none is a failure of the server, and no file appears where none belongs.

A case is about one operation: the first ones ask a little about each, those after them a lot, over and over.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bson
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation.stateful.state_machine import RecordingStateMachine
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.harness.server_process import Server, running
from tests.trust.model import Broken, Figures, Part
from turtlemq.server.openapi import codes_by_status, document

if TYPE_CHECKING:
    from schemathesis.schemas import APIOperation, BaseSchema

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
ROUNDS = 20  # of each operation in full: each asks a hundred times out of the blue, and tells a dozen stories
WORLD = "0"  # a topic with a message in every state; no name comes before this one
IDS = ("asleep", "asleep2", "ready", "held", "dead", "done", "gone")
_FETCHED, _STORED = "$response.body#/messages/0/id", "$response.body#/ids"
_TOPIC, _SAID = "$request.path.topic", "$response.body#/id"
BODIES: dict[str, dict[str, list[Any]]] = {  # the document's links cannot say this: answers within bodies
    "produce": {
        "registerClient": [{"url": "https://hooks.shop.example/orders"}],
        "cancelMany": [{"ids": _STORED}],
        "command": [{"command": "pop", "topic": _TOPIC}, {"command": "delete", "topic": _TOPIC, "id": f"{_STORED}/0"}],
    },
    "fetch": {
        "ack": [[_FETCHED], {"acks": [f"-{{{_FETCHED}}}"], "error": "no"}],
        "extend": [{"ids": [_FETCHED]}],
        "command": [{"command": "finish", "topic": _TOPIC, "id": _FETCHED}],
    },
    "command": {"command": [{"command": verb, "id": _SAID} for verb in ("finish", "delete")]},
    "fetchInGroup": {"ackInGroup": [[_FETCHED], {"acks": [f"-{{{_FETCHED}}}"]}], "extendInGroup": [{"ids": [_FETCHED]}]},
    "listDead": {"requeueDead": [{"ids": [_FETCHED]}], "deleteDead": [{"ids": [_FETCHED]}]},
}

LEADS = {"produce": "pinBackup", "pinBackup": "pinBackup", "unpinBackup": "pinBackup"}  # needs nothing that an answer said


@schemathesis.serializer("application/x-ndjson")
def _lines(_: Any, value: Any) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value, default=str).encode()


@schemathesis.serializer("application/bson")
def _documents(_: Any, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return bson.encode(value if isinstance(value, dict) else {"body": value})
    except (bson.errors.BSONError, OverflowError, ValueError):
        return str(value).encode("utf-8", "surrogatepass")


# The document, with a few more links


@cache
def linked() -> dict[str, Any]:
    """The document, where bodies may hold values of answers, a list of topics leads to everything about its first one, and each
    status has its own error codes."""
    found = deepcopy(document())
    every = {one["operationId"]: (path, one) for path, methods in found["paths"].items() for one in methods.values()}
    for source, targets in BODIES.items():
        for target, bodies in targets.items():
            links = _links(every[source][1])
            taken = {"topic": _TOPIC} if "{topic}" in every[target][0] else {}
            plain = links.pop(target, {"operationId": target, "parameters": taken})
            extra = {"x-schemathesis": {"merge_body": False}}
            links |= {f"{target}{i}": {**plain, **extra, "requestBody": body} for i, body in enumerate(bodies)}
    for source, target in LEADS.items():
        _links(every[source][1])[target] = {"operationId": target, "parameters": {}}
    known = {"topic": "$response.body#/topics/0/topic", "group": "default", "id": "asleep", "client": "worker-1"}
    for name, (path, _) in every.items():
        taken = {part: value for part, value in known.items() if f"{{{part}}}" in path}
        if taken:
            _links(every["listTopics"][1])[name] = {"operationId": name, "parameters": taken}
    for status, codes in codes_by_status().items():
        content = found["components"]["responses"][f"Error{status}"]["content"]["application/json"]
        content["schema"] = {"allOf": [content["schema"], {"properties": {"error": {"properties": {"code": {"enum": codes}}}}}]}
    return found


def _links(operation: dict[str, Any]) -> dict[str, Any]:
    good = next(answer for status, answer in operation["responses"].items() if status < "300")
    links: dict[str, Any] = good.setdefault("links", {})
    return links


def names() -> list[str]:
    """Of all operations."""
    return [one["operationId"] for methods in document()["paths"].values() for one in methods.values()]


def cast(name: str) -> list[str]:
    """An operation, and those whose answers lead to it."""
    found = [name]
    for methods in linked()["paths"].values():
        for one in methods.values():
            leads_to = {link["operationId"] for link in _links(one).values()}
            if name in leads_to:
                found.append(one["operationId"])
    return found if len(found) == 1 else sorted({*found, "listTopics"})


def _schema(server: Server, *wanted: str) -> BaseSchema:
    schema = schemathesis.openapi.from_dict(deepcopy(linked())).include(operation_id=list(wanted))
    schema.config.update(base_url=server.url)
    schema.config.phases.stateful.inference.algorithms = []  # its guesses; ours are known to lead somewhere
    return schema


# Asking


@dataclass
class Inquiry:
    """Requests about one operation, and their outcomes."""

    server: Server
    name: str
    number: int  # of the case: it seeds all
    examples: int  # of each kind
    session: requests.Session = field(default_factory=requests.Session)
    seen: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    followed: Counter[int] = field(default_factory=Counter)  # of requests over links
    errors: list[str] = field(default_factory=list)
    stories: int = 0

    @property
    def settings(self) -> settings:
        return settings(
            max_examples=self.examples,
            stateful_step_count=6,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )

    def judge(self, case: Case[Any], response: Any, linked: bool = False) -> None:
        """An answer, which must be as documented."""
        mine = case.operation.definition.raw["operationId"] == self.name
        self.seen["requests"] += 1
        self.seen["over links"] += linked
        self.seen["refused as documented"] += 400 <= response.status_code < 500
        if mine:
            (self.followed if linked else self.statuses)[response.status_code] += 1
        if response.status_code == 504 and response.json()["error"]["code"] == "DEADLINE_EXCEEDED":
            return  # it asked for that with X-Turtlemq-Budget-Ms
        try:
            case.validate_response(response, checks=CHECKS)
        except BaseException as error:
            self.errors.append(str(error))
            raise

    def ask(self, case: Case[Any]) -> None:
        self.judge(case, case.call(session=self.session, timeout=60))


def plain(inquiry: Inquiry, mode: GenerationMode) -> None:
    """Requests out of the blue: such as fit the document, or such as are wrong somewhere."""
    (result,) = _schema(inquiry.server, inquiry.name).get_all_operations()
    assert isinstance(result, Ok)
    operation: APIOperation[Any, Any, Any, Any] = result.ok()
    if mode is GenerationMode.NEGATIVE and not any(operation.iter_parameters()) and not operation.body:
        return  # there is nothing that could be wrong with it
    numbers = iter(range(10**9))

    @seed(inquiry.number)
    @inquiry.settings
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Case[Any]) -> None:
        if mode is GenerationMode.POSITIVE:
            impatient(case)
            into_the_world(case, next(numbers))
        inquiry.ask(case)

    ask()


def impatient(case: Case[Any]) -> None:
    """Long polls would take too much time here."""
    for place in (case.body, case.query):
        if isinstance(place, dict) and isinstance(place.get("wait"), (int, float)):
            place["wait"] = 0


def into_the_world(case: Case[Any], number: int) -> None:
    """Every second request is about something that is there."""
    parts = case.path_parameters
    if number % 2 == 0 and "topic" in parts:
        there = {"topic": WORLD, "group": "default", "id": IDS[number // 2 % len(IDS)]}
        parts.update({part: value for part, value in there.items() if part in parts})


class Story(RecordingStateMachine):
    """Requests that follow from answers. These rules are laid over the machine that schemathesis makes."""

    inquiry: Inquiry

    def setup(self) -> None:
        self.inquiry.stories += 1
        top_up(self.inquiry.server, self.inquiry.stories)

    def before_call(self, case: Case[Any]) -> None:
        impatient(case)

    def get_call_kwargs(self, case: Case[Any]) -> dict[str, Any]:
        return {"session": self.inquiry.session, "timeout": 60}

    def validate_response(self, response: Any, case: Case[Any], *_: Any, **__: Any) -> None:
        self.inquiry.judge(case, response, linked=self.recorder.cases[case.id].is_transition_applied)


def stories(inquiry: Inquiry) -> None:
    """Requests one after the other, each about the subject of an earlier answer."""
    wanted = cast(inquiry.name)
    if len(wanted) == 1:
        return  # no link leads there
    machine = _schema(inquiry.server, *wanted).as_state_machine()
    made: Any = type("Made", (Story, machine), {"inquiry": inquiry})
    number, most = inquiry.number, max(12, inquiry.examples // 4)
    while inquiry.stories < most:
        left = settings(inquiry.settings, max_examples=most - inquiry.stories)
        try:
            seed(number)(made).run(settings=left)
            break  # there are no more than these
        except Flaky:
            if inquiry.errors:
                raise
            number += 1_000_003  # one began as another did and met another state of the server: the rest is told anew
    if not inquiry.followed:
        raise Broken(f"no link led to {inquiry.name}")


# Subjects of requests


def world(server: Server) -> None:
    """One topic, with a message in every state."""
    for topic in server.ok("GET", "/v1/topics")["topics"]:
        server.ok("DELETE", f"/v1/topics/{topic['topic']}")
    server.ok("PUT", f"/v1/topics/{WORLD}", {"max_attempts": 1})
    server.put(WORLD, *({"id": name, "body": {"name": name}} for name in ("held", "dead", "done")))
    got: set[str] = set()
    while len(got) < 3:
        got |= {message["id"] for message in server.fetch(WORLD, wait=5, ttr=600)}
    server.ack(WORLD, "-dead", "done", error="no")
    sleepers = [{"id": name, "body": 1, "delay": 900} for name in ("asleep", "asleep2", "gone")]
    server.put(WORLD, *sleepers, {"id": "ready", "body": 1})
    server.ok("DELETE", f"/v1/topics/{WORLD}/messages/gone")
    client = {"url": "https://hooks.shop.example/orders", "name": "worker-1", "ttl": 3_600}
    server.call("POST", f"/v1/topics/{WORLD}/groups/default/clients", client)  # refused where callbacks are off


def top_up(server: Server, number: int) -> None:
    """Something more to fetch and to bury, if the topic is still one that takes it."""
    base = f"/v1/topics/{WORLD}"
    server.call("PUT", base, {"max_attempts": 1})
    server.call("POST", f"{base}/messages", {"messages": [{"body": number}] * 3})
    answer = server.call("POST", f"{base}/fetch", {"max": 1, "wait": 0.2})
    if answer.status == 200:
        server.call("POST", f"{base}/ack", [f"-{message['id']}" for message in answer.json["messages"]])


# Cases


def run(cases: range, folder: Path) -> Figures:
    """Ask about one operation in each case; the module's docstring says which answers are right."""
    seen: Figures = Counter()
    place = folder / "some" / "where"  # so that a way out of the data folder ends here
    place.mkdir(parents=True)
    with running(place / "data", TURTLEMQ_PUSH_HOSTS="hooks.shop.example") as server:
        for case in cases:
            seen.update(one(server, case))
        topics = {path.name for path in (server.data / "topic").iterdir()}
        if "event=request_failed" in server.log:
            raise Broken(f"cases {cases}: {server.log[-3000:]}")
    strange = sorted(name for name in topics if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name))
    strange += sorted(str(path) for path in folder.rglob("*") if place / "data" not in (path, *path.parents) and path.is_file())
    if strange != [str(place / "server.log")]:
        raise Broken(f"cases {cases}: files that should not be: {strange}")
    return seen


def one(server: Server, case: int) -> Figures:
    """All about one operation."""
    every = names()
    full = case >= len(every)
    inquiry = Inquiry(server, every[case % len(every)], case, 50 if full else 6)
    try:
        world(server)
        plain(inquiry, GenerationMode.POSITIVE)
        plain(inquiry, GenerationMode.NEGATIVE)
        stories(inquiry)
        if full and not any(status < 300 for status in inquiry.statuses + inquiry.followed):
            raise Broken(f"nothing good came of it: {inquiry.statuses}, {inquiry.followed}")
    except (Exception, BaseExceptionGroup) as error:  # schemathesis' failures are such groups
        said = inquiry.errors[0] if inquiry.errors else f"{type(error).__name__}: {error}"
        raise Broken(f"case {case}, {inquiry.name}: {said[:2000]}") from error
    inquiry.seen["stories"] = inquiry.stories
    return inquiry.seen


PART = Part(
    name="interface",
    unit="inquiries",
    about="Requests that fit the OpenAPI document, or do not, or follow its links: every answer is as documented, none a 5xx.",
    run=run,
    quick=len(names()),
    full=len(names()) * (1 + ROUNDS),
    chunk=19,
)
