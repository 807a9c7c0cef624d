"""Training that is asked to stop again and again, at every kind of place, and killed, ends as if nothing had been."""

import functools
import gzip
import json

import pytest
from tiny_run import started, tiny

from seed_jax import checkpoint, learn, metrics, rollout, train, update
from seed_jax.curve import KEYS, Curve
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


def stopped(
  start, name, monkeypatch, owner, function, count, *, when="before", killed_at=None, killed_in=None, **changes
):
  """A run that is asked to stop at the `count`-th call of a function; and, where they are named, killed at the
  `killed_at`-th one or at the first one of another (owner, function).
  """
  notice, real, calls = Notice(), getattr(owner, function), []

  def wrapped(*args, **options):
    calls.append(1)
    if len(calls) == killed_at:
      raise Killed
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
    with pytest.raises(Killed if killed_in or killed_at else Preempted):
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


def state_of(workdir):
  """(newest checkpoint, {iteration: episodes that are kept of it}, the same of panels)."""
  steps = checkpoint.Checkpoints(workdir / "checkpoints" / "train").steps()
  kept = {"train": {}, "panel": {}}
  for folder, found in kept.items():
    place = workdir / "unfinished" / folder
    for file in place.iterdir() if place.exists() else ():
      found[int(file.name.partition("-")[0])] = len(gzip.decompress(file.read_bytes()).splitlines()) - 1
  return steps[-1] if steps else None, *kept.values()


@pytest.fixture
def played(monkeypatch):
  """The iteration (KEYS and more: a panel's) of every episode that ended."""
  out, real = [], rollout._Player._finish

  def finish(self, *args, **changes):
    out.append(self.iteration)
    real(self, *args, **changes)

  monkeypatch.setattr(rollout._Player, "_finish", finish)
  return out


FINISH = rollout._Player, "_finish"


@pytest.mark.slow
def test_training_loses_and_repeats_nothing(start, monkeypatch, played):
  """No checkpoint is written but where the run is asked to stop."""
  changes = {"checkpoint.every": 9}
  whole = trained(start, "whole", **changes)
  assert not (whole / "unfinished").exists() and [played.count(i) for i in range(3)] == [16, 16, 16]
  del played[:]
  every = {0: 16, 1: 16}
  for place, count, then, after in [
    (FINISH, 5, {}, (None, {0: 6})),  # 6 environments: their episodes end together
    (FINISH, 4, {}, (None, {0: 12})),  # and once more in the same iteration
    ((Run, "parse"), 1, {}, (None, {0: 16})),
    # in the middle of an update, whose state is lost: asked to stop at one mini-batch and killed at the next
    ((update.Update, "pieces"), 1, {"killed_at": 2}, (None, {0: 16})),
    ((update.Update, "pieces"), 3, {"killed_at": 4}, (None, every)),  # and in that of the next iteration
    ((metrics.Writer, "write"), 1, {}, (1, every)),  # an update that comes to its end, before the panel
    ((learn, "score_all"), 1, {}, (1, every)),  # nothing is begun that may not come to its end
    (FINISH, 12, {}, (2, {1: 16, 2: 12})),  # what the checkpoint before this one needs stays
    ((learn, "score_all"), 1, {}, (2, {1: 16, 2: 16})),
    ((metrics.Writer, "write"), 1, {}, (3, {2: 16})),  # after the last iteration
  ]:
    stopped(start, "broken", monkeypatch, *place, count, **then, **changes)
    assert state_of(start.parent / "broken") == (*after, {}), (place, count)
  compare(trained(start, "broken", **changes), whole)
  assert [played.count(i) for i in range(3)] == [16, 16, 16]  # no episode ended twice
  assert not (start.parent / "broken" / "unfinished").exists()


@pytest.mark.slow
def test_a_run_killed_while_it_stops_goes_on_from_what_is_there(start, monkeypatch, played):
  """A step ahead, with panels: asked to stop in one, its episodes are kept, and its metric counts when it is there."""
  changes = {"train.async_level": 1, "train.panel.every": 1, "checkpoint.every": 2, "train.iterations": 3}
  changes |= {"checkpoint.keep": 1, "checkpoint.keep_best": 1, "checkpoint.best_metric": "valid/success"}
  whole = trained(start, "whole-ahead", **changes)
  del played[:]
  stop = functools.partial(stopped, start, "broken-ahead", monkeypatch, **changes)
  folder = start.parent / "broken-ahead"
  stop(*FINISH, 4 + 16 + 5)  # the panel, the first episodes, some of the second ones
  assert state_of(folder) == (1, {0: 16, 1: 6}, {0: 4})  # the update that was under way comes first
  stop(*FINISH, 2)  # in the panel after it, whose episodes end together
  assert state_of(folder) == (1, {0: 16, 1: 6}, {0: 4, 1: 4})
  stop(update.Update, "pieces", 1, killed_in=(checkpoint.Checkpoints, "_describe"))
  assert state_of(folder) == (1, {1: 16}, {1: 4})
  stop(Curve, "point", 2)  # with a panel still to be played
  assert state_of(folder) == (2, {1: 16, 2: 16}, {1: 4})
  compare(trained(start, "broken-ahead", **changes), whole)
  points = [[row["iteration"], row["outcomes"]] for row in rows(whole, "curve.jsonl")]
  assert points == [[row["iteration"], row["outcomes"]] for row in rows(folder, "curve.jsonl")]
  assert {played.count(i) for i in range(3)} == {16} and {played.count(KEYS + i) for i in range(4)} == {4}
  best = [json.loads((w / "train.json").read_text())["best"] for w in (whole, folder)]
  assert {tuple(each) for each in best[0]} <= {tuple(each) for each in best[1]}
