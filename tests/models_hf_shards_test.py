"""Weights straight to and from the shards of a mesh: the same bits as through one host's memory, each row read once."""

import dataclasses

import fake_store
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_cases import random_params
from safetensors.numpy import load_file, save_file

from seed_jax import sharding
from seed_jax.models import hf, hf_files, hf_names, hf_shards
from seed_jax.models.config import ModelConfig

# V D L N K H F
TIED = ModelConfig("LlamaForCausalLM", 40, 32, 3, 4, 2, 6, 48, rope_theta=500.0, eos_id=3)
QWEN2 = dataclasses.replace(TIED, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_embeddings=False)
QWEN3 = dataclasses.replace(TIED, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=8)
MESHES = [(1, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2)]


@pytest.fixture(params=[QWEN2, QWEN3], ids=lambda config: config.architecture)
def saved(request, tmp_path):
  params = random_params(request.param)
  hf.save(tmp_path / "model", request.param, params, max_shard_bytes=30_000)
  return tmp_path / "model", request.param, params


@pytest.fixture
def small_blocks(monkeypatch):
  monkeypatch.setattr(hf_files, "BLOCK", 256)  # two rows of most matrices


@pytest.fixture
def bytes_read(monkeypatch):
  """How many bytes of tensors each reading took, a list that grows."""
  read, leave = [], hf_files.Safetensors.__exit__

  def leaving(source, *error):
    read.append(source.bytes_read)
    leave(source, *error)

  monkeypatch.setattr(hf_files.Safetensors, "__exit__", leaving)
  return read


def equal(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(theirs))


@pytest.mark.parametrize("shape", MESHES)
def test_reading_onto_a_mesh_is_reading_and_placing(saved, shape, small_blocks):
  directory, config, params = saved
  mesh = sharding.make_mesh(*shape)
  again, placed = hf.load_sharded(directory, mesh)
  assert again == config
  equal(placed, params)
  wanted = jax.tree.map(lambda leaf: leaf.sharding, sharding.put_params(params, mesh))
  assert jax.tree.map(lambda leaf: leaf.sharding, placed) == wanted


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_rows_dealt_out_and_exchanged_are_the_same_parameters(saved, shape, small_blocks, bytes_read, monkeypatch):
  """What a job of several processes does, in one; 12 rows of keys do not divide over eight devices."""
  directory, config, params = saved
  mesh = sharding.make_mesh(*shape)
  monkeypatch.setattr(hf_shards, "read_directly", hf_shards.read_once)
  _, placed = hf.load_sharded(directory, mesh)
  equal(placed, params)
  wanted = jax.tree.map(lambda leaf: leaf.sharding, sharding.put_params(params, mesh))
  assert jax.tree.map(lambda leaf: leaf.sharding, placed) == wanted
  assert bytes_read == [sum(leaf.nbytes for leaf in jax.tree.leaves(params))]
  _, placed = hf.load_sharded(directory, mesh, dtype="bfloat16")
  equal(placed, jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), params))


@pytest.mark.parametrize("shape, in_mesh", [*((shape, False) for shape in MESHES), ((2, 2, 2), True)])
def test_writing_from_a_mesh_is_writing_from_a_host(saved, shape, in_mesh, tmp_path, small_blocks):
  directory, config, params = saved
  mesh = sharding.make_mesh(*shape)
  placed = sharding.put_params(params, mesh)
  if in_mesh:
    with jax.set_mesh(mesh):
      hf.save(tmp_path / "ours", config, placed, max_shard_bytes=30_000)
  else:
    hf.save(tmp_path / "ours", config, placed, max_shard_bytes=30_000)
  assert sorted(file.name for file in (tmp_path / "ours").iterdir()) == sorted(f.name for f in directory.iterdir())
  for file in directory.iterdir():
    assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes(), file.name


def test_every_row_is_read_once_whatever_the_mesh(saved, bytes_read):
  directory, _, params = saved
  for shape in MESHES:
    hf.load_sharded(directory, sharding.make_mesh(*shape))
  assert bytes_read == [sum(leaf.nbytes for leaf in jax.tree.leaves(params))] * len(MESHES)


def test_bfloat16_files_are_read_to_float32_masters_or_as_they_are(tmp_path):
  params, mesh = random_params(QWEN2), sharding.make_mesh(1, 2, 2)
  hf.save(tmp_path / "half", QWEN2, params, dtype="bfloat16")
  halves = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), params)
  config, placed = hf.load_sharded(tmp_path / "half", mesh)
  assert config.dtype == "float32" and {leaf.dtype for leaf in jax.tree.leaves(placed)} == {np.dtype(np.float32)}
  equal(placed, jax.tree.map(lambda leaf: leaf.astype(np.float32), halves))
  config, placed = hf.load_sharded(tmp_path / "half", mesh, dtype=None)
  assert config.dtype == "bfloat16"
  equal(placed, halves)
  hf.save(tmp_path / "again", QWEN2, placed)
  hf.save(tmp_path / "cast", QWEN2, sharding.put_params(params, mesh), dtype="bfloat16")
  for name in ("again", "cast"):
    assert (tmp_path / name / hf.SINGLE).read_bytes() == (tmp_path / "half" / hf.SINGLE).read_bytes()


def test_tensors_of_several_dtypes_keep_theirs(tmp_path):
  params = random_params(TIED)
  params["layers"]["gate"] = params["layers"]["gate"].astype(ml_dtypes.bfloat16)
  hf.save(tmp_path / "mixed", TIED, params)
  _, placed = hf.load_sharded(tmp_path / "mixed", sharding.make_mesh(1, 2, 1), dtype=None)
  assert placed["layers"]["gate"].dtype == jnp.bfloat16 and placed["layers"]["up"].dtype == jnp.float32
  equal(placed, params)
  theirs = load_file(tmp_path / "mixed" / hf.SINGLE)  # the library finds every tensor where it must begin
  np.testing.assert_array_equal(theirs["model.layers.2.mlp.gate_proj.weight"].T, params["layers"]["gate"][2])


def test_replicas_share_a_buffer_and_survive_donation(tmp_path):
  params = random_params(TIED)
  hf.save(tmp_path / "model", TIED, params)
  _, placed = hf.load_sharded(tmp_path / "model", sharding.make_mesh(2, 1, 1))
  _, other = hf.load_sharded(tmp_path / "model", sharding.make_mesh(2, 1, 1))
  kept = jax.tree.map(lambda leaf: leaf.addressable_shards[1].data, placed)
  add = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
  first = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, placed)
  equal(add(first), jax.tree.map(lambda leaf: leaf + np.float32(1), params))
  equal(kept, params)
  equal(other, params)


def test_a_store_is_read_by_ranges(saved, tmp_path, monkeypatch, small_blocks):
  directory, _, params = saved
  bucket = fake_store.install(tmp_path, monkeypatch)
  directory.rename(bucket / "model")
  _, placed = hf.load_sharded("gs://bucket/model", sharding.make_mesh(1, 4, 2))
  equal(placed, params)
  with hf_files.Safetensors(hf_files.epath.Path("gs://bucket/model")) as source:
    fake_store.Store.fetched = 0
    out = np.zeros((3, 8), np.float64)
    source.fill("model.layers.2.mlp.up_proj.weight", [((7, 10), (4, 12), out)])
    np.testing.assert_array_equal(out, params["layers"]["up"][2, 4:12, 7:10].T)
    assert source.bytes_read == 3 * 32 * 4
    assert fake_store.Store.fetched < 3 * ((1 << 12) + 256), "what was asked for, and the read-ahead of two readers"


def test_a_mesh_that_does_not_divide_is_refused_before_anything_is_read(tmp_path):
  config = dataclasses.replace(TIED, hidden_size=36)
  hf.save(tmp_path / "model", config, random_params(config))
  with pytest.raises(ValueError, match=r"model=36 does not divide over \('fsdp',\)=8"):
    hf.load_sharded(tmp_path / "model", sharding.make_mesh(1, 8, 1))


def test_the_sizes_alone_are_read_from_the_configuration(saved):
  directory, config, _ = saved
  for file in directory.glob("*.safetensors"):
    file.unlink()
  assert hf.read_config(directory) == config
  with pytest.raises(FileNotFoundError, match="no such model"):
    hf.read_config(directory / "elsewhere")


def test_parts_of_the_checkpoints_matrix():
  rows = {row.leaf: row for row in (*hf_names.TOP, *hf_names.LAYER)}
  # o is [N, H, D] and the file has [D, N*H]: heads 1 and 2 of six numbers are columns 6 to 18.
  assert hf_names.file_part(rows["o"], ((1, 3), (0, 6), (8, 16)), TIED) == ((8, 16), (6, 18))
  assert hf_names.file_part(rows["k"], ((8, 16), (1, 2), (0, 6)), TIED) == ((6, 12), (8, 16))
  assert hf_names.file_part(rows["q_bias"], ((1, 3), (0, 6)), TIED) == ((6, 18), (0, 1))
  assert hf_names.file_part(rows["embed"], ((10, 20), (0, 16)), TIED) == ((10, 20), (0, 16))
  with pytest.raises(ValueError, match=r"q: axis 2 of \(32, 4, 6\) is cut"):
    hf_names.file_part(rows["q"], ((0, 32), (0, 4), (0, 3)), TIED)


@pytest.mark.parametrize(
  "change, message",
  [
    (lambda head: head["model.norm.weight"].update(shape=[33]), r"model.norm.weight \(33,\) would lie at"),
    (lambda head: head["model.norm.weight"].update(data_offsets=[0, 1 << 40]), "would lie at bytes 0 to 1099511627776"),
    (lambda head: head["model.norm.weight"].pop("dtype"), "its header cannot be read .KeyError"),
  ],
)
def test_a_header_that_lies_is_named(tmp_path, change, message):
  import json

  hf.save(tmp_path / "model", TIED, random_params(TIED))
  file = tmp_path / "model" / hf.SINGLE
  content = file.read_bytes()
  size = int.from_bytes(content[:8], "little")
  head = json.loads(content[8 : 8 + size])
  change(head)
  new = json.dumps(head).encode()
  file.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])
  with pytest.raises(ValueError, match=f"model.safetensors is not a readable safetensors file: .*{message}"):
    hf.load(tmp_path / "model")


def test_whole_numbers_are_no_weights(tmp_path):
  hf.save(tmp_path / "model", TIED, random_params(TIED))
  tensors = load_file(tmp_path / "model" / hf.SINGLE)
  tensors["model.norm.weight"] = np.arange(32)
  save_file(tensors, tmp_path / "model" / hf.SINGLE)
  with pytest.raises(ValueError, match="model.norm.weight is not stored as one of F64, F32, F16, BF16"):
    hf.load(tmp_path / "model")


def test_a_file_that_promises_more_than_it_gets_is_not_closed_in_silence(tmp_path):
  with pytest.raises(ValueError, match="lacks 16 bytes"):
    with hf_files.Writer(hf_files.epath.Path(tmp_path / "x"), {"a": (np.dtype(np.float32), (2, 4))}) as file:
      file.write(np.zeros((1, 4), np.float32))


def test_a_layer_comes_to_the_host_in_another_dtype():
  params = random_params(TIED)
  leaves = sharding.put_params(params, sharding.make_mesh(2, 2, 2))["layers"]
  host = hf_shards.OnHost(np.dtype(ml_dtypes.bfloat16))
  for name in ("q", "attn_norm"):  # over four devices, and whole on each
    for layer in (0, 2):
      want = params["layers"][name][layer].astype(ml_dtypes.bfloat16)
      np.testing.assert_array_equal(host.take(leaves[name], layer), want)
  assert hf_shards.OnHost(wanted=False).take(leaves["q"], 0) is None


def test_a_leaf_that_is_cut_between_layers_is_put_together():
  mesh = sharding.make_mesh(1, 3, 1)
  whole = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
  leaf = jax.device_put(whole, jax.NamedSharding(mesh, jax.P("fsdp")))
  for layer in range(3):
    np.testing.assert_array_equal(hf_shards.OnHost().take(leaf, layer), whole[layer])
