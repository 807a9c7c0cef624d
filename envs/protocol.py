"""What a benchmark is: tasks, an environment, prompts, an action parser. A module of this package offers one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import gymnasium


@dataclasses.dataclass(frozen=True)
class Task:
  """One episode's starting point. Equal tasks give equal episodes for equal actions, on every machine."""

  id: str  # unique and sortable, e.g. "household/unseen/heat/00012"
  family: str  # one of Benchmark.families
  split: str  # "train" | "valid" | "unseen" (benchmark's own names allowed)
  payload: Mapping[str, Any]  # JSON values; handed to env.reset(options={"task": payload})


class Benchmark(Protocol):
  """A picklable, stateless object. Environments follow gymnasium:

  env.reset(options={"task": task.payload}) -> (observation: str, info)
  env.step(action: str) -> (observation: str, reward: float, terminated: bool, truncated: bool, info)
  info: {"task": str, "admissible": tuple[str, ...] (may be empty), "won": bool}; terminated means won (or lost for
  good), truncated means the step limit. A wrong action is answered ("Nothing happens."), never an exception.
  """

  name: str
  families: tuple[str, ...]
  splits: tuple[str, ...]
  max_steps: int

  def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
    """`count` tasks, the same list on every machine, families in equal shares as far as possible, sorted by id."""

  def make(self) -> gymnasium.Env: ...

  def window_prompt(
    self, task: str, history: Sequence[tuple[str, str]], step: int, observation: str, admissible: Sequence[str]
  ) -> str:
    """The single user message of a step in `window` mode; `history` holds the last k (observation, action) pairs.

    One line of it contains "Your task is to:".
    """

  def first_prompt(self, task: str, observation: str, admissible: Sequence[str]) -> str:
    """The first user message in `transcript` mode; one line of it contains "Your task is to:"."""

  def turn_prompt(self, observation: str, admissible: Sequence[str]) -> str:
    """A later user message in `transcript` mode."""

  def parse(self, response: str) -> tuple[str, bool]:
    """(action text, valid format) of a response; an unparsable response gives a text that the environment answers
    harmlessly.
    """

  def analyze(self, task: str, steps: Sequence[tuple[str, str, bool]], won: bool) -> dict[str, str] | None:
    """Scripted analyzer: {"episode_summary", "episode_skill"} read from the text (observation, action, valid) alone;
    None where there is none.
    """

  def demonstrations(self, count: int, seed: int) -> Iterator[Any]:
    """Episodes for the stand-in of pre-training; others than the embedded default raise NotImplementedError."""
