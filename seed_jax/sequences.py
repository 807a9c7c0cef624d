"""What needs to know which sequence a token is of: importance ratios of whole sequences, and weights of aggregations.

Shapes: B rows (any leading axes), T tokens. `sequence_ids` is [B, T] int, the number of a token's sequence within its
row, in [0, T); a packed row holds several sequences, and no sequence crosses rows. Tokens of other ids are of no
sequence. None: each row is one sequence. Masks hold 1 where a token counts; a sequence without a counting token does
not exist.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seed_jax.token_losses import LOG_RATIO_CAP, same_shape

# name -> the denominator of a sum with `token_weights`
AGGREGATIONS = {
  "token_mean": "tokens",
  "sequence_mean_token_mean": "sequences",
  "sequence_mean_token_sum": "sequences",
  "sequence_mean_token_sum_norm": "sequences",
}


# --- importance ratios ------------------------------------------------------------------------------------------------


def token_ratios(*, logprobs, old_logprobs, mask=None, sequence_ids=None):
  """exp(logprobs - old_logprobs), [B, T]: PPO and GRPO. The log-ratio is cut at 80, where float32 ends.

  `mask` and `sequence_ids` are not looked at: all functions that may be a method's `ratios` are called alike.
  """
  del mask, sequence_ids
  logprobs, old_logprobs = same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
  return _exp(logprobs - jax.lax.stop_gradient(old_logprobs))


def sequence_ratios(*, logprobs, old_logprobs, mask, sequence_ids=None):
  """GSPO's ratio of a sequence at each of its tokens, [B, T]: exp(mean over its tokens of logprobs - old_logprobs).

  Source: arXiv:2507.18071 eq. 7. The paper averages sequences (`sequence_mean_token_mean`); clip_low, clip_high are of
  the order of 3e-4, 4e-4.
  """
  return _exp(_mean_log_ratio(logprobs, old_logprobs, mask, sequence_ids))


def sequence_token_ratios(*, logprobs, old_logprobs, mask, sequence_ids=None):
  """GSPO-token, [B, T]: the value of `sequence_ratios`, but a token's gradient goes through its own logprob alone.

  stop_gradient(s) * exp(logprobs - stop_gradient(logprobs)), arXiv:2507.18071 eq. 14. Where all advantages of a
  sequence are equal its gradient is that of GSPO; it is for advantages per token.
  """
  (logprobs,) = same_shape(logprobs=logprobs)
  mean = _mean_log_ratio(logprobs, old_logprobs, mask, sequence_ids)
  return _exp(jax.lax.stop_gradient(mean) + logprobs - jax.lax.stop_gradient(logprobs))


# --- aggregation ------------------------------------------------------------------------------------------------------


def token_weights(*, mask, sequence_ids=None, aggregation: str = "token_mean", length: float | None = None):
  """What a token's loss weighs in the numerator, [B, T] float32; 0 where the mask is.

  | aggregation                    | weight             | denominator | is the mean over                         |
  |--------------------------------|--------------------|-------------|------------------------------------------|
  | token_mean                     | 1                  | tokens      | tokens (DAPO)                            |
  | sequence_mean_token_mean       | 1 / sequence's own | sequences   | sequences, of their token means (GRPO)   |
  | sequence_mean_token_sum        | 1                  | sequences   | sequences, of their token sums           |
  | sequence_mean_token_sum_norm   | 1 / length         | sequences   | the same over a constant (Dr. GRPO)      |

  The denominators are those of `token_counts`, over the whole batch: weighted sums add up over micro-batches and hosts.

  Args:
    mask: [B, T].
    sequence_ids: see the top of this file.
    aggregation: a key of AGGREGATIONS.
    length: tokens, the constant of `sequence_mean_token_sum_norm` (the longest response that is allowed).

  Raises:
    ValueError: unknown `aggregation`; no `length` where one is needed.
  """
  if aggregation not in AGGREGATIONS:
    raise ValueError(f"aggregation={aggregation!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
  mask = jnp.asarray(mask, jnp.float32)
  if aggregation == "sequence_mean_token_mean":
    own = sequence_sums(mask, mask, sequence_ids)
    return jnp.where(own > 0, mask / jnp.where(own > 0, own, 1.0), 0.0)
  if aggregation == "sequence_mean_token_sum_norm":
    if length is None or (isinstance(length, (int, float)) and length <= 0):  # it may be traced
      raise ValueError(f"aggregation={aggregation!r} needs aggregation_length above 0 (tokens), got {length}")
    return mask / length
  return mask


def count_sequences(*, mask, sequence_ids=None):
  """The number of sequences with a token under the mask, a float32 scalar."""
  mask = jnp.asarray(mask, jnp.float32)
  if sequence_ids is None:
    return jnp.sum(jnp.any(mask > 0, axis=-1).astype(jnp.float32))
  ids, inside = _ids(mask, sequence_ids)
  present = jnp.where(inside & (mask > 0), 1.0, 0.0)
  largest = _each_row(lambda x, i: jax.ops.segment_max(x, i, num_segments=mask.shape[-1]), present, ids)
  return jnp.sum((largest > 0).astype(jnp.float32))  # an id that no token has holds -inf


def sequence_sums(values, mask, sequence_ids=None):
  """At each token the sum of mask * values over its sequence, [B, T]; what is masked has no influence, even NaN."""
  values, mask = same_shape(values=values, mask=mask)
  values = mask * jnp.where(mask > 0, values, 0.0)
  if sequence_ids is None:
    return jnp.broadcast_to(jnp.sum(values, axis=-1, keepdims=True), values.shape)
  ids, inside = _ids(mask, sequence_ids)

  def row(x, i):
    return jax.ops.segment_sum(x, i, num_segments=x.shape[0])[i]

  return jnp.where(inside, _each_row(row, jnp.where(inside, values, 0.0), ids), 0.0)


# --- helpers ----------------------------------------------------------------------------------------------------------


def _mean_log_ratio(logprobs, old_logprobs, mask, sequence_ids):
  logprobs, old_logprobs, mask = same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
  total = sequence_sums(logprobs - jax.lax.stop_gradient(old_logprobs), mask, sequence_ids)
  return total / jnp.maximum(sequence_sums(mask, mask, sequence_ids), 1.0)


def _each_row(function, *arrays):
  for _ in range(arrays[0].ndim - 1):
    function = jax.vmap(function)
  return function(*arrays)


def _ids(mask, sequence_ids):
  ids = jnp.asarray(sequence_ids)
  if ids.shape != mask.shape:
    raise ValueError(f"sequence_ids has shape {ids.shape}; want that of the mask, {mask.shape}")
  inside = (ids >= 0) & (ids < mask.shape[-1])
  return jnp.where(inside, ids, 0), inside


def _exp(log_ratio):
  return jnp.exp(jnp.minimum(log_ratio, LOG_RATIO_CAP))
