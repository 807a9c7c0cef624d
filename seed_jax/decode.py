"""Prefill and the jitted decode loop over a slot cache.

Shapes: S slots, T new tokens of a slot, N tokens sampled at most, V vocabulary, C capacity of a slot.

A slot's cache holds every token of its conversation but the last sampled one; that one is the first token of the next
`extend`. So an episode that ends after a response never pays for a token nobody reads, and a response cut at a stop
string is forgotten by moving `length` back.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from seed_jax import attention, ops, sharding
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1.0 are off."""

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


@flax.struct.dataclass
class Slots:
  """The state of S conversations on the device: fixed shapes, donated from call to call."""

  layers: attention.LayerCache | tuple[attention.LayerCache, ...]  # see decoder.init_cache
  length: jax.Array  # [S] int32, tokens in the cache

  @property
  def capacity(self) -> int:
    return decoder.cache_capacity(self.layers)


@flax.struct.dataclass
class Sampled:
  """What a decode loop produced; entries at or beyond `count` are filler."""

  tokens: jax.Array  # [S, N] int32
  logprobs: jax.Array  # [S, N] float32, of the sampled tokens over the full vocabulary at the sampling temperature
  count: jax.Array  # [S] int32


def init_slots(config: ModelConfig, num_slots: int, capacity: int) -> Slots:
  """Empty slots on the mesh in force; rows over the data axes, key/value heads over `tp`."""
  mesh = jax.sharding.get_abstract_mesh()
  rows = sharding.num_row_shards(mesh)
  if num_slots % rows:
    raise ValueError(f"{num_slots} slots do not divide over {rows} row shards of the mesh")
  return _empty_slots(config, num_slots, capacity)


@jax.jit(static_argnums=(0, 1, 2))
def _empty_slots(config, num_slots, capacity):
  layers = decoder.init_cache(config, num_slots, capacity)
  return Slots(layers, jnp.zeros((num_slots,), jnp.int32, out_sharding=sharding.ROWS))


@jax.jit(static_argnames="config", donate_argnames="slots")
def extend(
  params: dict, slots: Slots, tokens: jax.Array, counts: jax.Array, config: ModelConfig
) -> tuple[jax.Array, Slots]:
  """Appends tokens[s, :counts[s]] to every slot and returns the logits [S, V] that follow the last of them.

  tokens [S, T] right-padded, counts [S] (0 leaves a slot as it is; its logits are meaningless). A slot of length 0 is
  an empty one.
  """
  column = jnp.arange(tokens.shape[1])
  positions = jnp.where(column < counts[:, None], slots.length[:, None] + column, slots.capacity)
  hidden, layers = decoder.forward(params, tokens, positions, None, config, cache=slots.layers)
  last = decoder.gather_positions(hidden, jnp.maximum(counts - 1, 0)[:, None])[:, 0]
  return decoder.logits_at(params, last, config), Slots(layers, slots.length + counts)


@jax.jit(static_argnames=("config", "sampling", "max_new", "stop_ids"), donate_argnames="slots")
def generate(
  params: dict,
  slots: Slots,
  logits: jax.Array,
  keys: jax.Array,
  offset: jax.Array,
  active: jax.Array,
  config: ModelConfig,
  *,
  sampling: Sampling,
  max_new: int,
  stop_ids: tuple[int, ...],
) -> tuple[Sampled, Slots]:
  """Samples up to max_new tokens in every active slot, each until it samples one of stop_ids (kept: the EOS is
  trained).

  logits [S, V] follow each slot's last token; keys [S] are typed PRNG keys, one a request; token number i = offset +
  step of a request is drawn with fold_in(key, i), whatever slot it sits in and whoever its neighbours are; active [S]
  bool. A slot that is full stops too.
  """
  S = logits.shape[0]
  params = decoder.unstack(params, config)

  def sample(logits, step, done, length, tokens, logprobs, count):
    token_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, offset + step)
    token, logprob = ops.sample_tokens(
      logits, token_keys, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], step, axis=1)
    logprobs = jax.lax.dynamic_update_slice_in_dim(logprobs, logprob[:, None], step, axis=1)
    count = count + ~done
    done = done | (length >= slots.capacity)  # no room to append this token
    for stop in stop_ids:
      done = done | (token == stop)
    return token, done, tokens, logprobs, count

  def unfinished(carry):
    step, done = carry[0], carry[2]
    return (step < max_new) & ~jnp.all(done)

  def body(carry):
    step, token, done, slots, tokens, logprobs, count = carry
    positions = jnp.where(done, slots.capacity, slots.length)[:, None]
    hidden, layers = decoder.forward(params, token[:, None], positions, None, config, cache=slots.layers)
    slots = Slots(layers, slots.length + ~done)
    logits = decoder.logits_at(params, hidden[:, 0], config)
    token, done, tokens, logprobs, count = sample(logits, step, done, slots.length, tokens, logprobs, count)
    return step + 1, token, done, slots, tokens, logprobs, count

  spec = P(sharding.ROWS[0], None)
  tokens = jnp.zeros((S, max_new), jnp.int32, out_sharding=spec)
  logprobs = jnp.zeros((S, max_new), jnp.float32, out_sharding=spec)
  count = jnp.zeros((S,), jnp.int32, out_sharding=sharding.ROWS)
  token, done, tokens, logprobs, count = sample(logits, 0, ~active, slots.length, tokens, logprobs, count)
  carry = jax.lax.while_loop(unfinished, body, (1, token, done, slots, tokens, logprobs, count))
  return Sampled(*carry[4:]), carry[3]


@jax.jit
def take_slots(slots: Slots, index: jax.Array) -> Slots:
  """The slots at index [S'] as a smaller (or reordered) set, for when most conversations have ended."""

  def pick(x):
    at = (slice(None), index) if x.ndim == 5 else (index,)  # a cache of all layers has them first
    return x.at[at].get(out_sharding=jax.typeof(x).sharding.spec)

  return jax.tree.map(pick, slots)


@jax.jit(static_argnames="width")
def request_keys(seed: jax.Array, coordinates: jax.Array, width: int = 5) -> jax.Array:
  """Typed keys [S] from integer coordinates [S, width], e.g. (iteration, task, member, turn, purpose): position in the
  run, never slot or time.
  """

  def one(row):
    key = jax.random.key(seed)
    for i in range(width):
      key = jax.random.fold_in(key, row[i])
    return key

  return jax.vmap(one)(coordinates)
