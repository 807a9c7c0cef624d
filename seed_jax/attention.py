"""Attention with segment ids, over rows of packed samples or over a slot cache; kernels on a TPU, XLA elsewhere.

Shapes: B rows (or slots), T query tokens, S key/value positions, N query heads, K key/value heads, G = N/K,
H head size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from seed_jax import flash_decode, sharding
from seed_jax.sharding import ROWS

MASKED = -1e30  # finite, so that a row without any visible key gives a uniform softmax and no NaN


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


def attend_slots(q: jax.Array, cache: LayerCache, positions: jax.Array, layer: jax.Array | None = None) -> jax.Array:
  """Attention of q [B, T, N, H] at positions [B, T] over what its slot holds up to them -> [B, T, N, H].

  The cache as in `append`. A query at or above the capacity is padding: its result is finite and means nothing.
  """
  if q.shape[1] == 1 and sharding.platform() == "tpu":
    return flash_slots(q, cache, positions, layer)
  k, v = layer_of(cache, layer)
  return attend(q, k, v, cache_mask(positions, k.shape[2]))


def flash_slots(q, cache: LayerCache, positions, layer=None, *, interpret: bool = False) -> jax.Array:
  """`attend_slots` of one query token a slot, q [B, 1, N, H], by the kernel, which each shard runs by itself."""
  capacity, rows = cache.k.shape[-2], ROWS[0]
  lengths = jnp.where(positions < capacity, positions + 1, 0)[:, 0]
  heads, whole = P(rows, "tp", None), jax.typeof(cache.k).sharding.spec
  call = jax.shard_map(
    functools.partial(flash_decode.flash_decode, interpret=interpret),
    in_specs=(heads, whole, whole, P(rows), *([] if layer is None else [P()])),
    out_specs=heads,
    check_vma=False,  # a kernel's result does not say over which axes it varies
  )
  return call(q[:, 0], *cache, lengths, *([] if layer is None else [layer]))[:, None]


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


def layer_of(cache: LayerCache, layer: jax.Array | None) -> LayerCache:
  """One layer of a cache of all layers; with layer None the cache is one layer's already."""
  if layer is None:
    return cache
  return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, axis=0, keepdims=False), cache)
