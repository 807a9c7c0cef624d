"""The household environment: rules, splits, demonstrators and the scripted analyzer."""

import json
import pickle
import random
import re
import subprocess
import sys
import time

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import envs
from envs import household_rooms as rooms
from envs.household import NOTHING, Household, HouseholdEnv, skill_block
from envs.household_analyzer import Reader, analyze, read_goal
from envs.household_demos import Habits, demonstrations, expert, mixed_quality, play, read_advice

BENCHMARK = envs.benchmark("household")
PIECES = re.compile(r"[A-Za-z]+|\d+")


def sentence(task):
  return rooms.goal_sentence(task.payload["family"], task.payload["object"], task.payload["target"])


def crafted(family, item, target, places):
  """An environment whose room is given: {place: [objects]}."""
  env = HouseholdEnv()
  task = next(t for t in BENCHMARK.tasks("train", 6) if t.family == family)
  env.reset(options={"task": {**task.payload, "object": item, "target": target, "room": _room_of(item, family)}})
  env.places = env.room.places = {name: list(content) for name, content in places.items()}
  env._moves = tuple((name, f"go to {name}") for name in places)
  env._actions = env._admissible()
  return env


def _room_of(item, family):
  return next(
    room for room, items in rooms.ROOM_OBJECTS.items() if item in items and room in rooms._FAMILY_ROOMS[family]
  )


def run(env, actions):
  """(observations, last reward, won) of a list of actions."""
  seen, reward, info = [], 0.0, {}
  for action in actions:
    observation, reward, _, _, info = env.step(action)
    seen.append(observation)
  return seen, reward, info["won"]


KITCHEN = {
  "countertop 1": ["mug 1"],
  "fridge 1": ["egg 1", "potato 2"],
  "microwave 1": [],
  "shelf 1": ["mug 2"],
  "sinkbasin 1": [],
}


def test_heat_episode_word_by_word():
  env = crafted("heat", "potato", "sinkbasin", KITCHEN)
  seen, reward, won = run(
    env,
    ["go to fridge 1", "open fridge 1", "take potato 2 from fridge 1", "inventory", "go to microwave 1"]
    + ["heat potato 2 with microwave 1", "examine potato 2", "go to sinkbasin 1", "move potato 2 to sinkbasin 1"],
  )
  assert seen == [
    "fridge 1 is closed.",
    "You open fridge 1. You see egg 1, potato 2.",
    "You pick up potato 2.",
    "You carry potato 2.",
    "microwave 1 is closed.",
    "You heat potato 2 with microwave 1.",
    "This is potato 2, hot.",
    "On sinkbasin 1 you see nothing.",
    "You move potato 2 to sinkbasin 1.",
  ]
  assert reward == 1.0 and won


def test_skipped_step_and_undone_step_do_not_win():
  take = ["go to fridge 1", "open fridge 1", "take potato 2 from fridge 1"]
  put = ["go to sinkbasin 1", "move potato 2 to sinkbasin 1"]
  assert not run(crafted("heat", "potato", "sinkbasin", KITCHEN), take + put)[2]
  warm = ["go to microwave 1", "heat potato 2 with microwave 1"]
  cold = ["go to fridge 1", "cool potato 2 with fridge 1"]
  assert not run(crafted("heat", "potato", "sinkbasin", KITCHEN), take + warm + cold + put)[2]
  assert run(crafted("heat", "potato", "sinkbasin", KITCHEN), take + cold + warm + put)[2]
  assert run(crafted("cool", "potato", "sinkbasin", KITCHEN), take + warm + cold + put)[2]


def test_two_objects_must_share_a_place():
  places = {**KITCHEN, "cabinet 1": [], "cabinet 2": []}
  first = [
    "go to countertop 1",
    "take mug 1 from countertop 1",
    "go to cabinet 1",
    "open cabinet 1",
    "move mug 1 to cabinet 1",
  ]
  fetch = ["go to shelf 1", "take mug 2 from shelf 1"]
  assert not run(
    crafted("pick2", "mug", "cabinet", places),
    first + fetch + ["go to cabinet 2", "open cabinet 2", "move mug 2 to cabinet 2"],
  )[2]
  assert run(
    crafted("pick2", "mug", "cabinet", places), first + fetch + ["go to cabinet 1", "move mug 2 to cabinet 1"]
  )[2]


def test_lamp_needs_the_object_in_hand():
  places = {"bed 1": ["book 1"], "desk 1": ["desklamp 1"], "dresser 1": ["pen 1"]}
  lamp, book = ["go to desk 1", "use desklamp 1"], ["go to bed 1", "take book 1 from bed 1"]
  assert not run(crafted("look", "book", "desklamp", places), lamp + book)[2]
  assert not run(crafted("look", "book", "desklamp", places), ["go to dresser 1", "take pen 1 from dresser 1"] + lamp)[
    2
  ]
  assert run(crafted("look", "book", "desklamp", places), book + lamp)[2]


@pytest.mark.parametrize(
  "action",
  [
    "",
    "jump",
    "go to",
    "go to fridge 9",
    "take egg 1 from fridge 1",
    "open countertop 1",
    "use desklamp 1",
    "go to fridge 1 ",
    "🙂",
  ],
)
def test_wrong_actions_are_answered(action):
  env = crafted("heat", "potato", "sinkbasin", KITCHEN)
  before = env.render()
  observation, reward, terminated, truncated, info = env.step(action)
  assert (observation, reward, terminated, truncated) == (NOTHING, 0.0, False, False)
  assert info["valid"] is False and not info["won"]
  assert env.render().replace("step 1", "step 0") == before


def test_one_object_in_hand_and_step_limit():
  env = crafted("pick", "mug", "sinkbasin", KITCHEN)
  run(env, ["go to countertop 1", "take mug 1 from countertop 1", "go to shelf 1"])
  assert env.step("take mug 2 from shelf 1")[0] == NOTHING
  ends = [env.step("look")[2:4] for _ in range(16)]
  assert ends == [(False, False)] * 15 + [(False, True)]


def test_every_admissible_action_is_accepted_and_parsed():
  draw = random.Random(0)
  env = BENCHMARK.make()
  for task in BENCHMARK.tasks("unseen", 60):
    _, info = env.reset(options={"task": task.payload})
    done = False
    while not done:
      action = draw.choice(info["admissible"])
      assert BENCHMARK.parse(f"  {action.upper()}\n") == (action, True)
      observation, _, won, cut, info = env.step(action)
      assert observation != NOTHING and info["valid"]
      done = won or cut


def test_admissible_actions_in_full():
  env = crafted("heat", "potato", "sinkbasin", KITCHEN)
  run(env, ["go to fridge 1", "open fridge 1"])
  go = [f"go to {place}" for place in ("countertop 1", "microwave 1", "shelf 1", "sinkbasin 1")]
  idle = ["look", "inventory"]
  here = ["close fridge 1", "take egg 1 from fridge 1", "take potato 2 from fridge 1", "examine fridge 1"]
  assert sorted(env.step("look")[4]["admissible"]) == sorted(go + idle + here)
  hold = ["close fridge 1", "move egg 1 to fridge 1", "cool egg 1 with fridge 1", "examine fridge 1", "examine egg 1"]
  assert sorted(env.step("take egg 1 from fridge 1")[4]["admissible"]) == sorted(go + idle + hold)


def test_parse_judges_grammar():
  assert BENCHMARK.parse(" Take  Potato 2\nfrom fridge 1 ") == ("take potato 2 from fridge 1", True)
  for text in ("", "go to fridge", "please go to fridge 1", "take potato 2", "look around", "<b>look</b>"):
    assert BENCHMARK.parse(text)[1] is False
  assert len(BENCHMARK.parse("x" * 10_000)[0]) == 80


def test_gymnasium_interface():
  env = gymnasium.make("seed/Household-v0", difficulty=1.0, max_steps=7)
  check_env(env.unwrapped, skip_render_check=True)
  first = env.reset(seed=3)[0]
  assert env.reset(seed=3)[0] == first
  assert "hand:" in env.render()
  assert pickle.loads(pickle.dumps(BENCHMARK)) == Household()
  with pytest.raises(ValueError, match="alfworld, household"):
    envs.benchmark("atari")
  for options in ({"difficulty": 1.5}, {"max_steps": 0}):
    with pytest.raises(ValueError, match="1.5|0"):
      Household(**options).make()


def test_tasks_are_the_same_everywhere():
  code = (
    "import envs, json; tasks = envs.benchmark('household').tasks('valid', 40, 7);"
    "print(json.dumps([[t.id, dict(t.payload)] for t in tasks]))"
  )
  texts = {
    subprocess.run(
      [sys.executable, "-c", code], env={"PYTHONHASHSEED": h}, capture_output=True, text=True, check=True
    ).stdout
    for h in ("0", "123")
  }
  assert len(texts) == 1
  tasks = BENCHMARK.tasks("valid", 40, 7)
  assert json.loads(texts.pop()) == [[t.id, dict(t.payload)] for t in tasks]
  assert [t.id for t in tasks] == sorted({t.id for t in tasks})
  assert {t.id for t in BENCHMARK.tasks("valid", 18, 7)} < {t.id for t in tasks}
  env = BENCHMARK.make()
  one, two = ((env.reset(options={"task": tasks[3].payload})[0], env.render()) for _ in range(2))
  assert one == two


def test_tasks_are_balanced():
  tasks = BENCHMARK.tasks("train", 10_000, 1)
  counts = [sum(t.family == family for t in tasks) for family in rooms.FAMILIES]
  assert max(counts) - min(counts) <= 1
  for split, count, seed in (("test", 1, 0), ("train", -1, 0), ("train", 1, -1), ("train", 1, 1 << 31)):
    with pytest.raises(ValueError, match="unknown split|outside"):
      BENCHMARK.tasks(split, count, seed)


def test_splits_share_no_seed_and_no_goal_pair():
  pairs, seeds = {}, {}
  for split in rooms.SPLITS:
    tasks = [t for seed in range(3) for t in BENCHMARK.tasks(split, 3000, seed)]
    pairs[split] = {(t.payload["object"], t.payload["target"]) for t in tasks}
    seeds[split] = {t.payload["seed"] for t in tasks}
    assert len(seeds[split]) == 9000
    for family in rooms.FAMILIES:
      assert len({(t.payload["object"], t.payload["target"]) for t in tasks if t.family == family}) >= 3
  assert not pairs["unseen"] & (pairs["train"] | pairs["valid"])
  assert not seeds["unseen"] & (seeds["train"] | seeds["valid"]) and not seeds["train"] & seeds["valid"]
  # Every word of an unseen goal is known from train goals: what is new is the pair.
  assert {i for i, _ in pairs["unseen"]} <= {i for i, _ in pairs["train"]}
  assert {t for _, t in pairs["unseen"]} <= {t for _, t in pairs["train"]}


@pytest.mark.parametrize("difficulty", [0.0, 0.5, 1.0])
def test_rooms_follow_the_rules(difficulty):
  benchmark = Household(difficulty=difficulty)
  sizes, at_home, total = set(), 0, 0
  for task in benchmark.tasks("train", 600) + benchmark.tasks("unseen", 300):
    item, target = task.payload["object"], task.payload["target"]
    places = rooms.build_room(task.payload).places
    sizes.add(len(places))
    spots = [place for place, content in places.items() for thing in content if rooms.kind(thing) == item]
    assert len(spots) >= (2 if task.family == "pick2" else 1)
    assert all(rooms.kind(spot) != target for spot in spots)
    assert max(map(len, places.values())) <= rooms.PLACE_LIMIT
    assert any(rooms.kind(p) == target for p in places) or task.family == "look"
    total += len(spots)
    at_home += sum(rooms.kind(spot) in rooms.HOMES[item] for spot in spots)
  assert sizes == {0.0: {6, 7}, 0.5: {6, 7, 8, 9, 10}, 1.0: {9, 10}}[difficulty]
  assert 0.7 < at_home / total < 0.99


@pytest.mark.parametrize("split", rooms.SPLITS)
def test_expert_solves_every_task(split):
  for difficulty in (0.5, 1.0):
    benchmark = Household(difficulty=difficulty)
    env = benchmark.make()
    for task in benchmark.tasks(split, 600, 11):
      plan = expert(env, task)
      env.reset(options={"task": task.payload})
      assert len(plan) <= 12 and run(env, plan)[1:] == (1.0, True), task.id


def test_texts_stay_short():
  words = set()
  for demo in demonstrations(BENCHMARK, 600, 0):
    assert len(PIECES.findall(demo.steps[0][0])) <= 40
    for observation, action in demo.steps[1:]:
      assert len(PIECES.findall(observation)) <= 15 and len(PIECES.findall(action)) <= 6
    words |= set(PIECES.findall(" ".join([o + " " + a for o, a in demo.steps] + [demo.final, demo.skill])))
  assert len(words) < 200


def test_speed():
  env, draw = BENCHMARK.make(), random.Random(0).random
  tasks, steps, began = BENCHMARK.tasks("train", 300), 0, time.process_time()
  for task in tasks:
    _, info = env.reset(options={"task": task.payload})
    done = False
    while not done:
      _, _, won, cut, info = env.step(info["admissible"][int(draw() * len(info["admissible"]))])
      done, steps = won or cut, steps + 1
  assert steps / (time.process_time() - began) > 5_000  # 100,000 and more as a rule; a busy machine must not fail this


def success(tasks, quality, skills=None):
  rng, env = random.Random(1), BENCHMARK.make()
  quality = quality or mixed_quality
  return sum(
    play(env, task, Habits.of(quality(rng)), skills[i] if skills else "", rng)[2] for i, task in enumerate(tasks)
  ) / len(tasks)


def test_demonstrators_leave_room_and_follow_skills():
  rng, env = random.Random(0), BENCHMARK.make()
  tasks = BENCHMARK.tasks("train", 900, 3)
  assert 0.5 < success(tasks, None) < 0.75
  assert success(tasks, lambda _: 1.0) >= 0.85
  played = [(task, *play(env, task, Habits.of(mixed_quality(rng)), "", rng)) for task in tasks]
  skills = {won: [] for won in (True, False)}
  for task, steps, _, won in played:
    skills[won].append((task, analyze(sentence(task), steps, won)["episode_skill"]))
  assert success([t for t, _ in skills[True]], None, [s for _, s in skills[True]]) >= 0.9
  assert success([t for t, _ in skills[False]], None, [s for _, s in skills[False]]) >= 0.6
  own = skills[True]
  alone = success([t for t, _ in own], None)
  swapped = [own[(i + len(own) // 2) % len(own)][1] for i in range(len(own))]
  strange = success([t for t, _ in own], None, swapped)
  assert strange - alone < 0.5 * (1.0 - alone)


def test_a_workflow_is_followed_without_search():
  rng, env, straight = random.Random(5), BENCHMARK.make(), 0
  for task in BENCHMARK.tasks("train", 120, 8):
    plan = expert(env, task)
    steps, text = [], env.reset(options={"task": task.payload})[0]
    for action in plan:
      steps.append((text, action, True))
      text = env.step(action)[0]
    skill = analyze(sentence(task), steps, True)["episode_skill"]
    taken = [action for _, action, _ in play(env, task, Habits.of(0.0), skill, rng)[0]]
    straight += taken == plan
  assert straight > 0.7 * 120  # the others slip once and still find their way


def test_corpus_is_reproducible_and_mixed():
  one, two = list(demonstrations(BENCHMARK, 200, 4)), list(BENCHMARK.demonstrations(200, 4))
  assert one == two
  assert {d.task.split for d in one} == {"train"} and len({d.task.id for d in one}) == 200
  assert sum(bool(d.skill) for d in one) == 100
  foreign = [d for d in one if d.skill and not re.search(rf"\b{d.task.payload['object']}\b", d.skill)]
  assert 5 <= len(foreign) <= 25
  for demo in one:
    env = BENCHMARK.make()
    env.reset(options={"task": demo.task.payload})
    assert run(env, [action for _, action in demo.steps])[0][-1] == demo.final and env.won == demo.won


def episode(task, *pairs):
  return [
    (
      "You see countertop 1, fridge 1, microwave 1, shelf 1, sinkbasin 1.\n" + f"Your task is to: {task}.",
      pairs[0][0],
      True,
    )
  ] + [(before[1], now[0], True) for before, now in zip(pairs, pairs[1:], strict=False)]


HEAT = "heat some potato and put it in sinkbasin"
FOUND = [("go to fridge 1", "fridge 1 is closed."), ("open fridge 1", "You open fridge 1. You see egg 1, potato 2.")]
TAKEN = [*FOUND, ("take potato 2 from fridge 1", "You pick up potato 2.")]
TO_SINK = [
  ("go to sinkbasin 1", "On sinkbasin 1 you see nothing."),
  ("move potato 2 to sinkbasin 1", "You move potato 2 to sinkbasin 1."),
]
HEATED = [
  ("go to microwave 1", "microwave 1 is closed."),
  ("heat potato 2 with microwave 1", "You heat potato 2 with microwave 1."),
]
TO_SHELF = [
  ("go to shelf 1", "On shelf 1 you see nothing."),
  ("move potato 2 to shelf 1", "You move potato 2 to shelf 1."),
]
LOOK = ("look", "On shelf 1 you see nothing.")


@pytest.mark.parametrize(
  "pairs, won, skill",
  [
    (
      [*TAKEN, *HEATED, *TO_SINK],
      True,
      "take potato 2 from fridge 1, heat potato 2 with microwave 1, move potato 2 to sinkbasin 1.",
    ),
    (
      [*TAKEN, *TO_SINK, LOOK],
      False,
      "take potato 2 from fridge 1, heat potato 2 with microwave 1 before you move potato 2 to sinkbasin 1.",
    ),
    (
      [*TAKEN, *HEATED, *TO_SHELF, LOOK],
      False,
      "take potato 2 from fridge 1, heat potato 2 with microwave 1, move potato 2 to sinkbasin 1, not to shelf 1.",
    ),
    (
      [*TAKEN, LOOK, LOOK],
      False,
      "take potato 2 from fridge 1, heat potato 2 with microwave 1, move potato 2 to sinkbasin 1, do not wander.",
    ),
    ([*FOUND, LOOK], False, "take potato 2 from fridge 1 when you see it."),
    ([("go to shelf 1", "On shelf 1 you see nothing."), FOUND[0], LOOK], False, "potato is not in shelf 1."),
    ([("inventory", "You carry nothing."), ("inventory", "You carry nothing.")], False, "go and look for potato."),
  ],
)
def test_analyzer_names_the_decisive_step(pairs, won, skill):
  assert analyze(HEAT, episode(HEAT, *pairs), won)["episode_skill"] == skill


def test_analyzer_reads_text_alone():
  assert analyze("click the button", [("page", "click", True)], True) is None
  assert analyze(HEAT, [], False) is None
  goals = {family: read_goal(rooms.goal_sentence(family, "mug", "shelf")) for family in rooms.FAMILIES}
  assert all((goal.family, goal.item, goal.target) == (family, "mug", "shelf") for family, goal in goals.items())
  rng, env = random.Random(2), BENCHMARK.make()
  for task in BENCHMARK.tasks("train", 600, 9):
    steps, _, won = play(env, task, Habits.of(rng.random()), "", rng)
    found = BENCHMARK.analyze(sentence(task), steps, won)
    assert sorted(found) == ["episode_skill", "episode_summary"]
    assert 0 < len(found["episode_skill"].split()) <= 30 and 0 < len(found["episode_summary"].split()) <= 15
    for listing in re.findall(r"is not in ([^.]*)", found["episode_skill"]):
      assert len(listing.split(", ")) <= 4
    # Whatever place or object is named stands in the episode.
    told = "\n".join(f"{o}\n{a}" for o, a, _ in steps) + sentence(task) + " microwave 1 fridge 1 sinkbasin 1"
    assert set(re.findall(r"\w+ \d", found["episode_skill"])) <= set(re.findall(r"\w+ \d", told))
    advice = read_advice(found["episode_skill"], read_goal(sentence(task)), list(env.places))
    if won:
      assert advice is not None and advice.sources and (advice.target or advice.lamp)


def test_a_rejected_action_teaches_nothing():
  reader = Reader()
  reader.start("You see fridge 1, shelf 1.")
  reader.read("take potato 2 from fridge 1", NOTHING)
  reader.read("move potato 2 to shelf 1", NOTHING)
  assert (reader.held, reader.moved, reader.known) == ("", [], {})


def test_prompts():
  task = BENCHMARK.tasks("train", 6)[0]
  env = BENCHMARK.make()
  observation, info = env.reset(options={"task": task.payload})
  first = BENCHMARK.first_prompt(info["task"], observation, info["admissible"])
  assert first == observation and first.count("Your task is to:") == 1
  assert BENCHMARK.window_prompt(info["task"], [], 0, observation, info["admissible"]) == first
  answer, _, _, _, later = env.step("look")
  window = BENCHMARK.window_prompt(info["task"], [(observation, "look")], 1, answer, later["admissible"]).split("\n")
  assert window == [f"Your task is to: {info['task']}.", observation.split("\n")[0], "> look", "You stand in the room."]
  request = BENCHMARK.analysis_prompt(info["task"], [(observation, "look", True), (answer, "jump", False)], False)
  assert request.count("Your task is to:") == 1 and "failure" in request
  assert request.endswith("> look\nYou stand in the room.\n> jump (invalid)")
  assert BENCHMARK.analysis_question(False) == "Write the skill.\nIt was a failure."
  assert set(BENCHMARK.analysis_question(True).split("\n")) < set(BENCHMARK.analysis_prompt("", [], True).split("\n"))
  block = "Skill: [take mug from shelf 1.]"
  assert skill_block("take mug from shelf 1.") == BENCHMARK.skill_block("take mug from shelf 1.") == block


def test_analysis_request_is_hardly_longer_than_the_episode():
  rng, env = random.Random(3), BENCHMARK.make()
  asked = played = 0
  for task in BENCHMARK.tasks("train", 120, 5):
    steps, _, won = play(env, task, Habits.of(rng.random()), "", rng)
    request = BENCHMARK.analysis_prompt(env.task, steps, won)
    assert all(action in request and observation.split("\n")[0] in request for observation, action, _ in steps)
    asked += len(PIECES.findall(request))
    played += sum(len(PIECES.findall(f"{observation} {action}")) for observation, action, _ in steps)
  assert asked < 1.3 * played
