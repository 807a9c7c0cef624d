"""Methods with a part of their own in the training loop, run whole: what it does, and that a stop changes nothing.

The tiny policy wins nothing, so outcomes are put in: even members of a group win.
"""

import json
import math
import pathlib

import pytest

from seed_jax import main, run
from seed_jax.checkpoint import Checkpoints

TINY = pathlib.Path(__file__).parent / "tiny_config.py"
TIMES = ("seconds", "compilations")  # what a row may differ in


def cli(workdir, method, *options):
  return main.cli(["main", f"--config={TINY}:{method}", f"--workdir={workdir}", "--plain", *options])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """The work directory of an SFT policy."""
  workdir = tmp_path_factory.mktemp("methods") / "start"
  assert cli(workdir, "seed", "--stages=base,collect,annotate,sft") == 0
  return workdir


@pytest.fixture
def outcomes(monkeypatch):
  real = run.Run.play

  def play(*arguments, **options):
    trajectories = real(*arguments, **options)
    for t in trajectories:
      t.won = t.member % 2 == 0
      t.episode_return = float(t.won)
    return trajectories

  monkeypatch.setattr(run.Run, "play", play)


def rows(workdir):
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def same_rows(workdir):
  return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows(workdir)]


def weights(workdir):
  return (workdir / "policy" / "final" / "model.safetensors").read_bytes()


def trained(folder, start, monkeypatch, method, *options):
  """The rows of a run of that method, which ends in the same bits where it was stopped after its second checkpoint."""
  options = ["--stages=train", f"--config.start={start}", *options]
  assert cli(folder / "whole", method, *options) == 0
  real, saves = Checkpoints.save, []

  def save(self, step, *arguments, **options):
    real(self, step, *arguments, **options)
    saves.append(step)
    if len(saves) == 2:
      raise RuntimeError("the machine is needed elsewhere")

  with monkeypatch.context() as patch:
    patch.setattr(Checkpoints, "save", save)
    assert cli(folder / "broken", method, *options) != 0
  assert cli(folder / "broken", method, *options) == 0
  assert weights(folder / "broken") == weights(folder / "whole")
  assert same_rows(folder / "broken") == same_rows(folder / "whole")
  found = rows(folder / "whole")
  assert len(found) == 4 and [row["compilations"] for row in found] == [0] * 4  # all of it before the first iteration
  return found


@pytest.mark.slow
def test_istar_trains_its_reward_model_along(tmp_path, start, outcomes, monkeypatch):
  found = trained(tmp_path, start, monkeypatch, "istar")
  # four groups of two successes and two failures
  assert all(row["reward_pairs"] == 16 and row["reward_grad_norm"] > 0 for row in found)
  # the model starts as the policy: every pair is a tie, log 2, and no step is better than another
  assert found[0]["reward_loss"] == pytest.approx(0.693147) and found[0]["regrade_change"] == 0
  assert all(0 < abs(row["reward_loss"] - 0.693147) < 0.1 and row["regrade_change"] > 0.01 for row in found[1:])


@pytest.mark.slow
def test_spear_replays_its_successes(tmp_path, start, outcomes, monkeypatch):
  found = trained(tmp_path, start, monkeypatch, "spear")
  # three of four groups stay, with two successes each: 10 (1 - 1/2) = 5 is above the threshold
  assert [row["episodes_kept"] for row in found] == [12] * 4 and [row["replay_admitted"] for row in found] == [6] * 4
  # those of earlier iterations are worth 10 - 5 and not too old; at most as many as there are fresh samples
  assert [row["replay_samples"] for row in found] == [0, 6, 12, 12]
  ramp = [row["replay_coef"] for row in found]
  assert ramp[0] == 0 and ramp == sorted(ramp) and ramp[-1] == pytest.approx((1 - math.cos(0.03 * math.pi)) / 2)


@pytest.mark.slow
def test_grsd_weighs_turns_by_the_contrast_of_their_group(tmp_path, start, outcomes, monkeypatch):
  found = trained(tmp_path, start, monkeypatch, "grsd")
  assert any(row["opd_active_ratio"] > 0 for row in found)
  for row in found:
    # coef 0.5, g within 0.2: no advantage changes by more than a tenth
    assert (0 < row["regrade_change"] <= 0.1 + 1e-6) == (row["opd_active_ratio"] > 0)
