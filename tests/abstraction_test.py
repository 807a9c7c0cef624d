"""From what was written of one room to advice for any."""

import pytest
from skill_cases import episode

from envs import household_analyzer, household_rooms
from seed_jax.abstraction import abstraction
from seed_jax.library_builder import build_library

TASKS = [("potato", "shelf"), ("egg", "drawer"), ("mug", "cabinet"), ("plate", "shelf"), ("apple", "countertop")]
SOURCES = ["fridge 1", "sinkbasin 1", "drawer 2", "countertop 1", "cabinet 4"]


def heating(task, skill, group=0, won=True, summary=""):
  return episode(group, 0, skill, task=task, won=won, summary=summary)


HEATED = [
  heating(
    f"heat some {item} and put it in {target}",
    f"take {item} 1 from {source}, heat {item} 1 with microwave 1, move {item} 1 to {target} 2.",
    group,
  )
  for group, ((item, target), source) in enumerate(zip(TASKS, SOURCES, strict=True))
]


def test_things_become_their_parts_in_the_task_and_what_is_the_familys_stays():
  rewrite = abstraction(HEATED)
  found = {rewrite(t.skill, t.task) for t in HEATED}
  assert found == {"take it from a place, heat it with the microwave, move it to the target."}
  task = HEATED[0].task  # potato, shelf
  for text, expected in {
    "take potato 2 from fridge 1, move potato 2 to shelf 1, take potato 1 from fridge 1.": (
      "take it from a place, move it to the target, take the other from a place."
    ),
    "go and look for other potato, not for an egg": "go and look for other object, not for an egg",
    "Potato was in shelf 3; some potato is on the shelf.": "it was in the target; some object is on the target.",
    "take a cold potato": "take a cold object",
    f"To {task}: take potato 1 from Fridge 12": "take it from a place",
    "take potato 1 from fridge 1, not to shelf 2.": "take it from a place.",  # true of this room alone
    "potato is not in cabinet 1, shelf 2, shelf 3.": "",
    "think twice, and open what is closed.": "think twice, and open what is closed.",
    "": "",
  }.items():
    assert rewrite(text, task) == expected, text
  assert rewrite("take potato 1 from fridge 1", "another task") == "take a place from a place"
  assert abstraction([])("take potato 1 from fridge 1", task) == "take a place from a place"


def test_what_is_usual_needs_more_than_one_task_and_successes():
  rewrite = abstraction(HEATED[:1])
  skill = rewrite(HEATED[0].skill + " open microwave 1", HEATED[0].task)
  assert skill == "take it from a place, heat it with the microwave, move it to the target. open a place"
  lost = [heating(t.task, "look in cabinet 1", won=False) for t in HEATED * 3]
  assert abstraction(HEATED + lost)("open microwave 1 or cabinet 1", HEATED[0].task) == "open the microwave or a place"
  assert abstraction(HEATED, keep=1.1)("open microwave 1", HEATED[0].task) == "open a place"


@pytest.mark.parametrize(
  "text", ["compare the prices, then buy the cheapest.", "先に探す。それから温める。", "x" * 5000]
)
def test_a_text_without_numbered_names_stays_as_it_is(text):
  assert abstraction([heating("buy a red shirt", text)])(text, "buy a red shirt") == text


def analysed(family, item, target, place, number):
  """A household episode in which the object was found in `place` and the task was done, read by its analyzer."""
  task, thing = household_rooms.goal_sentence(family, item, target), f"{item} 1"
  device = household_rooms.APPLIANCES.get(family)
  steps = [("You see the room.", f"go to {place}", True), (f"On {place} you see {item} 1, {item} 2.", "", True)]

  def act(action, answer):
    steps[-1] = (steps[-1][0], action, True)
    steps.append((answer, "", True))

  act(f"take {thing} from {place}", f"You pick up {thing} from {place}.")
  if family == "look":
    act("go to desk 1", "On desk 1 you see desklamp 1.")
    steps[-1] = (steps[-1][0], "use desklamp 1", True)
  else:
    if device:
      act(f"{family} {thing} with {device} 1", f"You {family} {thing} using {device} 1.")
    act(f"move {thing} to {target} 1", f"You move {thing} to {target} 1.")
    if family == "pick2":
      act(f"take {item} 2 from {place}", f"You pick up {item} 2 from {place}.")
      act(f"move {item} 2 to {target} 1", "")
    steps = steps[:-1]
  found = household_analyzer.analyze(task, steps, True)
  return episode(
    number, 0, found["episode_skill"], task=task, family=family, task_id=f"{family} {number}", summary="it was done"
  )


def test_the_households_library_is_of_no_room_and_has_general_skills():
  elsewhere = ["bed 1", "sofa 1", "dresser 1", "toilet 1", "safe 4"]
  played = [
    analysed(family, item, "desklamp" if family == "look" else target, source, number)
    for family in household_rooms.FAMILIES
    for number, ((item, target), source) in enumerate(zip(TASKS, elsewhere, strict=True))
  ]
  assert "take potato 1 from bed 1" in played[0].skill
  built = build_library(played, rewrite=abstraction(played))
  assert {family: [s.principle for s in found] for family, found in built.by_family.items()} == {
    "pick": ["take it from a place, move it to the target."],
    "look": ["take it from a place, use the desklamp in the desk."],
    "clean": ["take it from a place, clean it with the sinkbasin, move it to the target."],
    "heat": ["take it from a place, heat it with the microwave, move it to the target."],
    "cool": ["take it from a place, cool it with the fridge, move it to the target."],
    "pick2": [
      "take it from a place, move it to the target, take the other from a place, move the other to the target."
    ],
  }
  assert [s.principle for s in built.general] == ["take it from a place", "move it to the target"]
  assert not any(word.isdigit() for text in built.texts for word in text.replace(".", "").split())
