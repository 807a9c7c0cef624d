"""Seconds that can be compared: runs in turn (A B A B), medians, ratios of pairs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax


def say(text: str) -> None:
  """One line of progress; the table alone goes to the standard output."""
  print(text, file=sys.stderr, flush=True)


def seconds(function: Callable[[], object]) -> float:
  """Wall seconds of one call, until the arrays that it returns are there."""
  started = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - started


def in_turn(
  functions: Mapping[str, Callable[[], object]], repeats: int, *, warm_up: int = 1, measure: Callable = seconds
) -> dict[str, list]:
  """`repeats` measurements of each function, one of each before the next of any: whatever slows the machine for a
  while slows all of them. The first `warm_up` rounds compile and are not kept.
  """
  taken: dict[str, list] = {name: [] for name in functions}
  for round_number in range(warm_up + repeats):
    for name, function in functions.items():
      value = measure(function)
      if round_number >= warm_up:
        taken[name].append(value)
  return taken


def median(values: Sequence[float]) -> float | None:
  """The median; None of nothing."""
  return float(statistics.median(values)) if values else None


def paired_ratio(worse: Sequence[float], better: Sequence[float]) -> float | None:
  """median over i of worse[i] / better[i]: drift of the machine cancels within a pair."""
  return median([w / b for w, b in zip(worse, better, strict=False) if b > 0])
