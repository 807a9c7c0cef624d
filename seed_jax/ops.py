"""Small numerical pieces of a decoder: normalisation, rotary positions, log-probabilities, sampling transforms.

Shapes: B rows, T tokens, D model, H head size, V vocabulary, R response tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from seed_jax import sharding
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
  chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
  return _normalised(logits, chosen, lambda x: jnp.sum(x, axis=-1), lambda x: jnp.max(x, axis=-1))[:2]


def _normalised(logits, chosen, total, largest):
  """Log-probability of the chosen logit, entropy, and log of the normaliser; `total` and `largest` reduce V."""
  peak = jax.lax.stop_gradient(largest(logits))
  shifted = logits - peak[..., None]
  exponentials = jnp.exp(shifted)
  sum_ = total(exponentials)
  finite = jnp.where(exponentials > 0, shifted, 0.0)  # masked rows have probability 0 and add nothing
  log_sum = jnp.log(sum_)
  logprob = total(jnp.where(chosen, shifted, 0.0)) - log_sum
  return logprob, log_sum - total(exponentials * finite) / sum_, peak + log_sum


def product(equation: str, x: jax.Array, w: jax.Array, spec: P, out: P | None = None) -> jax.Array:
  """einsum(equation, x, w) with a weight that lies under `spec`: gathered over `fsdp` in the dtype of x, where it is
  used, and again in the backward pass.

  The weight's gradient goes the same way back: what a device has of it from its rows is summed and scattered over
  `fsdp` at once, in the dtype of x. Left to the compiler it would be summed on every device, which moves twice as much
  and holds it whole. `out` is the result's sharding where the contraction leaves it open.
  """
  whole = sharding.gathered(spec)

  def plain(x, w):
    return jnp.einsum(equation, x, jax.sharding.reshard(w.astype(x.dtype), whole), out_sharding=out)

  mesh = jax.sharding.get_abstract_mesh()
  if mesh.shape["fsdp"] == 1:
    return plain(x, w)
  inputs, result = equation.split("->")
  left, right = inputs.split(",")
  scattered = list(spec).index("fsdp")

  def backward(saved, g):
    x, w = saved
    rows = jax.typeof(x).sharding.spec
    d_x = jnp.einsum(f"{result},{right}->{left}", g, jax.sharding.reshard(w.astype(x.dtype), whole), out_sharding=rows)

    def local(x, g):
      d = jnp.einsum(f"{left},{result}->{right}", x, g)
      d = jax.lax.psum_scatter(d, "fsdp", scatter_dimension=scattered, tiled=True)
      return jax.lax.psum(d, "data") if mesh.shape["data"] > 1 else d

    shards = dict(in_specs=(rows, jax.typeof(g).sharding.spec), out_specs=spec, check_vma=False)
    return d_x, jax.shard_map(local, **shards)(x, g).astype(w.dtype)

  call = jax.custom_vjp(plain)
  call.defvjp(lambda x, w: (plain(x, w), (x, w)), backward)
  return call(x, w)


# Logits of a chunk on one device, 256 MiB as float32: a few times that is what the log-probabilities take of memory.
CHUNK_LOGITS = 2**26


def token_logprobs(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  *,
  temperature: float = 1.0,
  num_valid: int | None = None,
  chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities and entropies [B, R] of targets [B, R] given hidden [B, R, D] and head [D, V]: the numbers of
  `logprob_and_entropy(hidden @ head, ...)` and their gradients, without the logits.

  The logits of `chunk` tokens a device (None: CHUNK_LOGITS / V) exist at a time, in the backward pass, too, where they
  are computed again: memory is chunk * V instead of B * R * V. A loop goes over the chunks, for a compiler may
  schedule the chunks of an unrolled one at once. Rows stay on their device and a vocabulary over `tp` is reduced where
  it lies: what devices exchange is [tokens], in the backward pass [tokens, D] once. The head, stored with D over
  `fsdp`, is gathered once and its gradient summed and scattered once, as `product` does it. Logits are float32
  whatever `hidden` is.
  """
  B, R, D = hidden.shape
  V = head.shape[1]
  assert targets.shape == (B, R) and head.shape == (D, V), (hidden.shape, head.shape, targets.shape)
  mesh = jax.sharding.get_abstract_mesh()
  rows, tp = math.prod(mesh.shape[axis] for axis in ROWS[0]), mesh.shape["tp"]
  # Over one device there is nothing to sum, but the compiler would leave a copy.
  over_data, over_fsdp, over_vocab = (tuple(a for a in (axis,) if mesh.shape[a] > 1) for axis in mesh.axis_names)
  columns = max((chunk or CHUNK_LOGITS // (V // tp)) // (B // rows), 1)
  chunks = -(-R // columns)
  columns = -(-R // chunks)  # as even as can be: padding is less than a column a chunk
  scale = 1.0 / (temperature or 1.0)

  def logits_of(h, w, t):
    """float32 [b, c, v] of one chunk on one device, and where the targets are among them."""
    logits = jnp.einsum("bcd,dv->bcv", h, w, preferred_element_type=jnp.float32) * scale
    at = jnp.arange(logits.shape[-1]) + jax.lax.axis_index("tp") * logits.shape[-1]
    if num_valid is not None and num_valid < V:
      logits = jnp.where(at < num_valid, logits, -jnp.inf)
    return logits, at == t[..., None]

  def gathered(w, dtype):
    return jax.lax.all_gather(w.astype(dtype), over_fsdp, axis=0, tiled=True) if over_fsdp else w.astype(dtype)

  def forward(h, w, t):
    w = gathered(w, h.dtype)

    def one(h, t):
      total = lambda x: jax.lax.psum(jnp.sum(x, axis=-1), over_vocab)  # noqa: E731
      largest = lambda x: jax.lax.pmax(jnp.max(x, axis=-1), over_vocab)  # noqa: E731
      return _normalised(*logits_of(h, w, t), total, largest)

    _, out = _over_columns(lambda carry, h, t: (carry, one(h, t)), (), (h, t), chunks, columns)
    return out

  def backward(h, w, t, norm, entropy, g_logprob, g_entropy=None):
    stored, w = w.dtype, gathered(w, h.dtype)

    def one(d_head, h, t, norm, entropy, g_logprob, g_entropy=None):
      logits, chosen = logits_of(h, w, t)
      p = jnp.exp(logits - norm[..., None])
      g = g_logprob[..., None] * (chosen - p)
      if g_entropy is not None:  # dH/dz = -p (log p + H)
        g -= g_entropy[..., None] * p * (jnp.where(p > 0, logits - norm[..., None], 0.0) + entropy[..., None])
      g = (g * scale).astype(h.dtype)
      d_h = jnp.einsum("bcv,dv->bcd", g, w, preferred_element_type=jnp.float32)
      d_head += jnp.einsum("bcd,bcv->dv", h, g, preferred_element_type=jnp.float32)
      return d_head, (d_h.astype(h.dtype),)

    per_token = (h, t, norm, entropy, g_logprob) + (() if g_entropy is None else (g_entropy,))
    d_head, (d_h,) = _over_columns(one, jnp.zeros(w.shape, jnp.float32), per_token, chunks, columns)
    if over_fsdp:
      d_head = jax.lax.optimization_barrier(
        d_head.astype(h.dtype)
      )  # else the compiler drops the cast and sends float32
      # Another barrier: where the head is no embedding, the TPU compiler would move the scatter out of the loop over
      # micro-batches and fail at the cast before their sum (libtpu 0.0.42, while_loop_all_reduce_code_motion).
      d_head = jax.lax.optimization_barrier(jax.lax.psum_scatter(d_head, over_fsdp, scatter_dimension=0, tiled=True))
    return jax.lax.psum(d_h, over_vocab), jax.lax.psum(d_head, over_data).astype(stored)

  whole, vocab, token = P(*ROWS, None, None), P("fsdp", "tp"), P(*ROWS, None)

  @jax.custom_vjp
  def both(hidden, head, targets):
    return on_devices(hidden, head, targets)[:2]

  def on_devices(hidden, head, targets):
    shards = dict(in_specs=(whole, vocab, token), out_specs=(token,) * 3, check_vma=False)
    return jax.shard_map(forward, **shards)(hidden, head, targets)

  def both_forward(hidden, head, targets):
    arrays = hidden.value, head.value, targets.value
    logprobs, entropies, norms = on_devices(*arrays)
    return (logprobs, entropies), (*arrays, norms, entropies)

  def both_backward(saved, gradients):
    # An entropy that only a metric reads has no gradient, and none is computed.
    gradients = [g for g in gradients if not isinstance(g, jax.custom_derivatives.SymbolicZero)]
    specs = (whole, vocab, token, token, token) + (token,) * len(gradients)
    shards = dict(in_specs=specs, out_specs=(whole, vocab), check_vma=False)
    return *jax.shard_map(backward, **shards)(*saved, *gradients), None

  both.defvjp(both_forward, both_backward, symbolic_zeros=True)
  put = jax.sharding.reshard
  return both(put(hidden, whole), put(head, vocab), put(targets, token))


def _over_columns(function, carry, arrays, chunks, columns):
  """function(carry, *pieces) -> (carry, outputs) over the pieces [b, columns, ...] of arrays [b, R, ...]; the outputs
  joined.
  """
  R = arrays[0].shape[1]
  if chunks == 1:
    return function(carry, *arrays)
  behind = chunks * columns - R
  arrays = [jnp.pad(x, ((0, 0), (0, behind)) + ((0, 0),) * (x.ndim - 2)) for x in arrays]

  def body(carry, i):
    return function(carry, *(jax.lax.dynamic_slice_in_dim(x, i * columns, columns, axis=1) for x in arrays))

  carry, out = jax.lax.scan(body, carry, jnp.arange(chunks))
  join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], chunks * columns, *x.shape[3:])[:, :R]  # noqa: E731
  return carry, jax.tree.map(join, out)


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
  logits = jax.sharding.reshard(logits.astype(jnp.float32), P(ROWS[0], None))
  temperature = jnp.asarray(temperature, jnp.float32)
  if temperature.ndim == 0:
    temperature = jnp.full_like(logits[:, 0], temperature)
  greedy = (temperature == 0)[:, None]
  logits = logits / jnp.where(greedy, 1.0, temperature[:, None])
  noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
  choice = truncate_logits(logits, top_k, top_p) + jnp.where(greedy, 0.0, noise)
  tokens = jnp.argmax(choice, axis=-1).astype(jnp.int32)
  return tokens, logprob_and_entropy(logits, tokens)[0]
