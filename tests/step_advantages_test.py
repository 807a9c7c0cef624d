"""Credit for steps: hand numbers and 200 random cases against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_references import by_group, close

from benchmarks.oracle_cases import case, cases, padded
from seed_jax import step_advantages


def test_discounted_returns():
  rewards = np.array([[0.0, 0.0, 10.0], [1.0, 2.0, 0.0]])
  out = step_advantages.discounted_returns(rewards, gamma=0.5)
  np.testing.assert_allclose(out, [[2.5, 5, 10], [2, 2, 0]])  # 10 / 4, 10 / 2, 10; 1 + 2 / 2, 2, 0
  np.testing.assert_allclose(step_advantages.discounted_returns(rewards[0])[0], 10 * 0.95**2, rtol=1e-6)


def test_anchor_ids_number_the_pairs_of_group_and_observation():
  ids = step_advantages.anchor_ids(["a", "b", "a", "a", "b"], [0, 0, 0, 1, -1])
  np.testing.assert_array_equal(ids, [0, 1, 0, 2, -1])
  with pytest.raises(ValueError, match="2 observations, 1 group_ids"):
    step_advantages.anchor_ids(["a", "b"], [0])


def test_gigpo_by_hand():
  # One task, two episodes of two steps: a wins. Both begin in s; then a sees t and b sees u.
  returns, groups = np.array([10.0, 10, 0, 0]), np.zeros(4, int)
  step_returns = np.array([9.5, 10.0, 0.0, 0.0])
  anchors = step_advantages.anchor_ids(["s", "t", "s", "u"], groups)
  common = dict(num_groups=1, num_anchors=3, normalize="mean")
  out = step_advantages.gigpo_advantages(returns, groups, step_returns, anchors, **common)
  np.testing.assert_allclose(out, [5 + 4.75, 5, -5 - 4.75, -5], rtol=1e-6)  # t and u: nobody else was there
  half = step_advantages.gigpo_advantages(returns, groups, step_returns, anchors, **common, step_weight=0.0)
  np.testing.assert_allclose(half, [5, 5, -5, -5])
  scaled = step_advantages.step_advantages(step_returns, anchors, num_groups=3)
  np.testing.assert_allclose(scaled, [0.707107, 0, -0.707107, 0], atol=1e-6)


def test_gigpo_on_200_cases():
  for number, c in enumerate(cases()):
    anchors = np.array([hash((int(g), number, i % 2)) % 5 for i, g in enumerate(c["groups"])])
    anchors = step_advantages.anchor_ids(anchors.tolist(), c["groups"])
    step = dict(rewards=c["advantages"], groups=anchors, num_groups=int(anchors.max()) + 1)
    spread = lambda r, k: (r[k] - r.mean()) / (r.std(ddof=1) + 1e-6)  # noqa: E731
    right = by_group(c, spread) + 0.5 * by_group(step, spread)
    big, wide = padded(c), padded(dict(groups=anchors))["groups"]
    out = step_advantages.gigpo_advantages(
      big["rewards"], big["groups"], big["advantages"], wide, num_groups=4, num_anchors=12, step_weight=0.5
    )
    equal = (
      by_group(c, lambda r, k: float(np.ptp(r) == 0)) > 0
    )  # the loop's mean of equal numbers rounds; ours is exact
    assert not np.asarray(out)[: len(right)][equal & (by_group(step, lambda r, k: 1.0) == 0)].any()
    close(np.asarray(out)[: len(right)][~equal], right[~equal], tolerance=5e-6, case=number)
    assert not np.asarray(out)[len(right) :].any()


def test_istar_on_200_cases():
  for number, c in enumerate(cases()):
    sums = [
      0.05 * sum(float(n) - float(o) for n, o, m in zip(*rows, strict=True) if m)
      for rows in zip(c["skill"], c["old"], c["mask"], strict=True)
    ]
    rewards = step_advantages.implicit_step_rewards(prm_logprobs=c["skill"], old_logprobs=c["old"], mask=c["mask"])
    close(rewards, sums, case=number)
    largest = max(map(abs, sums)) or 1.0
    step = dict(c, rewards=np.array(sums) / largest)
    right = by_group(c, lambda r, k: r[k] - r.mean()) + by_group(step, lambda r, k: r[k] - np.delete(r, k).mean())
    out = step_advantages.istar_advantages(
      c["rewards"], rewards, c["groups"], num_groups=c["num_groups"], normalize="mean"
    )
    close(out, right, tolerance=3e-6, case=number)


def test_istar_on_tokens_is_istar_on_steps():
  """A row is a turn; beta drops out, since rewards are divided by the largest."""
  for number, c in enumerate(cases(20)):
    rows, tokens = c["mask"].shape
    counted = c["mask"].any(axis=1)
    groups = np.where(counted, c["groups"], -1)
    rewards = step_advantages.implicit_step_rewards(prm_logprobs=c["skill"], old_logprobs=c["old"], mask=c["mask"])
    right = step_advantages.istar_advantages(
      np.zeros(rows), rewards, groups, num_groups=c["num_groups"], step_weight=0.3
    )
    out = step_advantages.istar_turn_advantages(
      advantages=c["advantages"],
      old_logprobs=c["old"],
      skill_logprobs=c["skill"],
      skill_mask=c["mask"],
      turn_ids=np.broadcast_to(np.arange(rows)[:, None], (rows, tokens)),
      group_ids=np.broadcast_to(c["groups"][:, None], (rows, tokens)),
      num_turns=rows + 3,
      num_groups=c["num_groups"],
      coef=0.3,
    )
    expected = c["advantages"][:, None] + np.where(c["mask"] > 0, np.asarray(right)[:, None], 0.0)
    close(out, expected, tolerance=3e-6, case=number)


def test_prm_loss_on_200_cases():
  loss = jax.jit(step_advantages.pairwise_prm_loss)
  for number, c in enumerate(cases()):
    won = c["advantages"] > 0
    pairs = [
      np.log1p(np.exp(float(c["rewards"][j]) - float(c["rewards"][i])))
      for i in np.flatnonzero(won)
      for j in np.flatnonzero(~won)
      if c["groups"][i] == c["groups"][j]
    ]
    big = padded(c)
    out = loss(scores=big["rewards"], group_ids=big["groups"], success=big["advantages"] > 0)
    close(out, np.mean(pairs) if pairs else 0.0, case=number)


def test_prm_gradient_parts_successes_from_failures():
  slope = jax.grad(
    lambda q: step_advantages.pairwise_prm_loss(
      scores=q, group_ids=np.array([0, 0, 0, 1]), success=np.array([1, 0, 0, 1])
    )
  )(jnp.zeros(4))
  np.testing.assert_allclose(slope, [-0.5, 0.25, 0.25, 0])  # two pairs, sigmoid(0) each; the last has no failure beside
  rewards = lambda x: step_advantages.implicit_step_rewards(  # noqa: E731
    prm_logprobs=x, old_logprobs=jnp.full((1, 2), jnp.nan), mask=np.zeros((1, 2))
  ).sum()
  assert not jax.grad(rewards)(jnp.full((1, 2), jnp.nan)).any()
  assert case(0)["members"] > 1
