"""Three etcd members, each on a host of its own, and a reader of their keys that is independent of the product's client."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.harness.network import Network

CLIENT_PORT, PEER_PORT = 2_379, 2_380
_START_S_MAX = 60
_READ_S_MAX = 3


class EtcdMembers:
    """The members by host. Their folders keep the data for another start."""

    def __init__(self, network: Network, hosts: tuple[str, ...], folder: Path) -> None:
        self._network, self.hosts, self._folder = network, hosts, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> list[str]:
        return [self._url(host, CLIENT_PORT) for host in self.hosts]

    def _url(self, host: str, port: int) -> str:
        return f"http://{self._network.address(host)}:{port}"

    def start(self, *hosts: str) -> None:
        """Begin; `until_healthy` waits. Hosts: those that do not run."""
        for host in hosts or self.hosts:
            client, peer = self._url(host, CLIENT_PORT), self._url(host, PEER_PORT)
            members = ",".join(f"{name}={self._url(name, PEER_PORT)}" for name in self.hosts)
            command = [*self._network.command(host), "etcd", "--name", host, "--data-dir", str(self._folder / host)]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
            command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", members]
            with (self._folder / f"{host}.log").open("ab") as log:
                self._processes[host] = subprocess.Popen(command, stdout=log, stderr=log)

    def until_healthy(self) -> None:
        end = time.monotonic() + _START_S_MAX
        while True:
            try:
                self.read("/none")
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise AssertionError(f"etcd did not start in time: {error}") from error
                time.sleep(0.1)

    def signal(self, host: str, number: int) -> None:
        self._processes[host].send_signal(number)

    def kill(self, host: str) -> None:
        self.signal(host, signal.SIGKILL)
        self._processes[host].wait()

    def leader(self) -> str | None:
        """The host of the member that leads; None if no member tells of one."""
        ids: dict[str, str] = {}
        leaders: list[str] = []
        for host in self.hosts:
            try:
                told = self._post(host, "maintenance/status", {}, _READ_S_MAX)
            except OSError:
                continue
            ids[told["header"]["member_id"]] = host
            leaders.append(told.get("leader", ""))
        return next((ids[leader] for leader in leaders if leader in ids), None)

    def read(self, prefix: str) -> dict[str, Any]:
        """All keys that begin so, with their JSON values, as a majority knows them. Raises `OSError`."""
        asked = {"key": _b64(prefix), "range_end": _b64(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
        error: OSError | None = None
        for host in self.hosts:
            try:
                found = self._post(host, "kv/range", asked, _READ_S_MAX).get("kvs", [])
            except OSError as problem:
                error = problem
                continue
            return {base64.b64decode(one["key"]).decode(): json.loads(base64.b64decode(one["value"])) for one in found}
        raise error or OSError("no etcd")

    def _post(self, host: str, path: str, value: Any, timeout_s: float) -> Any:
        request = urllib.request.Request(f"{self._url(host, CLIENT_PORT)}/v3/{path}", json.dumps(value).encode())
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
