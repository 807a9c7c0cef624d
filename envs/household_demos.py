"""Expert, demonstrators of mixed quality, and the corpus that stands in for a language model's pre-training.

A demonstrator knows what the text has told it (`Reader`), the household regularities to the degree of its quality q,
and the skill in its context if there is one. Without a skill it errs as beginners do, at rates that fall with q: it
searches in the wrong order, looks again where it was, overlooks, skips the heating, puts things in the wrong place,
wanders, writes nonsense. A fitting skill it follows; a skill for other things it ignores.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator

from envs import household_rooms as rooms
from envs.household_analyzer import Goal, Reader, analyze, read_goal
from envs.household_rooms import APPLIANCES, LAMP, PLACE_LIMIT, is_openable, kind
from envs.protocol import Task


@dataclasses.dataclass(frozen=True)
class Habits:
  """Error rates of one episode: the first three per episode, the others per step."""

  skip: float  # leaves out heating, cooling, cleaning; uses the lamp with empty hands
  misplace: float  # puts the object in a place of another kind
  resign: float  # does not notice a mistake and wanders until the end
  stray: float  # looks in a random place, known or not, rather than the likeliest new one
  overlook: float  # leaves a closed place closed, or the object where it is
  wander: float  # look, inventory, examine, close
  nonsense: float  # an action the room rejects

  @staticmethod
  def of(quality: float) -> Habits:
    """Quality 1 errs never, quality 0 at the rates below."""
    worse = 1.0 - quality
    return Habits(0.9 * worse, 0.5 * worse, worse, 0.9 * worse, 0.4 * worse, 0.3 * worse, 0.03 * worse)


# With a fitting skill: one that tells the whole way leaves little to get wrong; one that only warns leaves a search.
GOOD = 0.95  # quality of the better half of those whose episodes become skills
MISPLACED = 0.15
GUIDED = Habits(0.0, 0.0, 0.0, 0.01, 0.01, 0.01, 0.005)
WARNED = dataclasses.replace(Habits.of(0.8), skip=0.0, misplace=0.0)


@dataclasses.dataclass(frozen=True)
class Demonstration:
  task: Task
  steps: list[tuple[str, str]]  # (observation, action)
  final: str  # observation after the last action
  skill: str  # "" = none in context
  won: bool
  quality: float


@dataclasses.dataclass
class Advice:
  """A skill, read back."""

  sources: list[str] = dataclasses.field(default_factory=list)
  target: str = ""
  lamp: str = ""
  avoid: set[str] = dataclasses.field(default_factory=set)
  avoid_lamp: set[str] = dataclasses.field(default_factory=set)


_PLACE = r"(\w+ \d+)"


def read_advice(skill: str, goal: Goal, places: list[str]) -> Advice | None:
  """What a skill says about this goal; None where it speaks of other things or of places that are not here."""
  if not _mentions(skill, goal.item):
    return None
  advice = Advice(sources=re.findall(rf"take {goal.item} \d+ from {_PLACE}", skill))
  advice.target = next(iter(re.findall(rf"move {goal.item} \d+ to {_PLACE}", skill)), "")
  advice.lamp = next(iter(re.findall(rf"use {LAMP} 1 in {_PLACE}", skill)), "")
  for match in re.finditer(rf"(\w+) is not in ({_PLACE}(?:, {_PLACE})*)", skill):
    (advice.avoid_lamp if match[1] == LAMP else advice.avoid).update(re.findall(_PLACE, match[2]))
  named = {*advice.sources, *advice.avoid, *advice.avoid_lamp, *filter(None, (advice.target, advice.lamp))}
  if not named <= set(places) or (advice.target and kind(advice.target) != goal.target):
    return None
  return advice


class Demonstrator:
  """Acts on what it has read. `habits` are its error rates, `advice` what a fitting skill says."""

  def __init__(self, goal: Goal, reader: Reader, habits: Habits, advice: Advice | None, rng: random.Random):
    self.goal, self.reader, self.habits, self.advice, self.draw = goal, reader, habits, advice or Advice(), rng.random
    draw = self.draw
    self.skips = draw() < habits.skip
    self.resigned = False
    self.target = self.advice.target or self._choose_target(draw() < habits.misplace)
    self.sources = list(self.advice.sources)
    self.left_closed: set[str] = set()
    self.settled: set[str] = set()  # delivered, as it believes

  def act(self) -> str:
    if self.draw() < self.habits.nonsense:
      return self._nonsense()
    if self.resigned or self.draw() < self.habits.wander:
      return self._wander()
    goal, reader = self.goal, self.reader
    if reader.held and kind(reader.held) != goal.item:
      return self._put_back()
    if reader.held:
      return self._lamp() if goal.family == "look" else self._deliver()
    if goal.family == "look" and self.skips:
      return self._lamp()
    return self._fetch()

  def _fetch(self) -> str:
    """Take a known object of the wanted kind, or search on."""
    reader, item = self.reader, self.goal.item
    for place, content in reader.known.items():
      for thing in content:
        if kind(thing) == item and thing not in self.settled and self.draw() >= self.habits.overlook:
          return self._at(place, f"take {thing} from {place}")
    for place in self.sources:
      if place not in reader.known:
        return self._at(place, "")
    return self._search(item, self.advice.avoid)

  def _deliver(self) -> str:
    goal, reader = self.goal, self.reader
    if goal.family in APPLIANCES and not self.skips and (reader.held, goal.family) not in reader.marks:
      appliance = f"{APPLIANCES[goal.family]} 1"
      if reader.here != appliance:
        return f"go to {appliance}"
      return f"{goal.family} {reader.held} with {appliance}"
    action = self._at(self.target, f"move {reader.held} to {self.target}")
    if action.startswith("move ") and len(reader.known.get(self.target, ())) >= PLACE_LIMIT:
      return self._wander()
    return action

  def _lamp(self) -> str:
    reader = self.reader
    place = next((p for p, content in reader.known.items() if f"{LAMP} 1" in content), self.advice.lamp)
    if place and (place not in reader.known or f"{LAMP} 1" in reader.known[place]):
      return self._at(place, f"use {LAMP} 1")
    return self._search(LAMP, self.advice.avoid_lamp)

  def notice(self, action: str, observation: str) -> None:
    """After a step that should have ended the task: a good beginner sees what went wrong, a poor one does not."""
    thing = action[5:].partition(" to ")[0]
    wrong = kind(self.target) != self.goal.target
    if self.goal.family == "look":
      done = observation.startswith("You use ")
    else:
      done = observation.startswith("You move ") and kind(thing) == self.goal.item
      if done:
        self.settled.add(thing)
        done = self.goal.family != "pick2" or wrong or len(self.settled) >= 2
    if not done:
      return
    if self.draw() < self.habits.resign:
      self.resigned = True
      return
    self.skips = False
    self.settled.clear()
    if wrong:
      self.target = self._choose_target(False)

  def _at(self, place: str, action: str) -> str:
    """Go there, open it, then act."""
    reader = self.reader
    if reader.here != place:
      return f"go to {place}"
    if is_openable(place) and place not in reader.opened:
      return f"open {place}"
    return action or "look"

  def _search(self, item: str, avoid: set[str]) -> str:
    reader, here = self.reader, self.reader.here
    if here and is_openable(here) and here not in reader.known and here not in self.left_closed:
      if self.draw() >= self.habits.overlook:
        return f"open {here}"
      self.left_closed.add(here)
    if self.draw() < self.habits.stray:
      return self._go_anywhere()
    fresh = [
      p for p in reader.places if p not in reader.known and p not in avoid and p not in self.left_closed and p != here
    ]
    if not fresh:
      fresh = [p for p in reader.places if p not in reader.known and p != here]
    if not fresh:
      return self._go_anywhere()
    counts: dict[str, int] = {}
    for place in reader.places:
      counts[kind(place)] = counts.get(kind(place), 0) + 1
    home = rooms.HOMES[item]
    return f"go to {max(fresh, key=lambda p: home.get(kind(p), 0.0) / counts[kind(p)])}"

  def _choose_target(self, wrong: bool) -> str:
    places, wanted = self.reader.places, self.goal.target
    if wrong:
      others = [p for p in places if kind(p) != wanted]
      return others[int(self.draw() * len(others))]
    return next((p for p in places if kind(p) == wanted), places[0])

  def _go_anywhere(self) -> str:
    others = [p for p in self.reader.places if p != self.reader.here]
    return f"go to {others[int(self.draw() * len(others))]}"

  def _put_back(self) -> str:
    reader = self.reader
    here = reader.here
    if here and (not is_openable(here) or here in reader.opened) and len(reader.known.get(here, ())) < PLACE_LIMIT:
      return f"move {reader.held} to {here}"
    return self._go_anywhere()

  def _wander(self) -> str:
    reader, point = self.reader, self.draw()
    if point < 0.5 or not reader.here:
      return self._go_anywhere() if point < 0.9 else "look"
    content = reader.known.get(reader.here, ())
    visible = not is_openable(reader.here) or reader.here in reader.opened
    if point < 0.6 and visible and content and not reader.held and not self.resigned:
      loose = [thing for thing in content if kind(thing) not in (LAMP, self.goal.item)]
      if loose:
        return f"take {loose[int(self.draw() * len(loose))]} from {reader.here}"
    if point < 0.7:
      return "look"
    if point < 0.8:
      return "inventory"
    if point < 0.9 and is_openable(reader.here):
      return f"close {reader.here}" if reader.here in reader.opened else f"open {reader.here}"
    return f"examine {reader.here}"

  def _nonsense(self) -> str:
    reader, point = self.reader, self.draw()
    here = reader.here or reader.places[0]
    thing = reader.held or f"{self.goal.item} 1"
    if point < 0.4:
      return f"take {thing} from {here}"
    if point < 0.6:
      return f"open {here}"
    if point < 0.8:
      return f"move {thing} to {reader.places[int(self.draw() * len(reader.places))]}"
    return f"use {LAMP} 1"


def play(env, task: Task, habits: Habits, skill: str, rng: random.Random, *, idle: int = 2):
  """One demonstrated episode: (steps as (observation, action, valid), final observation, won).

  A demonstrator that has resigned is cut off after `idle` more steps: its wandering teaches nothing new.
  """
  observation, info = env.reset(options={"task": task.payload})
  goal, reader = read_goal(info["task"]), Reader()
  reader.start(observation)
  advice = read_advice(skill, goal, reader.places)
  if advice is not None:
    habits = WARNED if advice.avoid or advice.avoid_lamp or not advice.sources else GUIDED
  actor = Demonstrator(goal, reader, habits, advice, rng)
  steps, done, idled = [], False, 0
  while not done and idled < idle:
    action = actor.act()
    answer, _, won, cut, info = env.step(action)
    steps.append((observation, action, info["valid"]))
    if info["valid"]:
      reader.read(action, answer)
      if not won:
        actor.notice(action, answer)
    observation, done = answer, won or cut
    idled += actor.resigned
  return steps, observation, info["won"]


def expert(env, task: Task) -> list[str]:
  """The shortest sensible plan by someone who sees into every place of the room. `env` is reset to the task."""
  env.reset(options={"task": task.payload})
  item, target, family = task.payload["object"], task.payload["target"], task.payload["family"]
  sources = [(place, thing) for place, content in env.places.items() for thing in content if kind(thing) == item]
  plan, here, opened = [], "", set()

  def visit(place: str, *, look_in: bool = True) -> None:
    nonlocal here
    if here != place:
      plan.append(f"go to {place}")
      here = place
    if look_in and is_openable(place) and place not in opened:
      plan.append(f"open {place}")
      opened.add(place)

  for place, thing in sources[: 2 if family == "pick2" else 1]:
    visit(place)
    plan.append(f"take {thing} from {place}")
    if family == "look":
      visit(next(p for p, content in env.places.items() if f"{LAMP} 1" in content))
      plan.append(f"use {LAMP} 1")
      break
    if family in APPLIANCES:
      visit(f"{APPLIANCES[family]} 1", look_in=False)
      plan.append(f"{family} {thing} with {APPLIANCES[family]} 1")
    goal_place = next(p for p in env.places if kind(p) == target)
    visit(goal_place)
    plan.append(f"move {thing} to {goal_place}")
  return plan


def mixed_quality(rng: random.Random) -> float:
  """Quality of a demonstrator, uniform from 0 to 1."""
  return rng.random()


def demonstrations(benchmark, count: int, seed: int) -> Iterator[Demonstration]:
  """`count` episodes in train rooms, every second one with a skill in context.

  A skill is what the scripted analyzer says about another demonstrator's episode of the same task; half of those come
  from a good demonstrator, so that workflows are not rarer than warnings. A share `MISPLACED` of the skills is swapped
  for one of another task, about other objects, which the demonstrator ignores.
  """
  rng = random.Random(seed)
  env = benchmark.make()
  tasks = sorted(benchmark.tasks("train", count, seed), key=lambda task: rng.random())
  spare = ""
  for index, task in enumerate(tasks):
    skill = ""
    if index % 2:
      first = mixed_quality(rng) if rng.random() < 0.5 else GOOD
      steps, _, won = play(env, task, Habits.of(first), "", rng)
      skill = own = analyze(env.task, steps, won)["episode_skill"]
      if rng.random() < MISPLACED and spare and not _mentions(spare, task.payload["object"]):
        skill = spare
      if rng.random() < 0.5:
        spare = own
    quality = mixed_quality(rng)
    steps, final, won = play(env, task, Habits.of(quality), skill, rng)
    yield Demonstration(task, [(observation, action) for observation, action, _ in steps], final, skill, won, quality)


def _mentions(skill: str, item: str) -> bool:
  return re.search(rf"\b{item}\b", skill) is not None
