"""Advantages: how much better a sample did than others: than its group (GRPO, RLOO) or than the batch (REINFORCE++).

Shapes: n samples (episodes, or steps of episodes), num_groups groups (one group = the episodes of one task).

All estimators are called alike, (returns, group_ids, *, num_groups, normalize, eps, weights) -> float32 of the shape of
`returns`, see `group_advantages`; arguments that an estimator has no use for are taken and not looked at. Dr. GRPO
(arXiv:2503.20783) is `group_advantages` with normalize="mean".
"""

from __future__ import annotations

import functools
import math

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
  above, ids, weights, total = _groups(returns, group_ids, weights, num_groups)
  count = total(jnp.ones_like(above))
  deviation = above - (total(above) / jnp.maximum(count, 1.0))[ids]
  if normalize == "mean_std":
    variance = total(jnp.square(deviation)) / jnp.maximum(count - 1.0, _SINGLE - 1.0)
    deviation = deviation / (jnp.sqrt(variance) + eps)[ids]
  return _without_singles(deviation, count[ids], weights, jnp.shape(returns))


@functools.partial(jax.jit, static_argnames=("num_groups", "normalize"))
def rloo_advantages(returns, group_ids, *, num_groups: int, normalize: str = "mean", eps: float = 0.0, weights=None):
  """RLOO: A_i = R_i - the mean of the group's OTHER samples, arXiv:2402.14740. A group of one gets 0 (verl keeps R).

  With n samples of weight 1 it is n / (n - 1) times R_i - mean_g. No deviation is divided by: `normalize` and `eps` are
  not looked at. A sample with weight leaves itself out with its weight; where samples are steps, the other steps of the
  episode stay in the baseline.
  """
  del normalize, eps
  above, ids, weights, total = _groups(returns, group_ids, weights, num_groups)
  count, summed = total(jnp.ones_like(above))[ids], total(above)[ids]
  others = count - weights
  # A sample that holds nearly all of its group's weight has no others: the rest would be a rounding.
  alone = others <= _SINGLE - 1.0
  baseline = (summed - weights * above) / jnp.where(alone, 1.0, others)
  return _without_singles(jnp.where(alone, 0.0, above - baseline), count, weights, jnp.shape(returns))


@functools.partial(jax.jit, static_argnames=("num_groups", "normalize"))
def batch_advantages(
  returns, group_ids, *, num_groups: int, normalize: str = "mean_std", eps: float = 1e-6, weights=None
):
  """REINFORCE++: (R_i - mean) / (std + eps) over ALL samples, arXiv:2501.03262. Groups only mark fill samples.

  Unbiased deviation. The public code weighs a sample by its tokens (it whitens token returns): hand in token counts as
  `weights` for that. Discounting over tokens is not here (its default gamma is 1).
  """
  ids = jnp.asarray(group_ids)
  ids = jnp.where((ids >= 0) & (ids < num_groups), 0, -1)
  return group_advantages(returns, ids, num_groups=1, normalize=normalize, eps=eps, weights=weights)


@functools.partial(jax.jit, static_argnames=("num_groups", "normalize"))
def group_batch_advantages(
  returns, group_ids, *, num_groups: int, normalize: str = "mean_std", eps: float = 1e-6, weights=None
):
  """REINFORCE++-baseline: the group's mean is taken off, then `batch_advantages`, arXiv:2501.03262.

  A group of one has 0 before the batch's statistics (verl keeps its raw return).
  """
  centred = group_advantages(returns, group_ids, num_groups=num_groups, normalize="mean", weights=weights)
  return batch_advantages(centred, group_ids, num_groups=num_groups, normalize=normalize, eps=eps, weights=weights)


@functools.partial(jax.jit, static_argnames="num_groups")
def unequal_groups(returns, group_ids, *, num_groups: int, weights=None):
  """DAPO's filter, [num_groups] bool: True where a group has two different returns, arXiv:2503.14476.

  The others (all succeeded, all failed, one member, none) carry no policy gradient; DAPO leaves them out of the batch
  and samples more tasks in their place.
  """
  above, ids, weights, _ = _groups(returns, group_ids, weights, num_groups)
  return jax.ops.segment_max(jnp.where(weights > 0, above, 0.0), ids, num_segments=num_groups) > 0


@functools.partial(jax.jit, static_argnames="num_groups")
def equal_groups(returns, group_ids, *, num_groups: int, weights=None):
  """The complement of `unequal_groups`, [num_groups] bool: the groups that have no policy gradient (SEED, Prop. 2)."""
  return ~unequal_groups(returns, group_ids, num_groups=num_groups, weights=weights)


@functools.partial(jax.jit, static_argnames=("num_groups", "share"))
def most_unequal_groups(returns, group_ids, *, num_groups: int, share: float = 0.75, weights=None):
  """SPEAR's filter, [num_groups] bool: the `share` of the groups, rounded up, whose returns have the largest deviation.

  Of equal ones the lower numbers; a group without a sample comes last. Source: arXiv:2509.22601, which keeps 75 %.
  """
  above, ids, weights, total = _groups(returns, group_ids, weights, num_groups)
  count = total(jnp.ones_like(above))
  variance = total(jnp.square(above - (total(above) / jnp.maximum(count, 1.0))[ids])) / jnp.maximum(count, 1.0)
  rank = jnp.argsort(jnp.argsort(-jnp.where(count > 0, variance, -1.0), stable=True))
  return rank < math.ceil(share * num_groups)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _groups(returns, group_ids, weights, num_groups):
  """Flat (returns above the group's smallest, ids, weights) and the weighted sum per group as a function."""
  returns = jnp.asarray(returns, jnp.float32)
  group_ids = jnp.asarray(group_ids)
  weights = jnp.ones(returns.shape, jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
  if not returns.shape == group_ids.shape == weights.shape:
    shapes = f"returns {returns.shape}, group_ids {group_ids.shape}, weights {weights.shape}"
    raise ValueError(f"{shapes}: want one shape, one entry a sample")
  ids = group_ids.reshape(-1)
  weights = jnp.where((ids >= 0) & (ids < num_groups), weights.reshape(-1), 0.0)
  counted = weights > 0
  ids = jnp.where(counted, ids, 0)
  returns = returns.reshape(-1)

  def total(values):
    return jax.ops.segment_sum(weights * values, ids, num_segments=num_groups)

  lowest = jax.ops.segment_min(jnp.where(counted, returns, jnp.inf), ids, num_segments=num_groups)
  return jnp.where(counted, returns - lowest[ids], 0.0), ids, weights, total


def _without_singles(advantages, count, weights, shape):
  advantages = jnp.where((weights > 0) & (count > _SINGLE), advantages, 0.0)
  return jax.lax.stop_gradient(advantages.reshape(shape))
