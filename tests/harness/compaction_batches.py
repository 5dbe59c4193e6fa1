"""Batches for tests of compaction, and a topic whose caches are lost."""

from __future__ import annotations

from tests.harness.index_world import World
from turtlemq.model import Batch


def batch(prefix: str, n: int, due: int = 100, size: int = 30) -> Batch:
    """Messages with the ids `{prefix}0`, `{prefix}1`, …, due at one moment."""
    return Batch([b"x" * size] * n, [due] * n, ids=[f"{prefix}{i}" for i in range(n)])


def forget_caches(world: World) -> None:
    """Delete every file that can be built again."""
    for path in world.caches():
        path.unlink()
