"""Losses as sums over a batch, next to the denominators that belong to them; `losses` re-exports and divides them.

Shapes: B rows, T tokens. A [B, T] array is aligned on the sampled tokens; masks hold 1 where one counts.
Sums add up over micro-batches and hosts. A masked position has no influence and gradient exactly 0, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from seed_jax.sequences import AGGREGATIONS, count_sequences, token_ratios, token_weights
from seed_jax.token_losses import (
  kl_penalty,
  opd_gate,
  opd_loss,
  per_token,
  possible,
  same_shape,
  surrogate_of_ratio,
  truncated_importance_weights,
)

Terms = dict[str, dict[str, jax.Array]]


def token_counts(*, mask, skill_mask=None, sequence_ids=None) -> dict[str, jax.Array]:
  """The denominators: {"tokens": sum(mask), "skill_tokens": sum(mask * skill_mask), "sequences": the number of
  sequences with a token}; skill_mask [B, T], [B] or None; sequence_ids [B, T], or None where each row is one sequence.

  They add over micro-batches and hosts; the sum over the whole batch is what `denominators=` of the losses takes.
  """
  mask = jnp.asarray(mask, jnp.float32)
  return {
    "tokens": jnp.sum(mask),
    "skill_tokens": jnp.sum(_skill_mask(mask, skill_mask)),
    "sequences": count_sequences(mask=mask, sequence_ids=sequence_ids),
  }


def grpo_terms(
  *,
  logprobs,
  old_logprobs,
  advantages,
  mask,
  ref_logprobs=None,
  sampler_logprobs=None,
  entropy=None,
  clip_low=0.2,
  clip_high=0.2,
  dual_clip: float | None = 3.0,
  tis_cap: float | None = None,
  kl_estimator: str = "k3",
  ratios: Callable = token_ratios,
  aggregation: str = "token_mean",
  aggregation_length: float | None = None,
  sequence_ids=None,
) -> Terms:
  """Sums over this batch of all that GRPO averages; see `grpo_loss` for the arguments.

  The terms of the objective (pg_loss, kl, entropy) are weighed and divided as `aggregation` says, metrics by tokens.
  """
  if sampler_logprobs is None and tis_cap is not None:
    raise ValueError(f"tis_cap={tis_cap} needs sampler_logprobs=[B, T], got None")
  logprobs, old_logprobs, mask = same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
  weights = token_weights(mask=mask, sequence_ids=sequence_ids, aggregation=aggregation, length=aggregation_length)
  # Cleared before any arithmetic: of a NaN that is masked later 0 * NaN is left in the gradient, and a ratio of a whole
  # sequence hands it to the tokens beside it.
  logprobs, old_logprobs = _clear(logprobs, mask), _clear(old_logprobs, mask)
  advantages = _clear(per_token(advantages, logprobs, "advantages"), mask)
  ratio = ratios(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask, sequence_ids=sequence_ids)
  clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
  objective = {"pg_loss": surrogate_of_ratio(ratio=ratio, advantages=advantages, **clip)}
  values = {
    "ratio_mean": ratio,
    "clip_low_fraction": (advantages < 0) & (ratio < 1.0 - clip_low),
    "clip_high_fraction": (advantages > 0) & (ratio > 1.0 + clip_high),
    "dual_clip_fraction": (advantages < 0) & (ratio > (jnp.inf if dual_clip is None else dual_clip)),
    # KL(old || current), since the samples come from the old policy.
    "old_kl": kl_penalty(logprobs=old_logprobs, ref_logprobs=logprobs),
  }
  if ref_logprobs is not None:
    objective["kl"] = kl_penalty(logprobs=logprobs, ref_logprobs=ref_logprobs, estimator=kl_estimator)
  if entropy is not None:
    _, objective["entropy"] = same_shape(logprobs=logprobs, entropy=entropy)
  largest = {}
  if sampler_logprobs is not None:
    _, sampler_logprobs = same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    sampler_logprobs = _clear(sampler_logprobs, mask)
    gap = jnp.abs(sampler_logprobs - old_logprobs)
    # KL(sampler || old): the tokens are the sampler's.
    values |= {
      "mismatch_mean": gap,
      "mismatch_kl": kl_penalty(logprobs=sampler_logprobs, ref_logprobs=old_logprobs),
    }
    largest = {"largest": {"mismatch_max": jax.lax.stop_gradient(jnp.max(gap, initial=0.0))}}
  if tis_cap is not None:
    tis = truncated_importance_weights(old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs, cap=tis_cap)
    objective["pg_loss"] = tis * objective["pg_loss"]
    values |= {"tis_weight_mean": tis, "tis_capped_fraction": tis >= tis_cap}
  zero = jnp.zeros((), jnp.float32)
  terms = {"tokens": {name: masked_sum(value, mask) for name, value in values.items()}} | largest
  sums = {"kl": zero, "entropy": zero} | {name: masked_sum(value, weights) for name, value in objective.items()}
  denominator = AGGREGATIONS[aggregation]
  return terms | {denominator: terms.get(denominator, {}) | sums}


def opd_terms(
  *, logprobs, skill_logprobs, mask, skill_mask, old_logprobs=None, opd_beta=5.0, token_loss: Callable = opd_loss
) -> Terms:
  """Sums of the distillation term and of the gate's statistics over the tokens where mask * skill_mask is 1.

  `token_loss(*, logprobs, skill_logprobs, old_logprobs, beta)` is any auxiliary loss per token; without `old_logprobs`
  the policy is taken to be the one at the start of the updates. The term is a mean over tokens in every aggregation, as
  in the official code. `gate_square` is the second moment about one half (about the mean it would not add up, about
  zero it would lose the digits of a nearly constant gate). A token that is impossible with the skill, skill_logprobs
  -inf, counts as `token_losses.possible` says.

  Raises:
    ValueError: arrays, or a result of `token_loss`, of another shape than `logprobs`.
  """
  logprobs, skill_logprobs, mask = same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs, mask=mask)
  active = _skill_mask(mask, skill_mask)
  logprobs = _clear(logprobs, active)
  skill_logprobs = possible(skill_logprobs, logprobs)
  old_logprobs = jax.lax.stop_gradient(logprobs if old_logprobs is None else old_logprobs)
  found = token_loss(logprobs=logprobs, skill_logprobs=skill_logprobs, old_logprobs=old_logprobs, beta=opd_beta)
  if jnp.shape(found) != logprobs.shape:  # a row's or a scalar would broadcast, and be another loss
    name = getattr(token_loss, "__name__", repr(token_loss))
    raise ValueError(
      f"the auxiliary loss {name} gave shape {jnp.shape(found)} for logprobs of shape {logprobs.shape}; it must give "
      "one value a token"
    )
  gate = opd_gate(logprobs=logprobs, skill_logprobs=skill_logprobs, beta=opd_beta)
  values = {
    "opd_loss": found,
    "gate_mean": gate,
    "gate_square": jnp.square(gate - 0.5),
    "gate_above_half": gate > 0.5,
    "gap_mean": jax.lax.stop_gradient(skill_logprobs - logprobs),
  }
  sums = {name: masked_sum(value, active) for name, value in values.items()}
  return {"skill_tokens": sums, "tokens": {"opd_active_ratio": jnp.sum(active)}}


# --- helpers ----------------------------------------------------------------------------------------------------------


def _skill_mask(mask, skill_mask):
  if skill_mask is None:
    return jnp.zeros_like(mask)
  return mask * per_token(skill_mask, mask, "skill_mask")


def _clear(values, mask):
  return jnp.where(mask > 0, jnp.asarray(values, jnp.float32), 0.0)


def masked_sum(values, mask):
  """sum(mask * values), in which a value under a zero mask has no influence, even NaN."""
  return jnp.sum(mask * _clear(values, mask))
