"""The learning curve: training does not notice it, a killed run leaves one row a point, and no task is trained on."""

import json

import numpy as np
import pytest
from tiny_run import started, tiny

from seed_jax import checkpoint, train
from seed_jax.curve import KEYS, Curve, metric_of, panel_tasks
from seed_jax.run import ConfigError, Run

COUNTS = ("episodes", "environment_steps", "tokens_sampled", "tokens_trained")


class Killed(BaseException):
  pass


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """A work directory that others start from."""
  workdir = started(tmp_path_factory.mktemp("curve") / "start", "grpo")
  return workdir


def trained(start, name, *, every=0, change=None):
  config = tiny("grpo")
  config.start = str(start)
  config.train.panel.update(dict(every=every, tasks=12, split="valid"))
  if change:
    change(config)
  run = Run(config, start.parent / name, plain=True)
  run.open()
  train.run_train(run)
  return run.workdir


def read(workdir, name):
  return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def without_times(rows):
  return [{k: v for k, v in row.items() if "seconds" not in k and k != "compilations"} for row in rows]


def weights(workdir):
  return (workdir / "policy" / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def measured(start):
  return trained(start, "measured", every=2)


@pytest.mark.slow
def test_training_with_and_without_the_panel_is_equal_bit_for_bit(start, measured):
  silent = trained(start, "silent")
  assert weights(silent) == weights(measured) != (start / "policy" / "sft" / "model.safetensors").read_bytes()
  assert without_times(read(silent, "metrics.jsonl")) == without_times(read(measured, "metrics.jsonl"))
  assert [row["compilations"] for row in read(measured, "metrics.jsonl")] == [0] * 4  # the panel's programs were there
  assert not (silent / "curve.jsonl").exists()


@pytest.mark.slow
def test_rows_count_what_training_used(measured):
  rows, log = read(measured, "curve.jsonl"), read(measured, "metrics.jsonl")
  assert [row["iteration"] for row in rows] == [0, 2, 4]
  for row in rows:
    for name in (*COUNTS, "seconds"):
      assert row[name] == pytest.approx(sum(r[name] for r in log[: row["iteration"]])), name
    outcomes = row["outcomes"]
    assert len(outcomes) == 12 and all(task.startswith("household/valid/") for task in outcomes)
    assert row["success"] == pytest.approx(np.mean(list(outcomes.values()))) and set(row["families"]) == {
      task.split("/")[2] for task in outcomes
    }
    assert row["macro"] == pytest.approx(np.mean(list(row["families"].values())))
  assert rows[1]["episodes"] == 2 * 4 * 4 and rows[0]["tokens_trained"] == 0 < rows[1]["tokens_trained"]
  spent = json.loads((measured / "train.json").read_text())["seconds"]
  assert spent > sum(r["seconds"] for r in log)


@pytest.mark.slow
def test_the_time_of_panels_is_no_training_time(start, monkeypatch):
  clock = [0.0]
  monkeypatch.setattr("seed_jax.curve.time.monotonic", lambda: clock[0])
  real = Run.play

  def play(self, engine, pool, episodes, **options):
    if options["iteration"] >= KEYS:
      clock[0] += 1_000.0
    return real(self, engine, pool, episodes, **options)

  monkeypatch.setattr(Run, "play", play)
  workdir = trained(start, "clock", every=2)
  rows = read(workdir, "curve.jsonl")
  assert all(row["panel_seconds"] >= 1_000 for row in rows) and rows[-1]["seconds"] < 1_000
  assert json.loads((workdir / "train.json").read_text())["seconds"] < 1_000


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
def test_a_killed_run_leaves_one_row_a_point(start, monkeypatch, level):
  """Killed right after a panel, before its checkpoint: the point is measured again, and only once."""

  def change(config):
    config.train.async_level, config.train.panel.every = level, 1
    config.checkpoint.every = 2

  whole = trained(start, f"whole{level}", change=change)
  real, calls = Curve.point, []

  def point(self, iteration, *args):
    due = self.due(iteration)
    real(self, iteration, *args)
    calls.extend([iteration] * due)
    if due and calls == [0, 1, 2, 3]:
      raise Killed

  monkeypatch.setattr(Curve, "point", point)
  with pytest.raises(Killed):
    trained(start, f"broken{level}", change=change)
  broken = start.parent / f"broken{level}"
  assert [row["iteration"] for row in read(broken, "curve.jsonl")] == [0, 1, 2, 3]
  assert checkpoint.Checkpoints(broken / "checkpoints" / "train").steps() == [2]
  trained(start, f"broken{level}", change=change)
  assert calls == [0, 1, 2, 3, 3, 4]
  assert without_times(read(broken, "curve.jsonl")) == without_times(read(whole, "curve.jsonl"))
  assert weights(broken) == weights(whole)


# ---- without a policy


def opened(tmp_path, **panel):
  config = tiny()
  config.train.panel.update(dict(every=2, tasks=6, split="valid") | panel)
  return Run(config, tmp_path / "w")


def test_points_are_due_at_the_start_the_rhythm_and_the_end(tmp_path):
  curve = Curve(opened(tmp_path, every=3), [])
  assert [i for i in range(5) if curve.due(i)] == [0, 3, 4]
  assert not any(Curve(opened(tmp_path, every=0), []).due(i) for i in range(5))
  (tmp_path / "w" / "curve.jsonl").write_text('{"iteration": 0}\n{"iteration": 3}\n{"iterat')
  later = Curve(opened(tmp_path, every=3), [], resume=2)
  assert [i for i in range(5) if later.due(i)] == [3, 4]
  assert (tmp_path / "w" / "curve.jsonl").read_text() == '{"iteration": 0}\n'


def test_validation_tasks_are_training_rooms_that_training_never_plays(tmp_path):
  run = opened(tmp_path, tasks=240)
  training = [t for seed in range(3) for t in run.benchmark.tasks("train", 2_400, seed)]
  panel = panel_tasks(run, training)
  assert len(panel) == 240 and not {t.payload["seed"] for t in panel} & {t.payload["seed"] for t in training}

  def kinds(tasks):
    return {tuple(t.payload[k] for k in ("family", "room", "object", "target")) for t in tasks}

  assert kinds(panel) <= kinds(training)
  assert not kinds(run.benchmark.tasks("unseen", 240, 0)) & kinds(training)


def test_a_panel_of_training_tasks_is_refused(tmp_path):
  run = opened(tmp_path, split="train", seed=1)
  with pytest.raises(ConfigError, match=r"6 of its 6 tasks of the split 'train' are tasks of training; choose another"):
    panel_tasks(run, run.benchmark.tasks("train", 10, 1))
  assert panel_tasks(run, run.benchmark.tasks("train", 10, 2))  # another seed: other tasks


def test_the_metric_of_a_checkpoint_is_a_column_or_the_named_split_of_the_panel(tmp_path):
  (tmp_path / "w").mkdir()
  (tmp_path / "w" / "curve.jsonl").write_text('{"iteration": 2, "success": 0.75}\n')
  curve = Curve(opened(tmp_path, every=2), [], resume=2)
  row = {"success": 0.5, "seconds/rollout": 3.0}
  assert metric_of("success", row, curve, 2) == 0.5 and metric_of("seconds/rollout", row, curve, 2) == 3.0
  assert metric_of("valid/success", row, curve, 2) == 0.75 and metric_of("valid/success", row, curve, 3) is None
  assert metric_of("", row, curve, 2) is None
  with pytest.raises(ConfigError, match="best_metric=succes is no column of metrics.jsonl; there are success, sec"):
    metric_of("succes", row, curve, 2)


def test_a_panel_is_chosen_by_only_where_it_is_named_and_played(tmp_path):
  def check(best_metric, every=20, keep_best=1):
    c = tiny()
    c.train.panel.update(dict(every=4, split="valid"))
    c.checkpoint.update(dict(keep_best=keep_best, best_metric=best_metric, every=every))
    Run(c, tmp_path / "w").check()

  for good in ("success", "valid/success", "seconds/rollout"):
    check(good)
  for bad, every in [("unseen/success", 20), ("panel/success", 20), ("valid/success", 10)]:
    with pytest.raises(ConfigError, match=f"best_metric={bad} needs the panel of that split at every checkpoint"):
      check(bad, every)
  with pytest.raises(ConfigError, match="keep_best=1 needs config.checkpoint.best_metric"):
    check("")
  check("", keep_best=0)


def test_the_keys_of_panels_are_no_keys_of_training():
  assert 1_000_000 < KEYS and KEYS + 1_000_000 < 2**31  # iterations are below a million, keys are int32
