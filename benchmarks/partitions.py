"""One topic with four partitions against four topics, on one server with four shards, by the Python client, in turns.

The same messages are put, fetched and acknowledged. The topics of the comparison lie in different shards, so both ways give each
process a quarter of them. A message of a topic with partitions has an id before it is sent, since that tells its partition; so
the comparison is made with ids of the server and with own ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks import child
from benchmarks.http_client import ServerProcess
from benchmarks.load import BODY_BYTES
from benchmarks.model import Figure, Goal, of_rounds
from benchmarks.probe import cpu_seconds
from benchmarks.run import Benchmark, Run
from turtlemq.client import Client, NewMessage
from turtlemq.shards import shard_of

SHARDS, BATCH = 4, 1_000
_ALONE, _SHARED = "four topics", "four partitions"
_IDS = {"server": "the server's ids", "own": "own ids"}
_MOST = Goal("≤", 1.1)
_GOALS = {f"{part}, {_SHARED} to {_ALONE}, {ids}": _MOST for ids in _IDS.values() for part in ("wall time", "processor time")}


def _run(run: Run) -> Iterator[Figure]:
    batches = max(2, run.size.round_batches // 10)
    result = run.child("partitions", comparing, folder=run.folder("partitions"), batches=batches, rounds=run.size.rounds)
    for ids, text in _IDS.items():
        for way in (_ALONE, _SHARED):
            name = f"{way}, {text}"
            yield of_rounds(
                f"put, fetch and acknowledge, {name}", result[f"{way} {ids} rate"], "msg/s", note="one blocking client"
            )
            yield of_rounds(f"processor time of server and client for a million, {name}", result[f"{way} {ids} cpu"], "s")
        for part, kind, sign in (("wall time", "rate", -1), ("processor time", "cpu", 1)):
            pairs = zip(result[f"{_SHARED} {ids} {kind}"], result[f"{_ALONE} {ids} {kind}"], strict=True)
            ratio = median(((shared + 1e-9) / (alone + 1e-9)) ** sign for shared, alone in pairs)
            name = f"{part}, {_SHARED} to {_ALONE}, {text}"
            yield Figure(name, ratio, "×", goal=_GOALS[name], note="the same run, in turns")


def comparing(folder: str, batches: int, rounds: int) -> dict[str, list[float]]:
    """In a child process: rates and processor time of both ways, in turns."""
    server = ServerProcess(folder, TURTLEMQ_SHARDS=str(SHARDS))
    found: dict[str, list[float]] = {}
    with Client(f"http://127.0.0.1:{server.port}", timeout=120) as client:
        _until_ready(client)
        for number in range(-1, rounds):  # the first round warms up
            for ids in _IDS:
                mark = f"{ids}{number}"
                ways = {_ALONE: _topics(mark), _SHARED: [f"shared-{mark}"]}
                client.configure(f"shared-{mark}", partitions=SHARDS)
                for way, topics in ways.items() if number % 2 else reversed(ways.items()):
                    seconds, cpu = _round(server, client, topics, batches, ids == "own")
                    if number >= 0:
                        count = batches * BATCH * SHARDS
                        found.setdefault(f"{way} {ids} rate", []).append(count / seconds)
                        found.setdefault(f"{way} {ids} cpu", []).append(cpu / count * 1e6)
            child.report_progress((number + 2) / (rounds + 1))
    server.process.terminate()
    server.process.wait(60)  # the processes of its shards are in groups of their own
    return found


def _topics(mark: str) -> list[str]:
    """A topic in each shard."""
    names = [f"alone-{mark}-{n}" for n in range(100)]
    return [next(name for name in names if shard_of(name, SHARDS) == shard) for shard in range(SHARDS)]


def _until_ready(client: Client) -> None:
    for _ in range(3_000):
        try:
            client.topics()
        except Exception:  # noqa: BLE001 - it starts
            time.sleep(0.02)
        else:
            return
    raise TimeoutError("the server does not get ready")


def _round(server: ServerProcess, client: Client, topics: list[str], batches: int, own: bool) -> tuple[float, float]:
    """Seconds, and processor seconds of the server and this process, for so many batches for each shard."""
    body = bytes(BODY_BYTES)
    for topic in topics:
        client.put(topic, body)  # the client learns where it lies
        client.put(topic, body)
    pids = [server.process.pid, *_children(server.process.pid)]
    begin, before = time.perf_counter(), sum(map(cpu_seconds, pids)) + time.process_time()
    share = BATCH * SHARDS // len(topics)
    for batch in range(batches):
        for topic in topics:
            ids = [f"order-{batch}-{n}" if own else None for n in range(share)]
            client.put_many(topic, [NewMessage(body=body, id=id_) for id_ in ids])
    left = dict.fromkeys(topics, 2 + batches * share)
    while left:
        for topic in list(left):
            messages = client.fetch(topic, max=BATCH, wait=5, wire="bson")
            client.ack(topic, [message.id for message in messages], lease=messages[0].lease)
            left[topic] -= len(messages)
            if not left[topic]:
                del left[topic]
    return time.perf_counter() - begin, sum(map(cpu_seconds, pids)) + time.process_time() - before


def _children(pid: int) -> list[int]:
    """The processes of the shards."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(one) for one in (task / "children").read_text().split()]
    return found


partitions = Benchmark("partitions", "one topic with four partitions against four topics, in four shards", _GOALS, _run)
