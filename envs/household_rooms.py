"""Rooms of the embedded household: what stands in them, where things tend to be, which tasks they pose, and the splits.

A room is drawn from one integer with `random.Random(seed).random()` alone, the one generator method whose sequence
Python promises to keep, so a task is the same room on every machine and version. Goal pairs (object, target receptacle)
are split by a fixed hash: those of "unseen" never occur in "train" or "valid"; the three splits use disjoint seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from envs.protocol import Task

FAMILIES = ("pick", "look", "clean", "heat", "cool", "pick2")
SPLITS = ("train", "valid", "unseen")
OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave"})
APPLIANCES = {"heat": "microwave", "cool": "fridge", "clean": "sinkbasin"}
LAMP = "desklamp"
PLACE_LIMIT = 4  # objects that fit in one place: keeps every observation within 15 pieces

# Per room kind: what is always there, and what may be there as well (each name once per possible copy).
FURNITURE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
  "kitchen": (
    ("countertop", "fridge", "microwave", "sinkbasin"),
    ("cabinet", "cabinet", "cabinet", "countertop", "diningtable", "drawer", "drawer", "garbagecan", "shelf", "shelf"),
  ),
  "bathroom": (
    ("countertop", "sinkbasin", "toilet"),
    ("bathtub", "cabinet", "cabinet", "cabinet", "drawer", "drawer", "garbagecan", "shelf", "shelf"),
  ),
  "bedroom": (
    ("bed", "desk", "dresser"),
    ("armchair", "cabinet", "drawer", "drawer", "drawer", "garbagecan", "shelf", "shelf", "sidetable", "sidetable"),
  ),
  "livingroom": (
    ("coffeetable", "sidetable", "sofa"),
    ("armchair", "cabinet", "cabinet", "desk", "drawer", "drawer", "garbagecan", "shelf", "shelf", "tvstand"),
  ),
}

# The regularities of households: how much an object is drawn to a kind of place. What is not named is chance.
_FOOD = {"fridge": 8.0, "countertop": 3.0, "diningtable": 2.0, "garbagecan": 0.5, "sinkbasin": 0.5}
_BAKED = {"countertop": 8.0, "fridge": 3.0, "diningtable": 2.0, "cabinet": 1.0}
_DRINK = {"cabinet": 7.0, "countertop": 3.0, "shelf": 3.0, "sinkbasin": 2.0, "diningtable": 1.0}
_DISH = {"shelf": 6.0, "cabinet": 5.0, "diningtable": 3.0, "sinkbasin": 2.0, "countertop": 1.0}
_COOKWARE = {"cabinet": 7.0, "countertop": 3.0, "sinkbasin": 3.0, "shelf": 1.0}
_CUTLERY = {"drawer": 9.0, "countertop": 3.0, "sinkbasin": 2.0, "diningtable": 1.0}
_SMALL = {"drawer": 6.0, "sidetable": 4.0, "dresser": 3.0, "desk": 2.0, "coffeetable": 2.0, "tvstand": 1.0}
_DESK = {"desk": 8.0, "drawer": 4.0, "shelf": 2.0, "sidetable": 1.0, "coffeetable": 1.0}
HOMES: dict[str, Mapping[str, float]] = {
  "apple": _FOOD, "lettuce": _FOOD, "potato": _FOOD, "tomato": _FOOD, "egg": _FOOD, "bread": _BAKED,
  "cup": _DRINK, "mug": _DRINK, "bowl": _DISH, "plate": _DISH, "pan": _COOKWARE, "pot": _COOKWARE,
  "fork": _CUTLERY, "knife": _CUTLERY, "spoon": _CUTLERY,
  "soapbar": {"sinkbasin": 6.0, "bathtub": 4.0, "countertop": 3.0, "cabinet": 1.0},
  "cloth": {"bathtub": 5.0, "countertop": 4.0, "cabinet": 3.0, "drawer": 1.0},
  "soapbottle": {"countertop": 6.0, "cabinet": 4.0, "sinkbasin": 2.0, "shelf": 1.0},
  "toiletpaper": {"toilet": 7.0, "cabinet": 4.0, "shelf": 2.0, "garbagecan": 1.0},
  "candle": {"shelf": 5.0, "countertop": 4.0, "toilet": 2.0, "bathtub": 2.0},
  "book": {"bed": 5.0, "desk": 4.0, "shelf": 4.0, "coffeetable": 4.0, "sofa": 3.0, "sidetable": 1.0},
  "laptop": {"desk": 7.0, "bed": 5.0, "coffeetable": 5.0, "sofa": 4.0, "tvstand": 1.0},
  "pillow": {"bed": 8.0, "sofa": 8.0, "armchair": 5.0},
  "pen": _DESK, "pencil": _DESK, "cd": {"drawer": 5.0, "shelf": 5.0, "desk": 3.0, "tvstand": 3.0, "dresser": 1.0},
  "alarmclock": {"sidetable": 7.0, "dresser": 4.0, "desk": 3.0, "shelf": 2.0, "bed": 0.5},
  "cellphone": {"bed": 5.0, "sidetable": 4.0, "desk": 4.0, "dresser": 2.0, "sofa": 4.0, "coffeetable": 3.0},
  "keychain": _SMALL, "creditcard": _SMALL, "watch": _SMALL,
  "remotecontrol": {"sofa": 7.0, "coffeetable": 4.0, "tvstand": 4.0, "armchair": 2.0},
  "newspaper": {"coffeetable": 6.0, "sofa": 5.0, "armchair": 3.0, "garbagecan": 2.0, "sidetable": 1.0},
  "vase": {"shelf": 6.0, "sidetable": 4.0, "coffeetable": 3.0, "tvstand": 3.0},
  LAMP: {"desk": 8.0, "sidetable": 6.0, "dresser": 3.0, "coffeetable": 1.0, "shelf": 1.0},
}  # fmt: skip

ROOM_OBJECTS: dict[str, tuple[str, ...]] = {
  "kitchen": (
    "apple", "bowl", "bread", "cup", "egg", "fork", "knife", "lettuce", "mug", "pan", "plate", "pot", "potato", "spoon",
    "tomato",
  ),
  "bathroom": ("candle", "cloth", "soapbar", "soapbottle", "toiletpaper"),
  "bedroom": ("alarmclock", "book", "cd", "cellphone", "creditcard", "keychain", "laptop", "pen", "pencil", "pillow"),
  "livingroom": (
    "book", "cellphone", "creditcard", "keychain", "laptop", "newspaper", "pillow", "remotecontrol", "vase", "watch",
  ),
}  # fmt: skip
AFFORDS: dict[str, frozenset[str]] = {
  "heat": frozenset({"apple", "bread", "cup", "egg", "mug", "plate", "potato", "tomato"}),
  "cool": frozenset(
    {"apple", "bowl", "bread", "cup", "egg", "lettuce", "mug", "pan", "plate", "pot", "potato", "tomato"}
  ),
  "clean": frozenset(ROOM_OBJECTS["kitchen"]) - {"bread", "egg"} | {"cloth", "soapbar"},
}
TARGETS: dict[str, tuple[str, ...]] = {
  "kitchen": (
    "cabinet", "countertop", "diningtable", "drawer", "fridge", "garbagecan", "microwave", "shelf", "sinkbasin",
  ),
  "bathroom": ("bathtub", "cabinet", "countertop", "drawer", "garbagecan", "shelf", "sinkbasin", "toilet"),
  "bedroom": ("armchair", "bed", "cabinet", "desk", "drawer", "dresser", "garbagecan", "shelf", "sidetable"),
  "livingroom": ("armchair", "cabinet", "coffeetable", "desk", "drawer", "shelf", "sidetable", "sofa", "tvstand"),
}  # fmt: skip
_FAMILY_ROOMS: dict[str, tuple[str, ...]] = {
  "pick": ("kitchen", "bathroom", "bedroom", "livingroom"),
  "look": ("bedroom", "livingroom"),
  "clean": ("kitchen", "kitchen", "bathroom"),
  "heat": ("kitchen",),
  "cool": ("kitchen",),
  "pick2": ("kitchen", "bathroom", "bedroom", "livingroom"),
}
_TASKS_PER_SEED = 1 << 20
_SEEDS = 1 << 31


@dataclasses.dataclass
class Room:
  """A drawn room: kind of room, place name -> object names. Place and object names carry a number ("shelf 1")."""

  kind: str
  places: dict[str, list[str]]


def kind(name: str) -> str:
  """ "shelf 2" -> "shelf"."""
  return name.partition(" ")[0]


def is_openable(name: str) -> bool:
  return kind(name) in OPENABLE


def held_out(item: str, target: str) -> bool:
  """Whether the goal pair belongs to the unseen split: a fixed hash of the two names, one pair in five."""
  return zlib.crc32(f"{item}>{target}#18".encode()) % 5 == 0


def goal_sentence(family: str, item: str, target: str) -> str:
  if family == "look":
    return f"look at some {item} under {target}"
  if family == "pick2":
    return f"put two {item} in {target}"
  if family == "pick":
    return f"put some {item} in {target}"
  return f"{family} some {item} and put it in {target}"


def goals(family: str, room: str) -> list[tuple[str, str]]:
  """All (object, target) pairs that a family may ask for in a kind of room, both sides of the hold-out."""
  if family == "look":
    return [(item, LAMP) for item in ROOM_OBJECTS[room]]
  allowed = AFFORDS.get(family, frozenset(ROOM_OBJECTS[room]))
  barred = APPLIANCES.get(family)
  items = [item for item in ROOM_OBJECTS[room] if item in allowed]
  return [(item, target) for item in items for target in TARGETS[room] if target != barred]


@functools.cache
def _pools(family: str, unseen: bool) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
  pools = []
  for room in _FAMILY_ROOMS[family]:
    pairs = tuple(pair for pair in goals(family, room) if held_out(*pair) == unseen)
    if pairs:
      pools.append((room, pairs))
  return tuple(pools)


def make_tasks(split: str, count: int, seed: int, difficulty: float) -> list[Task]:
  """`count` tasks of a split, families in equal shares, sorted by id; more tasks of the same seed contain the fewer."""
  if split not in SPLITS:
    raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
  if not 0 <= seed < _SEEDS:
    raise ValueError(f"seed {seed} is outside [0, {_SEEDS}): choose a smaller one")
  if not 0 <= count <= _TASKS_PER_SEED:
    raise ValueError(f"count {count} is outside [0, {_TASKS_PER_SEED}]: ask for more tasks under another seed")
  base = (SPLITS.index(split) * _SEEDS + seed) * _TASKS_PER_SEED
  tasks = []
  for index in range(count):
    family = FAMILIES[index % len(FAMILIES)]
    draw = random.Random(base + index).random
    pools = _pools(family, split == "unseen")
    room, pairs = pools[int(draw() * len(pools))]
    item, target = pairs[int(draw() * len(pairs))]
    payload = {
      "seed": base + index,
      "family": family,
      "room": room,
      "object": item,
      "target": target,
      "difficulty": difficulty,
    }
    tasks.append(Task(f"household/{split}/{family}/{seed:04d}-{index:06d}", family, split, payload))
  return sorted(tasks, key=lambda task: task.id)


def build_room(payload: Mapping[str, Any]) -> Room:
  """The room of a task. Difficulty d in [0, 1] sets its size (6-7 places at 0, 6-10 at 1/2, 9-10 at 1), the share of
  things that lie where regularity says (0.95 - 0.3 d), the distractors and how often the wanted thing has a double.

  The wanted object never starts in a place of the target's kind, so no task is won before it begins.
  """
  family, room_kind, item, target = payload["family"], payload["room"], payload["object"], payload["target"]
  difficulty = float(payload["difficulty"])
  if not 0.0 <= difficulty <= 1.0:
    raise ValueError(f"difficulty {difficulty} is outside [0, 1]")
  draw = random.Random(int(payload["seed"]) ^ 0x5EED).random
  names = _furnish(room_kind, target, difficulty, draw)
  places: dict[str, list[str]] = {name: [] for name in names}
  strength = 0.95 - 0.3 * difficulty

  def put(thing: str, name: str, banned: str) -> bool:
    free = [p for p in names if kind(p) != banned and len(places[p]) < (2 if kind(p) == target else 3)]
    if not free:
      return False
    weights = HOMES[thing]
    if draw() < strength:
      homes = sorted({kind(p) for p in free if kind(p) in weights})
      if homes:
        home = _weighted(homes, [weights[h] for h in homes], draw)
        free = [p for p in free if kind(p) == home]
    places[free[int(draw() * len(free))]].append(name)
    return True

  copies = 2 if family == "pick2" or draw() < 0.6 * (1.0 - difficulty) else 1
  numbers = [1, 2] if draw() < 0.5 else [2, 1]
  for number in numbers[:copies] if copies == 2 else [1]:
    if not put(item, f"{item} {number}", target):
      raise ValueError(f"no free place for {item} in a {room_kind} of {len(names)} places")
  if room_kind in ("bedroom", "livingroom"):
    homes = [p for p in names if kind(p) in HOMES[LAMP]]
    lamp_place = _weighted(homes, [HOMES[LAMP][kind(p)] for p in homes], draw)
    places[lamp_place].append(f"{LAMP} 1")
  counts: dict[str, int] = {}
  others = [other for other in ROOM_OBJECTS[room_kind] if other != item]
  for _ in range(round(len(names) * (0.6 + 0.8 * difficulty))):
    thing = others[int(draw() * len(others))]
    number = counts.get(thing, 0) + 1
    if number <= 2 and put(thing, f"{thing} {number}", ""):
      counts[thing] = number
  for content in places.values():
    content.sort()
  return Room(room_kind, places)


def _furnish(room_kind: str, target: str, difficulty: float, draw) -> list[str]:
  """Place names in alphabetical order: the fixed furniture, the target's kind, and extras up to the drawn size."""
  core, extras = FURNITURE[room_kind]
  low = 6 + round(3 * max(0.0, 2 * difficulty - 1))
  high = 10 - round(3 * max(0.0, 1 - 2 * difficulty))
  size = low + int(draw() * (high - low + 1))
  kinds, pool = list(core), list(extras)
  if target not in kinds and target in pool:
    pool.remove(target)
    kinds.append(target)
  while len(kinds) < size:
    kinds.append(pool.pop(int(draw() * len(pool))))
  counts: dict[str, int] = {}
  names = []
  for each in sorted(kinds):
    counts[each] = counts.get(each, 0) + 1
    names.append(f"{each} {counts[each]}")
  return names


def _weighted(items: Sequence[str], weights: Sequence[float], draw) -> str:
  point = draw() * sum(weights)
  for each, weight in zip(items, weights, strict=True):
    point -= weight
    if point < 0:
      return each
  return items[-1]
