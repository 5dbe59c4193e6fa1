"""Bad input: each is refused with an error that names the item and the permitted values, and nothing has changed afterwards."""

from __future__ import annotations

import array
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turtlemq import small_batches
from turtlemq.engine import Engine
from turtlemq.errors import (
    Conflict,
    InvalidArgument,
    InvalidFireAt,
    InvalidId,
    InvalidMessage,
    InvalidTopic,
    TooLarge,
    TurtleError,
    Unavailable,
    UnknownMessage,
    UnknownTopic,
)
from turtlemq.index.index import Index
from turtlemq.index.recover import open_index
from turtlemq.index.validate import check_batch
from turtlemq.model import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    BODY_BYTES_MAX,
    DUE_MS_MAX,
    HEADERS_BYTES_MAX,
    ID_BYTES_MAX,
    TTR_MS_MAX,
    Batch,
    Message,
    Progress,
)
from turtlemq.segment import format as f
from turtlemq.segment.ids import server_ids
from turtlemq.settings import Settings
from turtlemq.storage.door import Door

NAN, INF = float("nan"), float("inf")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def made(folder: Path) -> Index:
    index = open_index(Door(), folder, "t", Settings(), Progress())
    index.append(Batch([b"one", b"two"], [50, 60], ["a", "b"]), 1)
    return index


@pytest.fixture(name="index", scope="module")
def an_index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    """One for all tests: a refusal must leave it as it was."""
    index = made(tmp_path_factory.mktemp("index"))
    yield index
    assert index.check() == []
    index.close()


@pytest.fixture(name="fresh")
def a_fresh_index(tmp_path: Path) -> Index:
    """One for input that is not refused yet."""
    return made(tmp_path)


class Unchanged:
    """A block after which files and figures are as they were, and refused messages can still be stored."""

    def __init__(self, index: Index) -> None:
        self.index, self.folder = index, index._segments.folder

    def state(self) -> object:
        return contents(self.folder), self.index.stats(), self.index.browse()[0], self.index.next_due()

    def __enter__(self) -> None:
        self.before = self.state()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            assert self.state() == self.before
            self.index.commit()
            assert self.state() == self.before, "something was staged"


def batch(count: int, **changes: Any) -> Batch:
    columns: dict[str, Any] = {"bodies": [b"x"] * count, "due_ms": [100] * count, "ids": [f"new-{i}" for i in range(count)]}
    return Batch(**{**columns, **changes})


def spoiled(good: Any, bad: Any, count: int) -> tuple[list[Any], int]:
    """A column with one bad item, and where it is."""
    at = count - 2
    return [good] * at + [bad] + [good], at


@dataclass(frozen=True)
class Bad:
    """One bad item of a column."""

    column: str
    good: Any
    bad: Any
    error: type[TurtleError]
    says: str


def numbers(column: str, good: Any, high: int, error: type[TurtleError], *, more: tuple[Any, ...] = ()) -> list[Bad]:
    says = f"{column} is a whole number from 0 to {high}, this one is "
    wrong = (-1, high + 1, 1 << 63, 1 << 70, -(1 << 70), 1.5, NAN, INF, "5", b"5", True, False, [1], np.float64(5), np.True_)
    return [Bad(column, good, bad, error, says) for bad in (*wrong, *more)]


ITEMS: list[Bad] = [
    *numbers("due_ms", 5, DUE_MS_MAX, InvalidFireAt, more=(None,)),
    *numbers("ttr_ms", 5, TTR_MS_MAX, InvalidMessage, more=(None,)),
    *numbers("flags", 1, f.USER_FLAGS, InvalidMessage, more=(None, f.CONTINUES, f.TOMBSTONE, f.BARRIER)),
    *numbers("expires_ms", 5, DUE_MS_MAX, InvalidMessage),
    *(
        Bad("ids", None, bad, InvalidId, "is no id. An id is 1 to 200 bytes of printable text")
        for bad in ("", "-a", "-", "a/b", "/", "a\n", "\t", "a\0b", "\x7f", "\x85", "\ud800", "a\u200b", "\u2028", "\ufeff")
    ),
    *(Bad("ids", "fine", bad, InvalidId, "is no id. An id is 1 to 200 bytes") for bad in (5, True, b"a", ["a"], NAN)),
    *(
        Bad("ids", None, bad, InvalidId, "an id has at most 200 bytes, this one 20")
        for bad in ("x" * (ID_BYTES_MAX + 1), "é" * 101, "\U0001f422" * 51)
    ),
    *(
        Bad("headers", None, bad, InvalidMessage, "headers are text by name, without NUL in a name")
        for bad in ({1: "a"}, {"a": 1}, {"a": None}, {"": "x"}, {"a\0": "x"}, {b"a": "x"}, {"a": {"b": "c"}}, {"a": True})
    ),
    *(Bad("headers", None, bad, InvalidMessage, "a header is not valid text") for bad in ({"a": "\ud800"}, {"\ud800": "a"})),
    *(
        Bad("headers", None, bad, TooLarge, f"headers have at most {HEADERS_BYTES_MAX:,} bytes")
        for bad in ({"a": "x" * HEADERS_BYTES_MAX}, {"x" * HEADERS_BYTES_MAX: "a"}, {"a": "é" * (HEADERS_BYTES_MAX // 2)})
    ),
    Bad("headers", None, {f"{i:04x}": "" for i in range(6_000)}, TooLarge, f"headers have at most {HEADERS_BYTES_MAX:,} bytes"),
    Bad("bodies", b"", bytes(BODY_BYTES_MAX + 1), TooLarge, f"a body has at most {BODY_BYTES_MAX:,} bytes, this one"),
]


def swallowed(item: Bad, count: int) -> bool:
    return count >= small_batches.DOCUMENTS and isinstance(item.bad, bool | np.bool_) and item.column != "ids"


CASES = [
    pytest.param(item, count, id=f"{item.column}-{item.bad!r:.20}-of-{count}")
    for count in (2, small_batches.DOCUMENTS)
    for item in ITEMS
    if not swallowed(item, count)
]


@pytest.mark.parametrize(("item", "count"), CASES)
def test_a_bad_item_is_named_and_nothing_changes(index: Index, item: Bad, count: int) -> None:
    column, at = spoiled(item.good, item.bad, count)
    with Unchanged(index):
        with pytest.raises(item.error) as caught:
            index.append(batch(count, **{item.column: column}), 2)
        assert str(caught.value).startswith(f"message {at}: ")
        assert item.says in str(caught.value)
        assert caught.value.details["index"] == at
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("bad", [True, False, np.True_])
@pytest.mark.parametrize("column", ["due_ms", "ttr_ms", "flags", "expires_ms"])
def test_a_bool_among_many_numbers_is_none(fresh: Index, column: str, bad: bool) -> None:
    values, at = spoiled(1, bad, small_batches.DOCUMENTS)
    with Unchanged(fresh), pytest.raises(TurtleError, match=f"^message {at}: {column} is a whole number"):
        fresh.append(batch(small_batches.DOCUMENTS, **{column: values}), 2)


# ── whole batches ────────────────────────────────────────────────────────────────────────────────────────

LARGE = bytes(BODY_BYTES_MAX)
MANY = BATCH_MESSAGES_MAX + 1
BATCHES: dict[str, tuple[Batch, type[TurtleError], str]] = {
    "empty": (Batch([], []), InvalidArgument, "a batch holds 1 to 100,000 messages, this one 0"),
    "too many": (Batch([b""] * MANY, [1] * MANY), InvalidArgument, "a batch holds 1 to 100,000 messages, this one 100,001"),
    "too large": (
        Batch([LARGE] * 17, [1] * 17),
        TooLarge,
        f"a batch has at most {BATCH_BYTES_MAX:,} bytes of bodies and headers, this one {17 * len(LARGE):,}",
    ),
    **{
        f"{column} of another length": (
            batch(3, **{column: [None, None]}),
            InvalidArgument,
            "a column has 2 entries for 3 messages",
        )
        for column in ("due_ms", "ids", "ttr_ms", "flags", "expires_ms", "headers")
    },
    "due times as floats": (batch(3, due_ms=np.array([1.0, 2.0, 3.0])), InvalidFireAt, "message 0: due_ms is a whole number"),
    "many due times as floats": (batch(30, due_ms=np.full(30, NAN)), InvalidFireAt, "message 0: due_ms is a whole number"),
    "many due times with one of them late": (
        batch(30, due_ms=np.array([*range(29), DUE_MS_MAX + 1])),
        InvalidFireAt,
        f"message 29: due_ms is a whole number from 0 to {DUE_MS_MAX}",
    ),
    "times beyond any": (batch(30, due_ms=np.full(30, (1 << 64) - 1, np.uint64)), InvalidFireAt, "message 0: due_ms is a whole"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_bad_batch_is_refused_as_a_whole(index: Index, name: str) -> None:
    bad, error, says = BATCHES[name]
    with Unchanged(index), pytest.raises(error) as caught:
        index.append(bad, 2)
    assert str(caught.value).startswith(says)


WRONG_TYPES: dict[str, tuple[Batch, int]] = {
    "a body of text": (batch(3, bodies=[b"x", "text", b"x"]), 1),
    "a body of text among many": (batch(30, bodies=[b"x"] * 29 + ["text"]), 29),
    "a body of numbers": (batch(3, bodies=[b"x", [1, 2], b"x"]), 1),
    "no body": (batch(3, bodies=[b"x", None, b"x"]), 1),
    "a body of wide items": (batch(3, bodies=[b"x", memoryview(array.array("I", [1, 2])), b"x"]), 1),
    "headers that are a list": (batch(3, headers=[None, ["a"], None]), 1),
    "headers that are text": (batch(3, headers=[None, "a=b", None]), 1),
    "a priority that is none": (batch(3, flags=[0, 3, 0]), 1),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_type_is_refused_by_name(fresh: Index, name: str) -> None:
    bad, at = WRONG_TYPES[name]
    with Unchanged(fresh), pytest.raises(InvalidMessage, match=f"^message {at}: "):
        fresh.append(bad, 2)


def test_headers_count_towards_the_size_of_a_batch() -> None:
    headers = {"h": "x" * (HEADERS_BYTES_MAX - 100)}
    with pytest.raises(TooLarge, match="a batch has at most"):
        check_batch(Batch([b""] * BATCH_MESSAGES_MAX, [1] * BATCH_MESSAGES_MAX, headers=[headers] * BATCH_MESSAGES_MAX))


def test_the_largest_message_fits_and_is_found_again(tmp_path: Path) -> None:
    index = open_index(Door(), tmp_path, "t", Settings(), Progress())
    headers = {f"{i:03x}": "v" for i in range(HEADERS_BYTES_MAX // 11)}
    largest = Batch([LARGE], [DUE_MS_MAX - 1], ["é" * (ID_BYTES_MAX // 2)], [TTR_MS_MAX], [f.JSON | 2])
    largest.expires_ms, largest.headers = [DUE_MS_MAX], [headers]
    assert index.append(largest, 1).created == [True]
    index.close()
    again = open_index(Door(), tmp_path, "t", Settings(), Progress())
    found = again.get("é" * (ID_BYTES_MAX // 2))
    assert found is not None
    assert (found.due_ms, found.ttr_ms, found.expires_ms) == (DUE_MS_MAX - 1, TTR_MS_MAX, DUE_MS_MAX)
    assert (found.body, found.headers, found.flags) == (LARGE, headers, f.JSON | 2)
    again.close()


def test_limits_themselves_are_allowed(tmp_path: Path) -> None:
    index = open_index(Door(), tmp_path, "t", Settings(), Progress())
    ids = ["x" * ID_BYTES_MAX, "\U0001f422" * (ID_BYTES_MAX // 4), "a b", "é", "t", "0", "a-", "$", "~.*?%"]
    count = len(ids)
    receipt = index.append(Batch([b""] * count, [0, DUE_MS_MAX] + [7] * (count - 2), ids, [0, TTR_MS_MAX] + [1] * (count - 2)), 0)
    assert receipt.created == [True] * count
    assert {found.id for found in index.browse()[0]} == set(ids)
    index.close()


def test_an_id_that_the_server_is_going_to_give_is_refused(index: Index) -> None:
    coming = server_ids(index.next_seq(5) + 3, 1)[0]
    with Unchanged(index), pytest.raises(InvalidId, match="is an id that the server is going to give; choose another") as caught:
        index.append(batch(2, ids=["fine", coming]), 5)
    assert caught.value.details["index"] == 1


# ── asking, ending, changing ─────────────────────────────────────────────────────────────────────────────


CHANGES: list[tuple[dict[str, Any], type[TurtleError]]] = [
    ({"due_ms": -1}, InvalidFireAt),
    ({"due_ms": DUE_MS_MAX + 1}, InvalidFireAt),
    ({"due_ms": 1.5}, InvalidFireAt),
    ({"due_ms": True}, InvalidFireAt),
    ({"body": LARGE + b"x"}, TooLarge),
    ({"headers": {"a": 1}}, InvalidMessage),
    ({"headers": {"a": "x" * HEADERS_BYTES_MAX}}, TooLarge),
]


@pytest.mark.parametrize(("changes", "error"), CHANGES, ids=lambda value: f"{value!r:.30}")
def test_a_bad_change_changes_nothing(index: Index, changes: dict[str, Any], error: type[TurtleError]) -> None:
    with Unchanged(index), pytest.raises(error, match=r"^message 0: "):
        index.reschedule("a", 2, **changes)


def test_what_is_not_there_cannot_be_changed(index: Index) -> None:
    with Unchanged(index), pytest.raises(UnknownMessage, match=r"^'nobody': "):
        index.reschedule("nobody", 2, due_ms=5)


@pytest.mark.parametrize("id_", ["", "x" * 1_000, "a/b", "-a", "\0", "t0000000000000", "tzzzzzzzzzzzzz"])
def test_ids_that_no_message_can_have_are_unknown(index: Index, id_: str) -> None:
    with Unchanged(index):
        assert index.get(id_) is None
        assert [state.value for state in index.cancel([id_]).values()] == ["unknown"]


@pytest.mark.parametrize("ask", ["get", "cancel"])
def test_an_id_that_is_no_text_is_unknown_too(index: Index, ask: str) -> None:
    with Unchanged(index):
        assert not index.get("\ud800") if ask == "get" else index.cancel(["\ud800"])["\ud800"].value == "unknown"


RANGES: list[tuple[dict[str, Any], str]] = [
    ({"limit": 0}, "limit is 1 to 10000, not 0"),
    ({"limit": 10_001}, "limit is 1 to 10000, not 10001"),
    ({"from_ms": -1}, "do not make a range within 0 to"),
    ({"from_ms": 5, "to_ms": 4}, "from_ms 5 and to_ms 4 do not make a range"),
    ({"to_ms": DUE_MS_MAX + 1}, "do not make a range within 0 to"),
    *(
        ({"cursor": cursor}, "is no cursor of this list")
        for cursor in ("", "-", "1", "1-", "a-b", "1-2-3", "-1-2", f"1-{1 << 63}", f"{DUE_MS_MAX + 1}-1", "1" * 5_000)
    ),
]


@pytest.mark.parametrize(("asked", "says"), RANGES, ids=lambda value: f"{value!r:.30}")
def test_a_bad_range_or_cursor_is_refused(index: Index, asked: dict[str, Any], says: str) -> None:
    with Unchanged(index), pytest.raises(InvalidArgument, match=says):
        index.browse(**asked)


def test_a_cursor_has_plain_digits(index: Index) -> None:
    with pytest.raises(InvalidArgument):
        index.browse(cursor="٣-٤")


@pytest.mark.parametrize("asked", [{"bucket_ms": 0}, {"bucket_ms": -5}, {"buckets": 0}, {"buckets": 100_001}])
def test_a_bad_forecast_is_refused(index: Index, asked: dict[str, int]) -> None:
    with Unchanged(index), pytest.raises(InvalidArgument, match="a forecast has 1 to 100,000 buckets of at least a millisecond"):
        index.forecast(0, **asked)


def test_messages_can_be_stored_as_long_as_they_can_be_due(tmp_path: Path) -> None:
    index = open_index(Door(), tmp_path, "t", Settings(), Progress())
    in_2040 = 2_208_988_800_000
    index.append(Batch([b""], [in_2040 + 1]), in_2040)


# ── the engine: topics and settings ──────────────────────────────────────────────────────────────────────


@pytest.fixture(name="engine")
def an_engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", [Message(b"one", 50, "a")], 1)
    yield engine
    assert engine.check() == []
    engine.close()


def everything(engine: Engine) -> object:
    parent = engine.root.parent
    return contents(parent), sorted(str(path) for path in parent.rglob("*")), engine.stats("t"), sorted(engine.topics)


NO_TOPICS: list[Any] = ["", ".", "..", "../x", "a/b", "/x", "a\0", "x" * 201, "-a", "a b", "\ud800", None, 5, b"t"]


@pytest.mark.parametrize("name", NO_TOPICS)
def test_a_bad_topic_name_is_refused_everywhere_and_makes_no_file(engine: Engine, name: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: engine.submit(name, [Message(b"x", 5)], 1),
        lambda: engine.configure(name, segment_bytes=10_000),
        lambda: engine.topic(name, create=True),
        lambda: engine.drop_topic(name),
        lambda: engine.get(name, "a"),
        lambda: engine.browse(name),
        lambda: engine.stats(name),
    ]
    before = everything(engine)
    for call in calls:
        with pytest.raises(InvalidTopic, match="1 to 200 of A-Z a-z 0-9"):
            call()
    assert everything(engine) == before


def test_a_topic_that_is_not_there_is_unknown_and_stays_so(engine: Engine) -> None:
    before = everything(engine)
    for call in (lambda: engine.get("u", "a"), lambda: engine.browse("u"), lambda: engine.drop_topic("u")):
        with pytest.raises(UnknownTopic, match="there is no topic 'u'"):
            call()
    assert everything(engine) == before


def test_a_refused_batch_makes_no_topic(engine: Engine) -> None:
    before = everything(engine)
    with pytest.raises(InvalidFireAt):
        engine.submit("new", [Message(b"x", -1)], 1)
    assert everything(engine) == before


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"segment_bytes": 4_095}, "segment_bytes is a number from 4,096 to"),
    ({"segment_bytes": 1 << 33}, "segment_bytes is a number from 4,096 to"),
    ({"segment_bytes": 1e6}, "segment_bytes is a number from 4,096 to"),
    ({"segment_bytes": True}, "segment_bytes is a number from 4,096 to"),
    ({"segment_bytes": None}, "segment_bytes is a number from 4,096 to"),
    ({"segment_bytes": "1GB"}, "segment_bytes is a number from 4,096 to"),
    ({"segment_messages": 0}, "segment_messages is a number from 1 to 4,194,304"),
    ({"segment_messages": (1 << 22) + 1}, "segment_messages is a number from 1 to 4,194,304"),
    ({"run_messages": 0}, "run_messages is a number from 1 to 4,194,304"),
    ({"run_messages": -5}, "run_messages is a number from 1 to 4,194,304"),
    ({"compact_live_ratio": -0.1}, "compact_live_ratio is a number from 0 to 0.9"),
    ({"compact_live_ratio": 0.95}, "compact_live_ratio is a number from 0 to 0.9"),
    ({"compact_live_ratio": NAN}, "compact_live_ratio is a number from 0 to 0.9"),
    ({"compact_live_ratio": "x"}, "compact_live_ratio is a number from 0 to 0.9"),
    ({"compact_live_ratio": True}, "compact_live_ratio is a number from 0 to 0.9"),
    ({"colour": 1}, "unknown setting 'colour'; there are: ttr_ms, "),
]


@pytest.mark.parametrize(("changes", "says"), SETTINGS, ids=lambda value: f"{value!r:.40}")
@pytest.mark.parametrize("topic", ["t", "new"])
def test_a_bad_setting_is_refused_and_nothing_changes(engine: Engine, topic: str, changes: dict[str, Any], says: str) -> None:
    before = everything(engine)
    with pytest.raises(InvalidArgument, match=says):
        engine.configure(topic, **changes)
    assert everything(engine) == before


@pytest.mark.parametrize(
    "text", ["segment_bytes = ", "\xff", "unknown = 1", "segment_bytes = 'x'", "segment_bytes = 1", "[a]\nb = 1"]
)
def test_settings_that_cannot_be_read_are_named_when_opening(tmp_path: Path, text: str) -> None:
    engine = Engine.open(tmp_path)
    engine.configure("t", segment_bytes=10_000)
    engine.close()
    path = tmp_path / "topic" / "t" / "topic.toml"
    path.write_bytes(text.encode("latin-1"))
    before = contents(tmp_path / "topic")
    engine = Engine.open(tmp_path)
    assert "topic.toml" in str(engine.trouble["t"])
    with pytest.raises(Unavailable, match="cannot be read"):
        engine.submit("t", [Message(b"", 0)], 0)
    engine.submit("other", [Message(b"", 0)], 0)
    engine.close()
    shutil.rmtree(tmp_path / "topic" / "other")
    assert contents(tmp_path / "topic") == before
    path.write_text("segment_bytes = 20000\n")
    Engine.open(tmp_path).close()


def test_a_message_that_was_handed_off_cannot_be_changed(engine: Engine) -> None:
    engine.tick(60)
    with pytest.raises((Conflict, UnknownMessage)):
        engine.reschedule("t", "a", 61, due_ms=1_000)
