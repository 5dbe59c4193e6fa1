"""A trial of `network` inside its namespaces: prints the figures that `tests/test_network.py` compares, as JSON.

Host b counts datagrams and answers each with its count. Host a asks, and keeps a TCP connection to b open all the time.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.harness.network import Network

PORT = 9_000
WAIT_S = 0.4


def answer(address: str) -> None:
    """Host b: count datagrams, repeat the bytes of connections."""
    datagrams, listener = socket.socket(type=socket.SOCK_DGRAM), socket.create_server((address, PORT))
    datagrams.bind((address, PORT))

    def repeat() -> None:
        connection, _ = listener.accept()
        while data := connection.recv(100):
            connection.sendall(data)

    threading.Thread(target=repeat, daemon=True).start()
    print("ready", flush=True)
    count = 0
    while True:
        _, sender = datagrams.recvfrom(100)
        count += 1
        datagrams.sendto(str(count).encode(), sender)


def ask(address: str) -> None:
    """Host a: for each line, send a datagram, and print the count in the answer and the milliseconds; -1 for none."""
    datagrams, connection = socket.socket(type=socket.SOCK_DGRAM), socket.create_connection((address, PORT))
    datagrams.connect((address, PORT))
    for line in sys.stdin:
        one = connection if line == "connection\n" else datagrams
        one.settimeout(10 if one is connection else WAIT_S)
        begin = time.monotonic()
        try:
            one.send(b"1")
            count = int(one.recv(100))
        except TimeoutError:
            count = -1
        print(json.dumps([count, (time.monotonic() - begin) * 1000]), flush=True)


def trial(namespaces: bool) -> dict[str, Any]:
    """Counts and times with and without cuts."""
    network = Network(("a", "b"), namespaces)
    program = [sys.executable, "-m", "tests.harness.network_trial"]
    address = network.address("b")
    there = subprocess.Popen([*network.command("b"), *program, "answer", address], stdout=subprocess.PIPE, text=True)
    assert there.stdout is not None
    there.stdout.readline()
    command = [*network.command("a"), *program, "ask", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as here:
        assert here.stdin is not None
        assert here.stdout is not None

        def asked(what: str = "datagram") -> tuple[int, float]:
            assert here.stdin is not None
            assert here.stdout is not None
            here.stdin.write(f"{what}\n")
            here.stdin.flush()
            count, took_ms = json.loads(here.stdout.readline())
            return count, took_ms

        seen = {"address": address, "first": asked()[0], **(measured(network, asked) if namespaces else {})}
        here.stdin.close()
    there.kill()
    with there:
        pass
    network.close()
    return seen


def measured(network: Network, asked: Callable[..., tuple[int, float]]) -> dict[str, Any]:
    """Cuts in each direction, and a slow network. The count of b tells which datagrams came."""
    seen: dict[str, Any] = {}
    for name, pair in (("there", ("a", "b")), ("back", ("b", "a"))):
        network.cut(pair)
        seen[f"cut {name}"] = asked()[0]
        network.heal()
        seen[f"after cut {name}"] = asked()[0]
    network.cut_between("a", "ab")
    later = threading.Timer(1, network.heal)
    later.start()
    _, seen["connection over a cut"] = asked("connection")
    later.join()
    network.slow("ab", 60, 0, 0)
    _, seen["slow"] = asked()
    network.slow("ab", 0, 0, 1.0)
    seen["all lost"] = asked()[0]
    network.fast()
    _, seen["fast again"] = asked()
    return seen


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        answer(sys.argv[2])
    elif sys.argv[1] == "ask":
        ask(sys.argv[2])
    else:
        print(json.dumps(trial(sys.argv[1] == "namespaces")))
