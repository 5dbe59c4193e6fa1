"""A stand-in for a replica process: the line to its supervisor, and no data. `python -m tests.harness.stand_in_replica FOLDER`

Files in the folder tell it how to behave: `lease` holds the number that it reports, `exit` the code with which it ends at once;
with `quiet` it reports nothing more, with `stubborn` it ignores SIGTERM. It answers requests with its process id.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

from turtlemq.server.accept import LISTENING, inherited
from turtlemq.server.supervision import SUPERVISOR

BEAT_S = 0.05


async def report(folder: Path) -> None:
    """Report until the supervisor's end of the line is closed."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(os.environ[SUPERVISOR])))
    ended = asyncio.create_task(reader.read())
    while not ended.done():
        if not (folder / "quiet").exists():
            lease = int((folder / "lease").read_text()) if (folder / "lease").exists() else 0
            writer.write(json.dumps({"state": "lead", "lease": lease, "epoch": 1, "of a newer version": 1}).encode() + b"\n")
        await asyncio.wait([ended], timeout=BEAT_S)
    os._exit(0)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    body = f"{os.getpid()}"
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
    writer.close()


async def main(folder: Path) -> None:
    if (folder / "exit").exists():
        sys.exit(int((folder / "exit").read_text()))
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def asked() -> None:
        if not (folder / "stubborn").exists():
            stop.set()

    loop.add_signal_handler(signal.SIGTERM, asked)
    for listening in inherited(os.environ[LISTENING]):
        await asyncio.start_server(answer, sock=listening)
    reporting = asyncio.create_task(report(folder))
    await stop.wait()
    reporting.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
