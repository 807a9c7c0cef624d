"""More devices in `tp` than key/value heads: the same numbers as on one device, each device with the head it needs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import random_params

from seed_jax import decode, ops, sharding
from seed_jax.engine import Engine
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
from seed_jax.requests import Request

QWEN2 = ModelConfig("Qwen2ForCausalLM", 64, 32, 2, 8, 2, 8, 48, qkv_bias=True, rope_theta=100.0, scan_layers=True)
QWEN3 = dataclasses.replace(
  QWEN2, architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, scan_layers=False, num_layers=1
)
CASES = pytest.mark.parametrize(  # two heads over four and over eight devices
  "config, shape", [(QWEN2, (1, 2, 4)), (QWEN3, (1, 1, 8))], ids=["qwen2", "qwen3"]
)


def params_of(config):
  return jax.tree.map(lambda x: 0.3 * x, random_params(config))


def logits_and_gradients(config, shape):
  mesh = sharding.make_mesh(*shape)
  tokens = np.random.default_rng(1).integers(0, 64, (4, 12)).astype(np.int32)
  segments = np.repeat([[1, 2]], 4, axis=0).repeat(6, axis=1)

  def hidden(params, tokens, segments):
    return decoder.forward(params, tokens, jnp.broadcast_to(jnp.arange(12), tokens.shape), segments, config)

  def logits(params, *rows):
    return decoder.logits_at(params, hidden(params, *rows), config)

  def loss(params, tokens, segments):
    return jnp.mean(ops.token_logprobs(hidden(params, tokens, segments), decoder.head(params), tokens)[0])

  with jax.set_mesh(mesh):
    params, rows = sharding.put_params(params_of(config), mesh), sharding.put_rows((tokens, segments), mesh)
    gradients = jax.jit(jax.grad(loss))(params, *rows)
    specs = jax.tree.map(lambda x: x.sharding.spec, gradients)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, specs, sharding.param_specs(params)))
    return jax.device_get((jax.jit(logits)(params, *rows), gradients))


@CASES
def test_logits_and_gradients_are_those_of_one_device(config, shape):
  expected, gradients = logits_and_gradients(config, (1, 1, 1))
  found, found_gradients = logits_and_gradients(config, shape)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(found_gradients), strict=True
  ):
    assert np.abs(a).max() > 1e-7, path
    np.testing.assert_allclose(b, a, atol=2e-5 * np.abs(a).max(), err_msg=str(path))


def answers(config, shape):
  mesh = sharding.make_mesh(*shape)
  options = dict(num_slots=4, capacity=32, max_new=5, sampling=decode.Sampling(1.0), stop_ids=(), seed=5, smallest=4)
  engine = Engine(config, mesh, **options)
  engine.set_params(sharding.put_params(params_of(config), mesh))
  out = []
  for turn in range(2):  # the second one reads what the first has left in the cache
    requests = [Request(i, [3, 4 + turn, i + 5, 7], (turn, i), fresh=turn == 0) for i in range(4)]
    out += engine.turn(requests)
  return out, engine.slots.cache


@CASES
def test_sampled_tokens_are_those_of_one_device_and_a_cache_holds_one_head(config, shape):
  expected, _ = answers(config, (1, 1, 1))
  found, cache = answers(config, shape)
  for a, b in zip(found, expected, strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
  heads = {leaf.addressable_shards[0].data.shape[-3] for leaf in jax.tree.leaves(cache)}
  assert heads == {1}


def test_the_projections_lie_whole_on_every_device_of_tp():
  mesh = sharding.make_mesh(1, 2, 4)
  placed = sharding.put_params(params_of(QWEN2), mesh)["layers"]
  assert placed["k"].addressable_shards[0].data.shape == (2, 16, 2, 8)  # D over fsdp, both heads
  assert placed["q"].addressable_shards[0].data.shape == (2, 16, 2, 8)  # two of eight heads
  assert placed["v_bias"].addressable_shards[0].data.shape == (2, 2, 8)


def test_heads_that_neither_divide_nor_repeat_are_refused_with_the_numbers():
  assert [sharding.held_kv_heads(K, tp) for K, tp in ((8, 4), (2, 4), (2, 8), (4, 4), (1, 2))] == [8, 4, 8, 4, 2]
  config = dataclasses.replace(QWEN2, num_heads=12, num_kv_heads=4, hidden_size=96, vocab_size=66)
  with pytest.raises(
    ValueError, match=r"4 key/value heads neither divide over tp=6 .* choose a tp that divides 4 or is"
  ):
    sharding.put_params(params_of(config), sharding.make_mesh(1, 1, 6))
  with pytest.raises(ValueError, match=r"layers/o \(2, 12, 8, 96\): heads=12 does not divide over \('tp',\)=8"):
    sharding.check_divisible({"layers": params_of(config)["layers"]}, sharding.make_mesh(1, 1, 8))
