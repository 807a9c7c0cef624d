"""Group advantages against hand numbers, quoted right values and a plain loop in float64."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_references import by_group, close

from benchmarks.oracle_cases import cases, padded
from seed_jax import advantages, losses
from seed_jax.advantages import group_advantages

FIXED = hypothesis.settings(derandomize=True, deadline=None, max_examples=30, database=None)


def by_hand(returns, ids, normalize="mean_std", eps=1e-6):
  """One group at a time in float64."""
  out = np.zeros(len(returns))
  for group in set(ids.tolist()):
    members = np.flatnonzero(ids == group)
    scores = np.asarray(returns, np.float64)[members]
    if len(members) > 1:
      scale = scores.std(ddof=1) + eps if normalize == "mean_std" else 1.0
      out[members] = (scores - scores.mean()) / scale
  return out


def test_hand_numbers():
  returns = np.array([1.0, 3.0, 10.0, 0.0, 0.0, 10.0, 7.0])
  ids = np.array([0, 0, 1, 1, 1, 1, 2])
  # group 0: mean 2, std sqrt((1 + 1) / 1) = 1.414214, so -+ 1 / 1.414215 = -+0.707106
  # group 1: mean 5, std sqrt(4 * 25 / 3) = 5.773503, so +- 5 / 5.773504 = +-0.866025
  # group 2: one member, 0
  expected = [-0.707106, 0.707106, 0.866025, -0.866025, -0.866025, 0.866025, 0.0]
  np.testing.assert_allclose(group_advantages(returns, ids, num_groups=3), expected, atol=1e-6)
  centred = group_advantages(returns, ids, num_groups=3, normalize="mean")
  np.testing.assert_allclose(centred, [-1, 1, 5, -5, -5, 5, 0], atol=1e-6)
  # eps = 1 on group 0: 1 / 2.414214 = 0.414214
  np.testing.assert_allclose(
    group_advantages(returns, ids, num_groups=3, eps=1.0)[:2], [-0.414214, 0.414214], atol=1e-6
  )


@pytest.mark.parametrize("normalize", ["mean_std", "mean"])
@pytest.mark.parametrize("value", [0.1, 0.3, 10.0, 1e4, -1 / 3])
@pytest.mark.parametrize("members", [1, 3, 7, 11])
def test_equal_returns_give_exactly_zero(normalize, value, members):
  # 0.1 summed eleven times and divided by eleven is not 0.1 in float32: the rounding must not be divided by eps.
  out = group_advantages(np.full(members, value), np.zeros(members, int), num_groups=1, normalize=normalize)
  np.testing.assert_array_equal(out, np.zeros(members))


def test_ids_in_any_order_and_groups_without_a_sample():
  returns, ids = np.array([5.0, 1.0, 2.0, 3.0]), np.array([6, 2, 6, 2])
  out = group_advantages(returns, ids, num_groups=9)
  np.testing.assert_allclose(out, by_hand(returns, ids), atol=1e-6)
  assert group_advantages(np.zeros(0), np.zeros(0, int), num_groups=4).shape == (0,)


def test_samples_left_out_get_zero_and_do_not_count():
  returns, ids = np.array([1.0, np.nan, 3.0, np.inf, 8.0]), np.array([0, 0, 0, 1, 1])
  out = group_advantages(returns, ids, num_groups=2, weights=np.array([True, False, True, False, True]))
  # group 0 without the failed episode is {1, 3}; group 1 shrinks to one member
  np.testing.assert_allclose(out, [-0.707106, 0, 0.707106, 0, 0], atol=1e-6)
  outside = group_advantages(np.array([1.0, 50.0, 3.0, 50.0, 1.0, 3.0]), np.array([0, -1, 0, 7, 1, 1]), num_groups=2)
  np.testing.assert_allclose(outside, [-0.707106, 0, 0.707106, 0, -0.707106, 0.707106], atol=1e-6)


def test_weights_count_repeats():
  returns, ids, repeats = np.array([1.0, 4.0, 2.0, 0.0]), np.array([0, 0, 1, 1]), np.array([3, 2, 1, 4])
  weighted = group_advantages(returns, ids, num_groups=2, weights=repeats)
  repeated = group_advantages(np.repeat(returns, repeats), np.repeat(ids, repeats), num_groups=2)
  np.testing.assert_allclose(np.repeat(weighted, repeats), repeated, atol=1e-6)


def test_statistics_per_step_and_per_trajectory():
  # One group: an episode of 5 steps that failed (0), one of 2 steps and one of 1 step that succeeded (10 each).
  steps, episode = np.array([5, 2, 1]), np.array([0.0, 10.0, 10.0])
  returns, ids = np.repeat(episode, steps), np.zeros(8, int)
  # per step: mean 30/8 = 3.75, variance (5 * 3.75^2 + 3 * 6.25^2) / 7 = 26.785714, std 5.175492
  per_step = group_advantages(returns, ids, num_groups=1)
  np.testing.assert_allclose(per_step, np.repeat([-3.75, 6.25, 6.25], steps) / 5.175492, atol=1e-5)
  # per trajectory: mean 6.666667, std sqrt((44.44 + 2 * 11.11) / 2) = 5.773503
  per_trajectory = group_advantages(returns, ids, num_groups=1, weights=np.repeat(1 / steps, steps))
  np.testing.assert_allclose(per_trajectory, np.repeat([-1.154700, 0.577350, 0.577350], steps), atol=1e-5)


@pytest.mark.parametrize("normalize", ["mean_std", "mean"])
def test_one_trajectory_alone_gives_zero_even_where_its_steps_differ(normalize):
  for steps in (1, 3, 5, 6, 7, 11):  # some of these shares of 1 sum to a little more than 1 in float32
    scores, ids, weights = -0.1 * np.arange(steps), np.zeros(steps, int), np.full(steps, 1 / steps)
    out = group_advantages(scores, ids, num_groups=1, weights=weights, normalize=normalize)
    np.testing.assert_array_equal(out, np.zeros(steps))


@FIXED
@hypothesis.given(seed=st.integers(0, 2**31), groups=st.integers(1, 5), normalize=st.sampled_from(["mean_std", "mean"]))
def test_equals_a_plain_loop(seed, groups, normalize):
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, groups, 16)
  returns = rng.choice([0.0, 10.0, 9.9, 1.5], 16).astype(np.float32)
  out = group_advantages(returns, ids, num_groups=groups, normalize=normalize)
  np.testing.assert_allclose(out, by_hand(returns, ids, normalize), atol=2e-5)


def test_jit_shape_dtype_and_gradient():
  returns, ids = jnp.arange(6.0).reshape(2, 3), jnp.array([[0, 0, 1], [1, 0, 1]])
  function = jax.jit(lambda r: group_advantages(r, ids, num_groups=2))
  out = function(returns.astype(jnp.bfloat16))
  assert out.shape == (2, 3) and out.dtype == jnp.float32
  np.testing.assert_allclose(out.reshape(-1), by_hand(np.arange(6.0), np.asarray(ids).reshape(-1)), atol=1e-6)
  assert not jax.grad(lambda r: function(r)[0, 0])(returns).any()
  assert losses.group_advantages is group_advantages


def test_errors_are_one_clear_line():
  with pytest.raises(ValueError, match="normalize='std' is unknown; choose one of mean_std, mean"):
    group_advantages(np.ones(2), np.zeros(2, int), num_groups=1, normalize="std")
  with pytest.raises(ValueError, match=r"returns \(2,\), group_ids \(3,\)"):
    group_advantages(np.ones(2), np.zeros(3, int), num_groups=1)


# --- the other estimators ---------------------------------------------------------------------------------------------

LOOPS = {
  "group_advantages": ("mean_std", lambda r, k: (r[k] - r.mean()) / (r.std(ddof=1) + 1e-6) if np.ptp(r) else 0.0),
  "dr_grpo": ("mean", lambda r, k: r[k] - r.mean()),
  "rloo_advantages": ("mean", lambda r, k: r[k] - np.delete(r, k).mean()),
}


@pytest.mark.parametrize("name", LOOPS)
def test_200_cases_against_loops(name):
  normalize, loop = LOOPS[name]
  function = getattr(advantages, "group_advantages" if name == "dr_grpo" else name)
  for number, c in enumerate(cases()):
    big = padded(c)
    out = function(big["rewards"], big["groups"], num_groups=4, normalize=normalize)
    assert not np.asarray(out)[len(c["groups"]) :].any()
    right = by_group(c, loop)
    # a difference of float32 rewards keeps 6e-8 of them; the deviation, small in a few groups, divides it
    close(out[: len(right)], right, tolerance=3e-6, case=number)
    kept = advantages.unequal_groups(big["rewards"], big["groups"], num_groups=4)
    for group in range(4):
      assert kept[group] == (len(set(c["rewards"][c["groups"] == group].tolist())) > 1)
    tied = advantages.equal_groups(big["rewards"], big["groups"], num_groups=4)
    assert (np.asarray(tied) != np.asarray(kept)).all()


def test_batch_advantages_on_200_cases():
  for number, c in enumerate(cases()):
    big = padded(c)
    raw = c["rewards"].astype(np.float64)
    centred = by_group(c, lambda r, k: r[k] - r.mean())
    for function, values in ((advantages.batch_advantages, raw), (advantages.group_batch_advantages, centred)):
      out = function(big["rewards"], big["groups"], num_groups=4)[: len(raw)]
      deviation = values.std(ddof=1)
      right = (values - values.mean()) / (deviation + 1e-6) if deviation > 1e-9 else 0 * values
      close(out, right, tolerance=3e-6, case=number)


def test_rloo_by_hand():
  returns, ids = np.array([10.0, 0.0, 4.0, 7.0]), np.array([0, 0, 0, 1])
  # 10 - (0 + 4) / 2, 0 - 14 / 2, 4 - 10 / 2; one alone: 0
  np.testing.assert_allclose(advantages.rloo_advantages(returns, ids, num_groups=2), [8, -7, -1, 0], rtol=1e-6)
  weights = np.array([1, 2, 0, 1])
  # the third is left out: 10 - 0, 0 - 10
  out = advantages.rloo_advantages(returns, ids, num_groups=2, weights=weights)
  np.testing.assert_allclose(out, [10, -10 / 1, 0, 0], rtol=1e-6)
  equal = advantages.rloo_advantages(np.full(7, 0.1), np.zeros(7, int), num_groups=1)
  np.testing.assert_array_equal(equal, np.zeros(7))


def test_every_estimator_is_called_alike():
  returns, ids = np.array([1.0, 2.0, 5.0, 9.0, 7.0]), np.array([0, 0, 1, -1, 2])  # the last two are fill
  for function in (
    advantages.group_advantages,
    advantages.rloo_advantages,
    advantages.batch_advantages,
    advantages.group_batch_advantages,
  ):
    out = function(returns, ids, num_groups=2, normalize="mean_std", eps=1e-6, weights=np.ones(5))
    assert out.shape == (5,) and out.dtype == jnp.float32 and not out[3:].any() and out[1] > out[0]


def test_the_most_unequal_groups_stay():
  returns = np.array([1.0, 1.0, 0.0, 10.0, 0.0, 4.0, 3.0, 3.0])
  groups = np.array([0, 0, 1, 1, 2, 2, 3, 3])
  keep = lambda **options: advantages.most_unequal_groups(returns, groups, num_groups=4, **options).tolist()  # noqa: E731
  assert keep() == [True, True, True, False]  # of the two ties the first
  assert keep(share=0.5) == [False, True, True, False] and keep(share=0.3) == [False, True, True, False]
  assert keep(weights=groups != 1) == [True, False, True, True]  # an episode that broke off counts nowhere
