"""Connections to other processes: no body before the other side has taken the request, answers of all kinds, connections that are
used again only if nothing is left on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from turtlemq.client.http_answers import BrokenAnswer
from turtlemq.server.outbound import Body, Limits, NotTaken, OutboundPool, Unreached

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Story = Callable[[str, OutboundPool], Awaitable[None]]


class Other:
    """A server that notes all bytes and answers as a test wants."""

    def __init__(self, talk: Callable[[Other, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.connections, self.heads, self.bodies = 0, list[bytes](), list[bytes]()
        self._talk = talk

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._talk(self, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def head(self, reader: asyncio.StreamReader) -> bytes:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        return self.heads[-1]


@asynccontextmanager
async def serving(other: Other) -> AsyncIterator[str]:
    server = await asyncio.start_server(other.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def run(other: Other, story: Story) -> None:
    async def work() -> None:
        async with asyncio.timeout(20), serving(other) as url:
            pool = OutboundPool()
            try:
                await story(url, pool)
            finally:
                pool.close()

    asyncio.run(work())


async def body_of(*pieces: bytes) -> Body:
    for piece in pieces:
        yield piece


async def answering(other: Other, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes each request, with its body, and answers."""
    while True:
        head = await other.head(reader)
        if b"Expect" in head:
            writer.write(CONTINUE)
        if b"chunked" in head:
            data = b""
            while size := int(await reader.readline(), 16):
                data += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
            other.bodies.append(data)
        elif b"Content-Length" in head:
            length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
            other.bodies.append(await reader.readexactly(length))
        writer.write(OK)


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("pieces", [(b"ab",), (b"a" * 3_000_000, b"b")])
def test_bodies_arrive_whole_over_one_connection(pieces: tuple[bytes, ...], has_length: bool) -> None:
    other = Other(answering)
    headers = {"Content-Length": str(sum(map(len, pieces)))} if has_length else {}

    async def story(url: str, pool: OutboundPool) -> None:
        for _ in range(3):
            answer = await pool.ask("POST", f"{url}/v1/x?y", headers, body_of(*pieces))
            assert (answer.status, await answer.read()) == (200, b"ok")
            answer.release()

    run(other, story)
    assert (other.connections, other.bodies) == (1, [b"".join(pieces)] * 3)
    assert other.heads[0].startswith(b"POST /v1/x?y HTTP/1.1\r\nHost: 127.0.0.1:")


def until(end_s: float) -> Limits:
    return Limits(end_s=asyncio.get_running_loop().time() + end_s)


def until_taken(end_s: float) -> Limits:
    return Limits(taken_s=asyncio.get_running_loop().time() + end_s)


@pytest.mark.parametrize(("limits", "kind"), [(until, TimeoutError), (until_taken, NotTaken)])
def test_a_body_is_not_begun_before_100_continue(limits: Callable[[float], Limits], kind: type[Exception]) -> None:
    begun = False

    async def body() -> Body:
        nonlocal begun
        begun = True
        yield b"x"

    async def silent(other: Other, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await other.head(reader)
        other.bodies.append(await reader.read(1))

    other = Other(silent)

    async def story(url: str, pool: OutboundPool) -> None:
        with pytest.raises(kind):
            await pool.ask("POST", url + "/", {"Content-Length": "1"}, body(), limits(0.3))
        while not other.bodies:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    run(other, story)
    assert (begun, other.bodies) == (False, [b""])


@pytest.mark.parametrize("before", [b"", CONTINUE])
def test_a_refused_body_ends_its_connection(before: bytes) -> None:
    async def refusing(other: Other, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await other.head(reader)
        writer.write(before + b"HTTP/1.1 413 Large\r\nContent-Length: 2\r\n\r\nno")
        await reader.read()

    other = Other(refusing)

    async def endless() -> Body:
        while True:
            yield b"x" * 65_536

    async def story(url: str, pool: OutboundPool) -> None:
        for _ in range(2):
            answer = await pool.ask("POST", url + "/", {"Content-Length": "9999999999"}, endless())
            assert (answer.status, await answer.read()) == (413, b"no")
            answer.release()

    run(other, story)
    assert other.connections == 2


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", None),
        (b"HTTP/1.1 200 O", None),
        (b"SSH-2.0\r\n\r\n", None),
    ],
)
def test_answers_that_end_with_their_connection(sent: bytes, got: bytes | None) -> None:
    async def once(other: Other, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await other.head(reader)
        writer.write(sent)

    async def story(url: str, pool: OutboundPool) -> None:
        try:
            answer = await pool.ask("GET", url + "/", {}, None)
            found: bytes | None = await answer.read()
            answer.release()
        except BrokenAnswer:
            found = None
        assert found == got

    run(Other(once), story)


def test_an_unread_answer_ends_its_connection() -> None:
    other = Other(answering)

    async def story(url: str, pool: OutboundPool) -> None:
        for _ in range(2):
            (await pool.ask("GET", url + "/", {}, None)).release()

    run(other, story)
    assert other.connections == 2


def test_a_connection_that_was_closed_meanwhile_is_replaced() -> None:
    async def once(other: Other, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await other.head(reader)
        writer.write(OK)

    other = Other(once)

    async def story(url: str, pool: OutboundPool) -> None:
        for _ in range(2):
            answer = await pool.ask("GET", url + "/", {}, None)
            assert await answer.read() == b"ok"
            answer.release()
            await asyncio.sleep(0.1)

    run(other, story)
    assert other.connections == 2


def test_an_address_without_a_server_is_told_apart() -> None:
    async def story(_: str, pool: OutboundPool) -> None:
        with pytest.raises(Unreached):
            await pool.ask("GET", "http://127.0.0.1:1/", {}, None)

    run(Other(answering), story)


def test_a_header_cannot_begin_another_one() -> None:
    other = Other(answering)

    async def story(url: str, pool: OutboundPool) -> None:
        with pytest.raises(ValueError, match="line end"):
            await pool.ask("GET", url + "/", {"X-A": "1\r\nX-B: 2"}, None)

    run(other, story)
    assert other.heads == []
