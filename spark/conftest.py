"""The examples in this folder need Spark's packages; without them pytest says which command brings them."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("pyspark") and importlib.util.find_spec("pyarrow") else ["*/*"]


def pytest_report_header() -> list[str]:
    return ["not run: the examples in spark/, for Spark is not installed; `make test` does it"] if collect_ignore_glob else []
