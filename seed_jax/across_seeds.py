"""How sure a comparison of methods is that were each trained with several seeds, and what a learning curve says.

Pure numpy and scipy. Shapes: S seeds, K tasks of the panel, P points of a curve. Successes are fractions in [0, 1]; a
two-sided 95 % interval unless `confidence` says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special


class Paired(NamedTuple):
  """A paired difference over seeds: its mean, interval, t statistic and two-sided p-value."""

  difference: float
  low: float
  high: float
  t: float
  p: float


def t_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float, float]:
  """(mean, low, high) = mean -+ t_{S-1} s / sqrt(S), with s^2 = sum (x - mean)^2 / (S - 1).

  It speaks about the seeds that might have been drawn, on the tasks that were. One value has no interval: low and high
  are infinite. Source: Student, The probable error of a mean, 1908.

  Raises:
    ValueError: no value.
  """
  values = np.asarray(values, float)
  if not len(values):
    raise ValueError("a mean over seeds needs at least one seed")
  mean = float(values.mean())
  if len(values) == 1:
    return mean, -math.inf, math.inf
  half = special.stdtrit(len(values) - 1, 0.5 + confidence / 2) * _standard_error(values)
  return mean, mean - float(half), mean + float(half)


def paired_t(after: Sequence[float], before: Sequence[float], *, confidence: float = 0.95) -> Paired:
  """The paired t-test: entry i of both comes from the same seed. t = mean(d) / (s_d / sqrt(S)), d = after - before.

  One pair says nothing about chance: an infinite interval, t and p are NaN. Differences that are all the same nonzero
  number give t = +-inf and p = 0; all zero, t = 0 and p = 1.

  Raises:
    ValueError: not the same number of seeds, or none.
  """
  if len(after) != len(before) or not len(after):
    raise ValueError(f"a paired comparison needs the same seeds twice, got {len(after)} and {len(before)}")
  d = np.asarray(after, float) - np.asarray(before, float)
  mean, low, high = t_interval(d, confidence=confidence)
  if len(d) == 1:
    return Paired(mean, low, high, math.nan, math.nan)
  error = _standard_error(d)
  if error <= 1e-12 * max(1.0, abs(mean)):  # equal but for the last rounding
    t = math.copysign(math.inf, mean) if abs(mean) > 1e-12 else 0.0
  else:
    t = mean / error
  return Paired(mean, low, high, t, float(2 * special.stdtr(len(d) - 1, -abs(t))))


def holm(p_values: Sequence[float]) -> list[float]:
  """p-values corrected for their number: the i-th smallest (from 0) of n times n - i, kept ascending, at most 1.

  NaN (no test) stays NaN and does not count. Source: S. Holm, A simple sequentially rejective multiple test procedure,
  1979.
  """
  values = np.asarray(p_values, float)
  tested = np.flatnonzero(~np.isnan(values))
  order = tested[np.argsort(values[tested])]
  scaled = values[order] * (len(order) - np.arange(len(order)))
  values[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
  return values.tolist()


def seeds_and_tasks(
  after: np.ndarray, before: np.ndarray, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
  """(difference, low, high) of two [S, K] tables of success by a bootstrap over seeds and tasks.

  Every sample draws S seeds and K tasks with replacement and takes the mean of after - before over all their pairs, so
  the interval covers other seeds and other tasks. With few seeds it is too narrow; read it beside `paired_t`.
  Source: A. B. Owen, The pigeonhole bootstrap, 2007.

  Raises:
    ValueError: tables of different shapes, or empty ones.
  """
  d = np.asarray(after, float) - np.asarray(before, float) if np.shape(after) == np.shape(before) else np.zeros(0)
  if d.ndim != 2 or not d.size:
    raise ValueError(
      f"a bootstrap needs two equal tables of seeds and tasks, got {np.shape(after)}, {np.shape(before)}"
    )
  generator, (S, K) = np.random.default_rng(seed), d.shape
  seeds = generator.multinomial(S, np.full(S, 1 / S), size=samples) / S  # how often each was drawn, as weights
  tasks = generator.multinomial(K, np.full(K, 1 / K), size=samples) / K
  means = np.einsum("xs,sk,xk->x", seeds, d, tasks, optimize=True)
  low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
  return float(d.mean()), float(low), float(high)


def area(x: Sequence[float], y: Sequence[float]) -> float:
  """Area under a curve over its width: the mean height by the trapezoid rule, in the unit of y. One point: its y."""
  x, y = _curve(x, y)
  width = x[-1] - x[0]
  return float(np.trapezoid(y, x) / width) if width > 0 else float(y[-1])


def height(x: Sequence[float], y: Sequence[float], fraction: float) -> float:
  """The curve at x[0] + fraction (x[-1] - x[0]), on the straight line between its points."""
  x, y = _curve(x, y)
  return float(np.interp(x[0] + fraction * (x[-1] - x[0]), x, y))


def cut(x: Sequence[float], y: Sequence[float], end: float) -> tuple[np.ndarray, np.ndarray]:
  """The curve up to x = `end`, where it stands on the straight line between its points; a shorter one as it is."""
  x, y = _curve(x, y)
  if end >= x[-1]:
    return x, y
  before = x < end
  return np.append(x[before], end), np.append(y[before], np.interp(end, x, y))


def first_reach(x: Sequence[float], y: Sequence[float], threshold: float) -> float | None:
  """The smallest x at which the curve, straight between its points, is at `threshold` or above; None: not reached."""
  x, y = _curve(x, y)
  reached = np.flatnonzero(y >= threshold - 1e-12)
  if not len(reached):
    return None
  i = int(reached[0])
  if i == 0:
    return float(x[0])
  share = min((threshold - y[i - 1]) / (y[i] - y[i - 1]), 1.0)
  return float(x[i - 1] + share * (x[i] - x[i - 1]))


def _standard_error(values: np.ndarray) -> float:
  return float(values.std(ddof=1) / math.sqrt(len(values)))


def _curve(x, y) -> tuple[np.ndarray, np.ndarray]:
  x, y = np.asarray(x, float), np.asarray(y, float)
  if x.shape != y.shape or x.ndim != 1 or not len(x) or np.any(np.diff(x) < 0):
    raise ValueError(f"a curve needs as many x as y, x ascending, got {x.shape} and {y.shape}")
  return x, y
