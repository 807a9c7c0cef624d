"""Losses per token, to be minimised, as functions of numbers; `losses` re-exports them and reduces them.

Shapes: B rows, T tokens, V vocabulary. A [B, T] array is aligned on the sampled tokens. All is computed and returned in
float32, whatever comes in (numpy too).
logprobs: log-softmax of the float32 logits over the full vocabulary at the temperature of the rollout, in nats.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

KL_ESTIMATORS = ("k1", "k2", "k3")
K3_LIMIT = 10.0  # k3 is clamped to +-10, as in the official code
# exp(80) is 5e34; a little further float32 overflows, and 0 * inf would make a clipped token's gradient NaN.
LOG_RATIO_CAP = 80.0


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
  logprobs, old_logprobs = same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
  ratio = jnp.exp(jnp.minimum(logprobs - jax.lax.stop_gradient(old_logprobs), LOG_RATIO_CAP))
  return surrogate_of_ratio(
    ratio=ratio, advantages=advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
  )


def surrogate_of_ratio(*, ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip: float | None = 3.0):
  """`clipped_surrogate` of importance ratios r [B, T] of any kind (`sequences` has those of whole sequences)."""
  (ratio,) = same_shape(ratio=ratio)
  advantages = jax.lax.stop_gradient(per_token(advantages, ratio, "advantages"))
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
  logprobs, ref_logprobs = same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
  gap = jax.lax.stop_gradient(ref_logprobs) - logprobs
  if estimator == "k1":
    return -gap
  if estimator == "k2":
    return 0.5 * jnp.square(gap)
  if estimator == "k3":
    # The inner bound lies far outside the clamp and keeps exp finite; expm1 keeps the digits of a small gap.
    gap = jnp.clip(gap, -LOG_RATIO_CAP, LOG_RATIO_CAP)
    return jnp.clip(jnp.expm1(gap) - gap, -K3_LIMIT, K3_LIMIT)
  raise ValueError(f"estimator={estimator!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}")


def opd_gate(*, logprobs, skill_logprobs, beta=5.0):
  """SEED's confidence gate, [B, T] in (0, 1): sigmoid(beta * (skill_logprobs - logprobs)), a constant for the gradient.

  0.5 where the skill does not move the token's probability; beta = 0 gives the constant gate 0.5.
  """
  logprobs, skill_logprobs = same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs)
  return jax.lax.stop_gradient(jax.nn.sigmoid(beta * (skill_logprobs - logprobs)))


def opd_loss(*, logprobs, skill_logprobs, old_logprobs=None, beta=5.0):
  """SEED eq. (1) per token, [B, T]: gate * (stop_gradient(skill_logprobs) - logprobs).

  Its gradient in logprobs is -gate: as printed and as coded, minimising it raises the likelihood of every sampled
  token, by a weight in (0, 1); the gate never flips the sign (the reward's sign comes from the RL term). The value is
  no divergence and may be negative. `old_logprobs` are not used: all auxiliary losses are called alike.
  """
  del old_logprobs
  logprobs, skill_logprobs = same_shape(logprobs=logprobs, skill_logprobs=skill_logprobs)
  gate = opd_gate(logprobs=logprobs, skill_logprobs=skill_logprobs, beta=beta)
  return gate * (jax.lax.stop_gradient(skill_logprobs) - logprobs)


def truncated_importance_weights(*, old_logprobs, sampler_logprobs, cap: float):
  """min(exp(old_logprobs - sampler_logprobs), cap), [B, T]: what a sampled token weighs where the sampler's
  distribution is not the trainer's. Constants for the gradient.

  The sampler differs by rounding (another precision, other kernels) or by age (rollouts one iteration ahead). Without
  the cap the weights are unbiased and of unbounded variance. Source: Yao et al. 2025, "Your Efficient RL Framework
  Secretly Brings You Off-Policy RL Training" (truncated importance sampling); Ionides 2008.

  Raises:
    ValueError: shapes that differ, or cap <= 0.
  """
  if cap <= 0.0:
    raise ValueError(f"tis_cap={cap} must be above 0 (2.0 is usual), or None for no importance weights")
  old_logprobs, sampler_logprobs = same_shape(old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
  weights = jnp.minimum(jnp.exp(jnp.minimum(old_logprobs - sampler_logprobs, LOG_RATIO_CAP)), cap)
  return jax.lax.stop_gradient(weights)


def nll(*, logprobs):
  """Negative log-likelihood, -logprobs, [B, T] in nats: the SFT loss of Stage 1."""
  return -jnp.asarray(logprobs, jnp.float32)


def token_entropy(logits):
  """Exact entropy of softmax(logits), [..., V] -> [...] in nats; a logit of -inf (masked vocabulary) is absent."""
  logprobs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32), axis=-1)
  present = jnp.isfinite(logprobs)
  return -jnp.sum(jnp.where(present, jnp.exp(logprobs) * jnp.where(present, logprobs, 0.0), 0.0), axis=-1)


# --- helpers, of `losses` too -----------------------------------------------------------------------------------------


def possible(skill_logprobs, logprobs):
  """skill_logprobs, and where one is -inf the policy's own less LOG_RATIO_CAP: a skill that rules a sampled token out
  is as far away as the ratios reach. 0 * inf would be NaN in the gate's loss; a finite number stays what it is.
  """
  furthest = jax.lax.stop_gradient(logprobs) - LOG_RATIO_CAP
  return jnp.where(jnp.isneginf(skill_logprobs), furthest, skill_logprobs)


def per_token(values, like, name: str):
  """[B] or [B, T] -> [B, T]. A [B] array is never left to broadcast over T, where B == T would hide the mistake."""
  values = jnp.asarray(values, jnp.float32)
  if values.ndim == like.ndim - 1 and values.shape == like.shape[:-1]:
    values = values[..., None]
  if values.shape not in (like.shape, like.shape[:-1] + (1,)):
    raise ValueError(f"{name} has shape {values.shape}; want {like.shape}, or {like.shape[:-1]} for one value a row")
  return jnp.broadcast_to(values, like.shape)


def same_shape(**arrays):
  """The arrays in float32, in the order given; ValueError with all their names and shapes where these differ."""
  arrays = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
  if len({array.shape for array in arrays.values()}) > 1:
    raise ValueError("shapes differ: " + ", ".join(f"{name} {array.shape}" for name, array in arrays.items()))
  return arrays.values()
