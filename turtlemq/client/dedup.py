"""Deduplication: exactly-once effects in a database, although a message may be delivered twice.

At-least-once delivery repeats a message if a consumer dies between its work and its ack. A row with the id of the message,
written in the transaction of the effect, commits or rolls back together with it, so the effect happens once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from turtlemq.client.fetched import Message


class Database(Protocol):
    """A DB-API connection. The database must know ON CONFLICT DO NOTHING, as SQLite and PostgreSQL do."""

    def cursor(self) -> Any:
        """A cursor with `execute` and `rowcount`."""

    def commit(self) -> object:
        """Commit the transaction."""

    def rollback(self) -> object:
        """Roll the transaction back."""


class Dedup:
    """A record of the messages that a group has handled, in the database that its handlers change.

    style: the parameter style of the database: `qmark` for sqlite3, `format` for psycopg (PostgreSQL). A connection serves one
    thread at a time: with concurrent handlers, make a Dedup in each of them (it is cheap), on its own connection.

    >>> import sqlite3
    >>> database = sqlite3.connect(":memory:")
    >>> _ = database.execute("CREATE TABLE paid (amount)")
    >>> dedup = Dedup(database)
    >>> message = Message(id="order-17", topic="orders", group="billing", value=5)
    >>> for _ in range(2):  # it comes twice
    ...     with dedup.once(message) as first:
    ...         if first:
    ...             _ = database.execute("INSERT INTO paid VALUES (?)", (message.body,))
    >>> database.execute("SELECT * FROM paid").fetchall()
    [(5,)]
    >>> database.close()
    """

    def __init__(
        self,
        database: Database,
        *,
        table: str = "turtlemq_done",
        style: Literal["qmark", "format"] = "qmark",
        create: bool = True,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", table):
            raise ValueError(f"{table!r} is no name of a table")
        in_sqlite = type(database).__module__ == "sqlite3"
        if getattr(database, "autocommit", False) is True or (in_sqlite and getattr(database, "isolation_level", "") is None):
            raise ValueError("this connection commits each statement by itself; effect and record must be one transaction")
        self._database, self._table = database, table
        self._mark = "?" if style == "qmark" else "%s"
        if create:
            columns = "topic VARCHAR(200), grp VARCHAR(200), id VARCHAR(200), done_ms BIGINT, PRIMARY KEY (topic, grp, id)"
            database.cursor().execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
            database.commit()

    @contextmanager
    def once(self, message: Message) -> Iterator[bool]:
        """A transaction that yields True if the message is new. Commits at the end; an error rolls it back and is raised.

        Make the effect through the same connection, without a commit in between. Of two concurrent transactions for one message,
        the second waits for the first (PostgreSQL), or fails (SQLite, after its busy timeout), and the message comes again.
        """
        marks = ", ".join([self._mark] * 4)
        row = (message.topic, message.group, message.id, time.time_ns() // 1_000_000)
        with self._transaction() as cursor:
            cursor.execute(f"INSERT INTO {self._table} VALUES ({marks}) ON CONFLICT DO NOTHING", row)
            yield cursor.rowcount > 0

    def forget(self, older_s: float) -> int:
        """Delete older records. Keep them for longer than a message may take to come again, say a week. Returns their number."""
        before = time.time_ns() // 1_000_000 - round(older_s * 1000)
        with self._transaction() as cursor:
            cursor.execute(f"DELETE FROM {self._table} WHERE done_ms < {self._mark}", (before,))
        return int(cursor.rowcount)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """A transaction. A failed commit is rolled back too: left open, it would fail all later ones."""
        try:
            yield self._database.cursor()
            self._database.commit()
        except BaseException:
            self._database.rollback()
            raise
