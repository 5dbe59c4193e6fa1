"""The OpenAPI document: complete, valid, true. Every route is in it, every example fits its schema, and a server that is asked
anything that the document allows (and much that it does not) answers as the document says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.harness.server_process import ROOT, Server, running
from tests.trust.interface import WORLD, world
from turtlemq.server.app import routes
from turtlemq.server.openapi import codes_by_status, document
from turtlemq.server.openapi_texts import FIELDS, SCHEMAS

DOCUMENT = document()
OPERATIONS = [(path, method, found) for path, methods in DOCUMENT["paths"].items() for method, found in methods.items()]
NAMES = [found["operationId"] for _, _, found in OPERATIONS]


def test_routes_and_paths_are_the_same() -> None:
    here = {(route.method, route.path.replace(":[^/]+}", "}")) for route in routes()}
    there = {(method.upper(), path) for path, method, _ in OPERATIONS}
    pages = {("GET", path) for path in ("/", "/docs", "/cluster", "/pages/{file}")}
    assert here - there == pages, "routes that the document leaves out"
    assert there - here == set(), "operations that no route serves"


def test_names_are_unique_and_every_reference_leads_somewhere() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for reference in set(re.findall(r"'\$ref': '#/([^']+)'", str(DOCUMENT))):
        found: Any = DOCUMENT
        for part in reference.split("/"):
            found = found[part]
        assert found


def test_texts_of_types_come_from_their_table() -> None:
    """Not from docstrings, which are for readers of the code."""
    schemas = DOCUMENT["components"]["schemas"]
    assert {name: schema["description"] for name, schema in schemas.items()} == SCHEMAS
    used = {name for schema in schemas.values() for name in schema["properties"]}
    used |= {parameter["name"] for _, _, operation in OPERATIONS for parameter in operation.get("parameters", [])}
    assert {name.rpartition(".")[2] for name in FIELDS} <= used, "texts of fields that are gone"


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


def test_every_link_leads_to_an_operation_with_values_that_are_there() -> None:
    """Parts of its own path, and fields in the example of its answer."""
    every = {operation["operationId"]: (path, operation) for path, _, operation in OPERATIONS}
    count = 0
    for path, operation in every.values():
        for answer in operation["responses"].values():
            for name, link in answer.get("links", {}).items():
                target, known = every[link["operationId"]]
                assert link["parameters"].keys() <= {one["name"] for one in known["parameters"]}, name
                assert set(re.findall(r"{(\w+)}", target)) <= link["parameters"].keys() | {"group"}, name
                for value in link["parameters"].values():
                    here, _, pointer = value.partition("#")
                    if pointer:
                        assert here == "$response.body"
                        found = answer["content"]["application/json"]["example"]
                        for part in pointer.split("/")[1:]:
                            found = found[int(part) if isinstance(found, list) else part]
                    else:
                        assert f"{{{value.removeprefix('$request.path.')}}}" in path, value
                count += 1
    assert count >= 30


# Against a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("openapi") / "data", TURTLEMQ_PUSH_HOSTS="hooks.shop.example") as found:
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
    world(server)
    path = f"/v1/topics/{WORLD}/dead/export"
    answer = server.call("GET", f"{path}?from_ms=5&to_ms=1")
    assert (answer.status, answer.code) == (400, "INVALID_ARGUMENT")
    lines = server.call("GET", path).data.splitlines()
    assert {json.loads(line)["error"] for line in lines} == {"no"}


def test_the_examples_work(server: Server) -> None:
    """In the order of the document, so that there is something to fetch, to acknowledge and to cancel."""
    refused = {}
    for path, method, operation in sorted(OPERATIONS, key=lambda one: one[1] == "delete"):
        target = path
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "path":
                target = target.replace("{" + parameter["name"] + "}", parameter["example"])
            elif parameter["in"] == "query" and parameter.get("required"):
                target += f"?{parameter['name']}=order-17"
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
        if isinstance(body, dict) and "wait" in body:
            body = {**body, "wait": 0}
        answer = server.call(method.upper(), target, body)
        assert str(answer.status) in operation["responses"], (method, target, answer.status, answer.data)
        if answer.status >= 300:
            refused[operation["operationId"]] = answer.code
    of_a_cluster = {one["operationId"] for _, _, one in OPERATIONS if one["tags"] == ["Cluster"]}  # this is a single node
    assert {refused.pop(name, "NO_CLUSTER") for name in of_a_cluster} == {"NO_CLUSTER"}
    assert {refused.pop(name) for name in ("clock", "moveClock")} == {"CONFLICT"}  # this server runs on the wall clock
    assert {refused.pop(name) for name in ("getReplay", "cancelReplay")} == {"UNKNOWN_REPLAY"}  # ids of jobs are random
    assert refused.keys() <= {
        "cancelMessage",
        "changeMessage",
        "retryMessage",
        "getGroup",
        "dropGroup",
        "dropSchedule",
        "deleteClient",
    }, refused
