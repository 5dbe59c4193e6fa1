"""An archive of TurtleMQ's packages for executors (`--py-files`). Made by `python -m turtlemq_report.bundle turtlemq.zip`.

Dependencies (numpy, pyarrow, pymongo, xxhash, …) are not included: the executors' Python must have them.
"""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

PACKAGES = ("turtlemq", "pyspark_turtlemq", "turtlemq_report")


def bundle(into: Path) -> int:
    """Write the archive. Returns the number of files in it."""
    count = 0
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in PACKAGES:
            spec = importlib.util.find_spec(package)
            assert spec is not None, package
            assert spec.origin is not None, package
            home = Path(spec.origin).parent
            for path in sorted(home.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, Path(package) / path.relative_to(home))
                    count += 1
    return count


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m turtlemq_report.bundle turtlemq.zip")
    print(f"{sys.argv[1]}: {bundle(Path(sys.argv[1]))} files")
