"""The variable fields of many documents at once are those that decoding one by one finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turtlemq.message_fields import optional_of
from turtlemq.model import I64
from turtlemq.segment import fields as v
from turtlemq.segment import format as f
from turtlemq.segment.buffers import windows

SEQS = st.integers(0, 1 << 62)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
DOCUMENTS = st.fixed_dictionaries(
    {
        "id": TEXTS,
        "body": st.binary(max_size=40),
        "of": st.none() | st.tuples(SEQS, SEQS),
        "arrived": st.none() | SEQS,
        "order": st.none() | SEQS,
        "expires_ms": st.none() | st.integers(0, 1 << 41),
        "headers": st.dictionaries(TEXTS, TEXTS, max_size=3),
        "meta": st.none() | st.just({"attempt": 2, "error": "boom"}),
    }
)


@given(st.lists(DOCUMENTS, min_size=1, max_size=30))
def test_located_fields_are_those_of_decode(given_: list[dict[str, object]]) -> None:
    data = b""
    starts = []
    for n, one in enumerate(given_):
        optional = {name: one[name] for name in ("of", "arrived", "order", "expires_ms", "headers", "meta")}
        flags = f.REPLACES if one["of"] or one["arrived"] is not None or one["order"] is not None else 0
        flags |= (
            (f.EXPIRES if one["expires_ms"] is not None else 0)
            | (f.HEADERS if one["headers"] else 0)
            | (f.META if one["meta"] else 0)
        )
        extra = f.extra_elements(**optional)  # type: ignore[arg-type]
        starts.append(len(data))
        data += bytes(f.encode([str(one["id"]).encode()], [one["body"]], [7], n, 0, [flags], [extra])[0])  # type: ignore[list-item]
    view, at = memoryview(data), np.array(starts)
    heads = f.prefixes(view, at)
    ends = np.append(at[1:], len(data))
    assert v.plausible(heads, ends - at).all()
    assert not v.plausible(heads, ends - at - 1).any()
    found = v.locate(view, at, heads)
    for i, (start, end) in enumerate(zip(starts, ends.tolist(), strict=True)):
        document = f.decode(view[start:end])
        assert bytes(view[found.body[i] : found.body_end[i]]) == document.body
        assert (found.arrived[i], found.order[i]) == (document.arrived, document.order)
        assert (found.of[i], found.was[i]) == (document.of or (v.ABSENT, v.ABSENT))
        assert found.optional["expires"][i] == (v.ABSENT if document.expires_ms is None else document.expires_ms)
        at_headers = int(found.optional["headers"][i])
        assert (v.subdocument(view, at_headers) if at_headers >= 0 else {}) == document.headers
        assert (v.subdocument(view, int(found.meta[i])) if found.meta[i] >= 0 else {}) == document.meta
        elements = f.extra_elements(**optional_of(document))
        fixed = document.ttr_ms, document.flags, document.arrived, document.expires_ms
        assert v.content_of(bytes(view[start:end])) == (*fixed, elements, document.body)


@pytest.mark.parametrize("broken", [None, 0, 63, 64, 129])
def test_a_prefix_with_a_broken_name_is_none(broken: int | None) -> None:
    encoded, sizes = f.encode([b"id"] * 130, [b"body"] * 130, [7] * 130, 1, 0, [0] * 130)
    data, lengths = bytearray(encoded), np.array(sizes, np.int64)
    starts: I64 = np.cumsum(lengths) - lengths
    if broken is not None:
        data[int(starts[broken]) + data.index(b"due\0") + 1] ^= 1  # "dte": nothing else tells that it is no document
    good = v.plausible(f.prefixes(memoryview(data), starts), lengths)
    assert np.flatnonzero(~good).tolist() == ([] if broken is None else [broken])


def test_pieces_of_one_width() -> None:
    assert windows(memoryview(b"abcdefgh"), 3)[np.array([1, 4])].tobytes() == b"bcdefg"
