"""Every shipped TPU preset, up to 512 chips, as shapes on an abstract mesh: no devices, no compiler, seconds.

Shapes: M micro-batches, B rows, T tokens of a row, R response tokens of a row, S slots, P slots of one prefill call.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from configs import alfworld, tpu
from seed_jax import batching, decode, methods, run, score, sharding, topologies, update
from seed_jax.models import decoder
from seed_jax.optimizer import make_optimizer
from seed_jax.requests import COORDINATES
from seed_jax.update import LossConfig, MethodLoss

M = batching.MICRO_BATCHES


def mesh_of(section):
  return AbstractMesh((section.data, section.fsdp, section.tp), sharding.AXES, axis_types=(AxisType.Explicit,) * 3)


def struct(mesh, shape, dtype, *spec):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def placed(mesh, model, dtype):
  """The parameters' shapes as they are stored."""
  shapes = jax.eval_shape(lambda key: decoder.init(key, model), jax.random.key(0))
  sharding.check_divisible(shapes, mesh)
  return jax.tree.map(lambda x, s: struct(mesh, x.shape, dtype, *s), shapes, sharding.param_specs(shapes, mesh))


def specs_of(tree):
  return jax.tree.map(lambda x: x.sharding.spec, tree)


def batch_of(mesh, shape, skill_length):
  """A scored batch, as `batching` lays it out."""

  def row(dtype, width):
    return struct(mesh, (M, shape.rows, width), dtype, None, *sharding.ROWS)

  def context(length):
    return score.Context(*[row(jnp.int32, length)] * 3, row(jnp.int32, shape.responses))

  number = functools.partial(struct, mesh, ())
  values = row(jnp.float32, shape.responses)
  names = ("mask", "skill_mask", "advantages", "sampler_logprobs", "old_logprobs", "skill_logprobs", "ref_logprobs")
  return update.Batch(
    ordinary=context(shape.length),
    skill=context(skill_length),
    targets=row(jnp.int32, shape.responses),
    **dict.fromkeys(names, values),
    count=number(jnp.int32),
    skill_count=number(jnp.int32),
    own_old=number(jnp.bool_),
  )


def learners():
  """Of the shipped presets those with another model or mesh than the ones before them."""
  found = {}
  for model, topology in tpu.shipped():
    c = alfworld.get_config(f"{model},{topology}")
    found.setdefault((model, *c.mesh.values()), (model, topology))
  return list(found.values())


def actors():
  """The same for what the engine runs on: the mesh of a host and its slots."""
  found = {}
  for model, topology in tpu.shipped():
    c = alfworld.get_config(f"{model},{topology}")
    found.setdefault((model, *c.actor_mesh.values(), slots_of_a_host(c, topology)), (model, topology))
  return list(found.values())


def slots_of_a_host(c, topology):
  return c.rollout.slots // topologies.parse(topology).hosts


@pytest.mark.parametrize("model, topology", tpu.shipped(), ids=map(",".join, tpu.shipped()))
def test_parameters_and_rows_divide_and_moments_lie_as_their_parameters(model, topology):
  c = alfworld.get_config(f"{model},{topology}")
  mesh, shape = mesh_of(c.mesh), run.preset_model(c)
  assert mesh.size == topologies.parse(topology).chips
  params = placed(mesh, shape, jnp.float32)
  (row,) = run.row_shapes(c.train, sharding.num_row_shards(mesh))
  assert row.rows % sharding.num_row_shards(mesh) == 0 and row.rows <= max(64, sharding.num_row_shards(mesh))
  assert row.holds(longest_sample(c))
  placed(mesh_of(c.actor_mesh), shape, jnp.bfloat16)
  assert slots_of_a_host(c, topology) % c.actor_mesh.data == 0

  optimizer = make_optimizer(run.optimizer_config(c.train.optimizer), 10)
  with jax.sharding.use_abstract_mesh(mesh):
    state = jax.eval_shape(optimizer.init, params)
  shapes = [x.shape for x in jax.tree.leaves(params)]
  moments = [x for x in jax.tree.leaves(state) if x.shape]
  assert [x.shape for x in moments] == shapes * 2  # both moments
  assert [x.sharding.spec for x in moments] == [x.sharding.spec for x in jax.tree.leaves(params)] * 2
  assert {x.dtype.name for x in moments} == {c.train.optimizer.moment_dtype}


@dataclasses.dataclass(frozen=True)
class Device:
  """What a mesh asks a chip of a slice for."""

  id: int
  coords: tuple[int, int, int]
  device_kind: str
  platform: str = "tpu"
  core_on_chip: int = 0
  process_index: int = 0


def devices_of(topology):
  shape = topologies.parse(topology).shape
  grid = sorted(itertools.product(*map(range, (*shape, 1)[:3])), key=lambda at: at[::-1])
  kind = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}[topology.partition(":")[0]]
  return [Device(i, at, kind) for i, at in enumerate(grid)]


@pytest.mark.parametrize("model, topology", learners(), ids=map(",".join, learners()))
def test_the_learners_mesh_lies_on_its_slice(model, topology):
  """Also where an axis of the slice must be split for it: 64 x 2 chips on 4x4x8."""
  m = alfworld.get_config(f"{model},{topology}").mesh
  mesh = sharding.make_mesh(m.data, m.fsdp, m.tp, devices=devices_of(topology))
  assert mesh.devices.shape == (m.data, m.fsdp, m.tp)


def longest_sample(c):
  tokens, responses = c.rollout.max_prompt + c.rollout.max_response - 1, c.rollout.max_response
  zeros = jnp.zeros(responses)
  return batching.Sample(jnp.zeros(tokens), zeros, zeros, zeros, zeros)


@pytest.mark.parametrize("model, topology", learners(), ids=map(",".join, learners()))
def test_score_and_update_trace_and_gradients_lie_as_their_parameters(model, topology):
  c = alfworld.get_config(f"{model},{topology}")
  mesh, shape = mesh_of(c.mesh), run.preset_model(c)
  params = placed(mesh, shape, jnp.float32)
  (row,) = run.row_shapes(c.train, sharding.num_row_shards(mesh))
  batch = batch_of(mesh, row, row.skill_length)
  optimizer = make_optimizer(run.optimizer_config(c.train.optimizer), 10)
  loss = MethodLoss(methods.get("seed"), LossConfig(**c.train.loss.to_dict()))
  step = update.make_update(shape, loss, optimizer)
  with jax.sharding.use_abstract_mesh(mesh):
    pair = jax.eval_shape(
      lambda *a: score.score_pair(*a, shape), params, batch.ordinary, batch.skill, batch.targets, batch.skill_count
    )
    for logprobs in pair:
      assert logprobs.shape == batch.targets.shape and logprobs.sharding.spec == P(None, *sharding.ROWS, None)
    state = jax.eval_shape(lambda p: update.init_state(p, optimizer), params)
    batch = batch.replace(skill=None)
    denominators = jax.eval_shape(lambda b: update.total_counts([b]), batch)
    zeros = jax.eval_shape(step._zeros, params, batch, denominators)
    gradients, metrics = jax.eval_shape(step._accumulate, params, *zeros, batch, denominators)
    new, metrics = jax.eval_shape(step._apply, state, gradients, metrics)
  assert specs_of(gradients) == specs_of(new.params) == specs_of(params) == specs_of(state.params)
  before, after = ([x for x in jax.tree.leaves(s.opt_state) if x.shape] for s in (state, new))
  assert [x.sharding.spec for x in after] == [x.sharding.spec for x in before]
  assert all(x.shape == () for x in metrics.values()) and "opd_loss" in metrics


@pytest.mark.parametrize("model, topology", actors(), ids=map(",".join, actors()))
def test_prefill_and_decode_trace_on_a_hosts_mesh(model, topology):
  c = alfworld.get_config(f"{model},{topology}")
  mesh, shape, S = mesh_of(c.actor_mesh), run.preset_model(c), slots_of_a_host(c, topology)
  params = placed(mesh, shape, jnp.bfloat16)
  rows, number = sharding.ROWS, struct(mesh, (), jnp.int32)
  slot = lambda dtype, *more: struct(mesh, (S, *more), dtype, *rows)  # noqa: E731
  draw = decode.Draw(slot(jnp.int32, COORDINATES), slot(jnp.int32), slot(jnp.float32))
  with jax.sharding.use_abstract_mesh(mesh):
    cache = jax.eval_shape(lambda: decoder.init_cache(shape, S, c.rollout.capacity))
    options = dict(sampling=decode.Sampling())
    generate = lambda *a: decode.generate(*a, shape, max_new=16, stop_ids=(1,), **options)  # noqa: E731
    sampled, after = jax.eval_shape(generate, params, cache, *[slot(jnp.int32)] * 3, draw, *[number] * 2)
    prefill = lambda *a: decode.prefill(*a[:2], None, None, *a[2:], shape, **options)  # noqa: E731
    token, _, read = jax.eval_shape(
      prefill, params, cache, slot(jnp.int32), slot(jnp.int32, 128), slot(jnp.int32), draw, number
    )
  assert specs_of(after) == specs_of(read) == specs_of(cache)
  assert sampled.tokens.shape == (S, 16) and token.sharding.spec == rows
  assert cache.k.shape[2] == sharding.held_kv_heads(shape.num_kv_heads, c.actor_mesh.tp)


def test_512_chips_share_heads_that_do_not_divide():
  c = alfworld.get_config("qwen2_5_3b,v5p:8x8x8")
  mesh, shape = mesh_of(c.mesh), dataclasses.replace(run.preset_model(c), num_layers=2)
  assert mesh.size == 512 and c.mesh.tp == 8 and shape.num_kv_heads == 2
  assert placed(mesh, shape, jnp.float32)["layers"]["k"].sharding.spec == P(None, "fsdp", None, None)
