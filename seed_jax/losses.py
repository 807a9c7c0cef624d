"""Losses as functions of numbers: per token, then as sums, then as one scalar. No model, no configuration, no device.

Shapes: B rows, T tokens, V vocabulary. A [B, T] array is aligned on the sampled tokens; masks hold 1 where one counts.
All is computed and returned in float32, whatever comes in (numpy too); losses per token are to be minimised.
logprobs: log-softmax of the float32 logits over the full vocabulary at the temperature of the rollout, in nats.

Three layers, so that denominators can be global:
- per token (token_losses.py, sequences.py, relatives.py): clipped_surrogate, kl_penalty, opd_gate, opd_loss and its
  relatives, nll, token_entropy, importance ratios and weights, transforms of advantages.
- sums (loss_terms.py): grpo_terms, opd_terms give {denominator: {name: sum over this batch}}, which add over
  micro-batches and hosts.
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
from seed_jax.loss_terms import Terms, grpo_terms, masked_sum, opd_terms, token_counts
from seed_jax.relatives import (  # noqa: F401  (re-exported, too)
  centred_opd_loss,
  grsd_advantages,
  no_auxiliary_loss,
  opid_advantages,
  opsd_loss,
  rlsd_advantages,
  skill_sd_loss,
)
from seed_jax.sequences import (  # noqa: F401
  AGGREGATIONS,
  sequence_ratios,
  sequence_token_ratios,
  token_ratios,
  token_weights,
)
from seed_jax.token_losses import (  # noqa: F401
  K3_LIMIT,
  KL_ESTIMATORS,
  clipped_surrogate,
  kl_penalty,
  nll,
  opd_gate,
  opd_loss,
  same_shape,
  surrogate_of_ratio,
  token_entropy,
  truncated_importance_weights,
)


def masked_mean(values, mask):
  """sum(mask * values) / sum(mask) as a float32 scalar; 0 on an empty mask.

  Values under a zero mask have no influence and gradient exactly 0, even NaN and infinities. A loss upstream may still
  turn that 0 into 0 * inf: clear its inputs with the mask first, as the sums below do.
  """
  values, mask = same_shape(values=values, mask=mask)
  return _divide(masked_sum(values, mask), jnp.sum(mask))


# --- scalars --------------------------------------------------------------------------------------------------------


def grpo_loss(
  *,
  mask,
  entropy=None,
  kl_coef=0.01,
  entropy_coef=0.0,
  sequence_ids=None,
  denominators: Mapping[str, jax.Array] | None = None,
  **grpo,
):
  """GRPO: mean(surrogate) + kl_coef * mean(KL) - entropy_coef * mean(entropy), means over all tokens under the mask,
  or as `aggregation` says.

  Args:
    mask: [B, T], 1 on the sampled tokens that count.
    entropy: [B, T] exact entropies of the policy (`token_entropy`), or None. Needed where entropy_coef is not 0.
    kl_coef: weight of the KL to the reference; without `ref_logprobs` there is no KL term.
    entropy_coef: weight of the entropy bonus.
    sequence_ids: [B, T], which sequence of its row a token is of, or None: each row is one (see sequences.py).
    denominators: None, or `token_counts` of the whole batch that this micro-batch belongs to.
    **grpo: the other arguments of `grpo_terms`: logprobs, old_logprobs, ref_logprobs (None: no KL) and sampler_logprobs
      (None: mismatch not measured) [B, T], advantages [B, T] or [B], clip_low, clip_high, dual_clip, tis_cap (None: no
      importance weights), kl_estimator, ratios (`token_ratios`; `sequence_ratios` for GSPO), aggregation (a key of
      `AGGREGATIONS`, see `token_weights`) and its aggregation_length.

  Returns:
    (float32 scalar, metrics). With `denominators`, both are this micro-batch's additive share.

  The official code averages the token means of micro-batches, so that its objective depends on the partition.
  """
  _need_entropy(entropy, entropy_coef)
  counts = token_counts(mask=mask, sequence_ids=sequence_ids) if denominators is None else denominators
  if entropy is not None and _is_zero(entropy_coef):
    entropy = jax.lax.stop_gradient(entropy)  # only a metric: its gradient over the vocabulary need not be computed
  means = _means(grpo_terms(mask=mask, entropy=entropy, sequence_ids=sequence_ids, **grpo), counts)
  loss = means["pg_loss"] + kl_coef * means["kl"] - entropy_coef * means["entropy"]
  return loss, _metrics(loss, means)


def seed_loss(
  *,
  logprobs,
  old_logprobs,
  skill_logprobs,
  mask,
  skill_mask,
  opd_coef=0.01,
  opd_beta=5.0,
  token_loss: Callable = opd_loss,
  sequence_ids=None,
  denominators: Mapping[str, jax.Array] | None = None,
  **grpo,
):
  """SEED's joint objective: `grpo_loss` + opd_coef * mean(opd_loss), the latter over the tokens with a skill.

  loss = pg + kl_coef * KL - entropy_coef * H + opd_coef * OPD, each a mean over its own tokens: sum(mask) for the
  first three (or as `aggregation` says), sum(mask * skill_mask) for OPD (0 where no token has a skill). Only `logprobs`
  and `entropy` carry gradient.

  Args:
    logprobs: [B, T] of the policy being trained, ordinary context.
    old_logprobs: [B, T] of the policy at the start of the iteration's updates.
    skill_logprobs: [B, T] of the same tokens with the skill in context.
    mask: [B, T], 1 on sampled tokens that count.
    skill_mask: [B, T] or [B], 1 where the trajectory has a parsed skill.
    token_loss: the auxiliary loss per token, called with (logprobs=, skill_logprobs=, old_logprobs=, beta=opd_beta).
    sequence_ids, denominators, **grpo: those of `grpo_loss`: advantages [B, T] or [B], ref_logprobs, sampler_logprobs,
      entropy, kl_coef, entropy_coef, clip_low, clip_high, dual_clip, tis_cap, kl_estimator, ratios, aggregation,
      aggregation_length.

  Returns:
    (float32 scalar, metrics): loss, pg_loss, kl, entropy, opd_loss, ratio_mean, old_kl, clip_low_fraction,
    clip_high_fraction, dual_clip_fraction, gate_mean, gate_std, gate_above_half, gap_mean, opd_active_ratio (tokens
    with a skill / tokens); with sampler_logprobs mismatch_mean, mismatch_max (of |sampler - old|) and mismatch_kl;
    with tis_cap tis_weight_mean and tis_capped_fraction. With `denominators`, shares that add up over micro-batches
    (`add_metrics`), `gate_square` in place of `gate_std`: sum, then `finish_metrics`.
  """
  counts = denominators
  if denominators is None:
    counts = token_counts(mask=mask, skill_mask=skill_mask, sequence_ids=sequence_ids)
  policies = dict(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
  rl, metrics = grpo_loss(**policies, sequence_ids=sequence_ids, denominators=counts, **grpo)
  skill = dict(skill_logprobs=skill_logprobs, skill_mask=skill_mask, opd_beta=opd_beta, token_loss=token_loss)
  means = _means(opd_terms(**policies, **skill), counts)
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
  missing = terms.keys() - denominators.keys() - {"largest"}
  if missing:
    raise ValueError(f"denominators have no {', '.join(sorted(missing))}; hand in token_counts of the whole batch")
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


def _divide(numerator, denominator):
  denominator = jnp.asarray(denominator, jnp.float32)
  return numerator / jnp.where(denominator > 0, denominator, 1.0)  # nothing counted: the numerator is 0, too
