"""Episodes as data: `Turn`, `Trajectory`, `Group`, and their exact way to disk and back.

Shapes: P new prompt tokens of a turn, R response tokens of a turn, N members of a group.

Two forms: a TFDS dataset in ArrayRecord files for finished sets (`save_trajectories`), and one JSON line per episode
for a run in progress and for the report (`to_json`). Both keep ids, log-probabilities, rewards and every Unicode text
exactly.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from seed_jax import records
from seed_jax.progress import is_writer

MODES = ("window", "transcript")


@dataclasses.dataclass(eq=False)
class Turn:
  """One environment step: what the policy read, what it sampled, what became of it.

  In `window` mode `prompt_ids` is the whole prompt of the step; in `transcript` mode it holds only the tokens that are
  new since the previous turn's response. `logprobs[r]` is the sampler's log-softmax, at the rollout temperature, of
  `response_ids[r]`; the end-of-sequence token belongs to the response where it was sampled.
  """

  observation: str
  admissible: tuple[str, ...]
  prompt: str  # the user message as shown, before the chat template
  prompt_ids: np.ndarray  # int32[P]
  response_ids: np.ndarray  # int32[R]
  logprobs: np.ndarray  # float32[R]
  response: str
  action: str
  valid: bool
  reward: float

  def __post_init__(self):
    self.admissible = tuple(self.admissible)
    self.prompt_ids = _ids(self.prompt_ids, "prompt_ids")
    self.response_ids = _ids(self.response_ids, "response_ids")
    self.logprobs = np.asarray(self.logprobs, np.float32)
    if self.logprobs.shape != self.response_ids.shape:
      shapes = f"{list(self.logprobs.shape)} and response_ids {list(self.response_ids.shape)}"
      raise ValueError(f"logprobs have shape {shapes}; every sampled token needs one")
    self.valid, self.reward = bool(self.valid), float(self.reward)

  def __eq__(self, other):
    return _equal(self, other)


@dataclasses.dataclass(eq=False)
class Trajectory:
  """One finished episode. `group` numbers the task within its batch and `member` the episode within its group."""

  task_id: str
  family: str
  task: str  # the sentence, e.g. "heat some potato and put it in sinkbasin"
  mode: str  # one of MODES
  group: int
  member: int
  turns: list[Turn]
  won: bool
  episode_return: float
  truncated: bool
  error: str = (
    ""  # why the episode could not be played to its end; such an episode is no evidence for or against its actions
  )
  skill: str = ""  # parsed episode skill, "" where there is none: then the trajectory gets no distillation
  summary: str = ""
  analysis: str = ""  # the analyzer's raw text

  def __post_init__(self):
    if self.mode not in MODES:
      raise ValueError(f"trajectory mode {self.mode!r} is unknown; choose one of {', '.join(MODES)}")
    self.group, self.member, self.turns = int(self.group), int(self.member), list(self.turns)
    self.won, self.truncated, self.episode_return = bool(self.won), bool(self.truncated), float(self.episode_return)

  def __eq__(self, other):
    return _equal(self, other)

  @property
  def length(self) -> int:
    """Number of turns."""
    return len(self.turns)

  @property
  def valid_ratio(self) -> float:
    """Share of turns whose response had a valid action format; 0 for an episode without turns."""
    return sum(turn.valid for turn in self.turns) / max(len(self.turns), 1)

  @property
  def response_tokens(self) -> int:
    """Sum of R over the turns."""
    return sum(turn.response_ids.size for turn in self.turns)

  @property
  def prompt_tokens(self) -> int:
    """Sum of P over the turns: what was newly read, so that a transcript counts every token once."""
    return sum(turn.prompt_ids.size for turn in self.turns)

  @property
  def outcome(self) -> str:
    """`success`, `failure`, or `unknown` where the episode broke off."""
    return "success" if self.won else "unknown" if self.error else "failure"

  @property
  def steps(self) -> list[tuple[str, str, bool]]:
    """(observation, full response, valid) of every turn: what an analyzer that is a language model reads."""
    return [(turn.observation, turn.response, turn.valid) for turn in self.turns]

  @property
  def action_steps(self) -> list[tuple[str, str, bool]]:
    """(observation, action, valid) of every turn: what a scripted analyzer reads."""
    return [(turn.observation, turn.action, turn.valid) for turn in self.turns]


@dataclasses.dataclass
class Group:
  """The N episodes of one task that share their initial state, ordered by member: the unit of a group advantage."""

  id: int
  trajectories: list[Trajectory]

  def __post_init__(self):
    tasks = sorted({trajectory.task_id for trajectory in self.trajectories})
    members = [trajectory.member for trajectory in self.trajectories]
    if len(tasks) != 1:
      raise ValueError(f"group {self.id} mixes {len(tasks)} tasks {tasks[:3]}; a group is one task")
    if len(set(members)) != len(members):
      raise ValueError(f"group {self.id} has members {sorted(members)}; each may occur once")

  @property
  def task_id(self) -> str:
    return self.trajectories[0].task_id

  @property
  def returns(self) -> np.ndarray:
    """float32[N], the episode returns in member order."""
    return np.asarray([trajectory.episode_return for trajectory in self.trajectories], np.float32)


def group_trajectories(trajectories: Iterable[Trajectory]) -> list[Group]:
  """Sorts episodes into groups by `group`, then `member`; ValueError where a group mixes tasks or repeats a member."""
  groups: dict[int, list[Trajectory]] = {}
  for trajectory in trajectories:
    groups.setdefault(trajectory.group, []).append(trajectory)
  return [Group(id, sorted(groups[id], key=lambda t: t.member)) for id in sorted(groups)]


def group_numbers(trajectories: Iterable[Trajectory]) -> dict[int, int]:
  """`group` of the episodes -> its number from 0, in the order in which the groups come: ids for group statistics."""
  return {group: number for number, group in enumerate(dict.fromkeys(t.group for t in trajectories))}


# ---- one JSON line per episode


def to_json(trajectory: Trajectory) -> str:
  """One line of ASCII JSON. A float32 becomes the float64 of the same value, so `from_json` gives it back exactly.

  Raises ValueError where a number is not finite: JSON has none, and such a log-probability means a diverged policy.
  """
  record = {field.name: getattr(trajectory, field.name) for field in dataclasses.fields(Trajectory)}
  record["turns"] = [_turn_record(turn) for turn in trajectory.turns]
  try:
    return json.dumps(record, allow_nan=False, separators=(",", ":"))
  except ValueError:
    name = f"trajectory {trajectory.task_id} member {trajectory.member}"
    raise ValueError(f"{name} holds a reward or logprob that is not finite; has the policy diverged?") from None


def from_json(line: str | bytes) -> Trajectory:
  """The inverse of `to_json`; raises ValueError on anything else."""
  try:
    record = json.loads(line)
    turns = [Turn(**turn) for turn in record.pop("turns")]
    trajectory = Trajectory(turns=turns, **record)
    _check_texts(trajectory)
    return trajectory
  except (TypeError, KeyError, AttributeError, OverflowError, RecursionError, ValueError) as error:
    raise ValueError(f"not a trajectory: {records.one_line(error)}") from None


def append_jsonl(path: str | os.PathLike, trajectories: Iterable[Trajectory]) -> None:
  """Appends finished episodes to a JSONL file; a last line that a killed run left unfinished is cut off first."""
  records.append_lines(path, [to_json(trajectory) for trajectory in trajectories])


def load_jsonl(path: str | os.PathLike) -> list[Trajectory]:
  """The episodes of a JSONL file without its unfinished last line; raises ValueError naming the first damaged line."""
  trajectories = []
  for number, line in enumerate(records.read_lines(path), 1):
    try:
      trajectories.append(from_json(line))
    except ValueError as error:
      raise ValueError(f"{path} line {number} is damaged ({error}); delete that line to go on without it") from None
  return trajectories


# ---- the dataset

_TEXTS = ("task_id", "family", "task", "mode", "error", "skill", "summary", "analysis")
_TURN_TEXTS = ("observation", "prompt", "response", "action")
# What is ragged within an episode is stored end to end, and `<name>_count` cuts it into turns: TFDS needs TensorFlow
# for lists within lists. Rewards are decimal digits that give the float64 back, because TFDS keeps floats in 32 bits.
_RAGGED = {"prompt_ids": "int32", "response_ids": "int32", "logprobs": "float32", "admissible": "texts"}
_SCHEMA = (
  {name: "text" for name in _TEXTS}
  | {"group": "int", "member": "int", "won": "bool", "truncated": "bool", "episode_return": "text"}
  | {f"turn_{name}": "texts" for name in (*_TURN_TEXTS, "reward")}
  | {"turn_valid": "bool_"}
  | {f"{name}_count": "int64" for name in _RAGGED}
  | _RAGGED
)


def save_trajectories(directory: str | os.PathLike, trajectories: Sequence[Trajectory]) -> None:
  """Writes a TFDS dataset (ArrayRecord, split `train`), order kept, in place of what was there; all or nothing. Process
  0 only.
  """
  if not is_writer():
    return
  records.write_dataset(directory, _SCHEMA, map(_record, trajectories))


def load_trajectories(directory: str | os.PathLike) -> list[Trajectory]:
  """Reads what `save_trajectories` wrote; raises ValueError in one line where there is no set, or a damaged one."""
  rows = records.read_dataset(directory, _SCHEMA)
  try:
    return [_trajectory(row) for row in rows]
  except (ValueError, IndexError) as error:
    raise ValueError(f"the trajectories in {directory} do not fit together ({records.one_line(error)})") from None


def _record(trajectory: Trajectory) -> dict[str, Any]:
  turns = trajectory.turns
  row = {name: getattr(trajectory, name) for name in (*_TEXTS, "group", "member", "won", "truncated")}
  row |= {"episode_return": repr(trajectory.episode_return), "turn_reward": [repr(turn.reward) for turn in turns]}
  row |= {f"turn_{name}": [getattr(turn, name) for turn in turns] for name in _TURN_TEXTS}
  row["turn_valid"] = [turn.valid for turn in turns]
  for name in _RAGGED:
    parts = [getattr(turn, name) for turn in turns]
    row[f"{name}_count"] = [len(part) for part in parts]
    row[name] = [value for part in parts for value in part] if name == "admissible" else np.concatenate([[], *parts])
  return row


def _trajectory(row: dict[str, Any]) -> Trajectory:
  count = len(row["turn_valid"])
  ragged = {}
  for name in _RAGGED:
    counts = row[f"{name}_count"]
    ends = np.cumsum(counts)
    if len(counts) != count or counts.sum() != len(row[name]):
      raise ValueError(f"{name} of {row['task_id']}: {len(row[name])} values do not fill {count} turns")
    ragged[name] = [row[name][start:end] for start, end in zip(ends - counts, ends, strict=True)]
  turns = []
  for i in range(count):
    texts = {name: row[f"turn_{name}"][i] for name in _TURN_TEXTS}
    parts = {name: ragged[name][i] for name in _RAGGED}
    turns.append(Turn(valid=row["turn_valid"][i], reward=float(row["turn_reward"][i]), **texts, **parts))
  fields = {name: row[name] for name in (*_TEXTS, "group", "member", "won", "truncated")}
  return Trajectory(turns=turns, episode_return=float(row["episode_return"]), **fields)


# ---- small things


def _ids(values, name: str) -> np.ndarray:
  array = np.asarray(values)
  if array.size == 0:
    array = array.astype(np.int32)
  if array.ndim != 1 or array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < 2**31):
    raise ValueError(f"{name} must be a vector of token ids in [0, 2^31), got {array.dtype}{list(array.shape)}")
  return array.astype(np.int32)


def _equal(one, other) -> bool:
  if type(one) is not type(other):
    return NotImplemented
  pairs = ((getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
  return all(np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def _turn_record(turn: Turn) -> dict[str, Any]:
  record = {field.name: getattr(turn, field.name) for field in dataclasses.fields(Turn)}
  return record | {name: record[name].tolist() for name in ("prompt_ids", "response_ids", "logprobs")}


def _check_texts(trajectory: Trajectory) -> None:
  texts = [(name, getattr(trajectory, name)) for name in _TEXTS]
  for turn in trajectory.turns:
    texts += [(name, getattr(turn, name)) for name in _TURN_TEXTS] + [("admissible", text) for text in turn.admissible]
  for name, text in texts:
    if not isinstance(text, str):
      raise ValueError(f"{name} of trajectory {trajectory.task_id!r} is a {type(text).__name__}, not a text")
