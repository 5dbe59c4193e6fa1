"""The plugin of pytest: the fixture `turtle`. It loads nothing of TurtleMQ until a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from turtlemq.testing.turtle import Turtle

_URL, _TOKEN = "TURTLEMQ_URL", "TURTLEMQ_TOKEN"


def pytest_configure(config: pytest.Config) -> None:
    """Leave out a warning of aiohttp that is about the server and not about the application."""
    config.addinivalue_line("filterwarnings", "ignore:It is recommended to use web.RequestKey")


@pytest.fixture
def turtle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turtle]:
    """A TurtleMQ server of this test alone, whose clock stands still until `turtle.advance(days=3)`. Clients without an address
    of their own talk to it: TURTLEMQ_URL is set."""
    from turtlemq.testing.turtle import Turtle

    with Turtle(tmp_path / "turtlemq") as server:
        monkeypatch.setenv(_URL, server.url)
        monkeypatch.delenv(_TOKEN, raising=False)
        yield server
