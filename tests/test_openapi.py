"""The OpenAPI document: complete, valid, true. Every route is in it, every example fits its schema, and a server that is asked
whatever the document allows (and much that it does not) answers as the document says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import bson
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving import ROOT, Server, running
from turtlemq.server.app import routes
from turtlemq.server.openapi import codes_by_status, document

DOCUMENT = document()
OPERATIONS = [(path, method, found) for path, methods in DOCUMENT["paths"].items() for method, found in methods.items()]
NAMES = [found["operationId"] for _, _, found in OPERATIONS]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
SETTINGS = settings(
    max_examples=int(os.environ.get("TURTLEMQ_EXAMPLES", "10")),  # for each operation and mode; `make trust` wants many
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
NUMBERS = count()
PICKY = ("requeueDead", "changeMessage")  # seldom is everything right that chance puts there


def test_routes_and_paths_are_the_same() -> None:
    here = {(route.method, route.path) for route in routes()}
    there = {(method.upper(), path) for path, method, _ in OPERATIONS}
    assert here - there == set(), "routes that the document leaves out"
    assert there - here == set(), "operations that no route serves"


def test_names_are_unique_and_every_reference_leads_somewhere() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for reference in set(re.findall(r"'\$ref': '#/([^']+)'", str(DOCUMENT))):
        found: Any = DOCUMENT
        for part in reference.split("/"):
            found = found[part]
        assert found


def test_every_code_of_the_documentation_is_in_the_document() -> None:
    table = (ROOT / "docs" / "HTTP.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    told = set(re.findall(r"`([A-Z_]{5,})`", table)) - {"METHOD_NOT_ALLOWED"}  # of no operation
    assert told <= {code for codes in codes_by_status().values() for code in codes}


def _validator(schema: Any) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def _examples() -> Iterator[tuple[str, Any, Any]]:
    for _, _, operation in OPERATIONS:
        contents = [operation.get("requestBody", {}), *operation["responses"].values()]
        for one in contents:
            for kind, content in one.get("content", {}).items():
                if "example" in content:
                    yield f"{operation['operationId']} {kind}", content["schema"], content["example"]
        for parameter in operation.get("parameters", []):
            if "example" in parameter:
                yield f"{operation['operationId']} {parameter['name']}", parameter["schema"], parameter["example"]


def test_examples_fit_their_schemas() -> None:
    found = list(_examples())
    assert len(found) > 60
    for name, schema, example in found:
        errors = [error.message for error in _validator(schema).iter_errors(example)]
        assert not errors, (name, errors)


def test_every_operation_that_takes_or_gives_json_shows_an_example() -> None:
    bare = [
        operation["operationId"]
        for _, _, operation in OPERATIONS
        for content in (operation.get("requestBody") or {}).get("content", {}).values()
        if "example" not in content and content["schema"].get("format") != "binary"
    ]
    assert bare == []


# Against a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("openapi") / "data") as found:
        yield found
        assert "event=request_failed" not in found.log, found.log


def test_the_server_gives_the_same_document(server: Server) -> None:
    answer = server.call("GET", "/openapi.json")
    assert (
        answer.headers["Content-Type"] == "application/json; charset=utf-8"
        or answer.headers["Content-Type"] == "application/json"
    )
    assert answer.json == DOCUMENT


def test_a_stream_is_refused_before_it_begins(server: Server) -> None:
    _world(server)
    answer = server.call("GET", "/v1/topics/world/dead/export?from_ms=5&to_ms=1")
    assert (answer.status, answer.code) == (400, "INVALID_ARGUMENT")
    lines = server.call("GET", "/v1/topics/world/dead/export").data.splitlines()
    assert {json.loads(line)["error"] for line in lines} == {"no"}


def test_the_examples_work(server: Server) -> None:
    """In the order of the document, so that there is something to fetch, to acknowledge and to cancel."""
    refused = {}
    for path, method, operation in sorted(OPERATIONS, key=lambda one: one[1] == "delete"):
        target = path
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "path":
                target = target.replace("{" + parameter["name"] + "}", parameter["example"])
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
        if isinstance(body, dict) and "wait" in body:
            body = {**body, "wait": 0}
        answer = server.call(method.upper(), target, body)
        assert str(answer.status) in operation["responses"], (method, target, answer.status, answer.data)
        if answer.status >= 300:
            refused[operation["operationId"]] = answer.code
    assert refused.keys() <= {"cancelMessage", "changeMessage", "getGroup", "dropGroup"}, refused


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


def _world(server: Server) -> None:
    """A topic with a message in every state."""
    server.call("DELETE", "/v1/topics/world")
    server.ok("PUT", "/v1/topics/world", {"max_attempts": 1})
    server.put("world", *({"id": name, "body": {"name": name}} for name in ("held", "dead", "done")))
    got: set[str] = set()
    while len(got) < 3:
        got |= {message["id"] for message in server.fetch("world", wait=5, ttr=600)}
    server.ack("world", "-dead", "done", error="no")
    server.put(
        "world", *({"id": name, "body": 1, "delay": 900} for name in ("asleep", "asleep2", "gone")), {"id": "ready", "body": 1}
    )
    server.ok("DELETE", "/v1/topics/world/messages/gone")


def _into_the_world(case: Case[Any]) -> None:
    """Every second request is about something that is there."""
    number = next(NUMBERS)
    if number % 2 or "topic" not in case.path_parameters:
        return
    case.path_parameters["topic"] = "world"
    if "group" in case.path_parameters:
        case.path_parameters["group"] = "default"
    if "id" in case.path_parameters:
        case.path_parameters["id"] = ("asleep", "asleep2", "ready", "held", "dead", "done", "gone")[number // 2 % 7]


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_as_documented(server: Server, name: str, mode: GenerationMode) -> None:
    """Requests that fit the document, and requests that are wrong somewhere."""
    schema = schemathesis.openapi.from_dict(DOCUMENT).include(operation_id=name)
    schema.config.update(base_url=server.url)
    (result,) = schema.get_all_operations()
    assert isinstance(result, Ok)
    operation = result.ok()
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
        return  # there is nothing that could be wrong with it
    seen: set[int] = set()
    _world(server)

    @SETTINGS
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Case[Any]) -> None:
        if mode is GenerationMode.POSITIVE:
            _into_the_world(case)
            if isinstance(case.body, dict) and "wait" in case.body:
                case.body["wait"] = 0  # nobody has the time
        response = case.call(timeout=20)
        if response.status_code == 504 and response.json()["error"]["code"] == "DEADLINE_EXCEEDED":
            return  # it asked for that with X-Turtlemq-Budget-Ms
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    ask()
    if mode is GenerationMode.POSITIVE and name not in PICKY:
        assert any(status < 300 for status in seen), seen
