"""Losses per token: hand numbers, gradients, masks, precision, errors."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from loss_cases import random_batch

from seed_jax import losses

FIXED = hypothesis.settings(derandomize=True, deadline=None, max_examples=12, database=None)
LOG = np.log


# --- per token ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("ratio", "advantage", "dual_clip", "expected", "slope"),
  [
    (1.0, 2.0, 3.0, -2.0, -2.0),  # -2 * 1
    (1.1, 2.0, 3.0, -2.2, -2.2),  # inside the interval: -2 * 1.1
    (1.5, 2.0, 3.0, -2.4, 0.0),  # clipped above: -2 * 1.2
    (0.5, 2.0, 3.0, -1.0, -1.0),  # pessimistic side is never clipped: -2 * 0.5
    (0.5, -1.0, 3.0, 0.8, 0.0),  # clipped below: 1 * 0.8
    (2.0, -1.0, 3.0, 2.0, 2.0),  # max(2, 1.2), below the dual clip
    (5.0, -1.0, 3.0, 3.0, 0.0),  # dual clip: min(5, 3)
    (5.0, -1.0, None, 5.0, 5.0),  # dual clip off
    (5.0, 0.0, 3.0, 0.0, 0.0),  # no advantage, no loss
    (0.9, -1.0, 3.0, 0.9, 0.9),  # inside the interval
  ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, dual_clip, expected, slope):
  def loss(logprobs):
    return losses.clipped_surrogate(
      logprobs=logprobs,
      old_logprobs=jnp.full((1, 1), -1.0),
      advantages=jnp.full((1, 1), advantage),
      dual_clip=dual_clip,
    ).sum()

  value, gradient = jax.value_and_grad(loss)(jnp.full((1, 1), -1.0 + LOG(ratio)))
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  np.testing.assert_allclose(gradient, [[slope]], rtol=1e-6)  # d r / d logprob = r


def test_clipped_surrogate_asymmetric_interval_and_rows():
  # advantages one a row, B == T: row 0 has A = 1, row 1 has A = -1; r = [[1.25, 0.7], [1.25, 0.7]]
  logprobs = np.tile(LOG([1.25, 0.7]), (2, 1))
  out = losses.clipped_surrogate(
    logprobs=logprobs, old_logprobs=np.zeros((2, 2)), advantages=np.array([1.0, -1.0]), clip_low=0.1, clip_high=0.28
  )
  # row 0: -1.25 (below 1.28), -0.7; row 1: 1.25, max(0.7, 0.9) = 0.9
  np.testing.assert_allclose(out, [[-1.25, -0.7], [1.25, 0.9]], rtol=1e-6)


def test_kl_by_hand():
  logprobs, ref = np.array([[0.0, -1.0, -1.0]]), np.array([[LOG(2.0), -1.0, -1.5]])
  estimate = {k: losses.kl_penalty(logprobs=logprobs, ref_logprobs=ref, estimator=k) for k in losses.KL_ESTIMATORS}
  # d = log 2, 0, -0.5: k1 = -d; k2 = d^2 / 2 = .240227, 0, .125; k3 = 2 - .693147 - 1, 0, .606531 + .5 - 1
  np.testing.assert_allclose(estimate["k1"], [[-0.693147, 0, 0.5]], atol=1e-6)
  np.testing.assert_allclose(estimate["k2"], [[0.240227, 0, 0.125]], atol=1e-6)
  np.testing.assert_allclose(estimate["k3"], [[0.306853, 0, 0.106531]], atol=1e-6)


def test_k3_is_clamped_with_zero_gradient_and_keeps_small_gaps():
  far = jnp.array([[-200.0, -3.0, 40.0]])  # d = 200, 3 (e^3 - 4 = 16), -40: all past the clamp
  value, gradient = jax.value_and_grad(lambda x: losses.kl_penalty(logprobs=x, ref_logprobs=jnp.zeros((1, 3))).sum())(
    far
  )
  np.testing.assert_array_equal(value, 30.0)
  np.testing.assert_array_equal(gradient, np.zeros((1, 3)))
  # d = 1e-4: k3 = d^2 / 2 = 5e-9; exp(d) - d - 1 in float32 would give 0 or 1e-7
  tiny = losses.kl_penalty(logprobs=jnp.full((1, 1), -1e-4), ref_logprobs=jnp.zeros((1, 1)))
  np.testing.assert_allclose(tiny, [[5e-9]], rtol=1e-2)


def test_gate_and_opd_loss_by_hand():
  logprobs, skill = np.array([[-2.0, -2.0, -1.0]]), np.array([[-2.0, -1.8, -2.0]])
  gate = losses.opd_gate(logprobs=logprobs, skill_logprobs=skill)
  # beta 5: sigmoid(0) = .5, sigmoid(1) = .731059, sigmoid(-5) = .006693
  np.testing.assert_allclose(gate, [[0.5, 0.731059, 0.006693]], atol=1e-6)
  loss = losses.opd_loss(logprobs=logprobs, skill_logprobs=skill)
  np.testing.assert_allclose(loss, [[0.0, 0.146212, -0.006693]], atol=1e-6)  # gate * gap
  half = losses.opd_gate(logprobs=logprobs, skill_logprobs=skill, beta=0.0)
  np.testing.assert_array_equal(half, np.full((1, 3), 0.5))


def test_zero_shift_gives_half_the_nll_gradient():
  logprobs = jnp.array([[-0.3, -4.0]])
  np.testing.assert_array_equal(losses.opd_gate(logprobs=logprobs, skill_logprobs=logprobs), [[0.5, 0.5]])
  opd = jax.grad(lambda x: losses.opd_loss(logprobs=x, skill_logprobs=logprobs).sum())(logprobs)
  nll = jax.grad(lambda x: losses.nll(logprobs=x).sum())(logprobs)
  np.testing.assert_array_equal(opd, 0.5 * nll)
  np.testing.assert_array_equal(losses.nll(logprobs=logprobs), -logprobs)


def test_opd_gradient_is_minus_the_gate():
  b = random_batch()
  args = dict(skill_logprobs=b["skill_logprobs"], beta=5.0)
  m = b["mask"]

  def loss(x):
    return losses.masked_mean(losses.opd_loss(logprobs=x, **args), m)

  gate = 1 / (1 + np.exp(-5.0 * (b["skill_logprobs"].astype(np.float64) - b["logprobs"])))
  np.testing.assert_allclose(jax.grad(loss)(b["logprobs"]), -m * gate / m.sum(), atol=1e-7)


def test_truncated_importance_weights_by_hand():
  old, sampler = LOG([[0.5, 0.4, 0.9, 0.2]]), LOG([[0.5, 0.8, 0.3, 0.1]])
  weights = losses.truncated_importance_weights(old_logprobs=old, sampler_logprobs=sampler, cap=2.5)
  np.testing.assert_allclose(weights, [[1.0, 0.5, 2.5, 2.0]], rtol=1e-6)  # the third would be 3
  far = losses.truncated_importance_weights(old_logprobs=[[0.0, -500.0]], sampler_logprobs=[[-500.0, 0.0]], cap=4.0)
  np.testing.assert_array_equal(far, [[4.0, 0.0]])

  def total(old, sampler):
    return losses.truncated_importance_weights(old_logprobs=old, sampler_logprobs=sampler, cap=2.5).sum()

  for gradient in jax.grad(total, argnums=(0, 1))(jnp.asarray(old), jnp.asarray(sampler)):
    np.testing.assert_array_equal(gradient, 0.0)
  with pytest.raises(ValueError, match=r"tis_cap=0.0 must be above 0"):
    losses.truncated_importance_weights(old_logprobs=old, sampler_logprobs=sampler, cap=0.0)


def test_token_entropy_by_hand():
  logits = np.log(np.array([[0.5, 0.25, 0.25], [1.0, 1.0, 1.0]]))
  # .5 ln 2 + .5 ln 4 = 1.039721; ln 3 = 1.098612; a masked entry: ln 2
  np.testing.assert_allclose(losses.token_entropy(logits), [1.039721, 1.098612], atol=1e-6)
  masked = jnp.array([[0.0, 0.0, -jnp.inf]])
  value, gradient = jax.value_and_grad(lambda z: losses.token_entropy(z).sum())(masked)
  np.testing.assert_allclose(value, LOG(2.0), atol=1e-6)
  np.testing.assert_allclose(gradient, np.zeros((1, 3)), atol=1e-6)
  check_grads(losses.token_entropy, (jnp.array([[0.3, -1.0, 2.0]]),), order=1, modes=["rev"], atol=1e-3, rtol=1e-3)


def test_only_the_policys_logprobs_carry_gradient():
  b = random_batch()
  b.pop("entropy")

  def loss(old_logprobs, advantages, skill_logprobs, ref_logprobs):
    rest = dict(
      old_logprobs=old_logprobs, advantages=advantages, skill_logprobs=skill_logprobs, ref_logprobs=ref_logprobs
    )
    # The sampler is further off than old: the weights that truncate nothing would move with old.
    sampler = dict(sampler_logprobs=b["old_logprobs"] - 0.1, tis_cap=9.0)
    return losses.seed_loss(**(b | rest), **sampler, opd_coef=1.0, kl_coef=1.0)[0]

  constants = [jnp.asarray(b[k]) for k in ("old_logprobs", "advantages", "skill_logprobs", "ref_logprobs")]
  for gradient in jax.grad(loss, argnums=(0, 1, 2, 3))(*constants):
    np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
  same = jax.grad(lambda x: losses.opd_gate(logprobs=x, skill_logprobs=constants[2]).sum())(constants[0])
  np.testing.assert_array_equal(same, np.zeros(same.shape))
  # Handing in the same array as policy and old policy must leave the policy gradient, -A, alone.
  on_policy = jax.grad(
    lambda x: losses.clipped_surrogate(logprobs=x, old_logprobs=x, advantages=b["advantages"]).sum()
  )(jnp.asarray(b["logprobs"]))
  np.testing.assert_allclose(on_policy, -np.broadcast_to(b["advantages"][:, None], on_policy.shape), rtol=1e-6)


def test_gradients_numerically():
  b = random_batch(rows=3, tokens=4, seed=3)
  old, ref = b["old_logprobs"], b["ref_logprobs"]

  def terms(x):
    surrogate = losses.clipped_surrogate(logprobs=x, old_logprobs=old, advantages=b["advantages"])
    penalties = [losses.kl_penalty(logprobs=x, ref_logprobs=ref, estimator=k) for k in losses.KL_ESTIMATORS]
    return jnp.stack([surrogate, losses.nll(logprobs=x), *penalties])

  check_grads(terms, (jnp.asarray(b["logprobs"]),), order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-3)


# --- masks ----------------------------------------------------------------------------------------------------------


def test_masked_mean():
  values = jnp.array([[1.0, 2.0], [4.0, jnp.nan]])
  np.testing.assert_allclose(losses.masked_mean(values, np.array([[1, 1], [1, 0]])), 7 / 3, rtol=1e-6)
  np.testing.assert_allclose(losses.masked_mean(values, np.array([[True, False], [True, False]])), 2.5, rtol=1e-6)
  assert losses.masked_mean(values, np.zeros((2, 2))) == 0.0
  gradient = jax.grad(losses.masked_mean)(values, jnp.array([[1.0, 0], [1, 0]]))
  np.testing.assert_array_equal(gradient, [[0.5, 0], [0.5, 0]])
  assert not jax.grad(losses.masked_mean)(values, jnp.zeros((2, 2))).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_masked_positions_never_matter(poison):
  b = random_batch()
  b["sampler_logprobs"] = b["old_logprobs"] + 0.1
  arrays = ("logprobs", "old_logprobs", "skill_logprobs", "ref_logprobs", "sampler_logprobs", "entropy")
  bad = b | {k: np.where(b["mask"] > 0, b[k], poison).astype(np.float32) for k in arrays}
  bad["skill_logprobs"][2] = poison  # the row without a skill
  bad["advantages"] = np.where(np.arange(6) == 1, poison, b["advantages"]).astype(np.float32)

  def run(batch):
    def loss(x, h):
      return losses.seed_loss(**(batch | dict(logprobs=x, entropy=h)), entropy_coef=0.1, tis_cap=2.0)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(batch["logprobs"], batch["entropy"])

  (value, metrics), gradients = run(b)
  (bad_value, bad_metrics), bad_gradients = run(bad)
  assert value == bad_value and metrics == bad_metrics
  for gradient, bad_gradient in zip(gradients, bad_gradients, strict=True):
    np.testing.assert_array_equal(gradient, bad_gradient)
    np.testing.assert_array_equal(np.asarray(bad_gradient)[b["mask"] == 0], 0.0)


def test_empty_masks_give_zero():
  b = random_batch()
  b["mask"] = np.full_like(b["mask"], 0)
  (value, metrics), gradient = jax.value_and_grad(lambda x: losses.seed_loss(**(b | dict(logprobs=x))), has_aux=True)(
    jnp.full_like(b["logprobs"], -jnp.inf)
  )
  assert value == 0 and not gradient.any()
  assert set(map(float, metrics.values())) == {0.0}
  none = random_batch() | dict(skill_mask=np.zeros(6))
  loss, metrics = losses.seed_loss(**none)
  for key in ("skill_logprobs", "skill_mask"):
    none.pop(key)
  np.testing.assert_allclose(loss, losses.grpo_loss(**none)[0], rtol=1e-7)  # no skill, no OPD: RL as ever
  assert metrics["opd_loss"] == 0 and metrics["gate_std"] == 0 and metrics["opd_active_ratio"] == 0


def test_a_huge_ratio_gives_no_nan():
  for advantage in (1.0, -1.0, 0.0):
    value, gradient = jax.value_and_grad(
      lambda x, a=advantage: losses.clipped_surrogate(
        logprobs=x, old_logprobs=jnp.full((1, 1), -500.0), advantages=jnp.full((1, 1), a)
      ).sum()
    )(jnp.zeros((1, 1)))
    np.testing.assert_allclose(value, {1.0: -1.2, -1.0: 3.0, 0.0: 0.0}[advantage], rtol=1e-6)
    assert gradient == 0.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32, np.float64])
def test_float32_out_whatever_comes_in(dtype):
  b = {k: v if k in ("mask", "skill_mask") else v.astype(dtype) for k, v in random_batch().items()}
  pair = dict(logprobs=b["logprobs"], skill_logprobs=b["skill_logprobs"])
  outs = [
    losses.clipped_surrogate(logprobs=b["logprobs"], old_logprobs=b["old_logprobs"], advantages=b["advantages"]),
    losses.kl_penalty(logprobs=b["logprobs"], ref_logprobs=b["ref_logprobs"]),
    losses.opd_gate(**pair),
    losses.opd_loss(**pair),
    losses.nll(logprobs=b["logprobs"]),
    losses.token_entropy(b["logprobs"]),
    losses.masked_mean(b["logprobs"], b["mask"]),
    *jax.tree.leaves(losses.seed_loss(**b)),
  ]
  assert {out.dtype for out in outs} == {jnp.dtype("float32")}
  assert isinstance(outs[0], jax.Array) and outs[0].shape == (6, 5)


def test_errors_are_one_clear_line():
  one, two = np.zeros((2, 3)), np.zeros((2, 4))
  with pytest.raises(ValueError, match=r"shapes differ: logprobs \(2, 3\), old_logprobs \(2, 4\)"):
    losses.clipped_surrogate(logprobs=one, old_logprobs=two, advantages=one)
  with pytest.raises(ValueError, match=r"advantages has shape \(3,\); want \(2, 3\), or \(2,\)"):
    losses.clipped_surrogate(logprobs=one, old_logprobs=one, advantages=np.zeros(3))
  with pytest.raises(ValueError, match=r"dual_clip=1.0 must be above 1"):
    losses.clipped_surrogate(logprobs=one, old_logprobs=one, advantages=one, dual_clip=1.0)
  with pytest.raises(ValueError, match="estimator='k4' is unknown; choose one of k1, k2, k3"):
    losses.kl_penalty(logprobs=one, ref_logprobs=one, estimator="k4")
  with pytest.raises(ValueError, match=r"shapes differ: values \(2, 3\), mask \(2, 4\)"):
    losses.masked_mean(one, two)
  with pytest.raises(ValueError, match=r"entropy_coef=0.1 needs entropy"):
    losses.grpo_loss(logprobs=one, old_logprobs=one, advantages=one, mask=one, entropy_coef=0.1)
  with pytest.raises(TypeError):
    losses.opd_loss(one, one)  # keyword-only
