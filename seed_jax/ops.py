"""Small numerical pieces of a decoder: normalisation, rotary positions, log-probabilities, sampling transforms.

Shapes: B rows, T tokens, D model, H head size, V vocabulary, R response tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from seed_jax.sharding import ROWS


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean(x^2) + eps) * weight over the last axis; in float32: squares of bfloat16 lose the small ones."""
  f = x.astype(jnp.float32)
  f = f * jax.lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + eps)
  return (f * weight.astype(jnp.float32)).astype(x.dtype)


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
  """cos and sin [B, T, H/2] of positions [B, T]; float32, since bfloat16 cannot tell positions above 256 apart."""
  frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  angles = positions[..., None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates pairs (i, i + H/2) of x [B, T, heads, H], the half-split convention of Hugging Face checkpoints."""
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = cos[:, :, None, :], sin[:, :, None, :]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def mask_padded_vocab(logits: jax.Array, num_valid: int | None) -> jax.Array:
  """Logits of rows that no token has (a padded embedding table) become -inf, in the sampler and in the scorer alike."""
  if num_valid is None or num_valid >= logits.shape[-1]:
    return logits
  return jnp.where(jnp.arange(logits.shape[-1]) < num_valid, logits, -jnp.inf)


def logprob_and_entropy(logits: jax.Array, targets: jax.Array, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
  """log softmax(logits / temperature)[targets] and the entropy of that distribution, float32, over the full vocabulary.

  logits [..., V], targets [...] int32. The chosen logit is picked by comparison instead of a gather, so that a
  vocabulary sharded over `tp` needs one sum and no exchange of logits. At temperature 0 (greedy) the distribution is
  that of temperature 1.
  """
  logits = logits.astype(jnp.float32) / (temperature or 1.0)
  peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
  shifted = logits - peak
  exponentials = jnp.exp(shifted)
  total = jnp.sum(exponentials, axis=-1)
  log_total = jnp.log(total)
  chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
  logprob = jnp.sum(jnp.where(chosen, shifted, 0.0), axis=-1) - log_total
  finite = jnp.where(exponentials > 0, shifted, 0.0)  # masked rows have probability 0 and add nothing
  entropy = log_total - jnp.sum(exponentials * finite, axis=-1) / total
  return logprob, entropy


def token_logprobs(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  *,
  temperature: float = 1.0,
  num_valid: int | None = None,
  chunk: int = 512,
) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities and entropies [B, R] of targets [B, R] given hidden [B, R, D] and head [D, V], in chunks over R.

  Each chunk's logits are computed, reduced and (in the backward pass) computed again, so memory is B * chunk * V
  instead of B * R * V.
  """
  B, R, D = hidden.shape
  assert targets.shape == (B, R), (hidden.shape, targets.shape)

  @jax.checkpoint
  def piece(h, t):
    logits = jnp.einsum("brd,dv->brv", h, head.astype(h.dtype), preferred_element_type=jnp.float32)
    return logprob_and_entropy(mask_padded_vocab(logits, num_valid), t, temperature)

  if R <= chunk:
    return piece(hidden, targets)
  pieces = [piece(hidden[:, i : i + chunk], targets[:, i : i + chunk]) for i in range(0, R, chunk)]
  logprobs, entropies = zip(*pieces, strict=True)
  return jnp.concatenate(logprobs, axis=1), jnp.concatenate(entropies, axis=1)


def truncate_logits(logits: jax.Array, top_k: int, top_p: float) -> jax.Array:
  """Logits [..., V] with everything outside the top k and the top-p nucleus at -inf (0 and 1.0 switch them off).

  Only the choice of the next token uses this; its log-probability is that of the untruncated distribution.
  """
  if top_k:
    kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
    logits = jnp.where(logits < kth, -jnp.inf, logits)
  if top_p < 1.0:
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = (
      jnp.cumsum(probabilities, axis=-1) - probabilities
    )  # mass strictly above each token; the first always stays
    smallest = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits < smallest, -jnp.inf, logits)
  return logits


def sample_tokens(
  logits: jax.Array, keys: jax.Array, *, temperature: float | jax.Array = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[jax.Array, jax.Array]:
  """One token per row and its log-probability: logits [S, V], keys [S] (one per request), temperature a number or [S]
  -> tokens [S] int32, logprobs [S] float32.

  A row at temperature 0 is greedy. The log-probability is `logprob_and_entropy` at the same temperature over the full
  vocabulary.
  """
  # choosing needs whole rows: [S, V] is small next to the cache that the step reads
  logits = jax.sharding.reshard(logits.astype(jnp.float32), jax.sharding.PartitionSpec(ROWS[0], None))
  temperature = jnp.asarray(temperature, jnp.float32)
  if temperature.ndim == 0:
    temperature = jnp.full_like(logits[:, 0], temperature)
  greedy = (temperature == 0)[:, None]
  logits = logits / jnp.where(greedy, 1.0, temperature[:, None])
  noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
  choice = truncate_logits(logits, top_k, top_p) + jnp.where(greedy, 0.0, noise)
  tokens = jnp.argmax(choice, axis=-1).astype(jnp.int32)
  return tokens, logprob_and_entropy(logits, tokens)[0]
