"""Source: messages of Amazon SQS in a file of JSON, as `aws sqs receive-message` prints them.

The file holds any number of JSON values, one after the other: answers with `Messages`, entries for `send-message-batch`, lists of
messages, or single messages. SQS does not tell when a message is due: it hides delayed ones. So the due time is that of sending
plus `DelaySeconds`, or a message attribute of your own.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from turtlemq.client.options import NewMessage
from turtlemq.importing.fields import BodyKind, Unusable, body_of, due_of_text, message_id

READ_CHARS = 1 << 20
_WHITE_SPACE = re.compile(r"\s*")


@dataclass
class SqsJson:
    """The messages of a file. due_attribute: the message attribute with the due time. Other attributes become headers."""

    path: Path
    prefix: str = ""
    due_attribute: str | None = None
    kind: BodyKind = "auto"
    skipped: Counter[str] = field(default_factory=Counter)

    def total(self) -> None:
        """The number of messages is unknown before they are read."""
        return

    def close(self) -> None:
        """Nothing: the file is closed when it was read."""

    def batches(self, count: int) -> Iterator[tuple[int, list[NewMessage]]]:
        """All messages, `count` at a time."""
        batch: list[NewMessage] = []
        with self.path.open(encoding="utf-8-sig") as file:
            for number, given in enumerate(_messages(_values(file, self.path)), 1):
                try:
                    batch.append(self._message(given))
                except Unusable as why:
                    raise Unusable(f"{self.path}, message {number}: {why}") from None
                if len(batch) == count:
                    yield count, batch
                    batch = []
        yield len(batch), batch

    def _message(self, given: dict[str, Any]) -> NewMessage:
        body = given.get("Body", given.get("MessageBody"))
        id_ = given.get("MessageId", given.get("Id"))
        if not isinstance(body, str) or not isinstance(id_, str):
            raise Unusable("a message has a Body and a MessageId (or a MessageBody and an Id)")
        attributes = {name: _text(value) for name, value in given.get("MessageAttributes", {}).items()}
        due = attributes.pop(self.due_attribute, None) if self.due_attribute else None
        return NewMessage(
            body=body_of(body.encode(errors="surrogatepass"), self.kind),
            id=message_id(self.prefix, id_),
            due=_due_ms(given) if due is None else due_of_text(due),
            headers=attributes,
        )


def _due_ms(given: dict[str, Any]) -> int:
    sent = given.get("Attributes", {}).get("SentTimestamp")
    begin_ms = time.time_ns() // 1_000_000 if sent is None else int(sent)
    return begin_ms + 1000 * int(given.get("DelaySeconds", 0))


def _text(attribute: dict[str, Any]) -> str:
    """The value of a message attribute; bytes stay in base64."""
    return str(attribute.get("StringValue", attribute.get("BinaryValue", "")))


def _messages(values: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """The messages in JSON values of all the forms.

    >>> list(_messages(iter([{"Messages": [{"Body": "a"}]}, [{"Body": "b"}], {"Body": "c"}, {"ResponseMetadata": {}}])))
    [{'Body': 'a'}, {'Body': 'b'}, {'Body': 'c'}]
    """
    for value in values:
        if isinstance(value, list):
            yield from _messages(iter(value))
        elif isinstance(value, dict) and ("Messages" in value or "Entries" in value):
            yield from _messages(iter([value.get("Messages") or value.get("Entries") or []]))
        elif isinstance(value, dict) and value.keys() != {"ResponseMetadata"}:
            yield value
        elif not isinstance(value, dict):
            raise Unusable(f"a message is an object, not {value!r:.60}")


def _values(file: TextIO, path: Path) -> Iterator[Any]:
    """The JSON values of a file, one after the other. Memory: the largest of them, about."""
    decoder, text, read = json.JSONDecoder(), "", READ_CHARS
    while True:
        piece = file.read(read)
        text, at, read = text + piece, 0, READ_CHARS
        while (start := _blank(text, at)) < len(text):
            try:
                value, at = decoder.raw_decode(text, start)
            except ValueError as error:
                if not piece:
                    raise Unusable(f"{path} is no JSON: {error}") from None
                read = max(READ_CHARS, len(text) - at)  # a value that goes on beyond the text so far
                break
            yield value
        text = text[at:]
        if not piece:
            return


def _blank(text: str, at: int) -> int:
    """The end of the white space that begins here."""
    match = _WHITE_SPACE.match(text, at)
    return match.end() if match else at
