"""The programs of a training run as shapes on a slice: what `preflight` compiles, lowered as the run lowers them.

Shapes: S slots of one host, C capacity of a slot, P slots of one prefill call, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from seed_jax import actors, batching, decode, learn, score, sharding, topologies, update
from seed_jax.batching import RowShape
from seed_jax.engine import prefill_widths
from seed_jax.models import decoder
from seed_jax.requests import COORDINATES
from seed_jax.roofline import Plan


@dataclasses.dataclass(frozen=True)
class Training:
  """What the programs of a run depend on besides the plan."""

  scoring: learn.Scoring
  step: update.Update
  optimizer: optax.GradientTransformation
  shape: RowShape
  reference: bool
  minibatches: int
  sampling: decode.Sampling
  stop_ids: tuple[int, ...]
  capacity: int
  smaller: tuple[int, ...]  # capacities with which slots begin
  prefill_tokens: int
  prefill_width: int  # tokens of a slot that one call reads
  check_every: int = 16


def learner_mesh(plan: Plan) -> Mesh:
  """The learner's mesh over all chips of the slice."""
  return sharding.make_mesh(plan.data, plan.fsdp, plan.tp, devices=topologies.devices(plan.slice))


def actor_mesh(plan: Plan, learner: Mesh) -> Mesh:
  """The mesh on which the first host plays, of the learner's devices as the run makes it of them."""
  return actors.actor_mesh(learner, plan.actor_shape, num_hosts=plan.slice.hosts)


def programs(plan: Plan, training: Training) -> dict[str, Callable[[], jax.stages.Lowered]]:
  """name -> a call that lowers it: score, update (the gradients of a mini-batch), optimizer, prefill, decode; cast and
  place where actors have a copy of the weights; grow where slots grow.
  """
  learner = learner_mesh(plan)
  actor = actor_mesh(plan, learner)
  more = {}
  if actor is not learner:
    more["cast"] = lambda: lower_cast(plan, learner)
    more["place"] = lambda: lower_place(plan, learner, actor)
  if training.smaller:
    more["grow"] = lambda: lower_grow(plan, training, actor)
  return {
    "score": lambda: lower_score(plan, training, learner),
    "update": lambda: lower_update(plan, training, learner)["gradients"],
    "optimizer": lambda: lower_update(plan, training, learner)["optimizer"],
    "prefill": lambda: lower_prefill(plan, training, learner, actor),
    "decode": lambda: lower_decode(plan, training, learner, actor),
  } | more


# ---------------------------------------------------------------- the learner's


def lower_score(plan: Plan, training: Training, mesh: Mesh) -> jax.stages.Lowered:
  """The dearest scoring program: both contexts at once where a later mini-batch needs them, else the skill context,
  else the ordinary one of the reference.
  """
  s = training.scoring
  params = abstract_params(plan, mesh)
  batch = abstract_batch(training, mesh)
  options = dict(temperature=s.loss.temperature)
  with jax.set_mesh(mesh):
    if s.method.needs_skills and (training.minibatches > 1 or not s.own_old) and s.rescore == "iteration":
      lower = score.score_pair.lower
      return lower(params, batch.ordinary, batch.skill, batch.targets, batch.count, s.model, **options)
    context = batch.skill if s.method.needs_skills else batch.ordinary
    start = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    return score.score.lower(params, context, batch.targets, batch.count, s.model, start=start, **options)


def lower_update(plan: Plan, training: Training, mesh: Mesh) -> dict[str, jax.stages.Lowered]:
  """The gradients of a mini-batch and the optimizer step."""
  params = abstract_params(plan, mesh)
  batch = abstract_batch(training, mesh)
  with jax.set_mesh(mesh):
    state = on_mesh(jax.eval_shape(lambda p: update.init_state(p, training.optimizer), params), mesh)
    reference = params if training.reference else None
    scored = lambda b, p, r: learn.scored(b, p, r, training.scoring, first=training.scoring.own_old)  # noqa: E731
    batch = on_mesh(jax.eval_shape(scored, batch, params, reference), mesh)
    return training.step.lower(state, batch.replace(skill=None))


def abstract_params(plan: Plan, mesh: Mesh) -> dict:
  """Parameters in float32 under their stored specs; ValueError where they do not divide over the mesh."""
  return _stored(jax.eval_shape(lambda: decoder.init(jax.random.key(0), plan.model)), mesh)


def _stored(shapes, mesh):
  sharding.check_divisible(shapes, mesh)
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))  # noqa: E731
  return jax.tree.map(place, shapes, sharding.param_specs(shapes, mesh))


def abstract_batch(training: Training, mesh: Mesh) -> update.Batch:
  """A batch as `batching` lays it out, on the mesh."""
  one = sharding.make_mesh()
  shapes = jax.eval_shape(lambda: batching.empty_batch(training.shape, one, **training.scoring.batch_options))
  spec = lambda x: P(None, *sharding.ROWS) if x.ndim else P()  # noqa: E731
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x))), shapes)


def on_mesh(tree, mesh: Mesh):
  """Shapes that carry specs, on the devices of a mesh; what carries none is whole everywhere."""

  def place(x):
    spec = P() if x.sharding is None else x.sharding.spec
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree.map(place, tree)


# ---------------------------------------------------------------- the actors'


def actor_params(plan: Plan, learner: Mesh, actor: Mesh) -> dict:
  """The weights of a host as the decode loop reads them (`decoder.for_decode`): a copy, cast, or the learner's own."""
  params = abstract_params(plan, learner)
  if actor is not learner:
    params = _stored(cast_params(plan, learner), actor)
  for name in ("q", "k", "v") if actor.devices.flat[0].platform == "tpu" else ():
    leaf = params["layers"][name]
    place = decoder.heads_outside(leaf.sharding)
    params["layers"][name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
  return params


def abstract_cache(plan: Plan, capacity: int, mesh: Mesh):
  """The cache of a host's slots, of so many tokens each, as shapes. The mesh must be set."""
  return on_mesh(jax.eval_shape(lambda: decoder.init_cache(plan.model, plan.slots, capacity)), mesh)


def lower_decode(plan: Plan, training: Training, learner: Mesh, mesh: Mesh) -> jax.stages.Lowered:
  """The sampling loop over all slots of a host."""
  slot, number = _arrays(mesh, plan.slots)
  params = actor_params(plan, learner, mesh)
  with jax.set_mesh(mesh):
    cache = abstract_cache(plan, training.capacity, mesh)
    return decode.generate.lower(
      params,
      cache,
      *[slot(jnp.int32)] * 3,
      _draw(slot),
      *[number] * 2,
      plan.model,
      sampling=training.sampling,
      max_new=training.check_every,
      stop_ids=training.stop_ids,
    )


def lower_prefill(plan: Plan, training: Training, learner: Mesh, mesh: Mesh) -> jax.stages.Lowered:
  """The largest piece of prompts that one call reads into some of the slots."""
  T = training.prefill_width
  width = prefill_widths(plan.slots, T, sharding.num_row_shards(mesh), training.prefill_tokens)[1]
  row, number = _arrays(mesh, width)
  whole = width == plan.slots  # all slots in their order: none is taken out
  params = actor_params(plan, learner, mesh)
  with jax.set_mesh(mesh):
    cache = abstract_cache(plan, training.capacity, mesh)
    return decode.prefill.lower(
      params,
      cache,
      *([None] * 2 if whole else [row(jnp.int32)] * 2),
      row(jnp.int32),
      row(jnp.int32, T),
      row(jnp.int32),
      _draw(row),
      number,
      plan.model,
      sampling=training.sampling,
    )


def lower_grow(plan: Plan, training: Training, mesh: Mesh) -> jax.stages.Lowered:
  """The step to slots of the full capacity, for which both caches exist at a time."""
  with jax.set_mesh(mesh):
    cache = abstract_cache(plan, training.smaller[-1], mesh)
    return decode.grow.lower(cache, training.capacity)


# ---------------------------------------------------------------- from the one to the others


def lower_cast(plan: Plan, learner: Mesh) -> jax.stages.Lowered:
  """The learner's shards in the dtype of the layers."""
  params = abstract_params(plan, learner)
  with jax.set_mesh(learner):
    return actors.cast.lower(params, plan.model.dtype)


def cast_params(plan: Plan, learner: Mesh) -> dict:
  """What `cast` gives, as shapes."""
  return on_mesh(lower_cast(plan, learner).out_info, learner)


def lower_place(plan: Plan, learner: Mesh, actor: Mesh) -> jax.stages.Lowered:
  """The program that `jax.device_put` runs for the largest array on its way to every host's copy: an identity.

  Its devices are in the order of the copies. Here the learner's shards lie on them in that order, too; in a run another
  chip of the slice has each, which changes neither what is held nor, with data = 1, how much is received.
  """
  params = cast_params(plan, learner)
  pairs = zip(jax.tree.leaves(params), jax.tree.leaves(actors.copies(params, learner, actor)), strict=True)
  largest, copy = max(pairs, key=lambda pair: pair[0].size)
  devices = copy.mesh.devices.reshape(learner.devices.shape)
  turned = Mesh(devices, learner.axis_names, axis_types=(AxisType.Auto,) * 3)
  shards = jax.ShapeDtypeStruct(largest.shape, largest.dtype, sharding=NamedSharding(turned, largest.sharding.spec))
  return jax.jit(lambda x: x, out_shardings=copy).lower(shards)


def _arrays(mesh: Mesh, count: int):
  """Shapes of one value a slot, and of a number."""
  rows, whole = NamedSharding(mesh, sharding.ROWS), NamedSharding(mesh, P())
  slot = lambda dtype, *more: jax.ShapeDtypeStruct((count, *more), dtype, sharding=rows)  # noqa: E731
  return slot, jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)


def _draw(slot) -> decode.Draw:
  return decode.Draw(slot(jnp.int32, COORDINATES), slot(jnp.int32), slot(jnp.float32))
