"""Statistics over seeds against tables, hand arithmetic and scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from seed_jax import across_seeds


def test_t_interval_by_hand():
  # 1, 2, 3: mean 2, s = 1, s / sqrt(3) = 0.577350; t of the table for 2 degrees of freedom, 95 %: 4.302653.
  half = 4.302653 * 0.577350
  assert across_seeds.t_interval([1, 2, 3]) == pytest.approx((2.0, 2 - half, 2 + half), abs=1e-5)
  # 90 %: 2.919986.
  assert across_seeds.t_interval([1, 2, 3], confidence=0.9)[2] == pytest.approx(2 + 2.919986 * 0.577350, abs=1e-5)
  assert across_seeds.t_interval([0.4] * 5) == pytest.approx((0.4, 0.4, 0.4))
  assert across_seeds.t_interval([0.4]) == (0.4, -math.inf, math.inf)
  with pytest.raises(ValueError, match="at least one seed"):
    across_seeds.t_interval([])


def test_paired_t_on_students_own_data():
  # Student 1908, hours of sleep gained with two drugs by ten patients: mean difference 1.58, t = 4.0621, p = 0.002833.
  first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
  second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
  found = across_seeds.paired_t(second, first)
  assert (found.difference, found.t, found.p) == pytest.approx((1.58, 4.0621, 0.002833), rel=1e-4)
  assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), rel=1e-6)
  turned = across_seeds.paired_t(first, second)
  assert (turned.t, turned.p, turned.low) == pytest.approx((-found.t, found.p, -found.high))


def test_paired_t_agrees_with_scipy():
  generator = np.random.default_rng(1)
  for count in (2, 3, 5, 30):
    after, before = generator.normal(size=(2, count))
    found, expected = across_seeds.paired_t(after, before), stats.ttest_rel(after, before)
    assert (found.t, found.p) == pytest.approx((expected.statistic, expected.pvalue))


def test_paired_t_without_spread_or_without_a_second_seed():
  assert across_seeds.paired_t([0.5, 0.7], [0.4, 0.6])[3:] == (math.inf, 0.0)
  assert across_seeds.paired_t([0.4, 0.6], [0.5, 0.7])[3:] == (-math.inf, 0.0)
  assert across_seeds.paired_t([0.4, 0.6], [0.4, 0.6]) == (0.0, 0.0, 0.0, 0.0, 1.0)
  one = across_seeds.paired_t([0.5], [0.25])
  assert one[:3] == (0.25, -math.inf, math.inf) and math.isnan(one.t) and math.isnan(one.p)
  with pytest.raises(ValueError, match="the same seeds twice, got 2 and 1"):
    across_seeds.paired_t([1, 2], [1])


def test_holm_by_hand():
  # sorted 0.01, 0.02, 0.04: 3 * 0.01, 2 * 0.02, 1 * 0.04
  assert across_seeds.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
  # 3 * 0.02 = 0.06 lifts 2 * 0.025 = 0.05; nothing exceeds 1; what was not tested is not counted
  assert across_seeds.holm([0.02, 0.025, 0.9]) == pytest.approx([0.06, 0.06, 0.9])
  assert across_seeds.holm([0.6, 0.7]) == [1.0, 1.0] and across_seeds.holm([]) == []
  assert across_seeds.holm([math.nan, 0.02]) == pytest.approx([math.nan, 0.02], nan_ok=True)


def test_bootstrap_of_tables_whose_answer_is_known():
  ones, zeros = np.ones((3, 8)), np.zeros((3, 8))
  assert across_seeds.seeds_and_tasks(ones, zeros) == (1.0, 1.0, 1.0)
  # Two seeds that differ by 0 and 1 on every task: a sample is 0, 1/2 or 1 with 1/4, 1/2, 1/4.
  after = np.repeat([[0.0], [1.0]], 50, axis=1)
  assert across_seeds.seeds_and_tasks(after, np.zeros((2, 50))) == pytest.approx((0.5, 0.0, 1.0))
  # One seed: only tasks vary, as in a bootstrap of a rate; half of 400 tasks gives 1/2 -+ 1.96 / 40.
  half = np.tile([0.0, 1.0], 200)[None]
  mean, low, high = across_seeds.seeds_and_tasks(half, np.zeros_like(half))
  assert (mean, low, high) == pytest.approx((0.5, 0.451, 0.549), abs=0.004)
  assert across_seeds.seeds_and_tasks(half, 1 - half) == across_seeds.seeds_and_tasks(half, 1 - half)
  for shapes in (((2, 3), (3, 2)), ((0, 3), (0, 3)), ((3,), (3,))):
    with pytest.raises(ValueError, match="two equal tables"):
      across_seeds.seeds_and_tasks(np.zeros(shapes[0]), np.zeros(shapes[1]))


def test_bootstrap_over_seeds_and_tasks_is_wider_than_over_tasks_alone():
  generator = np.random.default_rng(0)
  by_seed = np.array([0.1, 0.3, 0.5, 0.7])[:, None]
  table = (generator.random((4, 100)) < by_seed).astype(float)
  _, low, high = across_seeds.seeds_and_tasks(table, np.zeros_like(table))
  _, low_tasks, high_tasks = across_seeds.seeds_and_tasks(table.reshape(1, -1), np.zeros((1, 400)))
  assert high - low > 2 * (high_tasks - low_tasks)


def test_area_and_height_by_hand():
  # Trapezoids: 10 * (0.2 + 0.4) / 2 + 30 * (0.4 + 0.8) / 2 = 3 + 18 = 21 over a width of 40.
  x, y = [0, 10, 40], [0.2, 0.4, 0.8]
  assert across_seeds.area(x, y) == pytest.approx(21 / 40)
  assert across_seeds.area([7], [0.3]) == 0.3
  # At a quarter of the way, x = 10; at 62.5 %, x = 25, halfway between 0.4 and 0.8.
  assert across_seeds.height(x, y, 0.25) == pytest.approx(0.4) and across_seeds.height(x, y, 0.625) == pytest.approx(
    0.6
  )
  assert across_seeds.height(x, y, 1.0) == 0.8 and across_seeds.height(x, y, 0.0) == 0.2
  with pytest.raises(ValueError, match="x ascending"):
    across_seeds.area([1, 0], [0.0, 0.0])


def test_first_reach_by_hand():
  x, y = [0, 10, 20, 30], [0.2, 0.4, 0.3, 0.6]
  assert across_seeds.first_reach(x, y, 0.3) == pytest.approx(5.0)  # the first time, not the last
  assert across_seeds.first_reach(x, y, 0.5) == pytest.approx(20 + 10 * 2 / 3)
  assert across_seeds.first_reach(x, y, 0.1) == 0.0 and across_seeds.first_reach(x, y, 0.6) == 30.0
  assert across_seeds.first_reach(x, y, 0.61) is None


def test_a_curve_is_cut_on_the_line_between_its_points():
  x, y = across_seeds.cut([0, 10, 20], [0.0, 0.5, 0.7], 12)
  assert x.tolist() == [0, 10, 12] and y.tolist() == pytest.approx([0.0, 0.5, 0.54])
  assert [part.tolist() for part in across_seeds.cut([0, 10, 20], [0.0, 0.5, 0.7], 10)] == [[0, 10], [0.0, 0.5]]
  assert [part.tolist() for part in across_seeds.cut([0, 10], [0.0, 0.5], 99)] == [[0, 10], [0.0, 0.5]]  # it is shorter
  assert [part.tolist() for part in across_seeds.cut([0, 0], [0.25, 0.25], 0)] == [[0, 0], [0.25, 0.25]]
