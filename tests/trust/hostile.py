"""Hostile input: what a client may send, and what a file may hold, changed at random. A reader answers with an error that is
documented, never with another, or with a result that is valid; it ends, and takes no more room than what it was told to.

Over HTTP the same is tried by tests/test_hostile.py (raw sockets), tests/test_openapi.py (every operation of the OpenAPI
document) and tests/test_server_security.py (every endpoint with every kind of token).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import bson
import numpy as np

from tests.trust.damage import STRIKES
from tests.trust.damage_ground import Folder, Ram, make
from tests.trust.model import Broken, Figures, Part
from turtlemq import backup
from turtlemq.broker import checkpoint
from turtlemq.errors import TurtleError
from turtlemq.index.limits import check_batch
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.server.messages import BSON, JSON, NDJSON, Rules, decode_batch
from turtlemq.server.unpack import unpacked

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

NOW = 1_000_000
LIMIT = 1 << 20
ROOM = 400 << 20  # more than that nothing may take, whatever it reads
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    2**31,
    2**62,
    "",
    "-",
    "a/b",
    "\0",
    "x" * 300,
    [],
    {},
    [[]],
    {"a": {"b": 1}},
)


def changed(data: bytes, dice: Random) -> bytes:
    """Most of it stays, so that the change is met far inside."""
    out = bytearray(data)
    for _ in range(dice.choice([0, 1, 1, 2, 4])):
        if out:
            dice.choice(list(STRIKES.values()))(out, dice)
    return bytes(out)


def message(dice: Random) -> dict[str, Any]:
    """One that may be right, or have something odd in any field."""
    fields: dict[str, Any] = {"body": dice.choice(["text", 1, {"a": [1, None]}]), "id": f"m{dice.randrange(9)}", "delay": 1.5}
    extra = {"due_ms": 5, "ttr": 3, "priority": "high", "expires_ms": 10**12, "headers": {"a": "b"}, "body_base64": "YQ=="}
    fields |= dict(dice.sample(sorted(extra.items()), dice.choice([0, 0, 1, 2])))
    if dice.random() < 0.4:
        fields[dice.choice([*fields, *extra, "evil"])] = dice.choice(ODD)
    return fields


# What clients send


def bodies(case: int, dice: Random, _: Path) -> str:
    """A body in one of three languages, perhaps broken somewhere."""
    kind = dice.choice([JSON, NDJSON, BSON])
    some = [message(dice) for _ in range(dice.choice([1, 2, 70]))]
    if kind == BSON:
        data = b"".join(bson.encode(one) for one in some)
    elif kind == NDJSON:
        data = b"\n".join(json.dumps(one).encode() for one in some)
    else:
        data = json.dumps({"messages": some} if len(some) > 1 else some[0]).encode()
    data = changed(data, dice) if dice.random() < 0.7 else data
    try:
        batch = decode_batch(data, kind, NOW, Rules())
        check_batch(batch)
    except TurtleError as error:
        if not 400 <= error.status < 500:
            raise Broken(f"case {case}: a body is answered with {error.status}: {error}") from error
        return "bodies refused"
    if kind == BSON and len(bson.decode_all(data)) != len(batch):
        raise Broken(f"case {case}: {len(batch)} messages were read from {len(bson.decode_all(data))} documents")
    if any(not isinstance(body, bytes) for body in batch.bodies):
        raise Broken(f"case {case}: a body that is no bytes")
    return "bodies taken"


def packed(case: int, dice: Random, _: Path) -> str:
    """Packed bodies, broken ones and bombs."""
    how = dice.choice(sorted(PACKERS))
    size = dice.choice([0, 10, LIMIT - 1, LIMIT, LIMIT + 1, 30 * LIMIT])
    data = changed(PACKERS[how](bytes(size)) * dice.choice([1, 1, 3]), dice) if dice.random() < 0.5 else PACKERS[how](bytes(size))
    held: list[int] = []
    try:
        out = asyncio.run(unpacked(data, how, LIMIT, held.append))
    except TurtleError as error:
        if not 400 <= error.status < 500:
            raise Broken(f"case {case}: a packed body is answered with {error.status}: {error}") from error
        out = b""
    if len(out) > LIMIT or sum(held) > LIMIT:
        raise Broken(f"case {case}: {sum(held):,} bytes were unpacked, {LIMIT:,} are the limit")
    return "bodies unpacked" if out else "packed bodies refused"


# What files hold


@lru_cache(maxsize=1)
def _folder(where: Path) -> Folder:
    return make(where / "story", 5, clean=True)


def files(case: int, dice: Random, where: Path) -> str:
    """A file of a data folder, changed, or noise under its name, read by whoever reads such files."""
    folder = _folder(where)
    name = dice.choice(sorted(folder.files))
    data = changed(folder.files[name], dice) if dice.random() < 0.8 else dice.randbytes(dice.choice([0, 3, 100, 9000]))
    path = where / "file" / Path(name).name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    try:
        return _read(path)
    except TurtleError:
        return "files refused"
    finally:
        path.unlink()


def _read(path: Path) -> str:
    door = Ram()
    if path.suffix == ".bson":
        _, found = log.scan_file(door, path)
        view = door.map(path)
        for at, length in zip(found.positions.tolist(), found.lengths.tolist(), strict=True):
            f.decode(view[at : at + length])
    elif path.suffix in (".index", ".run"):
        table = t.open_table(door, path)
        assert table is not None
        table.verify()
        table.places(np.arange(table.cover.documents))
        table.find(1 << 63)
        table.rank(1 << 40)
        table.kills()
    elif path.name == checkpoint.FILE:
        return "files read" if checkpoint.read(door, path.parent) else "files refused"
    elif path.name == "CLEAN" or path.suffix == ".dead":
        try:
            f.decode_checked(path.read_bytes())
        except ValueError:  # what its callers expect
            return "files refused"
    else:
        path.rename(path.with_name(backup.MANIFEST))
        try:
            backup.load(door, path.parent)
        finally:
            path.with_name(backup.MANIFEST).rename(path)
    return "files read"


DEEDS = (bodies, files, files, packed)


def run(cases: range, folder: Path) -> Figures:
    """See the module."""
    seen: Figures = Counter()
    for case in cases:
        dice = Random(case)
        try:
            seen[DEEDS[case % len(DEEDS)](case, dice, folder)] += 1
        except (Broken, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise Broken(f"case {case}: {type(error).__name__}: {error}") from error
        if _most_bytes() > ROOM:
            raise Broken(f"case {case}: it took more than {ROOM >> 20} MiB")
    return seen


def _most_bytes() -> int:
    """The most memory that this process has had. Not getrusage: that counts what whoever started it had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


PART = Part(
    name="hostile",
    unit="inputs",
    about="Bodies, packed bodies and files of every kind, changed at random: a documented error or a valid result.",
    run=run,
    quick=2_000,
    full=100_000,
    chunk=1_000,
)
