"""A topic's settings over HTTP and in TOML: nested and in seconds, made from the table in `turtlemq.settings`.

The types that validate a request are built from the table when this module is imported, so they know every setting. Limits are
not checked here but by `check_settings`, for HTTP, TOML and topic.toml alike.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from turtlemq.settings import TABLE, Setting, Settings

Seconds = Annotated[float, Meta(ge=0, le=1e10)]  # the limits in the table are narrower; this one keeps sums finite
SECTIONS = {  # descriptions in the OpenAPI document
    "backoff": "How long a failed message waits: base × factor^n seconds, up to max.",
    "retention": "How long, and in how much room, settled messages are kept.",
    "dead": "How long, and how many, dead letters are kept.",
    "priority": "Shares of priorities in each fetch, 0 to 1,000; leftovers of one go to the others.",
    "preempt": "When low and normal priority give way to high priority that waits too long.",
    "lateness_slo": "A goal for lateness: this share of messages is delivered at most so many milliseconds after it is due.",
    "rate": "Messages a second: taken in (with a burst that was saved up), and given to each group, also in bytes. 0: no limit.",
}
_OFFERED = [row for row in TABLE if row.path]


def _field(row: Setting) -> tuple[str, Any, Any]:
    return row.path[-1], (Seconds if row.in_seconds else row.kind) | UnsetType, UNSET


def _struct(name: str, doc: str, fields: list[tuple[str, Any, Any]], **options: Any) -> type[Struct]:
    return defstruct(name, fields, namespace={"__doc__": doc}, forbid_unknown_fields=True, module=__name__, **options)


def section_title(name: str) -> str:
    """The name of a section's type.

    >>> section_title("backoff"), section_title("lateness_slo")
    ('Backoff', 'LatenessSlo')
    """
    return "".join(part.capitalize() for part in name.split("_"))


def _section(name: str, rows: list[Setting]) -> tuple[str, Any, Any]:
    """The field for a section such as `backoff`, whose type has the section's settings as fields."""
    kind = _struct(section_title(name), SECTIONS[name], [_field(row) for row in rows], frozen=True)
    return name, kind, kind()


def _fields() -> list[tuple[str, Any, Any]]:
    found = []
    for name, group in groupby(_OFFERED, key=lambda row: row.path[0]):
        rows = list(group)
        found.append(_section(name, rows) if len(rows[0].path) > 1 else _field(rows[0]))
    return found


TopicSettings = _struct(
    "TopicSettings", "The body of PUT /v1/topics/{topic}: what is left out stays as it is.", _fields(), kw_only=True
)


def to_flat(given: Struct) -> dict[str, Any]:
    """The given `TopicSettings` under the names and in the units of `Settings`, without the unset ones.

    >>> import msgspec
    >>> to_flat(msgspec.convert({"ttr": 1.5, "backoff": {"base": 2}}, TopicSettings))
    {'ttr_ms': 1500, 'backoff_base_ms': 2000}
    """
    flat = {}
    for row in _OFFERED:
        value: Any = given
        for name in row.path:
            value = getattr(value, name)
        if value is not UNSET:
            flat[row.name] = round(value * 1000) if row.in_seconds else value
    return flat


def to_nested(settings: Settings) -> dict[str, Any]:
    """The settings under the names and in the units of HTTP.

    >>> to_nested(Settings())["ttr"], to_nested(Settings())["dead"]
    (60.0, {'ttl_hours': 720, 'max_count': 1000000})
    """
    nested: dict[str, Any] = {}
    for row in _OFFERED:
        value = getattr(settings, row.name)
        section = nested if len(row.path) == 1 else nested.setdefault(row.path[0], {})
        section[row.path[-1]] = value / 1000 if row.in_seconds else value
    return nested
