"""Attention with segment ids, over rows of packed samples or over a slot cache; kernels on a TPU, XLA elsewhere.

Shapes: B rows (or slots), T query tokens, S key/value positions, N query heads, K key/value heads, G = N/K,
H head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec as P

from seed_jax import flash_decode, sharding
from seed_jax.sharding import ROWS

KERNEL_TILE = 128  # the kernels take lengths of its multiples only
MASKED = -1e30  # finite, so that a row without any visible key gives a uniform softmax and no NaN


FLOAT32 = {"preferred_element_type": jnp.float32}
OUT = "attention_out"  # a rematerialisation policy may keep what bears this name


class LayerCache(NamedTuple):
  """Keys and values of one layer, [B, K, S, H], or of all layers, [L, B, K, S, H]: heads before positions, so that
  decode reads a head's positions in one piece.
  """

  k: jax.Array
  v: jax.Array


def packed_mask(positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """[B, T, T] boolean: a token sees its own segment up to itself; segment 0 is padding and sees nothing."""
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  earlier = positions[:, :, None] >= positions[:, None, :]
  return same & earlier & (segment_ids[:, :, None] > 0)


def cache_mask(positions: jax.Array, capacity: int) -> jax.Array:
  """[B, T, S] boolean: position p of a slot is stored at index p, so a query sees indices up to its own position."""
  return jnp.arange(capacity)[None, None, :] <= positions[:, :, None]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """softmax(q k^T / sqrt(H) + mask) v with grouped queries.

  q [B, T, N, H], k and v [B, K, S, H], mask [B, T, S] -> [B, T, N, H].

  Scores and softmax are float32: in bfloat16 the sum over a few thousand keys is off by whole percents.
  """
  B, T, N, H = q.shape
  K, S = k.shape[1], k.shape[2]
  assert k.shape == v.shape == (B, K, S, H) and mask.shape == (B, T, S), (q.shape, k.shape, v.shape, mask.shape)
  G = N // K
  rows = ROWS[0]
  # [B, K, G*T, H]: one plain batched matmul per row and key/value head, the fastest form on a CPU
  q = jax.lax.reshape(q, (B, T, K, G, H), out_sharding=P(rows, None, "tp", None, None))
  q = q.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
  scores = jnp.einsum("bkxh,bksh->bkxs", q * H**-0.5, k, preferred_element_type=jnp.float32)
  scores = jnp.where(mask[:, None, None], scores.reshape(B, K, G, T, S), MASKED)
  weights = jax.nn.softmax(scores, axis=-1).reshape(B, K, G * T, S).astype(v.dtype)
  out = jnp.einsum("bkxs,bksh->bkxh", weights, v)
  out = out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4)
  return jax.lax.reshape(out, (B, T, N, H), out_sharding=P(rows, None, "tp", None))


def attend_packed(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Attention within the samples of packed rows, by `packed_mask` of positions and segment_ids [B, T]: q [B, T, N, H],
  k and v [B, T, K, H] -> [B, T, N, H].

  The samples of a row stand one after the other and in order, so no token sees a later column. What comes out at
  padding means nothing. On a TPU rows of a multiple of 128 tokens take the splash kernel, all others `flash_packed`.
  """
  if q.shape[1] % KERNEL_TILE == 0 and sharding.platform() == "tpu":
    return splash_packed(q, k, v, segment_ids)
  return flash_packed(q, k, v, positions, segment_ids)


def flash_packed(q, k, v, positions, segment_ids) -> jax.Array:
  """`attend_packed` in XLA: queries in pieces, each over the columns up to its end, and a backward pass that computes
  the weights again (Dao et al. 2022, "FlashAttention", algorithm 4).

  Half of the products fall away, and no [B, N, T, T] is kept: on a CPU, where such an array costs more in page faults
  than in arithmetic, forward and backward take a third and a half of the time that `attend` takes.
  """

  def local(q, k, v, positions, segment_ids):
    B, T, N, H = q.shape
    q = (q * H**-0.5).reshape(B, T, k.shape[2], -1, H).transpose(0, 2, 3, 1, 4)
    out = _flash(q, k.swapaxes(1, 2), v.swapaxes(1, 2), positions, segment_ids)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)

  rows, heads = P(ROWS[0], None), P(ROWS[0], None, "tp", None)
  return _on_shards(local, (heads, heads, heads, rows, rows), heads)(q, k, v, positions, segment_ids)


@jax.custom_vjp
def _flash(q, k, v, positions, segment_ids):
  """q [B, K, G, T, H] scaled, k and v [B, K, T, H] -> [B, K, G, T, H]."""
  return _flash_forward(q, k, v, positions, segment_ids)[0]


def _flash_forward(q, k, v, positions, segment_ids):
  outs, logs = [], []
  for piece in _pieces(q.shape[3]):
    queries, scores = _piece_scores(q, k, positions, segment_ids, *piece)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum("bkxs,bksh->bkxh", _flat(weights).astype(v.dtype), v[:, :, : piece[1]], **FLOAT32)
    outs.append((mixed.reshape(queries.shape) / total).astype(q.dtype))
    logs.append((peak + jnp.log(total))[..., 0])
  out = checkpoint_name(jnp.concatenate(outs, axis=3), OUT)
  log_totals = checkpoint_name(jnp.concatenate(logs, axis=3), OUT)
  return out, (q, k, v, positions, segment_ids, out, log_totals)


def _flash_backward(residuals, out_gradient):
  q, k, v, positions, segment_ids, out, log_totals = residuals
  T = q.shape[3]
  dot = jnp.sum(out.astype(jnp.float32) * out_gradient.astype(jnp.float32), axis=-1)
  q_gradients = []
  k_gradient = v_gradient = 0.0
  for begin, end in _pieces(T):
    queries, scores = _piece_scores(q, k, positions, segment_ids, begin, end)
    keys, values, given = k[:, :, :end], v[:, :, :end], _flat(out_gradient[:, :, :, begin:end])
    weights = jnp.exp(scores - log_totals[:, :, :, begin:end, None])
    slopes = jnp.einsum("bkxh,bksh->bkxs", given, values, **FLOAT32).reshape(scores.shape)
    slopes = _flat(weights * (slopes - dot[:, :, :, begin:end, None])).astype(q.dtype)
    weights = _flat(weights).astype(v.dtype)
    q_gradients.append(jnp.einsum("bkxs,bksh->bkxh", slopes, keys, **FLOAT32).reshape(queries.shape))
    # [.., H, S]: a product that would turn the larger factor around takes twice as long on a CPU
    behind = [(0, 0)] * 3 + [(0, T - end)]
    k_gradient += jnp.pad(jnp.einsum("bkxh,bkxs->bkhs", _flat(queries), slopes, **FLOAT32), behind)
    v_gradient += jnp.pad(jnp.einsum("bkxh,bkxs->bkhs", given, weights, **FLOAT32), behind)
  q_gradient = jnp.concatenate(q_gradients, axis=3).astype(q.dtype)
  return (
    q_gradient,
    k_gradient.swapaxes(2, 3).astype(k.dtype),
    v_gradient.swapaxes(2, 3).astype(v.dtype),
    None,
    None,
  )


_flash.defvjp(_flash_forward, _flash_backward)


def _piece_scores(q, k, positions, segment_ids, begin, end):
  """Queries begin..end, and their float32 scores [B, K, G, end - begin, end]."""
  B, K, G, _, H = q.shape
  queries = q[:, :, :, begin:end]
  scores = jnp.einsum("bkxh,bksh->bkxs", _flat(queries), k[:, :, :end], **FLOAT32)
  mask = packed_mask(positions[:, :end], segment_ids[:, :end])[:, begin:]
  return queries, jnp.where(mask[:, None, None], scores.reshape(B, K, G, end - begin, end), MASKED)


def _flat(x):
  """[B, K, G, T, X] -> [B, K, G * T, X]: the queries of a key/value head as one matrix."""
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _pieces(T: int) -> list[tuple[int, int]]:
  """At most four pieces of a multiple of 128 queries, the last one shorter: more save little and compile longer."""
  size = -(-T // 512) * 128
  return [(begin, min(begin + size, T)) for begin in range(0, T, size)]


def splash_packed(q, k, v, segment_ids, *, interpret: bool = False) -> jax.Array:
  """`attend_packed` by the splash kernel, forward and backward; each shard runs it over its rows and heads."""
  rows, heads = P(ROWS[0], None), P(ROWS[0], "tp", None, None)
  T, H = q.shape[1], q.shape[3]
  block = max(b for b in (128, 256, 512) if T % b == 0)  # 512 squared float32 scores are 1 MiB of the scratch memory

  def local(q, k, v, segment_ids):
    mask = splash.MultiHeadMask([splash.CausalMask((T, T))] * q.shape[1])
    kernel = splash.make_splash_mha(
      mask,
      head_shards=1,
      q_seq_shards=1,
      block_sizes=splash.BlockSizes(*[block] * 8),
      residual_checkpoint_name=OUT,
      interpret=interpret,
    )
    return jax.vmap(kernel)(q, k, v, splash.SegmentIds(segment_ids, segment_ids))

  q, k, v = (x.swapaxes(1, 2) for x in (q * H**-0.5, k, v))  # the kernel does not scale
  return _on_shards(local, (heads, heads, heads, rows), heads)(q, k, v, segment_ids).swapaxes(1, 2)


def extend_slots(
  q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, positions: jax.Array, layer: jax.Array | None = None
) -> tuple[jax.Array, LayerCache]:
  """Writes k and v [B, T, K, H] at positions [B, T] of the slots (see `append`), and attends from q [B, T, N, H] to
  what each slot then holds up to the query -> ([B, T, N, H], cache).

  A slot's positions follow each other; those at or above the capacity, behind them, are padding: the result there is
  finite and means nothing.
  """
  capacity = cache.k.shape[-2]
  if q.shape[1] == 1 and capacity % KERNEL_TILE == 0 and sharding.platform() == "tpu":
    return flash_slots(q, k, v, cache, positions, layer)
  if sharding.platform() == "tpu":
    return prefill_slots(q, k, v, cache, positions, layer)
  cache = append(cache, k, v, positions, layer)
  one = layer_of(cache, layer)
  return attend(q, one.k, one.v, cache_mask(positions, capacity)), cache


def flash_slots(q, k, v, cache: LayerCache, positions, layer=None, *, interpret: bool = False):
  """`extend_slots` by one token a slot, T = 1, by kernels that each shard runs for itself."""
  heads, whole = P(ROWS[0], "tp", None), jax.typeof(cache.k).sharding.spec
  index = () if layer is None else (layer,)

  def local(q, k, v, k_cache, v_cache, positions, *index):
    k_cache, v_cache = flash_decode.write_token(k_cache, v_cache, k, v, positions, *index, interpret=interpret)
    lengths = jnp.where(positions < k_cache.shape[-2], positions + 1, 0)
    return flash_decode.flash_decode(q, k_cache, v_cache, lengths, *index, interpret=interpret), k_cache, v_cache

  specs = (heads, heads, heads, whole, whole, ROWS, *(P() for _ in index))
  call = _on_shards(local, specs, (heads, whole, whole))
  out, *cache = call(q[:, 0], k[:, 0], v[:, 0], *cache, positions[:, 0], *index)
  return out[:, None], LayerCache(*cache)


def prefill_slots(q, k, v, cache: LayerCache, positions, layer=None):
  """`extend_slots` slot by slot, without a scatter, for which a TPU would copy the whole cache, and with the scores of
  one slot at a time in memory.
  """
  tokens, whole = P(ROWS[0], None, "tp", None), jax.typeof(cache.k).sharding.spec
  index = () if layer is None else (layer,)

  def local(q, k, v, k_cache, v_cache, positions, *index):
    (layer,) = index or (0,)
    stacked = (k_cache, v_cache) if index else (k_cache[None], v_cache[None])
    _, _, K, C, H = stacked[0].shape
    T = q.shape[1]
    column = jnp.arange(T)

    def write(s, caches):
      begin = jnp.minimum(positions[s, 0], C - T)  # the piece lies within the slot; the new tokens at its end then
      shift = positions[s, 0] - begin
      is_new = (column >= shift) & (column < shift + jnp.sum(positions[s] < C))

      def put(cache, new):
        at, size = (layer, s, 0, begin, 0), (1, 1, K, T, H)
        old = jax.lax.dynamic_slice(cache, at, size)
        new = jnp.roll(new[s].swapaxes(0, 1), shift, axis=1).astype(cache.dtype)
        return jax.lax.dynamic_update_slice(cache, jnp.where(is_new[:, None], new, old), at)

      return put(caches[0], k), put(caches[1], v)

    stacked = jax.lax.fori_loop(0, q.shape[0], write, stacked)

    def read(s):
      keys, values = (jax.lax.dynamic_slice(x, (layer, s, 0, 0, 0), (1, 1, K, C, H))[0] for x in stacked)
      queries = (q[s] * H**-0.5).reshape(1, T, K, -1, H).transpose(0, 2, 3, 1, 4)
      scores = jnp.einsum("bkxh,bksh->bkxs", _flat(queries), keys, **FLOAT32).reshape(*queries.shape[:4], C)
      scores = jnp.where(cache_mask(positions[s][None], C), scores, MASKED)
      weights = _flat(jax.nn.softmax(scores, axis=-1)).astype(values.dtype)
      out = jnp.einsum("bkxs,bksh->bkxh", weights, values, **FLOAT32).reshape(queries.shape)
      return out[0].transpose(2, 0, 1, 3).reshape(q.shape[1:]).astype(q.dtype)

    out = jax.lax.map(read, jnp.arange(q.shape[0]))
    return out, *(stacked if index else (stacked[0][0], stacked[1][0]))

  specs = (tokens, tokens, tokens, whole, whole, P(ROWS[0], None), *(P() for _ in index))
  out, *cache = _on_shards(local, specs, (tokens, whole, whole))(q, k, v, *cache, positions, *index)
  return out, LayerCache(*cache)


def append(
  cache: LayerCache, k: jax.Array, v: jax.Array, positions: jax.Array, layer: jax.Array | None = None
) -> LayerCache:
  """Writes k and v [B, T, K, H] at each slot's positions [B, T]; a position at or above the capacity is dropped.

  `layer` (an index) says where in a cache of all layers [L, B, K, S, H]; None is a cache of one layer.
  """

  def write_one(row, new, at):  # [K, S, H], [T, K, H], [T]
    return row.at[:, at].set(new.swapaxes(0, 1).astype(row.dtype), mode="drop")

  def write_in_stack(row, new, at, layer):  # [L, K, S, H]; the indices around the slice put T first
    return row.at[layer, :, at].set(new.astype(row.dtype), mode="drop")

  # Rows never talk to each other: the indexing is left to the compiler's own partitioner.
  if layer is None:
    batched, extra = jax.vmap(write_one), ()
  else:
    batched, extra = jax.vmap(write_in_stack, in_axes=(1, 0, 0, None), out_axes=1), (layer,)

  def write(leaf, new):
    spec = jax.typeof(leaf).sharding.spec
    return jax.sharding.auto_axes(batched, out_sharding=spec)(leaf, new, positions, *extra)

  return LayerCache(write(cache.k, k), write(cache.v, v))


def take_slots(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
  """Slots index [P] of an array of the cache, along `axis`, within a shard; an index out of range takes any slot."""
  if sharding.platform() != "tpu":
    return jnp.take(x, index, axis=axis, mode="clip")
  # One after the other: of a gather or a scatter along this axis a TPU makes a cache that lies otherwise in memory.
  pieces = [jax.lax.dynamic_slice_in_dim(x, index[i], 1, axis) for i in range(index.shape[0])]
  return jnp.concatenate(pieces, axis=axis)


def put_slots(x: jax.Array, index: jax.Array, new: jax.Array, axis: int) -> jax.Array:
  """The inverse of `take_slots`, in place where it can be; an index out of range puts nothing."""
  if sharding.platform() != "tpu":
    return x.at[(slice(None),) * axis + (index,)].set(new, mode="drop")

  def put(i, x):
    old = jax.lax.dynamic_slice_in_dim(x, index[i], 1, axis)
    valid = (index[i] >= 0) & (index[i] < x.shape[axis])
    piece = jnp.where(valid, jax.lax.dynamic_slice_in_dim(new, i, 1, axis), old)
    return jax.lax.dynamic_update_slice_in_dim(x, piece, index[i], axis)

  return jax.lax.fori_loop(0, index.shape[0], put, x)


def layer_of(cache: LayerCache, layer: jax.Array | None) -> LayerCache:
  """One layer of a cache of all layers; with layer None the cache is one layer's already."""
  if layer is None:
    return cache
  return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, axis=0, keepdims=False), cache)


def _on_shards(local, in_specs, out_specs):
  """`local` on every shard of its arguments; rows and heads never talk to each other."""
  # Nothing is said about the axes over which a kernel's result varies, so the check of that is off.
  call = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)
  return lambda *arrays: call(*map(jax.sharding.reshard, arrays, in_specs))
