"""Advantages: how much better a sample did than the other samples of its group.

Shapes: n samples (episodes, or steps of episodes), num_groups groups (one group = the episodes of one task).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

NORMALIZATIONS = ("mean_std", "mean")
_SINGLE = 1.0 + 1e-3  # total weight of a group of one; the margin absorbs the rounding of fractional weights


# Compiled as a whole, so that the host side can call it: one compilation for each n and num_groups.
@functools.partial(jax.jit, static_argnames=("num_groups", "normalize"))
def group_advantages(
  returns, group_ids, *, num_groups: int, normalize: str = "mean_std", eps: float = 1e-6, weights=None
):
  """Group-relative advantages: A_i = (R_i - mean_g) / (std_g + eps), or R_i - mean_g with `normalize="mean"`.

  The standard deviation is the unbiased one (n - 1). Where public code disagrees or breaks, this is what holds here:
  - A group of one gets 0, for its baseline is unknown (verl takes mean 0 and std 1; tunix gives NaN).
  - A group of equal returns gets exactly 0. Sums are taken relative to the group's smallest return: the mean of n equal
    numbers can be off by a rounding, which a division by eps = 1e-6 would blow up to an advantage of order one.
  - The statistics run over the samples handed in. The SEED paper takes one sample per trajectory, its code one per
    step, so that long episodes weigh more. Both fit: hand in episodes, or steps, or steps with the weights
    1 / (steps of the episode) for the paper's statistics on steps.

  Args:
    returns: [n] (any shape) one score per sample.
    group_ids: the same shape, integers. Ids outside [0, num_groups) mark fill samples: in no group, advantage 0.
    num_groups: static; groups without a sample are fine.
    normalize: "mean_std" (GRPO, arXiv:2402.03300) or "mean" (no division, as in Dr. GRPO; SEED on WebShop).
    eps: added to the standard deviation.
    weights: None, or the same shape, >= 0: how often a sample counts in its group's statistics. False or 0 leaves it
      out (an episode whose environment failed): it gets 0, whatever its return, NaN included.

  Returns:
    float32, the shape of `returns`. Constants for the loss: no gradient flows.

  Raises:
    ValueError: unequal shapes, or an unknown `normalize`.
  """
  if normalize not in NORMALIZATIONS:
    raise ValueError(f"normalize={normalize!r} is unknown; choose one of {', '.join(NORMALIZATIONS)}")
  returns = jnp.asarray(returns, jnp.float32)
  group_ids = jnp.asarray(group_ids)
  weights = jnp.ones(returns.shape, jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
  if not returns.shape == group_ids.shape == weights.shape:
    shapes = f"returns {returns.shape}, group_ids {group_ids.shape}, weights {weights.shape}"
    raise ValueError(f"{shapes}: want one shape, one entry a sample")
  shape, ids = returns.shape, group_ids.reshape(-1)
  weights = jnp.where((ids >= 0) & (ids < num_groups), weights.reshape(-1), 0.0)
  counted = weights > 0
  ids = jnp.where(counted, ids, 0)
  returns = returns.reshape(-1)

  def total(values):
    return jax.ops.segment_sum(weights * values, ids, num_segments=num_groups)

  lowest = jax.ops.segment_min(jnp.where(counted, returns, jnp.inf), ids, num_segments=num_groups)
  above = jnp.where(counted, returns - lowest[ids], 0.0)
  count = total(jnp.ones_like(above))
  deviation = above - (total(above) / jnp.maximum(count, 1.0))[ids]
  if normalize == "mean_std":
    variance = total(jnp.square(deviation)) / jnp.maximum(count - 1.0, _SINGLE - 1.0)
    deviation = deviation / (jnp.sqrt(variance) + eps)[ids]
  alone = (count <= _SINGLE)[ids]
  advantages = jnp.where(counted & ~alone, deviation, 0.0)
  return jax.lax.stop_gradient(advantages.reshape(shape))
