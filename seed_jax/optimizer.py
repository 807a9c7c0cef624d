"""The optimizer as an optax chain: clip by global norm, AdamW or Muon with decoupled decay, a schedule."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

SCHEDULES = ("constant", "cosine", "linear")
RULES = ("adamw", "muon")
MOMENTS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """rule: `adamw` (arXiv:1711.05101), or `muon` (orthogonalised momentum for the matrices of the layers, AdamW at
  `adam_rate` times the learning rate for everything else): half the updates where a small policy is trained from
  nothing. Learning rates are per update. `adamw` decays no norms and no biases; in `muon` the AdamW side is optax's,
  with Nesterov momentum and decay of all that it moves. `moment_dtype` "bfloat16" halves the memory of the moments, see
  `compact`.
  """

  rule: str = "adamw"
  learning_rate: float = 1e-6
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.01
  clip_norm: float = 1.0
  schedule: str = "constant"
  warmup: float = 0.0  # fraction of all updates
  adam_rate: float = 0.15  # muon only
  final_fraction: float = 0.0  # of the learning rate, where cosine and linear schedules end
  moment_dtype: str = "float32"


def schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
  """Linear warm-up over `warmup * total_updates`, then constant, cosine or linear to `final_fraction * peak`."""
  if config.schedule not in SCHEDULES:
    raise ValueError(f"schedule {config.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
  warmup = round(config.warmup * total_updates)
  rest = max(total_updates - warmup, 1)
  peak, end = config.learning_rate, config.learning_rate * config.final_fraction
  after = {
    "constant": optax.constant_schedule(peak),
    "cosine": optax.cosine_decay_schedule(peak, rest, config.final_fraction),
    "linear": optax.linear_schedule(peak, end, rest),
  }[config.schedule]
  # the first update already moves: warm-up runs from peak / warmup to peak
  return (
    optax.join_schedules([optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1)), after], [warmup])
    if warmup
    else after
  )


def make_optimizer(config: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
  """The chain; its state has the parameters' shapes and therefore their shardings."""

  def decayed(params):  # stacked norms and biases have few dimensions that are not L: name them instead of counting
    return jax.tree_util.tree_map_with_path(
      lambda path, _: not any(s in jax.tree_util.keystr(path) for s in ("norm", "bias")), params
    )

  rate = schedule(config, total_updates)
  if config.rule == "adamw":
    rule = optax.adamw(rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decayed)
  elif config.rule == "muon":
    rule = optax.contrib.muon(
      rate,
      adam_learning_rate=lambda step: config.adam_rate * rate(step),
      eps=config.eps,
      adam_b1=config.b1,
      adam_b2=config.b2,
      weight_decay=config.weight_decay,
      adam_weight_decay=config.weight_decay,
      weight_decay_mask=decayed,
      consistent_rms=0.2,  # updates of the size of AdamW's, whatever the shape
      muon_weight_dimension_numbers=_matrices,
    )
  else:
    raise ValueError(f"optimizer rule {config.rule!r} is unknown; choose one of {', '.join(RULES)}")
  if config.moment_dtype not in MOMENTS:
    raise ValueError(f"moment_dtype {config.moment_dtype!r} is unknown; choose one of {', '.join(MOMENTS)}")
  if config.moment_dtype == "bfloat16":
    rule = compact(rule)
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


class CompactState(NamedTuple):
  """The state of the rule inside with bfloat16 for float32, and how often it was written, which seeds the rounding."""

  count: jax.Array  # [] int32
  state: optax.OptState


def compact(rule: optax.GradientTransformation) -> optax.GradientTransformation:
  """The same rule, which computes in float32, with its state kept in bfloat16 between steps by `round_stochastically`.

  Rounding to nearest would freeze a second moment: with b2 = 0.999 it changes by less than a thousandth a step, which
  is below half of the last of bfloat16's 8 bits.
  """

  def init(params):
    state = rule.init(params)
    return CompactState(
      jnp.zeros((), jnp.int32), jax.tree.map(lambda x: x.astype(jnp.bfloat16) if _wide(x) else x, state)
    )

  def update(grads, state, params=None):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state.state)
    updates, new = rule.update(grads, wide, params)
    leaves, tree = jax.tree.flatten(new)
    key = jax.random.fold_in(jax.random.key(0), state.count)
    leaves = [round_stochastically(x, jax.random.fold_in(key, i)) if _wide(x) else x for i, x in enumerate(leaves)]
    return updates, CompactState(state.count + 1, jax.tree.unflatten(tree, leaves))

  return optax.GradientTransformation(init, update)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
  """float32 x as bfloat16, up or down with the probability that makes x its mean."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  bits = (bits + (jax.random.bits(key, x.shape, jnp.uint32) >> 16)) & jnp.uint32(0xFFFF0000)
  rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _wide(x):
  return x.dtype == jnp.float32 and x.ndim > 0


def _matrices(params):
  """Input and output axes of the stacked matrices of a decoder's layers; None (AdamW) for everything else."""
  Axes = optax.contrib.MuonDimensionNumbers
  heads_out, heads_in, plain = Axes(1, (2, 3)), Axes((1, 2), 3), Axes(1, 2)
  axes = {"q": heads_out, "k": heads_out, "v": heads_out, "o": heads_in, "gate": plain, "up": plain, "down": plain}
  top = {name: None for name in params if name != "layers"}
  return top | {"layers": {name: axes.get(name) for name in params["layers"]}}
