"""Trajectories to packed, fixed-shape batches.

Shapes: n tokens of a sample, r response tokens of a sample, M micro-batches, B rows, T row length, R response tokens of
a row.

A sample is one training sequence: a step (window mode) or a whole episode (transcript mode). Samples are packed
first-fit-decreasing into rows of the smallest allowed length that holds them; rows are grouped into micro-batches, and
these into batches of a fixed number M of them, so that no compiled shape depends on how many samples there are.
Padding has mask 0, segment 0, and never counts; an empty micro-batch is never computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from seed_jax import sharding
from seed_jax.score import Context
from seed_jax.trajectory import Trajectory
from seed_jax.update import Batch

MICRO_BATCHES = 8  # M of every batch: enough that a program is called seldom, few enough that an empty one is small


@dataclasses.dataclass(frozen=True)
class Sample:
  """One sequence in its ordinary and (where there is one) its skill context; response tokens are the same ids in both.

  index[j] is the column that predicts targets[j].
  """

  tokens: np.ndarray  # int32[n]
  index: np.ndarray  # int32[r]
  targets: np.ndarray  # int32[r]
  advantages: np.ndarray  # float32[r]
  logprobs: np.ndarray  # float32[r], the sampler's
  skill_tokens: np.ndarray | None = None  # int32[m]
  skill_index: np.ndarray | None = None  # int32[r]
  episode: int = 0  # which of the trajectories it comes from
  turns: np.ndarray | None = None  # int32[r], which turn of that trajectory a token is of

  @property
  def needs(self) -> tuple[int, int, int]:
    """What the sample takes of a row's room: ordinary tokens, skill tokens, response tokens.

    Without a skill it lies in the skill row with its ordinary context.
    """
    skill = self.tokens if self.skill_tokens is None else self.skill_tokens
    return len(self.tokens), len(skill), len(self.targets)

  @property
  def length(self) -> int:
    """Tokens of the longer context."""
    return max(self.needs[:2])


@dataclasses.dataclass(frozen=True)
class RowShape:
  """T tokens and R response tokens of a row, B rows of a micro-batch.

  Both contexts of a sample lie in the same row of their context. A skill makes the skill rows fuller than the ordinary
  ones: a `skill_length` above T lets the ordinary rows, which the update differentiates, be full. 0 stands for T.
  """

  length: int
  responses: int
  rows: int
  skill_length: int = 0

  @property
  def room(self) -> tuple[int, int, int]:
    """What an empty row has room for: ordinary tokens, skill tokens, response tokens."""
    return self.length, self.skill_length or self.length, self.responses

  def holds(self, sample: Sample) -> bool:
    """Whether an empty row has room for the sample."""
    return all(need <= room for need, room in zip(sample.needs, self.room, strict=True))


def episode_samples(
  trajectories: Sequence[Trajectory],
  advantages: Sequence[np.ndarray],
  skill_prompt: Callable[[Trajectory, int], Sequence[int] | None],
) -> list[Sample]:
  """Samples of finished episodes. `skill_prompt(trajectory, turn)` gives the prompt ids of that turn with the skill
  inserted, None for none.

  Window mode: one sample a turn. Transcript mode: one sample an episode, in which only the first prompt differs between
  the contexts.
  """
  samples = []
  for number, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True)):
    if trajectory.error or not trajectory.turns:
      continue
    turns = range(trajectory.length)
    parts = [[i] for i in turns] if trajectory.mode == "window" else [list(turns)]
    for part in parts:
      chosen = [trajectory.turns[i] for i in part]
      first = skill_prompt(trajectory, part[0])
      ordinary = _concatenate([t.prompt_ids for t in chosen], chosen)
      skill = (
        (None, None)
        if first is None
        else _concatenate([np.asarray(first, np.int32), *(t.prompt_ids for t in chosen[1:])], chosen)
      )
      samples.append(
        Sample(
          tokens=ordinary[0],
          index=ordinary[1],
          targets=np.concatenate([t.response_ids for t in chosen]),
          advantages=np.concatenate(
            [np.full(len(t.response_ids), advantage[i], np.float32) for i, t in zip(part, chosen, strict=True)]
          ),
          logprobs=np.concatenate([t.logprobs for t in chosen]),
          skill_tokens=skill[0],
          skill_index=skill[1],
          episode=number,
          turns=np.repeat(np.asarray(part, np.int32), [len(t.response_ids) for t in chosen]),
        )
      )
  return samples


def text_sample(prompt: Sequence[int], response: Sequence[int]) -> Sample:
  """A supervised sample: loss on the response only (an empty prompt trains every token but the first)."""
  tokens = np.asarray([*prompt, *response], np.int32)
  start = max(len(prompt), 1)
  zeros = np.zeros(len(tokens) - start, np.float32)
  return Sample(tokens[:-1], np.arange(start - 1, len(tokens) - 1, dtype=np.int32), tokens[start:], zeros, zeros)


def that_fit(samples: Sequence[Sample], shapes: Sequence[RowShape]) -> tuple[list[Sample], int]:
  """The samples that some row shape holds, and how many were left out. A skill context that is too long is given up
  before its sample is.
  """
  kept = []
  for sample in samples:
    alone = dataclasses.replace(sample, skill_tokens=None, skill_index=None)
    kept += [s for s in (sample, alone) if any(shape.holds(s) for shape in shapes)][:1]
  return kept, len(samples) - len(kept)


def pack(samples: Sequence[Sample], shapes: Sequence[RowShape]) -> dict[RowShape, list[list[Sample]]]:
  """Rows by shape: each sample goes to the smallest shape that holds it, first fit, longest first (stable, so
  reproducible).

  Samples without a skill come last: they fill up what is left and begin rows of their own, so that the rows with a
  skill come first and are no more than they must be. Raises ValueError, with the numbers, for a sample that fits no
  shape.
  """
  shapes = sorted(shapes, key=lambda s: s.length)
  rows: dict[RowShape, list[list[Sample]]] = {shape: [] for shape in shapes}
  # Room of all rows of a shape at once: first fit over a thousand rows is then one comparison of arrays a sample.
  room = {shape: np.zeros((len(samples), 3), np.int64) for shape in shapes}
  for sample in sorted(samples, key=lambda s: (s.skill_tokens is None, -s.length)):
    need = sample.needs
    shape = next((s for s in shapes if s.holds(sample)), None)
    if shape is None:
      raise ValueError(
        f"a sample of {sample.length} tokens ({need[2]} sampled) fits no row of "
        f"{[(s.length, s.responses) for s in shapes]} (tokens, sampled tokens): "
        "raise train.row_lengths, or lower the limits of the rollout"
      )
    filled = rows[shape]
    fits = (room[shape][: len(filled)] >= need).all(axis=1)
    place = int(fits.argmax()) if fits.any() else len(filled)
    if place == len(filled):
      filled.append([])
      room[shape][place] = shape.room
    filled[place].append(sample)
    room[shape][place] -= need
  return {shape: filled for shape, filled in rows.items() if filled}


def one_per_row(samples: Sequence[Sample], shapes: Sequence[RowShape]) -> dict[RowShape, list[list[Sample]]]:
  """The padded layout, `place=` of `to_batches`: every sample alone in a row of the longest shape. For comparisons."""
  longest = max(shapes, key=lambda s: s.length)
  for sample in samples:
    pack([sample], [longest])  # its error, if the sample does not fit
  return {longest: [[s] for s in sorted(samples, key=lambda s: s.skill_tokens is None)]} if samples else {}


def to_batches(
  samples: Sequence[Sample],
  shapes: Sequence[RowShape],
  mesh: jax.sharding.Mesh,
  *,
  skills: bool,
  transform_coef: float | None = None,
  micro_batches: int = MICRO_BATCHES,
  place: Callable = pack,
) -> list[Batch]:
  """Batches on the mesh, each of M = `micro_batches` micro-batches of one row shape; as many as are needed, and an
  empty one where there is no sample at all. skills=False builds no skill context; `transform_coef` is the strength
  of the method's transform of advantages.

  `place(samples, shapes)` gives the rows by shape.
  """
  parts = _parts(samples, shapes, micro_batches, place)
  options = skills, transform_coef, micro_batches
  return [_batch(rows, shape, mesh, *options) for shape, rows in parts]


def empty_batch(
  shape: RowShape,
  mesh: jax.sharding.Mesh,
  *,
  skills: bool,
  transform_coef: float | None = None,
  micro_batches: int = MICRO_BATCHES,
) -> Batch:
  """A batch of that row shape with nothing in it: what a program can be compiled for before there is a sample."""
  return _batch([], shape, mesh, skills, transform_coef, micro_batches)


def token_grids(
  samples: Sequence[Sample],
  shapes: Sequence[RowShape],
  field: Callable[[Sample], np.ndarray],
  *,
  micro_batches: int = MICRO_BATCHES,
  place: Callable = pack,
) -> list[np.ndarray]:
  """Arrays [M, B, R] of int32 `field(sample)` [r] of every response token, laid out as `to_batches` lays out the same
  samples: what the host wants to know of a token, and the device does not.
  """
  parts = _parts(samples, shapes, micro_batches, place)
  return [_grid(rows, shape, field, shape.responses, np.int32, micro_batches) for shape, rows in parts]


def _parts(samples, shapes, micro_batches, place):
  """(row shape, rows) of every batch; one without rows where there is no sample."""
  parts = [
    (shape, rows[at : at + micro_batches * shape.rows])
    for shape, rows in place(samples, shapes).items()
    for at in range(0, len(rows), micro_batches * shape.rows)
  ]
  return parts or [(min(shapes, key=lambda s: s.length), [])]


def _grid(rows, shape, field, width, dtype, M):
  """`field` of the samples of every row, end to end, as [M, B, width]; 0 where there is none."""
  return _fill(rows, shape, lambda row: np.concatenate([field(s) for s in row]), width, dtype, M)


def _fill(rows, shape, flat_of, width, dtype, M):
  out = np.zeros((M * shape.rows, width), dtype)
  for line, row in zip(out, rows, strict=False):
    if row:
      flat = flat_of(row)
      line[: len(flat)] = flat
  return out.reshape(M, shape.rows, width)


def row_fill(samples: Sequence[Sample], batches: Sequence[Batch]) -> float:
  """Share of the ordinary rows' columns that hold a token, over the micro-batches that are computed."""
  columns = sum(int(b.count) * b.ordinary.tokens.size // b.ordinary.tokens.shape[0] for b in batches)
  return sum(len(s.tokens) for s in samples) / max(columns, 1)


def _batch(rows, shape, mesh, skills, transform_coef, M) -> Batch:
  count = -(-len(rows) // shape.rows)
  with_skill = sum(any(s.skill_tokens is not None for s in row) for row in rows)  # these come first

  def grid(flat_of, width, dtype):
    return _fill(rows, shape, flat_of, width, dtype, M)

  def per_token(field, dtype):
    return _grid(rows, shape, field, shape.responses, dtype, M)

  arrays = dict(
    ordinary=_context(grid, shape.room[0], shape.responses, lambda s: (s.tokens, s.index)),
    skill=_context(grid, shape.room[1], shape.responses, _skill_side) if skills else None,
    targets=per_token(lambda s: s.targets, np.int32),
    mask=per_token(lambda s: np.ones(len(s.targets)), np.float32),
    skill_mask=per_token(lambda s: np.full(len(s.targets), s.skill_tokens is not None), np.float32),
    advantages=per_token(lambda s: s.advantages, np.float32),
    sampler_logprobs=per_token(lambda s: s.logprobs, np.float32),
  )
  scalars = dict(count=np.int32(count), skill_count=np.int32(-(-with_skill // shape.rows)))
  if transform_coef is not None:
    scalars["transform_coef"] = np.float32(transform_coef)
  return Batch(**sharding.put_rows(arrays, mesh, axis=1), **sharding.put_replicated(scalars, mesh))


def _context(grid, length, responses, side) -> Context:
  def starts(row):
    return np.cumsum([0] + [len(side(s)[0]) for s in row])[:-1]

  return Context(
    tokens=grid(lambda row: np.concatenate([side(s)[0] for s in row]), length, np.int32),
    positions=grid(lambda row: np.concatenate([np.arange(len(side(s)[0])) for s in row]), length, np.int32),
    segment_ids=grid(
      lambda row: np.concatenate([np.full(len(side(s)[0]), i) for i, s in enumerate(row, start=1)]), length, np.int32
    ),
    index=grid(
      lambda row: np.concatenate([start + side(s)[1] for start, s in zip(starts(row), row, strict=True)]),
      responses,
      np.int32,
    ),
  )


def _skill_side(sample: Sample):
  if sample.skill_tokens is None:  # scored like the ordinary context; its skill mask is 0
    return sample.tokens, sample.index
  return sample.skill_tokens, sample.skill_index


def _concatenate(prompts, turns):
  """Tokens of prompt, response, prompt, response ... (without the last token, which predicts nothing) and the
  predicting columns.
  """
  tokens, index, at = [], [], 0
  for prompt, turn in zip(prompts, turns, strict=True):
    tokens += [prompt, turn.response_ids]
    at += len(prompt)
    index.append(np.arange(at - 1, at - 1 + len(turn.response_ids), dtype=np.int32))
    at += len(turn.response_ids)
  return np.concatenate(tokens).astype(np.int32)[:-1], np.concatenate(index)
