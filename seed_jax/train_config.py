"""The section `train` of a config: the objective that it describes, and what cannot be trained.

The lists of values stand where the values are used. Here each value is handed to the function that uses it, on a single
token or on no episode at all, so that a run learns at once what its training stage would say hours later.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from envs.protocol import Task
from seed_jax import credit, instruments, learn, losses, methods
from seed_jax.fields import at
from seed_jax.methods import Method
from seed_jax.score import Context
from seed_jax.update import Batch, LossConfig, MethodLoss
from seed_jax.workdir import ConfigError

_AT_LEAST = {
  "train.num_tasks": 1,
  "train.tasks_per_iteration": 1,
  "train.group_size": 1,
  "train.iterations": 1,
  "train.minibatches": 1,
  "train.max_generations": 1,
  "train.micro_tokens": 1,
  "train.keep_skills": 0,
  "train.theory_every": 0,
  "train.loss.clip_low": 0,
  "train.loss.clip_high": 0,
  "train.loss.transform_decay": 0,
  "train.panel.every": 0,
  "train.panel.tasks": 1,
  "train.panel.samples": 1,
}
STARTS = ("", "sft", "base")  # policies that training may begin from; empty: as the method says


def loss_config(config) -> LossConfig:
  """The coefficients of a run's objective."""
  return LossConfig(**config.train.loss.to_dict(), temperature=config.rollout.temperature)


def check_train(config) -> None:
  """Raises ConfigError for a config that the stage `train` would refuse. Nothing of the run is needed for it."""
  c, method = config.train, methods.get(config.method)
  for path, least in _AT_LEAST.items():
    value = at(config, path)
    if value < least:
      raise ConfigError(f"config.{path}={value} must be {least} or more")
  if c.num_tasks < c.tasks_per_iteration:
    raise ConfigError(
      f"config.train.tasks_per_iteration={c.tasks_per_iteration} but config.train.num_tasks={c.num_tasks}; an "
      "iteration plays no task twice"
    )
  if c.async_level not in (0, 1):
    raise ConfigError(
      f"config.train.async_level={c.async_level} is unknown; 0 plays with the current policy, 1 a step ahead"
    )
  if c.start_from not in STARTS:
    raise ConfigError(f"config.train.start_from={c.start_from!r} is unknown; choose base or sft, or leave it empty")
  if not c.row_lengths or min(c.row_lengths) < 1:
    raise ConfigError(f"config.train.row_lengths={tuple(c.row_lengths)}: name at least one length, in tokens")
  if not 0 <= c.gamma <= 1:
    raise ConfigError(f"config.train.gamma={c.gamma} must be within [0, 1]")
  if config.rollout.temperature <= 0:
    raise ConfigError(
      f"config.rollout.temperature={config.rollout.temperature} must be above 0: training needs the log-probabilities "
      "of what was sampled"
    )
  try:
    loss = loss_config(config)
    learn.Scoring(None, method, loss, c.rescore)
    _no_advantages(method, c.normalize)
    if c.theory_every:
      instruments.check(method, float(c.loss.opd_beta))
  except ValueError as error:
    raise ConfigError(f"config.train: {error}") from error
  try:
    _try_objective(method, loss)
  except ValueError as error:
    raise ConfigError(f"config.train.loss: {error}") from error


def check_tasks(config, tasks: Sequence[Task]) -> None:
  """Raises ConfigError where the tasks of training are too few for an iteration."""
  c = config.train
  if len(tasks) < c.tasks_per_iteration:
    raise ConfigError(
      f"config.train.tasks_per_iteration={c.tasks_per_iteration} but the split {c.split!r} gave {len(tasks)} tasks"
    )


@functools.cache
def _no_advantages(method: Method, normalize: str) -> None:
  how = dict(advantage=method.advantage, step_advantage=method.step_advantage)
  credit.turn_advantages([], normalize=normalize, num_groups=1, num_turns=1, **how)


@functools.cache
def _try_objective(method: Method, loss: LossConfig) -> None:
  """Traces the objective on one token; nothing is compiled."""
  if not method.trains:
    return
  number, count, flag = (jax.ShapeDtypeStruct((), kind) for kind in (jnp.float32, jnp.int32, jnp.bool_))
  token, index = (jax.ShapeDtypeStruct((1, 1), kind) for kind in (jnp.float32, jnp.int32))
  batch = Batch(
    ordinary=Context(index, index, index, index),
    skill=None,
    targets=index,
    mask=token,
    skill_mask=token,
    advantages=token,
    sampler_logprobs=token,
    count=count,
    skill_count=count,
    old_logprobs=token,
    own_old=flag,
    skill_logprobs=token,
    ref_logprobs=token,
    transform_coef=number,
  )
  denominators = jax.eval_shape(lambda mask: losses.token_counts(mask=mask, skill_mask=mask), token)
  jax.eval_shape(MethodLoss(method, loss), token, token, batch, denominators)
