"""Reload of tokens and certificates while the server runs: on SIGHUP, and when their files change.

The files are looked at every CHECK_S seconds: the configuration file, and those of the certificate. New ones are read and checked
as a whole before they are used; a bad one changes nothing, and the log has the reason. Connections stay open: each request is
checked against the tokens of its moment, and a new certificate is for new connections. All other settings need a restart.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turtlemq.errors import InvalidArgument
from turtlemq.server import logs
from turtlemq.server.auth import Token
from turtlemq.server.config import Config
from turtlemq.server.listen import tls_of

CHECK_S = 2.0
RELOADED = ("tokens", "tls_cert", "tls_key")  # settings that are used without a restart
Stamp = tuple[tuple[int, int, int] | None, ...]  # time, size and number of each file; None: it is not there


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a configuration: `read` reads it again, `file` is its file, if it has one."""

    read: Callable[[], Config]
    file: Path | None


class Reloader:
    """Reads tokens and certificates again, for as long as `run` does."""

    def __init__(
        self,
        source: Source,
        config: Config,
        use_tokens: Callable[[tuple[Token, ...]], None],
        *use_tls: Callable[[ssl.SSLContext | None], None],
    ) -> None:
        """`use_tls`: of each listener, which gets a context of its own. More may be added to `use_tls` later."""
        self.use_tls = list(use_tls)
        self._source, self._config, self._use_tokens = source, config, use_tokens
        self._asked = asyncio.Event()
        self._stamp = self._look()

    def ask(self) -> None:
        """Read everything again soon, changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Reload when it is asked for, or a file has changed; for ever."""
        while True:
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._asked.wait()
            except TimeoutError:
                if self._look() == self._stamp:
                    continue
            self._asked.clear()
            await self._reload()

    async def _reload(self) -> None:
        self._stamp = self._look()  # before the files are read: one that changes meanwhile is read again
        try:
            config, contexts = await asyncio.to_thread(self._read)
        except Exception as error:  # noqa: BLE001 - everything stays as it is
            logs.error("reload_failed", None if isinstance(error, InvalidArgument | OSError) else error, error=error)
            return
        changed = [name for name in Config.__struct_fields__ if getattr(config, name) != getattr(self._config, name)]
        self._use_tokens(config.tokens)
        for use_tls, tls in zip(self.use_tls, contexts, strict=False):
            use_tls(tls)
        self._config = config
        self._stamp = self._look() if {"tls_cert", "tls_key"} & set(changed) else self._stamp  # other files from now on
        rest = ",".join(name for name in changed if name not in RELOADED)
        logs.info("reloaded", tokens=len(config.tokens), tls=bool(config.tls_cert), **({"needs_restart": rest} if rest else {}))

    def _read(self) -> tuple[Config, list[ssl.SSLContext | None]]:
        """On a thread: the disk may be slow. Raises `InvalidArgument` for values that cannot be used, or only after a restart."""
        config = self._source.read()
        if self._config.tokens and not config.tokens:
            raise InvalidArgument("there are no tokens any more: the server would be open. Restart it, if that is meant.")
        if bool(config.tls_cert) != bool(self._config.tls_cert):
            raise InvalidArgument("tls_cert and tls_key were added or removed: TLS begins and ends with a restart.")
        return config, [tls_of(config) for _ in self.use_tls]

    def _look(self) -> Stamp:
        files = (self._source.file, *(Path(name) for name in (self._config.tls_cert, self._config.tls_key) if name))
        return tuple(_stamp(file) for file in files if file is not None)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
