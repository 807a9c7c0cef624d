"""The decoder's forms of the same computation: layers scanned or unrolled, with a cache or without, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import random_params

from seed_jax import sharding
from seed_jax.models import decoder
from seed_jax.models.config import REMAT, ModelConfig

CONFIG = ModelConfig("Qwen3ForCausalLM", 64, 32, 2, 4, 2, 8, 48, qk_norm=True, rope_theta=100.0)
ROWS, CAPACITY, PROMPT, STEPS = 4, 16, 6, 3
COUNTS = np.asarray([6, 1, 0, 4])  # prompt tokens of each slot; the third one stays empty and idle


def on(mesh, config):
  params = decoder.init(jax.random.key(0), config)
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, PROMPT + STEPS))
  return sharding.put_params(params, mesh), sharding.put_rows(tokens.astype(np.int32), mesh)


def through_cache(params, tokens, config):
  """Hidden states [B, PROMPT + STEPS, D]: the prompt in one piece, then a token at a time; and the cache."""

  def step(cache, tokens, positions):
    return decoder.forward(params, tokens, positions, None, config, cache=cache)

  column = jnp.arange(PROMPT)[None]
  counts = jnp.asarray(COUNTS)[:, None]
  spread = lambda positions: jax.sharding.reshard(positions, jax.P(sharding.ROWS[0], None))  # noqa: E731
  cache = decoder.init_cache(config, ROWS, CAPACITY)
  hidden, cache = step(cache, tokens[:, :PROMPT], spread(jnp.where(column < counts, column, CAPACITY)))
  pieces = [hidden]
  for i in range(STEPS):
    positions = spread(jnp.where(counts > 0, counts + i, CAPACITY))
    hidden, cache = step(cache, tokens[:, PROMPT + i : PROMPT + i + 1], positions)
    pieces.append(hidden)
  return jnp.concatenate(pieces, axis=1), cache


def packed_loss(params, tokens, config):
  """A scalar that every hidden state and every parameter but the head enters; rows hold two samples and padding."""
  T = tokens.shape[1]
  segments = jnp.broadcast_to(jnp.asarray([1] * 4 + [2] * (T - 6) + [0] * 2), tokens.shape)
  positions = jnp.broadcast_to(jnp.asarray([*range(4), *range(T - 6), 0, 0]), tokens.shape)
  spread = lambda x: jax.sharding.reshard(x, jax.P(sharding.ROWS[0], None))  # noqa: E731
  hidden = decoder.forward(params, tokens, spread(positions), spread(segments), config)
  weights = jnp.cos(jnp.arange(CONFIG.hidden_size)) * (segments > 0)[..., None]
  return jnp.sum(jnp.tanh(hidden) * weights) / 16  # gradients of about 1


def results(config, shape):
  mesh = sharding.make_mesh(*shape)
  with jax.set_mesh(mesh):
    params, tokens = on(mesh, config)
    hidden, cache = jax.jit(through_cache, static_argnums=2)(params, tokens, config)
    loss, gradients = jax.jit(jax.value_and_grad(packed_loss), static_argnums=2)(params, tokens, config)
  leaves = cache if isinstance(cache[0], tuple) else [jax.tree.map(lambda x, i=i: x[i], cache) for i in range(2)]
  live = np.concatenate([np.arange(PROMPT) < COUNTS[:, None], np.repeat(COUNTS[:, None] > 0, STEPS, 1)], axis=1)
  numbers = {
    "hidden": np.asarray(hidden)[live],
    "loss": loss,
    "gradients": gradients,
    "cache": list(map(tuple, leaves)),
  }
  return jax.tree.map(np.asarray, numbers)


@pytest.fixture(scope="module")
def unrolled():
  return results(CONFIG, (1, 1, 1))


@pytest.mark.parametrize("scan, shape", [(True, (1, 2, 2)), (False, (2, 2, 2))])
def test_scanned_and_unrolled_layers_agree_on_every_mesh(unrolled, scan, shape):
  other = results(dataclasses.replace(CONFIG, scan_layers=scan), shape)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6, rtol=1e-5), other, unrolled)


def test_the_cache_holds_what_it_says(unrolled):
  """Continuing a slot is reading the whole from its start, and an idle slot stays empty."""
  mesh = sharding.make_mesh()
  with jax.set_mesh(mesh):
    params, tokens = on(mesh, CONFIG)
    whole = decoder.forward(
      params, tokens[:1], jnp.arange(PROMPT + STEPS)[None], jnp.ones((1, PROMPT + STEPS), int), CONFIG
    )
  np.testing.assert_allclose(unrolled["hidden"][: PROMPT + STEPS], whole[0], atol=2e-6)
  for k, v in unrolled["cache"]:
    assert not k[2].any() and not v[2].any() and np.abs(k[0, :, :9]).min() > 0 and not k[0, :, 9:].any()


@pytest.mark.parametrize("scan", [False, True])
def test_an_empty_cache_has_its_slots_where_it_says(scan):
  config = dataclasses.replace(CONFIG, scan_layers=scan, dtype="bfloat16")
  with jax.set_mesh(sharding.make_mesh(2, 1, 2)):
    cache = jax.jit(decoder.init_cache, static_argnums=(0, 1, 2))(config, ROWS, CAPACITY)
  axis = decoder.cache_slot_axis(config)
  assert decoder.cache_capacity(cache) == CAPACITY
  for leaf in jax.tree.leaves(cache):
    assert leaf.dtype == jnp.bfloat16 and leaf.shape[axis:] == (ROWS, 2, CAPACITY, 8) and not leaf.any()
    assert jax.typeof(leaf).sharding.spec[axis : axis + 2] == (("data", "fsdp"), "tp")


def gradient(config):
  """(gradients, bytes of temporary memory) of a packed loss, compiled for one device."""
  mesh = sharding.make_mesh()
  with jax.set_mesh(mesh):
    compiled = jax.jit(jax.grad(packed_loss), static_argnums=2).lower(*on(mesh, config), config).compile()
    return compiled(*on(mesh, config)), compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def stored():
  return gradient(dataclasses.replace(CONFIG, scan_layers=True))


@pytest.mark.parametrize("remat, scan", [*((remat, True) for remat in decoder.POLICIES), ("full", False)])
def test_what_is_computed_again_is_the_same_and_takes_less_memory(stored, remat, scan):
  gradients, memory = gradient(dataclasses.replace(CONFIG, remat=remat, scan_layers=scan))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, stored[0])
  if remat == "full" and scan:  # unrolled on a CPU, the compiler merges the second computation with the first
    assert memory < 0.8 * stored[1], (memory, stored[1])


@pytest.mark.parametrize("remat", decoder.POLICIES)
def test_gradients_over_a_mesh_are_those_without_remat(remat):
  """Biases, heads over `tp` that are held twice, gathered weights: all that a policy names lies sharded."""
  model = dataclasses.replace(CONFIG, architecture="Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, num_kv_heads=1)
  found = []
  for name in ("none", remat):
    config, mesh = dataclasses.replace(model, scan_layers=True, remat=name), sharding.make_mesh(1, 2, 2)
    with jax.set_mesh(mesh):
      found.append(jax.jit(jax.grad(packed_loss), static_argnums=2)(*on(mesh, config), config))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *found)


def test_an_unknown_policy_is_refused():
  assert set(decoder.POLICIES) == set(REMAT) - {"none"}
  with pytest.raises(ValueError, match="remat 'everything' is not a policy; choose one of none, full, attention_out, "):
    dataclasses.replace(CONFIG, remat="everything")


def test_a_decode_loop_on_a_tpu_gets_the_same_weights_with_heads_outside(monkeypatch):
  mesh = sharding.make_mesh(1, 2, 2)
  with jax.set_mesh(mesh):
    params, _ = on(mesh, CONFIG)
    assert decoder.for_decode(params) is params
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    moved = decoder.for_decode(params)
  jax.tree.map(np.testing.assert_array_equal, moved, params)
  for name in ("q", "k", "v"):
    assert moved["layers"][name].format.layout.major_to_minor == (0, 2, 1, 3)
    assert moved["layers"][name].sharding == params["layers"][name].sharding


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2)])
def test_in_bfloat16_a_copy_that_was_cast_before_gives_the_very_same_logits(shape):
  """An actor's copy is cast once, where the scorer casts the master weights as it goes."""
  config = dataclasses.replace(CONFIG, dtype="bfloat16", scan_layers=True)
  mesh = sharding.make_mesh(*shape)
  params, tokens = sharding.put_params(random_params(config), mesh), sharding.put_rows(np.ones((2, 5), np.int32), mesh)
  cast = {name: jax.tree.map(lambda x: x.astype(jnp.bfloat16), leaf) for name, leaf in params.items()}
  cast["final_norm"] = params["final_norm"]
  with jax.set_mesh(mesh):
    np.testing.assert_array_equal(decoder.logits(params, tokens, config), decoder.logits(cast, tokens, config))
