"""Advantages that follow from scores: a method's `regrade` over all sampled tokens of an iteration at once.

Shapes: n tokens, M micro-batches, B rows, R response tokens of a row. The mini-batches are laid out in one line of n
tokens, of a fixed length so that the function is compiled once, and its advantages go back to their places.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from seed_jax import batching, hosts, sharding, token_line
from seed_jax.batching import RowShape, Sample
from seed_jax.methods import Method
from seed_jax.models.config import ModelConfig
from seed_jax.optimizer import make_optimizer
from seed_jax.relatives import linear_decay
from seed_jax.reward_model import RewardModel
from seed_jax.run import Run, optimizer_config
from seed_jax.trajectory import Trajectory, group_numbers
from seed_jax.update import Batch

Minibatches = Sequence[Sequence[Batch]]


@dataclasses.dataclass(frozen=True)
class Room:
  """What an iteration can hold at most; it fixes the compiled shape."""

  tokens: int
  turns: int
  groups: int


class Line:
  """The sampled tokens of an iteration in one line, float32[1, room.tokens], with the turn and the group of each.

  turn_ids, group_ids: int32[1, room.tokens]; turns count over all episodes, groups as they come; 0 on fill.
  mask: 1 on tokens, 0 on fill.

  `parts` are the samples of the mini-batches. Raises ValueError where there is more than the room holds.
  """

  def __init__(
    self,
    parts: Sequence[Sequence[Sample]],
    shapes: Sequence[RowShape],
    trajectories: Sequence[Trajectory],
    room: Room,
  ):
    starts = np.cumsum([0, *(t.length for t in trajectories)])
    numbers = group_numbers(trajectories)
    found = int(starts[-1]), len(numbers)
    if found[0] > room.turns or found[1] > room.groups:
      raise ValueError(f"{found[0]} turns of {found[1]} groups, but there is room for {room.turns} of {room.groups}")
    grids = lambda field: [g for samples in parts for g in batching.token_grids(samples, shapes, field)]  # noqa: E731
    self.room = room
    self._places = [grid > 0 for grid in grids(lambda s: np.ones(len(s.targets)))]
    self.turn_ids = self._line(grids(lambda s: starts[s.episode] + s.turns), np.int32)
    self.group_ids = self._line(
      grids(lambda s: np.full(len(s.targets), numbers[trajectories[s.episode].group])), np.int32
    )
    self.mask = self._line(self._places)

  def read(self, minibatches: Minibatches, field: Callable[[Batch], jax.Array]) -> np.ndarray:
    """`field(batch)` [M, B, R] of every token."""
    return self.flat([[field(b) for b in part] for part in minibatches])

  def flat(self, arrays: Sequence[Sequence[jax.Array]]) -> np.ndarray:
    """Arrays [M, B, R], those of a mini-batch in a list of their own, as a line."""
    return self._line(hosts.fetch([a for part in arrays for a in part]))

  def write(self, minibatches: Minibatches, advantages) -> list[list[Batch]]:
    """The mini-batches with these advantages, [1, room.tokens]."""
    grids = iter(token_line.scatter(np.asarray(advantages, np.float32).reshape(-1), self._places))
    put = lambda b: b.replace(advantages=sharding.put(next(grids), b.advantages.sharding))  # noqa: E731
    return [[put(b) for b in part] for part in minibatches]

  def _line(self, grids, dtype=np.float32) -> np.ndarray:
    return token_line.filled(token_line.gather(grids, self._places), self.room.tokens, dtype)


def regraded(
  regrade: Callable, line: Line, minibatches: Minibatches, *, coef: float, reward_logprobs: np.ndarray | None = None
) -> tuple[list[list[Batch]], dict[str, float]]:
  """Scored mini-batches with the advantages that `regrade` gives, and metrics: `regrade_change`, the mean over tokens
  of |new - old| / (mean over tokens of |old|).

  `regrade` compares with the skill context, or, where they are there, with a reward model's log-probabilities, [1, n].
  """
  values = dict(
    advantages=line.read(minibatches, lambda b: b.advantages),
    old_logprobs=line.read(minibatches, lambda b: b.old_logprobs),
  )
  if reward_logprobs is None:
    values["skill_logprobs"] = line.read(minibatches, lambda b: b.skill_logprobs)
    values["skill_mask"] = line.read(minibatches, lambda b: b.skill_mask)
  else:
    values |= dict(skill_logprobs=reward_logprobs, skill_mask=line.mask)
  ids = dict(turn_ids=line.turn_ids, group_ids=line.group_ids)
  new = np.asarray(call(regrade, **values, **ids, coef=coef, num_turns=line.room.turns, num_groups=line.room.groups))
  change, size = np.abs(new - values["advantages"]).sum(), np.abs(values["advantages"]).sum()
  return line.write(minibatches, new), {"regrade_change": float(change / max(size, 1e-9))}


@functools.partial(jax.jit, static_argnames=("regrade", "num_turns", "num_groups"))
def call(regrade: Callable, *, coef, num_turns: int, num_groups: int, **values):
  """`regrade` as one compiled program."""
  return regrade(**values, coef=jnp.asarray(coef, jnp.float32), num_turns=num_turns, num_groups=num_groups)


def compile_call(regrade: Callable, room: Room, coef=0.0) -> None:
  """Compiles `call` for that room."""
  zeros, ids = np.zeros((1, room.tokens), np.float32), np.zeros((1, room.tokens), np.int32)
  values = dict(advantages=zeros, old_logprobs=zeros, skill_logprobs=zeros, skill_mask=zeros)
  call(regrade, **values, turn_ids=ids, group_ids=ids, coef=coef, num_turns=room.turns, num_groups=room.groups)


class Regrade:
  """Between scoring and the update of stage `train`: new advantages where the method has a `regrade`, else nothing.

  reward_model: of a method that trains one, else None; its `state` belongs into the run's checkpoints.
  """

  def __init__(self, run: Run, method: Method, shapes: Sequence[RowShape], model: ModelConfig, params):
    c, r = run.config.train, run.config.rollout
    self.reward_model = None
    if method.reward_loss is not None:
      # iStar's rates, 1e-6 beside the policy's 5e-7, and its bound of the gradient
      config = optimizer_config(c.optimizer)
      config = dataclasses.replace(config, learning_rate=2 * config.learning_rate, clip_norm=10.0)
      chain = make_optimizer(config, c.iterations)
      options = dict(episodes=c.tasks_per_iteration * c.group_size, temperature=r.temperature)
      with jax.set_mesh(run.mesh):
        self.reward_model = RewardModel(model, params, chain, method.reward_loss, **options)
    self._mesh = run.mesh
    turns = c.tasks_per_iteration * c.group_size * r.max_steps
    self.room = Room(turns * r.max_response, turns, c.tasks_per_iteration * c.max_generations)
    self.regrade, self.shapes, self._loss = method.regrade, shapes, c.loss

  def programs(self) -> list[tuple[str, Callable[[], None]]]:
    """What calls will compile, as (name, a call that compiles it)."""
    if self.regrade is None:
      return []
    out = [("weights of turns", lambda: compile_call(self.regrade, self.room, self._coef(0)))]
    if self.reward_model is not None:
      out.append(("reward model", lambda: self.reward_model.compile(self.shapes, self._mesh)))
    return out

  def __call__(self, minibatches: Minibatches, parts, trajectories: Sequence[Trajectory], iteration: int):
    """(mini-batches, metrics), given the mini-batches of these samples as `learn.score_all` leaves them."""
    if self.regrade is None:
      return minibatches, {}
    line = Line(parts, self.shapes, trajectories, self.room)
    coef = self._coef(iteration)
    if self.reward_model is None:
      return regraded(self.regrade, line, minibatches, coef=coef)
    rewards = line.flat(self.reward_model.score(minibatches))
    new, log = regraded(self.regrade, line, minibatches, coef=coef, reward_logprobs=rewards)
    gaps = rewards - line.read(minibatches, lambda b: b.old_logprobs)
    return new, log | self.reward_model.train(minibatches, line, trajectories, gaps)

  def _coef(self, iteration: int):
    return linear_decay(iteration, start=self._loss.transform_coef, iterations=self._loss.transform_decay)
