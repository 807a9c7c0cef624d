"""Prefill and the jitted decode loop over a slot cache.

Shapes: S slots, P slots of one prefill call, T new tokens of a slot, N tokens sampled at most, V vocabulary, C capacity
of a slot.

A slot's cache holds every token of its conversation but the last sampled one; that one is the first token that is read
next. So an episode that ends after a response never pays for a token nobody reads, and a response cut at a stop string
is forgotten by moving its length back. Lengths are the host's (see engine.py): the device holds the cache alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from seed_jax import attention, ops, sharding
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig

Cache = Any  # what decoder.init_cache makes


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1.0 are off."""

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


@flax.struct.dataclass
class Draw:
  """What a slot's next sample depends on besides its logits; coordinates and number alone make the key."""

  coordinates: jax.Array  # [X, 5] int32: position in the run, e.g. (iteration, task, member, turn, purpose)
  number: jax.Array  # [X] int32, index of the next token in its response
  temperature: jax.Array  # [X] float32, 0 is greedy


@flax.struct.dataclass
class Sampled:
  """What a decode loop produced; entries at or beyond `count` are filler."""

  tokens: jax.Array  # [S, N] int32
  logprobs: jax.Array  # [S, N] float32, of the sampled tokens over the full vocabulary at the sampling temperature
  count: jax.Array  # [S] int32
  steps: jax.Array  # [] int32, steps that the loop took


def init_cache(config: ModelConfig, num_slots: int, capacity: int) -> Cache:
  """Empty slots on the mesh in force; raises ValueError where they do not divide over its row shards."""
  rows = sharding.num_row_shards(jax.sharding.get_abstract_mesh())
  if num_slots % rows:
    raise ValueError(f"{num_slots} slots do not divide over {rows} row shards of the mesh")
  return _init_cache(config, num_slots, capacity)


_init_cache = jax.jit(decoder.init_cache, static_argnums=(0, 1, 2))


def for_loop(params: dict, config: ModelConfig) -> dict:
  """The parameters as `prefill` and `generate` read them, layer by layer where layers are unrolled. Both take others
  too, but then slice, and so copy, all weights at every call.
  """
  layers = params["layers"]
  if config.scan_layers or isinstance(layers, tuple):
    return params
  return params | {"layers": tuple(_layer(layers, np.int32(i)) for i in range(config.num_layers))}


@jax.jit
def _layer(layers, i):  # one small program for all layers instead of a large one
  return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, i, keepdims=False), layers)


@jax.jit(static_argnames=("config", "sampling"), donate_argnames="cache")
@jax.named_scope("prefill")
def prefill(
  params: dict,
  cache: Cache,
  slots: jax.Array | None,
  source: jax.Array | None,
  start: jax.Array,
  tokens: jax.Array,
  counts: jax.Array,
  draw: Draw,
  seed: jax.Array,
  config: ModelConfig,
  *,
  sampling: Sampling,
) -> tuple[jax.Array, jax.Array, Cache]:
  """Reads tokens[p, :counts[p]] into slot slots[p] behind the first start[p] tokens of slot source[p], and samples what
  follows the last of them: (token [P], log-probability [P], cache).

  tokens [P, T] right-padded. A source other than the slot itself is copied: members of a group share the prefill of
  their prompt. Slot numbers are local to their row shard (part d of the P belongs to shard d), so nothing crosses
  shards; a slot number outside its shard writes nothing. Without slot numbers (None) the P are all slots in their
  order, none of them moved: no row is copied out and back. Of a prompt read in several pieces only the last sample is
  of use.
  """
  axis, capacity = decoder.cache_slot_axis(config), decoder.cache_capacity(cache)
  column = jnp.arange(tokens.shape[1])
  positions = jnp.where(column < counts[:, None], start[:, None] + column, capacity)
  if slots is None:
    hidden, cache = decoder.forward(params, tokens, positions, None, config, cache=cache)
  else:
    some = _shard_local(lambda x, i: attention.take_slots(x, i, axis))(cache, source)
    hidden, some = decoder.forward(params, tokens, positions, None, config, cache=some)
    cache = _shard_local(lambda x, i, new: attention.put_slots(x, i, new, axis))(cache, slots, some)
  last = decoder.gather_positions(hidden, jnp.maximum(counts - 1, 0)[:, None])[:, 0]
  keys = _token_keys(_request_keys(seed, draw.coordinates), draw.number)
  logits = decoder.logits_at(params, last, config)
  token, logprob = ops.sample_tokens(
    logits, keys, temperature=draw.temperature, top_k=sampling.top_k, top_p=sampling.top_p
  )
  return token, logprob, cache


@jax.jit(static_argnames=("config", "sampling", "max_new", "stop_ids"), donate_argnames="cache")
@jax.named_scope("decode")
def generate(
  params: dict,
  cache: Cache,
  length: jax.Array,
  token: jax.Array,
  left: jax.Array,
  draw: Draw,
  seed: jax.Array,
  quorum: jax.Array,
  config: ModelConfig,
  *,
  sampling: Sampling,
  max_new: int,
  stop_ids: tuple[int, ...],
) -> tuple[Sampled, Cache]:
  """Decode steps in every slot with left[s] > 0: reads token[s] at position length[s], samples the next one, and so on
  until it has sampled left[s] tokens or one of stop_ids (kept: the EOS is trained), or is full.

  The loop ends after max_new steps, or as soon as `quorum` slots have finished, so that the host can hand their
  responses on and fill the slots again. length, token, left [S] int32. Token number i of a request is drawn with
  fold_in(key of its coordinates, i), whatever slot it sits in and whoever its neighbours are.
  """
  S = token.shape[0]
  capacity = decoder.cache_capacity(cache)
  params = decoder.unstack(params, config)
  keys = _request_keys(seed, draw.coordinates)
  idle = left <= 0

  def unfinished(carry):
    step, done = carry[0], carry[2]
    finished = jnp.sum(done & ~idle)
    return (step < max_new) & ~jnp.all(done) & (finished < quorum)

  def body(carry):
    step, token, done, length, cache, tokens, logprobs, count = carry
    positions = jnp.where(done, capacity, length)[:, None]
    hidden, cache = decoder.forward(params, token[:, None], positions, None, config, cache=cache)
    length = length + ~done
    token, logprob = ops.sample_tokens(
      decoder.logits_at(params, hidden[:, 0], config),
      _token_keys(keys, draw.number + step),
      temperature=draw.temperature,
      top_k=sampling.top_k,
      top_p=sampling.top_p,
    )
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step, axis=1)
    logprobs = jax.lax.dynamic_update_slice_in_dim(logprobs, logprob[:, None], step, axis=1)
    count = count + ~done
    done = done | (count >= left) | (length >= capacity)  # full: no room to read this token
    for stop in stop_ids:
      done = done | (token == stop)
    return step + 1, token, done, length, cache, tokens, logprobs, count

  spec = P(sharding.ROWS[0], None)
  tokens = jnp.zeros((S, max_new), jnp.int32, out_sharding=spec)
  logprobs = jnp.zeros((S, max_new), jnp.float32, out_sharding=spec)
  count = jnp.zeros((S,), jnp.int32, out_sharding=sharding.ROWS)
  carry = (jnp.int32(0), token, idle | (length >= capacity), length, cache, tokens, logprobs, count)
  carry = jax.lax.while_loop(unfinished, body, carry)
  return Sampled(*carry[5:], steps=carry[0]), carry[4]


@jax.jit(static_argnames="config")
def take_slots(cache: Cache, index: jax.Array, config: ModelConfig) -> Cache:
  """The slots at index [S'] as a smaller (or larger, or reordered) set, for when most conversations have ended."""
  lead = (slice(None),) * decoder.cache_slot_axis(config)
  return jax.tree.map(lambda x: x.at[(*lead, index)].get(out_sharding=jax.typeof(x).sharding.spec), cache)


@jax.jit(static_argnames="capacity")
def grow(cache: Cache, capacity: int) -> Cache:
  """The same slots with room for more tokens, for when a conversation outgrows what all of them have."""
  more = capacity - decoder.cache_capacity(cache)
  return jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)]), cache)


def _request_keys(seed, coordinates):
  """Typed keys [X] from coordinates [X, 5]: position in the run, never slot or time."""

  def one(row):
    key = jax.random.key(seed)
    for i in range(coordinates.shape[1]):
      key = jax.random.fold_in(key, row[i])
    return key

  return jax.vmap(one)(coordinates)


_token_keys = jax.vmap(jax.random.fold_in)


def _shard_local(function):
  """`function(leaf, index, ...)` over a cache, within each row shard: nothing is gathered from other shards."""

  def call(cache, index, *rest):
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (cache, index, *rest))

    def local(cache, index, *rest):
      return jax.tree.map(lambda x, *more: function(x, index, *more), cache, *rest)

    return jax.shard_map(local, in_specs=specs, out_specs=specs[0])(cache, index, *rest)

  return call
