"""The network of the trust suite's machines: a cut loses packets in one direction, and only while it lasts; nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import network
from tests.harness.machines import until
from tests.harness.server_process import ROOT, environment

TRIAL = "tests.harness.network_trial"


def trial(command: list[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not network.isolation(), reason="no network namespaces here: run it as root (Linux, iproute2, util-linux)")
def test_a_cut_loses_packets_in_one_direction() -> None:
    before = namespaces()
    seen = trial(network.isolated(TRIAL, "namespaces"))
    assert seen["first"] == 1
    assert (seen["cut there"], seen["after cut there"]) == (-1, 2), "the datagram did not come"
    assert (seen["cut back"], seen["after cut back"]) == (-1, 4), "it came, and the answer did not"
    assert 900 < seen["connection over a cut"] < 9_000, "a connection waits, and goes on"
    assert 120 <= seen["slow"] < 380, "60 ms in each direction"
    assert seen["all lost"] == -1
    assert seen["fast again"] < 60
    assert namespaces() == before, "nothing is left"


def test_hosts_without_namespaces_have_addresses_of_loopback() -> None:
    seen = trial([sys.executable, "-m", TRIAL, "loopback"])
    assert seen["first"] == 1
    assert seen["address"].startswith("127.")


@pytest.mark.skipif(not network.isolation(), reason="no network namespaces here: run it as root (Linux, iproute2, util-linux)")
def test_processes_of_a_killed_run_end() -> None:
    program = "import subprocess, sys; one = subprocess.Popen(['sleep', '54321']); print('on', flush=True); sys.stdin.read()"
    command = [*network.isolation(), sys.executable, "-c", program]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout is not None
        try:
            assert run.stdout.readline() == "on\n"
            until(lambda: bool(sleepers()), "it runs", 10)  # its command line appears a moment after its start
        finally:
            run.kill()
    until(lambda: not sleepers(), "they end", 10)


def sleepers() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if path.read_bytes() == b"sleep\x0054321\0" else []
        except OSError:
            pass  # it has just ended
    return found


def namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
