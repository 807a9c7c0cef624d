"""The embedded default environment: household tasks in the ALFWorld dialect, pure Python, no download.

Six task families as in ALFWorld (pick, look, clean, heat, cool, pick2), its action grammar and its style of
observation in a language of fewer than 200 words, so that a very small decoder can read it. The hand holds one object;
a task of two needs both in the same place; heat, cool and clean work at the microwave, the fridge and the sinkbasin
with the object in hand. The task is won at the step that completes it.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium

from envs import household_rooms as rooms
from envs.household_rooms import APPLIANCES, FAMILIES, LAMP, PLACE_LIMIT, SPLITS, is_openable, kind
from envs.protocol import Task

TASK_MARK = "Your task is to:"
STATES = {"heat": "hot", "cool": "cold", "clean": "clean"}
NOTHING = "Nothing happens."
MAX_RESPONSE = 80  # characters of a response that reach the environment
_NOUN = r"[a-z]+ [0-9]+"
_GRAMMAR = re.compile(
  rf"look|inventory|(?:go to|open|close|use|examine) {_NOUN}"
  rf"|take {_NOUN} from {_NOUN}|move {_NOUN} to {_NOUN}|(?:heat|cool|clean) {_NOUN} with {_NOUN}"
)


class HouseholdEnv(gymnasium.Env):
  """One room, text in, text out. `reset(options={"task": payload})` poses the task; without it a train task is drawn.

  Reward is 1.0 at the winning step and 0.0 otherwise. `info` holds task, admissible, won and valid (False where the
  last action was not among the admissible ones; the room then answers "Nothing happens." and a step is spent).
  """

  metadata = {"render_modes": ["ansi"], "render_fps": 1}

  def __init__(self, difficulty: float = 0.5, max_steps: int = 20, render_mode: str | None = "ansi"):
    if not 0.0 <= difficulty <= 1.0:
      raise ValueError(f"difficulty {difficulty} is outside [0, 1]")
    if max_steps < 1:
      raise ValueError(f"max_steps {max_steps} must be at least 1")
    self.difficulty, self.max_steps, self.render_mode = difficulty, max_steps, render_mode
    self.observation_space = gymnasium.spaces.Text(max_length=1000, charset=string.printable)
    self.action_space = gymnasium.spaces.Text(min_length=0, max_length=MAX_RESPONSE, charset=string.printable)
    self.places: dict[str, list[str]] = {}

  def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None):
    super().reset(seed=seed)
    payload = (options or {}).get("task")
    if payload is None:
      drawn = int(self.np_random.integers(1 << 20))
      payload = rooms.make_tasks("train", len(FAMILIES), drawn, self.difficulty)[drawn % len(FAMILIES)].payload
    self.room = rooms.build_room(payload)
    self.places = self.room.places
    self.family, self.item, self.target = payload["family"], payload["object"], payload["target"]
    self.task = rooms.goal_sentence(self.family, self.item, self.target)
    self.here = self.held = ""
    self.opened: set[str] = set()
    self.marks: set[tuple[str, str]] = set()  # (object, "heat" | "cool" | "clean")
    self.steps, self.won = 0, False
    self._moves = tuple((name, f"go to {name}") for name in self.places)
    self._actions = self._admissible()
    return f"You see {_listing(self.places)}.\n{TASK_MARK} {self.task}.", self._info(True)

  def step(self, action: str):
    self.steps += 1
    valid = not self.won and action in self._actions
    observation = self._apply(action) if valid else NOTHING
    if valid:
      self._actions = self._admissible()
    return (
      observation,
      float(valid and self.won),
      self.won,
      not self.won and self.steps >= self.max_steps,
      self._info(valid),
    )

  def render(self) -> str:
    """The whole room as text, closed places included: for people, never for a policy."""
    lines = [f"{self.room.kind}: {self.task} ({'won' if self.won else f'step {self.steps} of {self.max_steps}'})"]
    for name, content in self.places.items():
      state = "" if not is_openable(name) else " (open)" if name in self.opened else " (closed)"
      lines.append(f"{'>' if name == self.here else ' '} {name}{state}: {', '.join(content) or '-'}")
    return "\n".join([*lines, f"  hand: {', '.join([self.held or '-', *self._states()])}"])

  def _info(self, valid: bool) -> dict[str, Any]:
    return {"task": self.task, "admissible": self._actions, "won": self.won, "valid": valid}

  def _states(self) -> list[str]:
    return [STATES[mark] for thing, mark in sorted(self.marks) if thing == self.held]

  def _visible(self) -> bool:
    return bool(self.here) and (not is_openable(self.here) or self.here in self.opened)

  def _admissible(self) -> tuple[str, ...]:
    here, held = self.here, self.held
    actions = [text for name, text in self._moves if name != here]
    if here:
      place = kind(here)
      if is_openable(here):
        actions.append(f"close {here}" if here in self.opened else f"open {here}")
      if self._visible():
        content = self.places[here]
        if not held:
          actions += [f"take {thing} from {here}" for thing in content if not thing.startswith(LAMP)]
        elif len(content) < PLACE_LIMIT:
          actions.append(f"move {held} to {here}")
        actions += [f"use {thing}" for thing in content if thing.startswith(LAMP)]
      if held:
        for verb, appliance in APPLIANCES.items():
          if place == appliance and kind(held) in rooms.AFFORDS[verb]:
            actions.append(f"{verb} {held} with {here}")
      actions.append(f"examine {here}")
    if held:
      actions.append(f"examine {held}")
    actions += ["look", "inventory"]
    return tuple(actions)

  def _apply(self, action: str) -> str:
    """Carry out an admissible action."""
    verb, _, rest = action.partition(" ")
    if verb == "go":
      self.here = rest[3:]
      return self._describe()
    if verb == "open":
      self.opened.add(self.here)
      return f"You open {self.here}. You see {_listing(self.places[self.here])}."
    if verb == "close":
      self.opened.discard(self.here)
      return f"You close {self.here}."
    if verb == "take":
      self.held = rest.partition(" from ")[0]
      self.places[self.here].remove(self.held)
      return f"You pick up {self.held}."
    if verb == "move":
      thing, self.held = self.held, ""
      self.places[self.here].append(thing)
      self.won = self._placed(thing)
      return f"You move {thing} to {self.here}."
    if verb in APPLIANCES:
      self.marks.discard((self.held, {"heat": "cool", "cool": "heat"}.get(verb, "")))
      self.marks.add((self.held, verb))
      return f"You {verb} {self.held} with {self.here}."
    if verb == "use":
      self.won = self.family == "look" and kind(self.held) == self.item
      return f"You use {rest}."
    if verb == "inventory":
      return f"You carry {self.held or 'nothing'}."
    if verb == "examine" and rest == self.held:
      return f"This is {', '.join([rest, *self._states()])}."
    return self._describe() if self.here else "You stand in the room."

  def _describe(self) -> str:
    if not self._visible():
      return f"{self.here} is closed."
    return f"{'In' if is_openable(self.here) else 'On'} {self.here} you see {_listing(self.places[self.here])}."

  def _placed(self, thing: str) -> bool:
    if self.family == "look" or kind(self.here) != self.target or kind(thing) != self.item:
      return False
    if self.family == "pick2":
      return sum(kind(other) == self.item for other in self.places[self.here]) >= 2
    return self.family == "pick" or (thing, self.family) in self.marks


@dataclasses.dataclass(frozen=True)
class Household:
  """The benchmark object (see `envs.protocol.Benchmark`): picklable, without state of its own."""

  difficulty: float = 0.5
  max_steps: int = 20
  name = "household"
  families = FAMILIES
  splits = SPLITS

  def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
    return rooms.make_tasks(split, count, seed, self.difficulty)

  def make(self, difficulty: float | None = None) -> HouseholdEnv:
    return HouseholdEnv(self.difficulty if difficulty is None else difficulty, self.max_steps)

  def first_prompt(self, task: str, observation: str, admissible: Sequence[str] = ()) -> str:
    """The first observation and the task line. Admissible actions are left out: prompts stay short."""
    return observation if TASK_MARK in observation else f"{observation}\n{TASK_MARK} {task}."

  def turn_prompt(self, observation: str, admissible: Sequence[str] = ()) -> str:
    return observation

  def window_prompt(
    self, task: str, history: Sequence[tuple[str, str]], step: int, observation: str, admissible: Sequence[str]
  ) -> str:
    """Task line, the places to go to (read from the admissible actions), the last pairs, the current observation."""
    if step == 0:
      return self.first_prompt(task, observation, admissible)
    elsewhere = [action[6:] for action in admissible if action.startswith("go to ")]
    lines = [f"{TASK_MARK} {task}.", f"You see {_listing(elsewhere)}."]
    for past, action in history:
      lines += [line for line in past.split("\n") if TASK_MARK not in line and not line.startswith("You see ")]
      lines.append(f"> {action}")
    return "\n".join([*lines, observation])

  def parse(self, response: str) -> tuple[str, bool]:
    """The bare action: stripped, lower case, single spaces, at most 80 characters.

    Valid means that it follows the grammar; whether the room allows it, the environment says (`info["valid"]`).
    """
    text = " ".join(response[: 4 * MAX_RESPONSE].lower().split())[:MAX_RESPONSE]
    return text, _GRAMMAR.fullmatch(text) is not None

  def analyze(self, task: str, steps: Sequence[tuple[str, str, bool]], won: bool) -> dict[str, str] | None:
    from envs.household_analyzer import analyze

    return analyze(task, steps, won)

  def analysis_prompt(self, task: str, steps: Sequence[tuple[str, str, bool]], won: bool) -> str:
    """A compact analyzer request: task, outcome, and every observation and action of the episode."""
    request, outcome = self.analysis_question(won).split("\n")
    lines = [request, f"{TASK_MARK} {task}.", outcome]
    for observation, action, valid in steps:
      lines += [line for line in observation.split("\n") if TASK_MARK not in line]
      lines.append(f"> {action}" if valid else f"> {action} (invalid)")
    return "\n".join(lines)

  def analysis_question(self, won: bool) -> str:
    """The same request as a turn of the conversation that was the episode."""
    return f"Write the skill.\nIt was a {'success' if won else 'failure'}."

  def skill_block(self, skill: str) -> str:
    """The line that carries a skill in this benchmark's prompts."""
    return skill_block(skill)

  def demonstrations(self, count: int, seed: int) -> Iterator[Any]:
    """`count` episodes of demonstrators of mixed quality in train rooms (see `envs.household_demos`)."""
    from envs.household_demos import demonstrations

    return demonstrations(self, count, seed)


def skill_block(skill: str) -> str:
  """The line that carries a skill, placed right after the task line."""
  return f"Skill: [{skill}]"


def _listing(names) -> str:
  return ", ".join(names) or "nothing"
