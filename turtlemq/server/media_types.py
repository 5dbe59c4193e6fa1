"""Media types of request and answer bodies: the values of Content-Type and Accept that the server knows."""

from __future__ import annotations

JSON = "application/json"
NDJSON = "application/x-ndjson"  # a JSON value on each line
BSON = "application/bson"  # documents, one behind the other
TEXT = "text/plain"
HTML = "text/html"
