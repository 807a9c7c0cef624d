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


def test_paired_difference_by_hand():
  # 10 tasks: 4 won by both, 3 only after, 1 only before, 2 by neither; rates 0.7 and 0.5.
  after = [1] * 4 + [1] * 3 + [0] * 1 + [0] * 2
  before = [1] * 4 + [0] * 3 + [1] * 1 + [0] * 2
  # ad - bc = 4 * 2 - 3 * 1 = 5, less n / 2 = 5 is 0: no correlation is granted, as if the rates were independent.
  assert intervals.paired_difference(after, before) == pytest.approx(intervals.difference_interval(7, 10, 5, 10))
  # Ten times the panel: ad - bc = 500, less 50, over sqrt(70 * 30 * 50 * 50) = 2291.3: correlation 0.19640.
  # Wilson: 70 of 100 is (0.604151, 0.781051), 50 of 100 is (0.403832, 0.596168).
  difference, low, high = intervals.paired_difference(after * 10, before * 10)
  down, up, base = 0.7 - 0.604151, 0.781051 - 0.7, 0.096168
  assert difference == pytest.approx(0.2)
  assert low == pytest.approx(0.2 - math.sqrt(down**2 - 2 * 0.1964 * down * base + base**2), abs=1e-5)
  assert high == pytest.approx(0.2 + math.sqrt(up**2 - 2 * 0.1964 * up * base + base**2), abs=1e-5)


def test_pairs_that_agree_are_sharper_and_never_certain():
  wins = [1] * 60 + [0] * 40
  difference, low, high = intervals.paired_difference([1] * 70 + [0] * 30, wins)
  _, wide_low, wide_high = intervals.difference_interval(70, 100, 60, 100)
  assert difference == pytest.approx(0.1) and wide_low < 0 < low and high < wide_high
  # Nothing won at all: the data exclude large differences only. z^2 / (12 + z^2) = 0.2425.
  assert intervals.paired_difference([0] * 12, [0] * 12) == pytest.approx((0.0, -0.2425, 0.2425), abs=1e-4)


def test_paired_difference_holds_the_true_one_as_often_as_it_says():
  generator = np.random.default_rng(1)
  hits = 0
  for _ in range(400):
    skill = generator.random(60)  # How easy a task is decides both outcomes: the pairs are correlated.
    before, after = generator.random(60) < skill * 0.6, generator.random(60) < skill * 0.6 + 0.3
    _, low, high = intervals.paired_difference(after, before)
    hits += low <= 0.3 <= high
  assert 0.92 <= hits / 400 <= 0.995


def test_fractions_of_several_episodes_a_task_are_resampled():
  before = np.array([0.0, 0.5] * 50)
  after = before + 0.5 * (np.arange(100) % 4 == 0)
  difference, low, high = intervals.paired_difference(after, before)
  # The differences are 25 halves and 75 zeros: the standard error is 0.5 sqrt(.25 * .75 / 100) = 0.02165.
  assert difference == 0.125
  assert low == pytest.approx(0.125 - Z * 0.02165, abs=0.008) and high == pytest.approx(0.125 + Z * 0.02165, abs=0.008)
  assert intervals.paired_difference(after, before) == (difference, low, high)  # Repeatable.


def test_a_paired_difference_needs_pairs():
  for bad in ([1], []):
    with pytest.raises(ValueError, match="same tasks twice"):
      intervals.paired_difference(bad, [1, 0] if bad else [])


def test_macro_weighs_families_equally():
  macro, low, high = intervals.macro_interval([[1.0] * 90 + [0.0] * 10, [0.0] * 10, []])
  assert macro == pytest.approx(0.45)  # (0.9 + 0) / 2; the empty family does not count.
  # Wilson: 90 of 100 is (0.825634, 0.944771), 0 of 10 is (0, 0.277533).
  assert low == pytest.approx(0.45 - math.hypot(0.9 - 0.825634, 0.0) / 2, abs=1e-5)
  assert high == pytest.approx(0.45 + math.hypot(0.944771 - 0.9, 0.277533) / 2, abs=1e-5)
  assert intervals.macro_interval([]) == (0.0, 0.0, 1.0)
  assert intervals.macro_interval([[1.0]])[2] == 1.0


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
