"""The three propositions of the SEED paper (appendix A) on a set of contexts, for a decoder; see `instruments`.

Shapes: B rows, C contexts of a row, D model, V vocabulary.

A context c is a response position: the tokens before it, and the same with the skill in context. The occupancy d_k of
the paper is uniform over the contexts handed in. With l = log pi_k(v | c) and l' = log pi_k(v | c, skill), at the
temperature of the rollout, the gate is w(c, v) = sigmoid(beta (l' - l)). l' is that of the method's own teacher, and
the loss is the method's own: its weight of a token, -d loss / d l, is the gate up to a constant (`instruments.check`),
which moves no expectation, for E_v[grad log pi] = 0. So the propositions hold for it as they stand.

The paper averages w over the skills that a context may get. Here each context has the one that its episode got, held
fixed while v runs over the vocabulary. That skill has read the token that was sampled, so a gradient over the sampled
tokens need not tend to the exact one, however many there are: tokens drawn anew are measured beside them.

All belongs to theta = theta_k, the policy that sampled. The numbers are as exact as the model's dtype; what has no
context to count is 0. Logits of the whole vocabulary exist for a piece of the contexts at a time.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from seed_jax import losses, ops, sharding
from seed_jax.learn import Scoring
from seed_jax.models import decoder
from seed_jax.score import Context, response_logprobs

ROWS = sharding.ROWS[0]


@flax.struct.dataclass
class Contexts:
  """C response positions of each of B rows; `index` of both contexts is [B, C]."""

  ordinary: Context
  skill: Context
  targets: jax.Array  # [B, C] int32, the tokens that were sampled
  advantages: jax.Array  # [B, C] float32
  tied: jax.Array  # [B, C] float32, 1 where the rewards of the group are all equal
  weights: jax.Array  # [B, C] float32, 1 / count; 0 where the row has fewer than C
  count: jax.Array  # [] float32, number of contexts


# --- proposition 1 --------------------------------------------------------------------------------------------------


@jax.jit(static_argnames="scoring")
def proposition_1(params, teacher, chosen: Contexts, seed: jax.Array, scoring: Scoring) -> dict[str, jax.Array]:
  """grad L_opd = E_c[Z(c) grad KL(r_k(. | c) || pi_theta(. | c))], r_k = pi_k w / Z: both sides as the parameters'
  gradients.

  The left side is the expectation of the method's auxiliary loss over v ~ pi_k, all of the vocabulary; the right one is
  the divergence itself, r_k and Z constants. `teacher` are the parameters that read the skill context.

  Returns:
    norm, kl_norm: of the left and of the right side.
    difference: norm of left - right, relative to the left side's. Where the gate is all but constant both sides are
      rounding, and so is this.
    sampled_norm, sampled_cosine: the gradient of the loss as it is trained, over one sampled token a context, and its
      cosine to the exact one.
    redrawn_cosine: the same with a token drawn anew in each context. This is the noise of one token a context; what
      the sampled ones lack to it comes of skills that have read them.
  """
  beta = scoring.loss.opd_beta
  (hidden, head), pull = jax.vjp(lambda p: (_hidden(p, chosen.ordinary, scoring), decoder.head(p)), params)
  skill_hidden, skill_head = _hidden(teacher, chosen.skill, scoring), decoder.head(teacher)
  drawn = redrawn(hidden, head, seed, scoring)

  def cotangents(per_context, *arrays):
    def objective(hidden, head):
      def piece(h, h_skill, *arrays):
        return per_context(_log_policy(h, head, scoring), _log_policy(h_skill, skill_head, scoring), *arrays)

      return jnp.sum(chosen.weights * _over_pieces(piece, (hidden, skill_hidden, *arrays), head))

    return jax.grad(objective, argnums=(0, 1))(hidden, head)

  def expectation(logprobs, skill_logprobs):
    loss = _auxiliary(_present(logprobs), _present(skill_logprobs), scoring)
    return jnp.sum(jnp.exp(jax.lax.stop_gradient(logprobs)) * loss, axis=-1)

  def divergence(logprobs, skill_logprobs):
    old = jax.lax.stop_gradient(logprobs)
    target = old + jax.nn.log_sigmoid(beta * (_present(skill_logprobs) - _present(old)))
    log_z = jax.nn.logsumexp(target, axis=-1)
    target = target - log_z[..., None]
    return jnp.exp(log_z) * jnp.sum(jnp.exp(target) * (_present(target) - _present(logprobs)), axis=-1)

  def sampled(logprobs, skill_logprobs, tokens):
    return _auxiliary(_of_tokens(logprobs, tokens), _of_tokens(skill_logprobs, tokens), scoring)

  each = [cotangents(expectation), cotangents(divergence)]
  each += [cotangents(sampled, tokens) for tokens in (chosen.targets, drawn)]
  gradients = jax.lax.map(lambda one: pull(one)[0], jax.tree.map(lambda *x: jnp.stack(x), *each))
  exact, other, trained, anew = (jax.tree.map(lambda x, i=i: x[i], gradients) for i in range(4))
  norm = optax.global_norm(exact)
  return {
    "norm": norm,
    "kl_norm": optax.global_norm(other),
    "difference": _ratio(optax.global_norm(jax.tree.map(jnp.subtract, exact, other)), norm),
    "sampled_norm": optax.global_norm(trained),
    "sampled_cosine": _cosine(trained, exact),
    "redrawn_cosine": _cosine(anew, exact),
  }


def redrawn(hidden, head, seed, scoring: Scoring) -> jax.Array:
  """Tokens [B, C] of the policy in the contexts of `hidden` [B, C, D]; each place has a random key of its own."""
  B, C, _ = hidden.shape
  place = jax.sharding.reshard(jnp.arange(B * C).reshape(B, C), P(ROWS, None))
  noise = lambda i: jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), i), head.shape[1:])  # noqa: E731

  def draw(h, place):
    return jnp.argmax(_log_policy(h, head, scoring) + jax.vmap(jax.vmap(noise))(place), axis=-1)

  return _over_pieces(draw, (hidden, place), head)


# --- proposition 2 --------------------------------------------------------------------------------------------------


@jax.jit(static_argnames="scoring")
def proposition_2(params, teacher, chosen: Contexts, scoring: Scoring) -> dict[str, jax.Array]:
  """||grad_z(c) L_opd,c||^2 in the norm of pi^-1, sum_v g_v^2 / pi_v, equals Var_{v ~ pi}[w(c, v)], z the logits over
  the temperature; under tied rewards the RL gradient is 0 and this is not, unless the gate is constant. L_opd,c is the
  expectation of the method's auxiliary loss; `teacher` are the parameters that read the skill context.

  Returns:
    opd, variance: the two sides, means over the contexts.
    difference: sum of |left - right| over contexts relative to the sum of the right side.
    tied_share: contexts whose group is tied, of all.
    tied_opd, tied_variance: the two sides, means over those.
    tied_rl: of the clipped surrogate's logit gradient, in the same norm, the mean over those: 0 if no reward differs.
  """
  beta = scoring.loss.opd_beta
  hidden, head = _hidden(params, chosen.ordinary, scoring), decoder.head(params)
  skill_hidden, skill_head = _hidden(teacher, chosen.skill, scoring), decoder.head(teacher)
  advantages = chosen.advantages * scoring.method.policy_gradient

  def piece(h, h_skill, targets, advantages):
    logits, skill_logprobs = _log_policy(h, head, scoring), _present(_log_policy(h_skill, skill_head, scoring))
    logprobs = _present(logits)
    pi = jnp.exp(logits)

    def opd(z):
      now = _present(jax.nn.log_softmax(z, axis=-1))
      return jnp.sum(pi * _auxiliary(now, skill_logprobs, scoring))

    def rl(z):
      now, old = (_of_tokens(x, targets) for x in (jax.nn.log_softmax(z, axis=-1), logits))
      return jnp.sum(losses.clipped_surrogate(logprobs=now, old_logprobs=old, advantages=advantages))

    def square(gradient):
      return jnp.sum(jnp.where(pi > 0, gradient / jnp.where(pi > 0, pi, 1.0) * gradient, 0.0), axis=-1)

    gate = losses.opd_gate(logprobs=logprobs, skill_logprobs=skill_logprobs, beta=beta)
    mean = jnp.sum(pi * gate, axis=-1, keepdims=True) / jnp.sum(pi, axis=-1, keepdims=True)
    variance = jnp.sum(pi * jnp.square(gate - mean), axis=-1)
    return square(jax.grad(opd)(logits)), variance, square(jax.grad(rl)(logits))

  opd, variance, rl = _over_pieces(piece, (hidden, skill_hidden, chosen.targets, advantages), head)
  mean = lambda x: jnp.sum(chosen.weights * x)  # noqa: E731
  share = mean(chosen.tied)
  return {
    "opd": mean(opd),
    "variance": mean(variance),
    "difference": _ratio(mean(jnp.abs(opd - variance)), mean(variance)),
    "tied_share": share,
    "tied_opd": _ratio(mean(chosen.tied * opd), share),
    "tied_variance": _ratio(mean(chosen.tied * variance), share),
    "tied_rl": _ratio(mean(chosen.tied * rl), share),
  }


# --- proposition 3 --------------------------------------------------------------------------------------------------


@jax.jit(static_argnames="scoring")
def proposition_3(params, start_params, chosen: Contexts, scoring: Scoring) -> dict[str, jax.Array]:
  """||U_k(A_k) - U_k(A_j)|| <= beta G / 4 E_x |Delta_k(x) - Delta_j(x)|, where
  U_k(A) = E_x[sigmoid(beta Delta_A(x)) grad log pi(x)].

  x is a context with its sampled token; E_x is the mean over those measured, and G the largest ||grad log pi(v | c)||,
  in the parameters, among them: for this distribution the bound holds without any further estimate. (1/4 is the largest
  slope of the sigmoid.)

  The paper's A_j is an older analyzer: what it wrote differs, and the current policy scores both texts. To write other
  skills would take another rollout; here the text is the same and the older policy, that training started from, scores
  it: Delta_j(x) = log pi_start(v | c, skill) - log pi_k(v | c). The proof is the same, for it asks only how far the
  Deltas are apart. Of a method whose teacher is the older policy this is how far its gradient is from the one with
  itself as the teacher.

  Returns:
    measured: the left side. bound: the right side. ratio: measured / bound.
    steepness: G. gap: E_x |Delta_k(x) - Delta_j(x)|.
  """
  beta = scoring.loss.opd_beta
  current, start = (_logprobs(p, chosen.skill, chosen.targets, scoring) for p in (params, start_params))
  gap = jnp.sum(chosen.weights * jnp.abs(current - start))
  B, C = chosen.targets.shape
  shards = sharding.num_row_shards(jax.sharding.get_abstract_mesh())

  # One backward pass a context, over one row a device: the others would have no part in it.
  def turns(x):  # [B, ...] -> [B / shards, shards, ...]
    split = jax.lax.reshape(x, (shards, B // shards, *x.shape[1:]), out_sharding=P(ROWS, *[None] * x.ndim))
    return jnp.moveaxis(split, 1, 0)

  one_each = jax.sharding.reshard(jnp.eye(shards * C).reshape(shards * C, shards, C), P(None, ROWS, None))

  def of_rows(carry, rows):
    context, targets, weights, current, start = rows
    own, pull = jax.vjp(lambda p: _logprobs(p, context, targets, scoring), params)
    gate, old_gate = (losses.opd_gate(logprobs=own, skill_logprobs=skill, beta=beta) for skill in (current, start))
    moved = weights * (gate - old_gate)

    def of_context(carry, one):
      difference, steepness = carry
      gradient = pull(one * (weights > 0))[0]
      difference = jax.tree.map(lambda d, g: d + jnp.sum(one * moved) * g, difference, gradient)
      return (difference, jnp.maximum(steepness, optax.global_norm(gradient))), None

    return jax.lax.scan(of_context, carry, one_each)[0], None

  nothing = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
  rows = jax.tree.map(turns, (chosen.ordinary, chosen.targets, chosen.weights, current, start))
  (difference, steepness), _ = jax.lax.scan(of_rows, nothing, rows)
  measured, bound = optax.global_norm(difference), beta * steepness / 4 * gap
  return {
    "measured": measured,
    "bound": bound,
    "ratio": _ratio(measured, bound),
    "steepness": steepness,
    "gap": gap,
  }


# --- helpers --------------------------------------------------------------------------------------------------------


def _auxiliary(logprobs, skill_logprobs, scoring):
  """The method's auxiliary loss [..., V] or [B, C] at theta = theta_k: the old policy is the present one."""
  old = jax.lax.stop_gradient(logprobs)
  return scoring.method.auxiliary(
    logprobs=logprobs, skill_logprobs=skill_logprobs, old_logprobs=old, beta=scoring.loss.opd_beta
  )


def _hidden(params, context, scoring):
  """[B, C, D], what predicts the chosen positions."""
  hidden = decoder.forward(params, context.tokens, context.positions, context.segment_ids, scoring.model)
  return decoder.gather_positions(hidden, context.index)


def _logprobs(params, context, targets, scoring):
  """[B, C], as the update and the scoring compute them."""
  return response_logprobs(params, context, targets, scoring.model, temperature=scoring.loss.temperature)[0]


def _log_policy(hidden, head, scoring):
  """log pi over the vocabulary, [..., V] float32 of hidden [..., D]; -inf where no token is."""
  logits = decoder.logits_at({"head": head}, hidden, scoring.model)
  return jax.nn.log_softmax(logits / (scoring.loss.temperature or 1.0), axis=-1)


def _present(logprobs):
  """0 where no token is: its probability is 0, and 0 * inf would be NaN."""
  return jnp.where(jnp.isfinite(logprobs), logprobs, 0.0)


def _of_tokens(logprobs, tokens):
  """[..., V] at tokens [...], by comparison: a vocabulary over `tp` stays where it is."""
  return jnp.sum(jnp.where(jnp.arange(logprobs.shape[-1]) == tokens[..., None], logprobs, 0.0), axis=-1)


def _over_pieces(function, arrays, head):
  """function(*pieces) -> arrays [B, c] over the pieces [B, c, ...] of arrays [B, C, ...], joined to [B, C].

  As many contexts at a time as have logits of ops.CHUNK_LOGITS on a device; the backward pass computes them again.
  """
  B, C = arrays[0].shape[:2]
  mesh = jax.sharding.get_abstract_mesh()
  logits = B // sharding.num_row_shards(mesh) * head.shape[1] // mesh.shape["tp"]
  pieces = -(-C // max(ops.CHUNK_LOGITS // logits, 1))
  width = -(-C // pieces)
  if pieces == 1:
    return function(*arrays)
  arrays = [jnp.pad(x, ((0, 0), (0, pieces * width - C)) + ((0, 0),) * (x.ndim - 2)) for x in arrays]

  def piece(i):
    return function(*(jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1) for x in arrays))

  out = jax.lax.map(jax.checkpoint(piece), jnp.arange(pieces))
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(B, pieces * width)[:, :C], out)


def _cosine(one, other):
  inner = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
  return _ratio(inner, optax.global_norm(one) * optax.global_norm(other))


def _ratio(numerator, denominator):
  return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1.0), 0.0)
