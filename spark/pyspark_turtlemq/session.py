"""A Spark session that reads TurtleMQ's files: Java found, Python set, logs quiet, filters pushed down."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from pyspark_turtlemq import java, pins

QUIET = Path(__file__).with_name("log4j2-quiet.properties")
CONF = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
}


def environment() -> dict[str, str]:
    """What Spark's processes need: Java, this Python, an address of this machine, and where the packages are."""
    places = [str(Path(__file__).resolve().parent.parent), str(_home("turtlemq"))]
    known = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return {
        "JAVA_HOME": java.find(),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*places, *known])),
    }


def _home(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(str(spec.origin if spec is not None else package)).resolve().parent.parent


def turtlemq_session(name: str = "turtlemq", master: str | None = None, conf: dict[str, str] | None = None) -> Any:
    """The session, made if there is none. `master` is all cores of this machine unless given; `conf` comes on top. When the
    program ends, so do the session's pins.

        spark = turtlemq_session()
        spark.read.format("turtlemq").load("data").groupBy("topic", "state").count().show()
    """
    from pyspark.sql import SparkSession

    os.environ.update(environment())
    cores = len(os.sched_getaffinity(0))
    told = {
        "spark.sql.shuffle.partitions": str(max(2, cores)),
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={QUIET.as_uri()}",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        **CONF,
        **(conf or {}),
    }
    builder = SparkSession.builder.appName(name).master(master or os.environ.get("SPARK_MASTER", f"local[{cores}]"))
    for key, value in told.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    process = getattr(session.sparkContext._gateway, "proc", None)
    if process is not None and process.pid not in _ENDING:
        _ENDING.add(process.pid)
        atexit.register(pins.release_session, pins.process_label(process.pid))
    return session


_ENDING: set[int] = set()  # Java processes whose pins go when this one ends
