"""The three propositions of the SEED paper (appendix A), exact on a small softmax where every token can be enumerated.

C contexts, S skills a context, V tokens. The policy is logits = features @ tanh(theta), its tokens are all
enumerated: a "row" is a (context, skill) pair and its V "tokens" are the vocabulary, weighted by the probability with
  which they would be sampled.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import losses

C, S, V, D = 4, 3, 6, 5
BETA = 5.0


def log_softmax(z):
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


@pytest.fixture(scope="module")
def world():
  rng = np.random.default_rng(11)
  theta, features = rng.standard_normal((D, V)), rng.standard_normal((C, D))
  logprobs = log_softmax(features @ np.tanh(theta))
  return dict(
    theta=theta,
    features=features,
    logprobs=logprobs,
    skills=log_softmax(logprobs[:, None] + 0.5 * rng.standard_normal((C, S, V))),  # log pi(. | context + skill)
    occupancy=rng.dirichlet(np.ones(C)),
    skill_weights=rng.dirichlet(np.ones(S), C),
  )


def policy(theta, features):
  return jax.nn.log_softmax(features @ jnp.tanh(theta), axis=-1)


def expected_opd(theta, world, skills, beta=BETA):
  """E over context, skill and sampled token of losses.opd_loss; the sampling probabilities are those of theta_k,
  constants."""
  logprobs = policy(theta, jnp.asarray(world["features"], jnp.float32))  # [C, V]
  rows = jnp.repeat(logprobs, S, axis=0)  # [C * S, V]
  loss = losses.opd_loss(logprobs=rows, skill_logprobs=skills.reshape(C * S, V), beta=beta)
  weight = world["occupancy"][:, None, None] * world["skill_weights"][:, :, None] * np.exp(world["logprobs"])[:, None]
  return jnp.sum(loss * weight.reshape(C * S, V))


def expected_gate(world, skills, beta=BETA):
  """w_k(c, v): the gate averaged over the context's skills, [C, V] in float64."""
  gates = sigmoid(beta * (skills - world["logprobs"][:, None]))
  return np.einsum("cs,csv->cv", world["skill_weights"], gates)


def gradient(world, skills, beta=BETA):
  return np.asarray(jax.grad(expected_opd)(jnp.asarray(world["theta"], jnp.float32), world, skills, beta))


def test_proposition_1_the_gradient_is_that_of_a_kl_to_the_skill_weighted_target(world):
  weights = expected_gate(world, world["skills"])
  probabilities = np.exp(world["logprobs"])
  z = (probabilities * weights).sum(-1)
  target = probabilities * weights / z[:, None]

  def kl(theta):  # E_c[Z(c) KL(r || pi_theta)], r and Z fixed at theta_k
    return (
      world["occupancy"] * z * (target * (np.log(target) - log_softmax(world["features"] @ np.tanh(theta)))).sum(-1)
    ).sum()

  right = np.zeros_like(world["theta"])
  for index in np.ndindex(right.shape):  # central differences in float64
    step = np.zeros_like(right)
    step[index] = 1e-5
    right[index] = (kl(world["theta"] + step) - kl(world["theta"] - step)) / 2e-5
  np.testing.assert_allclose(gradient(world, world["skills"]), right, atol=1e-7)
  assert np.abs(right).max() > 1e-3  # a million times the tolerance's order: not 0 = 0


def test_proposition_2_the_norm_of_the_logit_gradient_is_the_variance_of_the_gate(world):
  weights = expected_gate(world, world["skills"])
  for c in range(C):
    pi = np.exp(world["logprobs"][c])
    skills, share = world["skills"][c], world["skill_weights"][c]

    def loss(z, skills=skills, share=share, pi=pi):
      rows = jnp.broadcast_to(jax.nn.log_softmax(z), (S, V))
      return jnp.sum(losses.opd_loss(logprobs=rows, skill_logprobs=skills, beta=BETA) * share[:, None] * pi)

    g = np.asarray(jax.grad(loss)(jnp.asarray(world["logprobs"][c], jnp.float32)), np.float64)
    variance = (pi * weights[c] ** 2).sum() - (pi * weights[c]).sum() ** 2
    np.testing.assert_allclose((g**2 / pi).sum(), variance, rtol=1e-5)
    assert variance > 1e-3


def test_proposition_2_ties_silence_the_rl_term_and_not_opd(world):
  theta = jnp.asarray(world["theta"], jnp.float32)
  advantages = losses.group_advantages(np.full(C, 0.3), np.zeros(C, int), num_groups=1)
  tokens = np.array([0, 3, 5, 1])[:, None]

  def loss(theta, skills, beta):
    rows = policy(theta, jnp.asarray(world["features"], jnp.float32))
    sampled = jnp.take_along_axis(rows, tokens, axis=1)
    rl, _ = losses.grpo_loss(
      logprobs=sampled,
      old_logprobs=np.take_along_axis(world["logprobs"], tokens, 1),
      advantages=advantages,
      mask=np.ones((C, 1)),
    )
    return rl + expected_opd(theta, world, skills, beta)

  rl_only = jax.grad(loss)(theta, world["skills"], BETA) - jax.grad(expected_opd)(theta, world, world["skills"])
  np.testing.assert_array_equal(rl_only, np.zeros((D, V)))
  assert np.abs(gradient(world, world["skills"])).max() > 1e-3
  # A gate that is constant over the tokens carries no signal: beta = 0, or a skill that changes nothing.
  same = np.repeat(world["logprobs"][:, None], S, 1)
  for skills, beta in ((world["skills"], 0.0), (same, BETA)):
    np.testing.assert_allclose(jax.grad(loss)(theta, skills, beta), np.zeros((D, V)), atol=1e-7)


def steepness(world):
  """G: the largest norm of grad log pi(v | c) in theta over all contexts and tokens."""
  jacobian = jax.jacobian(policy)(jnp.asarray(world["theta"], jnp.float32), jnp.asarray(world["features"], jnp.float32))
  return np.sqrt(np.square(np.asarray(jacobian)).sum((-1, -2)))  # [C, V]


def staleness(world, skills, other, beta):
  """(left side, right side) of Proposition 3 for two analyzers' skill branches."""
  left = np.linalg.norm(gradient(world, skills, beta) - gradient(world, other, beta))
  probability = (
    world["occupancy"][:, None, None] * world["skill_weights"][:, :, None] * np.exp(world["logprobs"])[:, None]
  )
  return left, beta * steepness(world).max() / 4 * (probability * np.abs(skills - other)).sum()


def test_proposition_3_staleness_is_bounded(world):
  rng = np.random.default_rng(5)
  for scale in (1e-2, 0.3, 3.0):
    for beta in (1.0, 5.0, 20.0):
      other = log_softmax(world["skills"] + scale * rng.standard_normal((C, S, V)))
      left, right = staleness(world, world["skills"], other, beta)
      assert 0 < left <= right, (scale, beta)


def test_proposition_3_is_not_vacuous(world):
  # Where the skill does not shift the token, the sigmoid is steepest (1/4); an analyzer that differs there in the one
  # token with the largest gradient reaches the bound, so that no smaller constant would do.
  norms = steepness(world)
  c, v = np.unravel_index(norms.argmax(), norms.shape)
  same = np.repeat(world["logprobs"][:, None], S, 1)
  other = same.copy()
  other[c, :, v] += 0.01
  left, right = staleness(world, same, other, BETA)
  assert 0.99 < left / right <= 1.0 + 1e-4
