"""Options of the data source, parsed and checked: a wrong one fails before any file is read.

`_READ` is the table of read and stream options: Spark's name, field of `Options`, parser. `WRITE_OPTIONS` are parsed in `writer`.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from pyspark_turtlemq.kinds import BODY_TYPES, DAMAGE, DEFAULT_KIND, KINDS, available_columns
from pyspark_turtlemq.predicates import Predicates, parse_where
from pyspark_turtlemq.shard_layout import ShardLayout
from turtlemq.errors import InvalidArgument
from turtlemq.storage import names

_SPARK_OPTIONS = ("checkpointlocation", "queryname", "outputmode", "paths")  # Spark's own, which it hands on


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a read."""

    path: Path
    topic: tuple[str, ...] = ("*",)
    kind: str = DEFAULT_KIND
    columns: tuple[str, ...] = ()
    where: Predicates = field(default_factory=Predicates)
    pushdown: bool = False
    body: str = "none"
    body_schema: str = ""
    mode: str = "PERMISSIVE"
    verify: str = "auto"
    bucket_ms: int = 60_000  # of a forecast
    partitions: int = 0  # 0: one for each core of the driver
    pin: bool = True
    snapshot: str = ""
    starting: str = "earliest"
    fail_on_data_loss: bool = True
    rows_max: int = 0  # of a micro-batch; 0: no limit
    bytes_max: int = 0
    as_of: int | None = None  # epoch ms

    def topics(self) -> list[str]:
        """Existing topics that match, sorted. A plain name without a topic is an error; a glob may match none."""
        existing = ShardLayout.of(self.path).topics()
        for pattern in self.topic:
            if names.is_topic(pattern) and pattern not in existing:
                raise InvalidArgument(
                    f"there is no topic {pattern!r} in {self.path}; there are: {', '.join(existing[:20]) or 'none'}"
                )
        return [name for name in existing if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.topic)]

    def schema(self) -> dict[str, str]:
        """Columns of the read with Spark's types: the chosen ones, or all but `damage`."""
        available = available_columns(self.kind, self.body, self.body_schema)
        return {name: available[name] for name in self.columns or [name for name in available if name != DAMAGE]}


def check_names(given: Mapping[str, str]) -> dict[str, str]:
    """Options under their documented names; Spark passes them in lower case. Raises for an unknown one: it would do nothing."""
    given = {name: value for name, value in given.items() if name.lower() not in _SPARK_OPTIONS}
    unknown = sorted(name for name in given if name.lower() not in _NAMES)
    if unknown:
        raise InvalidArgument(
            f"there is no option {unknown[0]!r}; there are: {', '.join(sorted(_NAMES.values(), key=str.lower))}"
        )
    return {_NAMES[name.lower()]: str(value) for name, value in given.items()}


def parse_options(given: Mapping[str, str]) -> Options:
    """Options of a read, from Spark's strings.

    >>> parse_options({"path": "data", "topic": "a, b*", "kind": "ready"}).topic
    ('a', 'b*')
    """
    texts = check_names(given)
    if not texts.get("path"):
        raise InvalidArgument('say which data folder to read: .load("data"), or .option("path", "data")')
    fields: dict[str, Any] = {}
    for name, (attribute, parse) in _READ.items():
        if name in texts:
            fields[attribute] = parse(name, texts[name])
    if "where" in texts:
        fields["where"] = parse_where(texts["where"], fields.get("kind", DEFAULT_KIND))
    if "body" in fields.get("columns", ()):
        fields.setdefault("body", "binary")
    options = Options(**fields)
    if options.as_of is not None and options.kind != "messages":
        raise InvalidArgument(f"option asOf is for kind 'messages', not {options.kind!r}")
    available = available_columns(options.kind, options.body, options.body_schema)
    for name in options.columns:
        if name not in available:
            raise InvalidArgument(f"kind {options.kind!r} has no column {name!r}; it has: {', '.join(available)}")
    return options


def schema_ddl(options: Options) -> str:
    """The schema of a read in Spark's DDL."""
    return ", ".join(f"`{name}` {type_}" for name, type_ in options.schema().items())


# Parsers: the name of an option and its text in, a value out.


def _text(_: str, text: str) -> str:
    return text


def _folder(_: str, path: str) -> Path:
    """A local path, as such or as a URL with the scheme `file`."""
    parsed = urlparse(path)
    if parsed.scheme not in ("", "file"):
        raise InvalidArgument(f"{path!r} is no path of a mounted file system: TurtleMQ's files are read where they are mounted")
    return Path(parsed.path if parsed.scheme else path).absolute()


def _topics(_: str, text: str) -> tuple[str, ...]:
    """Names or globs, separated by commas or as a JSON list.

    >>> _topics("topic", '["a", "b"]')
    ('a', 'b')
    """
    return tuple(map(str, json.loads(text))) if text.lstrip().startswith("[") else _words("topic", text) or ("*",)


def _words(_: str, text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def one_of(*allowed: str, fold: Callable[[str], str] = str) -> Callable[[str, str], str]:
    """A parser for a choice; `fold` is applied to the text first.

    >>> one_of("auto", "never", fold=str.lower)("verify", "Never")
    'never'
    """

    def parse(name: str, text: str) -> str:
        value = fold(text)
        if value not in allowed:
            raise InvalidArgument(f"option {name} is one of {', '.join(allowed)}, not {value!r}")
        return value

    return parse


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise InvalidArgument(f"option {name} is a whole number, not {text!r}")
    return int(text)


def _moment(name: str, text: str) -> int:
    """A past moment: epoch milliseconds, or RFC 3339 text with a zone.

    >>> _moment("asOf", "1790000000000"), _moment("asOf", "2026-09-21T14:13:20Z")
    (1790000000000, 1790000000000)
    """
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise InvalidArgument(f"option {name} is epoch milliseconds, or a time with a zone as 2026-09-21T14:13:20Z, not {text!r}")
    return round(at.timestamp() * 1000)


def _bucket_ms(name: str, text: str) -> int:
    return 1000 * (_number(name, text) or 60)


def _flag(name: str, text: str) -> bool:
    return one_of("true", "false", fold=str.lower)(name, text) == "true"


_READ: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "path": ("path", _folder),
    "topic": ("topic", _topics),
    "kind": ("kind", one_of(*KINDS)),
    "columns": ("columns", _words),
    "pushdown": ("pushdown", _flag),
    "body": ("body", one_of("none", *BODY_TYPES, fold=str.lower)),
    "bodySchema": ("body_schema", _text),
    "mode": ("mode", one_of("PERMISSIVE", "DROPMALFORMED", "FAILFAST", fold=str.upper)),
    "verify": ("verify", one_of("auto", "always", "never", fold=str.lower)),
    "bucket": ("bucket_ms", _bucket_ms),
    "asOf": ("as_of", _moment),
    "numPartitions": ("partitions", _number),
    "pin": ("pin", _flag),
    "snapshot": ("snapshot", _text),
    "startingOffsets": ("starting", one_of("earliest", "latest", fold=str.lower)),
    "failOnDataLoss": ("fail_on_data_loss", _flag),
    "maxRowsPerBatch": ("rows_max", _number),
    "maxBytesPerBatch": ("bytes_max", _number),
}
WRITE_OPTIONS = ("url", "token", "topic", "run", "batchRows", "refused", "refusedPath", "timeout")
OPTION_NAMES = tuple(dict.fromkeys([*_READ, "where", *WRITE_OPTIONS]))  # `where` needs the kind, so it is parsed last
_NAMES = {name.lower(): name for name in OPTION_NAMES}
