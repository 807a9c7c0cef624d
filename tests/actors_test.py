"""The mesh on which a host plays, by its sizes, and the way of the weights to it on one host of eight CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import actors, sharding
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig

LEARNER = dict(data=1, fsdp=8, tp=2)


@pytest.mark.parametrize(
  "num_hosts, given, sizes",
  [
    (4, None, (1, 2, 2)),  # as much of the learner's tp as a host has, then of its fsdp
    (4, dict(data=0, fsdp=1, tp=0), (2, 1, 2)),
    (4, dict(data=1, fsdp=0, tp=4), (1, 1, 4)),
    (2, dict(data=2, fsdp=2, tp=2), (2, 2, 2)),
    (1, dict(data=16, fsdp=1, tp=1), (16, 1, 1)),
    (1, dict(data=0, fsdp=1, tp=0), None),  # the learner's own
    (1, None, None),
  ],
)
def test_the_sizes_of_a_hosts_mesh(num_hosts, given, sizes):
  found = actors.actor_shape(LEARNER, num_hosts, given)
  assert found == (sizes and dict(zip(sharding.AXES, sizes, strict=True)))


@pytest.mark.parametrize(
  "given, told", [(dict(tp=8), "data=0, fsdp=1, tp=8"), (dict(data=4, fsdp=1, tp=2), "data=4, fsdp=1, tp=2")]
)
def test_a_mesh_that_is_not_a_hosts_is_refused_with_the_numbers(given, told):
  with pytest.raises(ValueError, match=f"config.actor_mesh: {told} is not a mesh of the 4 devices of a host"):
    actors.actor_shape(LEARNER, 4, given)


def test_a_compilers_devices_are_of_so_many_hosts_as_it_is_told():
  learner = sharding.make_mesh(2, 2, 2)
  assert actors.actor_mesh(learner, num_hosts=1) is learner is actors.actor_mesh(learner)
  with pytest.raises(ValueError, match=r"equally many devices of each \(host 0 8 of 2 hosts\)"):
    actors.actor_mesh(learner, num_hosts=2)


def test_the_copy_has_the_weights_cast_but_for_the_last_norm():
  config = ModelConfig("Qwen3ForCausalLM", 64, 32, 2, 4, 2, 8, 48, qk_norm=True)
  learner = sharding.make_mesh(2, 2, 2)
  params = sharding.put_params(decoder.init(jax.random.key(0), config), learner)
  actor = actors.actor_mesh(learner, dict(data=4, fsdp=1, tp=2))
  placed = actors.to_actor(learner, actor, "bfloat16")(params)
  assert placed["final_norm"].dtype == jnp.float32 and placed["layers"]["q"].dtype == jnp.bfloat16
  for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(placed), strict=True):
    assert after.sharding.mesh == actor
    np.testing.assert_array_equal(np.asarray(before.astype(after.dtype)), np.asarray(after))
