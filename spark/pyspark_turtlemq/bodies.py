"""Byte ranges of a mapped file as Arrow columns: ids, and bodies as bytes, text or JSON (a struct or a variant)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from turtlemq.model import I64, Mask
from turtlemq.segment.buffers import windows


def range_column(view: memoryview, starts: I64, ends: I64, type_: pa.DataType) -> pa.Array:
    """The bytes [start, end) of each row. Requires: sorted, non-overlapping.

    Ranges of one length are gathered (15 ns each). Otherwise one array covers the ranges and the gaps between them, and
    every second element of it is taken (35 ns each)."""
    count = len(starts)
    if not count:
        return pa.array([], type_)
    sizes = ends - starts
    width = int(sizes[0])
    if width and (sizes == width).all():
        data = pa.py_buffer(windows(view, width)[starts].tobytes())
        offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
        return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(offsets), data])
    origin = int(starts[0])
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2], offsets[1::2] = starts - origin, ends - origin
    raw = pa.py_buffer(view[origin : int(ends[-1])])
    with_gaps = pa.Array.from_buffers(type_, 2 * count - 1, [None, pa.py_buffer(offsets), raw])
    return with_gaps.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))


def body_column(view: memoryview, starts: I64, ends: I64, form: str, json: Mask, type_: pa.DataType) -> pa.Array:
    """Bodies in the form of option `body`: `binary`; `string`, with U+FFFD for invalid UTF-8; `json`, null if it is not JSON."""
    raw = range_column(view, starts, ends, pa.binary())
    if form == "binary":
        return raw
    if form == "string":
        return text(raw)
    return _parsed(raw, json, type_)


def text(raw: pa.Array) -> pa.Array:
    """Bytes as text, with U+FFFD for invalid UTF-8."""
    valid = _valid_text(raw)
    return pa.array([body.decode(errors="replace") for body in raw.to_pylist()], pa.string()) if valid is None else valid


def are_text(raw: pa.Array) -> Mask:
    """Which rows are valid UTF-8."""
    if _valid_text(raw) is not None:
        return np.ones(len(raw), np.bool_)
    return np.array([_valid_text(raw[i : i + 1]) is not None for i in range(len(raw))])


def _valid_text(raw: pa.Array) -> pa.Array | None:
    """Bytes as text; None if any are invalid UTF-8. Most are ASCII, which one pass over all bytes proves (5 ns a row); otherwise
    each is decoded (50 ns)."""
    offsets, data = raw.buffers()[1:]
    if not raw.offset and data is not None and data.size and np.frombuffer(data, np.uint8).max() < 128:
        return pa.Array.from_buffers(pa.string(), len(raw), [None, offsets, data])
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        return None


def _parsed(raw: pa.Array, json: Mask, type_: pa.DataType) -> pa.Array:
    """JSON bodies as structs, if there is a schema (2 µs a body), else as variants (15 µs)."""
    if _is_variant(type_):
        return _variants(raw, json, type_)
    decode = msgspec.json.decode
    values: list[Any] = []
    for body, is_json in zip(raw.to_pylist(), json.tolist(), strict=True):
        try:
            value = decode(body) if is_json else None
        except msgspec.DecodeError:
            value = None
        values.append(value if isinstance(value, dict) else None)
    try:
        return pa.array(values, type_)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([_matching_fields(value, type_) for value in values], type_)


def _matching_fields(value: Any, type_: pa.DataType) -> Any:
    """The fields of the schema; null for each of another type than the schema says."""
    if value is None:
        return None
    fields = {}
    for field in type_:
        try:
            fields[field.name] = pa.scalar(value.get(field.name), field.type).as_py()
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            fields[field.name] = None
    return fields


def _is_variant(type_: pa.DataType) -> bool:
    return pa.types.is_struct(type_) and {field.name for field in type_} == {"value", "metadata"}


def _variants(raw: pa.Array, json: Mask, type_: pa.DataType) -> pa.Array:
    from pyspark.sql.types import VariantVal

    variants: list[dict[str, bytes] | None] = []
    for body, is_json in zip(raw.to_pylist(), json.tolist(), strict=True):
        try:
            parsed = VariantVal.parseJson(body.decode()) if is_json else None
        except ValueError:
            parsed = None
        variants.append(None if parsed is None else {"value": bytes(parsed.value), "metadata": bytes(parsed.metadata)})
    return pa.array(variants, type_)
