"""Packed bodies: gzip, deflate and zstd come out as they went in; those that are cut off, broken or monstrous change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.server_process import Server, running
from turtlemq.errors import InvalidArgument, TooLarge
from turtlemq.server.incoming.decompress import MEMBERS_MAX, decompressed

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

steady = settings(derandomize=True, deadline=None, max_examples=40, database=None)
LIMIT = 1 << 20
PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", lambda data: zlib.compress(data, wbits=-15)),
    "zstd": ("zstd", zstd.compress),
}


def unpack(data: bytes, how: str, limit: int = LIMIT) -> bytes:
    held: list[int] = []
    out = asyncio.run(decompressed(data, how, limit, held.append))
    assert sum(held) == len(out)
    return out


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("packed") / "data", TURTLEMQ_MAX_BODY_BYTES=str(LIMIT)) as found:
        yield found
        assert "Traceback" not in found.log


@pytest.mark.parametrize("name", PACKERS)
def test_a_packed_body_is_understood(server: Server, name: str) -> None:
    how, pack = PACKERS[name]
    topic, lines = name.replace(" ", "-"), b"".join(b'{"body": %d}\n' % i for i in range(5_000))
    headers = {"Content-Encoding": how, "Content-Type": "application/x-ndjson"}
    answer = server.call("POST", f"/v1/topics/{topic}/messages", data=pack(lines), headers=headers)
    assert (answer.status, answer.json["created"]) == (201, 5_000)
    asked = pack(json.dumps({"max": 10_000, "wait": 10}).encode())
    found = server.call("POST", f"/v1/topics/{topic}/fetch", data=asked, headers={"Content-Encoding": how})
    assert sorted(message["body"] for message in found.json["messages"]) == list(range(5_000))


@pytest.mark.parametrize("name", PACKERS)
def test_a_truncated_or_too_large_body_changes_nothing(server: Server, name: str) -> None:
    how, pack = PACKERS[name]
    lines = pack(b'{"body": 1}\n' * 1_000)
    headers = {"Content-Encoding": how, "Content-Type": "application/x-ndjson"}
    for data in (lines[: len(lines) // 2], lines[:-1], b"\xff" + lines, lines + b"rest"):
        refused = server.call("POST", "/v1/topics/never/messages", data=data, headers=headers)
        assert (refused.status, refused.code) == (400, "INVALID_ARGUMENT"), refused.data
    for bomb in (pack(b" " * (64 << 20)), pack(b"x" * (LIMIT + 1)), pack(b"\n" * (LIMIT // 2)) * 3):
        refused = server.call("POST", "/v1/topics/never/messages", data=bomb, headers=headers)
        assert (refused.status, refused.code) == (413, "TOO_LARGE"), refused.data
    assert server.call("GET", "/v1/topics/never").status == 404


def test_two_packings_are_one_too_many(server: Server) -> None:
    data = zstd.compress(gzip.compress(b'{"body": 1}'))
    for how in ("gzip, zstd", "br", "compress", "x" * 200):
        refused = server.call("POST", "/v1/topics/never/messages", data=data, headers={"Content-Encoding": how})
        assert (refused.status, refused.code) == (415, "UNSUPPORTED_MEDIA_TYPE")


@pytest.mark.parametrize("name", PACKERS)
@steady
@given(data=st.data())
def test_any_bytes_come_out_whole_or_not_at_all(name: str, data: st.DataObject) -> None:
    how, pack = PACKERS[name]
    parts = data.draw(st.lists(st.binary(max_size=2_000), min_size=1, max_size=4))
    whole = b"".join(map(pack, parts))
    assert unpack(whole, how) == b"".join(parts)
    last = len(pack(parts[-1]))
    cut = data.draw(st.integers(len(whole) - last + 1, len(whole) - 1))
    with pytest.raises(InvalidArgument):
        unpack(whole[:cut], how)


@pytest.mark.parametrize("how", ["gzip", "deflate", "zstd"])
@steady
@given(noise=st.binary(min_size=1, max_size=200))
def test_noise_is_refused_or_unpacked_but_nothing_else(how: str, noise: bytes) -> None:
    with contextlib.suppress(InvalidArgument, TooLarge):
        unpack(noise, how, 1_000)


@pytest.mark.parametrize("name", PACKERS)
def test_limits_are_exact_and_parts_are_counted(name: str) -> None:
    how, pack = PACKERS[name]
    assert len(unpack(pack(b"x" * LIMIT), how)) == LIMIT
    with pytest.raises(TooLarge):
        unpack(pack(b"x" * LIMIT), how, LIMIT - 1)
    assert unpack(pack(b"") * (MEMBERS_MAX - 1), how) == b""
    with pytest.raises(InvalidArgument, match="parts"):
        unpack(pack(b"") * (MEMBERS_MAX + 1), how)


def test_a_window_that_would_take_much_memory_is_refused() -> None:
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    wide = packer.compress(b"x" * 100) + packer.flush()
    with pytest.raises(InvalidArgument, match="unpacked"):
        unpack(wide, "zstd")
