"""Decode attention as a Pallas TPU kernel: one query token a slot, over the live blocks of its cache only.

Shapes: S slots, N query heads, K key/value heads, G = N/K, H head size, C capacity of a slot, L layers, J blocks.

A decode step is bound by the bytes of the cache that it reads. XLA reads all C positions of every slot; this kernel
reads ceil(length / block) blocks of each. The lengths are prefetched scalars, so that the pipeline knows, before the
step's data are there, which block comes next: past a slot's last live block the index does not move, and a block whose
index is that of the step before is not fetched again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MASKED = -1e30  # finite: the difference of two of them is 0, not NaN
LANES = 128  # of a vector register; a running maximum is kept in all of them
SUBLANES = 8


def flash_decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  lengths: jax.Array,
  layer: jax.Array | None = None,
  *,
  block: int | None = None,
  interpret: bool = False,
) -> jax.Array:
  """softmax(q k^T / sqrt(H)) v over the first lengths[s] positions of slot s; a slot of length 0 gives zeros.

  q [S, N, H]; k and v [S, K, C, H], or [L, S, K, C, H] with the index `layer` (no slice of the cache is made); lengths
  [S] int32 of 0..C -> [S, N, H]. Query heads n of the same n // G share a key/value head. Scores, softmax and sums are
  float32. `block` is how many positions a step reads, of all key/value heads at once; None is as many as fill about 1
  MiB, which takes longer to read than a step takes to start. `interpret` runs it anywhere.

  Heads of less than 128 lanes are read as [..., H, C]: so the compiler lays out such an array on a TPU by itself, since
  the other way round each head would be filled up to 128. That makes `swapaxes` below a change of names, not a copy.
  """
  if layer is None:
    k, v, layer = k[None], v[None], 0
  (S, N, H), (L, _, K, C, _) = q.shape, k.shape
  assert k.shape == v.shape == (L, S, K, C, H) and lengths.shape == (S,) and N % K == 0, (q.shape, k.shape, v.shape)
  G = N // K
  rows = -(-G // SUBLANES) * SUBLANES  # of a head's queries, filled up to whole registers
  q = jnp.pad(q.reshape(S, K, G, H), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
  block = min(block or _block_size(K * H * k.dtype.itemsize), C)
  lanes_are_positions = H % LANES != 0
  if lanes_are_positions:
    k, v = k.swapaxes(3, 4), v.swapaxes(3, 4)
  lengths = lengths.astype(jnp.int32)
  source, last = sources(lengths, block)
  scalars = (jnp.reshape(layer, (1,)).astype(jnp.int32), lengths, source, last)

  def cache_index(s, j, layer, lengths, source, last):
    slot, at = block_read(s, j, lengths, source, last)
    return layer[0], slot, 0, *((0, at) if lanes_are_positions else (at, 0))

  cache_shape = (H, block) if lanes_are_positions else (block, H)
  cache_block = pl.BlockSpec((None, None, K, *cache_shape), cache_index)
  one_slot = pl.BlockSpec((None, K, rows, H), lambda s, j, *_: (s, 0, 0, 0))
  out = pl.pallas_call(
    functools.partial(_kernel, block=block, scale=H**-0.5, axis=2 if lanes_are_positions else 1),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(S, jnp.max(last) + 1),  # no step lies behind the longest slot
      in_specs=[one_slot, cache_block, cache_block],
      out_specs=one_slot,
      scratch_shapes=[
        pltpu.VMEM((K, rows, LANES), jnp.float32),
        pltpu.VMEM((K, rows, LANES), jnp.float32),
        pltpu.VMEM((K, rows, H), jnp.float32),
      ],
    ),
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    interpret=interpret,
    name="flash_decode",
  )(*scalars, q, k, v)
  return out[:, :, :G].reshape(S, N, H)


def sources(lengths: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
  """For each of lengths [S]: the slot whose blocks its steps read, and that slot's last live block.

  An idle slot (length 0) points at the live slot before it, so that it costs no read.
  """
  last = jnp.maximum(pl.cdiv(lengths, block) - 1, 0)
  slots = jnp.arange(lengths.shape[0], dtype=jnp.int32)
  source = jnp.maximum(jax.lax.cummax(jnp.where(lengths > 0, slots, -1)), 0)
  return source, last[source]


def block_read(s, j, lengths, source, last):
  """(slot, block) that the pipeline reads for step j of slot s; it fetches nothing where that is as the step before."""
  return source[s], jnp.where(lengths[s] > 0, jnp.minimum(j, last[s]), last[s])


def _block_size(bytes_per_position: int) -> int:
  return min(512, max(LANES, 2**20 // bytes_per_position // LANES * LANES))


def _kernel(layer, lengths, source, last, q, k, v, out, peak, total, mixed, *, block, scale, axis):
  """One block of one slot; `axis` counts the positions in k and v.

  `peak` and `total` are the running maximum and sum of the softmax, `mixed` its sum of values (Milakov and Gimelshein
  2018, "Online normalizer calculation for softmax").
  """
  del layer, source, last
  step = pl.program_id(1)
  length = lengths[pl.program_id(0)]

  @pl.when(step == 0)
  def _():
    peak[...] = jnp.full_like(peak, MASKED)
    total[...] = jnp.zeros_like(total)
    mixed[...] = jnp.zeros_like(mixed)

  @pl.when(step * block < length)
  def _():
    precision = jax.lax.Precision.HIGHEST if k.dtype == jnp.float32 else None  # else the MXU rounds it to bfloat16
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32, precision=precision)
    scores = dot(q[...].astype(k.dtype), k[...], (((2,), (3 - axis,)), ((0,), (0,)))) * scale  # [K, rows, block]
    at = step * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    scores = jnp.where(at < length, scores, MASKED)
    before = peak[...]
    now = jnp.maximum(before, jnp.max(scores, axis=2, keepdims=True))
    weights = jnp.exp(scores - now[:, :, :1])
    decay = jnp.exp(before - now)
    peak[...] = now
    total[...] = total[...] * decay + jnp.sum(weights, axis=2, keepdims=True)
    # What lies behind the length may be anything, and 0 times NaN is NaN.
    behind = step * block + jax.lax.broadcasted_iota(jnp.int32, v.shape, axis)
    values = jnp.where(behind < length, v[...], 0).astype(v.dtype)
    mixed[...] = mixed[...] * decay[:, :, :1] + dot(weights.astype(v.dtype), values, (((2,), (axis,)), ((0,), (0,))))

  @pl.when(step == pl.num_programs(1) - 1)
  def _():
    sums = total[:, :, :1]
    out[...] = (mixed[...] / jnp.where(sums == 0, 1.0, sums)).astype(out.dtype)
