"""The TextWorld PDDL engine under ALFWorld games: loads game data, plays one game at a time, is reused for the next.

Three facts about TextWorld 1.7 shape this module.
1. Every `PddlEnv` copies and opens its own libdownward.so, which is never unloaded (~2 MB for each object): an
   `Engine` is made once and loads game after game. Closed environments give theirs back. Several engines may live in
   one process, each with its own native state, as long as one is used at a time: the PDDL translator keeps its state
   in module globals, so threads break it.
2. A load and a reset translate the same problem four times (~0.25 s each for an official kitchen). A small memo makes
   that one.
3. The admissible commands are derived by parsing a text grammar for each action on each step (30-65 ms). Filling the
   same templates from the operator's arguments gives the same strings in ~1 ms; `tests/envs_alfworld_test.py`
   compares the two.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import re
import string
import sys
from collections.abc import Mapping
from typing import Any

INSTALL = "ALFWorld needs its game engine: pip install 'seed_jax[alfworld]' (that is: pip install alfworld textworld)"

try:
  import fast_downward
  import textworld
  from textworld.envs.pddl import PddlEnv
except ImportError as error:  # pragma: no cover - exercised in a subprocess by the tests
  raise ImportError(f"{INSTALL}; {error}") from error

GAME_KEYS = ("pddl_domain", "grammar", "pddl_problem")
_TASK = re.compile(r"Your task is to:\s*(.+)")
_LISTED = re.compile(
  r"\[\{(\w+)\.name \| [^\]]*\}\]"
)  # "[{r.name | ...}]" in a command template: the name of argument r


class GameError(ValueError):
  """A game that can not be played; the message names the game and says why."""


def check_game(data: Any) -> str:
  """Why `data` is no playable game ("" where nothing is wrong), without starting the engine."""
  if not isinstance(data, Mapping):
    return f"holds a {type(data).__name__}, not a JSON object"
  for key in GAME_KEYS:
    if not isinstance(data.get(key), str) or not data[key].strip():
      return f"has no text under {key!r}"
  if not data.get("solvable"):
    return "is not marked solvable"
  if "(:goal" not in data["pddl_problem"] or data["pddl_problem"].count("(") != data["pddl_problem"].count(")"):
    return "has a truncated PDDL problem (no goal, or unbalanced parentheses)"
  task = _TASK.search(data["grammar"])
  if task is None or "UNKNOWN GOAL" in task.group(1):
    return "states no task in its grammar"
  return ""


def read_game(path: str) -> dict[str, Any]:
  """The game in a `game.tw-pddl` file; raises `GameError` with the path and the reason."""
  try:
    with open(path, encoding="utf-8") as file:
      data = json.load(file)
  except OSError as error:
    raise GameError(f"{path}: cannot be read ({error.strerror or error})") from error
  except ValueError as error:  # malformed JSON and malformed UTF-8
    raise GameError(f"{path}: is not JSON ({error})") from error
  why = check_game(data)
  if why:
    raise GameError(f"{path}: {why}")
  return data


def shown_names(ids: list[str]) -> dict[str, str]:
  """Identifier -> the name a player sees, as ALFWorld names things: "<type> <number>", numbered within the type.

  `potato_bar__plus_01_dot_20...` becomes "potato 2": the type is what stands before the first "_bar_"; the last in
  sorted order is number 1. The basin of a sink or bathtub is a receptacle of its own ("sinkbasin 1").
  """
  kinds = {}
  for name in sorted(ids):
    kind, bar, _ = name.partition("_bar_")
    kinds[name] = (kind + ("basin" if "basin" in name else "")) if bar else ""
  left = collections.Counter(kind for kind in kinds.values() if kind)
  names = {}
  for name, kind in kinds.items():
    if kind:
      names[name] = f"{kind} {left[kind]}"
      left[kind] -= 1
    else:
      names[name] = name
  return names


def take_engine(expert: bool = False) -> Engine:
  """An engine that a closed environment of this process gave back, or a new one."""
  return _FREE[expert].pop() if _FREE[expert] else Engine(expert)


def give_back(engine: Engine) -> None:
  """Keeps an engine for the next environment, for it can not be unloaded."""
  _FREE[bool(engine.request_infos.policy_commands)].append(engine)


class Engine(PddlEnv):
  """One reusable game engine: `load(data)`, `reset()`, `step(command)`, as TextWorld's own, and cheaper (see the
  module's text).

  With `expert`, `state["policy_commands"]` holds a plan of the fast-downward planner from the current state to the
  goal.
  """

  def __init__(self, expert: bool = False):
    super().__init__(textworld.EnvInfos(won=True, admissible_commands=True, policy_commands=expert))
    self._label = "game"

  def load(self, data: Mapping[str, Any], label: str = "game") -> None:
    """Takes the game `data`; raises `GameError` (with `label`) where the engine can not make a game of it."""
    self._label = label
    with self._translating():
      super().load(data)
    names = shown_names(list(self._entity_infos))
    for key, info in self._entity_infos.items():
      info.name = names[key]

  def reset(self):
    with self._translating():
      return super().reset()

  @contextlib.contextmanager
  def _translating(self):
    # TextWorld reaches the translator through the module attribute: the memo stands there while a game is loaded, no
    # longer.
    original, argv = fast_downward.pddl2sas, sys.argv
    expert = self.request_infos.policy_commands

    def memo(domain, problem, verbose=False, optimize=False):
      # The second, optimised translation only serves the planner; without it any valid task will do.
      return _translate(original, domain, problem, bool(optimize and expert))

    fast_downward.pddl2sas = memo
    try:
      yield
    except (Exception, SystemExit) as error:  # the translator calls sys.exit() on some malformed problems
      raise GameError(f"{self._label}: the engine cannot load it ({type(error).__name__}: {error})") from error
    finally:
      fast_downward.pddl2sas = original
      sys.argv = argv  # the translator overwrites the program's argument list

  def _gather_infos(self) -> None:
    state = self._pddl_state
    self.state["won"], self.state["lost"] = state.check_goal(), False
    actions = list(state.all_applicable_actions())
    commands = [self._command(action) for action in actions]
    self.state["_valid_actions"], self.state["_valid_commands"] = actions, commands
    self.state["admissible_commands"] = sorted(set(commands))
    if self.request_infos.policy_commands:
      self.state["policy_commands"] = state.replan(self._entity_infos)

  def _command(self, action) -> str:
    names = {placeholder.name: self._entity_infos[value.name].name for placeholder, value in action.mapping.items()}
    return _plain_template(action.command_template).format(**names)


_FREE: dict[bool, list[Engine]] = {False: [], True: []}


@functools.lru_cache(maxsize=8)
def _translate(pddl2sas, domain: str, problem: str, optimize: bool):
  return pddl2sas(domain, problem, optimize=optimize)


@functools.lru_cache(maxsize=256)
def _plain_template(template: str) -> str:
  plain = _LISTED.sub(r"{\1}", template)
  for _, field, _, _ in string.Formatter().parse(plain):
    if field is not None and not field.isidentifier():
      raise GameError(f"command template {template!r}: only {{name}} and [{{name.name | condition}}] are understood")
  return plain
