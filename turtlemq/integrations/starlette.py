"""Starlette and FastAPI: one `AsyncClient` for the application, opened and closed by its lifespan, and got from a request.

app = FastAPI(lifespan=turtlemq_lifespan())

@app.post("/orders")
async def order(client: Annotated[AsyncClient, Depends(turtlemq_client)]) -> ...:
    await client.put("orders", {"close": 17}, delay=1800)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.requests import HTTPConnection

from turtlemq.client import AsyncClient

STATE = "turtlemq"
Lifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]


def turtlemq_lifespan(
    inner: Lifespan | None = None, **arguments: Any
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """A lifespan with a client; its arguments are those of `AsyncClient`. `inner`: another lifespan, which runs inside of it."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[dict[str, Any]]:
        async with AsyncClient(**arguments) as client:
            if inner is None:
                yield {STATE: client}
                return
            async with inner(app) as state:
                yield {**(state or {}), STATE: client}

    return lifespan


def turtlemq_client(connection: HTTPConnection) -> AsyncClient:
    """The client of the application, from a request or a websocket. For `Depends`, too."""
    client = getattr(connection.state, STATE, None)
    if not isinstance(client, AsyncClient):
        raise RuntimeError("the application has no client of TurtleMQ: make it with lifespan=turtlemq_lifespan()")
    return client
