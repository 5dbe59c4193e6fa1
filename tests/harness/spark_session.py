"""A Spark session for the tests of a module. Without Spark or Java the tests are named as not run, with the way to run them.

A module calls `need_spark` before it imports packages of Spark, and has `__all__ = ["spark"]` for the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

MARKS = [pytest.mark.slow, pytest.mark.xdist_group("spark"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
HURRY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # Java need not polish code that runs for seconds


def need_spark() -> None:
    """Skip the module if Spark is not installed."""
    pytest.importorskip("pyspark", reason="not run: Spark is not installed; `make test` installs it, and a Java, then runs this")


def need_packages() -> None:
    """Skip the module if the packages that read files without Spark's Java are not installed."""
    for package in ("pyarrow", "pyspark"):
        pytest.importorskip(
            package, reason="not run: Spark's packages are not installed; `make test` installs them, then runs this"
        )


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """A session for all tests of a module."""
    from pyspark_turtlemq import java
    from pyspark_turtlemq.session import QUIET, turtlemq_session

    try:
        java.find()
    except java.NoJava as error:
        pytest.skip(f"not run: {error} Then: make test")
    options = f"-Dlog4j2.configurationFile={QUIET.as_uri()} {HURRY}"
    conf = {"spark.sql.shuffle.partitions": "2", "spark.driver.extraJavaOptions": options}
    session = turtlemq_session("tests", master="local[2,3]", conf=conf)
    yield session
    session.stop()
