"""GGUF files as llama.cpp writes them: the same tree as from safetensors, and clear words for what is not supported."""

import dataclasses

import jax
import numpy as np
import pytest
from model_cases import random_params
from safetensors.numpy import load_file

from seed_jax import sharding
from seed_jax.models import gguf_file, hf, hf_names
from seed_jax.models.config import ModelConfig

TIED = ModelConfig("LlamaForCausalLM", 37, 24, 2, 4, 2, 6, 20, rope_theta=500.0, rms_norm_eps=1e-5, eos_id=3)
QWEN2 = dataclasses.replace(TIED, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_embeddings=False)
QWEN3 = dataclasses.replace(TIED, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=8)


def write_gguf(path, config, params, *, arch=None, quantise=False, change=None):
  """What llama.cpp's converter writes for these parameters; `change` edits the metadata, a dict of name -> value."""
  import gguf

  arch = arch or {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}[config.architecture.removesuffix("ForCausalLM")]
  writer = gguf.GGUFWriter(path, arch)
  fields = {
    f"{arch}.block_count": config.num_layers,
    f"{arch}.context_length": config.max_positions,
    f"{arch}.embedding_length": config.hidden_size,
    f"{arch}.feed_forward_length": config.intermediate_size,
    f"{arch}.attention.head_count": config.num_heads,
    f"{arch}.attention.head_count_kv": config.num_kv_heads,
    f"{arch}.attention.key_length": config.head_dim,
    f"{arch}.attention.value_length": config.head_dim,
    f"{arch}.rope.freq_base": config.rope_theta,
    f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    "tokenizer.ggml.eos_token_id": config.eos_id,
  }
  for name, value in (fields | (change or {})).items():
    if isinstance(value, str):
      writer.add_string(name, value)
    elif value is not None:
      (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
  for row, layer in hf_names.rows_with_layers(config):
    array = params[row.leaf] if layer is None else params["layers"][row.leaf][layer]
    tensor = hf_names.file_matrix(row, array).reshape(row.file_shape(config))
    if arch == "llama" and row.leaf in ("q", "k"):
      # Rows of a head: first half, second half -> pairs.
      heads = config.num_heads if row.leaf == "q" else config.num_kv_heads
      tensor = tensor.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    kind = gguf.GGMLQuantizationType.Q8_0
    if quantise and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
      writer.add_tensor(hf_names.gguf_name(row, layer), gguf.quantize(tensor, kind), raw_dtype=kind)
    else:
      writer.add_tensor(hf_names.gguf_name(row, layer), np.ascontiguousarray(tensor))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize("config", [TIED, QWEN2, QWEN3], ids=lambda config: config.architecture)
def test_gguf_gives_the_same_tree(tmp_path, config):
  params = random_params(config)
  path = write_gguf(tmp_path / "tiny.gguf", config, params)
  for place in (path, str(path), tmp_path):  # the file, or the directory that holds it
    again, loaded = hf.load(place)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_transformers_takes_the_same_weights_from_a_gguf_file(tmp_path):
  """An oracle for the order of the query and key rows that does not come from here."""
  import transformers
  from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

  path = write_gguf(tmp_path / "tiny.gguf", TIED, random_params(TIED), change={"llama.vocab_size": 37})
  fields = load_gguf_checkpoint(str(path))["config"]
  model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
  theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
  hf.save(tmp_path / "ours", *hf.load(path))
  ours = load_file(tmp_path / "ours" / hf.SINGLE)
  assert set(ours) == set(theirs)
  for name, tensor in theirs.items():
    np.testing.assert_array_equal(ours[name], tensor.float().numpy(), err_msg=name)


def test_quantised_tensors_are_read_as_their_blocks_say(tmp_path):
  config = dataclasses.replace(TIED, hidden_size=64, intermediate_size=32, head_dim=16)
  params = random_params(config)
  _, loaded = hf.load(write_gguf(tmp_path / "tiny.gguf", config, params, quantise=True))
  np.testing.assert_array_equal(loaded["final_norm"], params["final_norm"])
  # Q8_0: 32 numbers share a scale of max/127 in float16, so an error is at most half a step and float16's rounding.
  for name in ("q", "o", "gate", "down"):
    limit = np.abs(params["layers"][name]).max() / 127
    error = np.abs(loaded["layers"][name] - params["layers"][name]).max()
    assert 0 < error <= limit, (name, error, limit)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"llama.block_count": None}, "has no llama.block_count"),
    ({"llama.rope.scaling.type": "yarn"}, "rope type 'yarn'"),
    ({"llama.attention.value_length": 8}, "head size 6"),
    ({"split.count": 3}, "one of 3 parts"),
    ({"llama.block_count": 1}, "9 tensors have no place in a LlamaForCausalLM with 1 layers: blk.1"),
  ],
)
def test_a_gguf_file_of_something_else_is_refused(tmp_path, change, message):
  path = write_gguf(tmp_path / "tiny.gguf", TIED, random_params(TIED), change=change)
  with pytest.raises(ValueError, match=message):
    hf.load(path)


def test_a_file_goes_onto_a_mesh_by_way_of_the_host(tmp_path):
  path, mesh = write_gguf(tmp_path / "tiny.gguf", TIED, random_params(TIED)), sharding.make_mesh(1, 4, 1)
  config, placed = hf.load_sharded(path, mesh)
  again, params = hf.load(path)
  assert config == again == hf.read_config(path)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(placed), params)
  assert placed["layers"]["q"].sharding.mesh == mesh


def test_a_remote_file_is_copied(tmp_path, monkeypatch):
  from etils import epath

  real = epath.Path
  monkeypatch.setattr(epath, "Path", lambda path: real(str(path).replace("gs://bucket", str(tmp_path))))
  write_gguf(tmp_path / "tiny.gguf", TIED, random_params(TIED))
  assert hf.load("gs://bucket/tiny.gguf")[0] == TIED


def test_other_gguf_architectures_and_files_are_named(tmp_path):
  path = write_gguf(tmp_path / "tiny.gguf", TIED, random_params(TIED), arch="gemma3")
  with pytest.raises(ValueError, match="architecture gemma3 is not supported"):
    hf.load(path)
  path.write_bytes(b"not a model at all")
  with pytest.raises(ValueError, match="not a readable GGUF file"):
    hf.load(path)
  path.write_bytes(b"")
  with pytest.raises(ValueError, match="not a readable GGUF file"):
    gguf_file.reader(path)
  (tmp_path / "other.gguf").write_bytes(b"")
  with pytest.raises(ValueError, match="2 GGUF files; name one of them: other.gguf, tiny.gguf"):
    hf.load(tmp_path)


def test_a_gguf_file_cut_short_is_named(tmp_path):
  path = write_gguf(tmp_path / "tiny.gguf", TIED, random_params(TIED))
  content = path.read_bytes()
  for length in (40, 400, len(content) // 2):
    path.write_bytes(content[:length])
    with pytest.raises(ValueError, match="tiny.gguf"):
      hf.load(path)
