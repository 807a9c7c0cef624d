"""The programs that preflight lowers from shapes are, to the letter, those that a run lowers from arrays.

Eight CPU devices stand in for a host with eight chips.
"""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import alfworld
from seed_jax import actors, batching, decode, learn, preflight_plans, roofline, sharding, topologies, update
from seed_jax import preflight_programs as abstracts
from seed_jax.models import decoder, presets


@pytest.fixture(scope="module")
def case():
  """(plan, training) of a model of two small layers with the ALFWorld preset's options, short rows and few slots."""
  c = alfworld.get_config("qwen2_5_3b,v6e:2x4")
  c.update_from_flattened_dict(
    {
      "model.preset": "qwen2_5_test",
      "mesh": dict(data=2, fsdp=2, tp=2),
      "actor_mesh": dict(data=4, fsdp=1, tp=2),
      "train.row_lengths": (64,),
      "train.micro_tokens": 256,
      "train.optimizer.moment_dtype": "float32",
      "rollout.slots": 8,
      "rollout.capacity": 64,
      "rollout.capacity_buckets": (32,),
      "rollout.prefill_buckets": (16,),
      "rollout.prefill_tokens": 64,
      "analysis.max_prompt": 48,
      "analysis.max_response": 16,
    }
  )
  slice_ = topologies.parse("v6e:2x4")
  small = dataclasses.replace(presets.get("qwen2_5_test"), num_layers=2, hidden_size=64, vocab_size=256, head_dim=16)
  patch = pytest.MonkeyPatch()
  patch.setitem(presets.PRESETS, "qwen2_5_test", dataclasses.replace(small, intermediate_size=96))
  patch.setattr(topologies, "devices", lambda _: jax.devices()[:8])
  yield preflight_plans.plan_of(c, slice_), preflight_plans.training_of(c)
  patch.undo()


@pytest.fixture(scope="module")
def meshes(case):
  """(the learner's, the actors'), as preflight makes them."""
  learner = abstracts.learner_mesh(case[0])
  return learner, abstracts.actor_mesh(case[0], learner)


def policy(plan, mesh):
  return sharding.put_params(decoder.init(jax.random.key(0), plan.model), mesh)


def test_all_programs_lower(case):
  lowered = {name: lower() for name, lower in abstracts.programs(*case).items()}
  assert list(lowered) == ["score", "update", "optimizer", "prefill", "decode", "cast", "place", "grow"]
  assert all(len(each.as_text()) > 500 for each in lowered.values())


def test_the_learners_programs_are_those_of_a_run(case, meshes):
  (plan, training), (mesh, _) = case, meshes
  abstract = abstracts.lower_update(plan, training, mesh)
  params = policy(plan, mesh)
  with jax.set_mesh(mesh):
    state = update.init_state(params, training.optimizer)
    batch = batching.empty_batch(training.shape, mesh, **training.scoring.batch_options)
    scored = learn.scored(batch, params, params, training.scoring, first=True)
    real = training.step.lower(state, scored.replace(skill=None))
    assert real.keys() == abstract.keys()
    for name in real:
      assert real[name].as_text() == abstract[name].as_text(), name


def test_the_decode_loop_is_that_of_a_run(case, meshes):
  (plan, training), (learner, mesh) = case, meshes
  abstract = abstracts.lower_decode(plan, training, learner, mesh)
  params = actors.to_actor(learner, mesh, plan.model.dtype)(policy(plan, learner))
  zeros = np.zeros(plan.slots, np.int32)
  draw = decode.Draw(np.zeros((plan.slots, 5), np.int32), zeros, np.zeros(plan.slots, np.float32))
  with jax.set_mesh(mesh):
    cache = decode.init_cache(plan.model, plan.slots, training.capacity)
    rows = sharding.put_rows((zeros, zeros, zeros, draw), mesh)
    numbers = sharding.put_replicated((np.int32(0), np.int32(1)), mesh)
    options = dict(sampling=training.sampling, max_new=training.check_every, stop_ids=training.stop_ids)
    real = decode.generate.lower(params, cache, *rows, *numbers, plan.model, **options)
  assert real.as_text() == abstract.as_text()


def test_the_actors_mesh_is_that_of_a_run(case, meshes):
  """The same function on the same devices; the job of this process has one host, as the plan's slice."""
  plan, _ = case
  learner, actor = meshes
  assert actor == actors.actor_mesh(learner, dict(data=4, fsdp=1, tp=2)) and plan.slice.hosts == 1


def test_the_cast_is_that_of_a_run_and_leaves_the_last_norm(case, meshes):
  (plan, _), (learner, _) = case, meshes
  abstract = abstracts.lower_cast(plan, learner)
  with jax.set_mesh(learner):
    real = actors.cast.lower(policy(plan, learner), plan.model.dtype)
  assert real.as_text() == abstract.as_text()
  assert abstract.out_info["final_norm"].dtype == jnp.float32
  assert abstract.out_info["layers"]["q"].dtype == plan.model.dtype == "bfloat16"


def test_the_largest_array_goes_where_a_run_puts_it(case, caplog):
  """By the program that `device_put` compiles: from the same shapes to the same shardings."""
  plan, _ = case
  learner = abstracts.learner_mesh(plan)
  learner = jax.sharding.Mesh(learner.devices[::-1], learner.axis_names, axis_types=learner.axis_types)
  actor = abstracts.actor_mesh(plan, learner)
  params = abstracts.cast_params(plan, learner)
  abstract = abstracts.lower_place(plan, learner, actor)
  largest = params["embed"]
  assert largest.size == max(x.size for x in jax.tree.leaves(params))
  array = jax.device_put(jnp.zeros(largest.shape, largest.dtype), largest.sharding)
  copy = actors.copies(params, learner, actor)["embed"]
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    placed = jax.device_put(array, copy)
  (shape,) = re.findall(r"Compiling .*?bfloat16\[([\d,]+)\]", caplog.text)
  assert shape == ",".join(map(str, largest.shape)) == ",".join(map(str, abstract.in_avals[0][0].shape))
  assert placed.sharding == abstract.out_info.sharding == copy


def test_actors_on_the_learners_mesh_have_no_copy(case):
  """One host, and config.actor_mesh left open: nothing is cast or placed, and decoding reads float32."""
  plan, training = case
  plan = dataclasses.replace(plan, own_copy=False, actor_fsdp=2)
  learner = abstracts.learner_mesh(plan)
  assert abstracts.actor_mesh(plan, learner) is learner
  assert not {"cast", "place"} & abstracts.programs(plan, training).keys()
  params = abstracts.actor_params(plan, learner, learner)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  assert [p.name for p in roofline.copy_phases(plan)] == []
