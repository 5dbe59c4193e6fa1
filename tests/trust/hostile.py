"""Hostile input: bodies of clients and contents of files, built and then broken by Hypothesis. A reader answers with
an error that is documented, never with another, or with a result that is right: of a body that is taken, a second decoder says
the same. It ends, and takes no more room than its limit.

Over HTTP the same is tried by `interface` (every operation of the OpenAPI document), tests/test_hostile_*.py (raw sockets) and
tests/test_server_rights.py (every endpoint with every kind of token).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import bson
import numpy as np
import typer
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.harness.codec import decode_batch
from tests.trust import hostile_decoder
from tests.trust.damage_folders import Ram, make
from tests.trust.model import Broken, Figures, Part
from turtlemq import backup
from turtlemq.broker import checkpoint
from turtlemq.broker.journal import Journal
from turtlemq.cli.files import inspect
from turtlemq.data_folder import check_format, read_clean_mark, read_settings
from turtlemq.errors import TurtleError
from turtlemq.index.validate import check_batch
from turtlemq.model import Batch
from turtlemq.segment import format as f
from turtlemq.segment import log
from turtlemq.segment import table as t
from turtlemq.server import config
from turtlemq.server.incoming.batches import DueRules
from turtlemq.server.incoming.columns import PRIORITIES
from turtlemq.server.incoming.decompress import decompressed
from turtlemq.server.media_types import BSON, JSON, NDJSON
from turtlemq.settings import Settings
from turtlemq.topic.pauses import Pauses

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

NOW = 1_000_000
LIMIT = 1 << 20
ROOM = 400 << 20  # more than that nothing may take, for any input
EACH = 25  # inputs of a case
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}
Look = Callable[[st.DataObject, Path], str]  # draws an input and reads it; returns the outcome

# Breaking

PIECES = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\n",
    b"\\",
    b"\0",
    b"\xff",
    b"null",
    b"1e999",
    b"NaN",
    b"-",
    b"=",
    b"\\ud800",
)
BURSTS = (b"[" * 20_000, b"9" * 5_000, bytes(512), b"\xff" * 40, b'{"a":' * 3_000)


@st.composite
def broken(draw: st.DrawFn, data: bytes, most: int = 3) -> bytes:
    """`data` with some changes: most of it stays, so that they are met far inside."""
    out = bytearray(data)
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, max(0, len(out) - 1)))
        length = draw(st.sampled_from([1, 1, 4, 16, 512, 4096]))
        match draw(st.sampled_from(["set", "set", "flip", "cut", "drop", "zero", "again", "insert", "burst", "exchange"])):
            case "set":
                out[at : at + 1] = bytes([draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 0x10, 0x12, 0x7F, 0x80, 0xFF, 0x2D]))])
            case "flip":
                out[at : at + 1] = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in out[at : at + 1])
            case "cut":
                del out[at:]
            case "drop":
                del out[at : at + length]
            case "zero":
                out[at : at + length] = bytes(len(out[at : at + length]))
            case "again":
                out[at:at] = out[at : at + length]
            case "insert":
                out[at:at] = draw(st.sampled_from(PIECES))
            case "burst":
                out[at:at] = draw(st.sampled_from(BURSTS))
            case _:
                one, other = (slice(i // 512 * 512, i // 512 * 512 + 512) for i in (at, draw(st.integers(0, len(out)))))
                if len(out[one]) == len(out[other]):
                    out[one], out[other] = out[other], out[one]
    return bytes(out)


# Bodies of clients

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "$ref"]), inner, max_size=2),
    max_leaves=4,
)
IDS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"], exclude_characters="/-"), min_size=1, max_size=9)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "id": IDS,
    "delay": st.integers(0, 9) | st.floats(0, 1e6),
    "ttr": st.floats(0.01, 1e6),
    "priority": st.sampled_from(["high", "normal", "low"]),
    "expires_ms": st.integers(0, 10**12),
    "headers": st.dictionaries(st.sampled_from(["a", "b"]), TEXTS.map(lambda text: text.replace("\0", "")), max_size=2),
}
NAMES = [*GOOD, "body", "due_ms", "body_base64", "evil"]
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 1.5, 1e308, 2**31, 2**62, "", "-", "a/b", "x" * 300, "YQ==", [], {}, [[]], {"a": {}}]
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[dict[str, Any]], bool]:
    """Messages, and whether all is right with them. Many have one shape, as those of one producer do."""
    shape = draw(st.lists(st.sampled_from(sorted(GOOD)), unique=True, max_size=4))
    body = draw(st.sampled_from([VALUES, TEXTS, VALUES.map(lambda value: {"v": value})]))
    fields = st.fixed_dictionaries({name: GOOD[name] for name in shape} | {"body": body})
    some = draw(st.lists(fields, min_size=1, max_size=3)) * draw(st.sampled_from([1, 1, 2, 70]))
    right = draw(st.booleans())
    if not right:
        at = draw(st.integers(0, len(some) - 1))
        some[at] = {**some[at], draw(st.sampled_from(NAMES)): draw(ODD)}
    return some, right


def written(draw: Callable[[st.SearchStrategy[Any]], Any], some: list[dict[str, Any]], kind: str) -> bytes:
    """In one of three languages, and its dialects."""
    if kind == BSON:
        as_bytes = draw(st.booleans())
        return b"".join(bson.encode({**one, "body": b"x"} if as_bytes and "body" in one else one) for one in some)
    spaces: Any = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", "\t: ")]))
    ascii_only = draw(st.booleans())
    if kind == NDJSON:
        between: str = draw(st.sampled_from(["\n", "\r\n", "\n\n"]))
        return between.join(json.dumps(one, separators=spaces, ensure_ascii=ascii_only) for one in some).encode()
    indent = draw(st.sampled_from([None, None, 1]))
    value = some[0] if len(some) == 1 and draw(st.booleans()) else {"messages": some}
    text: str = json.dumps(value, indent=indent, separators=spaces, ensure_ascii=ascii_only)
    return text.encode()


def bodies(data: st.DataObject, _: Path) -> str:
    """A body, perhaps broken somewhere. An accepted body means the same to the second decoder; a right one is accepted."""
    kind = data.draw(st.sampled_from([JSON, NDJSON, BSON]))
    some, right = data.draw(batches())
    whole = written(data.draw, some, kind)
    sent = whole if right and data.draw(st.booleans()) else data.draw(broken(whole))
    try:
        batch = decode_batch(sent, kind, NOW, DueRules())
        check_batch(batch)
    except TurtleError as error:
        if not 400 <= error.status < 500:
            raise Broken(f"a body is answered with {error.status}: {sent!r}: {error}") from error
        if right and sent == whole:
            raise Broken(f"a good body is refused: {sent!r}: {error}") from error
        return "bodies refused"
    try:
        meant = hostile_decoder.decode(sent, kind, NOW)
    except hostile_decoder.Refused as error:
        raise Broken(f"this is no {kind}, but was taken: {sent!r}: {error}") from error
    if not agree(batch, meant):
        raise Broken(f"{kind} {sent!r} was taken for {batch}; it means {meant}")
    return "bodies understood"


def agree(batch: Batch, meant: list[hostile_decoder.Meant]) -> bool:
    """Is it the same in all columns?"""

    def column(values: Any, nothing: Any = None) -> list[Any]:
        return [nothing] * len(batch) if values is None else [values] * len(batch) if isinstance(values, int) else list(values)

    flags = column(batch.flags, 0)
    return (
        len(batch) == len(meant)
        and column(batch.ids) == [one.id for one in meant]
        and column(batch.due_ms) == [one.due_ms for one in meant]
        and column(batch.ttr_ms, 0) == [one.ttr_ms for one in meant]
        and column(batch.expires_ms) == [one.expires_ms for one in meant]
        and [headers or None for headers in column(batch.headers)] == [one.headers or None for one in meant]
        and [flag & f.PRIORITY for flag in flags] == [PRIORITIES[one.priority] for one in meant]
        and all(hostile_decoder.same(*one) for one in zip(meant, batch.bodies, [flag & f.JSON for flag in flags], strict=True))
    )


def packed(data: st.DataObject, _: Path) -> str:
    """Packed bodies, broken ones and bombs."""
    how = data.draw(st.sampled_from(sorted(PACKERS)))
    size = data.draw(st.sampled_from([0, 10, LIMIT - 1, LIMIT, LIMIT + 1, 30 * LIMIT]))
    sent = data.draw(broken(_packed(how, size) * data.draw(st.sampled_from([1, 1, 3]))))
    held: list[int] = []
    try:
        out = asyncio.run(decompressed(sent, how, LIMIT, held.append))
    except TurtleError as error:
        if not 400 <= error.status < 500:
            raise Broken(f"a packed body is answered with {error.status}: {error}") from error
        out = b""
    if len(out) > LIMIT or sum(held) > LIMIT:
        raise Broken(f"{sum(held):,} bytes were unpacked, {LIMIT:,} are the limit")
    return "bodies unpacked" if out else "packed bodies refused"


@lru_cache
def _packed(how: str, size: int) -> bytes:
    return PACKERS[how](bytes(size))


# Contents of files

READERS = (
    ".bson",
    ".index",
    ".run",
    ".dead",
    "offset",
    "topic.toml",
    "paused.toml",
    "FORMAT",
    "CLEAN",
)  # endings of names that have a reader

CHECKED = (".bson", ".index", ".run", ".dead", "offset", "CLEAN")  # of these, those that begin with a document and its checksum


@dataclass(frozen=True, slots=True)
class Known:
    """A data folder, and the permitted results of its readers: those for the sound files; with a checksum, nothing else."""

    files: dict[str, bytes]
    documents: frozenset[bytes]  # of all segments, by docs/FORMAT.md
    events: list[Any]
    tables: list[Any]
    checkpoints: list[Any]
    checked: list[Any]  # the first documents of files


@lru_cache(maxsize=1)
def _known(where: Path) -> Known:
    folder, sound, door = make(where / "story", 5, clean=True), where / "sound", Ram()
    folder.copy(sound)
    paths = [sound / name for name in sorted(folder.files)]
    documents = (folder.files[name][doc.start : doc.end] for name, docs in folder.docs.items() for doc in docs)
    journals = (path for path in paths if path.name.startswith(("reserve", "history")))
    return Known(
        {name: data for name, data in folder.files.items() if name.endswith(READERS)},
        frozenset(documents),
        [event for path in journals for event in _journal(path).events()],
        [_answers(t.open_table(door, path)) for path in paths if path.suffix in (".index", ".run")],
        [checkpoint.read(door, path.parent) for path in paths if path.name == checkpoint.FILE],
        [f.decode_checked(path.read_bytes())[0] for path in paths if path.name.endswith(CHECKED)],
    )


def files(data: st.DataObject, where: Path) -> str:
    """A file of a data folder, broken or exchanged for another or for noise, read by the reader of such files: refused by name,
    or nothing comes out that was not in one of them."""
    known = _known(where)
    name = data.draw(st.sampled_from(sorted(known.files)))
    source = data.draw(st.sampled_from([name] * 8 + sorted(known.files)))
    whole = known.files[source]
    if source.endswith(".bson") and name.endswith(".bson") and data.draw(st.booleans()):
        whole = _headed(known.files[name], whole)
    content = data.draw(st.one_of(broken(whole), broken(whole), st.binary(max_size=200)))
    reader = data.draw(st.sampled_from([_read, _inspected])) if name.endswith(".bson") else _read
    place = where / "file" / (Path(name).parent.name or "root")
    place.mkdir(parents=True, exist_ok=True)
    path = place / Path(name).name
    path.write_bytes(content)
    try:
        return reader(path, content, known)
    except TurtleError as error:
        if path.name not in str(error):
            raise Broken(f"{name}: it is refused without its name: {error}") from error
        return "files refused"
    except Exception as error:
        raise Broken(f"{name}: {type(error).__name__}: {error}: {len(content)} bytes, {content[:300]!r}") from error
    finally:
        for left in place.iterdir():
            left.unlink()


def _read(path: Path, content: bytes, known: Known) -> str:
    """By the engine's own readers. Caches that say None are made again, without a word."""
    door, name = Ram(), path.name
    if name.startswith(("reserve", "history")):
        return _seen(list(_journal(path).events()), known.events)
    if path.suffix == ".bson":
        _, found = log.scan_file(door, path)
        places = list(zip(found.positions.tolist(), found.lengths.tolist(), strict=True))
        for at, length in places:
            f.decode(content[at : at + length])
        return _whole(content, places, known, [hole.reason for hole in found.damaged] or found.end < len(content))
    if path.suffix in (".index", ".run"):
        return _seen([_answers(t.open_table(door, path))], known.tables)
    if name == checkpoint.FILE:
        found_mark = checkpoint.read(door, path.parent)
        return _seen([] if found_mark is None else [found_mark], known.checkpoints)
    if name == "CLEAN":
        topics = read_clean_mark(door, path.parent)
        return _seen([] if topics is None else [topics], [one["topics"] for one in known.checked if "topics" in one])
    if path.suffix == ".dead":
        try:
            return _seen([f.decode_checked(content)[0]], known.checked)
        except ValueError:  # its callers expect this
            return "files refused"
    if name == "topic.toml":
        read_settings(door, path.parent, Settings())
    elif name == "paused.toml":
        Pauses(door, path.parent)
    elif name == "FORMAT":
        check_format(door, path.parent)
        if not 0 <= int(content) <= f.VERSION:
            raise Broken(f"format {content!r} is taken")
    else:
        raise Broken(f"there is no reader of {name}")
    return "files read"


def _seen(found: list[Any], sound: list[Any]) -> str:
    """Nothing but the original entries."""
    strange = [one for one in found if one not in sound]
    if strange:
        raise Broken(f"this was in no file: {strange[0]}")
    return "files read" if found else "files refused"


def _whole(content: bytes, places: list[tuple[int, int]], known: Known, said: object) -> str:
    """Documents that were found: each is one of those that were written; and of a sound segment all are there."""
    strange = [(at, length) for at, length in places if content[at : at + length] not in known.documents]
    if strange:
        raise Broken(f"a document that was never written, (position, length) {strange[0]}")
    if any(content == whole for name, whole in known.files.items() if name.endswith(".bson")):
        left = len(content) - sum(length for _, length in places) - int.from_bytes(content[:4], "little")
        if left or said:
            raise Broken(f"of a sound segment {left} bytes are missing: {said}")
    return "files read" if places else "files refused"


def _inspected(path: Path, content: bytes, known: Known) -> str:
    """By `turtlemq inspect`."""
    out, errors, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            inspect(path, 0, as_json=True)
        except typer.Exit as end:
            code = end.exit_code
    if code and path.name not in errors.getvalue():
        raise Broken(f"inspect ends with {code} and does not name the file: {errors.getvalue()}")
    places = [(line["position"], line["length"]) for line in map(json.loads, out.getvalue().splitlines())]
    _whole(content, places, known, errors.getvalue())
    return "files inspected" if places else "files refused"


def _headed(one: bytes, other: bytes) -> bytes:
    """A segment with the header of one file and the documents of another."""
    begins = [int.from_bytes(data[:4], "little") for data in (one, other)]
    return one[: begins[0]] + other[begins[1] :]


def _journal(path: Path) -> Journal:
    journal = Journal(Ram(), path.parent, path.parent.name, path.name.partition("_")[0], Settings())
    journal.find_files()
    journal.open((0, 0))
    return journal


def _answers(table: t.Table | None) -> Any:
    """Everything that a table says, after it was verified."""
    assert table is not None
    table.verify()
    starts, ends = table.spans_of(np.arange(table.cover.documents))
    order = table.slice(0, len(table)).tolist()
    some = [1 << 63, *table.ids().tolist()[:9]]
    ids = [table.find(id_) for id_ in some]
    return table.cover, starts.tolist(), ends.tolist(), order, some, ids, table.rank(1 << 40), table.ending_ordinals().tolist()


MANIFEST = {
    "turtlemq_backup": 1,
    "turtlemq": "0",
    "made_ms": 1,
    "took_ms": 1,
    "incremental_to": None,
    "topics": ["t"],
    "files": {"FORMAT": {"bytes": 2, "sha256": "00" * 32, "source": [1, 2]}},
}
PEOPLES = {  # files that are edited by hand, or may be, as they should be
    "topic.toml": b'ttr_ms = 5\nmax_attempts = 3\nbackoff_jitter = "full"\nhistory_hours = 1.5\ndelivery = "at-most-once"\n',
    "paused.toml": b'topic = true\ngroups = ["g", "h"]\n',
    "server.toml": b'port = 0\nhost = "::1"\nallowed_hosts = ["10.0.0.0/8"]\nmax_body_bytes = 1000\n[tokens.a]\nsecret = "x"\n',
    backup.PINS: json.dumps({"FORMAT": 2, "topic/t/delay_0000000000.bson": 5_000}).encode(),
    backup.MANIFEST: json.dumps(MANIFEST).encode(),
    "FORMAT": b"1\n",
}


def peoples(data: st.DataObject, where: Path) -> str:
    """Files without a checksum: they are edited by hand, and mistakes are named."""
    name = data.draw(st.sampled_from(sorted(PEOPLES)))
    path = where / name
    path.write_bytes(data.draw(broken(PEOPLES[name], 5)))
    try:
        if name == "topic.toml":
            read_settings(Ram(), where, Settings())
        elif name == "paused.toml":
            Pauses(Ram(), where)
        elif name == "server.toml":
            config.load({}, {}, path)
        elif name == "FORMAT":
            check_format(Ram(), where)
        elif name == backup.PINS:
            _pins(path)
        else:
            _backup(where)
    except TurtleError as error:
        if name not in str(error) and str(where) not in str(error):
            raise Broken(f"{name}: it is refused without its name: {error}: {path.read_bytes()[:300]!r}") from error
        return "files refused"
    except Exception as error:
        raise Broken(f"{name}: {type(error).__name__}: {error}: {path.read_bytes()[:300]!r}") from error
    finally:
        path.unlink()
    return "files read"


def _pins(path: Path) -> None:
    """The list that tells a live backup which files to copy. Its place is `PINNED/name` of the data folder."""
    place = path.parent / backup.PINNED / "now"
    place.mkdir(parents=True, exist_ok=True)
    (place / path.name).write_bytes(path.read_bytes())
    for name, (_, length) in backup.pinned(Ram(), path.parent, place.name).items():
        if Path(name).is_absolute() or ".." in Path(name).parts or not isinstance(length, int):
            raise Broken(f"{name!r} with {length!r} bytes is taken")


def _backup(folder: Path) -> None:
    """Verified by a manifest that was changed."""
    manifest = backup.load(Ram(), folder)
    outside = [name for name in manifest.files if not (folder / name).resolve().is_relative_to(folder.resolve())]
    if outside:
        raise Broken(f"{outside[0]!r} is outside of the backup")
    backup.verify(Ram(), folder)


DEEDS: tuple[Look, ...] = (bodies, files, bodies, files, peoples, packed)


def run(cases: range, folder: Path) -> Figures:
    """Run each case as one deed on hostile input. Raises Broken where a reader's result is wrong."""
    seen: Figures = Counter()
    for case in cases:
        try:
            seen.update(look(DEEDS[case % len(DEEDS)], case, folder))
        except Exception as error:
            said = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
            raise Broken(f"case {case}: {said[:3000]}") from error
        if _most_bytes() > ROOM:
            raise Broken(f"case {case}: it took more than {ROOM >> 20} MiB")
    return seen


def look(deed: Look, case: int, folder: Path) -> Figures:
    """Many inputs of one kind. Of one that breaks something, the smallest is looked for."""
    seen: Figures = Counter()

    @seed(case)
    @settings(
        max_examples=EACH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.data())
    def inputs(data: st.DataObject) -> None:
        seen[deed(data, folder)] += 1

    inputs()
    return seen


def _most_bytes() -> int:
    """The most memory that this process has had. Not getrusage: that counts the memory of the parent process, too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


PART = Part(
    name="hostile",
    unit=f"rounds of {EACH} inputs",
    about="Bodies, packed bodies and files of every kind, built and then broken: a documented error or the right result.",
    run=run,
    quick=84,
    full=4_200,
    chunk=42,
    must=(
        "bodies understood",
        "bodies refused",
        "bodies unpacked",
        "packed bodies refused",
        "files read",
        "files inspected",
        "files refused",
    ),
)
