"""A copy of a cluster's keys in etcd, kept up to date by one watch of their common prefix.

`keys` are those of etcd at `revision`, all of them at once: a transaction is seen whole or not at all. A watch tells changes
within milliseconds; a read now and then finds those that a connection has swallowed. After a change, functions in `changed`
are called; when changes may have been missed, those in `unwatched`: only a read that begins then shows the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turtlemq.errors import describe
from turtlemq.replica.cluster_state import KeyValue
from turtlemq.replica.etcd import Changed, Etcd, EtcdError, Found

READ_S = 2.0  # between two reads beside the watch
LATE_S = 0.5  # a watch that tells of a change so much later than a read has ended without notice
BACK_OFF_S = 0.1, 1.0  # before the next try, if etcd does not answer
Log = Callable[..., None]


def _nothing(*_: object, **__: object) -> None:
    return


class NamesView:
    """The keys below a prefix, such as `/tmq/prod/`. All methods run on one event loop."""

    def __init__(self, etcd: Etcd, prefix: str, *, log: Log = _nothing) -> None:
        self.keys: dict[str, KeyValue] = {}
        self.revision = 0  # of etcd, at which the keys were so
        self.is_fresh = False  # the watch is under way: changes come here within milliseconds
        self.changed: list[Callable[[], None]] = []
        self.unwatched: list[Callable[[], None]] = []
        self._etcd, self._prefix, self._log = etcd, prefix, log
        self._read_at = 0  # the revision of the last read: changes up to it are in `keys`
        self._told = 0  # how often the watch has told changes

    async def run(self) -> None:
        """Read, and watch from there, until it is cancelled."""
        pause_s = BACK_OFF_S[0]
        while True:
            try:
                await self.read()
                pause_s = BACK_OFF_S[0]
                await self._watch()
                why = "changes came late"
            except EtcdError as error:
                why = describe(error)
            if self.is_fresh:
                self.is_fresh = False
                self._log("name_server_lost", why=why)
                _call(self.unwatched)
            await asyncio.sleep(pause_s)
            pause_s = min(BACK_OFF_S[1], 2 * pause_s)

    async def read(self) -> int:
        """Read all keys, as they are now, into `keys`. Returns etcd's revision. Raises `EtcdError`."""
        before = self.revision
        found = await self._etcd.get(self._prefix, prefix=True)
        if before <= found.revision < self.revision:
            return self.revision  # the watch was faster
        self._take(found)
        if found.revision < before:  # etcd was restored from an old copy
            _call(self.unwatched)
        return self.revision

    def value(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        found = self.keys.get(key)
        return None if found is None else found.value

    def _take(self, found: Found) -> None:
        keys = {key.key: key for key in found.keys}
        differs = keys != self.keys
        self.keys, self.revision, self._read_at = keys, found.revision, found.revision
        if differs:
            _call(self.changed)

    async def _watch(self) -> None:
        """Follow changes until the connection ends, or until a read has found some that did not come."""
        self.is_fresh = True
        following = asyncio.create_task(self._follow(self.revision + 1))
        reading = asyncio.create_task(self._read_again())
        try:
            done, _ = await asyncio.wait([following, reading], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (following, reading):
                task.cancel()
            await asyncio.gather(following, reading, return_exceptions=True)

    async def _follow(self, revision: int) -> None:
        async for change in self._etcd.watch(self._prefix, revision, prefix=True):
            self._apply(change)

    async def _read_again(self) -> None:
        """Read now and then. Returns when that has found changes of which the watch has told nothing."""
        while True:
            await asyncio.sleep(READ_S)
            told, keys = self._told, self.keys
            await self.read()
            if self.keys != keys and self._told == told:
                await asyncio.sleep(LATE_S)
                if self._told == told:
                    return

    def _apply(self, change: Changed) -> None:
        """Take changes. Those of one revision come together; that of the message itself may be ahead of its changes."""
        news = [key for key in change.keys if key.mod_revision > self._read_at]
        self._told += bool(change.keys)
        if not news:
            return
        keys = dict(self.keys)
        for key in news:
            if key.create_revision:
                keys[key.key] = key
            else:
                keys.pop(key.key, None)
        self.keys, self.revision = keys, max(self.revision, *(key.mod_revision for key in news))
        _call(self.changed)


def _call(functions: list[Callable[[], None]]) -> None:
    for function in list(functions):
        function()
