"""Flow control: one scenario a file, each a `Benchmark` named `flow-…` with the pass marks of its rule, and a picture of its run.

`python -m benchmarks flow` runs all of them. To add one, write its file and name it in `SCENARIOS`.
"""

from __future__ import annotations

from benchmarks.flow.alpha import alpha
from benchmarks.flow.backlog import backlog
from benchmarks.flow.flood import flood
from benchmarks.flow.overload import overload
from benchmarks.flow.rates import rates
from benchmarks.flow.step import step
from benchmarks.flow.tenants import tenants
from benchmarks.run import Benchmark

SCENARIOS: tuple[Benchmark, ...] = (backlog, flood, step, tenants, rates, overload, alpha)
