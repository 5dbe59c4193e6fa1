"""The header Date of answers that are written as bytes."""

from __future__ import annotations

import time
from email.utils import formatdate

_last = (0, "")  # the second, and its text


def http_date() -> str:
    """The time of now, as HTTP writes it. Made once a second.

    >>> http_date().endswith(" GMT")
    True
    """
    global _last
    now = int(time.time())
    if _last[0] != now:
        _last = (now, formatdate(now, usegmt=True))
    return _last[1]
