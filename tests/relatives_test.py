"""SEED's relatives: 200 random cases against loops, hand numbers, gradients, masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from loss_references import close

from benchmarks.oracle_cases import case, cases, padded
from seed_jax import losses, relatives

AUXILIARY = {"skill_sd": losses.skill_sd_loss, "opsd": losses.opsd_loss, "constant": losses.opd_loss}


def auxiliary_by_hand(name, new, skill, old):
  d = new - skill
  if name == "skill_sd":
    return np.exp(min(new - old, 10.0)) * (np.exp(min(-d, 20.0)) - 1 + d)
  return -(skill - new) * new if name == "opsd" else 0.5 * (skill - new)


@pytest.mark.parametrize("name", sorted(AUXILIARY))
def test_auxiliary_losses_on_200_cases(name):
  @jax.jit
  def loss(c):
    return losses.seed_loss(
      logprobs=c["logprobs"],
      old_logprobs=c["old"],
      advantages=jnp.zeros_like(c["advantages"]),
      skill_logprobs=c["skill"],
      mask=c["mask"],
      skill_mask=c["skilled"],
      opd_coef=1.0,
      opd_beta=0.0,
      token_loss=AUXILIARY[name],
    )

  for number, c in enumerate(cases()):
    kept = np.argwhere(c["mask"] * c["skilled"][:, None] > 0)
    values = [auxiliary_by_hand(name, *(float(c[k][i, t]) for k in ("logprobs", "skill", "old"))) for i, t in kept]
    arrays = {k: v for k, v in padded(c).items() if isinstance(v, np.ndarray)}
    close(loss(arrays)[0], np.mean(values) if len(kept) else 0.0, case=number)


def test_skill_sd_by_hand_and_through_both_factors():
  new, skill, old = np.array([[-1.0, -1.0]]), np.array([[-0.5, -1.0]]), np.array([[-1.2, -3.0]])
  pair = dict(skill_logprobs=skill, old_logprobs=old)
  # d = -.5: rho = e^.2 = 1.221403, e^.5 - 1 - .5 = .148721; d = 0: 0
  np.testing.assert_allclose(losses.skill_sd_loss(logprobs=new, **pair), [[0.181648, 0]], atol=1e-6)
  # rho (e^-d - 1 + d) + rho (1 - e^-d) = .181648 + 1.221403 * (1 - 1.648721) = -.610701 = rho * d; the second: 0
  slope = jax.grad(lambda x: losses.skill_sd_loss(logprobs=x, **pair).sum())(jnp.asarray(new))
  np.testing.assert_allclose(slope, [[-0.610701, 0]], atol=1e-6)


def test_a_centred_gate_has_the_same_expectation_and_less_variance():
  # one context, all of its vocabulary: tokens weighed by the policy's own probabilities
  rng = np.random.default_rng(0)
  logits, skill_logits = jnp.asarray(rng.normal(size=9)), jnp.asarray(rng.normal(size=9))
  skill, tokens = jax.nn.log_softmax(skill_logits), jnp.arange(9)

  def gradients(loss):  # of every token's loss, in the logits
    def one(z, v):
      return loss(logprobs=jax.nn.log_softmax(z)[v][None], skill_logprobs=skill[v][None], old_logprobs=None, beta=5.0)[
        0
      ]

    return jax.vmap(jax.grad(one), (None, 0))(logits, tokens)

  policy = jax.nn.softmax(logits)
  plain, centred = gradients(losses.opd_loss), gradients(losses.centred_opd_loss)
  mean, mean_centred = policy @ plain, policy @ centred
  np.testing.assert_allclose(mean, mean_centred, atol=1e-6)
  spread = lambda g, m: float(policy @ jnp.sum((g - m) ** 2, axis=1))  # noqa: E731
  assert spread(centred, mean) < spread(plain, mean)
  slope = jax.grad(lambda x: losses.centred_opd_loss(logprobs=x, skill_logprobs=jnp.zeros(1)).sum())
  assert slope(jnp.array([-1.0]))[0] < 0 < slope(jnp.array([1.0]))[0]  # up where the skill agrees, down where not


def test_skill_sd_caps():
  new = jnp.array([[-50.0, -1.0]])
  args = dict(skill_logprobs=np.array([[0.0, -1.5]]), old_logprobs=np.array([[-50.0, -30.0]]))
  value, slope = jax.value_and_grad(lambda x: losses.skill_sd_loss(logprobs=x, **args).sum())(new)
  # First: d = -50, rho 1: e^20 - 51, and its gradient with the exponent cut: (e^20 - 51) + 1. Second: log rho cut at
  # 10, d = .5: e^10 (e^-.5 - 1 + .5); its gradient through the divergence alone: e^10 (1 - e^-.5).
  np.testing.assert_allclose(value, np.exp(20) - 51 + np.exp(10) * (np.exp(-0.5) - 0.5), rtol=1e-6)
  np.testing.assert_allclose(slope, [[np.exp(20) - 50, np.exp(10) * (1 - np.exp(-0.5))]], rtol=1e-6)


def test_gradients():
  c = case(0)
  for loss in (losses.skill_sd_loss,):
    function = functools.partial(loss, skill_logprobs=c["skill"], old_logprobs=c["old"])
    check_grads(lambda x, f=function: f(logprobs=x), (c["logprobs"],), 1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-3)
  slope = jax.grad(lambda x: losses.opsd_loss(logprobs=x, skill_logprobs=c["skill"]).sum())(c["logprobs"])
  np.testing.assert_allclose(slope, c["logprobs"] - c["skill"], atol=1e-6)  # falls where the skill context falls
  constants = jax.grad(
    lambda skill, old: losses.skill_sd_loss(logprobs=c["logprobs"], skill_logprobs=skill, old_logprobs=old).sum(),
    (0, 1),
  )(c["skill"], c["old"])
  assert not any(g.any() for g in constants)


# --- advantage transforms ---------------------------------------------------------------------------------------------


def inputs(c):
  return dict(
    advantages=c["advantages"],
    old_logprobs=c["old"],
    skill_logprobs=c["skill"],
    skill_mask=c["mask"] * c["skilled"][:, None],
  )


def test_rlsd_and_opid_on_200_cases():
  rlsd, opid = jax.jit(losses.rlsd_advantages), jax.jit(losses.opid_advantages)
  for number, c in enumerate(cases()):
    small, rows, tokens = inputs(c), *c["mask"].shape
    expected = np.zeros((2, rows, tokens))
    for i in range(rows):
      a = float(c["advantages"][i])
      for t in range(tokens):
        gap = float(c["skill"][i, t]) - float(c["old"][i, t])
        skilled = small["skill_mask"][i, t] > 0
        weight = min(max(np.exp(np.sign(a) * gap), 0.8), 1.2)
        expected[:, i, t] = (a * (0.7 + 0.3 * weight), a + 0.002 * gap) if skilled else (a, a)
    args = inputs(padded(c))
    close(rlsd(**args, coef=0.3)[:rows, :tokens], expected[0], case=number)
    close(opid(**args, coef=0.002)[:rows, :tokens], expected[1], case=number)


def test_rlsd_by_hand():
  gap = np.log([[1.1, 2.0, 0.5, 9.0]])
  args = dict(old_logprobs=np.zeros((1, 4)), skill_logprobs=gap, skill_mask=np.array([[1, 1, 1, 0]]))
  up = losses.rlsd_advantages(advantages=np.array([2.0]), **args)
  np.testing.assert_allclose(up, [[2 * 1.05, 2 * 1.1, 2 * 0.9, 2]], rtol=1e-6)  # half of 1.1, 1.2, 0.8
  down = losses.rlsd_advantages(advantages=np.array([-2.0]), **args)
  np.testing.assert_allclose(down, [[-2 * (0.5 + 0.5 / 1.1), -2 * 0.9, -2 * 1.1, -2]], rtol=1e-6)
  np.testing.assert_array_equal(
    losses.rlsd_advantages(advantages=np.array([2.0]), **args, coef=0.0), np.full((1, 4), 2.0)
  )
  traced = jax.jit(lambda mix: losses.rlsd_advantages(advantages=np.array([2.0]), **args, coef=mix))
  np.testing.assert_allclose(traced(relatives.linear_decay(50, start=1.0, iterations=100)), up, rtol=1e-6)


def test_linear_decay():
  values = [float(relatives.linear_decay(i, start=0.5, iterations=100)) for i in (0, 25, 100, 150)]
  np.testing.assert_allclose(values, [0.5, 0.375, 0.0, 0.0])
  assert relatives.linear_decay(7, start=0.5, iterations=0) == 0.5


def turns_of(c, rng):
  """Turn numbers over all rows, [B, T]: each row falls into up to three turns."""
  cuts = np.sort(rng.integers(0, 3, c["mask"].shape), axis=1)
  return cuts + 3 * np.arange(len(cuts))[:, None], np.broadcast_to(c["groups"][:, None], cuts.shape)


def test_grsd_on_200_cases():
  for number, c in enumerate(cases()):
    rows, tokens = c["mask"].shape
    turn_ids, group_ids = turns_of(c, np.random.default_rng(number))
    skilled = (c["mask"] * c["skilled"][:, None]) > 0
    q = {}
    for turn in np.unique(turn_ids[skilled]):
      where = np.argwhere((turn_ids == turn) & skilled)
      gap = np.mean([float(c["skill"][i, t]) - float(c["old"][i, t]) for i, t in where])
      q[turn] = np.expm1(np.sign(c["advantages"][where[0][0]]) * gap)
    expected = np.repeat(c["advantages"][:, None].astype(np.float64), tokens, 1)
    for i, t in np.argwhere(skilled):
      group = [abs(x) for turn, x in q.items() if c["groups"][turn // 3] == c["groups"][i]]
      g = np.clip(q[turn_ids[i, t]] / np.mean(group), -0.2, 0.2)
      expected[i, t] *= max(0.1, 1 + 0.5 * g)
    big = padded(c)
    ids = padded(dict(groups=turn_ids)), padded(dict(groups=group_ids))
    out = losses.grsd_advantages(
      **inputs(big), turn_ids=ids[0]["groups"], group_ids=ids[1]["groups"], num_turns=36, num_groups=4
    )
    close(out[:rows, :tokens], expected, tolerance=5e-6, case=number)  # the clip's edge divides by a small mean


def test_transforms_look_at_nothing_without_a_skill():
  c = case(0)
  args = inputs(c) | dict(skill_mask=np.zeros_like(c["mask"]), skill_logprobs=np.full_like(c["skill"], np.nan))
  turns = dict(turn_ids=np.zeros(c["mask"].shape, int), group_ids=np.zeros(c["mask"].shape, int))
  same = np.broadcast_to(c["advantages"][:, None], c["mask"].shape)
  np.testing.assert_array_equal(losses.rlsd_advantages(**args), same)
  np.testing.assert_array_equal(losses.opid_advantages(**args), same)
  np.testing.assert_array_equal(losses.grsd_advantages(**args, **turns, num_turns=1, num_groups=1), same)
  slope = jax.grad(lambda old: losses.opid_advantages(**(inputs(c) | dict(old_logprobs=old))).sum())(c["old"])
  assert not slope.any()  # advantages are constants
