"""Decode attention as two Pallas TPU kernels: one token a slot is written into its cache and reads the live part of it.

Shapes: S slots, N query heads, K key/value heads, G = N/K, H head size, C capacity of a slot, L layers.

A decode step is bound by the bytes of the cache that it reads. XLA reads all C positions of every slot; this kernel
reads ceil(length / block) blocks of each. The lengths are prefetched scalars, so that the pipeline knows, before the
step's data are there, which block comes next: past a slot's last live block the index does not move, and a block whose
index is that of the step before is not fetched again.

XLA's scatter wants the positions of a cache elsewhere in memory than a kernel does, so it would copy the whole cache
twice in every layer: `write_token` moves one tile of each slot instead.

Heads of less than 128 lanes are read as [..., H, C]: so the compiler lays out such an array on a TPU by itself, since
the other way round each head would be filled up to 128. That makes the `swapaxes` here a change of names, not a copy.
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
  """
  if layer is None:
    k, v, layer = k[None], v[None], 0
  (S, N, H), (L, _, K, C, _) = q.shape, k.shape
  assert k.shape == v.shape == (L, S, K, C, H) and lengths.shape == (S,) and N % K == 0, (q.shape, k.shape, v.shape)
  G = N // K
  rows = -(-G // SUBLANES) * SUBLANES  # of a head's queries, filled up to whole registers
  q = jnp.pad(q.reshape(S, K, G, H), ((0, 0), (0, 0), (0, rows - G), (0, 0)))
  block = min(block or _block_size(K * H * k.dtype.itemsize), C)
  lanes_are_positions = _lanes_are_positions(H)
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


def write_token(
  k_cache: jax.Array,
  v_cache: jax.Array,
  k: jax.Array,
  v: jax.Array,
  positions: jax.Array,
  layer: jax.Array | None = None,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """The caches with k[s] and v[s] at position positions[s] of slot s; in place where the caller's arrays allow it.

  k and v [S, K, H], caches as in `flash_decode`, positions [S] int32; one at or above the capacity writes nothing. The
  capacity is a multiple of 128, so that a tile never reaches over a slot's end.
  """
  if layer is None:
    written = write_token(k_cache[None], v_cache[None], k, v, positions, jnp.int32(0), interpret=interpret)
    return written[0][0], written[1][0]
  (S, K, H), C = k.shape, k_cache.shape[3]
  assert k_cache.shape[1:] == (S, K, C, H) and positions.shape == (S,) and C % LANES == 0, (k.shape, k_cache.shape)
  lanes_are_positions = _lanes_are_positions(H)
  if lanes_are_positions:
    tile, new_shape = (H, LANES), (S, K, H, 1)
    k_cache, v_cache = k_cache.swapaxes(3, 4), v_cache.swapaxes(3, 4)
  else:
    tile, new_shape = (32 // k_cache.dtype.itemsize, H), (S, K, 1, H)
  chunk = max(c for c in range(1, 17) if S % c == 0)  # slots whose tiles travel at the same time
  new_block = pl.BlockSpec((chunk, *new_shape[1:]), lambda i, *_: (i, 0, 0, 0))
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  tiles = pltpu.VMEM((chunk, K, *tile), k_cache.dtype)
  k_cache, v_cache = pl.pallas_call(
    functools.partial(_write_kernel, chunk=chunk, capacity=C, axis=2 if lanes_are_positions else 1),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(S // chunk,),
      in_specs=[new_block, new_block, anywhere, anywhere],
      out_specs=[anywhere, anywhere],
      scratch_shapes=[tiles, tiles, pltpu.SemaphoreType.DMA((2, chunk)), pltpu.SemaphoreType.DMA((2, chunk))],
    ),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_cache, v_cache)],
    input_output_aliases={4: 0, 5: 1},
    interpret=interpret,
    name="write_token",
  )(
    jnp.reshape(layer, (1,)).astype(jnp.int32),
    positions.astype(jnp.int32),
    k.astype(k_cache.dtype).reshape(new_shape),
    v.astype(v_cache.dtype).reshape(new_shape),
    k_cache,
    v_cache,
  )
  if lanes_are_positions:
    k_cache, v_cache = k_cache.swapaxes(3, 4), v_cache.swapaxes(3, 4)
  return k_cache, v_cache


def _lanes_are_positions(H: int) -> bool:
  return H % LANES != 0


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


def _write_kernel(
  layer, positions, k, v, k_in, v_in, k_out, v_out, k_tiles, v_tiles, reads, writes, *, chunk, capacity, axis
):
  """Some slots: their tiles come in, all at the same time, take the new row (or column), and go back."""
  first = pl.program_id(0) * chunk
  size = k_tiles.shape[1 + axis]

  def part(cache, i):
    at = pl.ds(pl.multiple_of(positions[first + i] // size * size, size), size)
    return cache.at[(layer[0], first + i, slice(None), *([at, slice(None)] if axis == 1 else [slice(None), at]))]

  def read(i):
    return [
      pltpu.make_async_copy(part(cache, i), tiles.at[i], reads.at[n, i])
      for n, (cache, tiles) in enumerate([(k_in, k_tiles), (v_in, v_tiles)])
    ]

  def write(i):
    return [
      pltpu.make_async_copy(tiles.at[i], part(cache, i), writes.at[n, i])
      for n, (cache, tiles) in enumerate([(k_out, k_tiles), (v_out, v_tiles)])
    ]

  def for_live(body):
    def step(i, _):
      pl.when(positions[first + i] < capacity)(lambda: body(i))

    jax.lax.fori_loop(0, chunk, step, None)

  def update(i):
    here = jax.lax.broadcasted_iota(jnp.int32, k_tiles.shape[1:], axis) == positions[first + i] % size
    for copy, tiles, new in zip(read(i), (k_tiles, v_tiles), (k, v), strict=True):
      copy.wait()
      tiles[i] = jnp.where(here, new[i], tiles[i])
    for copy in write(i):
      copy.start()

  for_live(lambda i: [copy.start() for copy in read(i)] and None)
  for_live(update)
  for_live(lambda i: [copy.wait() for copy in write(i)] and None)
