"""The report as a Spark application: `spark-submit --py-files turtlemq.zip __main__.py --data DIR --out DIR`.

On one machine `turtlemq report` is simpler: it finds Java itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(given: list[str] | None = None) -> int:
    """Make a report in the session of spark-submit. Returns the exit code: 0 done, 1 failed, 2 wrong use."""
    parser = argparse.ArgumentParser("turtlemq_report", description="Make a report of a TurtleMQ data folder.")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the data folder, under the same path on every machine")
    parser.add_argument("--out", type=Path, default=Path("report"), help="where the report goes, on the driver")
    parser.add_argument("--topic", default="*", help="names or globs, with commas between them")
    parser.add_argument("--since-ms", type=int, help="leave out what happened before this time")
    parser.add_argument("--until-ms", type=int, help="leave out what happened after this time")
    arguments = parser.parse_args(given)
    from pyspark.sql import SparkSession

    from pyspark_turtlemq.session import CONF
    from turtlemq.errors import TurtleError
    from turtlemq_report.model import ReportOptions
    from turtlemq_report.run import report
    from turtlemq_report.summary_text import summary

    builder = SparkSession.builder.appName("turtlemq report")
    for name, value in CONF.items():
        builder = builder.config(name, value)
    try:
        options = ReportOptions(arguments.data, arguments.out, arguments.topic, arguments.since_ms, arguments.until_ms)
        made = report(builder.getOrCreate(), options)
    except TurtleError as error:
        print(f"turtlemq: {error}", file=sys.stderr)
        return 1
    print(json.dumps(summary(made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
