"""Source: a CSV file with a head line. Columns are named id, body, due, delay, priority, ttr, expires, and header.NAME."""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from turtlemq.client.options import NewMessage
from turtlemq.importing.fields import BodyKind, Unusable, body_of, due_of_text, message_id

COLUMNS = ("id", "body", "due", "delay", "priority", "ttr", "expires")
HEADER = "header."
CELL_CHARS_MAX = 16 << 20  # more than a message may have; the module's own limit is 128 KiB


@dataclass
class CsvFile:
    """The rows of a file. `columns` says which column is which field, where their names differ.

    A row without an id gets one from its number and its content: the same file gives the same ids.
    """

    path: Path
    prefix: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    delimiter: str = ","
    kind: BodyKind = "auto"
    skipped: Counter[str] = field(default_factory=Counter)

    def total(self) -> None:
        """The number of rows is unknown before they are read."""
        return

    def close(self) -> None:
        """Nothing: the file is closed when it was read."""

    def batches(self, count: int) -> Iterator[tuple[int, list[NewMessage]]]:
        """All rows, `count` at a time."""
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            batch: list[NewMessage] = []
            for number, row in self._rows(file):
                batch.append(self._message(number, row))
                if len(batch) == count:
                    yield count, batch
                    batch = []
            yield len(batch), batch

    def _rows(self, file: TextIO) -> Iterator[tuple[int, dict[str, str]]]:
        """Rows by field, with their numbers from 1 on; cells that are empty are left out."""
        csv.field_size_limit(CELL_CHARS_MAX)
        reader = csv.DictReader(file, delimiter=self.delimiter, strict=True)
        fields = {self.columns.get(name, name): name for name in COLUMNS}
        names = reader.fieldnames or []
        if missing := [name for name in {*self.columns.values(), self.columns.get("body", "body")} if name not in names]:
            raise Unusable(f"{self.path} has no column {missing[0]!r}; it has: {', '.join(names)}")
        try:
            for number, row in enumerate(reader, 1):
                cells = {fields.get(name, name): cell for name, cell in row.items() if name in fields or _is_header(name)}
                yield number, {name: cell for name, cell in cells.items() if cell}
        except (csv.Error, UnicodeDecodeError) as error:
            raise Unusable(f"{self.path}, line {reader.line_num + 1}: {error}") from error

    def _message(self, number: int, row: dict[str, str]) -> NewMessage:
        try:
            priority: Any = row.get("priority")
            return NewMessage(
                body=body_of(row.get("body", "").encode(), self.kind),
                id=message_id(self.prefix, row.get("id") or f"{number} {sorted(row.items())}"),
                due=_due_ms(row),
                priority=priority,
                ttr=float(row["ttr"]) if "ttr" in row else None,
                expires=due_of_text(row["expires"]) if "expires" in row else None,
                headers={name.removeprefix(HEADER): cell for name, cell in row.items() if _is_header(name)},
            )
        except (Unusable, ValueError) as why:
            raise Unusable(f"{self.path}, row {number}: {why}") from None


def _is_header(name: object) -> bool:
    return isinstance(name, str) and name.startswith(HEADER)


def _due_ms(row: dict[str, str]) -> int:
    now_ms = time.time_ns() // 1_000_000
    if "due" in row:
        return due_of_text(row["due"])
    return now_ms + round(float(row.get("delay", 0)) * 1000)
