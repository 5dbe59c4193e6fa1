"""Bugs planted in the Spark reader."""

from __future__ import annotations

from tests.trust.bugs.bug import Bug

BUGS = (
    # Spark shows the states that the engine tells
    Bug(
        "a snapshot takes the length of each log when it links it",
        "../spark/pyspark_turtlemq/moments.py",
        "        if lengths != self._measure() or _truths(listed) != _truths(self._list()):\n            return False\n",
        "        lengths = {}\n",
        "spark_moments trust:moments",
    ),
    Bug(
        "a snapshot does not look again whether a log has grown",
        "../spark/pyspark_turtlemq/moments.py",
        "        if lengths != self._measure() or _truths",
        "        if _truths",
        "trust:moments",
    ),
    Bug(
        "a snapshot does not look again whether segments were replaced",
        "../spark/pyspark_turtlemq/moments.py",
        " or _truths(listed) != _truths(self._list()):",
        ":",
        "spark_moments trust:moments",
    ),
    Bug(
        "a report joins its saved results by position",
        "../spark/turtlemq_report/run.py",
        "partial.unionByName(known[kind])",
        "partial.union(known[kind])",
        "report_years",
    ),
    Bug(
        "ids are read without a look at checksums",
        "../spark/pyspark_turtlemq/documents.py",
        "not needed <= _IN_PREFIX - _IN_META.get(log, frozenset()))",
        '"body" in needed)',
        "spark_damage",
    ),
    Bug(
        "a read takes a batch whose end is missing",
        "../spark/pyspark_turtlemq/parts.py",
        "view, whole = file.map(), clean or not last",
        "view, whole = file.map(), True",
        "spark_files trust:moments",
    ),
)
