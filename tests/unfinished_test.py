import dataclasses
import gzip
import json
import threading

import fake_store
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from envs.protocol import Task
from seed_jax import hosts, unfinished
from seed_jax.preemption import Notice, Preempted
from seed_jax.rollout import Episode, Finished
from seed_jax.trajectory import Trajectory, Turn
from seed_jax.unfinished import Plays

EPISODES = [Episode(Task(f"t{group}", "f", "train", {}), group, member) for group in range(2) for member in range(2)]
PARAMS = {"w": jnp.ones(3)}
READ = 7  # tokens of an analysis


def ended(episode, error=""):
  turn = Turn("see", ("go",), "p", [1, 2], [3, 4, 5], np.float32([-0.1, -1 / 3, -2.0]), "go", "go", True, 1 / 3)
  e = episode
  return Trajectory(
    e.task.id, "f", "x", "window", e.group, e.member, [turn], True, 1 / 3, False, error, analysis="\ud800"
  )


class Stage:
  """What `Plays` asks of a run: episodes that end, and are read, one after the other."""

  def __init__(self, workdir, stop_after=None, *, broken=()):
    self.workdir, self.notice, self.stop_after, self.broken = epath.Path(workdir), Notice(), stop_after, broken
    self.played, self.counted = [], []

  def play(self, engine, pool, episodes, *, finished, on_episode=lambda t: None, reading=True):
    for place, episode in enumerate(episodes):
      if len(self.played) == self.stop_after:
        self.notice.give("a test")
      self.notice.check()
      if place not in finished.trajectories:
        self.played.append(place)
        finished.trajectories[place] = ended(episode, "died" if place in self.broken else "")
        on_episode(finished.trajectories[place])
      if reading and place not in finished.read:
        finished.read[place] = READ
    return [finished.trajectories[place] for place in range(len(episodes))]


def stage(workdir, stop_after=None, *, name="train", **options):
  run = Stage(workdir, stop_after, **options)
  return run, Plays(run, name)


def play(plays, number, params=PARAMS, episodes=EPISODES, **options):
  return plays(number, None, None, episodes, params, **options)


def files(workdir, name="train"):
  place = workdir / "unfinished" / name
  return sorted(p.name for p in place.iterdir()) if place.exists() else []


def test_a_play_that_is_over_is_played_by_no_later_process(tmp_path):
  run, plays = stage(tmp_path)
  for number in (4, 5):
    play(plays, number)
  plays.wait()  # whatever ends this process from here on
  assert files(tmp_path) == ["4-0.gz", "5-0.gz"] and plays.take_tokens() == 0
  seen = []
  run, plays = stage(tmp_path)
  assert play(plays, 5, on_episode=seen.append) == [ended(e) for e in EPISODES]
  assert run.played == [] and len(seen) == 4  # a progress bar counts those that were there
  assert plays.take_tokens() == 4 * (3 + READ) and plays.take_tokens() == 0
  plays.wait()
  assert [play(plays, 4, episodes=EPISODES[::-1])[0], run.played] == [ended(EPISODES[3]), []]
  assert len(play(plays, 6)) == 4 and run.played == [0, 1, 2, 3]  # there was none with that number


def test_where_the_run_is_asked_to_stop_what_has_ended_is_kept(tmp_path):
  run, plays = stage(tmp_path, stop_after=5)
  play(plays, 0)
  with pytest.raises(Preempted, match="a test"):
    play(plays, 1)
  run, plays = stage(tmp_path, stop_after=1)  # and once more
  assert len(play(plays, 0)) == 4 and run.played == []
  with pytest.raises(Preempted):
    play(plays, 1)
  assert run.played == [1]
  run, plays = stage(tmp_path)
  assert play(plays, 1) == [ended(e) for e in EPISODES] and run.played == [2, 3]


def test_where_another_host_is_gone_what_has_ended_is_kept(tmp_path, monkeypatch, capsys):
  run, plays = stage(tmp_path)
  monkeypatch.setattr(run.notice, "check", lambda: run.played[2:] and pytest.fail("host 1 is gone"))
  with pytest.raises(pytest.fail.Exception, match="host 1 is gone"):
    play(plays, 1)
  assert "stopped" not in capsys.readouterr().err
  run, plays = stage(tmp_path)
  assert len(play(plays, 1)) == 4 and run.played == [3]


def test_another_policy_plays_anew(tmp_path):
  _, plays = stage(tmp_path)
  play(plays, 0)
  plays.wait()
  run, plays = stage(tmp_path)
  play(plays, 0, {"w": jnp.ones(3).at[1].add(1e-7)})
  assert run.played == [0, 1, 2, 3]
  plays.wait()
  run, plays = stage(tmp_path)
  play(plays, 0)
  assert run.played == [0, 1, 2, 3]  # the file is that of the other one


def test_what_broke_off_is_not_kept_and_what_was_not_read_is_read(tmp_path):
  run, plays = stage(tmp_path, broken=(2,))
  play(plays, 0, reading=False)
  plays.wait()
  run, plays = stage(tmp_path)
  played = play(plays, 0)
  assert run.played == [2] and [t.error for t in played] == [""] * 4
  assert plays.take_tokens() == 3 * 3  # the analyses are this process's own
  plays.wait()
  head = gzip.decompress((tmp_path / "unfinished/train/0-0.gz").read_bytes()).split(b"\n")[0]
  assert json.loads(head) == {"policy": unfinished.policy_of(PARAMS), "read": [READ] * 4}


def test_files_of_all_hosts_count_whatever_the_number_of_hosts(tmp_path, monkeypatch):
  """Of two hosts each played its half; of one file in two the analyses are not there yet."""
  for index in range(2):
    with monkeypatch.context() as patch:
      patch.setattr(hosts, "index", lambda index=index: index)
      run, plays = stage(tmp_path)
      play(plays, 3, episodes=EPISODES[2 * index : 2 * index + 2], reading=index == 0)
      plays.wait()
  with monkeypatch.context() as patch:  # and one that had stopped before the analyses were there
    patch.setattr(hosts, "index", lambda: 2)
    plays._write(3, unfinished.policy_of(PARAMS), Finished({0: dataclasses.replace(ended(EPISODES[0]), analysis="")}))
  assert files(tmp_path) == ["3-0.gz", "3-1.gz", "3-2.gz"]
  run, plays = stage(tmp_path)
  assert play(plays, 3) == [ended(e) for e in EPISODES] and run.played == []
  assert plays.take_tokens() == 4 * 3 + 2 * READ


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no gzip", "another line", "no head"])
def test_a_damaged_file_is_told_and_counts_as_absent(tmp_path, damage, capsys):
  _, plays = stage(tmp_path)
  play(plays, 0)
  plays.wait()
  path = tmp_path / "unfinished/train/0-0.gz"
  data = path.read_bytes()
  lines = gzip.decompress(data).split(b"\n")
  path.write_bytes(
    {
      "cut": data[:-9],
      "flipped": data[:90] + bytes([data[90] ^ 1]) + data[91:],
      "empty": b"",
      "no gzip": b"\n".join(lines),
      "another line": gzip.compress(b"\n".join([*lines, b"{}"])),
      "no head": gzip.compress(b"\n".join([b"[]", *lines[1:]])),
    }[damage]
  )
  run, plays = stage(tmp_path)
  assert play(plays, 0) == [ended(e) for e in EPISODES] and run.played == [0, 1, 2, 3]
  assert f"warning: {path} cannot be read (" in capsys.readouterr().err


def test_where_nothing_can_be_written_the_run_goes_on(tmp_path, capsys):
  (tmp_path / "unfinished").write_text("a file")
  run, plays = stage(tmp_path)
  assert len(play(plays, 0)) == 4
  plays.wait()
  assert "was not written (" in capsys.readouterr().err


def test_the_play_does_not_wait_for_its_file(tmp_path, monkeypatch):
  real, go = Plays._write, threading.Event()
  monkeypatch.setattr(Plays, "_write", lambda self, *args: (go.wait(20), real(self, *args)))
  _, plays = stage(tmp_path)
  play(plays, 0)
  assert files(tmp_path) == []
  go.set()
  plays.wait()
  assert files(tmp_path) == ["0-0.gz"]


def test_files_go_when_they_are_used_up(tmp_path):
  _, plays = stage(tmp_path)
  for number in (8, 9, 10, 11):
    play(plays, number)
  plays.wait()
  place = tmp_path / "unfinished" / "train"
  (place / ".9-0.gz").write_bytes(b"half")  # killed while it was written
  plays.drop_before(10)
  assert files(tmp_path) == ["10-0.gz", "11-0.gz"]
  _, other = stage(tmp_path, name="panel")
  play(other, 0)
  plays.done()
  assert not place.exists() and (tmp_path / "unfinished").exists()  # of another stage
  other.done()
  assert not (tmp_path / "unfinished").exists()
  plays.done()
  plays.drop_before(99)


def test_object_storage_will_do(tmp_path, monkeypatch):
  fake_store.install(tmp_path, monkeypatch)
  _, plays = stage("gs://bucket/run")
  for number in (3, 4):
    play(plays, number)
  plays.wait()
  run, plays = stage("gs://bucket/run")
  assert play(plays, 4) == [ended(e) for e in EPISODES] and run.played == []
  plays.drop_before(4)
  assert [f.name for f in epath.Path("gs://bucket/run/unfinished/train").iterdir()] == ["4-0.gz"]
  plays.done()
  assert not epath.Path("gs://bucket/run/unfinished/train").exists()
