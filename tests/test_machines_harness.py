"""The tools of the trust suite's part `machines`: clocks that can be set, members of etcd, the probe, the gate and the judge."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.harness import etcd_process
from tests.harness.etcd_members import EtcdMembers
from tests.harness.machines import ETCD_HOSTS, until
from tests.harness.network import Network
from tests.harness.server_process import ROOT, environment
from tests.trust.kills_model import Sent, body_of, now_ms
from tests.trust.machines_clients import ClusterModel, Gate
from tests.trust.machines_probe import Probe

_CLOCK = """
import asyncio, sys, time
from turtlemq.server.timerfd import WallClockTimer

async def ring():
    rung = asyncio.Event()
    timer = WallClockTimer(rung.set)
    timer.at(time.time_ns() / 1e6 + 200)
    await rung.wait()
    timer.close()

for line in sys.stdin:
    begin, monotonic = time.time_ns(), time.monotonic()
    asyncio.run(ring())
    print(begin, time.time(), time.clock_gettime(time.CLOCK_REALTIME), time.monotonic() - monotonic, flush=True)
"""


def test_a_clock_is_set_while_a_process_runs(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(bytes(8))
    path = f"{ROOT / 'tests' / 'harness' / 'fake_clock'}{os.pathsep}{ROOT}"
    more = environment(CLOCK_FILE=str(clock), PYTHONPATH=path)
    command = [sys.executable, "-c", _CLOCK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=more) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for ahead_s in (0, 3_600, -86_400):
            clock.write_bytes(struct.pack("<q", ahead_s * 10**9))
            process.stdin.write("\n")
            process.stdin.flush()
            begin, *seconds, took = process.stdout.readline().split()
            for told in (int(begin) / 1e9, *map(float, seconds)):
                assert abs(told - ahead_s - time.time()) < 10
            assert 0.15 < float(took) < 10, "timers ring in their time"
        process.stdin.close()


@pytest.mark.slow
@pytest.mark.skipif(not etcd_process.is_installed(), reason=etcd_process.MISSING)
def test_members_of_etcd_go_on_without_their_leader(tmp_path: Path) -> None:
    etcd = EtcdMembers(Network(ETCD_HOSTS, namespaces=False), ETCD_HOSTS, tmp_path)
    try:
        etcd.start()
        etcd.until_healthy()
        leader = etcd.leader()
        assert leader is not None
        etcd.kill(leader)
        until(lambda: etcd.leader() not in (None, leader), "another member leads", 30)
        assert etcd.read("/none") == {}
        etcd.start(leader)
        for host in ETCD_HOSTS:
            if host != leader:
                etcd.kill(host)
        with pytest.raises(OSError, match=r"refused|timed out|HTTP Error"):
            etcd.read("/none")
    finally:
        etcd.close()


class _Answers(BaseHTTPRequestHandler):
    """Takes every put, and knows no message."""

    def do_POST(self) -> None:
        self._answer(201)

    def do_GET(self) -> None:
        self._answer(404)

    def _answer(self, status: int) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def test_the_probe_finds_stale_reads_and_gaps() -> None:
    model = ClusterModel()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        probe = Probe({"a": f"http://127.0.0.1:{server.server_port}", "b": "http://127.0.0.1:9"}, model)
        probe.start()
        try:
            until(lambda: model.faults["stale reads"] > 0, "a stale read", 10)
            with probe.paused():
                count, begin = len(probe.answered), time.monotonic()
                time.sleep(0.3)
                assert len(probe.answered) == count
            until(lambda: probe.first_after(begin) is not None, "an answer", 10)
            assert 0.25 < probe.longest_gap_s(begin, time.monotonic()) < 5
        finally:
            probe.end()
            server.shutdown()
            serving.join()


def test_a_closed_gate_waits_for_deeds_under_way() -> None:
    gate, told = Gate(), []
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with gate.deed():
            inside.set()
            go_on.wait()
            told.append("first")

    def second() -> None:
        with gate.deed():
            told.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    inside.wait()
    threading.Timer(0.05, go_on.set).start()
    with gate.closed():
        assert told == ["first"]
        threads[1].start()
        time.sleep(0.05)
        assert told == ["first"]
    for thread in threads:
        thread.join()
    assert told == ["first", "second"]


def test_a_batch_that_is_stored_twice_is_found() -> None:
    model = ClusterModel()
    model.sent[1] = Sent(1, now_ms() - 1_000)
    message = {"id": "m1", "due_ms": now_ms() - 500, "body": body_of(1, 0), "attempt": 1}
    model.delivered("a", message, time.monotonic(), now_ms())
    model.delivered("b", message, time.monotonic(), now_ms())
    assert not model.texts
    model.delivered("a", message | {"id": "m2"}, time.monotonic(), now_ms())
    assert model.faults["stored twice"] == 1


def test_early_messages_are_judged_with_the_error_of_clocks() -> None:
    model = ClusterModel()
    asked_ms = now_ms()
    model.sent[1] = Sent(1, asked_ms + 1_000)
    message = {"id": "m1", "due_ms": asked_ms + 400, "body": body_of(1, 0), "attempt": 1}
    model.slack_ms = 700
    model.delivered("a", message, time.monotonic(), asked_ms + 300)
    assert not model.texts
    assert model.sent[1].earliest_ms == asked_ms + 1_000
    model.slack_ms = 0
    model.sent[2] = Sent(1, asked_ms + 1_000)
    model.delivered("a", message | {"id": "m2", "body": body_of(2, 0)}, time.monotonic(), asked_ms + 300)
    assert model.faults["early"] == 1
