"""A real cluster: three nodes and three members of etcd, each on a host of its own, real clients, and faults of every kind.

Thirty faults are the life of a cluster: the number of a case is its life and how many faults came before, and `--only` runs that
life up to it. After each fault the service answers again within a bounded time, all copies are equal byte for byte, and no
answer was taken back. Without root (network namespaces), faults of the network and of full disks are left out, and named.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from math import ceil
from pathlib import Path

from tests.harness.etcd_process import MISSING, is_installed
from tests.harness.network import isolated, isolation
from tests.harness.server_process import ROOT, environment
from tests.trust.machines_life import LIFE, WITHOUT_ROOT
from tests.trust.model import NOT_RUN, TRIED, Broken, Figures, Part

KEPT = ROOT / "build" / "machines"  # progress of lives, logs of slow ones, logs and files of those that failed
LIFE_S_MAX = 3_600
SHORT = {"killed": "leader killed", "lost": "leader stopped, cut off or lost", "handover": "handover"}
P99_S_MAX = {"killed": 3, "lost": 6, "handover": 1}  # in a full run, on a machine with nothing else to do
BUSY = "TRUST_BUSY"  # in the environment: these times are told, and not judged


def run(cases: range, folder: Path) -> Figures:
    """Every life to which these cases belong, each from its beginning."""
    if not is_installed():
        _tell(MISSING)
        return Figures({f"{NOT_RUN}{MISSING}": len(cases)})
    if not isolation():
        _tell(f"no network namespaces here: {', '.join(sorted(WITHOUT_ROOT))} do not run. Run it as root.")
    seen = Figures()
    for number in range(cases.start // LIFE, -(-cases.stop // LIFE)):
        place = folder / str(number)
        place.mkdir()
        seen.update(life(number, min(LIFE, cases.stop - number * LIFE), place))
        shutil.rmtree(place, ignore_errors=True)
    return seen


def life(number: int, count: int, place: Path) -> Figures:
    """A life of so many faults, in namespaces of its own."""
    how = "namespaces" if isolation() else "loopback"
    command = isolated("tests.trust.machines_life", str(number), str(count), str(place), how)
    kept = KEPT / f"life-{number}"
    shutil.rmtree(kept, ignore_errors=True)
    KEPT.mkdir(parents=True, exist_ok=True)
    told = kept.with_suffix(".log")
    with told.open("w") as log:
        done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=log, timeout=LIFE_S_MAX)
    sys.stderr.write(told.read_text())
    if done.returncode == 0:
        figures = Figures(json.loads(done.stdout.splitlines()[-1]))
        if any(max(times_s(figures, kind), default=0) > limit_s for kind, limit_s in P99_S_MAX.items()):
            shutil.copytree(place, kept, ignore=lambda _, names: [name for name in names if not name.endswith(".log")])
        return figures
    shutil.copytree(place, kept)
    failure = place / "failure"
    why = failure.read_text() if failure.exists() else f"the run ended with {done.returncode}"
    again = f"python -m tests.trust machines --only {number * LIFE + count - 1}"
    raise Broken(f"{why}\nlogs and files: {kept.relative_to(ROOT)}; again: {again}")


def _tell(text: str) -> None:
    print(f"machines: {text}", file=sys.stderr, flush=True)


def sum_up(seen: Figures) -> str:
    """Times without answers, of each kind of failover. Raises `Broken` if a full run took too long, unless the machine is busy.

    >>> sum_up(Figures({"tried: killed: 900": 98, "tried: killed: 4000": 2}))
    'leader killed p50 0.90 s, p99 4.00 s of 100'
    """
    texts, slow = [], []
    for kind, name in SHORT.items():
        if times := times_s(seen, kind):
            p50, p99 = (times[ceil(share * len(times)) - 1] for share in (0.5, 0.99))
            texts.append(f"{name} p50 {p50:.2f} s, p99 {p99:.2f} s of {len(times):,}")
            slow += [texts[-1]] if p99 > P99_S_MAX[kind] else []
    if slow and seen["faults"] >= PART.full and not os.environ.get(BUSY):
        raise Broken(f"without answers for too long: {', '.join(slow)}; at most {P99_S_MAX}. Other programs at work? {BUSY}=1")
    return ", ".join(texts) or "nothing measured"


def times_s(seen: Figures, kind: str) -> list[float]:
    """Measured times of one kind, in order."""
    head = f"{TRIED}{kind}: "
    found = ((int(key.removeprefix(head)) / 1000, count) for key, count in seen.items() if key.startswith(head))
    return sorted(seconds for seconds, count in found for _ in range(count))


PART = Part(
    name="machines",
    unit="faults",
    about=(
        "Three real nodes and three members of etcd in network namespaces, under load: kills, stops, cuts, lost disks, clocks. "
        "Answers hold, the service comes back, copies are equal."
    ),
    run=run,
    quick=4,
    full=50 * LIFE,
    chunk=LIFE,
    sum_up=sum_up,
    must=(
        "faults",
        "leader kills",
        "comparisons",
        "verifications",
        "checks",
        "messages accepted",
        "deliveries",
        "acknowledged",
        "reads of probes",
    ),
    floors={
        "leader kills": 500,
        "stops": 200,
        "partitions": 200,
        "wiped standbys": 100,
        "etcd kills": 50,
        "comparisons": 1_000,
        "verifications": 1_000,
        "checks": 1_000,
    },
)
