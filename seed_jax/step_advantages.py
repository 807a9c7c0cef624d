"""Credit for single steps: GiGPO's groups of equal observations, iStar's implicit step rewards.

Shapes: n steps (samples), E episodes, S steps of an episode, T tokens of a step. Ids outside [0, num_...) mark fill
samples, which get 0. `weights` are those of `group_advantages`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from seed_jax.advantages import group_advantages, rloo_advantages
from seed_jax.token_losses import per_token, same_shape

# --- GiGPO ------------------------------------------------------------------------------------------------------------


def discounted_returns(rewards, *, gamma: float = 0.95) -> np.ndarray:
  """R_t = sum_j gamma^j r_(t+j), [..., S] float32: GiGPO's step returns. Steps past an episode's end have reward 0.

  On the host: episodes have all lengths, each of which would be a program of its own.
  """
  returns = np.array(rewards, np.float32)
  for step in range(returns.shape[-1] - 2, -1, -1):
    returns[..., step] += np.float32(gamma) * returns[..., step + 1]
  return returns


def anchor_ids(observations: Sequence[Hashable], group_ids: Sequence[int]) -> np.ndarray:
  """Numbers the pairs (group, observation) in the order in which they come, [n] int32: GiGPO's step groups.

  Steps of one task that saw the same observation, whatever the episode and the time. Fill samples (group < 0) get -1.
  """
  if len(observations) != len(group_ids):
    raise ValueError(f"{len(observations)} observations, {len(group_ids)} group_ids: want one of each a step")
  numbers: dict = {}
  pairs = zip((int(g) for g in group_ids), observations, strict=True)
  return np.array([numbers.setdefault(pair, len(numbers)) if pair[0] >= 0 else -1 for pair in pairs], np.int32)


def step_advantages(
  step_returns, anchors, *, num_groups: int, normalize: str = "mean_std", eps: float = 1e-6, weights=None
):
  """GiGPO's A_step, [n]: how much better a step went on than the other steps from the same observation.

  `group_advantages` of `step_returns` (`discounted_returns`) in the groups of `anchor_ids`: a step whose observation
  nobody else saw gets 0. Source: arXiv:2505.10978.
  """
  return group_advantages(step_returns, anchors, num_groups=num_groups, normalize=normalize, eps=eps, weights=weights)


def gigpo_advantages(
  returns,
  group_ids,
  step_returns,
  anchors,
  *,
  num_groups: int,
  num_anchors: int,
  step_weight: float = 1.0,
  normalize: str = "mean_std",
  eps: float = 1e-6,
  weights=None,
):
  """GiGPO: A = A_episode + step_weight * A_step, [n], one sample a step; `returns` are those of the steps' episodes.

  step_weight = 0 leaves the plain GRPO that SEED's baselines run. Source: arXiv:2505.10978 eq. 7-9.
  """
  same = dict(normalize=normalize, eps=eps, weights=weights)
  episode = group_advantages(returns, group_ids, num_groups=num_groups, **same)
  return episode + step_weight * step_advantages(step_returns, anchors, num_groups=num_anchors, **same)


# --- iStar ------------------------------------------------------------------------------------------------------------


def implicit_step_rewards(*, prm_logprobs, old_logprobs, mask, beta=0.05):
  """iStar's r = beta * sum over a step's tokens of (prm_logprobs - old_logprobs), [n] from [n, T]; a row is a step.

  prm_logprobs: of the implicit process reward model, a copy of the policy that `pairwise_prm_loss` trains.
  Source: arXiv:2509.19199. Gradient flows through prm_logprobs alone.
  """
  prm_logprobs, old_logprobs, mask = same_shape(prm_logprobs=prm_logprobs, old_logprobs=old_logprobs, mask=mask)
  prm_logprobs = jnp.where(mask > 0, prm_logprobs, 0.0)
  old_logprobs = jnp.where(mask > 0, jax.lax.stop_gradient(old_logprobs), 0.0)
  return beta * jnp.sum(mask * (prm_logprobs - old_logprobs), axis=-1)


def istar_advantages(
  returns,
  step_rewards,
  group_ids,
  *,
  num_groups: int,
  step_weight: float = 1.0,
  step_advantage=rloo_advantages,
  normalize: str = "mean_std",
  eps: float = 1e-6,
  weights=None,
):
  """iStar: A = A_episode + step_weight * A_step, [n]; A_step is RLOO of step_rewards / max |step_rewards| in the group.

  The maximum runs over the whole batch. `step_advantage` may be another estimator (`group_advantages`). The public code
  takes only the first step of each trajectory into a step's baseline; here all of the group's steps are in it (our
  reconstruction of the paper). Source: arXiv:2509.19199.
  """
  ids = jnp.asarray(group_ids)
  counted = (ids >= 0) & (ids < num_groups)
  if weights is not None:
    counted &= jnp.asarray(weights) > 0
  same = dict(num_groups=num_groups, normalize=normalize, eps=eps, weights=weights)
  scaled = _largest_is_one(jnp.asarray(step_rewards, jnp.float32), counted)
  return group_advantages(returns, ids, **same) + step_weight * step_advantage(scaled, ids, **same)


def istar_turn_advantages(
  *,
  advantages,
  old_logprobs,
  skill_logprobs,
  skill_mask,
  turn_ids,
  group_ids,
  num_turns: int,
  num_groups: int,
  coef=1.0,
):
  """iStar's step credit on tokens, [B, T]: A + coef * A_step of the token's turn, A handed in being A_episode.

  A turn is a step. A_step is that of `istar_advantages` with RLOO; `implicit_step_rewards`' beta falls out of it, for
  the rewards are divided by the largest. `skill_logprobs` are those of the process reward model, `skill_mask` is 1 on
  the tokens that count; other tokens keep their advantage. Ids as in `grsd_advantages`: groups must be whole.
  """
  old_logprobs, prm_logprobs, mask = same_shape(old_logprobs=old_logprobs, prm_logprobs=skill_logprobs, mask=skill_mask)
  advantages = per_token(advantages, mask, "advantages")
  turns, groups, here = (jnp.asarray(x).reshape(-1) for x in (turn_ids, group_ids, mask > 0))
  here &= (turns >= 0) & (turns < num_turns) & (groups >= 0) & (groups < num_groups)
  turns = jnp.where(here, turns, 0)
  gaps = jnp.where(here, (prm_logprobs - old_logprobs).reshape(-1), 0.0)
  rewards = jax.ops.segment_sum(gaps, turns, num_segments=num_turns)
  group_of = jax.ops.segment_max(jnp.where(here, groups, -1), turns, num_segments=num_turns)
  group_of = jnp.maximum(group_of, -1)  # a turn without a token: no group
  steps = rloo_advantages(_largest_is_one(rewards, group_of >= 0), group_of, num_groups=num_groups)
  added = jnp.where(here, coef * steps[turns], 0.0).reshape(advantages.shape)
  return jax.lax.stop_gradient(advantages + added)


def _largest_is_one(rewards, counted):
  """The rewards over the largest of their sizes, 0 where one does not count."""
  largest = jnp.max(jnp.where(counted, jnp.abs(rewards), 0.0), initial=0.0)
  return jnp.where(counted, rewards / jnp.where(largest > 0, largest, 1.0), 0.0)


def pairwise_prm_loss(*, scores, group_ids, success):
  """iStar's loss of the process reward model, a scalar: mean of -log sigmoid(q_success - q_failure) over all pairs.

  Pairs are those of one success and one failure in the same group; without a pair the loss is 0. Our reconstruction:
  the mean over all pairs of the batch (each pair once). Source: arXiv:2509.19199.

  Args:
    scores: [E] q of an episode: the mean over its steps of `implicit_step_rewards`. Carries the gradient.
    group_ids: [E] int, the episode's task; below 0: not counted.
    success: [E] bool.
  """
  scores, ids, success = jnp.asarray(scores, jnp.float32), jnp.asarray(group_ids), jnp.asarray(success, bool)
  pairs = (ids[:, None] == ids[None, :]) & (ids[:, None] >= 0) & success[:, None] & ~success[None, :]
  losses = jnp.where(pairs, jax.nn.softplus(scores[None, :] - scores[:, None]), 0.0)
  return jnp.sum(losses) / jnp.maximum(jnp.sum(pairs), 1)
