"""PostgreSQL as a delay queue: a table with an index on the due time, COPY in, SKIP LOCKED out, every commit synced.

There are two ways to reserve. With a lease, due rows move to a second table, which has no index: an ack names the places of its
rows. That is half the work of setting a column, which writes the row and its index entries anew. In a transaction, fetched rows
are deleted and the ack is the commit: least work of all, but a client can only ack all that it has fetched.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import probe
from benchmarks.peers.common import HOST, LEASE_MS, Fetched, ServedQueue, poll_until_found, printed_version, program
from benchmarks.peers.model import Client, Put

USER = "queue"
SETTINGS = {"shared_buffers": "256MB", "synchronous_commit": "on", "jit": "off", "recovery_init_sync_method": "syncfs"}
TABLES = """
CREATE TABLE IF NOT EXISTS sleeping (id text PRIMARY KEY, due bigint NOT NULL, body bytea NOT NULL);
CREATE INDEX IF NOT EXISTS sleeping_due ON sleeping (due);
CREATE TABLE IF NOT EXISTS reserved (id text NOT NULL, due bigint NOT NULL, body bytea NOT NULL, until bigint NOT NULL);
"""
TAKE = """DELETE FROM sleeping WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM sleeping WHERE due <= $1 ORDER BY due LIMIT $2 FOR UPDATE SKIP LOCKED)) RETURNING id, due, body"""
RESERVE = f"""WITH taken AS ({TAKE})
INSERT INTO reserved SELECT id, due, body, $3 FROM taken RETURNING id, due, body, ctid"""
ACK = "DELETE FROM reserved WHERE ctid = ANY($1::tid[])"
GIVE_BACK = """WITH late AS (DELETE FROM reserved WHERE until <= $1 RETURNING id, due, body)
INSERT INTO sleeping SELECT id, due, body FROM late"""
NEXT = "SELECT min(due) FROM sleeping"
# A row that the transaction of a consumer has locked does not sleep any more.
CANCEL = "DELETE FROM sleeping WHERE ctid = (SELECT ctid FROM sleeping WHERE id = $1 FOR UPDATE SKIP LOCKED)"
GIVE_BACK_EVERY_MS = 1000


class LeaseClient(Client):
    """Reserves rows by a lease: they move to a second table until they are acked or the lease ends."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.row_addresses: dict[str, object] = {}
        self.gave_back_ms = 0

    async def put(self, messages: Sequence[Put]) -> None:
        rows = [(message.id, message.due_ms, message.body) for message in messages]
        await self.connection.copy_records_to_table("sleeping", records=rows)

    async def fetch(self, count: int, wait_s: float = 0) -> Fetched:
        async def look(now: int) -> Fetched | int | None:
            if now - self.gave_back_ms > GIVE_BACK_EVERY_MS:
                self.gave_back_ms = now
                await self.give_back(now)
            next_ms: int | None = await self.connection.fetchval(NEXT)
            if next_ms is None or next_ms > now:
                return next_ms
            return await self.take(count, now) or None  # other clients have locked all due rows

        return await poll_until_found(look, wait_s)

    async def give_back(self, now: int) -> None:
        await self.connection.execute(GIVE_BACK, now)

    async def take(self, count: int, now: int) -> Fetched:
        rows = await self.connection.fetch(RESERVE, now, count, now + LEASE_MS)
        self.row_addresses.update([(row[0], row[3]) for row in rows])
        return [(row[0], row[1]) for row in rows]

    async def ack(self, ids: Sequence[str]) -> None:
        await self.connection.execute(ACK, list(map(self.row_addresses.pop, ids)))

    async def cancel(self, id_: str) -> bool:
        return bool(await self.connection.execute(CANCEL, id_) == "DELETE 1")

    async def close(self) -> None:
        await self.connection.close()


class TransactionClient(LeaseClient):
    """Reserves rows by a transaction: they are deleted, and come back if the connection breaks before the commit."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.open: set[str] = set()

    async def put(self, messages: Sequence[Put]) -> None:
        assert not self.open, "puts would wait for the commit of unacked messages"
        await super().put(messages)

    async def give_back(self, now: int) -> None:
        """Not needed: a rollback gives the rows back."""

    async def take(self, count: int, now: int) -> Fetched:
        if not self.open:
            await self.connection.execute("BEGIN")
        rows = await self.connection.fetch(TAKE, now, count)
        messages = [(row[0], row[1]) for row in rows]
        self.open.update([id_ for id_, _ in messages])
        await self._commit_if_done()
        return messages

    async def ack(self, ids: Sequence[str]) -> None:
        self.open.difference_update(ids)
        await self._commit_if_done()

    async def _commit_if_done(self) -> None:
        if not self.open:
            await self.connection.execute("COMMIT")


def _folder_of_programs() -> Path | None:
    """The folder of the newest server. Debian keeps its programs out of the path, in a folder for each version."""
    servers = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    server = servers[-1] if servers else program("postgres")
    return Path(server).parent if server else None


class PostgresQueue(ServedQueue):
    """A PostgreSQL cluster. `reserve` is "lease" or "transaction"."""

    durable = True

    def __init__(self, folder: Path, reserve: str) -> None:
        super().__init__(folder)
        self.name = f"PostgreSQL, {reserve}"
        self.settings = ", ".join(f"{name} {value}" for name, value in SETTINGS.items()) + "; COPY in, SKIP LOCKED out, asyncpg"
        self.kind = {"lease": LeaseClient, "transaction": TransactionClient}[reserve]
        self.data = folder / "data"

    @staticmethod
    def missing() -> str | None:
        if _folder_of_programs() is None:
            return "postgresql"
        return None if importlib.util.find_spec("asyncpg") else "the Python package asyncpg"

    def _run(self, name: str) -> list[str]:
        """The command of a server program. It refuses root, so root becomes the user postgres, which may read our folders."""
        command = [str((_folder_of_programs() or Path()) / name)]
        if os.geteuid() != 0:
            return command
        cap = "+dac_read_search"
        user = ["--reuid", "postgres", "--regid", "postgres", "--clear-groups", "--inh-caps", cap, "--ambient-caps", cap]
        return ["setpriv", *user, *command]

    def version(self) -> str:
        return printed_version([*self._run("postgres"), "--version"], r"(\d[\d.]*)")

    def command(self) -> list[str]:
        options = SETTINGS | {"listen_addresses": HOST, "unix_socket_directories": "", "port": str(self.port)}
        options["dynamic_shared_memory_type"] = "mmap"  # in its folder, so that a killed server leaves no shared memory behind
        return [*self._run("postgres"), "-D", str(self.data), *[f"--{name}={value}" for name, value in options.items()]]

    async def start(self) -> None:
        if not self.data.exists():
            self._make_cluster()
        await super().start()

    def _make_cluster(self) -> None:
        self.data.mkdir(parents=True)
        if os.geteuid() == 0:
            shutil.chown(self.data, "postgres", "postgres")
        options = f"-U {USER} -A trust -E UTF8 --locale=C --no-sync -D".split()
        subprocess.run([*self._run("initdb"), *options, str(self.data)], check=True, capture_output=True, cwd=self.data)

    async def answers(self) -> bool:
        import asyncpg

        try:
            connection = await self._connect()
        except asyncpg.CannotConnectNowError:
            return False
        await connection.execute(TABLES)
        await connection.close()
        return True

    async def _connect(self) -> Any:
        import asyncpg

        return await asyncpg.connect(host=HOST, port=self.port, user=USER, database="postgres", ssl=False, timeout=60)

    async def client(self) -> Client:
        return self.kind(await self._connect())

    async def sleepers(self) -> int:
        """Messages in the table; those that a transaction has fetched count until its commit."""
        connection = await self._connect()
        try:
            return int(await connection.fetchval("SELECT count(*) FROM sleeping"))
        finally:
            await connection.close()

    def pids(self) -> list[int]:
        return [pid for parent in super().pids() for pid in probe.process_tree(parent)]

    def kill(self) -> None:
        """SIGKILL, and wait until all processes are gone: the next server cannot start while their shared memory exists."""
        pids = self.pids()
        super().kill()
        while any(map(_is_running, pids)):
            time.sleep(0.001)

    def anonymous_bytes(self) -> int:
        """Anonymous memory of all processes, and once the buffers that they share."""
        own, shared = 0, 0
        for pid in self.pids():
            try:
                own += probe.anonymous_bytes(pid)
                shared = max(shared, probe.shared_bytes(pid))
            except (OSError, LookupError):
                continue  # the process of a connection that was closed just now
        return own + shared


def _is_running(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
