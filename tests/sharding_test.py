"""The mesh, the table of logical axes, and where parameters and rows come to lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from seed_jax import sharding
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig

CONFIG = ModelConfig("Qwen3ForCausalLM", 64, 32, 2, 4, 2, 8, 48, qk_norm=True)


@pytest.fixture(scope="module")
def params():
  return decoder.init(jax.random.key(0), CONFIG)


def test_the_mesh_takes_the_first_devices_and_always_has_three_axes():
  mesh = sharding.make_mesh()
  assert mesh.axis_names == ("data", "fsdp", "tp") and mesh.devices.shape == (1, 1, 1)
  wide = sharding.make_mesh(2, 1, 2)
  assert wide.devices.ravel().tolist() == jax.devices()[:4]
  other = sharding.make_mesh(tp=2, devices=jax.devices()[4:])
  assert other.devices.ravel().tolist() == jax.devices()[4:6]


def test_too_few_devices_are_refused_with_the_numbers():
  with pytest.raises(ValueError, match=r"mesh 4x2x2 .* needs 16 devices; this job has 8"):
    sharding.make_mesh(4, 2, 2)


def test_ensure_mesh_keeps_the_callers():
  with sharding.ensure_mesh():
    assert jax.sharding.get_abstract_mesh().size == 1
  with jax.set_mesh(sharding.make_mesh(2, 2, 2)), sharding.ensure_mesh():
    assert jax.sharding.get_abstract_mesh().size == 8


def test_spec_reads_the_table():
  assert sharding.spec("layers", "model", "heads", "head_size") == P(None, "fsdp", "tp", None)
  assert sharding.spec("rows", "tokens") == P(("data", "fsdp"), None)


def test_spec_refuses_unknown_names_and_mesh_axes_that_occur_twice():
  with pytest.raises(ValueError, match=r"unknown logical axes \['wings'\]"):
    sharding.spec("rows", "wings")
  with pytest.raises(ValueError, match="a mesh axis occurs twice"):
    sharding.spec("vocab", "heads")  # both on tp
  with pytest.raises(ValueError, match="a mesh axis occurs twice"):
    sharding.spec("rows", "model")  # both on fsdp
  assert sharding.spec("vocab", "heads", table={"vocab": "tp", "heads": None}) == P("tp", None)


@pytest.mark.parametrize(
  "changes",
  [{"qk_norm": True}, {"architecture": "Qwen2ForCausalLM", "qkv_bias": True}, {"tie_embeddings": False}],
)
def test_every_parameter_has_one_axis_name_per_dimension(changes):
  made = decoder.init(jax.random.key(0), ModelConfig(**(CONFIG.__dict__ | {"qk_norm": False} | changes)))
  axes = sharding.param_axes(made)
  assert set(axes["layers"]) == set(made["layers"]) and set(axes) == set(made)
  for path, leaf in jax.tree_util.tree_leaves_with_path(made):
    names = axes
    for key in path:
      names = names[key.key]
    assert len(names) == leaf.ndim, path


def test_check_divisible_names_the_parameter_and_the_numbers(params):
  sharding.check_divisible(params, sharding.make_mesh(2, 2, 2))
  with pytest.raises(ValueError, match=r"embed \(64, 32\): model=32 does not divide over \('fsdp',\)=6"):
    sharding.check_divisible(params, sharding.make_mesh(1, 6, 1))
  odd = params | {"embed": jnp.zeros((63, 32))}
  with pytest.raises(ValueError, match=r"embed \(63, 32\): vocab=63 does not divide over \('tp',\)=2"):
    sharding.check_divisible(odd, sharding.make_mesh(1, 1, 2))


def test_put_params_stores_under_the_specs_and_keeps_the_values(params):
  mesh = sharding.make_mesh(2, 2, 2)
  placed = sharding.put_params(jax.device_get(params), mesh)
  specs = sharding.param_specs(params)
  jax.tree.map(lambda x, s: np.testing.assert_equal(x.sharding.spec, s), placed, specs)
  assert placed["layers"]["q"].addressable_shards[0].data.shape == (2, 16, 2, 8)  # D over fsdp, N over tp
  assert placed["embed"].addressable_shards[0].data.shape == (32, 16)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(placed), jax.device_get(params))


def test_a_weight_is_gathered_over_fsdp_and_stays_on_tp():
  assert sharding.gathered(P(None, "fsdp", "tp")) == P(None, None, "tp")
  assert sharding.gathered(P()) == P()


def test_rows_lie_over_both_data_axes_and_fill_whole_shards():
  mesh = sharding.make_mesh(2, 2, 2)
  assert sharding.num_row_shards(mesh) == 4
  rows = sharding.put_rows({"x": np.arange(24).reshape(8, 3)}, mesh)["x"]
  assert rows.addressable_shards[0].data.shape == (2, 3)
  micro = sharding.put_rows(np.zeros((3, 8, 5)), mesh, axis=1)
  assert micro.addressable_shards[0].data.shape == (3, 2, 5)
  assert sharding.put_replicated(np.arange(4), mesh).addressable_shards[5].data.shape == (4,)


def test_replicate_makes_an_array_whole():
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    out = jax.jit(sharding.replicate)(sharding.put_rows(np.arange(16.0).reshape(8, 2), mesh))
  assert out.sharding.is_fully_replicated
  np.testing.assert_array_equal(out, np.arange(16.0).reshape(8, 2))


def test_the_platform_is_the_meshs_own():
  abstract = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
  target = jax.sharding.AbstractMesh((1, 1, 1), sharding.AXES, abstract_device=abstract)
  assert sharding.platform() == "cpu"
  with jax.sharding.use_abstract_mesh(target):
    assert sharding.platform() == "tpu"
