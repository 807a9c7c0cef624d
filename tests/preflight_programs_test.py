"""The programs that preflight lowers from shapes are, to the letter, those that a run lowers from arrays.

Eight CPU devices stand in for a host with eight chips.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import alfworld
from seed_jax import batching, decode, learn, preflight_plans, preflight_programs, sharding, topologies, update
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


def policy(plan, mesh, dtype):
  params = decoder.init(jax.random.key(0), plan.model)
  return sharding.put_params(jax.tree.map(lambda x: x.astype(dtype), params), mesh)


def test_all_programs_lower(case):
  lowered = {name: lower() for name, lower in preflight_programs.programs(*case).items()}
  assert list(lowered) == ["score", "update", "optimizer", "prefill", "decode", "reshard", "grow"]
  assert all(len(each.as_text()) > 500 for each in lowered.values())


def test_the_learners_programs_are_those_of_a_run(case):
  plan, training = case
  mesh = preflight_programs.learner_mesh(plan)
  abstract = preflight_programs.lower_update(plan, training, mesh)
  params = policy(plan, mesh, jnp.float32)
  with jax.set_mesh(mesh):
    state = update.init_state(params, training.optimizer)
    batch = batching.empty_batch(training.shape, mesh, **training.scoring.batch_options)
    scored = learn.scored(batch, params, params, training.scoring, first=True)
    real = training.step.lower(state, scored.replace(skill=None))
    assert real.keys() == abstract.keys()
    for name in real:
      assert real[name].as_text() == abstract[name].as_text(), name


def test_the_decode_loop_is_that_of_a_run(case):
  plan, training = case
  mesh = preflight_programs.actor_mesh(plan)
  abstract = preflight_programs.lower_decode(plan, training, mesh)
  params = policy(plan, mesh, plan.model.dtype)
  zeros = np.zeros(plan.slots, np.int32)
  draw = decode.Draw(np.zeros((plan.slots, 5), np.int32), zeros, np.zeros(plan.slots, np.float32))
  with jax.set_mesh(mesh):
    cache = decode.init_cache(plan.model, plan.slots, training.capacity)
    rows = sharding.put_rows((zeros, zeros, zeros, draw), mesh)
    numbers = sharding.put_replicated((np.int32(0), np.int32(1)), mesh)
    options = dict(sampling=training.sampling, max_new=training.check_every, stop_ids=training.stop_ids)
    real = decode.generate.lower(params, cache, *rows, *numbers, plan.model, **options)
  assert real.as_text() == abstract.as_text()


def test_every_host_gets_a_copy_in_the_compute_dtype(case):
  plan, _ = case
  out = jax.tree.leaves(preflight_programs.lower_reshard(plan).out_info)
  assert {leaf.dtype for leaf in out} == {jnp.dtype(plan.model.dtype)} and plan.model.dtype == "bfloat16"
