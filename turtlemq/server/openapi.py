"""OpenAPI 3.1 at /openapi.json, made from the table of operations, the types that validate requests and those of the answers.

Error codes and their statuses come from the classes of the errors themselves. Made once, at the first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec

from turtlemq import __version__, errors, settings
from turtlemq.lifecycle import STATES
from turtlemq.model import BATCH_MESSAGES_MAX, ID_BYTES_MAX
from turtlemq.server import errors as shell_errors
from turtlemq.server.incoming.bson_messages import BsonMessage
from turtlemq.server.incoming.json_messages import JsonMessage
from turtlemq.server.media_types import BSON, JSON, NDJSON, TEXT
from turtlemq.server.openapi_texts import ABOUT, FIELDS, SCHEMAS
from turtlemq.server.operations import MESSAGES, OPERATIONS, Operation
from turtlemq.server.outgoing import answers
from turtlemq.server.outgoing.messages import Delivered
from turtlemq.server.outgoing.reply import encode
from turtlemq.server.request import BUDGET
from turtlemq.server.trace import HEADER

REF = "#/components/schemas/{name}"
ALWAYS = (400, 403, 429, 503, 504)  # what any request may meet
PLAIN_CODES = {404: ["NOT_FOUND"]}  # of no class
NAMES = {  # published names of schemas whose Python class has another name
    "BrowseQuery": "Browse",
    "DeadPage": "Page",
    "ForecastQuery": "Outlook",
    "Moment": "TimelineEntry",
    "StatusQuery": "Look",
    "TopicSettings": "Settings",
}
MAYBE = {"Delivered": ("body", "body_base64")}  # msgspec calls fields required that may be left out of an answer
NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"}
PARTS: dict[str, dict[str, Any]] = {
    "topic": {"schema": NAME, "example": "orders", "description": "1 to 200 of A-Z a-z 0-9 . _ -, a letter or digit first."},
    "group": {"schema": NAME, "example": "default", "description": "As a topic. Groups see every message, each for itself."},
    "id": {
        "schema": {
            "type": "string",
            "minLength": 1,
            "maxLength": ID_BYTES_MAX,
            "pattern": r"^[^/\-\x00-\x1f\x7f][^/\x00-\x1f\x7f]*$",
        },
        "example": "order-17",
        "description": "1 to 200 bytes of printable text, no `/`, no `-` at the beginning.",
    },
    "file": {"schema": {"type": "string", "pattern": r"^[a-z]+\.(css|html|js|svg)$"}, "example": "style.css"},
}
_STORED = {"id": "$response.body#/ids/0"}
_FIRST = {"id": "$response.body#/messages/0/id"}
_PAGE = {"cursor": "$response.body#/cursor"}
LINKS: dict[str, dict[str, dict[str, str]]] = {  # what may follow a good answer; parts of the path are taken along
    "putTopic": {"getTopic": {}, "produce": {}, "fetch": {}, "putGroup": {}, "dropTopic": {}},
    "listTopics": {"getTopic": {"topic": "$response.body#/topics/0/topic"}},
    "produce": {"getMessage": _STORED, "changeMessage": _STORED, "cancelMessage": _STORED, "fetch": {}, "forecast": {}},
    "fetch": {"getMessage": _FIRST, "ack": {}, "extend": {}},
    "ack": {"fetch": {}, "listDead": {}, "summariseDead": {}},
    "putGroup": {"fetchInGroup": {}, "getGroup": {}, "dropGroup": {}},
    "fetchInGroup": {"getMessage": _FIRST, "ackInGroup": {}, "extendInGroup": {}},
    "listMessages": {"listMessages": _PAGE, "getMessage": _FIRST},
    "listDead": {"listDead": _PAGE, "requeueDead": {}, "deleteDead": {}, "exportDead": {}},
    "pinBackup": {"unpinBackup": {}},
}


@cache
def encoded() -> bytes:
    """The document as bytes."""
    return encode(document())


def document() -> dict[str, Any]:
    """The whole document."""
    schemas = _Schemas([Delivered, answers.Error, answers.Letter, JsonMessage, BsonMessage, *_types()])
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TurtleMQ", "version": __version__, "description": ABOUT, "license": {"name": "Apache-2.0"}},
        "tags": [{"name": name} for name in dict.fromkeys(one.tag for one in OPERATIONS)],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {f"Error{status}": _error(status, codes) for status, codes in sorted(codes_by_status().items())},
            "headers": {"RequestId": {"schema": {"type": "string"}, "description": "The request's name in the log."}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types() -> Iterator[Any]:
    for one in OPERATIONS:
        yield from (kind for kind in (one.body, one.query, one.answer) if kind is not None and not isinstance(kind, str))


# Schemas


class _Schemas:
    """JSON schemas of types: what is shared goes to `components`, under names that mean something to a reader."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        kinds = list(kinds)
        made, components = msgspec.json.schema_components(kinds, ref_template=REF)
        self._made = [(kind, _renamed(schema)) for kind, schema in zip(kinds, made, strict=True)]
        self.components = {NAMES.get(name, name): _described(_renamed(schema)) for name, schema in components.items()}
        for name, maybe in MAYBE.items():
            self.components[name]["required"] = [field for field in self.components[name]["required"] if field not in maybe]
        for row in settings.TABLE:
            if row.path:
                section = row.path[0].capitalize() if len(row.path) > 1 else "Settings"
                self.components[section]["properties"][row.path[-1]] |= _limits(row)
        self.components["Browse"]["properties"]["state"]["enum"] = list(STATES)
        self.components["JsonMessage"]["anyOf"] = [{"required": ["body"]}, {"required": ["body_base64"]}]

    def of(self, kind: Any) -> dict[str, Any]:
        """A type's schema, or where it is."""
        return next(schema for known, schema in self._made if known == kind)

    def fields(self, kind: Any) -> dict[str, Any]:
        """The properties of a struct, and what it calls required."""
        return dict(self.components[self.of(kind)["$ref"].rpartition("/")[2]]["properties"])


def _limits(row: settings.Setting) -> dict[str, Any]:
    """The limits of a topic's setting as JSON schema keywords, in the unit of HTTP."""
    if row.limits.words:
        return {"enum": list(row.limits.words)}
    low, high = row.limits.low, row.limits.high
    return {"minimum": low / 1000, "maximum": high / 1000} if row.in_seconds else {"minimum": low, "maximum": high}


def _renamed(schema: Any) -> Any:
    """Our names for types, wherever they stand."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return {**schema, "$ref": REF.format(name=NAMES.get(name, name))}
        return {key: NAMES.get(value, value) if key == "title" else _renamed(value) for key, value in schema.items()}
    return [_renamed(one) for one in schema] if isinstance(schema, list) else schema


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """A component with its texts."""
    title = schema["title"]
    for name, field in schema["properties"].items():
        text = FIELDS.get(f"{title}.{name}", FIELDS.get(name))
        if text and "$ref" not in field:
            field.setdefault("description", text)
    return {"title": title, "description": SCHEMAS[title]} | {
        key: schema[key] for key in schema if key not in ("title", "description")
    }


# Operations


def _operation(one: Operation, schemas: _Schemas) -> dict[str, Any]:
    out: dict[str, Any] = {"operationId": one.name, "tags": [one.tag], "summary": one.summary}
    if one.description:
        out["description"] = one.description
    parameters = [*_path_parameters(one.path), *_query_parameters(one, schemas), *([] if one.is_open else [_budget()])]
    if parameters:
        out["parameters"] = parameters
    if one.body is not None:
        out["requestBody"] = {"required": one.body == MESSAGES, "content": _content_in(one, schemas)}
    good = {"description": HTTPStatus(one.status).phrase, "headers": _HEADERS, "content": _content_out(one, schemas)}
    good |= {"links": links} if (links := _links(one)) else {}
    refused = {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in _errors(one)}
    out["responses"] = {str(one.status): good} | refused
    out["security"] = [] if one.is_open else [{}, {"token": []}]
    return out


_HEADERS = {HEADER: {"$ref": "#/components/headers/RequestId"}}


def _errors(one: Operation) -> list[int]:
    return sorted({*ALWAYS, *one.errors, *(() if one.is_open else (401,))})


def _links(one: Operation) -> dict[str, Any]:
    paths, found = {other.name: other.path for other in OPERATIONS}, {}
    for name, taken in LINKS.get(one.name, {}).items():
        along = {part: f"$request.path.{part}" for part in PARTS if f"{{{part}}}" in one.path and f"{{{part}}}" in paths[name]}
        found[name] = {"operationId": name, "parameters": along | taken}
    return found


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for name, part in PARTS.items():
        if f"{{{name}}}" in path:
            yield {"name": name, "in": "path", "required": True, **part}


def _query_parameters(one: Operation, schemas: _Schemas) -> Iterator[dict[str, Any]]:
    if one.query is None:
        return
    for name, schema in schemas.fields(one.query).items():
        plain = dict(schema)
        text = plain.pop("description", "")
        if "anyOf" in plain:  # a parameter that is not sent is the null of it
            plain = next(kind for kind in plain["anyOf"] if kind != {"type": "null"})
        yield {"name": name, "in": "query", "schema": plain, **({"description": text} if text else {})}


def _budget() -> dict[str, Any]:
    text = "Milliseconds that the caller still has; when they are over before the work began, nothing is done: 504."
    return {
        "name": BUDGET,
        "in": "header",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**12 - 1},
        "description": text,
    }


def _content_in(one: Operation, schemas: _Schemas) -> dict[str, Any]:
    shown = {} if one.body_example is None else {"example": one.body_example}
    if one.body != MESSAGES:
        return {JSON: {"schema": schemas.of(one.body), **shown}}
    message = schemas.of(JsonMessage)
    many = {"type": "array", "items": message, "minItems": 1, "maxItems": BATCH_MESSAGES_MAX}
    whole = {"type": "object", "properties": {"messages": many}, "required": ["messages"], "additionalProperties": False}
    lines = {"type": "string", "description": "A message a line, each a `JsonMessage`."}
    row = {"type": "string", "format": "binary", "description": "Documents in a row, each a `BsonMessage`."}
    return {
        JSON: {"schema": {"anyOf": [whole, message]}, **shown},
        NDJSON: {"schema": lines, "example": '{"body": 1, "id": "n1"}\n{"body": 2, "delay": 3600}\n'},
        BSON: {"schema": row},
    }


def _content_out(one: Operation, schemas: _Schemas) -> dict[str, Any]:
    if not isinstance(one.answer, str):
        shown = {} if one.answer_example is None else {"example": one.answer_example}
        found: dict[str, Any] = {JSON: {"schema": schemas.of(one.answer), **shown}}
        if one.answer is answers.Messages:
            text = "The same messages as BSON documents, one behind the other."
            found[BSON] = {"schema": {"type": "string", "format": "binary", "description": text}}
        return found
    if one.answer == JSON:
        return {JSON: {"schema": {"type": "object"}}}
    said = "Prometheus' text format" if one.answer == TEXT else "A `Letter` a line"
    plain = {"type": "string"} | ({"description": said} if one.answer in (TEXT, NDJSON) else {})
    return {kind: {"schema": plain} for kind in one.answer.split()}


# Errors


def codes_by_status() -> dict[int, list[str]]:
    """Every code that a refusal may have.

    >>> codes_by_status()[409]
    ['CONFLICT']
    """
    found: dict[int, set[str]] = {status: set(codes) for status, codes in PLAIN_CODES.items()}
    for kind in _subclasses(errors.TurtleError):
        if kind.__module__ in (errors.__name__, shell_errors.__name__) and kind.status != 500:
            found.setdefault(kind.status, set()).add(kind.code)
    return {status: sorted(codes) for status, codes in found.items()}


def _subclasses(kind: type[errors.TurtleError]) -> Iterator[type[errors.TurtleError]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _error(status: int, codes: list[str]) -> dict[str, Any]:
    said = ", ".join(f"`{code}`" for code in codes)
    inner = {"type": "object", "properties": {"error": {"type": "object", "properties": {"code": {"enum": codes}}}}}
    body = {"code": codes[0], "message": "what is wrong and what to do", "request_id": "7f3a90c1-2b"}
    schema = {"allOf": [{"$ref": REF.format(name="Error")}, inner]}
    headers: dict[str, Any] = dict(_HEADERS)
    if status == 429:
        headers["Retry-After"] = {"schema": {"type": "integer"}, "description": "Seconds; `retry_after_ms` is more exact."}
    return {"description": said, "headers": headers, "content": {JSON: {"schema": schema, "example": {"error": body}}}}
