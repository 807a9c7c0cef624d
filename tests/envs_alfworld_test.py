"""ALFWorld on the real TextWorld engine: generated games of all families, the official game if it is there, faults."""

import json
import logging
import os
import pathlib
import random
import shutil
import subprocess
import sys
import zlib

import gymnasium
import pytest

import envs
from envs import alfworld_rooms as rooms
from envs import alfworld_text as text
from envs.alfworld import ALFWorld, ALFWorldEnv, data_folder
from envs.pool import Pool

fast_downward = pytest.importorskip("fast_downward", reason="needs the extra [alfworld]")
from envs.alfworld_engine import Engine, GameError, check_game, read_game  # noqa: E402

ROOT = pathlib.Path(__file__).parent.parent
OFFICIAL_DATA = ROOT.parent / "shared" / "data" / "alfworld_official_game"
OFFICIAL_GAMES = sorted(OFFICIAL_DATA.glob("json_2.1.1/train/*/*/game.tw-pddl"))
SMALL = {"split": "generated_train", "family": "pick", "index": 2}


@pytest.fixture(scope="module")
def expert():
  """One environment with the planner, reused by the tests: a new engine for each would leak."""
  env = ALFWorldEnv(max_steps=30, expert=True, data=str(OFFICIAL_DATA))
  yield env
  env.close()


@pytest.fixture(scope="module")
def player():
  env = ALFWorldEnv(max_steps=3, strict=True)
  yield env
  env.close()


def solve(env, payload):
  """Plays the planner's first plan; returns the observations and the last step's outcome."""
  observation, info = env.reset(options={"task": payload})
  assert not info["won"] and info["admissible"] and "help" not in info["admissible"]
  seen, outcome = [observation], None
  for command in info["expert_plan"]:
    assert outcome is None or not outcome[1]
    assert command in info["admissible"]
    observation, *outcome, info = env.step(command)
    assert info["valid"] and info["won"] == outcome[1]
    seen.append(observation)
  return seen, info, outcome


@pytest.mark.parametrize("split", rooms.GENERATED)
@pytest.mark.parametrize("family", rooms.FAMILIES)
def test_a_generated_game_of_each_family_is_won(expert, split, family):
  payload = {"split": split, "family": family, "index": 3}
  seen, info, outcome = solve(expert, payload)
  assert outcome == [1.0, True, False] and info["won"]
  drawn = rooms.room(split, family, 3)
  assert info["task"] == drawn["task"] and info["family"] == family and info["gamefile"] == ""
  assert seen[0].startswith("You are in the middle of a room. Looking quickly around you, you see a ")
  assert "Your task" not in seen[0] and "=-" not in seen[0]
  assert seen[0].count(", ") == len(drawn["receptacles"])  # every receptacle is named
  assert all(text.NOTHING not in observation for observation in seen)
  with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
    expert.step("look")


@pytest.mark.skipif(not OFFICIAL_GAMES, reason="the official game is not beside this checkout")
def test_the_official_game_is_won(expert):
  benchmark = ALFWorld(data=str(OFFICIAL_DATA))
  games, skipped = benchmark.scan("train")
  assert len(games) == 1 and skipped == []
  (task,) = benchmark.tasks("train", 1)
  assert task.family == "heat" and task.id.startswith("alfworld/train/heat/pick_heat_then_place_in_recep-Potato-None")
  seen, info, outcome = solve(expert, task.payload)
  assert outcome == [1.0, True, False] and len(seen) == 7
  assert info["task"] == "heat some potato and put it in sinkbasin" and info["gamefile"] == str(OFFICIAL_GAMES[0])
  assert seen[-1] == "You move the potato 2 to the sinkbasin 1."


def plain_engine():
  """TextWorld's own environment with ALFWorld's own naming, as ALFWorld sets it up."""
  import textworld
  from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

  return AlfredDemangler(
    textworld.envs.pddl.PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False
  )


def test_our_engine_shows_what_the_plain_one_shows(tmp_path, monkeypatch):
  monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))  # importing alfworld makes this folder, ~/.cache otherwise
  ours, theirs = Engine(), plain_engine()
  games = [rooms.game("generated_train", "heat", 0), rooms.game("generated_unseen", "look", 1)]
  games += [read_game(str(path)) for path in OFFICIAL_GAMES]
  dice = random.Random(0)
  for game in games:
    ours.load(game)
    theirs.load(game)
    mine, plain = ours.reset(), theirs.reset()
    for turn in range(9):
      assert (mine.feedback, mine["won"]) == (plain.feedback, plain["won"])
      assert mine["admissible_commands"] == plain["admissible_commands"]
      eager = [
        word for word in mine["admissible_commands"] if word.split()[0] in ("take", "open", "move", "heat", "use")
      ]
      command = "fly to the moon" if turn == 5 else dice.choice(eager or mine["admissible_commands"])
      mine, plain = ours.step(command)[0], theirs.step(command)[0]


def test_rooms_are_the_same_on_every_machine():
  # A change of these numbers changes every generated task: results before and after it cannot be compared.
  drawn = [
    rooms.room(split, family, index) for split in rooms.GENERATED for family in rooms.FAMILIES for index in (0, 77)
  ]
  assert zlib.crc32(json.dumps(drawn, sort_keys=True).encode()) == 3539765504
  problems = "".join(rooms.problem(room, "x") for room in drawn)
  assert zlib.crc32(problems.encode()) == 689888461


def test_what_is_seen_does_not_depend_on_the_hash_seed():
  code = (
    "from envs.alfworld import ALFWorldEnv; env = ALFWorldEnv()\n"
    "seen = [env.reset(options={'task': {'split': 'generated_train', 'family': 'clean', 'index': 2}})]\n"
    "for word in ('go to countertop 1', 'look', 'go to cabinet 1', 'open cabinet 1'): seen.append(env.step(word))\n"
    "print(seen)"
  )
  shown = {
    subprocess.run(
      [sys.executable, "-c", code],
      cwd=ROOT,
      env={**os.environ, "PYTHONHASHSEED": seed},
      capture_output=True,
      text=True,
      check=True,
      timeout=120,
    ).stdout
    for seed in ("1", "2")
  }
  assert len(shown) == 1 and "You open the cabinet 1" in shown.pop()


def test_rooms_keep_their_promises():
  for split in rooms.GENERATED:
    for family in rooms.FAMILIES:
      for index in range(60):
        room = rooms.room(split, family, index)
        assert 8 <= len(room["receptacles"]) <= 12 and 12 <= len(room["objects"]) <= 25
        assert check_game(rooms.game(split, family, index)) == ""
        kinds = [room["receptacles"][where] for kind, where in room["objects"] if kind == room["object"]]
        assert len(kinds) == 2 if family == "pick2" else kinds
        if family in ("pick", "pick2"):
          assert room["target"] in room["receptacles"] and room["target"] not in kinds
        assert rooms.held_out(family, room["object"], room["target"]) == (split == "generated_unseen")
  at_home = [
    room["receptacles"][where]
    for index in range(200)
    for room in [rooms.room("generated_train", "heat", index)]
    for kind, where in room["objects"]
    if kind == "Potato"
  ]
  assert len(at_home) > 80
  assert at_home.count("Fridge") / len(at_home) > 0.3  # by chance it would be one in six


def test_splits_share_no_goal_and_every_goal_is_dealt():
  for family in rooms.FAMILIES:
    train, unseen = (rooms.goals(split, family) for split in rooms.GENERATED)
    assert train and unseen and not {goal[1:] for goal in train} & {goal[1:] for goal in unseen}
    dealt = [rooms.room("generated_unseen", family, index) for index in range(len(unseen))]
    assert sorted((room["kind"], room["object"], room["target"]) for room in dealt) == list(unseen)
  with pytest.raises(ValueError, match="no generated rooms"):
    rooms.goals("train", "pick")


def test_tasks():
  benchmark = ALFWorld()
  tasks = benchmark.tasks("generated_unseen", 20, seed=1)
  assert tasks == benchmark.tasks("generated_unseen", 20, seed=1)
  assert [task.id for task in tasks] == sorted({task.id for task in tasks})
  counts = [sum(task.family == family for task in tasks) for family in benchmark.families]
  assert sorted(counts) == [3, 3, 3, 3, 4, 4]
  assert not {task.id for task in tasks} & {task.id for task in benchmark.tasks("generated_unseen", 20, seed=2)}
  assert json.loads(json.dumps(dict(tasks[0].payload))) == tasks[0].payload
  with pytest.raises(ValueError, match="unknown split 'test'"):
    benchmark.tasks("test", 1)
  with pytest.raises(ValueError, match="count=0"):
    benchmark.tasks("train", 0)


def test_the_missing_data_folder_is_one_clear_line(monkeypatch, tmp_path):
  monkeypatch.delenv("ALFWORLD_DATA", raising=False)
  with pytest.raises(ValueError, match="need ALFWORLD_DATA"):
    ALFWorld().tasks("valid_seen", 1)
  monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
  assert data_folder() == str(tmp_path)
  with pytest.raises(ValueError, match="no official games in .*json_2.1.1.valid_seen"):
    ALFWorld().tasks("valid_seen", 1)
  with pytest.raises(ValueError, match="holds no official games"):
    ALFWorld().scan("generated_train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Games in the official layout: four good ones, five that are malformed, two that are no part of the benchmark."""
  root = tmp_path_factory.mktemp("alfworld")
  for family, index in (("pick", 2), ("pick", 5), ("pick", 8), ("look", 2)):
    rooms.write_game(str(root), "generated_train", family, index)
  good = read_game(str(next(root.glob("json_2.1.1/train/pick_and_place_simple-*/*/game.tw-pddl"))))

  def write(task, content):
    path = root / "json_2.1.1" / "train" / task / "trial_1" / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

  write("pick_and_place_simple-A-None-B-1", b'{"pddl_domain": ')
  write("pick_and_place_simple-A-None-B-2", {key: good[key] for key in good if key != "grammar"})
  write("pick_and_place_simple-A-None-B-3", {**good, "solvable": False})
  write("pick_and_place_simple-A-None-B-4", {**good, "pddl_problem": good["pddl_problem"][:3000]})
  write("pick_and_place_simple-A-None-B-5", b"\xff\xfe\x00 not text")
  write(
    "pick_and_place_simple-A-None-B-6", {**good, "pddl_problem": good["pddl_problem"].replace("agent1", "(agent1)")}
  )
  write("pick_and_place_with_movable_recep-A-B-C-1", good)
  write("pick_and_place_simple-AppleSliced-None-C-1", good)
  return root


def test_malformed_games_are_named_skipped_and_counted(folder, caplog, monkeypatch):
  monkeypatch.setenv("ALFWORLD_DATA", str(folder))
  games, skipped = ALFWorld().scan("train")
  reasons = dict(skipped)
  assert [path.split("/")[0][-1] for path, _ in skipped] == ["1", "2", "3", "4", "5"]
  assert [path for path, _ in skipped] == sorted(reasons) and games == sorted(games, key=lambda game: game[1])
  for number, why in enumerate(("is not JSON", "'grammar'", "not marked solvable", "truncated PDDL", "is not JSON"), 1):
    assert why in reasons[f"pick_and_place_simple-A-None-B-{number}/trial_1/game.tw-pddl"]
  assert len(games) == 5 and not any("movable" in path or "Sliced" in path for _, path in games)
  with caplog.at_level(logging.WARNING):
    tasks = ALFWorld().tasks("train", 2, seed=3)
  assert "5 of 10 game files of split train were skipped" in caplog.text
  assert "pick_and_place_simple-A-None-B-4/trial_1/game.tw-pddl: has a truncated PDDL problem" in caplog.text
  assert [task.family for task in tasks] == ["look", "pick"]  # equal shares
  assert len(ALFWorld().tasks("train", 5)) == 5
  with pytest.raises(ValueError, match="has 5 playable games, 6 were asked for"):
    ALFWorld().tasks("train", 6)


def test_a_game_that_only_the_engine_finds_malformed(folder):
  env = ALFWorldEnv(data=str(folder))
  env.reset(options={"task": SMALL})
  bad = {"split": "train", "family": "pick", "game": "pick_and_place_simple-A-None-B-6/trial_1/game.tw-pddl"}
  with pytest.raises(GameError, match="B-6/trial_1/game.tw-pddl: the engine cannot load it"):
    env.reset(options={"task": bad})
  with pytest.raises(gymnasium.error.ResetNeeded):
    env.step("look")
  with pytest.raises(GameError, match="cannot be read"):
    env.reset(options={"task": {**bad, "game": "nowhere/game.tw-pddl"}})
  good = ALFWorld(data=str(folder)).scan("train")[0]
  family, path = next(game for game in good if "B-6" not in game[1])
  _, info = env.reset(options={"task": {"split": "train", "family": family, "game": path}})
  assert info["admissible"] and info["gamefile"] == str(folder / "json_2.1.1" / "train" / path)
  shutil.rmtree(folder / "json_2.1.1" / "train" / path.split("/")[0])


def test_the_step_limit_truncates(player):
  _, info = player.reset(options={"task": SMALL})
  results = [player.step(word) for word in ("help", "put potato 1 in/on fridge 1", "GO TO sofa 1")]
  assert [result[1:4] for result in results] == [(0.0, False, False), (0.0, False, False), (0.0, False, True)]
  assert [result[4]["valid"] for result in results] == [True, False, False]
  assert "Available commands" in results[0][0]  # hidden from the admissible ones, but answered
  assert results[1][0] == results[2][0] == text.NOTHING and not results[2][4]["won"]
  with pytest.raises(gymnasium.error.ResetNeeded):
    player.step("look")
  assert player.render().startswith(f"{info['task']} (step 3 of 3)")


def test_a_goal_that_holds_at_the_start_ends_with_the_first_step(player, monkeypatch):
  drawn = rooms.room(**{"split": SMALL["split"], "family": "pick", "index": 2})
  target = drawn["receptacles"].index(drawn["target"])
  moved = {
    **drawn,
    "objects": [(kind, target if kind == drawn["object"] else where) for kind, where in drawn["objects"]],
  }
  monkeypatch.setattr(rooms, "room", lambda *key: moved)
  _, info = player.reset(options={"task": SMALL})
  assert info["won"]
  assert player.step("look")[1:4] == (1.0, True, False)
  with pytest.raises(gymnasium.error.ResetNeeded):
    player.step("look")


def resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def libraries():
  with open("/proc/self/maps") as file:
    return len({line.split()[-1].split("#")[0] for line in file if "libdownward" in line})


def test_one_engine_plays_sixty_games_in_flat_memory(player):
  indices = sorted(range(80), key=lambda index: len(rooms.game("generated_train", "pick", index)["pddl_problem"]))[:12]
  payloads = [{**SMALL, "index": index} for index in indices]  # more of them than the memo of translations holds
  before = None
  for number in range(72):
    player.reset(options={"task": payloads[number % 12]})
    player.step("inventory")
    if number == 11:
      before, opened = resident(), libraries()
  for _ in range(3):  # closed environments hand their engine on
    env = ALFWorld().make()
    env.reset(options={"task": payloads[0]})
    env.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
      env.reset()
  assert libraries() <= opened + 1
  assert resident() - before < 8, f"{resident() - before:.1f} MiB more after 60 resets"


def test_the_engine_leaves_the_process_as_it_found_it(player, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["program", "--flag"])
  translator = fast_downward.pddl2sas
  state = random.getstate()
  player.reset(options={"task": {**SMALL, "index": 50}})
  player.step("look")
  assert sys.argv == ["program", "--flag"] and fast_downward.pddl2sas is translator and random.getstate() == state


def test_several_slots_of_a_process_keep_their_games_apart():
  benchmark = ALFWorld(max_steps=5)
  tasks = benchmark.tasks("generated_train", 3)

  def play(num_workers):
    log = []
    with Pool(benchmark, 3, num_workers) as pool:
      for slot, task in enumerate(tasks):
        pool.reset(slot, task.payload)
      for turn in range(5):
        results = {}
        while len(results) < 3:
          results.update(pool.ready(timeout=120))
        log.append([results[slot] for slot in range(3)])
        for slot in reversed(range(3)):
          offered = results[slot].info["admissible"]
          pool.step(slot, offered[(7 * turn + slot) % len(offered)])
    return log

  local = play(0)
  assert not any(result.error for turn in local for result in turn)
  assert len({result.observation for turn in local for result in turn}) > 6
  assert play(1) == local  # all three in one worker


def test_a_missing_engine_names_the_command_to_install_it():
  code = "import sys; sys.modules['textworld'] = None\nimport envs\nb = envs.benchmark('alfworld')\nb.make()"
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
  last = done.stderr.strip().splitlines()[-1]
  assert (
    done.returncode == 1 and "pip install 'seed_jax[alfworld]'" in last and last.startswith("ImportError: ALFWorld")
  )


def test_gymnasium_makes_it():
  env = gymnasium.make("seed/ALFWorld-v0", max_steps=2)
  first, info = env.reset(seed=4)
  again, _ = env.reset(seed=4)
  assert first == again and first in env.observation_space and info["family"] in rooms.FAMILIES
  env.action_space.seed(0)
  observation, *_, info = env.step(env.action_space.sample())
  assert observation == text.NOTHING and info["valid"]  # nothing is said about commands unless `strict`
  env.close()
  assert envs.benchmark("alfworld", plain=True).plain
  with pytest.raises(ValueError, match="max_steps 0"):
    ALFWorldEnv(max_steps=0)


def test_demonstrations_win_by_listed_actions_one_family_after_another():
  demos = list(ALFWorld(plain=True, max_steps=1).demonstrations(6, 3))
  assert {d.task.family for d in demos} == set(ALFWorld.families)
  assert all(d.won and d.sentence for d in demos)
  assert all(action in shown for d in demos for (_, action), shown in zip(d.steps, d.shown, strict=True))
