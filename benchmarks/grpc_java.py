"""A gRPC client in Java, with Debian's archives: its needs, its compilation, and one under load."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.child import ROOT
from benchmarks.probe import TICKS_S

PROTO, LOAD = ROOT / "turtlemq" / "server" / "grpc" / "proto" / "delay.proto", ROOT / "benchmarks" / "java" / "Load.java"
PROGRAMS = ("java", "javac", "protoc", "grpc_java_plugin")
_NAMES = (
    "grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub guava protobuf perfmark-api "
    "geronimo-annotation-1.3-spec netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-codec-socks netty-common "
    "netty-handler netty-handler-proxy netty-resolver netty-transport netty-transport-native-unix-common"
).split()
_JARS = [Path("/usr/share/java") / f"{name}.jar" for name in _NAMES]


def missing() -> str:
    """The first program or archive that is not there; empty if none."""
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    return next(iter(programs + [jar.name for jar in _JARS if not jar.exists()]), "")


def compiled(proto: Path, sources: list[Path], folder: Path) -> str:
    """Compile Java sources with the stubs of a proto. Returns the class path."""
    made, classes, path = folder / "made", folder / "classes", ":".join(map(str, _JARS))
    made.mkdir(parents=True)
    plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
    _run("protoc", plugin, f"-I{proto.parent}", f"--java_out={made}", f"--grpc-java_out={made}", str(proto))
    stubs = map(str, sorted(made.rglob("*.java")))
    _run("javac", "-nowarn", "-cp", path, "-d", str(classes), *stubs, *map(str, sources))
    return f"{path}:{classes}"


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, (command, done.stdout)


class JavaClient:
    """A Java machine with one channel to a server. It is killed with the process group of the measuring process."""

    def __init__(self, folder: Path, port: int) -> None:
        command = ["java", "-XX:+UseSerialGC", "-cp", compiled(PROTO, [LOAD], folder), "Load", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, work: str, topic: str, count: int, body_bytes: int = 0) -> float:
        """Put or take messages over one stream. Returns the seconds until the last is acknowledged."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(work, topic, count, body_bytes, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline()) / 1e9

    def cpu_seconds(self) -> float:
        """Processor time of all threads so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_S

    def close(self) -> None:
        """End the machine, and wait for it."""
        self._process.communicate()
