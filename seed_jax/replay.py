"""SPEAR's self-imitation as functions: which old episodes are kept, what they are worth now, which tokens they move.

Shapes: n episodes in the buffer, B rows, T tokens. Source: arXiv:2509.22601 and its public code. The buffer itself is
`replay_buffer`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from seed_jax.token_losses import per_token, same_shape


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
  """max_age: iterations that a sample stays. size: samples of the buffer, the newest stay. baselines: group means that
  the median is taken of. threshold: an episode enters with an advantage above it. coef, ramp: of the replay loss, over
  so many iterations from 0. Defaults are SPEAR's.
  """

  max_age: int = 5
  size: int = 2048
  baselines: int = 10_240
  threshold: float = 1.0
  coef: float = 1.0
  ramp: int = 100


def admitted(advantages, *, threshold: float = 1.0):
  """Which episodes enter the buffer, [n] bool: advantage > threshold."""
  return jnp.asarray(advantages, jnp.float32) > threshold


def replay_advantages(returns, baselines, *, count=None):
  """(advantages [n], kept [n] bool) of replayed episodes: R - P50(baselines); what is not above 0 is dropped and 0.

  The policy has grown since: an episode that was good then is measured against recent groups.

  Args:
    returns: [n] of the replayed episodes.
    baselines: [k] ring buffer of recent groups' mean returns (the paper keeps 10,240).
    count: how many entries of the ring buffer, from the first on, are filled; None: all. At 0 nothing is kept.
  """
  returns, baselines = jnp.asarray(returns, jnp.float32), jnp.asarray(baselines, jnp.float32)
  count = baselines.shape[0] if count is None else count
  filled = jnp.arange(baselines.shape[0]) < count
  median = jnp.nanmedian(jnp.where(filled, baselines, jnp.nan))
  advantages = returns - median  # NaN of an empty buffer compares as false
  kept = advantages > 0
  return jax.lax.stop_gradient(jnp.where(kept, advantages, 0.0)), kept


def cosine_ramp(iteration, *, peak: float = 1.0, iterations: int = 100):
  """peak * (1 - cos(pi * min(iteration / iterations, 1))) / 2: the coefficient of the replay loss, from 0 to `peak`.

  Iterations count from 0; with 0 `iterations` it is `peak` at once. The cosine form is that of SPEAR's settings as far
  as its code shows; the paper leaves it open (our reconstruction).
  """
  share = 1.0 if iterations <= 0 else min(iteration / iterations, 1.0)
  return peak * (1.0 - math.cos(math.pi * share)) / 2.0


def clip_cov_mask(
  key, *, logprobs, old_logprobs, advantages, mask, fraction=0.02, low=2.0, high=60.0, clip_low=0.2, clip_high=0.2
):
  """Clip-cov, [B, T]: 0 on tokens that are taken out of the surrogate, 1 on the others; multiplies a token's loss.

  A token's covariance is (A - mean A) * (logprob - mean logprob), means over the mask. Of the tokens with a covariance
  strictly between `low` and `high` that the clipping of the ratio does not cut already, max(1, floor(fraction *
  tokens)) are drawn at random (all, where there are fewer). It keeps the entropy from collapsing. Source:
  arXiv:2505.22617; SPEAR uses 0.02, 2, 60 on replayed episodes. All of the batch must be handed in.
  """
  logprobs, old_logprobs, mask = same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
  counted = mask > 0
  logprobs, old_logprobs = jnp.where(counted, logprobs, 0.0), jnp.where(counted, old_logprobs, 0.0)
  advantages = jnp.where(counted, per_token(advantages, mask, "advantages"), 0.0)
  tokens = jnp.sum(counted)
  covariance = 1.0
  for values in (advantages, logprobs):
    covariance = covariance * (values - jnp.sum(values) / jnp.maximum(tokens, 1))
  ratio = jnp.exp(logprobs - old_logprobs)
  clipped = jnp.where(advantages > 0, ratio > 1.0 + clip_high, (advantages < 0) & (ratio < 1.0 - clip_low))
  candidates = (covariance > low) & (covariance < high) & counted & ~clipped
  drawn = jnp.where(candidates, jax.random.uniform(key, mask.shape), jnp.inf)
  rank = jnp.argsort(jnp.argsort(drawn, axis=None)).reshape(mask.shape)
  number = jnp.maximum(jnp.floor(fraction * tokens), 1)
  return jax.lax.stop_gradient(1.0 - (candidates & (rank < number)).astype(jnp.float32))
