"""Scoring the same sampled tokens in two contexts, in one batched forward pass and without gradient.

Shapes: M micro-batches, B rows, T tokens of a row, R response tokens of a row, D model.

A row holds one or more samples (segments). Row 2i is the ordinary context and row 2i + 1 the skill context of the same
samples in the same order, so splitting the pair is a local reshape: no collective builds it or takes it apart. `index`
is the column whose hidden state predicts the target.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from seed_jax import ops, sharding
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig

ROWS = sharding.ROWS[0]


@flax.struct.dataclass
class Context:
  """Packed rows of one context."""

  tokens: jax.Array  # [M, B, T] int32
  positions: jax.Array  # [M, B, T] int32, from 0 in every segment
  segment_ids: jax.Array  # [M, B, T] int32, 0 is padding
  index: jax.Array  # [M, B, R] int32


def interleave(ordinary, skill):
  """Two equal trees of arrays [B, ...] as one of [2B, ...]: ordinary at 2i, skill at 2i + 1 (one micro-batch)."""

  def pair(a, b):
    both = jnp.stack([a, b], axis=1)
    return jax.lax.reshape(both, (2 * a.shape[0], *a.shape[1:]), out_sharding=jax.sharding.PartitionSpec(ROWS, None))

  return jax.tree.map(pair, ordinary, skill)


def split_pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The inverse for a result [2B, R]: (ordinary [B, R], skill [B, R])."""
  both = jax.lax.reshape(
    x, (x.shape[0] // 2, 2, *x.shape[1:]), out_sharding=jax.sharding.PartitionSpec(ROWS, None, None)
  )
  return both[:, 0], both[:, 1]


def response_logprobs(params, context: Context, targets: jax.Array, config: ModelConfig, *, temperature: float = 1.0):
  """Log-probabilities and entropies [B, R] of targets [B, R], differentiable in params; logits exist at response
  positions only.
  """
  hidden = decoder.forward(params, context.tokens, context.positions, context.segment_ids, config)
  picked = decoder.gather_positions(hidden, context.index)
  return ops.token_logprobs(
    picked, decoder.stored_head(params), targets, temperature=temperature, num_valid=config.num_valid_tokens
  )


@jax.jit(static_argnames=("config", "temperature"))
def score_pair(
  params,
  ordinary: Context,
  skill: Context,
  targets: jax.Array,
  count: jax.Array,
  config: ModelConfig,
  *,
  temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities [M, B, R] of the targets in both contexts; only the first `count` micro-batches are computed, the
  others are 0.
  """

  width = max(ordinary.tokens.shape[-1], skill.tokens.shape[-1])

  def one(i):
    rows = interleave(widened(_at(ordinary, i), width), widened(_at(skill, i), width))
    both = interleave(_at(targets, i), _at(targets, i))  # the same action ids in both rows
    return jnp.stack(split_pair(response_logprobs(params, rows, both, config, temperature=temperature)[0]))

  with jax.named_scope("score_pair"):
    pair = _over_micro_batches(one, 0, count, (2, *targets.shape[1:]), targets.shape[0])
  return pair[:, 0], pair[:, 1]


@jax.jit(static_argnames=("config", "temperature"))
def score(
  params,
  context: Context,
  targets: jax.Array,
  count: jax.Array,
  config: ModelConfig,
  *,
  temperature: float = 1.0,
  start: jax.Array | None = None,
) -> jax.Array:
  """Log-probabilities [M, B, R] in one context, e.g. of the frozen reference policy; only the micro-batches from
  `start` (None: 0) up to `count` are computed, the others are 0.
  """

  def one(i):
    return response_logprobs(params, _at(context, i), _at(targets, i), config, temperature=temperature)[0]

  with jax.named_scope("score"):
    return _over_micro_batches(one, 0 if start is None else start, count, targets.shape[1:], targets.shape[0])


def widened(context: Context, width: int) -> Context:
  """Rows of one micro-batch with padding behind, so that they are `width` tokens long."""
  behind = width - context.tokens.shape[-1]
  if not behind:
    return context
  wide = lambda x: jnp.pad(x, ((0, 0), (0, behind)))  # noqa: E731
  tokens, positions, segments = (wide(x) for x in (context.tokens, context.positions, context.segment_ids))
  return context.replace(tokens=tokens, positions=positions, segment_ids=segments)


def _at(tree, i):
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=0, keepdims=False), tree)


def _over_micro_batches(function, start, count, shape, num_micro):
  """[num_micro, *shape] with function(i) at start <= i < count; the last two axes are [B, R], rows sharded."""
  spec = jax.sharding.PartitionSpec(*([None] * (len(shape) - 1)), ROWS, None)
  out = jnp.zeros((num_micro, *shape), jnp.float32, out_sharding=spec)

  def body(i, out):
    return jax.lax.dynamic_update_index_in_dim(out, function(i), i, axis=0)

  return jax.lax.fori_loop(start, count, body, out)
