"""The example file and the tables of docs/CONFIGURATION.md, made from `Config` and the table of settings.

`python -m tests.harness.settings_reference` writes them anew; a test compares the page with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from turtlemq.server.cluster_config import Cluster
from turtlemq.server.config import TABLES, Config, in_force
from turtlemq.server.topic_settings import to_nested
from turtlemq.settings import TABLE, Setting, Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "CONFIGURATION.md"
_COMMENT_AT = 42


def example_file() -> str:
    """A TOML file with every setting at its default."""
    values = in_force(Config(), {})
    lines = [_line(name, values[name][0], meta) for name, meta in _settings_of(Config)]
    lines += ["", _commented("[cluster]", "copies on other machines: see CLUSTER.md")]
    lines += [_line(name, values[f"cluster.{name}"][0], meta) for name, meta in _settings_of(Cluster)]
    lines += ["", _commented("[defaults]", "settings of topics without their own: names and units as in PUT /v1/topics")]
    nested = to_nested(Settings())
    lines += [f"{name} = {_toml(value)}" for name, value in nested.items() if not isinstance(value, dict)]
    for section, inner in nested.items():
        if isinstance(inner, dict):
            lines += ["", f"[defaults.{section}]", *(f"{name} = {_toml(value)}" for name, value in inner.items())]
    return "\n".join(["```toml", *lines, "```"])


def _settings_of(table: type[Struct]) -> Iterator[tuple[str, Meta]]:
    """Every setting of a table, without those that are tables themselves, with its limits and description."""
    for field in msgspec.structs.fields(table):
        if field.name not in TABLES:
            yield field.name, _meta(field.type)


def _meta(kind: Any) -> Meta:
    """The limits and the description in a type."""
    for one in (kind, *get_args(kind)):
        for meta in getattr(one, "__metadata__", ()):
            if isinstance(meta, Meta):
                return meta
    return Meta()


def _line(name: str, value: Any, meta: Meta) -> str:
    if name in ("tokens", "tenants"):  # an empty list could not be added to further down in the file
        return _commented("", f"{name}: {meta.description}")
    return _commented(f"{name} = {_toml(value)}", meta.description or "")


def _commented(text: str, comment: str) -> str:
    return f"{text:<{_COMMENT_AT}}# {comment}" if comment else text


def _toml(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else list(value) if isinstance(value, tuple) else value)


def server_limits() -> str:
    """The limits of the server's settings that have any beside their type."""
    rows = []
    for table, prefix in ((Config, ""), (Cluster, "cluster.")):
        rows += [(prefix + name, text) for name, meta in _settings_of(table) if (text := _limits_of(meta))]
        rows += [(prefix + field.name, words) for field in msgspec.structs.fields(table) if (words := _words(field.type))]
    return "\n".join(["| setting | limits |", "| --- | --- |", *(f"| `{name}` | {text} |" for name, text in rows)])


def _limits_of(meta: Meta) -> str:
    if meta.max_length is not None:
        return f"{meta.max_length:,} entries"
    return "" if meta.ge is None or meta.le is None else f"{_number(meta.ge)} to {_number(meta.le)}"


def _words(kind: Any) -> str:
    literals = [one for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
    return ", ".join(f"`{word}`" for one in literals for word in get_args(one))


def topic_settings() -> str:
    """The settings of topics."""
    rows = [_row(row) for row in TABLE if row.path]
    return "\n".join(["| setting | default | limits | meaning |", "| --- | --- | --- | --- |", *rows])


def _row(row: Setting) -> str:
    scale = 1000 if row.in_seconds else 1
    if row.limits.words:
        default, limits = f"`{row.default}`", ", ".join(f"`{word}`" for word in row.limits.words)
    else:
        default, low, high = (_number(value, scale) for value in (row.default, row.limits.low, row.limits.high))
        limits = f"0, or {_number(row.limits.least)} to {high}" if row.limits.least else f"{low} to {high}"
    return f"| `{row.http_name}` | {default} | {limits} | {row.text} |"


def _number(value: float, scale: int = 1) -> str:
    """A number with commas.

    >>> _number(1 << 60), _number(10, 1000), _number(1e7)
    ('1,152,921,504,606,846,976', '0.01', '10,000,000')
    """
    return f"{int(value) // scale:,}" if value % scale == 0 and float(value).is_integer() else f"{value / scale:,.15g}"


PARTS = {"example": example_file, "server": server_limits, "topics": topic_settings}


def written(page: str) -> str:
    """A page with all parts made anew, each between its markers."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        text = f"{begin}\n{part()}\n{end}"
        page, count = re.subn(f"{begin}.*?{end}", lambda _, text=text: text, page, flags=re.DOTALL)  # type: ignore[misc]
        assert count == 1, f"{PAGE.name} has no place for {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
