"""Losses as functions of numbers: per token, then as sums, then as one scalar. No model, no configuration, no device.

Shapes: B rows, T tokens, V vocabulary. A [B, T] array is aligned on the sampled tokens; masks hold 1 where one counts.
All is computed and returned in float32, whatever comes in (numpy too); losses per token are to be minimised.
logprobs: log-softmax of the float32 logits over the full vocabulary at the temperature of the rollout, in nats.

Three layers, so that denominators can be global:
- per token (token_losses.py): clipped_surrogate, kl_penalty, opd_gate, opd_loss, nll, token_entropy,
  truncated_importance_weights.
- sums: grpo_terms, opd_terms give {denominator: {name: sum over this batch}}, which add over micro-batches and hosts.
- scalars: grpo_loss, seed_loss are sums / denominators. With `denominators=token_counts(<whole batch>)` a micro-batch
  returns its share: shares of loss, gradient and metrics ADD up to the whole batch's (`add_metrics`: of a metric named
  `..._max` the larger counts); `finish_metrics` closes the sum.

Three policies may differ. `sampler_logprobs` are those of the one that sampled, as the sampler itself reported them:
another precision, or, with rollouts ahead of the updates, older parameters. `old_logprobs` are the trainer's own at the
start of the iteration's updates: the centre of the clipping. `logprobs` are the policy being trained. With `tis_cap`
the surrogate, centred at `old`, is weighed by min(old / sampler, tis_cap): the decoupled objective (arXiv:2110.00641)
with a truncated weight. Off, `old` stands for the sampler. What lies between the two is measured always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from seed_jax.advantages import group_advantages as group_advantages  # re-exported: the public name lives here
from seed_jax.token_losses import (  # noqa: F401  (re-exported, too)
  K3_LIMIT,
  KL_ESTIMATORS,
  clipped_surrogate,
  kl_penalty,
  nll,
  opd_gate,
  opd_loss,
  per_token,
  ratio_and_advantages,
  same_shape,
  token_entropy,
  truncated_importance_weights,
)

Terms = dict[str, dict[str, jax.Array]]


def masked_mean(values, mask):
  """sum(mask * values) / sum(mask) as a float32 scalar; 0 on an empty mask.

  Values under a zero mask have no influence and gradient exactly 0, even NaN and infinities. A loss upstream may still
  turn that 0 into 0 * inf: clear its inputs with the mask first, as the sums below do.
  """
  values, mask = same_shape(values=values, mask=mask)
  return _divide(_masked_sum(values, mask), jnp.sum(mask))


# --- sums -----------------------------------------------------------------------------------------------------------


def token_counts(*, mask, skill_mask=None) -> dict[str, jax.Array]:
  """The denominators: {"tokens": sum(mask), "skill_tokens": sum(mask * skill_mask)}; skill_mask [B, T], [B] or None.

  They add over micro-batches and hosts; the sum over the whole batch is what `denominators=` of the losses takes.
  """
  mask = jnp.asarray(mask, jnp.float32)
  return {"tokens": jnp.sum(mask), "skill_tokens": jnp.sum(_skill_mask(mask, skill_mask))}


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
) -> Terms:
  """Sums over this batch of all that GRPO averages over tokens; see `grpo_loss` for the arguments.

  A masked position has gradient exactly 0 whatever it holds, for `logprobs` are cleared before any arithmetic.
  """
  if sampler_logprobs is None and tis_cap is not None:
    raise ValueError(f"tis_cap={tis_cap} needs sampler_logprobs=[B, T], got None")
  logprobs, old_logprobs, mask = same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
  logprobs = _clear(logprobs, mask)
  ratio, advantages = ratio_and_advantages(logprobs, old_logprobs, advantages)
  clip = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
  values = {
    "pg_loss": clipped_surrogate(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, **clip),
    "ratio_mean": ratio,
    "clip_low_fraction": (advantages < 0) & (ratio < 1.0 - clip_low),
    "clip_high_fraction": (advantages > 0) & (ratio > 1.0 + clip_high),
    "dual_clip_fraction": (advantages < 0) & (ratio > (jnp.inf if dual_clip is None else dual_clip)),
    # KL(old || current), since the samples come from the old policy.
    "old_kl": kl_penalty(logprobs=old_logprobs, ref_logprobs=logprobs),
  }
  if ref_logprobs is not None:
    values["kl"] = kl_penalty(logprobs=logprobs, ref_logprobs=ref_logprobs, estimator=kl_estimator)
  if entropy is not None:
    _, values["entropy"] = same_shape(logprobs=logprobs, entropy=entropy)
  largest = {}
  if sampler_logprobs is not None:
    gap = jnp.abs(_clear(sampler_logprobs, mask) - _clear(old_logprobs, mask))
    # KL(sampler || old): the tokens are the sampler's.
    values |= {
      "mismatch_mean": gap,
      "mismatch_kl": kl_penalty(logprobs=sampler_logprobs, ref_logprobs=old_logprobs),
    }
    largest = {"largest": {"mismatch_max": jax.lax.stop_gradient(jnp.max(gap, initial=0.0))}}
  if tis_cap is not None:
    weights = truncated_importance_weights(old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs, cap=tis_cap)
    values["pg_loss"] = weights * values["pg_loss"]
    values |= {"tis_weight_mean": weights, "tis_capped_fraction": weights >= tis_cap}
  zero = jnp.zeros((), jnp.float32)
  sums = {"kl": zero, "entropy": zero} | {name: _masked_sum(value, mask) for name, value in values.items()}
  return {"tokens": sums} | largest


def opd_terms(*, logprobs, skill_logprobs, mask, skill_mask, opd_beta=5.0, token_loss: Callable = opd_loss) -> Terms:
  """Sums of the distillation term and of the gate's statistics over the tokens where mask * skill_mask is 1.

  `token_loss(*, logprobs, skill_logprobs, beta)` is any per-token loss; `gate_square` is the second moment about one
  half (about the mean it would not add up, about zero it would lose the digits of a nearly constant gate).
  """
  logprobs, skill_logprobs, mask = same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs, mask=mask)
  active = _skill_mask(mask, skill_mask)
  logprobs = _clear(logprobs, active)
  gate = opd_gate(logprobs=logprobs, skill_logprobs=skill_logprobs, beta=opd_beta)
  values = {
    "opd_loss": token_loss(logprobs=logprobs, skill_logprobs=skill_logprobs, beta=opd_beta),
    "gate_mean": gate,
    "gate_square": jnp.square(gate - 0.5),
    "gate_above_half": gate > 0.5,
    "gap_mean": jax.lax.stop_gradient(skill_logprobs - logprobs),
  }
  sums = {name: _masked_sum(value, active) for name, value in values.items()}
  return {"skill_tokens": sums, "tokens": {"opd_active_ratio": jnp.sum(active)}}


# --- scalars --------------------------------------------------------------------------------------------------------


def grpo_loss(
  *, mask, entropy=None, kl_coef=0.01, entropy_coef=0.0, denominators: Mapping[str, jax.Array] | None = None, **grpo
):
  """GRPO: mean(surrogate) + kl_coef * mean(KL) - entropy_coef * mean(entropy), means over all tokens under the mask.

  Args:
    mask: [B, T], 1 on the sampled tokens that count.
    entropy: [B, T] exact entropies of the policy (`token_entropy`), or None. Needed where entropy_coef is not 0.
    kl_coef: weight of the KL to the reference; without `ref_logprobs` there is no KL term.
    entropy_coef: weight of the entropy bonus.
    denominators: None, or {"tokens": ...} of the whole batch that this micro-batch belongs to.
    **grpo: the other arguments of `grpo_terms`: logprobs, old_logprobs, ref_logprobs (None: no KL) and sampler_logprobs
      (None: mismatch not measured) [B, T], advantages [B, T] or [B], clip_low, clip_high, dual_clip, tis_cap (None: no
      importance weights), kl_estimator.

  Returns:
    (float32 scalar, metrics). With `denominators`, both are this micro-batch's additive share.

  The official code averages the token means of micro-batches, so that its objective depends on the partition.
  """
  _need_entropy(entropy, entropy_coef)
  counts = token_counts(mask=mask) if denominators is None else denominators
  if entropy is not None and _is_zero(entropy_coef):
    entropy = jax.lax.stop_gradient(entropy)  # only a metric: its gradient over the vocabulary need not be computed
  means = _means(grpo_terms(mask=mask, entropy=entropy, **grpo), counts)
  loss = means["pg_loss"] + kl_coef * means["kl"] - entropy_coef * means["entropy"]
  return loss, _metrics(loss, means)


def seed_loss(
  *,
  logprobs,
  old_logprobs,
  advantages,
  skill_logprobs,
  mask,
  skill_mask,
  ref_logprobs=None,
  sampler_logprobs=None,
  entropy=None,
  opd_coef=0.01,
  opd_beta=5.0,
  kl_coef=0.01,
  entropy_coef=0.0,
  clip_low=0.2,
  clip_high=0.2,
  dual_clip: float | None = 3.0,
  tis_cap: float | None = None,
  kl_estimator: str = "k3",
  token_loss: Callable = opd_loss,
  denominators: Mapping[str, jax.Array] | None = None,
):
  """SEED's joint objective: `grpo_loss` + opd_coef * mean(opd_loss), the latter over the tokens with a skill.

  loss = pg + kl_coef * KL - entropy_coef * H + opd_coef * OPD, each a mean over its own tokens: sum(mask) for the
  first three, sum(mask * skill_mask) for OPD (0 where no token has a skill). Only `logprobs` and `entropy` carry
  gradient.

  Args:
    logprobs: [B, T] of the policy being trained, ordinary context.
    old_logprobs: [B, T] of the policy at the start of the iteration's updates.
    advantages: [B, T] or [B].
    skill_logprobs: [B, T] of the same tokens with the skill in context.
    mask: [B, T], 1 on sampled tokens that count.
    skill_mask: [B, T] or [B], 1 where the trajectory has a parsed skill.
    ref_logprobs: [B, T] of the frozen reference, or None for no KL term.
    sampler_logprobs: [B, T] as the sampler reported them, or None.
    entropy: [B, T] or None, see `grpo_loss`.
    tis_cap: None, or the largest importance weight old / sampler of the policy gradient.
    token_loss: the distillation loss per token, called with (logprobs=, skill_logprobs=, beta=).
    denominators: None for this batch's own, or `token_counts` of the whole batch: see the top of this file.

  Returns:
    (float32 scalar, metrics): loss, pg_loss, kl, entropy, opd_loss, ratio_mean, old_kl, clip_low_fraction,
    clip_high_fraction, dual_clip_fraction, gate_mean, gate_std, gate_above_half, gap_mean, opd_active_ratio (tokens
    with a skill / tokens); with sampler_logprobs mismatch_mean, mismatch_max (of |sampler - old|) and mismatch_kl;
    with tis_cap tis_weight_mean and tis_capped_fraction. With `denominators`, shares that add up over micro-batches
    (`add_metrics`), `gate_square` in place of `gate_std`: sum, then `finish_metrics`.
  """
  counts = token_counts(mask=mask, skill_mask=skill_mask) if denominators is None else denominators
  rl, metrics = grpo_loss(
    logprobs=logprobs,
    old_logprobs=old_logprobs,
    advantages=advantages,
    mask=mask,
    ref_logprobs=ref_logprobs,
    sampler_logprobs=sampler_logprobs,
    entropy=entropy,
    kl_coef=kl_coef,
    entropy_coef=entropy_coef,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=dual_clip,
    tis_cap=tis_cap,
    kl_estimator=kl_estimator,
    denominators=counts,
  )
  pair = dict(logprobs=logprobs, skill_logprobs=skill_logprobs, mask=mask, skill_mask=skill_mask)
  means = _means(opd_terms(**pair, opd_beta=opd_beta, token_loss=token_loss), counts)
  loss = rl + opd_coef * means["opd_loss"]
  metrics = metrics | _metrics(loss, means)
  return loss, finish_metrics(metrics) if denominators is None else metrics


def add_metrics(one: Mapping[str, jax.Array], other: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """The shares of two parts as that of both: sums, and of a metric named `..._max` the larger one."""
  return {name: (jnp.maximum if name.endswith("_max") else jnp.add)(one[name], other[name]) for name in one}


def finish_metrics(metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Turns summed shares into metrics: the gate's second moment about one half becomes `gate_std` (population)."""
  metrics = dict(metrics)
  if "gate_square" in metrics:
    # Without a token both moments are 0 and the difference is negative: hence the bound, which also absorbs rounding.
    square, shift = metrics.pop("gate_square"), metrics["gate_mean"] - 0.5
    metrics["gate_std"] = jnp.sqrt(jnp.maximum(square - jnp.square(shift), 0.0))
  return metrics


# --- helpers --------------------------------------------------------------------------------------------------------


def _means(terms: Terms, denominators: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  largest = terms.get("largest", {})
  sums = {count: part for count, part in terms.items() if count != "largest"}
  return largest | {name: _divide(x, denominators[count]) for count, part in sums.items() for name, x in part.items()}


def _metrics(loss, means) -> dict[str, jax.Array]:
  return {name: jax.lax.stop_gradient(value) for name, value in ({"loss": loss} | means).items()}


def _is_zero(coefficient) -> bool:
  return isinstance(coefficient, (int, float)) and not coefficient


def _need_entropy(entropy, entropy_coef):
  if entropy is None and isinstance(entropy_coef, (int, float)) and entropy_coef:
    raise ValueError(
      f"entropy_coef={entropy_coef} needs entropy=[B, T]: the policy's entropies (token_entropy), got None"
    )


def _skill_mask(mask, skill_mask):
  if skill_mask is None:
    return jnp.zeros_like(mask)
  return mask * per_token(skill_mask, mask, "skill_mask")


def _clear(values, mask):
  return jnp.where(mask > 0, jnp.asarray(values, jnp.float32), 0.0)


def _masked_sum(values, mask):
  return jnp.sum(mask * _clear(values, mask))


def _divide(numerator, denominator):
  denominator = jnp.asarray(denominator, jnp.float32)
  return numerator / jnp.where(denominator > 0, denominator, 1.0)  # nothing counted: the numerator is 0, too
