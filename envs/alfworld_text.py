"""What an ALFWorld policy reads and writes: prompts, the action parser, and a scripted analyzer of finished episodes.

Pure text functions: nothing here loads the game engine. The protocol is that of the ALFWorld experiments of SEED and
verl-agent (task line, last observation/action pairs, admissible actions, then thinking and an action in tags); the
wording is our own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TASK_MARK = "Your task is to:"
NOTHING = "Nothing happens."
MAX_ACTION = 100  # characters of an action that reach the engine; its longest command is about half of that
_FALLBACK = 30  # a response without action tags: its last characters are sent, and the format counts as invalid

_ROLE = "You are acting in a household described by text."
_THINK = (
  "It is your turn. First reason about the situation step by step inside <think> </think>, then choose one of the"
  " admissible actions and write it inside <action> </action>."
)
_PLAIN = "Answer with one action from the list, written as <action>...</action>, and nothing else."


def window_prompt(
  task: str,
  history: Sequence[tuple[str, str]],
  step: int,
  observation: str,
  admissible: Sequence[str],
  *,
  plain: bool = False,
) -> str:
  """The message of one step; `step` actions were taken before it, of which `history` holds the last pairs
  (observation, action)."""
  lines = [] if plain else [_ROLE]
  lines.append(f"{TASK_MARK} {task}.")
  if history:
    first = step - len(history)
    if not plain:
      lines.append(f"Steps taken so far: {step}. The last {len(history)} of them:")
    for number, (seen, done) in enumerate(history, first + 1):
      lines.append(
        f"[Observation {number}: {_line(seen)!r}, Action {number}: {done!r}]"
        if not plain
        else f"{_line(seen)}\n> {done}"
      )
  if plain:
    return "\n".join([*lines, _line(observation), _actions(admissible, plain), _PLAIN])
  return "\n".join(
    [*lines, f"This is step {step + 1}. You observe: {_line(observation)}", _actions(admissible, plain), _THINK]
  )


def turn_prompt(observation: str, admissible: Sequence[str], *, plain: bool = False) -> str:
  """A later message of one growing conversation: what the last action showed, and what can be done now."""
  return f"{_line(observation)}\n{_actions(admissible, plain)}"


def response(action: str) -> str:
  """The whole response that takes an action under a plain prompt: what `parse` reads back."""
  return f"<action>{action}</action>"


def parse(response: str, *, plain: bool = False) -> tuple[str, bool]:
  """(action, valid format): the text of the first action tag, lower case, stripped.

  Without a closed tag the last 30 characters are sent, and the format is invalid. It is also invalid, though the
  action is still played, if the thinking tags are not both there (not asked for with `plain`) or if the response
  holds Chinese characters. Whether the action is admissible is for the engine to say: it answers an unknown one with
  "Nothing happens.", the syntax of ALFWorld before 0.4 ("put X in/on Y") included, which is sent as it was written.
  """
  text = response.lower()
  start = text.find("<action>")
  end = text.find("</action>", start + 1)
  tagged = 0 <= start < end
  action = text[start + len("<action>") : end] if tagged else text[-_FALLBACK:]
  valid = tagged and (plain or ("<think>" in text and "</think>" in text))
  valid = valid and not re.search("[\u4e00-\u9fff]", response)
  return " ".join(action.split())[:MAX_ACTION], valid


def analyze(task: str, steps: Sequence[tuple[str, str, bool]], won: bool) -> dict[str, str] | None:
  """A scripted hindsight analyzer: {"episode_summary", "episode_skill"} from (observation, action, valid) of each step.

  `observation` is what the policy saw before it took `action`. A success gives the workflow with the places that
  mattered; a failure names the first mistake that the text shows: no search, commands that did nothing, the wrong
  order, a step left out. None without steps.
  """
  if not steps:
    return None
  actions = [action for _, action, _ in steps]
  replies = [observation for observation, _, _ in steps[1:]] + [
    ""
  ]  # what each action brought; the last one's is not in the text
  worked = [action for action, reply in zip(actions, replies, strict=True) if NOTHING not in reply]
  wasted = [action for action, reply in zip(actions, replies, strict=True) if NOTHING in reply]
  verb = re.search(r"\b(hot|heat|cool|clean|look|examine|two)\b", task)
  need = {"hot": "heat", "look": "use", "examine": "use"}.get(verb.group(1), verb.group(1)) if verb else ""
  if won:
    path = _decisive(worked)
    skill = f"To {task}: {', then '.join(path)}." if path else f"To {task}: keep to the listed actions."
    return {"episode_summary": f"Solved in {len(actions)} steps: {', '.join(path)}.", "episode_skill": skill}
  visited = list(dict.fromkeys(action[len("go to ") :] for action in worked if action.startswith("go to ")))
  held = [action for action in worked if action.startswith("take ")]
  wanted = [
    action
    for action in held
    if any(word in task.split() for word in re.findall(r"[a-z]+", action.split(" from ")[0])[1:])
  ]
  if len(wasted) * 2 > len(actions):
    mistake = f"most actions did nothing (such as {wasted[0]!r})"
    skill = (
      "Choose each action from the listed ones, word for word; go to a place before acting there; open closed ones."
    )
  elif not wanted:
    mistake = f"the object of the task was never picked up; searched {', '.join(visited) or 'nowhere'}"
    skill = f"To {task}: go to the places in turn, open the closed ones, and take the object as soon as it is seen."
    if visited:
      skill = f"To {task}: the object was not found in {', '.join(visited)}; look elsewhere and open closed places."
  elif need in ("heat", "cool", "clean") and not any(action.startswith(need) for action in worked):
    mistake = f"the object was picked up but not treated ({need})"
    device = {"heat": "microwave", "cool": "fridge", "clean": "sinkbasin"}[need]
    skill = f"To {task}: {_decisive(wanted)[0]}, {need} it with the {device} 1 before moving it to its place."
  elif need == "use" and not any(action.startswith("use ") for action in worked):
    mistake = "the lamp was never switched on with the object in hand"
    skill = f"To {task}: {_decisive(wanted)[0]}, carry it to the desklamp and use the desklamp."
  else:
    mistake = "the object was not brought to its place in time"
    skill = f"To {task}: {_decisive(wanted)[0]} and go straight to the target; do not wander or repeat actions."
  return {"episode_summary": f"Failed after {len(actions)} steps: {mistake}.", "episode_skill": skill}


def _decisive(actions: Sequence[str]) -> list[str]:
  """The actions that changed something that matters, each with the way to it: takes that were kept, treatments,
  moves, lamps."""
  kept = []
  for action in actions:
    if action.startswith("move ") and kept and kept[-1].startswith("take ") and _same_place(kept[-1], action):
      kept.pop()  # taken and put back
    elif action.startswith(("take ", "move ", "heat ", "cool ", "clean ", "use ")) and action not in kept[-1:]:
      kept.append(action)
  return kept


def _same_place(take: str, move: str) -> bool:
  return take[len("take ") :].replace(" from ", " to ") == move[len("move ") :]


def _actions(admissible: Sequence[str], plain: bool) -> str:
  if plain:
    return "Actions: " + ", ".join(admissible)
  return "Admissible actions now:\n" + "\n".join(f"'{action}'" for action in admissible)


def _line(observation: str) -> str:
  return " ".join(observation.split())
