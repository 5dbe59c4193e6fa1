"""For doctests that talk to a server: each of `turtlemq.client` gets a `client` of a real, empty one. And no test fails because
the machine was busy while Hypothesis ran one of its examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def doctest_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server for all doctests of a session."""
    from tests.harness.server_process import running

    with running(tmp_path_factory.mktemp("doctest") / "data", TURTLEMQ_PUSH_HOSTS="127.0.0.0/8:*") as server:
        yield server.url


@pytest.fixture(autouse=True)
def doctest_client(request: pytest.FixtureRequest) -> Iterator[None]:
    """`client` in the examples of the client; nothing for any other test."""
    if not isinstance(request.node, pytest.DoctestItem) or not request.node.name.startswith("turtlemq.client"):
        yield
        return
    from turtlemq.client import Client, NewMessage

    namespace: dict[str, Any] = request.getfixturevalue("doctest_namespace")
    with Client(request.getfixturevalue("doctest_server")) as client:
        for found in client.topics():
            client.drop_topic(found.topic)
        namespace.update(client=client, NewMessage=NewMessage)
        yield
