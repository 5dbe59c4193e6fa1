"""The memory that is left: of the machine, or of a control group with a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from turtlemq.server.metrics.memory import Memory, memory_usage

MEMINFO = "MemTotal:        8000 kB\nMemFree:  10 kB\nMemAvailable:    6000 kB\nHugePages_Total:       0\n"
MACHINE = Memory(8000 << 10, 6000 << 10)


def made(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def limited(group: str, limit: str, current: int, inactive: int = 0) -> dict[str, str]:
    return {
        f"groups__{group}memory_dot_max": f"{limit}\n",
        f"groups__{group}memory_dot_current": f"{current}\n",
        f"groups__{group}memory_dot_stat": f"anon 5\ninactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, MACHINE),
        ({"proc__self__cgroup": "4:memory:/old\n"}, MACHINE),
        ({"proc__self__cgroup": "0::/\n", **limited("", "max", 100)}, MACHINE),
        ({"proc__self__cgroup": "0::/\n", **limited("", "1000000", 700_000, 200_000)}, Memory(1_000_000, 500_000)),
        (
            {"proc__self__cgroup": "0::/a/b\n", **limited("a__", "3000", 1000), **limited("a__b__", "9000", 9)},
            Memory(3000, 2000),
        ),
        ({"proc__self__cgroup": "0::/a\n", **limited("a__", "3000", 4000)}, Memory(3000, 0)),
        ({"proc__self__cgroup": "0::/a\n", **limited("a__", str(1 << 40), 4000)}, MACHINE),
        ({"proc__self__cgroup": "0::/other\n", **limited("a__", "1", 0)}, MACHINE),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], told: Memory) -> None:
    made(tmp_path, proc__meminfo=MEMINFO, **files)
    assert memory_usage(tmp_path / "proc", tmp_path / "groups") == told


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n"])
def test_a_system_that_does_not_tell(tmp_path: Path, text: str) -> None:
    made(tmp_path, proc__meminfo=text)
    assert memory_usage(tmp_path / "proc", tmp_path / "groups") is None
    assert memory_usage(tmp_path / "nowhere", tmp_path / "groups") is None
