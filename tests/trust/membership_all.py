"""Every order of few events: all states of a leader's `Book`, one standby and etcd, with a bounded number of operations.

The leader is `a`, the standby `b`. Transactions and reads may be carried out, answered or lost at any time; so may
acknowledgements.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from tests.trust.model import Broken, Figures
from turtlemq.replica.membership import Book, Change, Greeting

LIMITS = {  # operations of each kind, by the case
    0: {"write": 1, "propose": 2, "read": 1, "hello": 0, "withdraw": 0},
    1: {"write": 1, "propose": 2, "read": 0, "hello": 1, "withdraw": 1},
    1_000: {"write": 1, "propose": 2, "read": 1, "hello": 1, "withdraw": 1},
}


@dataclass
class Sent:
    """A transaction (or a read, without a change) on its way: carried out with this result, and awaited by the leader."""

    change: Change | None
    result: tuple[int, frozenset[str]] | None = None
    awaited: bool = True

    def key(self) -> tuple[Any, ...]:
        return self.change is None, tuple(sorted(self.change.isr)) if self.change else (), self.result, self.awaited, self.change


@dataclass
class Pair:
    """One state."""

    limits: dict[str, int]
    book: Book = field(default_factory=lambda: Book("a", 1, {"a"}))
    revision: int = 1
    isr: frozenset[str] = frozenset("a")
    lsn: int = 1  # of the leader
    has: int = 0  # LSN of the standby
    attached: bool = False
    acks: tuple[int, ...] = ()
    answered: int = 0
    sent: list[Sent] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def key(self) -> tuple[Any, ...]:
        book = tuple((name, repr(sorted(value.items() if isinstance(value, dict) else value))) for name, value in self._book())
        sent = tuple(sorted(repr(one.key()) for one in self.sent))
        rest = (self.revision, self.isr, self.lsn, self.has, self.attached, self.acks, self.answered)
        return book, self.book.revision, sent, rest, tuple(sorted(self.done.items()))

    def _book(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in sorted(vars(self.book).items()) if isinstance(value, dict | set | frozenset)]

    def moves(self) -> list[tuple[str, int]]:
        """All steps that are possible now."""
        found = [(name, 0) for name in ("hello", "write", "read", "withdraw", "let_go") if self.left(name)]
        found += [("resume", 0)] if not self.attached else [("want", 0)]
        found += [("take_in", 0)] if self.left("take_in") else []
        found += [("apply", 0)] if self.attached and self.has < self.lsn else []
        found += [("ack", 0)] if self.acks else []
        for i, one in enumerate(self.sent):
            found += [("carry_out", i), ("lose", i)] if one.result is None else [("answer", i)] if one.awaited else []
            found += [("time_out", i)] if one.awaited else []
        return [*found, ("reply", 0)]

    def left(self, name: str) -> bool:
        return self.done[_kind(name)] < self.limits[_kind(name)]

    def do(self, name: str, i: int) -> None:
        """One step, and the invariants."""
        self.done[_kind(name)] += _kind(name) in self.limits
        getattr(self, name)(i)
        self.sent = [one for one in self.sent if one.result is None or one.awaited]
        if not self.isr <= self.book.required():
            raise Broken(f"C2: etcd's ISR is {sorted(self.isr)}, the leader requires {sorted(self.book.required())} only")
        if "b" in self.isr and self.has < self.answered:
            raise Broken(f"C5: b is in the ISR, has {self.has} records, and {self.answered} were answered")

    def write(self, _: int) -> None:
        self.lsn += 1

    def hello(self, _: int) -> None:
        """The standby cannot resume: its files are replaced if it is no member."""
        self.acks, self.attached = (), False
        if self.book.greet("b", None) is Greeting.SYNC:
            self.has = 0

    def resume(self, _: int) -> None:
        self.acks, self.attached = (), True
        self.book.greet("b", self.has)

    def apply(self, _: int) -> None:
        self.has += 1
        self.acks += (self.has,)

    def ack(self, _: int) -> None:
        self.book.acknowledge("b", self.acks[0])
        self.acks = self.acks[1:]

    def want(self, _: int) -> None:
        self.book.want("b", self.lsn)

    def withdraw(self, _: int) -> None:
        self.book.withdraw("b")

    def take_in(self, _: int) -> None:
        self._send(self.book.take_in())

    def let_go(self, _: int) -> None:
        self._send(self.book.let_go({"b"}, min_isr=1))

    def _send(self, change: Change | None) -> None:
        if change is not None:
            self.sent.append(Sent(change))

    def read(self, _: int) -> None:
        self.sent.append(Sent(None))

    def carry_out(self, i: int) -> None:
        """Etcd takes a transaction, or refuses it and tells the present state."""
        one = self.sent[i]
        if one.change is not None and one.change.revision == self.revision:
            self.revision, self.isr = self.revision + 1, one.change.isr
        self.sent[i] = replace(one, result=(self.revision, self.isr))

    def lose(self, i: int) -> None:
        del self.sent[i]

    def answer(self, i: int) -> None:
        result = self.sent.pop(i).result
        assert result is not None
        self.book.know(*result)

    def time_out(self, i: int) -> None:
        self.sent[i] = replace(self.sent[i], awaited=False)

    def reply(self, _: int) -> None:
        self.answered = max(self.answered, self.book.covered(self.lsn))


def _kind(name: str) -> str:
    return "propose" if name in ("take_in", "let_go") else name


def search(limits: dict[str, int]) -> Figures:
    """Walk through all states that so many operations can reach."""
    first = Pair(limits)
    known, todo = {first.key()}, [(first, "")]
    steps = 0
    while todo:
        state, path = todo.pop()
        for name, i in state.moves():
            after = copy.deepcopy(state)
            steps += 1
            try:
                after.do(name, i)
            except Broken as error:
                raise Broken(f"{path} {name}: {error}") from error
            if (key := after.key()) not in known:
                known.add(key)
                todo.append((after, f"{path} {name}"))
    return Figures({"states of two nodes, all of them": len(known), "steps between them": steps})
