"""A fair queue: deficit round robin over the owners of waiting work, with a head start for owners that were idle. Pure.

Each owner has a queue of its own. In each round an owner may take work of up to QUANTUM × its weight; the excess of a large piece
is paid back in later rounds, so owners that always wait are served in proportion to their weights. An owner without
waiting work saves nothing up. An owner that comes back goes first, for one quantum: a flood of others delays it by one piece,
and not by a round of all of them (the rule of FQ-CoDel, RFC 8290, section 4.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM = 256 << 10  # bytes of one round, for a weight of 1


def always(_: object) -> bool:
    """Every item is wanted."""
    return True


class Fifo(Generic[T]):
    """A plain queue with the interface of `FairQueue`, for servers without tenants: first come, first served."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> list[T]:
        """All items, the oldest first."""
        return list(self._items)

    def push(self, owner: str, item: T, cost: float) -> None:
        """Put an item at the end."""
        self._items.append(item)

    def pop(self) -> T | None:
        """Remove and return the oldest item; None: there is none."""
        return self._items.popleft() if self._items else None

    def charge(self, owner: str, cost: float) -> None:
        """A plain queue charges nothing."""

    def discard(self, item: T) -> bool:
        """Remove an item. Returns whether it was there."""
        if item not in self._items:
            return False
        self._items.remove(item)
        return True


class _Owner(Generic[T]):
    """The waiting work of one owner. `deficit`: the work that it may still take in this round; below zero it is in debt."""

    __slots__ = ("deficit", "items", "quantum")

    def __init__(self, quantum: float) -> None:
        self.quantum = self.deficit = quantum
        self.items: deque[tuple[T, float]] = deque()


class FairQueue(Generic[T]):
    """Work that waits, by owner. Adding is O(1); removing is O(1) for pieces up to a quantum.

    >>> queue = FairQueue(lambda owner: 2 if owner == "b" else 1, quantum=10)
    >>> for n in range(6):
    ...     queue.push("a", f"a{n}", 10), queue.push("b", f"b{n}", 10)
    (None, None)
    (None, None)
    (None, None)
    (None, None)
    (None, None)
    (None, None)
    >>> " ".join(queue.pop() for _ in range(9))
    'a0 b0 b1 a1 b2 b3 a2 b4 b5'
    """

    def __init__(self, weight_of: Callable[[str], float], quantum: float = QUANTUM, wanted: Callable[[T], bool] = always) -> None:
        """`weight_of`: above 0. `wanted`: asked for an item before it is taken; an unwanted one is dropped, and costs nothing."""
        self._weight_of, self._quantum, self._wanted = weight_of, quantum, wanted
        self._owners: dict[str, _Owner[T]] = {}
        self._fresh: deque[str] = deque()  # owners that were idle: they go first
        self._round: deque[str] = deque()  # all others, in the order of their turns
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def items(self) -> list[T]:
        """All items, by owner."""
        return [item for owner in self._owners.values() for item, _ in owner.items]

    def waiting(self, owner: str) -> int:
        """The number of items of an owner."""
        found = self._owners.get(owner)
        return 0 if found is None else len(found.items)

    def push(self, owner: str, item: T, cost: float) -> None:
        """Let an item wait. `cost`: 0 or more."""
        found = self._owners.get(owner)
        if found is None:
            found = self._owners[owner] = _Owner(self._quantum * self._weight_of(owner))
            self._fresh.append(owner)
        found.items.append((item, cost))
        self._count += 1

    def pop(self) -> T | None:
        """Remove and return the next item, and charge its owner; None: nothing waits."""
        passed = 0  # owners that were passed over since one was served
        while self._count:
            fresh = bool(self._fresh)
            line = self._fresh if fresh else self._round
            name = line[0]
            owner = self._owners[name]
            if owner.deficit <= 0 or not owner.items:
                line.popleft()
                self._pass_over(name, owner, fresh)
                passed += 1
                if passed > len(self._round) + len(self._fresh):
                    self._skip_rounds()
                    passed = 0
                continue
            item, cost = owner.items.popleft()
            self._count -= 1
            if self._wanted(item):
                owner.deficit -= cost
                self._forget_if_idle()
                return item
        self._forget_if_idle()
        return None

    def charge(self, owner: str, cost: float) -> None:
        """Charge work whose cost was not known when it was taken. An owner that the queue has forgotten pays nothing."""
        found = self._owners.get(owner)
        if found is not None:
            found.deficit -= cost

    def discard(self, item: T) -> bool:
        """Remove an item without charge. Returns whether it was there. O(items)."""
        for owner in self._owners.values():
            for entry in owner.items:
                if entry[0] is item:
                    owner.items.remove(entry)
                    self._count -= 1
                    return True
        return False

    def _pass_over(self, name: str, owner: _Owner[T], fresh: bool) -> None:
        """The round of an owner is over: its turn comes again behind all others. One that is idle, and not in debt, is
        forgotten; the rest of its quantum is lost."""
        if not owner.items and owner.deficit >= 0 and not fresh:
            del self._owners[name]
            return
        if owner.deficit <= 0:
            owner.deficit += owner.quantum
        self._round.append(name)

    def _skip_rounds(self) -> None:
        """All that wait are in debt: let as many rounds pass at once as the first of them needs."""
        owners = self._owners.values()
        rounds = min(ceil(-owner.deficit / owner.quantum) for owner in owners if owner.items)
        for owner in owners:
            if rounds > 0 and owner.deficit <= 0:
                owner.deficit = min(owner.deficit + rounds * owner.quantum, owner.quantum)

    def _forget_if_idle(self) -> None:
        """Nothing waits, so no owner was delayed by the debt of another one: all begin anew."""
        if not self._count:
            self._owners.clear()
            self._fresh.clear()
            self._round.clear()
