"""The scripted analyzer of the household: reads an episode's text, never the room, and writes a hindsight skill.

`Reader` collects what the text has told (it also serves the demonstrators, who know no more than that). `analyze`
turns it into a workflow with the decisive places after a success and into a rule that names the mistake after a
failure. Every word of a skill is a template word or stands in the episode, so that a small model can learn to write
it; 30 words at most.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from envs.household_rooms import APPLIANCES, LAMP, kind

LISTED = 4  # places an avoidance rule names at most
_GOAL = re.compile(
  r"(?:(?P<look>look) at some (?P<seen>\w+) under (?P<lamp>\w+)|put (?P<many>two|some) (?P<item>\w+) in (?P<target>\w+)"
  r"|(?P<verb>heat|cool|clean) some (?P<treated>\w+) and put it in (?P<place>\w+))\.?"
)


@dataclasses.dataclass(frozen=True)
class Goal:
  family: str
  item: str
  target: str


def read_goal(task: str) -> Goal | None:
  """The goal behind a task sentence, None for a sentence of another world."""
  match = _GOAL.fullmatch(task.strip())
  if match is None:
    return None
  part = match.groupdict()
  if part["look"]:
    return Goal("look", part["seen"], part["lamp"])
  if part["many"]:
    return Goal("pick2" if part["many"] == "two" else "pick", part["item"], part["target"])
  return Goal(part["verb"], part["treated"], part["place"])


class Reader:
  """What the observations have told so far."""

  def __init__(self) -> None:
    self.places: list[str] = []  # as listed at the start
    self.visited: list[str] = []  # in order, each once
    self.known: dict[str, list[str]] = {}  # place -> objects, as far as they were seen
    self.origin: dict[str, str] = {}  # object -> the place where it was first seen
    self.opened: set[str] = set()
    self.here = self.held = ""
    self.marks: set[tuple[str, str]] = set()
    self.treated: list[tuple[str, str, str]] = []  # (verb, object, place)
    self.moved: list[tuple[str, str]] = []  # (object, place), in order
    self.lamps_used = 0

  def start(self, observation: str) -> None:
    first = observation.split("\n", 1)[0]
    if first.startswith("You see ") and not self.places:
      self.places = _names(first[8:])

  def read(self, action: str, observation: str) -> None:
    """Take in an action and the answer to it; a rejected action teaches nothing."""
    verb, _, rest = action.partition(" ")
    head, _, tail = observation.partition(" you see ")
    if tail:
      self._arrive(head.partition(" ")[2], _names(tail))
    elif observation.endswith(" is closed."):
      self._arrive(observation[: -len(" is closed.")], None)
    elif observation.startswith("You open "):
      self.opened.add(rest)
      self._arrive(rest, _names(observation.partition("You see ")[2]))
    elif observation.startswith("You close "):
      self.opened.discard(rest)
    elif observation.startswith("You pick up "):
      self.held, _, place = rest.partition(" from ")
      if self.held in self.known.get(place, ()):
        self.known[place].remove(self.held)
      self.origin.setdefault(self.held, place)
    elif observation.startswith("You move "):
      self.drop(action)
    elif verb in APPLIANCES and observation.startswith(f"You {verb} "):
      thing, _, place = rest.partition(" with ")
      self.marks.discard((thing, {"heat": "cool", "cool": "heat"}.get(verb, "")))
      self.marks.add((thing, verb))
      self.treated.append((verb, thing, place))
    elif observation.startswith("You use "):
      self.lamps_used += 1

  def drop(self, action: str) -> None:
    thing, _, place = action[5:].partition(" to ")
    self.known.setdefault(place, []).append(thing)
    self.moved.append((thing, place))
    self.held = ""

  def _arrive(self, place: str, content: list[str] | None) -> None:
    self.here = place
    if place not in self.visited:
      self.visited.append(place)
    if content is not None:
      self.known[place] = content
      for thing in content:
        self.origin.setdefault(thing, place)


def analyze(task: str, steps: Sequence[tuple[str, str, bool]], won: bool) -> dict[str, str] | None:
  """{"episode_summary", "episode_skill"} of an episode; `steps` holds (observation before the action, action, valid).

  None where the task sentence is not of the household or there is no step.
  """
  goal = read_goal(task)
  if goal is None or not steps:
    return None
  reader = Reader()
  reader.start(steps[0][0])
  for (_, action, _), (answer, _, _) in zip(steps, steps[1:], strict=False):
    reader.read(action, answer)
  last = steps[-1][1]
  if won and last.startswith("move "):
    reader.drop(last)  # the answer to the winning action is no longer part of the steps
  summary, skill = _success(goal, reader, last) if won else _failure(goal, reader)
  return {"episode_summary": summary, "episode_skill": skill}


def _success(goal: Goal, reader: Reader, last: str) -> tuple[str, str]:
  if goal.family == "look":
    thing, where = reader.held, reader.here
    source = reader.origin.get(thing, where)
    return (
      f"{goal.item} was in {source}, {LAMP} in {where}.",
      f"take {thing} from {source}, use {LAMP} 1 in {where}.",
    )
  final = reader.moved[-1][1]
  delivered = [thing for thing, place in dict(reader.moved).items() if place == final and kind(thing) == goal.item]
  if goal.family == "pick2":
    sources = [reader.origin.get(thing, final) for thing in delivered[:2]]
    skill = ", ".join(
      f"take {thing} from {source}, move {thing} to {final}" for thing, source in zip(delivered, sources, strict=False)
    )
    return f"{goal.item} was in {', '.join(dict.fromkeys(sources))}.", f"{skill}."
  thing = delivered[0]
  source = reader.origin.get(thing, final)
  advice = f"take {thing} from {source}, {_treat(goal, reader, thing)}move {thing} to {final}."
  return f"{goal.item} was in {source}.", advice


def _failure(goal: Goal, reader: Reader) -> tuple[str, str]:
  item = goal.item
  found = [thing for thing in reader.origin if kind(thing) == item]
  if not found:
    missed = _missed(item, reader)
    return f"{item} was not found.", f"{missed}." if missed else f"go and look for {item}."
  taken = [thing for thing in found if thing == reader.held or any(thing == moved for moved, _ in reader.moved)]
  if not taken:
    source = reader.origin[found[0]]
    return f"{item} was in {source} but not taken.", f"take {found[0]} from {source} when you see it."
  thing = reader.held if reader.held in taken else taken[-1]
  source = reader.origin[thing]
  take = f"take {thing} from {source}"
  if goal.family == "look":
    return _failed_look(goal, reader, take, source)
  wrong = [place for moved, place in reader.moved if kind(moved) == item and kind(place) != goal.target]
  target = next((place for place in reader.places if kind(place) == goal.target), f"{goal.target} 1")
  if goal.family == "pick2":
    return _failed_pick2(goal, reader, target, wrong, found, thing)
  treated = goal.family == "pick" or (thing, goal.family) in reader.marks
  path = f"{take}, {_treat(goal, reader, thing)}"
  if not treated and any(moved == thing and kind(place) == goal.target for moved, place in reader.moved):
    return f"{item} was in {source} but {goal.family} was skipped.", f"{path[:-2]} before you move {thing} to {target}."
  if wrong:
    return f"{item} was moved to {wrong[-1]}.", f"{path}move {thing} to {target}, not to {wrong[-1]}."
  return f"{item} was in {source} but not moved.", f"{path}move {thing} to {target}, do not wander."


def _failed_look(goal: Goal, reader: Reader, take: str, source: str) -> tuple[str, str]:
  lamp = next((place for thing, place in reader.origin.items() if kind(thing) == LAMP), "")
  if not lamp:
    missed = _missed(LAMP, reader)
    return f"{LAMP} was not found.", f"{take}, {missed}." if missed else f"{take}, go and look for {LAMP}."
  if reader.lamps_used or reader.moved:
    return f"{LAMP} was in {lamp}, {goal.item} not in hand.", f"{take} before you use {LAMP} 1 in {lamp}."
  return f"{goal.item} was in {source}, {LAMP} in {lamp}.", f"{take}, use {LAMP} 1 in {lamp}, do not wander."


def _failed_pick2(goal: Goal, reader: Reader, target: str, wrong, found, thing) -> tuple[str, str]:
  item = goal.item
  if len(found) > 1:
    one, other = found[:2]
    first, second = reader.origin[one], reader.origin[other]
    skill = f"take {one} from {first}, move {one} to {target}, take {other} from {second}, move {other} to {target}"
    tail = f", not to {wrong[-1]}" if wrong else ", do not wander"
    return f"{item} was in {first} and {second}.", f"{skill}{tail}."
  missed = _missed(item, reader, skip=reader.origin[thing])
  tail = f"other {missed}" if missed else f"go and look for other {item}"
  return f"other {item} was not found.", f"take {thing} from {reader.origin[thing]}, move {thing} to {target}, {tail}."


def _treat(goal: Goal, reader: Reader, thing: str) -> str:
  """ "heat potato 2 with microwave 1, " for the families that need it."""
  if goal.family not in APPLIANCES:
    return ""
  used = [place for verb, thing, place in reader.treated if verb == goal.family and kind(thing) == goal.item]
  return f"{goal.family} {thing} with {used[-1] if used else APPLIANCES[goal.family] + ' 1'}, "


def _missed(item: str, reader: Reader, skip: str = "") -> str:
  """As in "potato is not in cabinet 1, shelf 2": places whose content was seen; those left closed do not count."""
  empty = [place for place in reader.visited if place in reader.known and place != skip][:LISTED]
  return f"{item} is not in {', '.join(empty)}" if empty else ""


def _names(listing: str) -> list[str]:
  body = listing.strip().rstrip(".")
  return [] if body == "nothing" else body.split(", ")
