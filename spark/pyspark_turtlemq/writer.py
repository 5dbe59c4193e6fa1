"""The sink: rows become messages, put in batches through the HTTP API of the server.

Columns by name: `body` (binary, or any other type as JSON) and, optionally, `id`, `due` (timestamp) or `due_ms` or `delay`
(seconds), `ttr` (seconds), `priority`, `expires` or `expires_ms`, `headers` (map of strings), `topic`. Without a column `body`
all columns of other names form the body, as one JSON object.

Idempotent: a task that runs again sends the same ids, and the server stores an id once. Without a column `id`, ids are hashes of
the run, the partition's number, the row's content, and the number of equal rows before it in that partition. So the order of
rows may differ when a task is repeated; equal rows are stored as often as they occur; another run stores them again.
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
from turtlemq.message_fields import FIELDS, Kind

_FIELDS = {"id", "body", "topic", "due", "due_ms", "delay", "ttr", "priority"}.union(*((row.name, row.element) for row in FIELDS))
_BATCH_ROWS = 5_000
_REFUSALS_MAX = 1_000  # refusals of a task that are kept with their details


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write."""

    url: str
    topic: str
    token: str | None
    run: str  # part of generated ids
    batch_rows: int
    refused: str  # fail | skip
    refused_path: str  # a file for refusals, one JSON object a line; "": none
    timeout: float


@dataclass
class Written(WriterCommitMessage):
    """The result of a task."""

    stored: int = 0  # including rows that an earlier attempt had stored
    refused: int = 0
    refusals: list[dict[str, Any]] = field(default_factory=list)


def write_options(given: Mapping[str, str], schema: StructType, overwrite: bool, *, streaming: bool = False) -> WriteOptions:
    """Options of a write, checked against the columns of the schema."""
    texts = check_names(given)
    if overwrite:
        raise InvalidArgument('a queue cannot be overwritten: use .mode("append")')
    if not texts.get("url"):
        raise InvalidArgument('say where the server is: .option("url", "http://127.0.0.1:8878")')
    if "topic" not in schema.names and not texts.get("topic"):
        raise InvalidArgument('say which topic: .option("topic", "orders"), or a column topic')
    if streaming and "id" not in schema.names:
        raise InvalidArgument("a stream needs a column id: a batch that is run again must send the same ids")
    if texts.get("refused", "fail") not in ("fail", "skip"):
        raise InvalidArgument(f"option refused is fail or skip, not {texts['refused']!r}")
    return WriteOptions(
        url=texts["url"],
        topic=texts.get("topic", ""),
        token=texts.get("token"),
        run=texts.get("run") or uuid.uuid4().hex,
        batch_rows=int(texts.get("batchRows") or _BATCH_ROWS),
        refused=texts.get("refused", "fail"),
        refused_path=texts.get("refusedPath", ""),
        timeout=float(texts.get("timeout") or 60),
    )


def send(batches: Iterable[pa.RecordBatch], options: WriteOptions, partition: int) -> Written:
    """Put the rows of one task."""
    written = Written()
    seen: Counter[str] = Counter()
    pending: dict[str, list[NewMessage]] = {}
    with Client(options.url, token=options.token, timeout=options.timeout) as client:
        for batch in batches:
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                topic, message = _message(row, options, partition, seen)
                pending.setdefault(topic, []).append(message)
                if len(pending[topic]) >= options.batch_rows:
                    _put(client, topic, pending.pop(topic), options, written)
        for topic, messages in pending.items():
            _put(client, topic, messages, options, written)
    return written


def _put(client: Client, topic: str, messages: list[NewMessage], options: WriteOptions, written: Written) -> None:
    """Put a batch. With `refused=skip` a refused message is noted and left out, and the rest is put again."""
    while messages:
        try:
            written.stored += len(client.put_many(topic, messages))
            return
        except ClientError as error:
            at = error.index
            if not isinstance(error, Refused) or at is None or options.refused == "fail":
                raise _with_context(error, topic, messages, written) from error
            done = int(error.details.get("stored") or 0)
            written.stored += done
            written.refused += 1
            if len(written.refusals) < _REFUSALS_MAX:
                written.refusals.append({"topic": topic, "id": messages[at].id, "code": error.code, "message": str(error)})
            messages = messages[done:at] + messages[at + 1 :]


def _with_context(error: ClientError, topic: str, messages: list[NewMessage], written: Written) -> ClientError:
    """The error with the topic, the id of the row, and a hint."""
    at = error.index
    which = "" if at is None or at >= len(messages) else f", id {messages[at].id!r}"
    hint = ' Rows like that are left out and reported with .option("refused", "skip").' if isinstance(error, Refused) else ""
    stored = (
        f" {written.stored} rows of this task were stored before; run again, they are not stored twice." if written.stored else ""
    )
    return ClientError(f"topic {topic!r}{which}: {error.code or type(error).__name__}: {error}.{stored}{hint}")


def _message(row: dict[str, Any], options: WriteOptions, partition: int, seen: Counter[str]) -> tuple[str, NewMessage]:
    topic = row.get("topic") or options.topic
    body = row["body"] if "body" in row else {name: _plain(value) for name, value in row.items() if name not in _FIELDS}
    if not isinstance(body, (bytes, str)) or "body" not in row:
        body = _plain(body)
    id_ = row.get("id")
    if id_ is None:
        digest = xxhash.xxh3_128_hexdigest(json.dumps(_plain(row), sort_keys=True, default=str).encode())
        id_ = generated_id(options.run, partition, digest, seen[digest])
        seen[digest] += 1
    optional: dict[str, Any] = {
        field.element: _time(row, field.element) if field.kind is Kind.TIME else row.get(field.element) for field in FIELDS
    }
    return topic, NewMessage(
        body=body,
        id=id_,
        delay=None if row.get("delay") is None else float(row["delay"]),
        due=_time(row, "due"),
        ttr=None if row.get("ttr") is None else float(row["ttr"]),
        priority=row.get("priority"),
        **optional,
    )


def generated_id(run: str, partition: int, digest: str, before: int) -> str:
    """An id for a row that has none; `before` counts equal rows before it.

    >>> generated_id("r1", 0, "ab", 0) == generated_id("r1", 0, "ab", 0) != generated_id("r1", 0, "ab", 1)
    True
    """
    return "s" + xxhash.xxh3_128_hexdigest(f"{run}/{partition}/{digest}/{before}".encode())


def _time(row: dict[str, Any], name: str) -> int | datetime | None:
    value = row.get(f"{name}_ms")
    if value is None:
        value = row.get(name)
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return None if value is None else value if isinstance(value, datetime) else int(value)


def _plain(value: Any) -> Any:
    """A value of JSON's types: times and decimals as text, bytes as base64."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value) if isinstance(value, Decimal) else value


def _report(messages: Iterable[WriterCommitMessage | None], options: WriteOptions) -> None:
    """Print the refusals of all tasks to the error output, and write them to `refusedPath`."""
    total = Written()
    for written in messages:
        if isinstance(written, Written):
            total.stored += written.stored
            total.refused += written.refused
            total.refusals += written.refusals
    if options.refused_path:
        lines = "".join(json.dumps(refusal) + "\n" for refusal in total.refusals)
        Path(options.refused_path).parent.mkdir(parents=True, exist_ok=True)
        with Path(options.refused_path).open("a", encoding="utf-8") as file:
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


def _partition_number() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else int(context.partitionId())


class Writer(DataSourceArrowWriter):
    """`df.write.format("turtlemq").mode("append")`."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return send(iterator, self.options, _partition_number())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _report(messages, self.options)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        done = sum(written.stored for written in messages if isinstance(written, Written))
        print(f"turtlemq: the write failed; {done} rows of finished tasks are stored. {_HINT}", file=sys.stderr)


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("turtlemq")`."""

    def __init__(self, options: WriteOptions) -> None:
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return send(iterator, self.options, _partition_number())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        _report(messages, self.options)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        print(f"turtlemq: batch {batchId} failed; Spark runs it again with the same ids.", file=sys.stderr)


_HINT = 'With a column id, or the same .option("run", …), another try does not store them twice.'
