import json

import jax.numpy as jnp
import numpy as np
import pytest

from envs.protocol import Task
from seed_jax import unfinished
from seed_jax.preemption import Notice, Preempted
from seed_jax.rollout import Episode
from seed_jax.trajectory import Trajectory, Turn
from seed_jax.unfinished import Plays, Unfinished

EPISODES = [Episode(Task(f"t{group}", "f", "train", {}), group, member) for group in range(2) for member in range(2)]


def ended(episode, error=""):
  turn = Turn("see", ("go",), "p", [1, 2], [3, 4, 5], np.float32([-0.1, -1 / 3, -2.0]), "go", "go", True, 1 / 3)
  e = episode
  return Trajectory(
    e.task.id, "f", "x", "window", e.group, e.member, [turn], True, 1 / 3, False, error, analysis="\ud800"
  )


def test_what_has_ended_is_found_again_by_round_policy_task_group_and_member():
  first = Unfinished()
  finished = first.round(4, EPISODES)
  finished.trajectories |= {0: ended(EPISODES[0]), 2: ended(EPISODES[2]), 3: ended(EPISODES[3], error="died")}
  finished.read[2] = 7
  first.round(5, EPISODES, "other").trajectories[1] = ended(EPISODES[1])
  assert first.count() == 3 and first.take_tokens() == 0
  files = first.to_files()
  assert list(files) == ["episodes-0.jsonl"] and len(files["episodes-0.jsonl"].splitlines()) == 3

  for episodes, places in [(EPISODES, [0, 2]), (EPISODES[::-1], [3, 1]), (EPISODES[1:3], [None, 1])]:
    found = Unfinished(files)
    again = found.round(4, episodes)
    assert sorted(again.trajectories) == sorted(p for p in places if p is not None)
    assert again.trajectories[places[1]] == ended(EPISODES[2]) and again.read == {places[1]: 7}
    # 3 tokens of the response each, 7 of the analysis
    assert found.take_tokens() == 3 * len(again.trajectories) + 7 and found.take_tokens() == 0
    assert not found.round(5, episodes).trajectories and not found.round(6, episodes).trajectories
  two = {"episodes-0.jsonl": files["episodes-0.jsonl"][:0], "episodes-1.jsonl": files["episodes-0.jsonl"]}
  assert len(Unfinished(two).round(5, EPISODES, "other").trajectories) == 1  # of all processes
  again = Unfinished(files)  # stopped once more before any of them was asked for
  assert again.count() == 3 and sorted(Unfinished(again.to_files()).round(4, EPISODES).trajectories) == [0, 2]
  for kept in (first, again):
    kept.drop_before(5)
    assert kept.count() == 1
  with pytest.raises(ValueError):
    Unfinished({"x": json.dumps({"round": 0, "policy": "", "read": None, "trajectory": "{}"}).encode()})


class Stage:
  """What `Plays` asks of a run: episodes that end one after the other."""

  def __init__(self, workdir, stop_after=None):
    self.workdir, self.notice, self.stop_after, self.played = workdir, Notice(), stop_after, []

  def play(self, engine, pool, episodes, *, finished, on_episode):
    for place, episode in enumerate(episodes):
      if len(self.played) == self.stop_after:
        self.notice.give("a test")
      self.notice.check()
      if place not in finished.trajectories:
        self.played.append(place)
        finished.trajectories[place] = ended(episode)
        on_episode(finished.trajectories[place])
    return [finished.trajectories[place] for place in range(len(episodes))]


def test_the_plays_of_a_stage_go_on_with_the_same_policy_alone(tmp_path):
  from etils import epath

  params, seen, place = {"w": jnp.ones(3)}, [], epath.Path(tmp_path)

  def stage(stop_after=None):
    run = Stage(place, stop_after)
    return run, Plays(run, "evaluate")

  run, plays = stage(stop_after=5)
  with pytest.raises(Preempted, match="a test"):
    for number in range(2):
      plays(number, None, None, EPISODES, params, on_episode=seen.append)
  assert len(seen) == 5 and (tmp_path / "unfinished" / "evaluate").exists()
  run, plays = stage()
  other = plays(0, None, None, EPISODES, {"w": jnp.ones(3) * 2}, on_episode=seen.append)
  assert run.played == [0, 1, 2, 3] and len(other) == 4  # another policy plays anew
  run, plays = stage()
  out = [plays(number, None, None, EPISODES, params, on_episode=seen.append) for number in range(2)]
  assert run.played == [1, 2, 3] and out[0] == out[1] == [ended(e) for e in EPISODES]
  assert len(seen) == 5 + 4 + 8  # a progress bar counts those that were there
  plays.done()
  assert not (tmp_path / "unfinished" / "evaluate").exists()
  assert unfinished.FOLDER == "unfinished"
