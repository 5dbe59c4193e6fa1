"""An alias of `turtlemq_report.bundle` under its former name, for scripts that run `python -m turtlemq_report.ship`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("turtlemq_report.bundle", run_name="__main__")
