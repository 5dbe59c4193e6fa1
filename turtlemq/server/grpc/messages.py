"""Message types of all gRPC services, from a stored descriptor set. No generated code: that is tied to versions of protobuf.

`protos.bin` is made from the files in `proto/` by `python -m turtlemq.server.grpc.messages`, which needs protoc; a test compares
the two. The types live in a pool of their own, so that other packages of the process may have the same protos.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FOLDER = Path(__file__).parent
FILES = (
    "delay.proto",
    "grpc/health/v1/health.proto",
    "grpc/reflection/v1/reflection.proto",
    "grpc/reflection/v1alpha/reflection.proto",
    "turtlemq/v1/queue.proto",
)
DESCRIPTORS = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "protos.bin").read_bytes())
POOL = descriptor_pool.DescriptorPool()
for _file in DESCRIPTORS.file:
    POOL.AddSerializedFile(_file.SerializeToString())


def message(name: str) -> Any:
    """The class of a message, by its full name.

    >>> message("delay.AckResponse")(id="a").SerializeToString()
    b'\\n\\x01a'
    """
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def services() -> list[str]:
    """The full names of all services."""
    return sorted(f"{file.package}.{service.name}" for file in DESCRIPTORS.file for service in file.service)


def compiled() -> bytes:
    """The descriptor set of the files in `proto/`, made by protoc."""
    command = ["protoc", f"-I{FOLDER / 'proto'}", "--descriptor_set_out=/dev/stdout", *FILES]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


if __name__ == "__main__":
    (FOLDER / "protos.bin").write_bytes(compiled())
