"""The optimizer as an optax chain: clip by global norm, AdamW with decay on matrices only, a schedule."""

from __future__ import annotations

import dataclasses

import jax
import optax

SCHEDULES = ("constant", "cosine", "linear")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW of Loshchilov & Hutter (arXiv:1711.05101); learning rates per update."""

  learning_rate: float = 1e-6
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.01
  clip_norm: float = 1.0
  schedule: str = "constant"
  warmup: float = 0.0  # fraction of all updates
  final_fraction: float = 0.0  # of the learning rate, where cosine and linear schedules end


def schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
  """Linear warm-up over `warmup * total_updates`, then constant, cosine or linear to `final_fraction * learning_rate`."""
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
  return optax.join_schedules([optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1)), after], [warmup]) if warmup else after


def make_optimizer(config: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
  """The chain; its state has the parameters' shapes and therefore their shardings."""

  def decayed(params):  # stacked norms and biases have few dimensions that are not L: name them instead of counting
    return jax.tree_util.tree_map_with_path(lambda path, _: not any(s in jax.tree_util.keystr(path) for s in ("norm", "bias")), params)

  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      schedule(config, total_updates), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decayed
    ),
  )
