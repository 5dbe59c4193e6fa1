"""The receivers in docs/PUSH.md, run as they stand there, get the messages of a real server."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.harness.cluster_process import eventually
from tests.harness.doc_pages import blocks
from tests.harness.server_process import PATIENCE_S, ROOT, environment, running
from turtlemq.client import Client
from turtlemq.client.errors import ClientError
from turtlemq.server.push.signature import secret_of

SECRET = secret_of(bytes(range(32)))
SERVE = """
import socket, sys
from receiver import app
listener = socket.socket(fileno=int(sys.argv[1]))
if "fastapi" in type(app).__module__:
    import uvicorn
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
else:
    from aiohttp import web
    web.run_app(app, sock=listener, print=None)
"""


def receivers() -> list[str]:
    page = (ROOT / "docs" / "PUSH.md").read_text("utf-8")
    return [block.text for block in blocks(page) if block.language == "python"]


def test_there_are_two_receivers() -> None:
    fastapi, aiohttp = receivers()
    assert "FastAPI" in fastapi
    assert "aiohttp" in aiohttp


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["fastapi", "aiohttp"])
def test_a_receiver_of_the_docs_closes_orders(tmp_path: Path, number: int) -> None:
    (tmp_path / "receiver.py").write_text(receivers()[number])
    database = tmp_path / "orders.db"
    with closing(sqlite3.connect(database)) as made, made:
        made.execute("CREATE TABLE closed (id)")
    listener = socket.create_server(("127.0.0.1", 0))
    env = environment(WEBHOOK_SECRET=SECRET, DATABASE=str(database))
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    program = [sys.executable, "-c", SERVE, str(listener.fileno())]
    process = subprocess.Popen(program, env=env, pass_fds=[listener.fileno()])
    try:
        with running(tmp_path / "data", TURTLEMQ_PUSH_HOSTS="127.0.0.1:*") as server, Client(server.url) as client:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/orders"
            client.register_client("orders", url, name="shop", secret=SECRET, ttl=0)
            client.put("orders", {"close": 17}, id="order-17")
            client.put("orders", {"open": 18}, id="order-18") if number else None
            eventually(lambda: client.group("orders").stats.history + client.group("orders").stats.dead == 1 + number)
            if number:
                assert client.dead_summary("orders").errors == {"REFUSED_BY_CLIENT: HTTP 422: no order": 1}
            else:
                client.place_group("orders", "default", "earliest")  # it comes a second time, and changes nothing
                eventually(lambda: client.group("orders").stats.lag == 0)
                with closing(sqlite3.connect(database)) as found:
                    assert found.execute("SELECT id FROM closed").fetchall() == [(17,)]
    except ClientError as error:
        raise AssertionError(error) from error
    finally:
        listener.close()
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
