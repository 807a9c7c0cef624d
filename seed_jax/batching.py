"""Trajectories to packed, fixed-shape batches.

Shapes: n tokens of a sample, r response tokens of a sample, M micro-batches, B rows, T row length, R response tokens of
a row.

A sample is one training sequence: a step (window mode) or a whole episode (transcript mode). Samples are packed
first-fit-decreasing into rows of the smallest allowed length that holds them; rows are grouped into micro-batches.
Padding has mask 0, segment 0, and never counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from seed_jax import sharding
from seed_jax.advantages import group_advantages
from seed_jax.score import Context
from seed_jax.trajectory import Trajectory
from seed_jax.update import Batch


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

  @property
  def length(self) -> int:
    """Tokens of the longer context: what a row must hold."""
    return max(len(self.tokens), 0 if self.skill_tokens is None else len(self.skill_tokens))


@dataclasses.dataclass(frozen=True)
class RowShape:
  """T tokens and R response tokens of a row, B rows of a micro-batch."""

  length: int
  responses: int
  rows: int

  def holds(self, sample: Sample) -> bool:
    """Whether an empty row has room for the sample."""
    return sample.length <= self.length and len(sample.targets) <= self.responses


def turn_scores(trajectories: Sequence[Trajectory], *, reward_scale: float, invalid_penalty: float) -> list[np.ndarray]:
  """Score of every turn: the scaled episode return, minus the penalty at a turn with an invalid action (there only;
  method.md 4.1).
  """
  return [
    np.asarray([reward_scale * t.episode_return - invalid_penalty * (not turn.valid) for turn in t.turns], np.float32)
    for t in trajectories
  ]


def turn_advantages(
  trajectories: Sequence[Trajectory],
  *,
  reward_scale: float = 10.0,
  invalid_penalty: float = 0.1,
  normalize: str = "mean_std",
  per_step: bool = True,
  advantage: Callable = group_advantages,
) -> list[np.ndarray]:
  """Group-relative advantage of every turn, float32[turns] per trajectory.

  per_step=True takes mean and deviation over all turns of the group (official code); False weighs each episode once
  (paper). Episodes whose environment failed are left out of the statistics and get 0.
  """
  scores = turn_scores(trajectories, reward_scale=reward_scale, invalid_penalty=invalid_penalty)
  groups = {group: i for i, group in enumerate(dict.fromkeys(t.group for t in trajectories))}
  ids = [np.full(len(s), groups[t.group], np.int32) for s, t in zip(scores, trajectories, strict=True)]
  weights = [
    np.full(len(s), 0.0 if t.error else 1.0 if per_step else 1.0 / max(len(s), 1), np.float32)
    for s, t in zip(scores, trajectories, strict=True)
  ]
  flat = [np.concatenate(x) if x else np.zeros(0, np.float32) for x in (scores, ids, weights)]
  size = 1 << max(len(flat[0]) - 1, 0).bit_length()  # a power of two: few compiled shapes; fill has weight 0
  fill = size - len(flat[0])
  values, group, weight = np.pad(flat[0], (0, fill)), np.pad(flat[1], (0, fill)), np.pad(flat[2], (0, fill))
  flat_advantages = np.asarray(advantage(values, group, num_groups=len(groups), normalize=normalize, weights=weight))
  return np.split(flat_advantages[: len(flat[0])], np.cumsum([len(s) for s in scores])[:-1])


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
  for trajectory, advantage in zip(trajectories, advantages, strict=True):
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

  Raises ValueError, with the numbers, for a sample that fits no shape.
  """
  shapes = sorted(shapes, key=lambda s: s.length)
  rows: dict[RowShape, list[list[Sample]]] = {}
  room: dict[RowShape, list[list[int]]] = {}
  for sample in sorted(samples, key=lambda s: -s.length):
    need = (sample.length, len(sample.targets))
    shape = next((s for s in shapes if s.holds(sample)), None)
    if shape is None:
      raise ValueError(
        f"a sample of {need[0]} tokens ({need[1]} sampled) fits no row of "
        f"{[(s.length, s.responses) for s in shapes]} (tokens, sampled tokens): "
        "raise train.row_lengths, or lower the limits of the rollout"
      )
    free = room.setdefault(shape, [])
    place = next((i for i, f in enumerate(free) if f[0] >= need[0] and f[1] >= need[1]), None)
    if place is None:
      place = len(free)
      free.append([shape.length, shape.responses])
      rows.setdefault(shape, []).append([])
    rows[shape][place].append(sample)
    free[place][0] -= need[0]
    free[place][1] -= need[1]
  return rows


def to_batches(
  samples: Sequence[Sample], shapes: Sequence[RowShape], mesh: jax.sharding.Mesh, *, skills: bool
) -> list[Batch]:
  """Packed batches on the mesh, one per row shape that occurs. skills=False builds no skill context."""
  batches = []
  for shape, rows in pack(samples, shapes).items():
    count = -(-len(rows) // shape.rows)
    M = (
      1 << (count - 1).bit_length()
    )  # a power of two of micro-batches: few compiled shapes; the empty ones are never computed
    rows = rows + [[]] * (M * shape.rows - len(rows))

    def grid(rows_of, width, dtype, M=M, shape=shape, rows=rows):
      out = np.zeros((M * shape.rows, width), dtype)
      for line, row in zip(out, rows, strict=True):
        flat = rows_of(row)
        line[: len(flat)] = flat
      return out.reshape(M, shape.rows, width)

    def per_token(field, dtype, grid=grid, shape=shape):
      return grid(lambda row: _flat([field(s) for s in row]), shape.responses, dtype)

    batch = Batch(
      ordinary=_context(grid, shape, lambda s: (s.tokens, s.index)),
      skill=_context(grid, shape, _skill_side) if skills else None,
      targets=per_token(lambda s: s.targets, np.int32),
      mask=per_token(lambda s: np.ones(len(s.targets)), np.float32),
      skill_mask=per_token(lambda s: np.full(len(s.targets), s.skill_tokens is not None), np.float32),
      advantages=per_token(lambda s: s.advantages, np.float32),
      sampler_logprobs=per_token(lambda s: s.logprobs, np.float32),
      count=np.int32(0),
    )
    batch = sharding.put_rows(batch.replace(count=None), mesh, axis=1)
    batches.append(batch.replace(count=sharding.put_replicated(np.int32(count), mesh)))
  return batches


def _context(grid, shape, side) -> Context:
  def starts(row):
    return np.cumsum([0] + [s.length for s in row])[:-1]

  def place(row, values):  # each sample starts at the same column in both contexts; the shorter one is padded behind
    out = np.zeros(shape.length, np.int32)
    for start, value in zip(starts(row), values, strict=True):
      out[start : start + len(value)] = value
    return out

  return Context(
    tokens=grid(lambda row: place(row, [side(s)[0] for s in row]), shape.length, np.int32),
    positions=grid(lambda row: place(row, [np.arange(len(side(s)[0])) for s in row]), shape.length, np.int32),
    segment_ids=grid(
      lambda row: place(row, [np.full(len(side(s)[0]), i + 1) for i, s in enumerate(row)]), shape.length, np.int32
    ),
    index=grid(
      lambda row: _flat([start + side(s)[1] for start, s in zip(starts(row), row, strict=True)]),
      shape.responses,
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


def _flat(arrays):
  return np.concatenate(arrays) if arrays else np.zeros(0)
