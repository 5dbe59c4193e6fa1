"""The OpenAPI 3.1 document: made from the table of operations, the types of requests and answers, and the classes of errors.

Texts about types and fields are in `openapi_texts`. Made once, at the first request. The names of schemas and operations are part
of the interface: a Python class may be renamed, its schema may not (`NAMES`).
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
from turtlemq.schedules import NAME_BYTES_MAX
from turtlemq.server import errors as server_errors
from turtlemq.server.forward import is_for_leader
from turtlemq.server.incoming.bson_messages import BsonMessage
from turtlemq.server.incoming.json_messages import JsonMessage
from turtlemq.server.media_types import BSON, JSON, NDJSON, TEXT
from turtlemq.server.metrics.exposition import OPENMETRICS
from turtlemq.server.openapi_texts import ABOUT, FIELDS, SCHEMAS, TAGS
from turtlemq.server.operation import MESSAGES, Operation
from turtlemq.server.operations import DOCUMENTED
from turtlemq.server.outgoing import answers
from turtlemq.server.outgoing.messages import Delivered
from turtlemq.server.outgoing.reply import LEASE_HEADER, encode
from turtlemq.server.request import BUDGET
from turtlemq.server.topic_settings import section_title
from turtlemq.server.trace import HEADER

LICENSE = {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
FORMATS = {"integer": "int64", "number": "double"}
LINES = {  # answers that are lines of text, by media type
    NDJSON: "A `Letter` a line",
    TEXT: "Prometheus' text format",
    OPENMETRICS: "OpenMetrics, with exemplars if the server traces",
}
REF = "#/components/schemas/{name}"
ALWAYS = (400, 403, 429, 503, 504)  # statuses that any request may be answered with
PLAIN_CODES = {404: ["NOT_FOUND"]}  # codes without an error class
NAMES = {  # published names of schemas whose Python class has another name
    "Error": "ErrorAnswer",  # generators of clients change a plain `Error`: most languages have one
    "Moment": "TimelineEntry",
    "TopicSettings": "Settings",
}
OPTIONAL = {"Delivered": ("body", "body_base64")}  # fields that msgspec calls required, but that an answer may leave out
NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"}
ID = {"type": "string", "minLength": 1, "maxLength": ID_BYTES_MAX, "pattern": r"^[^/\-\x00-\x1f\x7f][^/\x00-\x1f\x7f]*$"}
PARTS: dict[str, dict[str, Any]] = {
    "topic": {"schema": NAME, "example": "orders", "description": "1 to 200 of A-Z a-z 0-9 . _ -, a letter or digit first."},
    "group": {"schema": NAME, "example": "default", "description": "As a topic. Groups see every message, each for itself."},
    "id": {
        "schema": ID,
        "example": "order-17",
        "description": "1 to 200 bytes of printable text, no `/`, no `-` at the beginning.",
    },
    "name": {
        "schema": ID | {"maxLength": NAME_BYTES_MAX},
        "example": "report",
        "description": "1 to 186 bytes of printable text, no `/`, no `-` at the beginning.",
    },
    "client": {"schema": NAME, "example": "worker-1", "description": "The name of a registered client, or the key of a stream."},
    "replay": {"schema": {"type": "string", "pattern": "^[0-9a-f]{12}$"}, "example": "5f0c2a91d3e4"},
    "shard": {"schema": {"type": "string", "pattern": "^[0-9]{1,4}$"}, "example": "0", "description": "The number of a shard."},
    "node": {"schema": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}, "example": "a"},
}
_STORED = {"id": "$response.body#/ids/0"}
_FIRST = {"id": "$response.body#/messages/0/id"}
_PAGE = {"cursor": "$response.body#/cursor"}
LINKS: dict[str, dict[str, dict[str, str]]] = {  # operations that may follow a good answer; variables of the path are passed on
    "beginReplay": {"getReplay": {"replay": "$response.body#/id"}, "cancelReplay": {"replay": "$response.body#/id"}},
    "putTopic": {"getTopic": {}, "produce": {}, "fetch": {}, "putGroup": {}, "dropTopic": {}},
    "listTopics": {"getTopic": {"topic": "$response.body#/topics/0/topic"}},
    "produce": {"getMessage": _STORED, "changeMessage": _STORED, "cancelMessage": _STORED, "fetch": {}, "forecast": {}},
    "fetch": {"getMessage": _FIRST, "ack": {}, "extend": {}},
    "ack": {"fetch": {}, "listDead": {}, "summariseDead": {}},
    "putGroup": {"fetchInGroup": {}, "getGroup": {}, "dropGroup": {}},
    "fetchInGroup": {"getMessage": _FIRST, "ackInGroup": {}, "extendInGroup": {}},
    "listMessages": {"listMessages": _PAGE, "getMessage": _FIRST},
    "listDead": {"listDead": _PAGE, "requeueDead": {}, "deleteDead": {}, "exportDead": {}},
    "putSchedule": {"getSchedule": {}, "nextOfSchedule": {}, "triggerSchedule": {}, "pauseSchedule": {}, "dropSchedule": {}},
    "listSchedules": {"listSchedules": _PAGE},
    "triggerSchedule": {"getMessage": {"id": "$response.body#/id"}},
    "pinBackup": {"unpinBackup": {}},
}


@cache
def encoded() -> bytes:
    """The document as bytes."""
    return encode(document())


def document() -> dict[str, Any]:
    """The whole document."""
    schemas = _Schemas([Delivered, answers.Error, answers.Letter, JsonMessage, BsonMessage, *_types()], _queries())
    paths: dict[str, dict[str, Any]] = {}
    for operation in DOCUMENTED:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TurtleMQ", "version": __version__, "description": ABOUT, "license": LICENSE},
        "servers": [{"url": "/", "description": "The server that gives this document."}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {f"Error{status}": _error(status, codes) for status, codes in sorted(codes_by_status().items())},
            "headers": {"RequestId": {"schema": {"type": "string"}, "description": "The request's name in the log."}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types() -> Iterator[Any]:
    """All types of the table; bodies and answers that are named by a media type have none."""
    for operation in DOCUMENTED:
        yield from (kind for kind in (operation.body, operation.answer) if kind is not None and not isinstance(kind, str))


def _queries() -> set[Any]:
    """All types of query strings. Their fields become parameters, so no schema has their names."""
    return {operation.query for operation in DOCUMENTED if operation.query is not None}


# Schemas


class _Schemas:
    """JSON schemas of types. Shared ones are `components`, under their published names."""

    def __init__(self, kinds: Iterable[Any], queries: Iterable[Any]) -> None:
        kinds = list(kinds)
        made, components = msgspec.json.schema_components(kinds, ref_template=REF)
        self._queries = _published(msgspec.json.schema_components(queries, ref_template=REF)[1])
        self._made = [(kind, _published(schema)) for kind, schema in zip(kinds, made, strict=True)]
        self.components = {NAMES.get(name, name): _described(_published(schema)) for name, schema in components.items()}
        for name, optional in OPTIONAL.items():
            self.components[name]["required"] = [field for field in self.components[name]["required"] if field not in optional]
        for row in settings.TABLE:
            if row.path:
                section = section_title(row.path[0]) if len(row.path) > 1 else "Settings"
                self.components[section]["properties"][row.path[-1]] |= {"description": _sentence(row.text)} | _limits(row)
        self._queries["BrowseQuery"]["properties"]["state"]["enum"] = list(STATES)
        self.components["JsonMessage"] |= {"if": {"not": _with("body")}, "then": _with("body_base64")}  # anyOf makes more models
        self.components["MessageBatch"] = _batch()

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type, or a reference to it."""
        return next(schema for known, schema in self._made if known == kind)

    def parameters(self, query: Any) -> dict[str, Any]:
        """The fields of a query string, by name."""
        return _with_texts(self._queries[query.__name__]["properties"], query.__name__)


def _with(field: str) -> dict[str, Any]:
    """The schema of objects that have a field."""
    return {"properties": {field: {}}, "required": [field]}


def _batch() -> dict[str, Any]:
    """The schema of many messages in one request."""
    many = {"type": "array", "items": {"$ref": REF.format(name="JsonMessage")}, "minItems": 1, "maxItems": BATCH_MESSAGES_MAX}
    fields = {"type": "object", "properties": {"messages": many}, "required": ["messages"], "additionalProperties": False}
    return {"title": "MessageBatch", "description": SCHEMAS["MessageBatch"], **fields}


def _sentence(text: str) -> str:
    """A text of the table of settings as a description."""
    return f"{text[0].upper()}{text[1:]}."


def _limits(row: settings.Setting) -> dict[str, Any]:
    """The limits of a topic's setting as JSON schema keywords, in the unit of HTTP."""
    if row.limits.words:
        return {"enum": list(row.limits.words)}
    low, high = row.limits.low, row.limits.high
    return {"minimum": low / 1000, "maximum": high / 1000} if row.in_seconds else {"minimum": low, "maximum": high}


def _published(schema: Any) -> Any:
    """A schema with published names in titles and references. Numbers have a format and enums a type, because generators of
    clients take 32 bits for numbers without one."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return {"$ref": REF.format(name=NAMES.get(name, name))}  # a default of {} says nothing
        out = {key: NAMES.get(value, value) if key == "title" else _published(value) for key, value in schema.items()}
        if schema.get("type") in FORMATS:
            out["format"] = FORMATS[schema["type"]]
        return {"type": "string"} | out if "enum" in schema else out
    return [_published(item) for item in schema] if isinstance(schema, list) else schema


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """A component with its texts."""
    title = schema["title"]
    _with_texts(schema["properties"], title)
    return {"title": title, "description": SCHEMAS[title]} | {
        key: schema[key] for key in schema if key not in ("title", "description")
    }


def _with_texts(fields: dict[str, Any], title: str) -> dict[str, Any]:
    """The fields of a type, each with its text."""
    for name, field in fields.items():
        text = FIELDS.get(f"{title}.{name}", FIELDS.get(name))
        if text and "$ref" not in field:
            field.setdefault("description", text)
    return fields


# Operations


def _operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    out: dict[str, Any] = {"operationId": operation.name, "tags": [operation.tag], "summary": operation.summary}
    if operation.description:
        out["description"] = operation.description
    parameters = [*_path_parameters(operation.path), *_query_parameters(operation, schemas)]
    if not operation.is_open:
        parameters.append(_budget())
    if parameters:
        out["parameters"] = parameters
    if operation.body is not None:
        out["requestBody"] = {"required": operation.body == MESSAGES, "content": _content_in(operation, schemas)}
    headers = _HEADERS | _LEASE_HEADERS if operation.answer is answers.Messages else _HEADERS
    good = {"description": HTTPStatus(operation.status).phrase, "headers": headers, "content": _content_out(operation, schemas)}
    good |= {"links": links} if (links := _links(operation)) else {}
    refused = {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in _errors(operation)}
    out["responses"] = {str(operation.status): good} | refused
    out["security"] = [] if operation.is_open else [{}, {"token": []}]
    return out


_HEADERS = {HEADER: {"$ref": "#/components/headers/RequestId"}}
_LEASE_HEADERS = {LEASE_HEADER: {"schema": {"type": "string"}, "description": "`lease`, of a BSON answer that leases messages."}}


def _errors(operation: Operation) -> list[int]:
    forwarded = (421,) if is_for_leader(operation.path) else ()
    return sorted({*ALWAYS, *operation.errors, *forwarded, *(() if operation.is_open else (401,))})


def _links(operation: Operation) -> dict[str, Any]:
    paths, links = {other.name: other.path for other in DOCUMENTED}, {}
    for name, taken in LINKS.get(operation.name, {}).items():
        shared = [part for part in PARTS if f"{{{part}}}" in operation.path and f"{{{part}}}" in paths[name]]
        passed_on = {part: f"$request.path.{part}" for part in shared}
        links[name] = {"operationId": name, "parameters": passed_on | taken}
    return links


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for name, part in PARTS.items():
        if f"{{{name}}}" in path:
            yield {"name": name, "in": "path", "required": True, **part}


def _query_parameters(operation: Operation, schemas: _Schemas) -> Iterator[dict[str, Any]]:
    if operation.query is None:
        return
    required = {field.encode_name for field in msgspec.structs.fields(operation.query) if field.required}
    for name, schema in schemas.parameters(operation.query).items():
        plain = dict(schema)
        text = plain.pop("description", "")
        if "anyOf" in plain:  # a missing parameter stands for null
            plain = next(kind for kind in plain["anyOf"] if kind != {"type": "null"})
        needed = {"required": True} if name in required else {}
        yield {"name": name, "in": "query", **needed, "schema": plain, **({"description": text} if text else {})}


def _budget() -> dict[str, Any]:
    text = "Milliseconds that the caller still has; when they are over before the work began, nothing is done: 504."
    return {
        "name": BUDGET,
        "in": "header",
        "schema": {"type": "integer", "format": "int64", "minimum": 0, "maximum": 10**12 - 1},
        "description": text,
    }


def _content_in(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    example = {} if operation.body_example is None else {"example": operation.body_example}
    if operation.body != MESSAGES:
        return {JSON: {"schema": schemas.of(operation.body), **example}}
    one_or_many = {"anyOf": [{"$ref": REF.format(name="MessageBatch")}, schemas.of(JsonMessage)]}
    lines = {"type": "string", "description": "A message a line, each a `JsonMessage`."}
    row: dict[str, Any] = {"type": "string", "format": "binary", "description": "Documents in a row, each a `BsonMessage`."}
    row |= {"contentMediaType": BSON, "contentSchema": schemas.of(BsonMessage)}
    return {
        JSON: {"schema": one_or_many, **example},
        NDJSON: {"schema": lines, "example": '{"body": 1, "id": "n1"}\n{"body": 2, "delay": 3600}\n'},
        BSON: {"schema": row},
    }


def _content_out(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    if not isinstance(operation.answer, str):
        example = {} if operation.answer_example is None else {"example": operation.answer_example}
        content: dict[str, Any] = {JSON: {"schema": schemas.of(operation.answer), **example}}
        if operation.answer is answers.Messages:
            text = "The same messages as BSON documents, one behind the other."
            content[BSON] = {"schema": {"type": "string", "format": "binary", "description": text}}
        return content
    if operation.answer == JSON:
        return {JSON: {"schema": {"type": "object"}}}
    return {kind: {"schema": {"type": "string", "description": LINES[kind]}} for kind in operation.answer.split()}


# Errors


def codes_by_status() -> dict[int, list[str]]:
    """The error codes of every status.

    >>> codes_by_status()[507]
    ['DISK_FULL']
    """
    by_status: dict[int, set[str]] = {status: set(codes) for status, codes in PLAIN_CODES.items()}
    for kind in _subclasses(errors.TurtleError):
        if kind.__module__ in (errors.__name__, server_errors.__name__) and kind.status != 500:
            by_status.setdefault(kind.status, set()).add(kind.code)
    return {status: sorted(codes) for status, codes in by_status.items()}


def _subclasses(kind: type[errors.TurtleError]) -> Iterator[type[errors.TurtleError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _error(status: int, codes: list[str]) -> dict[str, Any]:
    listed = ", ".join(f"`{code}`" for code in codes)
    body = {"code": codes[0], "message": "what is wrong and what to do", "request_id": "7f3a90c1-2b"}
    schema = {"$ref": REF.format(name="ErrorAnswer")}  # one type for all: strict enums of codes would refuse later ones
    headers: dict[str, Any] = dict(_HEADERS)
    if status == 429:
        headers["Retry-After"] = {"schema": {"type": "integer"}, "description": "Seconds; `retry_after_ms` is more exact."}
    return {"description": listed, "headers": headers, "content": {JSON: {"schema": schema, "example": {"error": body}}}}
