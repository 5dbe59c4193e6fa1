"""Handlers of the browser pages: the dashboard at /, the cluster at /cluster, the API description at /docs, their files.

The files are static and hold no data, so they need no token: their scripts call the HTTP interface with the token that the user
typed in. The Content-Security-Policy allows nothing from another origin and no inline script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib import resources

from aiohttp import web

from turtlemq.server import pages as static
from turtlemq.server.media_types import JSON

MakeDocument = Callable[[], bytes]
DOCUMENT: web.AppKey[MakeDocument] = web.AppKey("document")  # of OpenAPI; made at the first request, in 80 ms
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """All files by name, those of other projects in the folder `vendor` included, with their ETags. Read once."""
    out, root = {}, resources.files(static)
    for entry in (*root.iterdir(), *root.joinpath("vendor").iterdir()):
        if entry.name.rpartition(".")[2] in TYPES:
            data = entry.read_bytes()
            out[entry.name] = (data, f'"{hashlib.sha256(data).hexdigest()[:16]}"')
    return out


def _send(request: web.Request, name: str) -> web.Response:
    """A file, or 304 if the browser has it already."""
    if name not in _files():
        raise web.HTTPNotFound
    data, tag = _files()[name]
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=data, content_type=TYPES[name.rpartition(".")[2]], charset="utf-8", headers=headers)


async def dashboard(request: web.Request) -> web.Response:
    """GET /"""
    return _send(request, "dashboard.html")


async def cluster(request: web.Request) -> web.Response:
    """GET /cluster"""
    return _send(request, "cluster.html")


async def docs(request: web.Request) -> web.Response:
    """GET /docs"""
    return _send(request, "docs.html")


async def file(request: web.Request) -> web.Response:
    """GET /pages/{file}"""
    return _send(request, request.match_info["file"])


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json"""
    return web.Response(body=request.app[DOCUMENT](), content_type=JSON)
