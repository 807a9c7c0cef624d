"""Training that is asked to stop again and again, at every kind of place, ends as if nobody had asked."""

import functools
import json

import pytest
from tiny_run import started, tiny

from seed_jax import checkpoint, learn, rollout, train, update
from seed_jax.curve import Curve
from seed_jax.preemption import Notice, Preempted
from seed_jax.run import Run

# What the engine did to get the same samples, in what time; and what shows the last rounding of the sampler.
WAYS = ("seconds", "tokens_prefilled", "tokens_reused", "decode_steps", "slot_utilisation")
ROUNDED = ("mismatch_", "skill_gain", "old_kl")


class Killed(Exception):
  """Stands for SIGKILL."""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  return started(tmp_path_factory.mktemp("preempted") / "start", "seed")


def trained(start, name, notice=None, **changes):
  config = tiny("seed")
  config.start = str(start)
  config.rollout.environments = 6  # so that the 16 episodes of an iteration do not end together
  config.train.iterations = 3
  config.train.panel.update(dict(tasks=4, split="valid"))
  config.update_from_flattened_dict(changes)
  run = Run(config, start.parent / name, plain=True, notice=notice)
  run.open()
  train.run_train(run)
  return run.workdir


def stopped(start, name, monkeypatch, owner, function, count, *, when="before", killed_in=None, **changes):
  """A run that is asked to stop at the `count`-th call of a function, and, where `killed_in` names another one of
  (owner, function), is killed there.
  """
  notice, real, calls = Notice(), getattr(owner, function), []

  def wrapped(*args, **options):
    calls.append(1)
    if len(calls) == count and when == "before":
      notice.give("a test")
    result = real(*args, **options)
    if len(calls) == count and when == "after":
      notice.give("a test")
    return result

  def die(*_, **__):
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(owner, function, wrapped)
    if killed_in:
      patch.setattr(*killed_in, die)
    with pytest.raises(Killed if killed_in else Preempted):
      trained(start, name, notice, **changes)
  assert len(calls) >= count


def rows(workdir, name="metrics.jsonl"):
  return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def weights(workdir):
  return (workdir / "policy" / "final" / "model.safetensors").read_bytes()


def compare(one, other):
  assert weights(one) == weights(other)
  assert len(rows(one)) == len(rows(other)) == 3
  for a, b in zip(rows(one), rows(other), strict=True):
    exact = [{name for name in row if not name.startswith(WAYS)} for row in (a, b)]
    assert exact[0] == exact[1]
    for name in sorted(exact[0]):
      assert a[name] == (pytest.approx(b[name], abs=1e-5) if name.startswith(ROUNDED) else b[name]), name
  assert (one / "examples.json").read_bytes() == (other / "examples.json").read_bytes()


def episodes_kept(workdir):
  """(step, episodes) of the newest checkpoint."""
  found = checkpoint.Checkpoints(workdir / "checkpoints" / "train")
  step = found.steps()[-1]
  return step, sum(len(data.splitlines()) for data in found.attached(step).values())


@pytest.mark.slow
def test_training_loses_and_repeats_nothing(start, monkeypatch):
  whole = trained(start, "whole")
  played, real = [], rollout._Player._finish

  def finish(self, *args, **changes):
    played.append(self.iteration)
    real(self, *args, **changes)

  monkeypatch.setattr(rollout._Player, "_finish", finish)
  for owner, function, count, kept in [
    (rollout._Player, "_finish", 5, (0, 6)),  # 6 environments: their episodes end together
    (rollout._Player, "_finish", 4, (0, 12)),  # and once more in the same iteration
    (Run, "parse", 1, (0, 16)),
    (update.Update, "pieces", 2, (1, 0)),  # between two mini-batches: the update comes first
    (rollout._Player, "_finish", 12, (1, 12)),
    (learn, "score_all", 1, (2, 0)),
    (learn, "score_all", 1, (3, 0)),  # after the last iteration
  ]:
    stopped(start, "broken", monkeypatch, owner, function, count)
    assert episodes_kept(start.parent / "broken") == kept, (function, count)
  compare(trained(start, "broken"), whole)
  assert [played.count(i) for i in range(3)] == [16, 16, 16]  # no episode ended twice


@pytest.mark.slow
def test_a_run_killed_while_it_stops_goes_on_from_its_checkpoint(start, monkeypatch):
  changes = {"train.async_level": 1, "train.panel.every": 1, "checkpoint.every": 2, "train.iterations": 3}
  whole = trained(start, "whole-ahead", **changes)
  stop = functools.partial(stopped, start, "broken-ahead", monkeypatch, **changes)
  stop(rollout._Player, "_finish", 4 + 16 + 5)  # the panel, the first episodes, some of the second ones
  assert episodes_kept(start.parent / "broken-ahead") == (1, 6)  # the update that was under way comes first
  stop(rollout._Player, "_finish", 8, killed_in=(checkpoint.Checkpoints, "attach"))
  stop(Run, "parse", 1, when="after", killed_in=(checkpoint.Checkpoints, "_describe"))
  assert episodes_kept(start.parent / "broken-ahead") == (1, 6)
  stop(Curve, "point", 2)  # with a panel still to be played
  compare(trained(start, "broken-ahead", **changes), whole)
  points = [[row["iteration"], row["outcomes"]] for row in rows(whole, "curve.jsonl")]
  assert points == [[row["iteration"], row["outcomes"]] for row in rows(start.parent / "broken-ahead", "curve.jsonl")]
