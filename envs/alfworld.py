"""ALFWorld on its real TextWorld engine: official games from $ALFWORLD_DATA, and rooms of our own where there are none.

Splits. "train", "valid_seen" and "valid_unseen" are the official games under $ALFWORLD_DATA/json_2.1.1 (3,553, 140
and 134 where the data is complete). "generated_train" and "generated_unseen" are drawn by `envs.alfworld_rooms` and
need no data; their seeds and their (object, receptacle) goals are disjoint.

Protocol. An action is a command such as "take potato 2 from countertop 2"; anything else is answered with "Nothing
happens." and costs a step. The syntax before ALFWorld 0.4 ("put X in/on Y", now "move X to Y") is such an unknown
command and is not translated. Reward is 1.0 at the winning step, else 0. TextWorld does not tell a win from the step
limit; here `terminated` is a win, `truncated` the limit. A goal that holds from the start (some official games with two
objects) shows as `info["won"]` at the reset, and the first step wins. The game's banner and its task sentence are taken
out of the first observation: the sentence is `info["task"]`.

Cost on one core: an official kitchen takes 0.35 s for a reset and 4 ms a step, a generated room half of it; a process
needs ~90 MB. One engine object serves a whole worker slot: making one for each episode leaks about 2 MB each. Never
use engines from threads.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium

from envs import alfworld_rooms as rooms
from envs import alfworld_text as text
from envs.protocol import Task

OFFICIAL = ("train", "valid_seen", "valid_unseen")
SPLITS = (*OFFICIAL, *rooms.GENERATED)
_DATA_FOLDER = "json_2.1.1"
_GAME_FILE = "game.tw-pddl"
_TASK_LINE = re.compile(rf"{text.TASK_MARK}\s*(.+?)\.?\s*$", re.MULTILINE)
_BANNER = re.compile(r"^-= .*? =-\s*")

logger = logging.getLogger(__name__)


class ALFWorldEnv(gymnasium.Env):
  """One game at a time. `reset(options={"task": payload})` takes the payload of a `Task`; without it a generated
  training room is drawn.

  max_steps: the step limit. data: folder that holds json_2.1.1 ($ALFWORLD_DATA where None). expert: also plan
  (slower), see `info`. strict: see "valid".
  info: "task" (sentence), "admissible" (tuple, without "help"), "won", "valid" (False with `strict` where the last
  action was no command of this state; True otherwise, for the official protocol judges the format of a response
  alone), "family", "gamefile" ("" for generated rooms), and with `expert` "expert_plan" (the planner's commands from
  here to the goal).
  Raises `GameError` for a game that cannot be played and `gymnasium.error.ResetNeeded` for a step outside an episode.
  """

  metadata = {"render_modes": ["ansi"], "render_fps": 1}

  def __init__(
    self,
    max_steps: int = 30,
    data: str | None = None,
    expert: bool = False,
    strict: bool = False,
    render_mode: str | None = "ansi",
  ):
    from envs.alfworld_engine import take_engine  # needs the extra; prompts and parser do not

    if max_steps < 1:
      raise ValueError(f"max_steps {max_steps} must be at least 1")
    self.max_steps, self.render_mode = max_steps, render_mode
    self.observation_space = gymnasium.spaces.Text(min_length=0, max_length=10_000, charset=string.printable)
    self.action_space = gymnasium.spaces.Text(min_length=0, max_length=text.MAX_ACTION, charset=string.printable)
    self._data, self._expert, self._strict = data, expert, strict
    self._engine = take_engine(expert)
    self._state = None

  def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None):
    super().reset(seed=seed)
    if self._engine is None:
      raise gymnasium.error.ClosedEnvironmentError("this ALFWorld environment was closed: make another one")
    payload = (options or {}).get("task")
    if payload is None:
      drawn = int(self.np_random.integers(1 << 20))
      family = tuple(rooms.FAMILIES)[drawn % len(rooms.FAMILIES)]
      payload = {"split": "generated_train", "family": family, "index": drawn}
    self._state = None  # no episode while the next game fails to load
    game, self._gamefile = self._read(payload)
    self._family = payload["family"]
    self._engine.load(game, self._gamefile or f"generated room {dict(payload)}")
    state = self._engine.reset()
    found = _TASK_LINE.search(state.feedback)
    self._task = found.group(1) if found else ""
    self._text = _TASK_LINE.sub("", _BANNER.sub("", state.feedback)).strip()
    self._steps, self._won, self._ended = 0, bool(state["won"]), False
    self._state = state
    return self._text, self._info(True)

  def close(self) -> None:
    """Gives the engine back to the process; the environment is of no use afterwards."""
    from envs.alfworld_engine import give_back

    if self._engine is not None:
      give_back(self._engine)
      self._engine = self._state = None

  def step(self, action: str):
    if self._state is None or self._ended:
      raise gymnasium.error.ResetNeeded("the ALFWorld episode is over (or never began): call reset() before step()")
    self._steps += 1
    command = str(action).strip()
    valid = not self._strict or command in self._state["_valid_commands"]
    self._state, _, _ = self._engine.step(command)
    self._text, self._won = self._state.feedback.strip(), bool(self._state["won"])
    truncated = not self._won and self._steps >= self.max_steps
    self._ended = self._won or truncated
    return self._text, float(self._won), self._won, truncated, self._info(valid)

  def render(self) -> str:
    return "" if self._state is None else f"{self._task} (step {self._steps} of {self.max_steps})\n{self._text}"

  def _info(self, valid: bool) -> dict[str, Any]:
    info = {
      "task": self._task,
      "admissible": tuple(command for command in self._state["admissible_commands"] if command != "help"),
      "won": self._won,
      "valid": valid,
      "family": self._family,
      "gamefile": self._gamefile,
    }
    if self._expert:
      info["expert_plan"] = tuple(self._state["policy_commands"])
    return info

  def _read(self, payload: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    from envs.alfworld_engine import read_game

    if payload["split"] in rooms.GENERATED:
      return rooms.game(payload["split"], payload["family"], int(payload["index"])), ""
    path = os.path.join(data_folder(self._data), _DATA_FOLDER, payload["split"], payload["game"])
    return read_game(path), path


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """An episode by the planner; `shown` are the admissible actions before each action."""

  task: Task
  sentence: str
  steps: list[tuple[str, str]]  # (observation, action)
  shown: list[tuple[str, ...]]
  won: bool
  skill: str = ""


@dataclasses.dataclass(frozen=True)
class ALFWorld:
  """The benchmark object (see `envs.protocol.Benchmark`).

  max_steps: 30 as in SEED; 50 in ALFWorld's own configuration. plain: prompts for a small model, which ask for the
  action alone, without thinking; the action tag then suffices for a valid format. data: folder with the official
  games, $ALFWORLD_DATA where None. strict: an action that the game does not know counts as invalid too, as it does in
  the household; the official protocol judges the format alone.
  """

  max_steps: int = 30
  plain: bool = False
  data: str | None = None
  strict: bool = False
  name = "alfworld"
  families = tuple(rooms.FAMILIES)
  splits = SPLITS

  def scan(self, split: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The official games of a split: ([(family, path under the split's folder)], [(path, why it is skipped)]), both
    sorted by path.

    Games with movable receptacles or sliced objects are not part of the benchmark and are in neither list. Skipped and
    named are files that are not JSON, lack a part or are not marked solvable. Nothing is loaded into an engine.
    """
    from envs.alfworld_engine import GameError, read_game

    root = os.path.join(data_folder(self.data), _DATA_FOLDER, split)
    if split not in OFFICIAL:
      raise ValueError(f"split {split!r} holds no official games: choose from {', '.join(OFFICIAL)}")
    if not os.path.isdir(root):
      raise ValueError(
        f"no official games in {root}: set ALFWORLD_DATA to the folder with {_DATA_FOLDER}, or use a generated split"
      )
    types = {kind: family for family, kind in rooms.FAMILIES.items()}
    paths = [
      os.path.relpath(os.path.join(folder, _GAME_FILE), root)
      for folder, _, files in os.walk(root)
      if _GAME_FILE in files
    ]
    games, skipped = [], []
    for path in sorted(path.replace(os.sep, "/") for path in paths):
      family = types.get(path.split("-")[0])
      if family is None or "movable" in path or "Sliced" in path:
        continue
      try:
        read_game(os.path.join(root, path))
      except GameError as error:
        skipped.append((path, str(error).removeprefix(os.path.join(root, path)).lstrip(": ")))
      else:
        games.append((family, path))
    return games, skipped

  def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
    """`count` tasks in equal shares of the families as far as the split allows, sorted by id; another seed gives
    other ones.

    Skipped game files are counted and named in a warning. Raises ValueError where an official split has fewer games.
    """
    if count < 1:
      raise ValueError(f"count={count} must be at least 1")
    if split in rooms.GENERATED:
      return _generated(split, count, seed)
    if split not in OFFICIAL:
      raise ValueError(f"unknown split {split!r} of alfworld: choose from {', '.join(SPLITS)}")
    games, skipped = self.scan(split)
    for path, why in skipped:
      logger.warning("skipped the game file %s: %s", path, why)
    if skipped:
      logger.warning("%d of %d game files of split %s were skipped", len(skipped), len(games) + len(skipped), split)
    if count > len(games):
      raise ValueError(f"split {split!r} has {len(games)} playable games, {count} were asked for")
    draw = random.Random(f"alfworld/{split}/{seed}").random
    order = sorted((draw(), family, path) for family, path in games)  # one draw for each game, in the order of paths
    decks = {family: [path for _, other, path in order if other == family] for family in self.families}
    chosen: list[Task] = []
    while len(chosen) < count:
      for family in self.families:
        if decks[family] and len(chosen) < count:
          path = decks[family].pop()
          payload = {"split": split, "family": family, "game": path}
          chosen.append(
            Task(f"alfworld/{split}/{family}/{path.removesuffix('/' + _GAME_FILE)}", family, split, payload)
          )
    return sorted(chosen, key=lambda task: task.id)

  def make(self, expert: bool = False) -> ALFWorldEnv:
    return ALFWorldEnv(self.max_steps, self.data, expert, self.strict)

  def window_prompt(
    self, task: str, history: Sequence[tuple[str, str]], step: int, observation: str, admissible: Sequence[str]
  ) -> str:
    return text.window_prompt(task, history, step, observation, admissible, plain=self.plain)

  def first_prompt(self, task: str, observation: str, admissible: Sequence[str]) -> str:
    return text.window_prompt(task, (), 0, observation, admissible, plain=self.plain)

  def turn_prompt(self, observation: str, admissible: Sequence[str]) -> str:
    return text.turn_prompt(observation, admissible, plain=self.plain)

  def parse(self, response: str) -> tuple[str, bool]:
    return text.parse(response, plain=self.plain)

  def analyze(self, task: str, steps: Sequence[tuple[str, str, bool]], won: bool) -> dict[str, str] | None:
    return text.analyze(task, steps, won)

  def response(self, action: str) -> str:
    """What a policy writes to take this action (with `plain`; no thoughts are made up)."""
    return text.response(action)

  def demonstrations(self, count: int, seed: int) -> Iterator[Demonstration]:
    """Episodes by the planner in generated training rooms, families in equal shares: a few of them teach a small model
    to write actions at all. Only for `plain` prompts, where an action is the whole response; ValueError otherwise."""
    if not self.plain:
      raise ValueError("demonstrations of alfworld hold actions without thoughts: they need plain=True")
    env = dataclasses.replace(self, max_steps=100).make(expert=True)
    try:
      for task in self.tasks("generated_train", count, seed):
        observation, info = env.reset(options={"task": task.payload})
        sentence, steps, shown, won = info["task"], [], [], False
        for action in info["expert_plan"]:
          steps.append((observation, action))
          shown.append(info["admissible"])
          observation, _, won, _, info = env.step(action)
        yield Demonstration(task, sentence, steps, shown, won)
    finally:
      env.close()


def data_folder(data: str | None = None) -> str:
  """The folder with the official games: `data`, else $ALFWORLD_DATA; raises ValueError where neither is set."""
  folder = data or os.environ.get("ALFWORLD_DATA", "")
  if not folder:
    raise ValueError(
      "the official ALFWorld games need ALFWORLD_DATA (the folder with json_2.1.1); the generated splits need no data"
    )
  return os.path.expanduser(folder)


def _generated(split: str, count: int, seed: int) -> list[Task]:
  families = tuple(rooms.FAMILIES)
  chosen = []
  for number in range(count):
    family, index = families[number % len(families)], seed * 100_000 + number // len(families)
    payload = {"split": split, "family": family, "index": index}
    chosen.append(Task(f"alfworld/{split}/{family}/{index:010d}", family, split, payload))
  return sorted(chosen, key=lambda task: task.id)
