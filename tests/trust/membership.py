"""Membership: walks over the rules of the in-sync set and of elections, with a model of etcd and of the network.

`Book`, `Member` and `Tenure` are the product's own; everything around them may be late, lost or killed. After each step the
invariants of `turtlemq.replica.membership` hold.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.trust.membership_all import LIMITS, search
from tests.trust.membership_world import Move, World
from tests.trust.model import Broken, Figures, Part

CALM, STEPS = 400, 600
PAUSES_MS = (0, 1, 5, 20, 60, 120)  # between two steps
FAULTS = 0.03  # of the steps
FAULTY = frozenset("kill power_cut cut drop time_out cut_off_etcd renew_all hand_over".split())


def run(cases: range, _: Path) -> Figures:
    """A walk for each seed; some cases go through all states of a small world as well."""
    seen = Figures()
    for case in cases:
        if case in LIMITS:
            seen += search(LIMITS[case])
        seen += walk(case)
    return seen


def walk(seed: int) -> Figures:
    """Random steps of three nodes: first without faults, until all are in sync."""
    chance = Random(seed)
    world = World("abc", chance)
    for step in range(CALM + STEPS):
        calm = step < CALM and len(world.etcd.state.isr) < 3
        move = choose(world, chance, 0 if calm else FAULTS)
        world.now += chance.choice(PAUSES_MS)
        try:
            world.do(move)
        except Broken as error:
            raise Broken(f"seed {seed}, step {step}, {' '.join(map(str, move))}: {error}") from error
    world.seen["walks"] += 1
    return world.seen


def choose(world: World, chance: Random, faults: float) -> Move:
    """The next step: a fault, or anything else that could happen."""
    fault = chance.random() < faults
    possible = [(weight, move) for weight, move in world.moves() if (move[0] in FAULTY) == fault]
    weights, moves = zip(*possible, strict=True)
    (move,) = chance.choices(moves, weights)
    return tuple(move)


PART = Part(
    name="membership",
    unit="seeds",
    about="Random orders of events for the in-sync set and elections: no answered record is lost, no deposed leader answers.",
    run=run,
    quick=200,
    full=40_000,
    chunk=100,
    must=("elections", "changes of the ISR", "changes in doubt", "bids in doubt", "leads claimed again", "answers", "power cuts"),
)
