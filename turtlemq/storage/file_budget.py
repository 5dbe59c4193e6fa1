"""The budget of file descriptors: how many the engine may hold for which purpose. Pure.

>>> FileBudget.of(512)
FileBudget(kept=272, readers=128, saves=32)
>>> FileBudget.of(64)
FileBudget(kept=20, readers=16, saves=4)
"""

from __future__ import annotations

from dataclasses import dataclass

_MOMENTARY = 16  # descriptors that are closed in the step that opened them: folders, small files, files that are mapped
_SYNCED_LOGS = 3  # descriptors of one checkpoint
_READERS_MAX, _SAVES_MAX = 128, 32


@dataclass(frozen=True, slots=True)
class FileBudget:
    """`kept`: logs that stay open between two writes; `readers`: files that stay open for reading; `saves`: checkpoints under way
    at once."""

    kept: int
    readers: int
    saves: int

    @classmethod
    def of(cls, files: int) -> FileBudget:
        """The budget for so many descriptors."""
        readers, saves = min(_READERS_MAX, files // 4), max(1, min(_SAVES_MAX, files // 16))
        return cls(max(8, files - readers - _SYNCED_LOGS * saves - _MOMENTARY), max(1, readers), saves)


DEFAULT = FileBudget.of(512)  # half of the usual soft limit
