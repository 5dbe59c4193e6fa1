"""Patterns of topic names, in which `*` stands for any characters: of tokens, tenants and subscriptions. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,200}")


def is_pattern(text: str) -> bool:
    """Whether a text is a pattern of topic names.

    >>> is_pattern("mail.*"), is_pattern("mail/*"), is_pattern("")
    (True, False, False)
    """
    return bool(_PATTERN.fullmatch(text))


def pattern_of(topics: Iterable[str]) -> Callable[[str], object]:
    """A function that tells whether a name matches one of the patterns.

    >>> fits = pattern_of(["orders", "mail.*"])
    >>> bool(fits("orders")), bool(fits("orders2")), bool(fits("mail.de"))
    (True, False, True)
    """
    forms = [".*".join(re.escape(part) for part in re.split(r"\*+", topic)) for topic in topics]
    return re.compile("|".join(forms), re.ASCII).fullmatch
