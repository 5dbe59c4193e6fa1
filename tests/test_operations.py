"""The table of operations: every route of the application is in it, has an access right and is in the OpenAPI document."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web

from turtlemq.server.app import make_app
from turtlemq.server.auth import (
    ADMIN,
    ALL,
    ANY,
    CHANGE,
    CONSUME,
    GROUP,
    INSPECT,
    OPEN,
    OPERATE,
    PRODUCE,
    READ,
    TOKEN,
    Access,
)
from turtlemq.server.config import Config
from turtlemq.server.handlers import messages
from turtlemq.server.openapi import document
from turtlemq.server.operation import Operation
from turtlemq.server.operations import ACCESS, OPERATIONS, PAGES
from turtlemq.server.service import Service


def served(app: web.Application) -> set[str]:
    """Method and path of all routes of an application; HEAD comes with every GET."""
    found = ((route.method, route.resource) for route in app.router.routes())
    return {f"{method} {resource.canonical}" for method, resource in found if resource is not None and method != "HEAD"}


def documented(text: Mapping[str, Any]) -> dict[str, bool]:
    """Method and path of all operations of an OpenAPI document, and whether a token is needed."""
    return {
        f"{method.upper()} {path}": bool(operation["security"])
        for path, methods in text["paths"].items()
        for method, operation in methods.items()
    }


def gaps(routes: set[str], access: Mapping[str, Access], text: Mapping[str, Any]) -> list[str]:
    """Everything in which routes, access rights and document differ."""
    told = documented(text)
    pages = {operation.route for operation in OPERATIONS if operation.tag == PAGES}
    out = [f"{route} has no access right" for route in sorted(routes - access.keys())]
    out += [f"{route} is not in the document" for route in sorted(routes - told.keys() - pages)]
    out += [f"{route} is not served" for route in sorted((access.keys() | told.keys()) - routes)]
    wrong = [route for route, needs_token in told.items() if route in access and needs_token is (access[route] is OPEN)]
    return out + [f"{route}: document and access right differ about a token" for route in wrong]


@pytest.fixture
def app() -> web.Application:
    return make_app(Service(), Config())


def test_every_route_has_a_right_and_is_documented(app: web.Application) -> None:
    assert len(OPERATIONS) == len(ACCESS) == len(served(app)) > 30
    assert {operation.name: operation.access for operation in OPERATIONS if operation.access not in _RIGHTS} == {}
    assert gaps(served(app), ACCESS, document()) == []


_RIGHTS = (OPEN, TOKEN, ALL, ANY, READ, INSPECT, PRODUCE, CHANGE, CONSUME, GROUP, OPERATE, ADMIN)
PLANTED = "GET /v1/planted"


def test_a_route_outside_the_table_is_noticed(app: web.Application) -> None:
    app.router.add_get("/v1/planted", messages.browse)
    assert gaps(served(app), ACCESS, document()) == [f"{PLANTED} has no access right", f"{PLANTED} is not in the document"]


def test_an_operation_without_a_route_is_noticed(app: web.Application) -> None:
    assert gaps(served(app), ACCESS | {PLANTED: OPEN}, document()) == [f"{PLANTED} is not served"]


def test_a_document_that_opens_a_route_is_noticed(app: web.Application) -> None:
    text = document()
    text["paths"]["/v1/status"]["get"]["security"] = []
    assert gaps(served(app), ACCESS, text) == ["GET /v1/status: document and access right differ about a token"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_handlers_decode_the_types_of_the_table(operation: Operation) -> None:
    """And say in their docstrings which route they serve."""
    source = inspect.getsource(operation.handler)
    if inspect.isclass(operation.body):
        decoder = re.search(r"read_with\(request, (\w+)\)", source)
        decoding = source if decoder is None else inspect.getsource(getattr(inspect.getmodule(operation.handler), decoder[1]))
        assert re.search(rf"(read_as\(request|decode\(data), {operation.body.__name__}\b", decoding)
    if inspect.isclass(operation.query):
        assert f"query(request, {operation.query.__name__})" in source
    told = (inspect.getdoc(operation.handler) or "").partition("\n")[0].partition(":")[0]
    method, _, path = told.partition(" ")
    assert method == operation.method
    assert operation.path.endswith(path[1:]) if path.startswith("…") else operation.path == path, told
