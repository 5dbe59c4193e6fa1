"""A bug that is planted by hand: a piece of text in one file and its replacement."""

from __future__ import annotations

from dataclasses import dataclass

CRASH = "powercut engine_faults trust:powercuts"
SIM = "engine_machine trust:simulation"


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake."""

    name: str
    file: str  # below turtlemq/, or beginning with ../spark/
    old: str
    new: str
    tests: str = ""  # files of tests/, without test_ and .py
