"""A real server is stopped under load: each request is answered whole, or not at all, and the stop is a clean one.

Its behaviour when it is killed instead: tests/trust/kills.py.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.harness.server_process import running
from tests.trust.kills import after_all, calm, prepared
from tests.trust.kills_clients import all_work, new_clients
from tests.trust.kills_model import Model


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_answered_before_a_stop_under_load_holds_after_it(tmp_path: Path, number: signal.Signals) -> None:
    model, data = Model(), tmp_path / "data"
    clients = new_clients(model, int(number))
    with running(data) as server:
        prepared(server)

        def end() -> None:
            time.sleep(0.7)
            server.process.send_signal(number)
            assert server.process.wait(5) == 0

        all_work(clients, server, end)
    calm(tmp_path, "a stop")
    assert model.halves == 0, "an answer was cut off"
    after_all(data, model, clients, was_clean=True)
    model.verdict("a stop")
    assert len(model.acked["a"]) > 10, "they did something"
