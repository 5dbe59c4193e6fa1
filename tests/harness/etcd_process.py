"""A real etcd on loopback ports, with a data folder of its own, for tests."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MISSING = "no etcd here: `make etcd` installs it where that is allowed (Debian: apt-get install etcd-server)"
_START_S_MAX = 30


def is_installed() -> bool:
    return shutil.which("etcd") is not None


@contextmanager
def running_etcd(folder: Path, tls: tuple[Path, Path] | None = None, port: int = 0) -> Iterator[str]:
    """Its endpoint, while it runs. `tls`: certificate and key. The folder keeps its data for a second start."""
    client, peer, metrics = port or free_port(), free_port(), f"http://127.0.0.1:{free_port()}"
    endpoint, peer_url = f"{'https' if tls else 'http'}://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = ["etcd", "--data-dir", str(folder / "etcd"), "--listen-client-urls", endpoint]
    command += ["--advertise-client-urls", endpoint, "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
    command += ["--initial-cluster", f"default={peer_url}", "--listen-metrics-urls", metrics]
    command += ["--cert-file", str(tls[0]), "--key-file", str(tls[1])] if tls else []
    with (folder / "etcd.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _until_healthy(metrics, process)
        yield endpoint
    finally:
        process.terminate()
        process.wait(30)


def _until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S_MAX
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(f"etcd ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                if b"true" in answer.read():
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("etcd did not start in time")


def free_port() -> int:
    """A port for a server that starts later: below those that the system gives to connections, one of which may come first."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
