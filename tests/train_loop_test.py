"""The training loop's wiring, on whole runs of the tiny config: groups that are left out, methods that do not train."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_run import started, tiny

from seed_jax import evaluate, library, methods, report, train
from seed_jax.advantages import unequal_groups
from seed_jax.library import Library, Skill
from seed_jax.run import Run, process_seed
from seed_jax.trajectory import Trajectory

ADVICE = "take the potato."


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """A work directory that others start from."""
  workdir = started(tmp_path_factory.mktemp("loop") / "start", "seed")
  library.save(workdir.parent / "library.json", Library(general=(Skill("general_001", "t", ADVICE),)))
  return workdir


@pytest.fixture
def played(monkeypatch):
  """What `Run.play` was asked for and gave: (options, episodes, trajectories) of every call."""
  calls, real = [], Run.play

  def play(self, engine, pool, episodes, **options):
    out = real(self, engine, pool, episodes, **options)
    calls.append((options, list(episodes), out))
    return out

  monkeypatch.setattr(Run, "play", play)
  return calls


def trained(start, method, **changes):
  config = tiny(method)
  config.start = str(start)
  config.library.path = str(start.parent / "library.json")
  config.train.panel.update(dict(tasks=4, split="valid"))
  config.update_from_flattened_dict(changes)
  run = Run(config, start.parent / method, plain=True)
  run.open()
  return run, train.run_train(run)


def read(workdir, name):
  path = workdir / name
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def weights(workdir, name):
  return (workdir / "policy" / name / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_rounds_of_episodes_until_enough_groups_are_kept(start, played, monkeypatch):
  """Of four tasks a round the filter keeps: 2 and 3, which is one too many; 1, 1 and 1; none, ever; all four."""
  monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
  before = [(0,)]  # what it is called for before the first iteration, to be compiled
  keeps = iter([*before, (0, 3), (1, 2, 3), (0,), (1,), (2,), (), (), (), (0, 1, 2, 3)])

  def group_filter(returns, group_ids, *, num_groups):
    assert unequal_groups(returns, group_ids, num_groups=num_groups).shape == (4,)  # compiled like a real one
    chosen = next(keeps)
    return np.asarray([i in chosen for i in range(num_groups)])

  methods.register(dataclasses.replace(methods.get("seed"), name="picky", source="a test", group_filter=group_filter))

  def parse(self, trajectories):
    for t in trajectories:
      t.skill = f"take {t.group}"
    return {"parse_rate": 1.0}

  monkeypatch.setattr(Run, "parse", parse)
  run, summary = trained(start, "picky", **{"train.max_generations": 3})
  rows = read(run.workdir, "metrics.jsonl")
  assert [row["episodes_kept"] for row in rows] == [16, 12, 0, 16] and not list(keeps)
  assert [row["episodes"] for row in rows] == [2 * 16, 3 * 16, 3 * 16, 16]  # also what is not kept was played
  assert all(np.isfinite(x) for row in rows for x in row.values() if isinstance(x, float))
  assert [row["skipped"] for row in rows] == [0.0] * 4 and [row["compilations"] for row in rows] == [0] * 4
  assert [bool(row["tokens_trained"]) for row in rows] == [True, True, False, True]
  assert rows[2]["loss"] == rows[2]["opd_active_ratio"] == rows[2]["skill_distinct"] == 0.0
  assert rows[0]["opd_active_ratio"] == 1.0 and rows[0]["skill_same_as_own"] == 1.0

  assert [options["iteration"] for options, *_ in played] == [0, 1, 3, 4, 5, 6, 7, 8, 9]  # 3 an iteration at most
  rounds = {0: played[0:2], 1: played[2:5], 2: played[5:8], 3: played[8:9]}
  for number, calls in rounds.items():
    groups = [e.group for _, episodes, _ in calls for e in episodes if e.member == 0]
    assert groups == list(range(4 * len(calls)))  # no two tasks of an iteration have one number
    tasks = [e.task.id for _, episodes, _ in calls for e in episodes if e.member == 0]
    assert len(set(tasks)) == len(tasks)  # further rounds play others
    pool = run.benchmark.tasks("train", 16, process_seed(0, "train tasks"))
    assert tasks[:4] == [task.id for task in train.iteration_tasks(pool, number, 4, 0)]  # as with one round
  skills = read(run.workdir, "skills/000001.jsonl")
  assert [(r["group"], r["member"]) for r in skills] == [(g, m) for g in (0, 3, 5, 6) for m in range(4)]
  assert all(r["skill"] == f"take {r['group']}" and np.isfinite(r["gain"]) for r in skills)
  assert read(run.workdir, "skills/000003.jsonl") == [] and summary["iterations"] == 4
  assert weights(run.workdir, "final") != weights(start, "sft")


@pytest.mark.slow
def test_the_tokens_of_a_frozen_analyzer_are_counted_with_those_of_the_episodes(start, played):
  run, _ = trained(start, "seed_frozen_analyzer", **{"train.iterations": 1, "train.panel.every": 1})
  (row,) = read(run.workdir, "metrics.jsonl")
  episodes = next(out for options, _, out in played if options["iteration"] == 0)
  responses = sum(t.response_tokens for t in episodes)
  assert row["tokens_sampled"] >= responses + len(episodes) and 0 < row["slot_utilisation"] <= 1
  assert [r["tokens_sampled"] for r in read(run.workdir, "curve.jsonl")] == [0, row["tokens_sampled"]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vanilla", "skill_prompt"])
def test_untrained_methods_end_as_they_start(start, played, method):
  run, summary = trained(start, method, **{"train.panel.every": 2, "evaluate.mechanism_tasks": 0})
  assert weights(run.workdir, "final") == weights(start, "sft")
  assert read(run.workdir, "metrics.jsonl") == [] and summary["iterations"] == 0 and summary["method"] == method
  assert [row["iteration"] for row in read(run.workdir, "curve.jsonl")] == [0, 4]
  assert len(played) == 2  # the panel, and nothing else
  values = evaluate.run_evaluate(run)
  assert values["outcomes"] == values["start"]["outcomes"] and len(played) == 4  # one policy, played as both
  report.run_report(run)
  assert "cannot be read" not in (run.workdir / "report.html").read_text()
  for _, episodes, trajectories in played:
    assert len(episodes) == len(trajectories) in (4, 12)
    for t in trajectories:
      shown = run.tokenizer.decode([int(i) for i in t.turns[0].prompt_ids])
      assert isinstance(t, Trajectory) and ("Skill: [" in shown) == (method == "skill_prompt")


@pytest.mark.slow
@pytest.mark.parametrize(
  "method, changes", [("rlsd", {}), ("gigpo", {}), ("seed", {"train.rescore": "minibatch"}), ("seed_random_text", {})]
)
def test_iterations_compile_nothing_whatever_the_method(start, monkeypatch, method, changes):
  real = Run.parse

  def parse(self, trajectories):
    log = real(self, trajectories)
    for t in trajectories:
      t.skill = f"take {t.group} {t.member}"  # this policy writes none
    return log

  monkeypatch.setattr(Run, "parse", parse)
  run, _ = trained(start, method, **changes | {"train.iterations": 2})
  rows = read(run.workdir, "metrics.jsonl")
  assert [row["compilations"] for row in rows] == [0, 0]
  assert all(x is not None and np.isfinite(x) for row in rows for x in row.values())
  assert weights(run.workdir, "final") != weights(start, "sft")
  for row in rows:
    assert ("opd_active_ratio" in row) == ("skill_same_as_own" in row) == methods.get(method).needs_skills
    assert row.get("opd_active_ratio", 1.0) == 1.0 and ("skill_novel" in row) == methods.get(method).needs_analysis
  kept = [r["gain"] for r in read(run.workdir, "skills/000002.jsonl")]
  if changes:  # the second of two mini-batches is scored after the first update: too late to be kept
    assert len(kept) == 16 and sum(gain is None for gain in kept) == 8
  else:
    assert kept == [] or None not in kept
