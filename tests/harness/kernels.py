"""The compiled kernel for tests, built from this tree's source: in several ways, whether or not the package has one in place."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from os import environ
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from packages import build_kernel
from turtlemq.segment import kernel

OPTIONS = "TEST_KERNEL_OPTIONS"  # an environment variable: more options for the compiler, such as those of a sanitizer


@cache
def built(*options: str) -> ModuleType:
    """The kernel, compiled with these options. Skips the test where there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        if why := build_kernel.build(Path(folder), [*options, *environ.get(OPTIONS, "").split()]):
            pytest.skip(f"no C compiler, or no headers of Python: {why}")
        spec = spec_from_file_location("turtlemq.segment._kernel", Path(folder, build_kernel.MODULE))
        assert spec is not None, "it has a loader"
        assert spec.loader is not None, "it has a loader"
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@contextmanager
def with_kernel(*options: str) -> Iterator[ModuleType]:
    """Let the package use the kernel."""
    module = built(*options)
    with mock.patch.object(kernel, "compiled", module):
        yield module
