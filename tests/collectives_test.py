"""What devices say to each other: the pair and the distillation loss add nothing, and weights travel as they should.

Programs are compiled for a mesh of eight CPU devices and their collectives counted. A CPU's compiler writes a
reduce-scatter as it was asked for; a TPU's may choose otherwise.
"""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_cases import CONFIG, samples
from jax.sharding import PartitionSpec as P
from model_cases import random_params

from seed_jax import batching, methods, score, sharding, update
from seed_jax.batching import RowShape
from seed_jax.models import decoder
from seed_jax.update import LossConfig, MethodLoss

SHAPE = (2, 2, 2)
MODEL = dataclasses.replace(CONFIG, num_layers=3, dtype="bfloat16", scan_layers=True, remat="full")
OPERATION = re.compile(r"= (\(?[^=]*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-\w+)(?:-start)?\(")


def collectives(lowered):
  """[(operation, shapes it gives)] of a compiled program, each as often as it stands there."""
  return [(name, re.sub(r"\{[^}]*\}", "", shapes)) for shapes, name in OPERATION.findall(lowered.compile().as_text())]


def count(lowered):
  return collections.Counter(name for name, _ in collectives(lowered))


@pytest.fixture(scope="module")
def mesh():
  return sharding.make_mesh(*SHAPE)


@pytest.fixture(scope="module")
def params(mesh):
  return sharding.put_params(random_params(MODEL), mesh)


@pytest.fixture(scope="module")
def batch(mesh):
  made = batching.to_batches(samples(), [RowShape(48, 32, 8)], mesh, skills=True)[0]
  zeros = jnp.zeros_like(made.mask)
  return made.replace(old_logprobs=zeros, skill_logprobs=zeros)


def test_pairing_two_contexts_and_parting_them_is_local(mesh, batch):
  one = jax.tree.map(lambda x: x[0], (batch.ordinary, batch.skill))

  def there_and_back(ordinary, skill):
    return score.split_pair(score.interleave(ordinary, skill).index)

  with jax.set_mesh(mesh):
    assert not count(jax.jit(there_and_back).lower(*one))


def test_scoring_a_pair_takes_the_collectives_of_scoring_one_context(mesh, params, batch):
  with jax.set_mesh(mesh):
    pair = score.score_pair.lower(params, batch.ordinary, batch.skill, batch.targets, batch.count, MODEL)
    one = score.score.lower(params, batch.ordinary, batch.targets, batch.count, MODEL)
    assert count(pair) == count(one) and sum(count(one).values())


def gradients_of(method, mesh, params, batch):
  """The program that adds up the gradients of a mini-batch."""
  step = update.make_update(MODEL, MethodLoss(methods.get(method), LossConfig(kl_coef=0.0)), optax.sgd(1.0))
  batch = batch.replace(skill=None)
  with jax.set_mesh(mesh):
    denominators = update.total_counts([batch])
    zeros = step._zeros(params, batch, denominators)
    return step._accumulate.lower(params, *zeros, batch, denominators)


@pytest.fixture(scope="module")
def seed_gradients(mesh, params, batch):
  return collectives(gradients_of("seed", mesh, params, batch))


def test_the_distillation_loss_adds_sums_of_numbers_alone(mesh, params, batch, seed_gradients):
  """Against GRPO: its share of the loss, its share's metrics, and no array is exchanged that was not before."""

  def arrays(found):
    return collections.Counter((name, shapes) for name, shapes in found if re.search(r"\[\d", shapes))

  grpo = collectives(gradients_of("grpo", mesh, params, batch))
  assert arrays(seed_gradients) == arrays(grpo)
  more = collections.Counter(seed_gradients) - collections.Counter(grpo)
  assert {name for name, _ in more} <= {"all-reduce"}


def test_the_reduction_of_the_distillation_loss_is_in_the_losss_own_sum(mesh, batch):
  """Value and gradient by log-probabilities that lie on four devices: one exchange with the term and without it."""
  one = jax.tree.map(lambda x: x[0] if x.ndim else x, batch.replace(skill=None))

  def loss(method, logprobs, denominators):
    loss = MethodLoss(methods.get(method), LossConfig(kl_coef=0.0))
    return loss(logprobs, jnp.zeros_like(logprobs), one, denominators)[0]

  with jax.set_mesh(mesh):
    arguments = one.sampler_logprobs, update.total_counts([batch])
    program = lambda method: jax.jit(jax.value_and_grad(functools.partial(loss, method)))  # noqa: E731
    found = {method: count(program(method).lower(*arguments)) for method in ("seed", "grpo")}
  assert found["seed"] == found["grpo"] == {"all-reduce": 1}


def test_weights_are_gathered_a_layer_at_a_time_and_their_gradients_scattered(seed_gradients):
  """No device gets the stack of all layers, or the gradient of a matrix, whole."""
  D, F, V = MODEL.hidden_size, MODEL.intermediate_size, MODEL.vocab_size
  tp = SHAPE[2]
  gathered = [shapes for name, shapes in seed_gradients if name == "all-gather"]
  assert any(f"{D},{F // tp}]" in shapes for shapes in gathered)
  for shapes in gathered:
    assert not re.search(rf"\[{MODEL.num_layers},", shapes), shapes
  scattered = " ".join(shapes for name, shapes in seed_gradients if name == "reduce-scatter")
  assert scattered.count(f"[{D // 2},{F // tp}]") >= 2, scattered  # gate and up
  for name, shapes in seed_gradients:
    if name == "all-reduce":
      assert f"[{D},{F // tp}]" not in shapes and f"[{V // tp},{D}]" not in shapes, shapes


def test_the_embedding_is_looked_up_where_it_lies(mesh, params):
  tokens = sharding.put_rows(np.zeros((8, 16), np.int32), mesh)
  with jax.set_mesh(mesh):
    found = collectives(jax.jit(lambda p, t: decoder._embed(p, t, MODEL)).lower(params, tokens))
    looked = jax.jit(lambda p, t: decoder._embed(p, t, dataclasses.replace(MODEL, dtype="float32")))(params, tokens + 3)
  whole = f"[{MODEL.vocab_size // SHAPE[2]},{MODEL.hidden_size}]"
  assert {name for name, _ in found} == {"all-gather", "all-to-all", "all-reduce"}
  assert not any(whole in shapes for _, shapes in found), found
  np.testing.assert_array_equal(np.asarray(looked)[5, 7], np.asarray(params["embed"])[3])
  assert looked.sharding.spec == P(sharding.ROWS[0], None, None)
