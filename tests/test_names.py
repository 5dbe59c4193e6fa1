"""File and topic names: names that are made are parsed again, nothing else is, and a topic's name never leaves its folder."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turtlemq.errors import InvalidArgument, InvalidTopic
from turtlemq.storage import names

steady = settings(derandomize=True, deadline=None, max_examples=100, database=None)

kinds = st.sampled_from(["delay", "ready", "reserve", "history", "dead"])
numbers = st.integers(0, 10**12)


@given(kinds, numbers, st.sampled_from(["", names.TMP, names.DELETED]))
@steady
def test_a_segment_name_is_parsed_into_what_made_it(kind: str, base: int, suffix: str) -> None:
    assert names.parse(names.segment(kind, base) + suffix) == names.FileName(kind, base, None, "bson", suffix)


@given(kinds, numbers, st.none() | numbers, st.sampled_from(["", names.TMP, names.DELETED]))
@steady
def test_a_table_name_is_parsed_into_what_made_it(kind: str, base: int, first: int | None, suffix: str) -> None:
    what = "index" if first is None else "run"
    assert names.parse(names.table(kind, base, first) + suffix) == names.FileName(kind, base, first, what, suffix)
    assert names.parse(names.ended_bits(kind, base, first) + suffix) == names.FileName(kind, base, first, "dead", suffix)


@given(kinds, numbers, numbers)
@steady
def test_names_of_ten_digits_sort_like_their_numbers(kind: str, a: int, b: int) -> None:
    if a < 10**10 and b < 10**10:
        assert (names.segment(kind, a) < names.segment(kind, b)) == (a < b)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "notes.txt",
        "delay_0.bson",
        "delay_000000000.bson",
        "delay_00000000000.bson",  # eleven digits where ten say the same
        "delay_00000000001.bson",
        "delay_٠٠٠٠٠٠٠٠٠٠.bson",  # digits, but not those of a file name
        "delay_0000000000.bson\n",
        "delay_0000000000.bson.tmp.tmp",
        "delay_0000000000.bson.bak",
        "delay_0000000000.bson.128.damaged",
        "delay_0000000000.0000000001.bson",  # a segment has no first document in its name
        "delay_0000000000.0000000001.index",
        "delay_0000000000.run",  # a run has
        "delay_0000000000.00000000001.run",
        "delay_-000000001.bson",
        "Delay_0000000000.bson",
        "sleep_0000000000.bson",
        "a/delay_0000000000.bson",
        names.LOCK,
        names.CLEAN,
        names.FORMAT,
        names.SETTINGS,
        names.PAUSED,
    ],
)
def test_other_names_are_no_files_of_a_log(name: str) -> None:
    assert names.parse(name) is None


@given(st.text(alphabet="delayrun_0123456789.bsotmp", max_size=40))
@steady
def test_whatever_is_parsed_is_made_again(name: str) -> None:
    parsed = names.parse(name)
    assert parsed is None or names.make(parsed) == name


@pytest.mark.parametrize("name", ["a", "0", "orders.close-30m", "A_B-c.d", "a..b", "x" * 200, "topic", "LOCK"])
def test_good_topic_names(name: str) -> None:
    assert names.check_topic(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "/", "/etc", "a\\b", ".hidden", "-x", "_x", " a", "a ", "a b", "a\n", "a\0", "\0"),
        *("é", "a٠", "\ud800", "x" * 201, "x" * 100_000, "a:b", "a*", "~", "%2e%2e"),
        *(None, 7, True, b"a", ["a"], float("nan")),
    ],
)
def test_no_topic_names(name: object) -> None:
    with pytest.raises(InvalidTopic) as caught:
        names.check_topic(name)
    assert len(str(caught.value)) < 400
    assert "1 to 200 of A-Z a-z 0-9 . _ -" in str(caught.value)
    with pytest.raises(InvalidArgument, match="1 to 200 of A-Z a-z 0-9"):
        names.check_group(name)
