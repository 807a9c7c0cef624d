"""The table of methods and their one call."""

import dataclasses

import numpy as np
import pytest

from seed_jax import losses, methods


def batch():
  rng = np.random.default_rng(0)
  draw = lambda: -rng.exponential(1.0, (4, 3)).astype(np.float32)  # noqa: E731
  common = dict(logprobs=draw(), old_logprobs=draw(), advantages=np.array([1.0, -1, 0.5, 2]), mask=np.ones((4, 3)))
  common["ref_logprobs"] = draw()
  return common, dict(skill_logprobs=draw(), skill_mask=np.array([1, 1, 0, 1]))


def test_table():
  assert {"seed", "grpo", "seed_without_sft", "seed_without_opd"} <= set(methods.names())
  assert all(methods.get(name).name == name and methods.get(name).source for name in methods.names())
  seed = methods.get("seed")
  assert (seed.context, seed.auxiliary, seed.policy_gradient, seed.needs_sft) == (
    "own_hindsight",
    losses.opd_loss,
    True,
    True,
  )
  assert not methods.get("seed_without_sft").needs_sft and methods.get("seed_without_sft").needs_skills
  control = methods.get("seed_without_opd")
  assert control.needs_sft and not control.needs_skills and control.context == "none"
  assert not methods.get("grpo").needs_sft and not methods.get("grpo").needs_skills
  assert len({hash(methods.get(name)) for name in methods.names()}) == len(methods.names())  # static arguments of jit


def test_unknown_name_lists_the_names():
  with pytest.raises(ValueError, match="method 'sed' is unknown; choose one of seed, grpo, "):
    methods.get("sed")


def test_one_call_for_every_method():
  common, skill = batch()
  np.testing.assert_array_equal(methods.get("seed").loss(**common, **skill)[0], losses.seed_loss(**common, **skill)[0])
  for name in ("grpo", "seed_without_opd"):
    loss, metrics = methods.get(name).loss(**common, **skill)
    np.testing.assert_array_equal(loss, losses.grpo_loss(**common)[0])
    assert "gate_mean" not in metrics
  assert methods.get("seed").loss(**common, **skill)[0] != methods.get("grpo").loss(**common)[0]


def test_a_method_without_policy_gradient_keeps_its_other_terms():
  common, skill = batch()
  method = dataclasses.replace(methods.get("seed"), name="distillation_only", policy_gradient=False)
  loss, metrics = method.loss(**common, **skill, kl_coef=0.1, opd_coef=0.5)
  assert metrics["pg_loss"] == 0
  np.testing.assert_allclose(loss, 0.1 * metrics["kl"] + 0.5 * metrics["opd_loss"], rtol=1e-6)


def test_the_auxiliary_loss_is_the_methods_own():
  common, skill = batch()
  half = dataclasses.replace(methods.get("seed"), auxiliary=lambda *, logprobs, **others: 0.5 * logprobs)
  _, metrics = half.loss(**common, **skill)
  rows = skill["skill_mask"] == 1
  np.testing.assert_allclose(metrics["opd_loss"], 0.5 * common["logprobs"][rows].mean(), rtol=1e-6)


def test_methods_that_make_no_sense_are_refused():
  seed = methods.get("seed")
  with pytest.raises(ValueError, match="context 'hindsight' is unknown; choose one of none, own_hindsight"):
    dataclasses.replace(seed, context="hindsight")
  with pytest.raises(ValueError, match="an auxiliary loss compares two contexts"):
    dataclasses.replace(seed, context="none")
  with pytest.raises(ValueError, match="nothing to learn from"):
    dataclasses.replace(seed, auxiliary=None, policy_gradient=False)
