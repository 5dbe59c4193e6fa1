"""All parts, in the order in which they run."""

from __future__ import annotations

import importlib

from tests.trust.model import Part

_MODULES = ("simulation", "powercuts", "kills", "damage", "refusals", "clocks", "load", "hostile", "drill", "planted")


def all_parts() -> list[Part]:
    """Each module of this folder that is named above has one, called PART."""
    return [importlib.import_module(f"tests.trust.{name}").PART for name in _MODULES]
