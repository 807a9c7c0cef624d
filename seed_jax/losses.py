"""Losses as functions of numbers: per token, then as sums, then as one scalar. No model, no configuration, no device.

Shapes: B rows, T tokens, V vocabulary. A [B, T] array is aligned on the sampled tokens; masks hold 1 where one counts.
All is computed and returned in float32, whatever comes in (numpy too); losses per token are to be minimised.
logprobs: log-softmax of the float32 logits over the full vocabulary at the temperature of the rollout, in nats.

Three layers, so that denominators can be global:
- per token: clipped_surrogate, kl_penalty, opd_gate, opd_loss, nll, token_entropy.
- sums: grpo_terms, opd_terms give {denominator: {name: sum over this batch}}, which add over micro-batches and hosts.
- scalars: grpo_loss, seed_loss are sums / denominators. With `denominators=token_counts(<whole batch>)` a micro-batch
  returns its share: shares of loss, gradient and metrics ADD up to the whole batch's; `finish_metrics` closes the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from seed_jax.advantages import group_advantages as group_advantages  # re-exported: the public name lives here

KL_ESTIMATORS = ("k1", "k2", "k3")
K3_LIMIT = 10.0  # k3 is clamped to +-10, as in the official code
# exp(80) is 5e34; a little further float32 overflows, and 0 * inf would make a clipped token's gradient NaN.
_LOG_RATIO_CAP = 80.0

Terms = dict[str, dict[str, jax.Array]]


# --- per token ------------------------------------------------------------------------------------------------------


def clipped_surrogate(
  *, logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.2, dual_clip: float | None = 3.0
):
  """Clipped surrogate, [B, T]: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprobs - old_logprobs).

  Where A < 0 the loss is at most -A * dual_clip (arXiv:1912.09729), None switches that off. PPO: arXiv:1707.06347.
  `advantages` is [B, T], or [B]: one for all tokens of a row. Gradient flows through `logprobs` only, so
  `old_logprobs` may be the very same array. The ratio is not clamped within float32 (as in the official code).

  Raises:
    ValueError: shapes that differ, or dual_clip <= 1 (it would cut tokens that the policy has not moved).
  """
  ratio, advantages = _ratio_and_advantages(logprobs, old_logprobs, advantages)
  loss = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
  if dual_clip is None:
    return loss
  if dual_clip <= 1.0:
    raise ValueError(f"dual_clip={dual_clip} must be above 1 (3.0 is usual), or None for no dual clip")
  return jnp.where(advantages < 0, jnp.minimum(loss, -advantages * dual_clip), loss)


def kl_penalty(*, logprobs, ref_logprobs, estimator: str = "k3"):
  """KL(policy || reference) estimated from tokens that the policy sampled, [B, T]; d = ref_logprobs - logprobs.

  k1 = -d (unbiased, either sign); k2 = d^2 / 2 (biased, its gradient is that of the KL on policy);
  k3 = exp(d) - d - 1 >= 0 (unbiased), clamped to +-10 where its gradient is 0. No gradient to the reference.
  Source: J. Schulman, "Approximating KL divergence" (2020); k3 in GRPO, arXiv:2402.03300 eq. 4.
  """
  logprobs, ref_logprobs = _same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
  gap = jax.lax.stop_gradient(ref_logprobs) - logprobs
  if estimator == "k1":
    return -gap
  if estimator == "k2":
    return 0.5 * jnp.square(gap)
  if estimator == "k3":
    # The inner bound lies far outside the clamp and keeps exp finite; expm1 keeps the digits of a small gap.
    gap = jnp.clip(gap, -_LOG_RATIO_CAP, _LOG_RATIO_CAP)
    return jnp.clip(jnp.expm1(gap) - gap, -K3_LIMIT, K3_LIMIT)
  raise ValueError(f"estimator={estimator!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}")


def opd_gate(*, logprobs, skill_logprobs, beta=5.0):
  """SEED's confidence gate, [B, T] in (0, 1): sigmoid(beta * (skill_logprobs - logprobs)), a constant for the gradient.

  0.5 where the skill does not move the token's probability; beta = 0 gives the constant gate 0.5.
  """
  logprobs, skill_logprobs = _same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs)
  return jax.lax.stop_gradient(jax.nn.sigmoid(beta * (skill_logprobs - logprobs)))


def opd_loss(*, logprobs, skill_logprobs, beta=5.0):
  """SEED eq. (1) per token, [B, T]: gate * (stop_gradient(skill_logprobs) - logprobs).

  Its gradient in logprobs is -gate: as printed and as coded, minimising it raises the likelihood of every sampled
  token, by a weight in (0, 1); the gate never flips the sign (the reward's sign comes from the RL term). The value is
  no divergence and may be negative.
  """
  logprobs, skill_logprobs = _same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs)
  gate = opd_gate(logprobs=logprobs, skill_logprobs=skill_logprobs, beta=beta)
  return gate * (jax.lax.stop_gradient(skill_logprobs) - logprobs)


def nll(*, logprobs):
  """Negative log-likelihood, -logprobs, [B, T] in nats: the SFT loss of Stage 1."""
  return -jnp.asarray(logprobs, jnp.float32)


def token_entropy(logits):
  """Exact entropy of softmax(logits), [..., V] -> [...] in nats; a logit of -inf (masked vocabulary) is absent."""
  logprobs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)
  present = jnp.isfinite(logprobs)
  return -jnp.sum(jnp.where(present, jnp.exp(logprobs) * jnp.where(present, logprobs, 0.0), 0.0), axis=-1)


def masked_mean(values, mask):
  """sum(mask * values) / sum(mask) as a float32 scalar; 0 on an empty mask.

  Values under a zero mask have no influence and gradient exactly 0, even NaN and infinities. A loss upstream may still
  turn that 0 into 0 * inf: clear its inputs with the mask first, as the sums below do.
  """
  values, mask = _same_shape(values=values, mask=mask)
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
  entropy=None,
  clip_low=0.2,
  clip_high=0.2,
  dual_clip: float | None = 3.0,
  kl_estimator: str = "k3",
) -> Terms:
  """Sums over this batch of all that GRPO averages over tokens; see `grpo_loss` for the arguments.

  A masked position has gradient exactly 0 whatever it holds, for `logprobs` are cleared before any arithmetic.
  """
  logprobs, old_logprobs, mask = _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
  logprobs = _clear(logprobs, mask)
  ratio, advantages = _ratio_and_advantages(logprobs, old_logprobs, advantages)
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
    _, values["entropy"] = _same_shape(logprobs=logprobs, entropy=entropy)
  zero = jnp.zeros((), jnp.float32)
  return {"tokens": {"kl": zero, "entropy": zero} | {name: _masked_sum(value, mask) for name, value in values.items()}}


def opd_terms(*, logprobs, skill_logprobs, mask, skill_mask, opd_beta=5.0, token_loss: Callable = opd_loss) -> Terms:
  """Sums of the distillation term and of the gate's statistics over the tokens where mask * skill_mask is 1.

  `token_loss(*, logprobs, skill_logprobs, beta)` is any per-token loss; `gate_square` is the second moment about one
  half (about the mean it would not add up, about zero it would lose the digits of a nearly constant gate).
  """
  logprobs, skill_logprobs, mask = _same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs, mask=mask)
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
    **grpo: the other arguments of `grpo_terms`: logprobs, old_logprobs and ref_logprobs (None: no KL) [B, T],
      advantages [B, T] or [B], clip_low, clip_high, dual_clip, kl_estimator.

  Returns:
    (float32 scalar, metrics). With `denominators`, both are this micro-batch's additive share.

  The official code averages the token means of micro-batches, so that its objective depends on the partition.
  """
  _need_entropy(entropy, entropy_coef)
  counts = token_counts(mask=mask) if denominators is None else denominators
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
  entropy=None,
  opd_coef=0.01,
  opd_beta=5.0,
  kl_coef=0.01,
  entropy_coef=0.0,
  clip_low=0.2,
  clip_high=0.2,
  dual_clip: float | None = 3.0,
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
    old_logprobs: [B, T] of the policy that sampled.
    advantages: [B, T] or [B].
    skill_logprobs: [B, T] of the same tokens with the skill in context.
    mask: [B, T], 1 on sampled tokens that count.
    skill_mask: [B, T] or [B], 1 where the trajectory has a parsed skill.
    ref_logprobs: [B, T] of the frozen reference, or None for no KL term.
    entropy: [B, T] or None, see `grpo_loss`.
    token_loss: the distillation loss per token, called with (logprobs=, skill_logprobs=, beta=).
    denominators: None for this batch's own, or `token_counts` of the whole batch: see the top of this file.

  Returns:
    (float32 scalar, metrics): loss, pg_loss, kl, entropy, opd_loss, ratio_mean, old_kl, clip_low_fraction,
    clip_high_fraction, dual_clip_fraction, gate_mean, gate_std, gate_above_half, gap_mean, opd_active_ratio (tokens
    with a skill / tokens). With `denominators`, shares that add up over micro-batches, `gate_square` in place of
    `gate_std`: sum, then `finish_metrics`.
  """
  counts = token_counts(mask=mask, skill_mask=skill_mask) if denominators is None else denominators
  rl, metrics = grpo_loss(
    logprobs=logprobs,
    old_logprobs=old_logprobs,
    advantages=advantages,
    mask=mask,
    ref_logprobs=ref_logprobs,
    entropy=entropy,
    kl_coef=kl_coef,
    entropy_coef=entropy_coef,
    clip_low=clip_low,
    clip_high=clip_high,
    dual_clip=dual_clip,
    kl_estimator=kl_estimator,
    denominators=counts,
  )
  pair = dict(logprobs=logprobs, skill_logprobs=skill_logprobs, mask=mask, skill_mask=skill_mask)
  means = _means(opd_terms(**pair, opd_beta=opd_beta, token_loss=token_loss), counts)
  loss = rl + opd_coef * means["opd_loss"]
  metrics = metrics | _metrics(loss, means)
  return loss, finish_metrics(metrics) if denominators is None else metrics


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
  return {name: _divide(value, denominators[count]) for count, sums in terms.items() for name, value in sums.items()}


def _metrics(loss, means) -> dict[str, jax.Array]:
  return {name: jax.lax.stop_gradient(value) for name, value in ({"loss": loss} | means).items()}


def _need_entropy(entropy, entropy_coef):
  if entropy is None and isinstance(entropy_coef, (int, float)) and entropy_coef:
    raise ValueError(
      f"entropy_coef={entropy_coef} needs entropy=[B, T]: the policy's entropies (token_entropy), got None"
    )


def _ratio_and_advantages(logprobs, old_logprobs, advantages):
  logprobs, old_logprobs = _same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
  log_ratio = logprobs - jax.lax.stop_gradient(old_logprobs)
  advantages = jax.lax.stop_gradient(_per_token(advantages, logprobs, "advantages"))
  return jnp.exp(jnp.minimum(log_ratio, _LOG_RATIO_CAP)), advantages


def _skill_mask(mask, skill_mask):
  if skill_mask is None:
    return jnp.zeros_like(mask)
  return mask * _per_token(skill_mask, mask, "skill_mask")


def _per_token(values, like, name: str):
  """[B] or [B, T] -> [B, T]. A [B] array is never left to broadcast over T, where B == T would hide the mistake."""
  values = jnp.asarray(values, jnp.float32)
  if values.ndim == like.ndim - 1 and values.shape == like.shape[:-1]:
    values = values[..., None]
  if values.shape not in (like.shape, like.shape[:-1] + (1,)):
    raise ValueError(f"{name} has shape {values.shape}; want {like.shape}, or {like.shape[:-1]} for one value a row")
  return jnp.broadcast_to(values, like.shape)


def _same_shape(**arrays):
  arrays = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
  if len({array.shape for array in arrays.values()}) > 1:
    raise ValueError("shapes differ: " + ", ".join(f"{name} {array.shape}" for name, array in arrays.items()))
  return arrays.values()


def _clear(values, mask):
  return jnp.where(mask > 0, jnp.asarray(values, jnp.float32), 0.0)


def _masked_sum(values, mask):
  return jnp.sum(mask * _clear(values, mask))


def _divide(numerator, denominator):
  denominator = jnp.asarray(denominator, jnp.float32)
  return numerator / jnp.where(denominator > 0, denominator, 1.0)  # nothing counted: the numerator is 0, too
