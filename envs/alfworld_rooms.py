"""Rooms of our own for the real ALFWorld engine: PDDL problems drawn from household regularities, for all six task
families.

A room is 8-12 receptacles and 12-25 objects. Where an object lies follows `HOMES` (a potato mostly in the fridge)
four times out of five and is any place that may hold it otherwise. What a receptacle may hold, which objects can be
heated, cooled, cleaned or sliced, the domain, the text grammar and the goal formulas are those of the installed
`alfworld` package (0.4), read as files: importing the package would create a folder in the user's home.

A problem is a function of (split, family, index) alone. Randomness comes from `random.Random(text).random()`, the one
method whose sequence Python promises to keep, so that every machine draws the same rooms. A fixed hash holds back one
in four (family, object, receptacle) goals for the "unseen" split; they never occur in "train".
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

FAMILIES = {  # our names -> ALFWorld's task types
  "pick": "pick_and_place_simple",
  "look": "look_at_obj_in_light",
  "clean": "pick_clean_then_place_in_recep",
  "heat": "pick_heat_then_place_in_recep",
  "cool": "pick_cool_then_place_in_recep",
  "pick2": "pick_two_obj_and_place",
}
GENERATED = ("generated_train", "generated_unseen")
_APPLIANCE = {"heat": "Microwave", "cool": "Fridge", "clean": "SinkBasin"}
_AFFORDANCE = {"heat": "Heatable", "cool": "Coolable", "clean": "Cleanable"}
_OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
_LAMP = "DeskLamp"
_LAMP_PLACES = ("Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf")

# Per room kind: (what is always there, what may be there as well, by name as often as it may occur).
_FURNITURE = {
  "kitchen": (
    ("Cabinet", "Cabinet", "CounterTop", "Drawer", "Fridge", "Microwave", "SinkBasin"),
    ("Cabinet", "CoffeeMachine", "CounterTop", "DiningTable", "Drawer", "GarbageCan", "Shelf")
    + ("StoveBurner", "StoveBurner"),
  ),
  "bathroom": (
    ("Cabinet", "Cabinet", "CounterTop", "SinkBasin", "Toilet"),
    ("BathtubBasin", "Cabinet", "Drawer", "Drawer", "GarbageCan", "HandTowelHolder", "Shelf", "ToiletPaperHanger"),
  ),
  "bedroom": (
    ("Bed", "Desk", "Drawer", "Drawer", "SideTable"),
    ("ArmChair", "Drawer", "Dresser", "GarbageCan", "LaundryHamper", "Safe", "Shelf", "Shelf", "SideTable"),
  ),
  "livingroom": (
    ("CoffeeTable", "Drawer", "SideTable", "Sofa"),
    ("ArmChair", "ArmChair", "Cabinet", "DiningTable", "Drawer", "Dresser", "GarbageCan", "Ottoman", "Shelf")
    + ("SideTable",),
  ),
}  # fmt: skip
_ROOMS = {
  "pick": ("kitchen", "bathroom", "bedroom", "livingroom"),
  "pick2": ("kitchen", "bathroom", "bedroom", "livingroom"),
  "look": ("bedroom", "livingroom"),
  "clean": ("kitchen", "bathroom"),
  "heat": ("kitchen",),
  "cool": ("kitchen",),
}

# How much an object is drawn to a kind of receptacle.
_FOOD = {"Fridge": 8, "CounterTop": 4, "DiningTable": 3, "SinkBasin": 1, "GarbageCan": 1}
_DRINK = {"Cabinet": 5, "CounterTop": 3, "Shelf": 3, "CoffeeMachine": 2, "SinkBasin": 2, "DiningTable": 2}
_DISH = {"Cabinet": 6, "CounterTop": 3, "DiningTable": 3, "Shelf": 2, "SinkBasin": 1}
_COOKWARE = {"StoveBurner": 6, "Cabinet": 4, "CounterTop": 2, "SinkBasin": 1}
_CUTLERY = {"Drawer": 8, "CounterTop": 3, "DiningTable": 2, "SinkBasin": 2}
_SPICE = {"Cabinet": 4, "CounterTop": 3, "Shelf": 3, "Drawer": 1}
_SMALL = {"Drawer": 6, "SideTable": 5, "Dresser": 4, "CoffeeTable": 3, "Desk": 2, "Safe": 2}
_WRITING = {"Desk": 8, "Drawer": 4, "Shelf": 2, "SideTable": 2}
_SOFT = {"Bed": 8, "Sofa": 7, "ArmChair": 5}
_HOME = {"Sofa": 4, "CoffeeTable": 4, "Bed": 4, "Desk": 4, "SideTable": 3, "DiningTable": 2}
_BATH = {"CounterTop": 5, "Cabinet": 5, "BathtubBasin": 2, "SinkBasin": 2}
_PAPER = {"ToiletPaperHanger": 6, "Toilet": 5, "Cabinet": 4, "Drawer": 1}
HOMES: dict[str, Mapping[str, int]] = {
  "Apple": _FOOD, "Egg": _FOOD, "Lettuce": _FOOD, "Potato": _FOOD, "Tomato": _FOOD,
  "Bread": {"CounterTop": 7, "DiningTable": 3, "Fridge": 2},
  "Cup": _DRINK, "Mug": _DRINK, "Bowl": _DISH, "Plate": _DISH, "Pan": _COOKWARE, "Pot": _COOKWARE, "Kettle": _COOKWARE,
  "ButterKnife": _CUTLERY, "Fork": _CUTLERY, "Knife": _CUTLERY, "Spoon": _CUTLERY, "Spatula": _CUTLERY,
  "SaltShaker": _SPICE, "PepperShaker": _SPICE, "DishSponge": {"SinkBasin": 6, "CounterTop": 3},
  "Cloth": _BATH, "SoapBar": _BATH, "SprayBottle": _BATH, "ToiletPaper": _PAPER,
  "SoapBottle": {"CounterTop": 5, "Cabinet": 4, "Toilet": 2},
  "HandTowel": {"HandTowelHolder": 9, "CounterTop": 2}, "Candle": {"CounterTop": 4, "Toilet": 4, "Shelf": 4},
  "AlarmClock": {"SideTable": 7, "Desk": 4, "Dresser": 4, "Shelf": 2},
  "Book": _HOME, "Laptop": _HOME, "Newspaper": _HOME, "CellPhone": {**_HOME, "Dresser": 3},
  "CD": {"Desk": 4, "Shelf": 4, "Drawer": 4, "Safe": 1},
  "CreditCard": _SMALL, "KeyChain": _SMALL, "Watch": _SMALL, "Pen": _WRITING, "Pencil": _WRITING, "Pillow": _SOFT,
  "RemoteControl": {"Sofa": 6, "CoffeeTable": 5, "ArmChair": 3},
  "Vase": {"Shelf": 5, "SideTable": 3, "CoffeeTable": 3, "Safe": 1},
  "Statue": {"Shelf": 5, "Dresser": 4, "CoffeeTable": 3}, "TissueBox": {"SideTable": 4, "CoffeeTable": 3, "Shelf": 2},
}  # fmt: skip
_OBJECTS = {
  "kitchen": "Apple Egg Lettuce Potato Tomato Bread Cup Mug Bowl Plate Pan Pot Kettle ButterKnife Fork Knife Spoon"
  " Spatula SaltShaker PepperShaker DishSponge SoapBottle",
  "bathroom": "Cloth SoapBar SoapBottle SprayBottle HandTowel ToiletPaper Candle DishSponge",
  "bedroom": "AlarmClock Book CD CellPhone CreditCard KeyChain Laptop Mug Pen Pencil Pillow Bowl Vase Cloth",
  "livingroom": "Book CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl Statue TissueBox Vase Watch"
  " Pencil Plate",
}
_VESSELS = frozenset(
  {"Bowl", "Cup", "Mug", "Pan", "Plate", "Pot"}
)  # objects that may hold others: only their "examine" text differs


class _Dice:
  """Draws from `Random(text).random()` alone."""

  def __init__(self, text: str):
    self._random = random.Random(text).random

  def below(self, n: int) -> int:
    return min(int(self._random() * n), n - 1)

  def pick(self, items: Sequence[Any]) -> Any:
    return items[self.below(len(items))]

  def weighted(self, weights: Mapping[str, int]) -> str:
    names = sorted(weights)
    mark = self._random() * sum(weights.values())
    for name in names:
      mark -= weights[name]
      if mark < 0:
        return name
    return names[-1]

  def shuffled(self, items: Sequence[Any]) -> list[Any]:
    rest = list(items)
    return [rest.pop(self.below(len(rest))) for _ in range(len(rest))]


def held_out(family: str, item: str, target: str) -> bool:
  """Whether this goal belongs to "generated_unseen" alone (one in four, by a fixed hash)."""
  return zlib.crc32(f"{family}/{item}/{target}".encode()) % 4 == 0


@functools.cache
def goals(split: str, family: str) -> tuple[tuple[str, str, str], ...]:
  """All (room kind, object, target) of a split and family, sorted; the target of "look" is the lamp."""
  if split not in GENERATED or family not in FAMILIES:
    raise ValueError(
      f"no generated rooms for split {split!r}, family {family!r}: choose from {GENERATED} and {tuple(FAMILIES)}"
    )
  holds, affords = _package().holds, _package().affords
  found = []
  for room in _ROOMS[family]:
    required, optional = _FURNITURE[room]
    for item in _OBJECTS[room].split():
      if family in _AFFORDANCE and item not in affords[_AFFORDANCE[family]]:
        continue
      places = [_LAMP] if family == "look" else sorted({*required, *optional} - {_APPLIANCE.get(family)})
      for target in places:
        fits = family == "look" or item in holds.get(target, ())
        if family in (
          "pick",
          "pick2",
        ):  # the object starts elsewhere: there must be such a place in every room of the kind
          fits = fits and any(item in holds.get(place, ()) for place in required if place != target)
        if fits and held_out(family, item, target) == (split == "generated_unseen"):
          found.append((room, item, target))
  return tuple(sorted(found))


def room(split: str, family: str, index: int) -> dict[str, Any]:
  """The drawn room: {"kind", "family", "object", "target", "task", "receptacles": [type], "objects": [(type,
  receptacle number)]}.

  The goal is never true at the start: a pick object is not in any receptacle of the target type, the two of pick2 are
  elsewhere, and nothing is hot, cold, clean or lit.
  """
  dice = _Dice(f"alfworld-room/{split}/{family}/{index}")
  # Goals are dealt like cards, so that `index` runs through all of them before one comes again.
  choices = goals(split, family)
  deck = _Dice(f"alfworld-deck/{split}/{family}/{index // len(choices)}").shuffled(choices)
  kind, item, target = deck[index % len(choices)]
  receptacles = _furnish(dice, kind, target)
  template = dice.pick(_package().goal[FAMILIES[family]]["templates"])
  task = template.format(obj=item.lower(), recep=target.lower(), toggle=target.lower())
  objects: list[tuple[str, int]] = []
  copies = 2 if family == "pick2" else 1 + dice.below(2)
  banned = {target} if family in ("pick", "pick2") else set()
  for _ in range(copies):
    objects.append((item, _place(dice, item, receptacles, banned)))
  if family == "look":
    lamps = [number for number, name in enumerate(receptacles) if name in _LAMP_PLACES]
    objects.append((_LAMP, dice.pick(lamps)))
  total = 12 + dice.below(9 if kind == "bathroom" else 14)
  others = [name for name in _OBJECTS[kind].split() if name != item]
  crowd = dice.shuffled(others + others)
  for name in crowd[: total - len(objects)]:
    objects.append((name, _place(dice, name, receptacles, set())))
  return {
    "kind": kind, "family": family, "object": item, "target": target, "task": task,
    "receptacles": receptacles, "objects": sorted(objects),
  }  # fmt: skip


def game(split: str, family: str, index: int) -> dict[str, Any]:
  """The content of a `game.tw-pddl` file: {pddl_domain, grammar, pddl_problem, solvable, walkthrough}; JSON values."""
  drawn, package = room(split, family, index), _package()
  return {
    "pddl_domain": package.domain,
    "grammar": package.grammar.replace("UNKNOWN GOAL", drawn["task"]),
    "pddl_problem": problem(drawn, f"{split}_{family}_{index}"),
    "solvable": True,
    "walkthrough": None,
  }


def write_game(folder: str, split: str, family: str, index: int, *, into: str = "train") -> str:
  """Writes a generated game where an official one of the split `into` would be; returns the path.

  That is `folder/json_2.1.1/<into>/<task type>-<object>-None-<target>-<index>/trial_<index>/game.tw-pddl`, so that
  other ALFWorld programs can play it too.
  """
  drawn = room(split, family, index)
  task = f"{FAMILIES[family]}-{drawn['object']}-None-{drawn['target']}-{index}"
  path = os.path.join(folder, "json_2.1.1", into, task, f"trial_{index:08d}", "game.tw-pddl")
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, "w", encoding="utf-8") as file:
    json.dump(game(split, family, index), file)
  return path


def problem(drawn: Mapping[str, Any], name: str) -> str:
  """The PDDL problem of a drawn room, for the `alfred` domain."""
  package, counts = _package(), {}

  def number(kind: str) -> str:
    counts[kind] = counts.get(kind, 0) + 1
    return f"{kind}_bar_{counts[kind]:02d}"

  declared, init = ["agent1 - agent", "loc_bar_00 - location"], ["(atLocation agent1 loc_bar_00)"]
  places = []
  for position, kind in enumerate(drawn["receptacles"], 1):
    basin = kind.endswith(
      "Basin"
    )  # named as the engine's player-facing names expect: a basin belongs to a sink or bathtub
    place = f"{number(kind.removesuffix('Basin'))}_bar_{kind}" if basin else number(kind)
    location = f"loc_bar_{position:02d}"
    places.append((place, location, kind))
    declared += [f"{place} - receptacle", f"{location} - location"]
    init += [f"(receptacleType {place} {kind}Type)", f"(receptacleAtLocation {place} {location})"]
    if kind in _OPENABLE:
      init.append(f"(openable {place})")
  for kind, where in drawn["objects"]:
    thing, (place, location, _) = number(kind), places[where]
    declared.append(f"{thing} - object")
    init += [
      f"(objectType {thing} {kind}Type)",
      f"(inReceptacle {thing} {place})",
      f"(objectAtLocation {thing} {location})",
    ]
    init.append(f"(toggleable {thing})" if kind == _LAMP else f"(pickupable {thing})")
    if kind in _VESSELS:
      init.append(f"(isReceptacleObject {thing})")
    for affordance in ("Cleanable", "Heatable", "Coolable", "Sliceable"):
      if kind in package.affords[affordance]:
        init.append(f"({affordance.lower()} {thing})")
  kinds = sorted({kind for kind, _ in drawn["objects"]})
  shelves = sorted(set(drawn["receptacles"]))
  # The domain's constants for appliances and knives must exist in every room.
  declared += [f"{kind}Type - rtype" for kind in sorted({*shelves, *_APPLIANCE.values()})]
  declared += [f"{kind}Type - otype" for kind in sorted({*kinds, "Knife", "ButterKnife"})]
  init += [
    f"(canContain {shelf}Type {kind}Type)"
    for shelf in shelves
    for kind in kinds
    if kind in package.holds.get(shelf, ())
  ]
  formula = package.goal[FAMILIES[drawn["family"]]]["pddl"].replace("#", "-")
  formula = formula.format(obj=drawn["object"], recep=drawn["target"], toggle=drawn["target"])
  lines = [f"(define (problem {name})", "(:domain alfred)", "(:objects", *declared, ")", "(:init", *init, ")"]
  return "\n".join(lines) + "\n" + _closed(formula)


def _closed(formula: str) -> str:
  """The goal formula and the problem's last parenthesis; some formulas of the goal library carry it, some do not."""
  depth = 0
  for position, letter in enumerate(formula):
    depth += (letter == "(") - (letter == ")")
    if letter == ")" and depth == 0:
      return formula[: position + 1].strip() + "\n)\n"
  raise ValueError(f"the goal library holds an unbalanced goal: {formula.strip()[:80]!r}")


def _furnish(dice: _Dice, kind: str, target: str) -> list[str]:
  required, optional = _FURNITURE[kind]
  chosen = list(required)
  extra = dice.shuffled(optional)
  if target != _LAMP and target not in chosen:
    extra.remove(target)
    chosen.append(target)
  size = 8 + dice.below(5)
  return sorted(chosen + extra[: max(0, size - len(chosen))])


def _place(dice: _Dice, item: str, receptacles: Sequence[str], banned: set[str]) -> int:
  """A receptacle's number for an object: by its homes four times out of five, else anywhere that may hold it."""
  possible = sorted({name for name in receptacles if item in _package().holds.get(name, ())} - banned)
  if not possible:
    raise ValueError(f"no receptacle of {sorted(set(receptacles))} may hold {item} (excluded: {sorted(banned)})")
  homes = {name: HOMES[item][name] for name in possible if name in HOMES[item]}
  by_habit = dice.below(5) < 4
  name = dice.weighted(homes) if homes and by_habit else dice.pick(possible)
  return dice.pick([number for number, other in enumerate(receptacles) if other == name])


class _Package:
  """What the installed alfworld package ships as files."""

  def __init__(self, root: str):
    constants = _load_file("_alfworld_constants", os.path.join(root, "gen", "constants.py"))
    self.goal = _load_file("_alfworld_goals", os.path.join(root, "gen", "goal_library.py")).gdict
    self.holds: dict[str, set[str]] = constants.VAL_RECEPTACLE_OBJECTS
    self.affords: dict[str, set[str]] = constants.VAL_ACTION_OBJECTS
    with open(os.path.join(root, "data", "alfred.pddl"), encoding="utf-8") as file:
      self.domain = file.read()
    with open(os.path.join(root, "data", "alfred.twl2"), encoding="utf-8") as file:
      self.grammar = file.read()


@functools.cache
def _package() -> _Package:
  spec = importlib.util.find_spec("alfworld")
  if spec is None or not spec.submodule_search_locations:
    raise ImportError(
      "generated ALFWorld rooms need the game engine: pip install 'seed_jax[alfworld]' (pip install alfworld textworld)"
    )
  return _Package(spec.submodule_search_locations[0])


def _load_file(name: str, path: str):
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
