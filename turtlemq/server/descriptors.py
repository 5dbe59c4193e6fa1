"""File descriptors of the process: the limit is raised as far as the system allows, and shared between connections and files."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from turtlemq.server import logs

LIMIT_MAX = 1 << 20  # descriptors that the server asks for at most
FILES_KEPT = 512  # descriptors that connections leave to files, or half of all if there are few
OTHERS = 48  # descriptors that are neither connections nor files: standard streams, event loop, listening sockets, worker process
REFUSALS_MAX = 64  # connections that wait for their refusal at once


@dataclass(frozen=True, slots=True)
class Shares:
    """How many descriptors are for connections, for connections that are refused, and for files."""

    connections: int
    refusals: int
    files: int


def share(limit: int, max_connections: int) -> Shares:
    """Share a limit on descriptors.

    >>> share(1 << 20, 20_000)
    Shares(connections=20000, refusals=64, files=1028464)
    >>> share(1_024, 20_000), share(256, 20_000)
    (Shares(connections=512, refusals=64, files=400), Shares(connections=128, refusals=16, files=64))
    """
    kept = min(FILES_KEPT, limit // 2)
    connections, refusals = min(max_connections, limit - kept), max(1, min(REFUSALS_MAX, kept // 8))
    return Shares(connections, refusals, max(1, limit - connections - refusals - OTHERS))


def raise_limit() -> int:
    """Raise the soft limit on open files to the hard limit, LIMIT_MAX at most. Returns the limit in force."""
    soft, hard = (LIMIT_MAX if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    most = min(hard, LIMIT_MAX)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(soft, most)


def shares_of(max_connections: int) -> Shares:
    """Raise the limit and share it. Logs if fewer connections are allowed than configured."""
    limit = raise_limit()
    shares = share(limit, max_connections)
    if shares.connections < max_connections:
        logs.info("fewer_connections", max_connections=max_connections, open_files=limit, allowed=shares.connections)
    return shares
