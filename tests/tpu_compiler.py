"""The TPU compiler, for tests that compile for slices that are not here: where it is, and marks that need it."""

import importlib.util
import pathlib
import sys

import pytest

COMPILER = pathlib.Path(sys.prefix) / "tpu_compiler"  # where launch/test.sh puts it
MARKS = [
  pytest.mark.slow,
  pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and not COMPILER.exists(),
    reason="libtpu, the compiler, is not installed",
  ),
]
