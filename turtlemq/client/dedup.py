"""Effects that happen once, though a message may come twice: the id is written down in the same transaction as the effect.

At-least-once delivery brings a message again when a consumer dies between its work and its ack. What the work changes in a
database can be kept from happening twice, exactly, by a row with the message's id that commits or rolls back together with it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from turtlemq.client.wire import Message


class Database(Protocol):
    """What every DB-API connection has. The database must know ON CONFLICT DO NOTHING, as SQLite and PostgreSQL do."""

    def cursor(self) -> Any:
        """Something with `execute` and `rowcount`."""

    def commit(self) -> object:
        """Keep what was done."""

    def rollback(self) -> object:
        """Forget what was done."""


class Dedup:
    """Remembers which messages a group has handled, in the database that its handlers change.

    style: how this database writes parameters: `qmark` for sqlite3, `format` for psycopg (PostgreSQL). One connection belongs to
    one thread at a time: with several handlers at once, make a Dedup in each (it is cheap), or give it a connection of a pool.

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
        """A transaction: True inside where the message is new. Commits at the end; an error rolls everything back and is raised.

        Do the effect through the same connection, and do not commit in between. Two that try at once: the second waits for the
        first (PostgreSQL), or fails and comes again (SQLite, if the other takes longer than its busy timeout).
        """
        marks = ", ".join([self._mark] * 4)
        row = (message.topic, message.group, message.id, time.time_ns() // 1_000_000)
        with self._whole() as cursor:
            cursor.execute(f"INSERT INTO {self._table} VALUES ({marks}) ON CONFLICT DO NOTHING", row)
            yield cursor.rowcount > 0

    def forget(self, older_s: float) -> int:
        """Drop what was handled longer ago than this. Keep more than a message may take to come again, say a week."""
        before = time.time_ns() // 1_000_000 - round(older_s * 1000)
        with self._whole() as cursor:
            cursor.execute(f"DELETE FROM {self._table} WHERE done_ms < {self._mark}", (before,))
        return int(cursor.rowcount)

    @contextmanager
    def _whole(self) -> Iterator[Any]:
        """A transaction. A commit that fails is rolled back as well: what it leaves open would fail all that come after it."""
        try:
            yield self._database.cursor()
            self._database.commit()
        except BaseException:
            self._database.rollback()
            raise
