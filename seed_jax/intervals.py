"""How sure a success rate is: intervals for one rate, a difference, a macro average, and the summary of an evaluation.

Pure numpy. Rates are fractions in [0, 1]; `confidence=0.95` everywhere means a two-sided 95 % interval.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


def wilson_interval(successes: float, total: int, *, confidence: float = 0.95) -> tuple[float, float]:
  """Wilson's score interval of a rate: the p with |successes/total - p| <= z sqrt(p (1 - p) / total).

  Holds near 0 and 1 and for small totals, where the normal interval fails. Nothing tried gives (0, 1).
  Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.

  Raises:
    ValueError: successes outside [0, total].
  """
  if not 0 <= successes <= total:
    raise ValueError(f"{successes} successes of {total} episodes")
  if total == 0:
    return 0.0, 1.0
  z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
  rate = successes / total
  center = rate + z * z / (2 * total)
  half = z * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
  scale = 1 + z * z / total
  return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def difference_interval(
  successes: float, total: int, base_successes: float, base_total: int, *, confidence: float = 0.95
) -> tuple[float, float, float]:
  """(difference, low, high) of two independent rates: Newcombe's hybrid of the two Wilson intervals.

  For two evaluations on the same tasks `paired_difference` is sharper. Source: R. G. Newcombe, Interval estimation for
  the difference between independent proportions, 1998, method 10.
  """
  if total == 0 or base_total == 0:
    return 0.0, -1.0, 1.0
  difference = successes / total - base_successes / base_total
  down, up = _distances(successes, total, confidence)
  base_down, base_up = _distances(base_successes, base_total, confidence)
  return difference, difference - math.hypot(down, base_up), difference + math.hypot(up, base_down)


def paired_difference(
  after: Sequence[float], before: Sequence[float], *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
  """(mean of after - before, low, high) over tasks; entry i of both is the same task.

  Outcomes that are all 0 or 1: the two Wilson intervals joined with the correlation of the pairs, which holds for small
  panels and for rates of 0 and 1. Source: R. G. Newcombe, Improved confidence intervals for the difference between
  binomial proportions based on paired data, 1998, method 10. Fractions (several episodes a task): a bootstrap.

  Raises:
    ValueError: not the same number of tasks, or none.
  """
  if len(after) != len(before) or not len(after):
    raise ValueError(f"a paired difference needs the same tasks twice, got {len(after)} and {len(before)}")
  after, before = np.asarray(after, float), np.asarray(before, float)
  difference = float(np.mean(after - before))
  if not np.isin(np.concatenate([after, before]), (0.0, 1.0)).all():
    return difference, *_bootstrap(after - before, confidence, samples, seed)
  total = len(after)
  both, only, once = np.sum(after * before), np.sum(after * (1 - before)), np.sum((1 - after) * before)
  neither = total - both - only - once
  margins = math.sqrt((both + only) * (once + neither) * (both + once) * (only + neither))
  product = both * neither - only * once
  if product > 0:  # Newcombe's continuity correction: a small sample shows more agreement than there is.
    product = max(product - total / 2, 0.0)
  correlation = product / margins if margins else 0.0
  down, up = _distances(both + only, total, confidence)
  base_down, base_up = _distances(both + once, total, confidence)
  return (
    difference,
    difference - math.sqrt(down**2 - 2 * correlation * down * base_up + base_up**2),
    difference + math.sqrt(up**2 - 2 * correlation * up * base_down + base_down**2),
  )


def macro_interval(groups: Iterable[Sequence[float]], *, confidence: float = 0.95) -> tuple[float, float, float]:
  """(macro mean, low, high): the mean of the groups' rates; empty groups are left out.

  The groups' Wilson intervals are joined as independent: low = mean - sqrt(sum (rate - low_i)^2) / groups, and so on.
  Source: G. Y. Zou and A. Donner, Construction of confidence limits about effect measures: a general approach, 2008.
  """
  groups = [np.asarray(group, float) for group in groups if len(group)]
  if not groups:
    return 0.0, 0.0, 1.0
  mean = float(np.mean([group.mean() for group in groups]))
  distances = np.array([_distances(group.sum(), len(group), confidence) for group in groups])
  down, up = np.sqrt(np.sum(distances**2, axis=0)) / len(groups)
  return mean, max(0.0, mean - float(down)), min(1.0, mean + float(up))


def _distances(successes: float, total: int, confidence: float) -> tuple[float, float]:
  """How far Wilson's interval reaches below and above the rate."""
  low, high = wilson_interval(successes, total, confidence=confidence)
  return successes / total - low, high - successes / total


def _bootstrap(values: np.ndarray, confidence: float, samples: int, seed: int) -> tuple[float, float]:
  generator = np.random.default_rng(seed)
  means = np.zeros(samples)
  # Few rows at a time: samples x tasks indices would not fit for a large panel.
  step = max(1, 2_000_000 // len(values))
  for start in range(0, samples, step):
    count = min(step, samples - start)
    means[start : start + count] = values[generator.integers(len(values), size=(count, len(values)))].mean(axis=1)
  low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
  return float(low), float(high)


def summarize(outcomes: Iterable[tuple[str, str, bool]], *, confidence: float = 0.95) -> dict[str, Any]:
  """The numbers of one evaluation from (task id, family, won) of every episode.

  Returns success, interval (Wilson), episodes, macro, macro_interval, families (name -> success), family_episodes and
  family_intervals (by name), and outcomes (task id -> 0 or 1; a task played k times gives its mean), all JSON values.
  """
  outcomes = list(outcomes)
  by_family: dict[str, list[float]] = {}
  by_task: dict[str, list[float]] = {}
  for task, family, won in outcomes:
    by_family.setdefault(family, []).append(float(won))
    by_task.setdefault(task, []).append(float(won))
  won, total = sum(map(sum, by_family.values())), len(outcomes)
  macro, low, high = macro_interval([by_family[name] for name in sorted(by_family)], confidence=confidence)
  return {
    "success": won / total if total else 0.0,
    "interval": list(wilson_interval(won, total, confidence=confidence)),
    "episodes": total,
    "macro": macro,
    "macro_interval": [low, high],
    "families": {name: sum(group) / len(group) for name, group in sorted(by_family.items())},
    "family_episodes": {name: len(group) for name, group in sorted(by_family.items())},
    "family_intervals": {
      name: list(wilson_interval(sum(group), len(group), confidence=confidence))
      for name, group in sorted(by_family.items())
    },
    "outcomes": {task: sum(group) / len(group) for task, group in sorted(by_task.items())},
  }


# ---------------------------------------------------------------- a summary read back from a file


class Rate(NamedTuple):
  """A success rate with its interval and the number of episodes behind it."""

  value: float
  low: float
  high: float
  episodes: int


@dataclasses.dataclass(frozen=True)
class Panel:
  """One evaluation, as far as its file tells it."""

  overall: Rate | None
  macro: Rate | None
  families: Mapping[str, Rate]
  outcomes: Mapping[str, float]


def read_panel(summary: Any) -> Panel:
  """The rates in what `summarize` returned and a file kept.

  Missing intervals are computed, values of a wrong kind left out. Where the file counts no episodes by family, the
  families share them equally, as fixed panels do.
  """
  summary = _mapping(summary)
  values, counts = _mapping(summary.get("families")), _mapping(summary.get("family_episodes"))
  total = _count(summary.get("episodes"))
  family_intervals = _mapping(summary.get("family_intervals"))
  families = {}
  for name in sorted(values):
    count = _count(counts[name]) if name in counts else total // len(values)
    if (rate := _rate(values[name], family_intervals.get(name), count)) is not None:
      families[name] = rate
  outcomes = {name: float(value) for name, value in _mapping(summary.get("outcomes")).items() if _is_rate(value)}
  return Panel(
    _rate(summary.get("success"), summary.get("interval"), total),
    _rate(summary.get("macro"), summary.get("macro_interval"), total),
    families,
    outcomes,
  )


def gain(after: Panel, before: Panel, family: str | None = None) -> tuple[float, float, float] | None:
  """(difference, low, high) of a family's success or of all tasks'; None where one of them is missing.

  All tasks are compared in pairs where both files list the same outcomes, else as two independent rates.
  """
  new, old = (panel.overall if family is None else panel.families.get(family) for panel in (after, before))
  if new is None or old is None:
    return None
  if family is None and after.outcomes and after.outcomes.keys() == before.outcomes.keys():
    tasks = sorted(after.outcomes)
    return paired_difference([after.outcomes[task] for task in tasks], [before.outcomes[task] for task in tasks])
  return difference_interval(new.value * new.episodes, new.episodes, old.value * old.episodes, old.episodes)


def _mapping(value: Any) -> Mapping:
  return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int:
  return int(value) if isinstance(value, (int, float)) and 0 <= value < 1e12 else 0


def _is_rate(value: Any) -> bool:
  return isinstance(value, (int, float)) and 0 <= value <= 1


def _rate(value: Any, interval: Any, episodes: int) -> Rate | None:
  if not _is_rate(value):
    return None
  if isinstance(interval, (list, tuple)) and len(interval) == 2 and all(map(_is_rate, interval)):
    return Rate(float(value), *map(float, interval), episodes)
  return Rate(float(value), *wilson_interval(value * episodes, episodes), episodes)
