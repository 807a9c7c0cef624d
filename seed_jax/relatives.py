"""SEED's relatives: other losses per token, and other uses of the skill context, on the same numbers.

Shapes: B rows, T tokens; all arrays [B, T], aligned on the sampled tokens. All is computed and returned in float32.
logprobs: of the policy being trained, ordinary context; old_logprobs: of the policy at the start of the iteration's
updates; skill_logprobs: of the same tokens with the skill in context (the teacher), a constant everywhere.

Two kinds of functions:
- auxiliary losses (*, logprobs, skill_logprobs, old_logprobs, beta) -> [B, T], to be minimised beside the RL loss;
  `opd_loss` is one, with beta = 0 it is GRPO+OPSD's constant gate 1/2.
- advantage transforms (*, advantages, old_logprobs, skill_logprobs, skill_mask, coef) -> advantages [B, T]: identity
  where skill_mask is 0. `coef` may be a traced scalar.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seed_jax.token_losses import opd_gate, per_token, possible, same_shape

SKILL_SD_EXPONENT_CAP = 20.0
SKILL_SD_LOG_RATIO_CAP = 10.0


# --- auxiliary losses -------------------------------------------------------------------------------------------------


def skill_sd_loss(*, logprobs, skill_logprobs, old_logprobs, beta=None):
  """Skill-SD, [B, T]: rho * (exp(-d) - 1 + d), d = logprobs - skill_logprobs, rho = exp(logprobs - old_logprobs).

  The k3 estimate of KL(policy || skill context), weighed by the importance ratio. Gradient flows through both factors.
  The exponent -d is at most 20 and log rho at most 10 (as run in SDAR's code); beyond, a factor's gradient is that of
  the cut one. `beta` is not used. Source: arXiv:2604.10674, with the caps of the public code.
  """
  del beta
  logprobs, skill_logprobs, old_logprobs = same_shape(
    logprobs=logprobs, skill_logprobs=skill_logprobs, old_logprobs=old_logprobs
  )
  gap = logprobs - jax.lax.stop_gradient(skill_logprobs)
  # expm1 keeps the digits of a small gap; the gap outside the exponential is not cut.
  divergence = jnp.expm1(jnp.minimum(-gap, SKILL_SD_EXPONENT_CAP)) + gap
  ratio = jnp.exp(jnp.minimum(logprobs - jax.lax.stop_gradient(old_logprobs), SKILL_SD_LOG_RATIO_CAP))
  return ratio * divergence


def centred_opd_loss(*, logprobs, skill_logprobs, old_logprobs=None, beta=5.0):
  """SEED's loss with the gate's neutral value as a baseline, [B, T]: (gate - 1/2) * (skill_logprobs - logprobs).

  Its gradient in logprobs is -(gate - 1/2): what the skill makes less likely is pushed down, not up a little less. For
  tokens of the current policy the expectation is the same, since E[grad log pi] = 0 in every context, and the variance
  is less as a rule: the constant half of the gate is noise, which a large coefficient turns into imitation of whatever
  was sampled. Our reconstruction; no paper has it. `old_logprobs` is not used.
  """
  del old_logprobs
  logprobs, skill_logprobs = same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs)
  gate = opd_gate(logprobs=logprobs, skill_logprobs=skill_logprobs, beta=beta)
  return (gate - 0.5) * (jax.lax.stop_gradient(skill_logprobs) - logprobs)


def opsd_loss(*, logprobs, skill_logprobs, old_logprobs=None, beta=None):
  """OPSD on sampled tokens, [B, T]: -stop_gradient(skill_logprobs - logprobs) * logprobs.

  The policy-gradient form of KL(policy || skill context): unlike SEED's gate, its weight changes sign with the gap.
  `old_logprobs` and `beta` are not used. Source: arXiv:2601.18734 (whose main form is a divergence over the whole
  vocabulary, which needs logits and is not here).
  """
  del old_logprobs, beta
  logprobs, skill_logprobs = same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs)
  return -jax.lax.stop_gradient(skill_logprobs - logprobs) * logprobs


def no_auxiliary_loss(*, logprobs, skill_logprobs=None, old_logprobs=None, beta=None):
  """Zeros, [B, T]: for methods that score the skill context for their advantages alone; the gate is still measured."""
  del skill_logprobs, old_logprobs, beta
  return jnp.zeros(jnp.shape(logprobs), jnp.float32)


# --- advantage transforms ---------------------------------------------------------------------------------------------


def rlsd_advantages(*, advantages, old_logprobs, skill_logprobs, skill_mask, coef=0.5, clip=0.2):
  """RLSD, [B, T]: A * ((1 - coef) + coef * clip(exp(sign(A) * gap), 1 - clip, 1 + clip)), gap = skill - old logprobs.

  The sign of an advantage never changes while coef is in [0, 1] and clip below 1: the skill says which tokens earn the
  credit. `coef` decays over the run (`linear_decay`). Source: arXiv:2604.03128.
  """
  advantages, gap, skilled = _gap(advantages, old_logprobs, skill_logprobs, skill_mask)
  # Far outside the clip exp may overflow to infinity, which the clip takes back; no gradient passes here.
  weight = jnp.clip(jnp.exp(jnp.sign(advantages) * gap), 1.0 - clip, 1.0 + clip)
  return _where_skilled(skilled, advantages * ((1.0 - coef) + coef * weight), advantages)


def opid_advantages(*, advantages, old_logprobs, skill_logprobs, skill_mask, coef=0.001):
  """OPID, [B, T]: A + coef * (skill_logprobs - old_logprobs). Source: arXiv:2606.26790."""
  advantages, gap, skilled = _gap(advantages, old_logprobs, skill_logprobs, skill_mask)
  return _where_skilled(skilled, advantages + coef * gap, advantages)


def grsd_advantages(
  *,
  advantages,
  old_logprobs,
  skill_logprobs,
  skill_mask,
  turn_ids,
  group_ids,
  num_turns: int,
  num_groups: int,
  coef=0.5,
  clip=0.2,
  floor=0.1,
):
  """GRSD's re-weighting by turns, [B, T]: A * max(floor, 1 + coef * g), g one number a turn.

  delta = the turn's mean of skill_logprobs - old_logprobs; q = expm1(sign(A) * delta); g = clip(q / (mean |q| of the
  group), -clip, clip). Public code: BinbZheng1/GRSD. Our reconstruction: the group's mean takes each turn once,
  whatever its length; A of a turn is the mean over its tokens (in practice they are equal); a group whose |q| are all 0
  gets g = 0. Its other term, GRPO on reflections with a judge's score, is not here.

  Args:
    advantages, old_logprobs, skill_logprobs: [B, T].
    skill_mask: [B, T], 1 on sampled tokens with a skill; others enter no mean and keep their advantage.
    turn_ids: [B, T] int in [0, num_turns), a turn's number over ALL rows.
    group_ids: [B, T] int in [0, num_groups).
    num_turns, num_groups: static. A group must be handed in whole: its mean does not add up over micro-batches.
  """
  advantages, gap, skilled = _gap(advantages, old_logprobs, skill_logprobs, skill_mask)
  turns, groups = jnp.asarray(turn_ids).reshape(-1), jnp.asarray(group_ids).reshape(-1)
  known = (turns >= 0) & (turns < num_turns) & (groups >= 0) & (groups < num_groups)
  skilled = skilled & known.reshape(skilled.shape)
  here = skilled.reshape(-1)
  turns, groups = jnp.where(here, turns, 0), jnp.where(here, groups, 0)

  def turn_mean(values):
    total = jax.ops.segment_sum(jnp.where(here, values.reshape(-1), 0.0), turns, num_segments=num_turns)
    return total / jnp.maximum(tokens, 1.0)

  tokens = jax.ops.segment_sum(here.astype(jnp.float32), turns, num_segments=num_turns)
  q = jnp.expm1(jnp.minimum(jnp.sign(turn_mean(advantages)) * turn_mean(gap), SKILL_SD_EXPONENT_CAP))
  group_of = jax.ops.segment_max(jnp.where(here, groups, 0), turns, num_segments=num_turns)
  exists = tokens > 0
  group_of = jnp.where(exists, group_of, 0)
  total = jax.ops.segment_sum(jnp.where(exists, jnp.abs(q), 0.0), group_of, num_segments=num_groups)
  count = jax.ops.segment_sum(exists.astype(jnp.float32), group_of, num_segments=num_groups)
  scale = (total / jnp.maximum(count, 1.0))[group_of]
  g = jnp.where(scale > 0, jnp.clip(q / jnp.where(scale > 0, scale, 1.0), -clip, clip), 0.0)
  weight = jnp.maximum(floor, 1.0 + coef * g)[turns].reshape(skilled.shape)
  return _where_skilled(skilled, advantages * weight, advantages)


def linear_decay(iteration, *, start: float, iterations: int):
  """start * max(0, 1 - iteration / iterations), float32: RLSD's mix (0.5 over 100 iterations). 0 iterations: `start`.

  iteration: a number or a traced scalar, from 0.
  """
  if iterations <= 0:
    return jnp.asarray(start, jnp.float32)
  return start * jnp.maximum(0.0, 1.0 - jnp.asarray(iteration, jnp.float32) / iterations)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _gap(advantages, old_logprobs, skill_logprobs, skill_mask):
  old_logprobs, skill_logprobs = same_shape(old_logprobs=old_logprobs, skill_logprobs=skill_logprobs)
  advantages = per_token(advantages, old_logprobs, "advantages")
  skilled = per_token(skill_mask, old_logprobs, "skill_mask") > 0
  return advantages, jnp.where(skilled, possible(skill_logprobs, old_logprobs) - old_logprobs, 0.0), skilled


def _where_skilled(skilled, transformed, advantages):
  return jax.lax.stop_gradient(jnp.where(skilled, transformed, advantages))
