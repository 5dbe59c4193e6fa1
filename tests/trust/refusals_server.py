"""Real servers on disks that say no: a small one of their own that is filled to the brim, and one whose syncs fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from tests.harness.server_process import ROOT, Server, environment, run, running
from tests.trust.model import Broken, Figures, figures

DISK_MB = 40
FILLER_MB = 12
WAIT_S = 20
INSIDE = "REFUSALS_INSIDE"  # is set in a namespace of our own
QUIET_S = 4  # nothing comes for so long: there is nothing
ROTTEN = """import errno, os
real = os.fdatasync
def fdatasync(fd):
    if os.path.exists(os.environ["ROTTEN"]) and "/topic/t/" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(errno.EIO, "made to fail")
    real(fd)
os.fdatasync = fdatasync
"""


NO_DISK = (
    "a small file system of its own is needed, and this user may neither mount one nor have a namespace to mount it in "
    "(`unshare -rm`); `sudo .venv/bin/python -m pytest tests/test_refusals.py` may"
)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of its own, in memory; None where we may not have one."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def full_disk(number: int, folder: Path) -> Figures:
    """Producers fill the disk until they are refused; consumers go on; with room all goes on."""
    with small_disk(folder / "disk") as disk:
        return _elsewhere(number) if disk is None else _fill(Random(number), disk)


def _elsewhere(number: int) -> Figures:
    """Run `full_disk` as the root of a namespace of our own, where mounting is permitted, if the system lets us have one."""
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    if INSIDE in os.environ or shutil.which(apart[0]) is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        return figures(disks_that_could_not_be_had=1)
    command = [*apart, sys.executable, "-m", "tests.trust.parts", "refusals", str(number), str(number + 1)]
    done = subprocess.run(command, cwd=ROOT, env=environment(**{INSIDE: "1"}), capture_output=True, text=True)
    if done.returncode:
        raise Broken(done.stderr[-4000:].strip())
    return Figures(json.loads(done.stdout.splitlines()[-1]))


def _fill(chance: Random, disk: Path) -> Figures:
    (disk / "filler").write_bytes(bytes(FILLER_MB << 20))
    body = "x" * chance.choice([2_000, 20_000, 50_000])
    with running(disk / "data") as server:
        sent = _put_until_full(server, body)
        first = _consume(server, set(), lambda got: False)  # ready messages; the rest waits for room in the ready log
        if not first:
            raise Broken("consumers get nothing from a full disk")
        still = server.call("POST", "/v1/topics/t/messages", _batch("still", body))
        if still.status != 507:
            raise Broken(f"the disk is full, and what is kept for consumers goes to a producer: {still.status}")
        (disk / "filler").unlink()
        _until(lambda: server.call("POST", "/v1/topics/t/messages", _batch("more", body)).status == 201, "room is of no use")
        sent |= {f"more-{i}" for i in range(10)}
        rest = _consume(server, first, lambda got: len(got) + len(first) >= len(sent))
    if first & rest or first | rest != sent:
        raise Broken(f"lost {sorted(sent - first - rest)}, twice {sorted(first & rest)}, unknown {sorted((first | rest) - sent)}")
    checked = run("check", "--data", str(disk / "data"))
    if checked.returncode:
        raise Broken(f"check: {checked.stdout}{checked.stderr}")
    return figures(disks_filled=1, messages_accepted=len(sent), delivered_after_507=len(first), delivered_with_room=len(rest))


def _batch(prefix: str, body: str) -> dict[str, Any]:
    return {"messages": [{"id": f"{prefix}-{i}", "body": body} for i in range(10)]}


def _put_until_full(server: Server, body: str) -> set[str]:
    """Batches until one is refused as a whole; then small ones, until nothing fits."""
    sent: set[str] = set()
    for count in range(100_000):
        answer = server.call("POST", "/v1/topics/t/messages", _batch(f"b{count}", body))
        if answer.status == 507:
            if answer.code != "DISK_FULL":
                raise Broken(f"put: {answer.status} {answer.data!r}")
            break
        if answer.status != 201:
            raise Broken(f"put: {answer.status} {answer.data!r}")
        sent |= set(answer.json["ids"])
    for count in range(100_000):
        answer = server.call("POST", "/v1/topics/t/messages", {"id": f"s{count}", "body": "small"})
        if answer.status == 507:
            return sent
        sent |= set(answer.json["ids"])
    raise Broken("the disk is never full")


def _consume(server: Server, before: set[str], enough: Callable[[set[str]], bool]) -> set[str]:
    """Fetch and acknowledge until it is enough, or nothing came for a while."""
    got: set[str] = set()
    last = time.monotonic()
    while not enough(got) and time.monotonic() < last + QUIET_S:
        ids = [str(message["id"]) for message in server.fetch("t", max=50, wait=0.2)]
        if set(ids) & (got | before):
            raise Broken(f"delivered after its ack: {sorted(set(ids) & (got | before))}")
        if ids and server.ack("t", *ids)["acked"] != len(ids):
            raise Broken("an ack was not taken")
        got.update(ids)
        last = time.monotonic() if ids else last
    return got


def rotten_sync(number: int, folder: Path) -> Figures:
    """A sync fails: the topic is stopped for good, the log and /readyz say so, and opened again it has all that was accepted."""
    (folder / "code").mkdir()
    (folder / "code" / "sitecustomize.py").write_text(ROTTEN)
    flag, data = folder / "rotten", folder / "data"
    count = Random(number).randint(1, 30)
    with running(data, PYTHONPATH=f"{folder / 'code'}:{ROOT}", ROTTEN=str(flag)) as server:
        sent = set(server.put("t", *({"id": f"m{i}", "body": i, "delay": 3600} for i in range(count))))
        server.put("u", {"id": "other", "body": 1})
        flag.touch()
        lost = server.call("POST", "/v1/topics/t/messages", {"id": "doubt", "body": 1, "delay": 3600})
        flag.unlink()
        again = [server.call("POST", "/v1/topics/t/messages", {"id": f"no{i}", "body": 1}) for i in range(3)]
        if {lost.status, *(answer.status for answer in again)} != {503}:
            raise Broken(f"after a failed sync: {lost.status}, then {[answer.status for answer in again]}")
        ready = server.ok("GET", "/readyz")
        if ready["stopped"] != 1:
            raise Broken(f"/readyz says nothing of it: {ready}")
        _until(lambda: "event=topic_stopped topic=t " in server.log, "the log does not say that the topic is stopped")
        if "made to fail" not in server.log or "Traceback" in server.log or "topic_stopped topic=u" in server.log:
            raise Broken(f"the log does not say it clearly: {server.log[-2000:]}")
        if [message["id"] for message in server.fetch("u", wait=5)] != ["other"]:
            raise Broken("another topic does not serve on")
        server.stop()
    with running(data) as server:
        found = {str(m["id"]) for m in server.ok("GET", "/v1/topics/t/messages?state=sleep&limit=1000")["messages"]}
    if not sent <= found <= sent | {"doubt"}:
        raise Broken(f"lost {sorted(sent - found)}, unknown {sorted(found - sent - {'doubt'})}")
    return figures(failed_syncs=1, messages_accepted=len(sent))


def _until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > end:
            raise Broken(what)
        time.sleep(0.05)
