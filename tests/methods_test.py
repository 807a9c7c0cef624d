"""The table of methods and their one call."""

import dataclasses

import jax
import numpy as np
import pytest

from seed_jax import losses, methods
from seed_jax.score import Context
from seed_jax.update import Batch, LossConfig, MethodLoss


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
  with pytest.raises(ValueError, match="it trains a reward model, but no regrade uses what that says"):
    dataclasses.replace(methods.get("istar"), regrade=None)
  with pytest.raises(ValueError, match="nothing to learn from"):
    dataclasses.replace(seed, auxiliary=None, policy_gradient=False)


# --- the whole table --------------------------------------------------------------------------------------------------

LISTED = """vanilla skill_prompt grpo skill_grpo skill_grpo_star opsd grpo_opsd skill_sd rlsd sdar opid grsd gigpo istar
  seed seed_without_sft seed_without_opd seed_static_library rloo dr_grpo dapo spear gspo seed_constant_gate
  seed_skill_of_group seed_skill_of_other_task seed_success_only seed_failure_only seed_frozen_analyzer
  seed_external_analyzer seed_random_text seed_on_ties grpo_on_ties seed_centred_gate seed_frozen_teacher
  seed_centred_frozen_teacher"""


def test_every_listed_method_is_there_and_says_where_it_comes_from():
  assert set(methods.names()) == set(LISTED.split())
  for name in methods.names():
    method = methods.get(name)
    assert methods.CONTEXTS[method.context] and methods.SKILL_SOURCES[method.skill_source]
    assert ("arXiv:" in method.source) or ("SEED, " in method.source) or ("[R] " in method.source), name
    fields = {f.name for f in dataclasses.fields(LossConfig)}
    assert methods.loss_settings(name).keys() <= fields, name
    assert (
      methods.loss_settings(name).items()
      <= {k.removeprefix("train.loss."): v for k, v in methods.settings(name).items()}.items()
    )
  assert methods.loss_settings("grpo_opsd") == {"opd_beta": 0.0} and methods.settings("seed") == {}
  assert methods.loss_settings("dapo") == {"clip_high": 0.28, "kl_coef": 0.0}
  assert methods.settings("gigpo") == {"train.gamma": 0.95, "train.step_weight": 1.0}


def test_where_texts_are_put():
  get = methods.get
  assert [n for n in methods.names() if get(n).in_rollouts] == ["skill_grpo", "skill_grpo_star"]
  assert [n for n in methods.names() if get(n).in_evaluation] == ["skill_prompt", "skill_grpo_star"]
  assert [n for n in methods.names() if not get(n).trains] == ["vanilla", "skill_prompt"]
  for name in ("sdar", "rlsd", "opsd", "seed_static_library"):
    assert get(name).needs_skills and not get(name).needs_analysis
  for name in ("seed", "opid", "seed_skill_of_group", "seed_random_text", "seed_external_analyzer"):
    assert get(name).needs_skills and get(name).needs_analysis
  with pytest.raises(ValueError, match="'vanilla' is evaluated as it is"):
    get("vanilla").loss(**batch()[0])
  with pytest.raises(
    ValueError, match="skill_source 'library' does not fit context 'own_hindsight'; choose one of own"
  ):
    dataclasses.replace(get("seed"), skill_source="library")
  with pytest.raises(ValueError, match="a transform of advantages compares two contexts"):
    dataclasses.replace(get("grpo"), transform=losses.rlsd_advantages)


def micro_batch(common, skill, segments):
  rows, tokens = common["mask"].shape
  each, zero = np.ones((rows, tokens), int), np.zeros(())
  return Batch(
    ordinary=Context(tokens=each, positions=each, segment_ids=each * segments, index=each * np.arange(tokens)),
    skill=None,
    targets=None,
    mask=common["mask"],
    skill_mask=np.broadcast_to(skill["skill_mask"][:, None], common["mask"].shape),
    advantages=common["advantages"],
    sampler_logprobs=None,
    count=zero,
    skill_count=zero,
    old_logprobs=common["old_logprobs"],
    skill_logprobs=skill["skill_logprobs"],
    ref_logprobs=common["ref_logprobs"],
  )


def run_loss(name, common, skill):
  loss = MethodLoss(methods.get(name), LossConfig(**methods.loss_settings(name)))
  micro = micro_batch(common, skill, 1)  # a row is one sample
  counts = losses.token_counts(mask=micro.mask, skill_mask=micro.skill_mask)
  return lambda x: loss(x, None, micro, counts)


@pytest.mark.parametrize("name", [n for n in methods.names() if methods.get(n).trains])
def test_every_trained_method_gives_a_finite_loss_and_a_gradient(name):
  common, skill = batch()
  (loss, metrics), gradient = jax.value_and_grad(run_loss(name, common, skill), has_aux=True)(common["logprobs"])
  assert np.isfinite(loss) and np.isfinite(gradient).all() and np.any(gradient)
  assert ("gate_mean" in metrics) == methods.get(name).needs_skills


def by_hand(name, common, skill):
  """The loss of the method on the batch, a token at a time in float64: means over the tokens."""
  pg = kl = extra = skilled = 0.0
  for (i, t), new in np.ndenumerate(common["logprobs"].astype(np.float64)):
    old, ref, teacher = (
      float(x[i, t]) for x in (common["old_logprobs"], common["ref_logprobs"], skill["skill_logprobs"])
    )
    has, a = skill["skill_mask"][i] > 0, float(common["advantages"][i])
    if has and name == "rlsd":
      a *= 0.5 + 0.5 * np.clip(np.exp(np.sign(a) * (teacher - old)), 0.8, 1.2)
    if has and name == "opid":
      a += 0.001 * (teacher - old)
    r = np.exp(new - old)
    term = max(-a * r, -a * np.clip(r, 0.8, 1.28 if name == "dapo" else 1.2))
    pg += min(term, -3 * a) if a < 0 else term
    kl += min(np.exp(ref - new) - (ref - new) - 1, 10.0)
    d = new - teacher
    if has:
      skilled += 1
      gate = 1 / (1 + np.exp(5.0 * d))
      extra += {
        "skill_sd": 0.001 * np.exp(new - old) * (np.exp(-d) - 1 + d),
        "grpo_opsd": 0.01 * 0.5 * -d,
        "sdar": 0.01 * gate * -d,
        "opsd": 0.01 * gate * -d,
      }.get(name, 0.0)
  count = common["mask"].size
  return (pg / count if name != "opsd" else 0.0) + (0.01 * kl / count if name != "dapo" else 0.0) + extra / skilled


@pytest.mark.parametrize("name", ["skill_sd", "grpo_opsd", "sdar", "opsd", "rlsd", "opid", "dapo", "grpo"])
def test_named_methods_by_hand(name):
  common, skill = batch()
  loss, _ = run_loss(name, common, skill)(common["logprobs"])
  np.testing.assert_allclose(loss, by_hand(name, common, skill), rtol=1e-5, atol=1e-7)


def test_a_teacher_needs_a_name_and_a_skill_context():
  for base, teacher in (("seed", "ema"), ("grpo", "start")):
    with pytest.raises(ValueError, match=f"teacher '{teacher}' must be one of current, start, and without a skill"):
      dataclasses.replace(methods.get(base), teacher=teacher)
  assert methods.get("seed").teacher == "current" and methods.get("seed_frozen_teacher").teacher == "start"


# --- methods of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch):
  monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))


def test_a_registered_method_is_known_by_its_name(table):
  mine = dataclasses.replace(methods.get("seed"), name="mine", source="a test")
  assert methods.register(mine) is mine and methods.get("mine") is mine and methods.names()[-1] == "mine"
  other = methods.register(dataclasses.replace(mine, source="a better one"))  # a cell of a notebook, run again
  assert methods.get("mine") is other and methods.names().count("mine") == 1
  assert methods.settings("mine") == {}


def test_a_name_that_is_taken_is_refused_and_the_table_stays(table):
  for name in ("seed", "grpo"):
    with pytest.raises(ValueError, match=f"the name '{name}' is taken .*; give the method another one") as raised:
      methods.register(dataclasses.replace(methods.get("seed"), name=name, source="a test"))
    assert methods.get(name).source in str(raised.value) and "\n" not in str(raised.value)
    assert methods.get(name).source != "a test"


# --- the update's own call of it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in methods.names() if methods.get(n).trains])
def test_every_loss_compiles_with_its_settings_and_the_sampler(name):
  """Packed rows of two samples, masked tokens and entropy: finite, with a gradient exactly where a token counts."""
  common, skill = batch()
  common["mask"] = common["mask"].copy()
  common["mask"][1, 2] = common["mask"][3] = 0
  micro = micro_batch(common, skill, np.array([1, 1, 2]))
  micro = micro.replace(sampler_logprobs=common["old_logprobs"] + np.float32(0.1), transform_coef=np.float32(0.5))
  micro = micro.replace(advantages=np.broadcast_to(common["advantages"][:, None], (4, 3)), own_old=np.array(False))
  loss = MethodLoss(methods.get(name), LossConfig(**methods.loss_settings(name), entropy_coef=0.01, tis_cap=2.0))
  counts = losses.token_counts(mask=micro.mask, skill_mask=micro.skill_mask, sequence_ids=[[1, 1, 2]] * 4)
  call = jax.jit(jax.value_and_grad(lambda x, micro: loss(x, 0.1 * x**2, micro, counts), has_aux=True))
  (value, metrics), gradient = call(common["logprobs"], micro)
  assert np.isfinite(value) and np.isfinite(gradient).all()
  assert all(np.isfinite(x) for x in losses.finish_metrics(metrics).values())
  assert np.any(np.asarray(gradient)[common["mask"] > 0]) and not np.any(np.asarray(gradient)[common["mask"] == 0])
  assert metrics["mismatch_max"] > 0 and "tis_weight_mean" in metrics
  first = micro.replace(own_old=np.array(True), old_logprobs=np.full((4, 3), np.nan, np.float32))
  (value, metrics), gradient = call(common["logprobs"], first)  # of the first mini-batch old holds nothing
  assert np.isfinite(value) and np.isfinite(gradient).all() and metrics["old_kl"] == 0
