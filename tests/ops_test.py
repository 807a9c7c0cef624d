"""Small numerical pieces: hand numbers, masked vocabularies, chunks that change nothing, sampling transforms."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from seed_jax import ops, sharding


def test_rms_norm_by_hand():
  # mean of squares of (3, 4) is 12.5; with eps 3.5 the root is 4
  x = jnp.asarray([[3.0, 4.0]])
  np.testing.assert_allclose(ops.rms_norm(x, jnp.asarray([2.0, 10.0]), 3.5), [[2 * 3 / 4, 10 * 4 / 4]], rtol=1e-6)
  np.testing.assert_array_equal(ops.rms_norm(jnp.zeros((1, 2)), jnp.ones(2), 1e-6), 0.0)


def test_rms_norm_of_bfloat16_is_rounded_once():
  x = jax.random.normal(jax.random.key(0), (64, 32), jnp.bfloat16)
  weight = jax.random.normal(jax.random.key(1), (32,), jnp.bfloat16)
  f = np.asarray(x, np.float64)
  exact = f / np.sqrt((f * f).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
  out = ops.rms_norm(x, weight, 1e-6)
  assert out.dtype == jnp.bfloat16
  assert np.mean(np.asarray(out) == exact.astype(jnp.bfloat16)) > 0.995


def test_rope_rotates_half_split_pairs_as_hugging_face_does():
  # H = 4, theta = 100: frequencies 1 and 1/10, so position 3 turns (x0, x2) by 3 and (x1, x3) by 0.3
  cos, sin = ops.rope_angles(jnp.asarray([[0, 3]]), 4, 100.0)
  np.testing.assert_allclose(cos[0], [[1, 1], [math.cos(3), math.cos(0.3)]], rtol=1e-6)
  x = jnp.broadcast_to(jnp.asarray([1.0, 2.0, 3.0, 4.0]), (1, 2, 1, 4))
  out = ops.apply_rope(x, cos, sin)[0, :, 0]
  np.testing.assert_array_equal(out[0], [1, 2, 3, 4])
  c, s, d, t = math.cos(3), math.sin(3), math.cos(0.3), math.sin(0.3)
  np.testing.assert_allclose(out[1], [c - 3 * s, 2 * d - 4 * t, 3 * c + s, 4 * d + 2 * t], rtol=1e-5)


def test_rope_tells_far_positions_apart_and_products_depend_on_distance_alone():
  def rotated(position):
    angles = ops.rope_angles(jnp.asarray([[position]]), 8, 10_000.0)
    return ops.apply_rope(jnp.arange(1.0, 9.0).reshape(1, 1, 1, 8), *angles).ravel()

  near = float(rotated(5) @ rotated(2))
  assert float(rotated(4005) @ rotated(4002)) == pytest.approx(near, rel=1e-4)
  assert abs(float(rotated(4005) @ rotated(4001)) - near) > 1.0


def test_logprob_and_entropy_by_hand():
  # probabilities 1/2, 1/4, 1/4: entropy 1.5 ln 2
  logits = jnp.log(jnp.asarray([2.0, 1.0, 1.0])) + 7.0
  logprob, entropy = ops.logprob_and_entropy(logits, jnp.asarray(1))
  assert float(logprob) == pytest.approx(-math.log(4), abs=1e-6)
  assert float(entropy) == pytest.approx(1.5 * math.log(2), abs=1e-6)
  # at temperature 1/2 the weights are squared: 4, 1, 1
  assert float(ops.logprob_and_entropy(logits, jnp.asarray(0), 0.5)[0]) == pytest.approx(math.log(4 / 6), abs=1e-6)
  # greedy decoding reports the distribution at temperature 1
  assert float(ops.logprob_and_entropy(logits, jnp.asarray(0), 0.0)[0]) == pytest.approx(math.log(1 / 2), abs=1e-6)


def test_huge_logits_neither_overflow_nor_vanish():
  logprob, entropy = ops.logprob_and_entropy(jnp.asarray([1e4, 1e4, -1e4]), jnp.asarray([0, 1, 2]))
  np.testing.assert_allclose(logprob, [-math.log(2), -math.log(2), -2e4 - math.log(2)], rtol=1e-6)
  np.testing.assert_allclose(entropy, math.log(2), rtol=1e-6)


def test_masked_vocabulary_has_no_mass_and_a_finite_gradient():
  logits = jnp.asarray([[0.3, -0.2, 5.0, 9.0]])
  target = jnp.asarray([1])

  def both(logits):
    logprob, entropy = ops.logprob_and_entropy(ops.mask_padded_vocab(logits, 2), target)
    return logprob[0] + 0.1 * entropy[0]

  short = ops.logprob_and_entropy(logits[:, :2], target)
  assert float(both(logits)) == pytest.approx(float(short[0][0] + 0.1 * short[1][0]), abs=1e-6)
  gradient = jax.grad(both)(logits)
  assert np.isfinite(gradient).all() and (np.asarray(gradient)[0, 2:] == 0).all()
  assert ops.mask_padded_vocab(logits, None) is logits and ops.mask_padded_vocab(logits, 4) is logits


def test_gradients_of_logprob_and_entropy():
  logits = jax.random.normal(jax.random.key(0), (3, 5))
  check_grads(lambda x: ops.logprob_and_entropy(x, jnp.asarray([0, 4, 2]), 0.7), (logits,), order=1, modes=["rev"])


B, R, D, V = 8, 10, 4, 16


@pytest.fixture(params=[(1, 1, 1), (8, 1, 1), (1, 4, 2), (2, 2, 2)], ids=lambda shape: "x".join(map(str, shape)))
def mesh(request):
  with jax.set_mesh(sharding.make_mesh(*request.param)):
    yield jax.sharding.get_abstract_mesh()


def inputs():
  keys = jax.random.split(jax.random.key(1), 3)
  hidden, head = jax.random.normal(keys[0], (B, R, D)), jax.random.normal(keys[1], (D, V))
  return np.asarray(hidden), np.asarray(head), np.asarray(jax.random.randint(keys[2], (B, R), 0, V - 1))


def on_mesh(hidden, head, targets):
  rows = jax.P(("data", "fsdp"), None)
  return (
    jax.device_put(hidden, jax.P(*rows, None)),
    jax.device_put(head, jax.P(None, "tp")),
    jax.device_put(targets, rows),
  )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 24, None])  # tokens a device: one column; several columns, unevenly; one chunk
def test_chunks_change_neither_values_nor_gradients(mesh, chunk, tied):
  hidden, head, targets = inputs()
  head = head.T.copy() if tied else head  # an embedding table, [V, D]

  def plain(hidden, head, entropy_weight):
    logits = jnp.einsum("brd,dv->brv", hidden, head.T if tied else head)
    out = ops.logprob_and_entropy(ops.mask_padded_vocab(logits, V - 1), jnp.asarray(targets), 0.8)
    return jnp.sum(out[0] * jnp.arange(R)) / 10 + entropy_weight * jnp.sum(out[1] ** 2), out

  def chunked(hidden, head, targets, entropy_weight):
    out = ops.token_logprobs(hidden, head.T if tied else head, targets, temperature=0.8, num_valid=V - 1, chunk=chunk)
    entropy = out[1] if entropy_weight else jax.lax.stop_gradient(out[1])
    return jnp.sum(out[0] * jnp.arange(R)) / 10 + entropy_weight * jnp.sum(entropy**2), out

  hidden_, head_, targets_ = on_mesh(hidden, head, targets)
  head_ = jax.device_put(head, jax.P("tp", None)) if tied else head_
  for entropy_weight in (0.3, 0.0):
    with jax.set_mesh(sharding.make_mesh()):
      expected = jax.grad(plain, argnums=(0, 1), has_aux=True)(hidden, head, entropy_weight)
    got = jax.jit(jax.grad(chunked, argnums=(0, 1), has_aux=True), static_argnums=3)(
      hidden_, head_, targets_, entropy_weight
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)
    assert got[0][1].sharding.spec == head_.sharding.spec


def test_an_entropy_without_gradient_costs_none():
  hidden, head, targets = inputs()

  def exponentials(entropy_weight):
    def total(hidden, head):
      logprobs, entropies = ops.token_logprobs(hidden, head, jnp.asarray(targets))
      return jnp.sum(logprobs) + (jnp.sum(entropies) if entropy_weight else 0.0)

    with jax.set_mesh(sharding.make_mesh()):
      return sum(len(s) == 3 and s[2] == V for s in shapes(jax.make_jaxpr(jax.grad(total, (0, 1)))(hidden, head).jaxpr))

  assert exponentials(0) < exponentials(1)


def shapes(jaxpr):
  """Shapes of everything that a program computes, inner programs included."""
  for equation in jaxpr.eqns:
    for out in equation.outvars:
      yield tuple(out.aval.shape)
    for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from shapes(inner)


@pytest.mark.parametrize("shape, on_device", [((1, 1, 1), (2, 32_768)), ((2, 1, 2), (1, 16_384))])
def test_memory_does_not_grow_with_the_number_of_tokens(shape, on_device):
  rows, vocab = on_device
  with jax.set_mesh(sharding.make_mesh(*shape)):

    def temporary(tokens, chunk):
      def total(hidden, head, targets):
        return sum(jnp.sum(x) for x in ops.token_logprobs(hidden, head, targets, chunk=chunk))

      arrays = on_mesh(
        np.zeros((2, tokens, 8), np.float32), np.zeros((8, 32_768), np.float32), np.zeros((2, tokens), int)
      )
      compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*arrays).compile()
      return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()

    few, text = temporary(128, 32)
    many, _ = temporary(512, 32)
    whole, _ = temporary(512, None)
  logits = 512 * rows * vocab * 4
  assert many < 1.1 * few and many < logits / 4 and whole > logits  # the last: that it is seen where it is
  # what devices exchange never has a vocabulary of logits: at most the head's gradient
  exchanged = [
    line for line in text.splitlines() if re.search(r"= .*(all-reduce|all-gather|all-to-all|permute)\(", line)
  ]
  assert not [line for line in exchanged if re.search(rf"\[{rows},\d+,{vocab}\]", line)]
  assert bool(exchanged) == (shape != (1, 1, 1))


def test_top_k_keeps_the_k_largest():
  logits = jnp.asarray([[1.0, 4.0, 2.0, 3.0]])
  np.testing.assert_array_equal(ops.truncate_logits(logits, 2, 1.0), [[-np.inf, 4, -np.inf, 3]])
  np.testing.assert_array_equal(ops.truncate_logits(logits, 9, 1.0), logits)
  np.testing.assert_array_equal(ops.truncate_logits(logits, 0, 1.0), logits)


@pytest.mark.parametrize(
  "top_p, kept",
  [(0.05, [0, 1, 0, 0]), (0.5, [0, 1, 0, 0]), (0.51, [0, 1, 0, 1]), (0.8, [0, 1, 0, 1]), (0.82, [1, 1, 0, 1])],
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, kept):
  logits = jnp.log(
    jnp.asarray([0.125, 0.5, 0.0625, 0.3125])
  )  # in order 0.5, 0.3125, 0.125, 0.0625; sums 0.5, 0.8125 ...
  np.testing.assert_array_equal(np.isfinite(ops.truncate_logits(logits, 0, top_p)), np.asarray(kept, bool))


def test_top_k_comes_before_the_nucleus():
  # of the two largest (0.5, 0.3125) the first alone holds 8/13 = 0.615 of the mass
  logits = jnp.log(jnp.asarray([0.125, 0.5, 0.0625, 0.3125]))
  np.testing.assert_array_equal(np.isfinite(ops.truncate_logits(logits, 2, 0.6)), [False, True, False, False])
  np.testing.assert_array_equal(np.isfinite(ops.truncate_logits(logits, 2, 0.65)), [False, True, False, True])


def sample(logits, keys, **options):
  with jax.set_mesh(sharding.make_mesh()):
    return jax.jit(lambda x, k: ops.sample_tokens(x, k, **options))(jnp.asarray(logits), keys)


def test_greedy_sampling_takes_the_largest_whatever_the_key():
  tokens, logprobs = sample([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]], jax.random.split(jax.random.key(0), 2), temperature=0.0)
  assert tokens.tolist() == [1, 0] and tokens.dtype == jnp.int32
  assert float(logprobs[0]) == pytest.approx(2 - math.log(1 + math.e**2 + math.e), abs=1e-6)


def test_samples_follow_the_distribution_at_their_temperature():
  count = 4096
  logits = np.log(np.tile([0.2, 0.8], (count, 1)).astype(np.float32))
  tokens, logprobs = sample(logits, jax.random.split(jax.random.key(1), count), temperature=0.5)
  # squared and normalised: 0.04 / 0.68 = 1/17; four deviations are 0.015
  assert float(np.mean(np.asarray(tokens) == 0)) == pytest.approx(1 / 17, abs=0.015)
  np.testing.assert_allclose(np.exp(logprobs), np.where(np.asarray(tokens) == 0, 1 / 17, 16 / 17), rtol=1e-5)


def test_truncation_limits_the_choice_but_not_the_logprob():
  count = 512
  logits = np.log(np.tile([0.5, 0.3, 0.2], (count, 1)).astype(np.float32))
  keys = jax.random.split(jax.random.key(2), count)
  for options in ({"top_k": 2}, {"top_p": 0.7}):
    tokens, logprobs = sample(logits, keys, **options)
    assert set(np.asarray(tokens).tolist()) == {0, 1}
    np.testing.assert_allclose(np.exp(logprobs), np.where(np.asarray(tokens) == 0, 0.5, 0.3), rtol=1e-5)


def test_a_rows_sample_depends_on_its_own_key_and_logits_alone():
  logits = np.asarray(jax.random.normal(jax.random.key(3), (4, 16)))
  keys = jax.random.split(jax.random.key(4), 4)
  together = sample(logits, keys)[0]
  turned = sample(logits[::-1].copy(), keys[::-1])[0]
  assert together.tolist() == turned.tolist()[::-1]
