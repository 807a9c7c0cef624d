"""The joint objective: right values of independent implementations, a plain loop, metrics, micro-batches, sharding."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from loss_cases import random_batch

from seed_jax import losses, methods

FIXED = hypothesis.settings(derandomize=True, deadline=None, max_examples=12, database=None)
LOG = np.log


def by_hand(b, opd_coef=0.01, beta=5.0, kl_coef=0.01, entropy_coef=0.0, low=0.2, high=0.2, dual=3.0):
  """SEED's objective, one token at a time in float64."""
  pg = kl = entropy = opd = 0.0
  for i, t in zip(*np.nonzero(b["mask"]), strict=True):
    new, a = float(b["logprobs"][i, t]), float(b["advantages"][i])
    r = np.exp(new - float(b["old_logprobs"][i, t]))
    term = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
    pg += min(term, -a * dual) if a < 0 else term
    d = float(b["ref_logprobs"][i, t]) - new
    kl += min(np.exp(d) - d - 1, 10.0)
    entropy += float(b["entropy"][i, t])
    gap = float(b["skill_logprobs"][i, t]) - new
    opd += float(b["skill_mask"][i]) * gap / (1 + np.exp(-beta * gap))
  n, m = b["mask"].sum(), (b["mask"] * b["skill_mask"][:, None]).sum()
  return pg / n + kl_coef * kl / n - entropy_coef * entropy / n + opd_coef * opd / m


# --- right values of independent implementations --------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_case():
  """The case on which TRL 1.16.0, tunix 0.1.7, verl 0.9.1 and rlax 0.1.9 agree: 8 rows, 12 tokens, row 3 empty, two
  groups of 4."""
  generator = np.random.default_rng(0)
  shape = (8, 12)
  single = lambda x: x.astype(np.float32)  # noqa: E731
  logprobs = single(-generator.exponential(1.0, shape))
  old = single(logprobs + 0.3 * generator.standard_normal(shape))
  ref = single(logprobs + 0.2 * generator.standard_normal(shape))
  mask = single(np.arange(12)[None, :] < generator.integers(1, 13, (8, 1)))
  mask[3] = 0.0
  return dict(logprobs=logprobs, old_logprobs=old, ref_logprobs=ref, mask=mask, rewards=single(generator.random(8)))


def shared_advantages(case):
  # These values were made with TRL's eps of 1e-4 (ours is 1e-6, as verl's and tunix's).
  return losses.group_advantages(case["rewards"], np.repeat([0, 1], 4), num_groups=2, eps=1e-4)


def test_shared_case_token_mean(shared_case):
  args = {k: shared_case[k] for k in ("logprobs", "old_logprobs", "mask")}
  args |= dict(advantages=shared_advantages(shared_case), dual_clip=None)
  loss, _ = losses.grpo_loss(**args)
  np.testing.assert_allclose(loss, 0.0771931, atol=1e-7)
  with_kl, metrics = losses.grpo_loss(**args, ref_logprobs=shared_case["ref_logprobs"], kl_coef=0.04)
  np.testing.assert_allclose(with_kl, 0.0782341, atol=1e-7)
  np.testing.assert_allclose(metrics["pg_loss"], 0.0771931, atol=1e-7)


def test_shared_case_other_reductions(shared_case):
  case = shared_case
  per_token = losses.clipped_surrogate(
    logprobs=case["logprobs"], old_logprobs=case["old_logprobs"], advantages=shared_advantages(case), dual_clip=None
  )
  row_sums, lengths = (per_token * case["mask"]).sum(1), case["mask"].sum(1)
  np.testing.assert_allclose(
    row_sums.sum() / 7, 0.5844626, atol=1e-6
  )  # token sums, mean of the 7 rows that are not empty
  np.testing.assert_allclose((row_sums / np.maximum(lengths, 1)).mean(), -0.127879, atol=1e-6)  # TRL: over all 8 rows
  np.testing.assert_allclose((row_sums / np.maximum(lengths, 1)).sum() / 7, -0.146147, atol=1e-6)  # tunix and verl


def test_shared_case_aggregations(shared_case):
  args = {k: shared_case[k] for k in ("logprobs", "old_logprobs", "mask")}
  args |= dict(advantages=shared_advantages(shared_case), dual_clip=None)
  for aggregation, value in (
    ("token_mean", 0.0771931),
    ("sequence_mean_token_sum", 0.5844626),
    ("sequence_mean_token_mean", -0.146147),
    ("sequence_mean_token_sum_norm", 0.5844626 / 12),  # verl and tunix: over the 12 tokens of a row
  ):
    loss, _ = losses.grpo_loss(**args, aggregation=aggregation, aggregation_length=12)
    np.testing.assert_allclose(loss, value, atol=1e-6, err_msg=aggregation)


def test_shared_case_kl_and_opd(shared_case):
  case = shared_case
  for estimator, total in (("k1", 2.43332), ("k2", 2.47174), ("k3", 2.52984)):
    kl = losses.kl_penalty(logprobs=case["logprobs"], ref_logprobs=case["ref_logprobs"], estimator=estimator)
    np.testing.assert_allclose(kl.sum(), total, atol=2e-5)

  def opd(x):
    return losses.masked_mean(losses.opd_loss(logprobs=x, skill_logprobs=case["old_logprobs"], beta=1.0), case["mask"])

  value, gradient = jax.value_and_grad(opd)(case["logprobs"])
  np.testing.assert_allclose(value, 0.00712675, atol=1e-7)
  np.testing.assert_allclose(gradient.sum(), -0.4934196, atol=1e-6)


# --- the joint objective --------------------------------------------------------------------------------------------


@FIXED
@hypothesis.given(
  seed=st.integers(0, 2**31), shape=st.sampled_from([(3, 1), (4, 6)]), beta=st.sampled_from([0.0, 1.0, 5.0, 20.0])
)
def test_seed_loss_equals_a_plain_loop(seed, shape, beta):
  b = random_batch(*shape, seed=seed)
  b["advantages"] *= 3
  b["old_logprobs"] = b["logprobs"] + 3 * (b["old_logprobs"] - b["logprobs"])  # far enough for every clip
  loss, _ = losses.seed_loss(**b, opd_coef=0.3, opd_beta=beta, kl_coef=0.2, entropy_coef=0.1)
  expected = by_hand(b, opd_coef=0.3, beta=beta, kl_coef=0.2, entropy_coef=0.1)
  np.testing.assert_allclose(loss, expected, rtol=2e-5, atol=2e-6)


def test_metrics_by_hand():
  # Row 0 has A = 1, row 1 has A = -1; the last token is masked.
  r = np.array([[1.5, 1.3, 1.25, 4.0], [1.5, 0.5, 4.0, 9.0]])
  gap = np.array([[0.2, -0.2, 0.0, 0.2], [0.0, 0.0, 0.0, 0.0]])
  logprobs = np.full((2, 4), -1.0)
  loss, m = losses.seed_loss(
    logprobs=logprobs,
    old_logprobs=logprobs - LOG(r),
    advantages=np.array([1.0, -1.0]),
    skill_logprobs=logprobs + gap,
    mask=np.array([[1, 1, 1, 0], [1, 1, 1, 0]]),
    skill_mask=np.array([1, 0]),
    entropy=np.full((2, 4), 2.0),
  )
  # surrogate: -1.2 three times, then 1.5 + 0.8 + 3 (dual clip of 4): 1.7 / 6
  np.testing.assert_allclose(m["pg_loss"], 1.7 / 6, rtol=1e-5)
  np.testing.assert_allclose(m["ratio_mean"], 10.05 / 6, rtol=1e-6)
  np.testing.assert_allclose(m["clip_high_fraction"], 3 / 6, rtol=1e-6)
  np.testing.assert_allclose(m["clip_low_fraction"], 1 / 6, rtol=1e-6)
  np.testing.assert_allclose(m["dual_clip_fraction"], 1 / 6, rtol=1e-6)
  # gates sigmoid(1), sigmoid(-1), .5 = .731059, .268941, .5: mean .5, std .231059 * sqrt(2 / 3) = .188659
  np.testing.assert_allclose(m["gate_mean"], 0.5, atol=1e-6)
  np.testing.assert_allclose(m["gate_std"], 0.188659, atol=1e-5)
  np.testing.assert_allclose(m["gate_above_half"], 1 / 3, rtol=1e-6)
  np.testing.assert_allclose(m["gap_mean"], 0.0, atol=1e-7)
  np.testing.assert_allclose(m["opd_active_ratio"], 0.5, rtol=1e-6)
  np.testing.assert_allclose(m["opd_loss"], (0.2 * 0.731059 - 0.2 * 0.268941) / 3, atol=1e-6)
  np.testing.assert_allclose(m["entropy"], 2.0, rtol=1e-6)
  # old_kl: mean of r - 1 - log r over the six tokens
  np.testing.assert_allclose(m["old_kl"], (r - 1 - LOG(r))[:, :3].mean(), rtol=1e-5)
  np.testing.assert_allclose(loss, m["loss"], rtol=0)
  assert m["kl"] == 0 and "gate_square" not in m


def test_three_policies_by_hand():
  # The policy being trained, the one at the start of the updates, the one that sampled; the last token is masked.
  new, old, sampler = (LOG(np.array([[*p, 0.9]])) for p in ([0.6, 0.2, 0.3], [0.5, 0.4, 0.3], [0.5, 0.1, 0.4]))
  common = dict(
    logprobs=new,
    old_logprobs=old,
    advantages=np.ones((1, 4)),
    mask=np.array([[1, 1, 1, 0]]),
    sampler_logprobs=sampler + np.array([[0, 0, 0, 5.0]]),
  )
  loss, m = losses.grpo_loss(**common, tis_cap=2.0)
  # ratios new / old: 1.2, 0.5, 1 (none is clipped); weights old / sampler: 1, min(4, 2), 0.75
  np.testing.assert_allclose(loss, -(1.2 * 1 + 0.5 * 2 + 1 * 0.75) / 3, rtol=1e-5)
  np.testing.assert_allclose(m["ratio_mean"], 2.7 / 3, rtol=1e-5)
  np.testing.assert_allclose(m["tis_weight_mean"], 3.75 / 3, rtol=1e-5)
  np.testing.assert_allclose(m["tis_capped_fraction"], 1 / 3, rtol=1e-5)
  np.testing.assert_allclose(m["mismatch_mean"], (LOG(4) + LOG(4 / 3)) / 3, rtol=1e-5)
  np.testing.assert_allclose(m["mismatch_max"], LOG(4), rtol=1e-5)
  # k3 of KL(sampler || old) with r = old / sampler: r - 1 - log r
  np.testing.assert_allclose(m["mismatch_kl"], (0 + (3 - LOG(4)) + (-0.25 - LOG(0.75))) / 3, rtol=1e-5)
  plain, measured = losses.grpo_loss(**common)
  np.testing.assert_allclose(plain, -2.7 / 3, rtol=1e-5)
  assert "tis_weight_mean" not in measured and measured["mismatch_max"] == m["mismatch_max"]
  with pytest.raises(ValueError, match=r"tis_cap=2.0 needs sampler_logprobs"):
    losses.grpo_loss(**{k: v for k, v in common.items() if k != "sampler_logprobs"}, tis_cap=2.0)


def test_gate_std_keeps_its_digits_where_the_gate_hardly_moves():
  rng = np.random.default_rng(1)
  logprobs = np.full((4, 50), -1.0, np.float32)
  skill = (logprobs + 1e-3 * rng.standard_normal((4, 50))).astype(np.float32)
  b = dict(
    logprobs=logprobs, old_logprobs=logprobs, advantages=np.ones(4), mask=np.ones((4, 50)), skill_mask=np.ones(4)
  )
  _, m = losses.seed_loss(**b, skill_logprobs=skill)
  exact = (1 / (1 + np.exp(-5.0 * (skill.astype(np.float64) - logprobs)))).std()  # about 1.2e-3
  np.testing.assert_allclose(m["gate_std"], exact, rtol=1e-4)


# Pieces of one row: one micro-batch is fully masked, one has no skill.
@pytest.mark.parametrize("pieces", [[1] * 6, [3, 3], [1, 1, 4]])
def test_micro_batches_add_up(pieces):
  b = random_batch(seed=7)
  b["sampler_logprobs"] = b["old_logprobs"] + np.linspace(-1, 2, 30, dtype=np.float32).reshape(6, 5)

  def run(batch, denominators=None):
    def loss(x):
      return losses.seed_loss(**(batch | dict(logprobs=x)), entropy_coef=0.1, tis_cap=1.5, denominators=denominators)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(batch["logprobs"])
    return value, metrics, gradient

  value, metrics, gradient = run(b)
  starts = np.cumsum([0, *pieces])
  micro = [{k: v[i:j] for k, v in b.items()} for i, j in zip(starts[:-1], starts[1:], strict=True)]
  counts = [losses.token_counts(mask=m["mask"], skill_mask=m["skill_mask"]) for m in micro]
  denominators = jax.tree.map(lambda *c: sum(c), *counts)
  parts = [run(m, denominators) for m in micro]
  np.testing.assert_allclose(sum(p[0] for p in parts), value, atol=1e-6)
  np.testing.assert_allclose(np.concatenate([p[2] for p in parts]), gradient, atol=1e-6)
  total = losses.finish_metrics(functools.reduce(losses.add_metrics, [p[1] for p in parts]))
  assert total.keys() == metrics.keys()
  for name in metrics:
    np.testing.assert_allclose(total[name], metrics[name], atol=1e-6, err_msg=name)


def test_terms_add_up():
  b = random_batch(seed=5)
  pair = ("logprobs", "skill_logprobs", "mask", "skill_mask")
  rl = [k for k in b if k not in ("skill_logprobs", "skill_mask")]
  for terms, names in ((losses.grpo_terms, rl), (losses.opd_terms, pair)):
    whole, *halves = (terms(**{k: b[k][rows] for k in names}) for rows in (slice(0, 6), slice(0, 2), slice(2, 6)))
    jax.tree.map(lambda w, x, y: np.testing.assert_allclose(x + y, w, atol=1e-5), whole, *halves)
  counts = losses.token_counts(mask=b["mask"], skill_mask=b["skill_mask"])
  assert counts["tokens"] == b["mask"].sum() and counts["skill_tokens"] == (b["mask"] * b["skill_mask"][:, None]).sum()
  assert losses.token_counts(mask=b["mask"])["skill_tokens"] == 0


def test_another_token_loss_fits():
  b = random_batch()
  plain = losses.seed_loss(
    **b, opd_coef=1.0, token_loss=lambda *, logprobs, skill_logprobs, old_logprobs, beta: losses.nll(logprobs=logprobs)
  )
  active = b["mask"] * b["skill_mask"][:, None]
  np.testing.assert_allclose(plain[1]["opd_loss"], -(b["logprobs"] * active).sum() / active.sum(), rtol=1e-5)


def test_a_token_loss_gives_one_value_a_token():
  """Where B == T a row's value would pass for a token's."""
  square = random_batch(5, 5) | dict(skill_mask=np.ones(5))
  by_row = lambda *, logprobs, **_: -logprobs.sum(1)  # noqa: E731
  scalar = lambda *, logprobs, **_: -logprobs.mean()  # noqa: E731
  for wrong, shape in ((by_row, "(5,)"), (scalar, "()"), (lambda *, logprobs, **_: -logprobs[:, :1], "(5, 1)")):
    with pytest.raises(ValueError) as raised:
      losses.seed_loss(**square, token_loss=wrong)
    assert f"gave shape {shape} for logprobs of shape (5, 5); it must give one value a token" in str(raised.value)
  with pytest.raises(ValueError, match="the auxiliary loss mean gave shape"):

    def mean(*, logprobs, **_):
      return -logprobs.mean()

    jax.jit(lambda x: losses.seed_loss(**square | dict(logprobs=x), token_loss=mean)[0])(square["logprobs"])


def test_a_transform_gives_one_advantage_a_token():
  square = random_batch(5, 5) | dict(skill_mask=np.ones(5))
  wrong = dataclasses.replace(methods.get("rlsd"), transform=lambda *, advantages, **_: advantages)
  with pytest.raises(ValueError, match=r"transform of method 'rlsd' gave shape \(5,\) for old_logprobs of shape"):
    wrong.loss(**square)


@pytest.mark.parametrize("name", ["seed", "seed_centred_gate", "grpo_opsd", "skill_sd", "rlsd", "opid", "opsd"])
def test_a_skill_that_rules_a_sampled_token_out_leaves_the_loss_finite(name):
  method, case = methods.get(name), random_batch() | dict(mask=np.ones((6, 5)))
  options = dict(opd_coef=0.5, transform_coef=0.5, opd_beta=methods.loss_settings(name).get("opd_beta", 5.0))
  loss = lambda x, skill: method.loss(**case | dict(logprobs=x, skill_logprobs=skill), **options)  # noqa: E731
  ruled_out, far = case["skill_logprobs"].copy(), case["skill_logprobs"].copy()
  ruled_out[0, 1] = -np.inf
  # the cut of log-ratios, below the policy that the skill context is compared with
  far[0, 1] = case["old_logprobs" if name in ("rlsd", "opid") else "logprobs"][0, 1] - 80
  call = jax.value_and_grad(loss, has_aux=True)
  (value, metrics), gradient = call(case["logprobs"], ruled_out)
  assert np.isfinite(value) and np.isfinite(gradient).all() and all(np.isfinite(x) for x in metrics.values())
  (expected, _), slope = call(case["logprobs"], far)
  np.testing.assert_array_equal(value, expected)
  np.testing.assert_array_equal(gradient, slope)


def test_sharded_rows_give_the_same():
  b = random_batch(rows=8)
  expected, metrics = losses.seed_loss(**b)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
  with jax.set_mesh(mesh):
    rows = {k: jax.device_put(v, jax.P("data", *[None] * (v.ndim - 1))) for k, v in b.items()}
    loss, sharded = jax.jit(lambda batch: losses.seed_loss(**batch))(rows)
  np.testing.assert_allclose(loss, expected, atol=1e-6)
  for name in metrics:
    np.testing.assert_allclose(sharded[name], metrics[name], atol=1e-6, err_msg=name)
