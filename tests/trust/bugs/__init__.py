"""Bugs planted by hand, each in a copy of the code: typical mistakes of storage systems, which the suite must notice.

A bug is a piece of text in one file and its replacement. `tests` are those that should find it, fastest first; where
they do not, everything that is fast is run before a bug counts as a survivor. A survivor is a test that is missing.

One module a package of the code; the bugs of `replica` stand in two, `replica` and `membership`; those of priorities, of
schedules and of flow control in modules of their own.
"""

from __future__ import annotations

from tests.trust.bugs import (
    broker,
    client,
    engine,
    flow,
    index,
    membership,
    priorities,
    replica,
    schedules,
    segment,
    server,
    spark,
    storage,
    topic,
)
from tests.trust.bugs.bug import Bug

__all__ = ["BUGS", "Bug"]

BUGS = (
    *broker.BUGS,
    *client.BUGS,
    *engine.BUGS,
    *flow.BUGS,
    *index.BUGS,
    *membership.BUGS,
    *priorities.BUGS,
    *replica.BUGS,
    *schedules.BUGS,
    *segment.BUGS,
    *server.BUGS,
    *spark.BUGS,
    *storage.BUGS,
    *topic.BUGS,
)
