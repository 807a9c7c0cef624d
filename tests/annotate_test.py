"""Stage `annotate` where the run is asked to stop: nothing is written, and the same command goes on."""

import types

import pytest
from etils import epath

from seed_jax import annotate, hosts
from seed_jax.preemption import Notice, Preempted
from seed_jax.trajectory import Trajectory, Turn, load_trajectories


def episode(number):
  turn = Turn("see", ("go",), "p", [1, 2], [3], [-0.1], "go", "go", True, 1.0)
  return Trajectory(f"t{number}", "f", "a task", "window", number, 0, [turn], True, 1.0, False, "")


def stand_in(workdir, analyzed, stop_at=None):
  """What the stage asks of a run."""
  notice = Notice()

  def analyze(task, steps, won):
    analyzed.append(task)
    if len(analyzed) == stop_at:
      notice.give("a test")
    return {"episode_summary": "s", "episode_skill": "heat it"}

  section = types.SimpleNamespace(analyzer="scripted")
  return types.SimpleNamespace(
    config=types.SimpleNamespace(annotate=section, start=""),
    benchmark=types.SimpleNamespace(analyze=analyze),
    workdir=epath.Path(workdir),
    notice=notice,
    finish=lambda stage, values: values,
  )


def test_it_stops_at_the_next_answer_and_goes_on_later(tmp_path, monkeypatch):
  monkeypatch.setattr(annotate, "load_collected", lambda run: [episode(i) for i in range(5)])
  analyzed = []
  with pytest.raises(Preempted, match="a test"):
    annotate.run_annotate(stand_in(tmp_path, analyzed, stop_at=2))
  assert len(analyzed) == 2 and not (tmp_path / "trajectories").exists()
  values = annotate.run_annotate(stand_in(tmp_path, analyzed))
  assert values["kept"] == values["episodes"] == 5 and len(analyzed) == 2 + 5
  assert [t.skill for t in load_trajectories(str(tmp_path / "trajectories" / "annotated"))] == ["heat it"] * 5


def test_of_several_hosts_all_stop_where_the_first_one_was_asked_to(monkeypatch):
  """Another host waits for the texts at the meeting that process 0 must come to."""
  met = []

  def from_first(what, function, *, patience):
    met.append(what)
    return function()

  monkeypatch.setattr(hosts, "from_first", from_first)
  notice = Notice(lambda flag: met.append(flag) or flag)
  run = types.SimpleNamespace(notice=notice)

  class Analyzer:
    patience = 0.0

    def analyze(self, trajectories, *, between):
      notice.give("SIGTERM")
      between()

  with pytest.raises(Preempted, match="SIGTERM"):
    annotate.analyses(run, Analyzer(), [])
  assert met == ["the analyses", True]
