"""The learning half of an iteration: mini-batches of its samples, the scoring that each needs, and their updates.

Shapes: M micro-batches, B rows, R response tokens of a row.

What is scored, in units of one forward pass over the ordinary rows (no gradient anywhere here):

| mini-batch | old (ordinary context)                            | skill context                     |
|------------|---------------------------------------------------|-----------------------------------|
| first      | nothing: the update's own, the policy is the same | one pass                          |
| later      | one pass, before the first update                 | the other rows of that pass       |
|            | with rescore = "minibatch": one pass              | one pass, just before its update  |

plus one pass by the reference where the loss has a KL term. Where the teacher is not the current policy
(`Method.teacher`), it scores the skill context in a pass of its own, once, whatever rescore says. Micro-batches in
which no sample has a skill are left out of the skill context. Where a method re-weighs whole groups after scoring
(`Method.regrade`), the first mini-batch is scored like a later one.

What both contexts of a sample have in common, their tokens before the inserted skill, is computed twice: 8 % of a pair
in transcripts of the quickstart, 2-5 % in ALFWorld windows. A program of its own would cost more than that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from seed_jax import batching, hosts, score, token_line
from seed_jax.batching import RowShape, Sample
from seed_jax.methods import Method
from seed_jax.models.config import ModelConfig
from seed_jax.update import Batch, LossConfig, Pieces, TrainState, Update

RESCORE = ("iteration", "minibatch")


@dataclasses.dataclass(frozen=True)
class Scoring:
  """What decides which passes a mini-batch needs.

  rescore: "iteration" (official code) scores the skill context with the policy at the start of the iteration,
    "minibatch" (the paper's notation) with the current one. With a teacher that does not move they are the same.
  """

  model: ModelConfig
  method: Method
  loss: LossConfig
  rescore: str = "iteration"

  def __post_init__(self):
    if self.rescore not in RESCORE:
      raise ValueError(
        f"rescore={self.rescore!r} is unknown; choose iteration (official code) or minibatch (the paper's notation)"
      )
    if self.rescore != "iteration" and self.method.regrade is not None and self.method.needs_skills:
      raise ValueError(
        f"method {self.method.name!r} weighs all turns of an iteration at once, so that "
        f"rescore={self.rescore!r} has no meaning; use rescore=iteration"
      )
    if self.rescores and self.method.transform is not None:
      raise ValueError(
        f"method {self.method.name!r} compares the skill context with the policy at the start of the iteration; with "
        f"rescore={self.rescore!r} it would compare two policies, too; use rescore=iteration"
      )

  @property
  def batch_options(self) -> dict:
    """What `batching.to_batches` must put into a batch for this loss: structure, the same in every iteration."""
    coef = None if self.method.transform is None else self.loss.transform_coef
    return dict(skills=self.method.needs_skills, transform_coef=coef)

  @property
  def rescores(self) -> bool:
    """Whether later mini-batches get their skill context scored just before their update."""
    return self.rescore == "minibatch" and self.method.needs_skills and self.method.teacher == "current"

  @property
  def own_old(self) -> bool:
    """Whether the update's own log-probabilities are the first mini-batch's old ones: nothing else reads them."""
    return self.method.regrade is None


def mini_batches(samples: Sequence[Sample], count: int, seed: int) -> list[list[Sample]]:
  """`count` parts of nearly equal size, drawn from the seed; the order within a part is that of `samples`."""
  order = np.random.default_rng(seed).permutation(len(samples))
  return [[samples[i] for i in sorted(part)] for part in np.array_split(order, min(count, max(len(samples), 1)))]


def scored(batch: Batch, params, reference, scoring: Scoring, *, first: bool, teacher=None) -> Batch:
  """The batch with all log-probabilities that the update cannot compute itself, by the policy `params` that the
  iteration starts with. `first`: it belongs to the first mini-batch. `reference` is None where there is no KL term,
  `teacher` where the skill context is read by the policy itself.
  """
  skill = scoring.method.needs_skills and teacher is None
  nothing = jnp.zeros_like(batch.count)
  old = batch.sampler_logprobs  # stands for nothing: of the first mini-batch it is never read
  if not first and skill and scoring.rescore == "iteration":
    old, skill_logprobs = _score_pair(params, batch, scoring)
    old = old + _score(params, batch, "ordinary", scoring, batch.skill_count, batch.count)
    batch = batch.replace(skill_logprobs=skill_logprobs)
  elif not first:
    old = _score(params, batch, "ordinary", scoring, nothing, batch.count)
  elif skill:
    batch = rescored(batch, params, scoring)
  if teacher is not None:
    batch = rescored(batch, teacher, scoring)
  if reference is not None:
    batch = batch.replace(ref_logprobs=_score(reference, batch, "ordinary", scoring, nothing, batch.count))
  return batch.replace(old_logprobs=old, own_old=jnp.full_like(batch.count, first, bool))


def rescored(batch: Batch, params, scoring: Scoring) -> Batch:
  """The skill context scored by the current parameters; what was scored before stays."""
  skill = _score(params, batch, "skill", scoring, jnp.zeros_like(batch.count), batch.skill_count)
  return batch.replace(skill_logprobs=skill)


def score_all(
  minibatches: Sequence[Sequence[Batch]], params, reference, scoring: Scoring, teacher=None
) -> list[list[Batch]]:
  """`scored` for the mini-batches of an iteration, in their order."""
  return [
    [scored(b, params, reference, scoring, first=scoring.own_old and not number, teacher=teacher) for b in part]
    for number, part in enumerate(minibatches)
  ]


def update_all(
  step: Update, state: TrainState, minibatches: Sequence[Sequence[Batch]], scoring: Scoring
) -> tuple[TrainState, dict[str, float]]:
  """One optimizer step a mini-batch. Metrics are means over them, of a metric named `..._max` the largest."""
  return Pieces(updates(step, state, minibatches, scoring)).finish()


def updates(
  step: Update,
  state: TrainState,
  minibatches: Sequence[Sequence[Batch]],
  scoring: Scoring,
  replayed: Sequence[Sequence[Batch]] = (),
) -> Generator[None, None, tuple[TrainState, dict[str, float]]]:
  """`update_all` as a generator that stops after every program, for who fills the pauses of something else with it.

  `replayed`: scored batches of older samples, for each of the first mini-batches a list; see `Update.pieces`.
  """
  taken = []
  for number, part in enumerate(minibatches):
    if number and scoring.rescores:
      part = [rescored(b, state.params, scoring) for b in part]
    ordinary = [b.replace(skill=None) for b in part]  # only these rows are differentiated
    more = [[b.replace(skill=None) for b in replayed[number]]] if number < len(replayed) else []
    state, metrics = yield from step.pieces(state, ordinary, *more)
    taken.append(metrics)
  taken = jax.device_get(taken)
  over = {name: np.max if name.endswith("_max") else np.mean for name in taken[0]}
  return state, {name: float(reduce([u[name] for u in taken])) for name, reduce in over.items()}


def skill_pairs(
  minibatches: Sequence[Sequence[Batch]], parts: Sequence[Sequence[Sample]], shapes: Sequence[RowShape]
) -> dict[str, np.ndarray]:
  """Both log-probabilities of every token with a skill in scored mini-batches, [1, tokens], and the episode it is of:
  `skill_quality.gain_by_episode`'s arguments. `parts` are the samples of the mini-batches; `logprobs` the sampler's.
  With rescore = "minibatch" the later mini-batches are not scored yet, and their tokens are not there.
  """
  episode_of = lambda s: np.full(len(s.targets), s.episode)  # noqa: E731
  grids = [grid for samples in parts for grid in batching.token_grids(samples, shapes, episode_of)]
  batches = [b for part in minibatches for b in part]
  known = [(b, grid) for b, grid in zip(batches, grids, strict=True) if b.skill_logprobs is not None]
  rows = hosts.fetch([(b.mask, b.skill_mask, b.sampler_logprobs, b.skill_logprobs) for b, _ in known])
  places = [mask * skill_mask > 0 for mask, skill_mask, _, _ in rows]
  columns = dict(logprobs=[row[2] for row in rows], skill_logprobs=[row[3] for row in rows])
  columns |= dict(mask=places, episode=[grid for _, grid in known])
  lines = {name: token_line.gather(arrays, places) for name, arrays in columns.items()}
  return {name: x[None].astype(np.int32 if name == "episode" else np.float32) for name, x in lines.items()}


def programs(
  step: Update,
  state: TrainState,
  reference,
  scoring: Scoring,
  shapes: Sequence[RowShape],
  mesh: jax.sharding.Mesh,
  *,
  minibatches: int,
  teacher=None,
) -> list[tuple[str, Callable[[], None]]]:
  """What `score_all` and `update_all` will compile, as (name, a call that compiles it), so that it can be done before
  the first iteration and with a progress bar. The calls leave the state as it is; each needs the mesh to be set.
  """

  def warm(shape, first):
    empty = batching.empty_batch(shape, mesh, **scoring.batch_options)
    batch = scored(empty, state.params, reference, scoring, first=first, teacher=teacher)
    if not first and scoring.rescores:
      batch = rescored(batch, state.params, scoring)
    jax.block_until_ready(batch)
    return batch

  def update(shape):
    step.compile(state, warm(shape, scoring.own_old).replace(skill=None))

  out = []
  for shape in shapes:
    kinds = (("first", True), ("later", False))[:minibatches] if scoring.own_old else (("every", False),)
    out += [
      (f"scoring a {kind} mini-batch, rows of {shape.length}", functools.partial(warm, shape, first))
      for kind, first in kinds
    ]
    out.append((f"update, rows of {shape.length}", functools.partial(update, shape)))
  return out


def _score_pair(params, batch, scoring):
  return score.score_pair(
    params,
    batch.ordinary,
    batch.skill,
    batch.targets,
    batch.skill_count,
    scoring.model,
    temperature=scoring.loss.temperature,
  )


def _score(params, batch, context, scoring, start, count):
  return score.score(
    params,
    getattr(batch, context),
    batch.targets,
    count,
    scoring.model,
    temperature=scoring.loss.temperature,
    start=start,
  )
