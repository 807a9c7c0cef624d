"""The sweeps of configs/sweeps.py: what they name can be run, on rooms of training, with equal samples."""

import pytest

from configs import sweeps
from seed_jax import compare, methods
from seed_jax.run import Run


@pytest.fixture(autouse=True)
def table(monkeypatch):
  monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))


@pytest.mark.parametrize("sweep", [*sweeps.SWEEPS, "all"])
def test_every_sweep_can_be_run_and_leaves_the_test_panel_alone(tmp_path, sweep):
  own = Run(sweeps.get_config(sweep), tmp_path / "w", plain=True)
  arms, _ = compare.plan(own)
  assert own.config.train.panel.split == "valid" and arms[0].name == "seed_without_opd"
  for arm in arms:
    c = compare.arm_run(own, arm, 0).config.train
    assert c.tasks_per_iteration * c.group_size == 64, arm.name
    if arm.method.startswith("seed_") and arm.method not in ("seed_without_opd", "seed_constant_gate"):
      assert c.loss.opd_coef >= 0.1 and c.loss.opd_beta == 5.0, arm.name
    if arm.name in ("sdar", "opsd", "grpo_opsd"):
      assert c.loss.opd_coef == 0.1, arm.name
    if arm.method == "skill_sd":  # its own recipe's
      assert c.loss.opd_coef == 0.001


def test_the_sweeps_hold_the_values_that_their_names_say(tmp_path):
  own = Run(sweeps.get_config(), tmp_path / "w", plain=True)
  config = {arm.name: compare.arm_run(own, arm, 0).config for arm in compare.read_arms(own.config)}
  assert [config[f"lambda {x}"].train.loss.opd_coef for x in (0.003, 0.01, 0.03, 0.1)] == [0.003, 0.01, 0.03, 0.1]
  assert [config[f"beta {x}"].train.loss.opd_beta for x in (0.0, 1.0, 20.0)] == [0.0, 1.0, 20.0]
  assert config["N 2, no OPD"].method == "seed_without_opd" and config["N 2, no OPD"].train.group_size == 2
  assert config["ties, centred"].method == "seed_centred_gate_on_ties" and config["seed"].train.loss.opd_coef == 0.1
  with pytest.raises(ValueError, match="sweep 'bta' is unknown; choose one of gate, lambda"):
    sweeps.get_config("bta")
