"""Intervals by hand arithmetic."""

import math

import numpy as np
import pytest

from seed_jax import intervals

Z = 1.959963984540054


def test_wilson_hand_numbers():
  # 1 of 10: center (0.1 + z^2/20) / (1 + z^2/10) = 0.292073 / 1.384146 = 0.211013,
  # half z sqrt(0.009 + z^2/400) / 1.384146 = 0.267332 / 1.384146 = 0.193138.
  low, high = intervals.wilson_interval(1, 10)
  assert (low, high) == pytest.approx((0.017876, 0.404150), abs=2e-6)
  # 0 of n: [0, z^2 / (n + z^2)]; n of n: its mirror.
  assert intervals.wilson_interval(0, 20) == pytest.approx((0.0, Z**2 / (20 + Z**2)))
  assert intervals.wilson_interval(20, 20) == pytest.approx((20 / (20 + Z**2), 1.0))
  # Half of a large panel is close to the normal interval, z / (2 sqrt(n)).
  low, high = intervals.wilson_interval(5000, 10000)
  assert (high - low) / 2 == pytest.approx(Z / 200, rel=1e-3)
  assert intervals.wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("successes,total", [(3, 2), (-1, 5), (math.nan, 5)])
def test_wilson_refuses_impossible_counts(successes, total):
  with pytest.raises(ValueError, match=f"{successes} successes of {total}"):
    intervals.wilson_interval(successes, total)


def test_difference_is_newcombes():
  # Newcombe 1998, table II, example (a), method 10: 56/70 - 48/80 has the interval 0.0524 to 0.3339.
  difference, low, high = intervals.difference_interval(56, 70, 48, 80)
  assert (difference, low, high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
  assert intervals.difference_interval(0, 0, 1, 2) == (0.0, -1.0, 1.0)


def test_paired_difference_uses_the_pairs():
  before = np.array([0.0, 1.0] * 50)
  after = np.minimum(
    before + (np.arange(100) % 4 == 0), 1.0
  )  # A quarter of all tasks, each a failure before, is won now.
  difference, low, high = intervals.paired_difference(after, before)
  # The differences are 25 ones and 75 zeros: the standard error is sqrt(.25 * .75 / 100) = 0.0433.
  assert difference == 0.25
  assert low == pytest.approx(0.25 - Z * 0.0433, abs=0.015) and high == pytest.approx(0.25 + Z * 0.0433, abs=0.015)
  assert intervals.paired_difference(after, before) == (difference, low, high)  # Repeatable.
  assert intervals.paired_difference([1, 0], [1, 0]) == (0.0, 0.0, 0.0)
  for bad in ([1], []):
    with pytest.raises(ValueError, match="same tasks twice"):
      intervals.paired_difference(bad, [1, 0] if bad else [])


def test_macro_weighs_families_equally():
  groups = [[1.0] * 90 + [0.0] * 10, [0.0] * 10, []]
  macro, low, high = intervals.macro_interval(groups)
  assert macro == pytest.approx(0.45)  # (0.9 + 0) / 2; the empty family does not count.
  assert low == pytest.approx(0.45 - Z * 0.03 / 2, abs=0.01) and high == pytest.approx(0.45 + Z * 0.03 / 2, abs=0.01)
  assert intervals.macro_interval([]) == (0.0, 0.0, 1.0)


def test_summary_of_an_evaluation():
  outcomes = [
    ("t/1", "heat", True),
    ("t/2", "heat", False),
    ("t/3", "cool", False),
    ("t/3", "cool", True),
    ("t/4", "cool", True),
  ]
  summary = intervals.summarize(outcomes)
  assert summary["success"] == 0.6 and summary["episodes"] == 5
  assert summary["interval"] == list(intervals.wilson_interval(3, 5))
  assert summary["families"] == {"cool": pytest.approx(2 / 3), "heat": 0.5}
  assert summary["macro"] == pytest.approx((2 / 3 + 0.5) / 2)
  assert summary["family_episodes"] == {"cool": 3, "heat": 2}
  assert summary["family_intervals"]["heat"] == list(intervals.wilson_interval(1, 2))
  assert summary["outcomes"] == {"t/1": 1.0, "t/2": 0.0, "t/3": 0.5, "t/4": 1.0}
  assert intervals.summarize([])["success"] == 0.0
