"""Options of the data source, checked: what is wrong is said before anything is read."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlparse

from pyspark_turtlemq import columns as c
from pyspark_turtlemq.predicates import Predicates
from pyspark_turtlemq.predicates import parse_where as conditions
from turtlemq.errors import InvalidArgument
from turtlemq.storage import names

MODES = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")
VERIFY = ("auto", "always", "never")
OPTION_NAMES = (
    "path topic kind columns where pushdown body bodySchema bucket mode verify numPartitions pin snapshot startingOffsets "
    "failOnDataLoss maxRowsPerBatch maxBytesPerBatch url token run batchRows refused refusedPath timeout"
).split()
_NAMES = {name.lower(): name for name in OPTION_NAMES}  # as people write them, by what Spark makes of them
_SPARKS = ("checkpointlocation", "queryname", "outputmode", "paths")  # Spark's own, which it hands on


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that a read may be told."""

    path: Path
    topic: tuple[str, ...] = ("*",)
    kind: str = "delay"
    columns: tuple[str, ...] = ()
    where: Predicates = field(default_factory=Predicates)
    pushdown: bool = False
    body: str = "none"
    body_schema: str = ""
    mode: str = "PERMISSIVE"
    verify: str = "auto"
    bucket_ms: int = 60_000  # of a forecast
    partitions: int = 0
    pin: bool = True
    snapshot: str = ""
    starting: str = "earliest"
    fail_on_data_loss: bool = True
    rows_max: int = 0
    bytes_max: int = 0

    def topics(self) -> list[str]:
        """Names of the topics that are there and are meant. A plain name that is not there is an error."""
        try:
            there = sorted(name for name in os.listdir(self.path / names.TOPICS) if names.is_topic(name))
        except FileNotFoundError:
            there = []
        there = [name for name in there if (self.path / names.TOPICS / name).is_dir()]
        found = [name for name in there if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.topic)]
        for pattern in self.topic:
            if names.is_topic(pattern) and pattern not in there:
                raise InvalidArgument(
                    f"there is no topic {pattern!r} in {self.path}; there are: {', '.join(there[:20]) or 'none'}"
                )
        return found


def check_names(given: Mapping[str, str]) -> dict[str, str]:
    """Options under the names that people write. An unknown one is an error: it would do nothing."""
    given = {name: value for name, value in given.items() if name.lower() not in _SPARKS}
    unknown = sorted(name for name in given if name.lower() not in _NAMES)
    if unknown:
        raise InvalidArgument(
            f"there is no option {unknown[0]!r}; there are: {', '.join(sorted(_NAMES.values(), key=str.lower))}"
        )
    return {_NAMES[name.lower()]: str(value) for name, value in given.items()}


def parse_options(given: Mapping[str, str]) -> Options:
    """What a read is told.

    >>> parse_options({"path": "data", "topic": "a, b*", "kind": "ready"}).topic
    ('a', 'b*')
    """
    told = check_names(given)
    if not told.get("path"):
        raise InvalidArgument('say which data folder to read: .load("data"), or .option("path", "data")')
    kind = told.get("kind", "delay")
    wanted = _words(told.get("columns", ""))
    body = told.get("body", "binary" if "body" in wanted else "none").lower()
    options = Options(
        path=_folder(told["path"]),
        topic=_topics(told.get("topic", "*")),
        kind=_one_of("kind", kind, tuple(c.KINDS)),
        columns=wanted,
        where=conditions(told.get("where", ""), kind),
        pushdown=_flag("pushdown", {"pushdown": "false", **told}),
        body=_one_of("body", body, ("none", *c.BODIES)),
        body_schema=told.get("bodySchema", ""),
        mode=_one_of("mode", told.get("mode", MODES[0]).upper(), MODES),
        verify=_one_of("verify", told.get("verify", VERIFY[0]).lower(), VERIFY),
        bucket_ms=1000 * (_number("bucket", told) or 60),
        partitions=_number("numPartitions", told),
        pin=_flag("pin", told),
        snapshot=told.get("snapshot", ""),
        starting=_one_of("startingOffsets", told.get("startingOffsets", "earliest").lower(), ("earliest", "latest")),
        fail_on_data_loss=_flag("failOnDataLoss", told),
        rows_max=_number("maxRowsPerBatch", told),
        bytes_max=_number("maxBytesPerBatch", told),
    )
    there = c.available_columns(options.kind, options.body, options.body_schema)
    for name in wanted:
        if name not in there:
            raise InvalidArgument(f"kind {kind!r} has no column {name!r}; it has: {', '.join(there)}")
    return options


def schema_ddl(options: Options) -> str:
    """The schema of a read, as Spark writes it."""
    there = c.available_columns(options.kind, options.body, options.body_schema)
    wanted = options.columns or tuple(name for name in there if name != c.DAMAGE)
    return ", ".join(f"`{name}` {there[name]}" for name in wanted)


def _folder(path: str) -> Path:
    """A local path: Spark users write file: before it."""
    parsed = urlparse(path)
    if parsed.scheme not in ("", "file"):
        raise InvalidArgument(f"{path!r} is no path of a mounted file system: TurtleMQ's files are read where they are mounted")
    return Path(parsed.path if parsed.scheme else path).absolute()


def _topics(text: str) -> tuple[str, ...]:
    """Names or globs: with commas between them, or as a JSON list.

    >>> _topics('["a", "b"]')
    ('a', 'b')
    """
    return tuple(map(str, json.loads(text))) if text.lstrip().startswith("[") else _words(text) or ("*",)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidArgument(f"option {name} is one of {', '.join(allowed)}, not {value!r}")
    return value


def _number(name: str, told: Mapping[str, str]) -> int:
    text = told.get(name, "0")
    if not text.isdigit():
        raise InvalidArgument(f"option {name} is a whole number, not {text!r}")
    return int(text)


def _flag(name: str, told: Mapping[str, str]) -> bool:
    return _one_of(name, told.get(name, "true").lower(), ("true", "false")) == "true"
