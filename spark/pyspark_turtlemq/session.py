"""A Spark session for TurtleMQ's files: finds Java, sets Python and paths, quiets the logs, enables filter pushdown.

Any other session works too if it can import `pyspark_turtlemq`; see docs/SPARK.md.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from pyspark_turtlemq import java, pin_owners

QUIET = Path(__file__).with_name("log4j2-quiet.properties")
CONF = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
}


def environment() -> dict[str, str]:
    """Environment variables for Spark's processes: Java, this Python, an address of this host, the paths of the packages."""
    packages = [str(Path(__file__).resolve().parent.parent), str(_home("turtlemq"))]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        "JAVA_HOME": java.find(),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*packages, *inherited])),
    }


def _home(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(str(spec.origin if spec is not None else package)).resolve().parent.parent


def turtlemq_session(name: str = "turtlemq", master: str | None = None, conf: dict[str, str] | None = None) -> Any:
    """The current session, or a new one. `master` defaults to all cores of this host; `conf` overrides the settings here.
    The pins of the session are removed when the program ends.

        spark = turtlemq_session()
        spark.read.format("turtlemq").load("data").groupBy("topic", "state").count().show()
    """
    from pyspark.sql import SparkSession

    os.environ.update(environment())
    cores = len(os.sched_getaffinity(0))
    settings = {
        "spark.sql.shuffle.partitions": str(max(2, cores)),
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={QUIET.as_uri()}",
        "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower(),
        **CONF,
        **(conf or {}),
    }
    builder = SparkSession.builder.appName(name).master(master or os.environ.get("SPARK_MASTER", f"local[{cores}]"))
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    process = getattr(session.sparkContext._gateway, "proc", None)
    if process is not None and process.pid not in _RELEASED_AT_EXIT:
        _RELEASED_AT_EXIT.add(process.pid)
        atexit.register(pin_owners.release_session, pin_owners.process_label(process.pid))
    return session


_RELEASED_AT_EXIT: set[int] = set()  # pids of Java processes
