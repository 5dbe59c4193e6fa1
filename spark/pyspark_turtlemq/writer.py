"""Writing: rows become messages, through the server's HTTP API, in batches.

Columns by name: `body` (binary, or anything else as JSON) and, as there are, `id`, `due` (timestamp) or `due_ms` or `delay`
(seconds), `ttr` (seconds), `priority`, `expires` or `expires_ms`, `headers` (map of strings), `topic`. Without a column `body`
the columns that have no such name are the body, as one JSON object.

A task that runs again sends the same ids, and the server stores an id once. Without a column `id` they are made: from the run,
the number of the partition, the row's content, and how many rows like it came before in that partition. So a task may be
repeated, also if it sees its rows in another order; a row that is there twice is stored twice; another run stores them again.
"""

from __future__ import annotations

import base64
import json
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pyspark_turtlemq.options import check_names
from turtlemq.client import Client, ClientError, NewMessage
from turtlemq.client.errors import Refused
from turtlemq.errors import InvalidArgument

FIELDS = ("id", "body", "topic", "due", "due_ms", "delay", "ttr", "priority", "expires", "expires_ms", "headers")
_ROWS = 5_000
_KEPT = 1_000  # refusals that a task tells of one by one


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write."""

    url: str
    topic: str
    token: str | None
    run: str
    rows: int
    refused: str  # fail | skip
    report: str  # a file to which refusals are written
    timeout: float
    names: tuple[str, ...]


@dataclass
class Written(WriterCommitMessage):
    """What became of a task's rows."""

    stored: int = 0  # or there already, from a try before
    refused: int = 0
    refusals: list[dict[str, Any]] = field(default_factory=list)


def write_options(given: Mapping[str, str], schema: StructType, overwrite: bool, *, streaming: bool = False) -> WriteOptions:
    """Options of a write, checked against the columns."""
    told = check_names(given)
    if overwrite:
        raise InvalidArgument('a queue cannot be overwritten: use .mode("append")')
    if not told.get("url"):
        raise InvalidArgument('say where the server is: .option("url", "http://127.0.0.1:8878")')
    names = tuple(schema.names)
    if "topic" not in names and not told.get("topic"):
        raise InvalidArgument('say which topic: .option("topic", "orders"), or a column topic')
    if streaming and "id" not in names:
        raise InvalidArgument("a stream needs a column id: a batch that is run again must send the same ids")
    if told.get("refused", "fail") not in ("fail", "skip"):
        raise InvalidArgument(f"option refused is fail or skip, not {told['refused']!r}")
    return WriteOptions(
        url=told["url"],
        topic=told.get("topic", ""),
        token=told.get("token"),
        run=told.get("run") or uuid.uuid4().hex,
        rows=int(told.get("batchRows") or _ROWS),
        refused=told.get("refused", "fail"),
        report=told.get("refusedPath", ""),
        timeout=float(told.get("timeout") or 60),
        names=names,
    )


def send(batches: Iterable[pa.RecordBatch], told: WriteOptions, partition: int) -> Written:
    """Store the rows of one task."""
    out = Written()
    seen: Counter[str] = Counter()
    waiting: dict[str, list[NewMessage]] = {}
    with Client(told.url, token=told.token, timeout=told.timeout) as client:
        for batch in batches:
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                topic, message = _message(row, told, partition, seen)
                waiting.setdefault(topic, []).append(message)
                if len(waiting[topic]) >= told.rows:
                    _store(client, topic, waiting.pop(topic), told, out)
        for topic, messages in waiting.items():
            _store(client, topic, messages, told, out)
    return out


def _store(client: Client, topic: str, messages: list[NewMessage], told: WriteOptions, out: Written) -> None:
    """One request; without the rows that the server refuses one by one, where they are to be skipped."""
    while messages:
        try:
            out.stored += len(client.put_many(topic, messages))
            return
        except ClientError as error:
            at = error.index
            if not isinstance(error, Refused) or at is None or told.refused == "fail":
                raise _explained(error, topic, messages, out) from error
            done = int(error.details.get("stored") or 0)
            out.stored += done
            out.refused += 1
            if len(out.refusals) < _KEPT:
                out.refusals.append({"topic": topic, "id": messages[at].id, "code": error.code, "message": str(error)})
            messages = messages[done:at] + messages[at + 1 :]


def _explained(error: ClientError, topic: str, messages: list[NewMessage], out: Written) -> ClientError:
    """Which row it was, and what to do."""
    at = error.index
    which = "" if at is None or at >= len(messages) else f", id {messages[at].id!r}"
    hint = ' Rows like that are left out and reported with .option("refused", "skip").' if isinstance(error, Refused) else ""
    stored = f" {out.stored} rows of this task were stored before; run again, they are not stored twice." if out.stored else ""
    return ClientError(f"topic {topic!r}{which}: {error.code or type(error).__name__}: {error}.{stored}{hint}")


def _message(row: dict[str, Any], told: WriteOptions, partition: int, seen: Counter[str]) -> tuple[str, NewMessage]:
    topic = row.get("topic") or told.topic
    body = row["body"] if "body" in row else {name: _plain(value) for name, value in row.items() if name not in FIELDS}
    if not isinstance(body, (bytes, str)) or "body" not in row:
        body = _plain(body)
    id_ = row.get("id")
    if id_ is None:
        digest = xxhash.xxh3_128_hexdigest(json.dumps(_plain(row), sort_keys=True, default=str).encode())
        id_ = made_id(told.run, partition, digest, seen[digest])
        seen[digest] += 1
    return topic, NewMessage(
        body=body,
        id=id_,
        delay=None if row.get("delay") is None else float(row["delay"]),
        due=_when(row, "due"),
        ttr=None if row.get("ttr") is None else float(row["ttr"]),
        priority=row.get("priority"),
        expires=_when(row, "expires"),
        headers=row.get("headers"),
    )


def made_id(run: str, partition: int, digest: str, before: int) -> str:
    """An id for a row that has none.

    >>> made_id("r1", 0, "ab", 0) == made_id("r1", 0, "ab", 0) != made_id("r1", 0, "ab", 1)
    True
    """
    return "s" + xxhash.xxh3_128_hexdigest(f"{run}/{partition}/{digest}/{before}".encode())


def _when(row: dict[str, Any], name: str) -> int | datetime | None:
    value = row.get(f"{name}_ms")
    if value is None:
        value = row.get(name)
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return None if value is None else value if isinstance(value, datetime) else int(value)


def _plain(value: Any) -> Any:
    """What JSON can say: times as text, bytes as base64, decimals as text."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, Decimal) else value


def report(messages: Iterable[WriterCommitMessage | None], told: WriteOptions) -> Written:
    """All tasks together, told to people; refusals go to `refusedPath` too, a line each."""
    total = Written()
    for one in messages:
        if isinstance(one, Written):
            total.stored += one.stored
            total.refused += one.refused
            total.refusals += one.refusals
    if told.report:
        lines = "".join(json.dumps(refusal) + "\n" for refusal in total.refusals)
        Path(told.report).parent.mkdir(parents=True, exist_ok=True)
        with Path(told.report).open("a", encoding="utf-8") as file:
            file.write(lines)
    if total.refused:
        codes = Counter(refusal["code"] for refusal in total.refusals)
        why = ", ".join(f"{count} {code}" for code, count in codes.most_common())
        first = total.refusals[0]
        print(
            f"turtlemq: {total.stored} rows were stored, {total.refused} refused ({why}); "
            f"the first: id {first['id']!r}: {first['message']}",
            file=sys.stderr,
        )
    return total


def _partition() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else int(context.partitionId())


class Writer(DataSourceArrowWriter):
    """`df.write.format("turtlemq").mode("append")`."""

    def __init__(self, told: WriteOptions) -> None:
        self.told = told

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return send(iterator, self.told, _partition())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        report(messages, self.told)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        done = sum(one.stored for one in messages if isinstance(one, Written))
        print(f"turtlemq: the write failed; {done} rows of finished tasks are stored. {_AGAIN}", file=sys.stderr)


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("turtlemq")`."""

    def __init__(self, told: WriteOptions) -> None:
        self.told = told

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return send(iterator, self.told, _partition())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        report(messages, self.told)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        print(f"turtlemq: batch {batchId} failed; Spark runs it again with the same ids.", file=sys.stderr)


_AGAIN = 'With a column id, or the same .option("run", …), another try does not store them twice.'
