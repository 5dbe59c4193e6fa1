"""A server that wants tokens of several rights, and serves only some addresses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.server_process import Answer, Server, running
from turtlemq.server.auth import Token, hash_of, new_token

PEOPLE: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "producer": (("produce",), ("orders*", "mail.*")),
    "consumer": (("consume",), ("orders",)),
    "owner": (("admin",), ("orders",)),
    "reader": (("read",), ("orders",)),
    "operator": (("operate",), ("orders",)),
    "support": (("read", "operate"), ("*",)),
    "watcher": ((), ("*",)),
    "root": (("admin",), ("*",)),
}
SECRETS = {name: new_token() for name in PEOPLE}
TOKENS = {name: Token(name, hash_of(SECRETS[name]), rights, topics) for name, (rights, topics) in PEOPLE.items()}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name]}"}


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[Server]:
    """A server that wants tokens, and serves only two addresses."""
    entries = [
        f"[[tokens]]\nname = {json.dumps(token.name)}\nhash = {json.dumps(token.hash)}\n"
        f"rights = {json.dumps(token.rights)}\ntopics = {json.dumps(token.topics)}\n"
        for token in TOKENS.values()
    ]
    (folder / "t.toml").write_text('allowed_hosts = ["127.0.0.1", "127.0.0.4/31"]\n' + "".join(entries))
    with running(folder / "data", "--config", str(folder / "t.toml")) as found:
        yield found
        for secret in SECRETS.values():
            assert secret not in found.log
            assert hash_of(secret).rpartition(":")[2] not in found.log


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with guarded(tmp_path_factory.mktemp("security")) as found:
        yield found


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One whose topics no other test needs."""
    with guarded(tmp_path) as found:
        yield found


def as_(server: Server, name: str, method: str, path: str, value: Any = None) -> Answer:
    return server.call(method, path, value, headers=bearer(name))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("narrow")
    with running(folder / "data", TURTLEMQ_MAX_CONNECTIONS="4", TURTLEMQ_BODY_TIMEOUT_S="0.3") as found:
        yield found
        assert "Traceback" not in found.log
