"""The optimizer chain: AdamW against the formulas, Muon's orthogonal updates, schedules at their corners."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
from seed_jax.optimizer import OptimizerConfig, make_optimizer, round_stochastically, schedule

CONFIG = ModelConfig("Qwen2ForCausalLM", 24, 16, 2, 4, 2, 8, 40, qkv_bias=True)


def run(config, params, gradients):
  """Parameters after one update for each tree of gradients."""
  chain = make_optimizer(config, len(gradients))
  state, update = chain.init(params), jax.jit(chain.update)
  for gradient in gradients:
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
  return params


def test_adamw_is_the_papers_with_clipping_and_decay_on_matrices_only():
  config = OptimizerConfig(learning_rate=0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.5, clip_norm=2.0)
  params = {"layers": {"gate": np.asarray([[1.0, -2.0]]), "attn_norm": np.asarray([3.0]), "q_bias": np.asarray([1.0])}}
  raw = [  # the second is too long: its norm is 10 (sixes and eight), so it is cut to a fifth
    {"layers": {"gate": np.asarray([[0.5, 0.1]]), "attn_norm": np.asarray([-0.2]), "q_bias": np.asarray([0.3])}},
    {"layers": {"gate": np.asarray([[6.0, 0.0]]), "attn_norm": np.asarray([8.0]), "q_bias": np.asarray([0.0])}},
    {"layers": {"gate": np.asarray([[-1.0, 0.2]]), "attn_norm": np.asarray([0.0]), "q_bias": np.asarray([-0.3])}},
  ]
  got = run(config, jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, raw))
  for name, decay in (("gate", 0.5), ("attn_norm", 0.0), ("q_bias", 0.0)):
    p, m, v = params["layers"][name].astype(np.float64), 0.0, 0.0
    for t, factor in enumerate((1.0, 0.2, 1.0), start=1):
      g = raw[t - 1]["layers"][name] * factor
      m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
      p = p - 0.1 * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + decay * p)
    np.testing.assert_allclose(got["layers"][name], p, rtol=1e-5, err_msg=name)


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def as_matrix(name, x):
  """One layer's weight as [in, out]: heads and their size are one axis."""
  return x.reshape(CONFIG.num_heads * CONFIG.head_dim if name == "o" else x.shape[0], -1)


def uneven(name, x):
  """The same singular vectors with singular values from 1 down to 0.1, for every layer."""
  layers = []
  for layer in np.asarray(x):
    u, _, vt = np.linalg.svd(as_matrix(name, layer), full_matrices=False)
    layers.append((u * np.linspace(1.0, 0.1, u.shape[1]) @ vt).reshape(layer.shape))
  return jnp.asarray(np.stack(layers))


@pytest.fixture(scope="module")
def muon():
  """One Muon update of a small decoder: (updates, gradients)."""
  params = decoder.init(jax.random.key(0), CONFIG)
  layers = {name: uneven(name, x) if name in MATRICES else x + 0.5 for name, x in params["layers"].items()}
  gradients = params | {"layers": layers}
  config = OptimizerConfig(rule="muon", learning_rate=0.1, weight_decay=0.0, adam_rate=0.2, eps=1e-12, clip_norm=1e9)
  new = run(config, params, [gradients])
  return jax.tree.map(lambda a, b: np.asarray(a - b), new, params), jax.device_get(gradients)


@pytest.mark.parametrize("name", MATRICES)
def test_muon_moves_layer_matrices_by_orthogonal_updates(muon, name):
  updates, gradients = muon
  for layer in range(CONFIG.num_layers):
    update, gradient = updates["layers"][name][layer], gradients["layers"][name][layer]
    singular = np.linalg.svd(as_matrix(name, update), compute_uv=False)
    assert singular.max() / singular.min() < 2.2  # 10 before; five steps of Newton-Schulz leave values in 0.6 .. 1.2
    assert 0.1 < np.sqrt(np.mean(update**2)) / 0.1 < 0.3  # the size of AdamW's updates: about 0.2 of the rate
    assert np.sum(update * gradient) < 0


def test_muon_leaves_embeddings_norms_and_biases_to_adam(muon):
  updates, gradients = muon
  rest = {name: (updates[name], gradients[name]) for name in ("embed", "final_norm")}
  rest |= {n: (updates["layers"][n], gradients["layers"][n]) for n in ("attn_norm", "mlp_norm", "q_bias", "k_bias")}
  # Adam's first step is the sign; with Nesterov momentum of 0.9 it is 0.9 * 0.1 / (1 - 0.81) + 1 times as long
  step = 0.1 * 0.2 * (0.9 * 0.1 / 0.19 + 1)
  for name, (update, gradient) in rest.items():
    np.testing.assert_allclose(update, -step * np.sign(gradient), rtol=1e-3, atol=1e-6, err_msg=name)


def test_weight_decay_of_muon_goes_by_each_sides_own_rate():
  params = jax.tree.map(lambda x: x + 1.0, decoder.init(jax.random.key(0), CONFIG))
  still = jax.tree.map(jnp.zeros_like, params)
  new = run(OptimizerConfig(rule="muon", learning_rate=0.1, weight_decay=0.5, adam_rate=0.2), params, [still])
  ratio = jax.tree.map(lambda a, b: float(jnp.mean(a / b)), new, params)
  assert [ratio["layers"][name] for name in MATRICES] == pytest.approx([1 - 0.1 * 0.5] * 7, abs=1e-5)
  assert ratio["embed"] == pytest.approx(1 - 0.02 * 0.5, abs=1e-5)
  assert ratio["layers"]["attn_norm"] == pytest.approx(1 - 0.02 * 0.5, abs=1e-5)  # optax has no mask on this side


def values(total, **options):
  rate = schedule(OptimizerConfig(learning_rate=2.0, **options), total)
  return [float(rate(step)) for step in range(total + 1)]


def test_warm_up_moves_from_the_first_update_and_ends_at_the_peak():
  rates = values(20, warmup=0.2)
  np.testing.assert_allclose(rates[:5], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)
  assert rates[4:] == [2.0] * 17
  np.testing.assert_allclose(values(20, warmup=0.05)[:3], [2.0, 2.0, 2.0], rtol=1e-6)  # one update of warm-up


def test_cosine_and_linear_fall_to_the_final_fraction():
  cosine = values(12, schedule="cosine", warmup=1 / 6, final_fraction=0.1)
  assert cosine[2] == pytest.approx(2.0) and cosine[12] == pytest.approx(0.2)
  assert cosine[7] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half way
  linear = values(12, schedule="linear", warmup=1 / 6, final_fraction=0.1)
  assert linear[2] == pytest.approx(2.0) and linear[7] == pytest.approx(1.1) and linear[12] == pytest.approx(0.2)
  assert values(3) == [2.0] * 4


def test_unknown_names_are_refused_with_the_choices():
  with pytest.raises(ValueError, match="schedule 'step' is unknown; choose one of constant, cosine, linear"):
    schedule(OptimizerConfig(schedule="step"), 10)
  with pytest.raises(ValueError, match="optimizer rule 'sgd' is unknown; choose one of adamw, muon"):
    make_optimizer(OptimizerConfig(rule="sgd"), 10)
  with pytest.raises(ValueError, match="moment_dtype 'int8' is unknown; choose one of float32, bfloat16"):
    make_optimizer(OptimizerConfig(moment_dtype="int8"), 10)


def test_stochastic_rounding_keeps_the_mean_and_what_bfloat16_holds():
  exact = jnp.asarray([1.0, -2.5, 0.0, 2.0**-100, jnp.inf])
  np.testing.assert_array_equal(round_stochastically(exact, jax.random.key(1)).astype(jnp.float32), exact)
  between = jnp.full(10_000, 1.0 + 2**-7 / 4, jnp.float32)  # a quarter of the way from 1 to the next number
  rounded = np.asarray(round_stochastically(between, jax.random.key(0)).astype(jnp.float32))
  assert set(rounded) == {1.0, 1.0 + 2**-7}
  assert np.mean(rounded > 1) == pytest.approx(0.25, abs=0.02)  # deviation sqrt(3/16/10,000) = 0.004
  assert np.isnan(round_stochastically(jnp.full(3, jnp.nan), jax.random.key(0)).astype(jnp.float32)).all()


def test_bfloat16_moments_take_half_the_memory_and_fall_as_float32_ones_do():
  """After one gradient of 1 and 300 of 0 the second moment is 0.001 * 0.999^300 = 0.00074; rounded to nearest, it would
  stay at 0.001.
  """
  params = {"layers": {"gate": jnp.ones((50, 40))}}
  chain = make_optimizer(OptimizerConfig(clip_norm=1e9, weight_decay=0.0, moment_dtype="bfloat16"), 301)
  gradients = jnp.zeros((301, 50, 40)).at[0].set(1.0)

  def step(state, gradient):
    updates, state = chain.update({"layers": {"gate": gradient}}, state, params)
    return state, updates["layers"]["gate"]

  state, updates = jax.jit(lambda: jax.lax.scan(step, chain.init(params), gradients))()
  moments = [x for x in jax.tree.leaves(state) if x.ndim]
  assert [x.dtype for x in moments] == [jnp.bfloat16] * 2 and updates.dtype == jnp.float32
  assert float(jnp.mean(moments[1].astype(jnp.float32))) == pytest.approx(0.001 * 0.999**300, rel=0.01)
  np.testing.assert_allclose(updates[0], -1e-6, rtol=1e-4)  # the first step computes with what was not yet rounded
