"""A network of several hosts on one machine: network namespaces that a bridge joins, or addresses of loopback without root.

A program that calls `isolated` runs in network, mount and process namespaces of its own. When its first process ends, the kernel
ends all others and removes every interface, mount and namespace: nothing is left, also after kill -9.

Each host is a namespace with one interface. A cut gives the target a hardware address that belongs to no host, in the neighbour
table of the source: packets leave and arrive nowhere, in this direction alone, as with a broken cable. Connections stay open
and go on after the cut. Latency and loss: `slow_network`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from pathlib import Path

from tests.harness.server_process import ROOT

_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
_TRIAL = "; ".join(
    (
        "set -e",
        "mount -t tmpfs none /run",
        "ip netns add one",
        "ip link add hub type bridge",
        "ip link add to-one type veth peer name e netns one",
    )
)
_NOWHERE = "02:00:00:00:00:01"  # hardware address of no host
_LINK = "eth0"
_OWN = 254  # number of the program that drives the hosts
DRIVER = "driver"


@cache
def isolation() -> tuple[str, ...]:
    """The command in front of a program that needs namespaces; empty where they are not allowed."""
    for command in (_UNSHARE, (*_UNSHARE, "--map-root-user")):
        try:
            done = subprocess.run([*command, "sh", "-c", _TRIAL], capture_output=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return command
    return ()


def isolated(module: str, *args: str) -> list[str]:
    """The command that runs a module in namespaces of its own, or without them where they are not allowed."""
    return [*isolation(), sys.executable, "-m", module, *args]


@dataclass
class Network:
    """Hosts by name. Requires: with `namespaces`, the process was started by `isolated`."""

    hosts: tuple[str, ...]
    namespaces: bool
    _cuts: set[tuple[str, str]] = field(default_factory=set)
    _slow: subprocess.Popen[str] | None = None
    _slow_pairs: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        number = os.getpid()
        self._prefix = "10.77.0" if self.namespaces else f"127.{64 + number % 128}.{number // 128 % 256}"
        if self.namespaces:
            self._build()

    def _build(self) -> None:
        _sh("mount -t tmpfs none /run", "ip link set lo up", "ip link add hub type bridge")
        _sh(f"ip addr add {self.address(DRIVER)}/24 dev hub", "ip link set hub up")
        for host in self.hosts:
            _sh(
                f"ip netns add {host}",
                f"ip link add to-{host} type veth peer name {_LINK} netns {host}",
                f"ip link set to-{host} master hub up",
                f"ip -n {host} link set lo up",
                f"ip -n {host} addr add {self.address(host)}/24 dev {_LINK}",
                f"ip -n {host} link set {_LINK} up",
                f"nsenter --net=/run/netns/{host} sh -c 'for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done'",
            )

    def place_for(self, folder: Path) -> Path:
        """A folder under a name that is valid in the namespaces. Shared memory is private from now on: semaphores of killed
        processes end with the run."""
        if not self.namespaces:
            return folder
        place = Path("/run/machines")
        place.mkdir()
        _sh(f"mount --bind {folder} {place}", "mount -t tmpfs none /dev/shm")
        return place

    def address(self, host: str) -> str:
        return f"{self._prefix}.{_OWN if host == DRIVER else 1 + self.hosts.index(host)}"

    def command(self, host: str) -> list[str]:
        """The command in front of a program that runs on this host."""
        return ["nsenter", f"--net=/run/netns/{host}"] if self.namespaces else []

    # cuts

    def cut(self, *pairs: tuple[str, str]) -> None:
        """Packets from the first to the second of each pair are lost from now on."""
        for source, target in pairs:
            self._cuts.add((source, target))
            there = f"{self.address(target)} dev {self._link(source)}"
            _sh(f"{self._ip(source)} neigh replace {there} lladdr {_NOWHERE} nud permanent")

    def cut_between(self, some: Iterable[str], others: Iterable[str]) -> None:
        """Both directions of each pair of hosts from two sets."""
        those = list(others)
        self.cut(*((a, b) for one in some for other in those if one != other for a, b in ((one, other), (other, one))))

    def heal(self) -> None:
        """No packet is lost any more."""
        for source, target in sorted(self._cuts):
            _sh(f"{self._ip(source)} neigh del {self.address(target)} dev {self._link(source)}")
        self._cuts.clear()

    # latency

    def slow(self, hosts: Iterable[str], delay_ms: float, jitter_ms: float, loss: float) -> None:
        """Packets between these hosts are late by so much, and a share of them is lost. `fast` ends it."""
        if self._slow is None:
            listed = [f"{host}={self.address(host)}" for host in self.hosts]
            command = [sys.executable, "-m", "tests.harness.slow_network", *listed]
            self._slow = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            self._ask(delay_ms, jitter_ms, loss)
            for host in self.hosts:
                _sh(f"ip -n {host} link set slow up")
        self._ask(delay_ms, jitter_ms, loss)
        for source, target in permutations(hosts, 2):
            self._slow_pairs.add((source, target))
            _sh(f"ip -n {source} route replace {self.address(target)}/32 dev slow src {self.address(source)}")

    def fast(self) -> None:
        """Packets take the short way again."""
        for source, target in sorted(self._slow_pairs):
            _sh(f"ip -n {source} route del {self.address(target)}/32 dev slow")
        self._slow_pairs.clear()

    def _ask(self, delay_ms: float, jitter_ms: float, loss: float) -> None:
        """Set the figures of the slow path; it answers when they are in force."""
        assert self._slow is not None
        assert self._slow.stdin is not None
        assert self._slow.stdout is not None
        self._slow.stdin.write(json.dumps([delay_ms / 1000, jitter_ms / 1000, loss]) + "\n")
        self._slow.stdin.flush()
        assert self._slow.stdout.readline() == "ok\n", "the slow path ended"

    def close(self) -> None:
        """End the slow path. The kernel removes all else with the last process."""
        if self._slow is not None:
            self._slow.kill()
            with self._slow:
                pass
            self._slow = None

    def _ip(self, host: str) -> str:
        return "ip" if host == DRIVER else f"ip -n {host}"

    def _link(self, host: str) -> str:
        return "hub" if host == DRIVER else _LINK


def _sh(*commands: str) -> None:
    for command in commands:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")
