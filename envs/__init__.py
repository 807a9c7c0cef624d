"""Gymnasium environments and benchmark objects. `import envs` registers the ids and loads nothing heavy."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium

_BENCHMARKS = {"household": ("envs.household", "Household"), "alfworld": ("envs.alfworld", "ALFWorld")}


def benchmark(name: str, **options: Any):
  """The benchmark object of a name (see `envs.protocol.Benchmark`); options go to its constructor.

  Raises ValueError for a name that does not exist, and ImportError where its engine is not installed.
  """
  if name not in _BENCHMARKS:
    raise ValueError(f"unknown benchmark {name!r}: choose one of {', '.join(sorted(_BENCHMARKS))}")
  module, symbol = _BENCHMARKS[name]
  return getattr(importlib.import_module(module), symbol)(**options)


for _id, _entry in (
  ("seed/Household-v0", "envs.household:HouseholdEnv"),
  ("seed/ALFWorld-v0", "envs.alfworld:ALFWorldEnv"),
):
  if _id not in gymnasium.registry:
    gymnasium.register(id=_id, entry_point=_entry)
