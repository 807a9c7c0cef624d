"""Checkpoints in and out: what is read exactly, what is refused in which words, what stays when a save fails."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from model_cases import random_params
from safetensors.numpy import load_file, save_file

from seed_jax.models import config as model_config
from seed_jax.models import hf, hf_names
from seed_jax.models.config import ModelConfig

TIED = ModelConfig("LlamaForCausalLM", 37, 24, 2, 4, 2, 6, 20, rope_theta=500.0, rms_norm_eps=1e-5, eos_id=3)
QWEN2 = dataclasses.replace(TIED, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_embeddings=False)
QWEN3 = dataclasses.replace(TIED, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=8)


@pytest.fixture
def saved(tmp_path):
  params = random_params(TIED)
  hf.save(tmp_path / "model", TIED, params)
  return tmp_path / "model", params


def rewrite(directory, change):
  """Loads all tensors, lets `change` edit the dict, writes them back."""
  tensors = load_file(directory / hf.SINGLE)
  change(tensors)
  save_file(tensors, directory / hf.SINGLE)


def edit_json(path, **fields):
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ---- there and back


@pytest.mark.parametrize("config", [TIED, QWEN2, QWEN3], ids=lambda config: config.architecture)
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 5000])
def test_save_then_load_is_exact(tmp_path, config, max_shard_bytes):
  params = random_params(config)
  hf.save(tmp_path / "model", config, params, max_shard_bytes=max_shard_bytes)
  again, loaded = hf.load(tmp_path / "model")
  assert again == config
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert (tmp_path / "model" / hf.INDEX).exists() == (max_shard_bytes == 5000)
  assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing else stays behind"


def test_the_layout_on_disk_is_that_of_hugging_face(saved):
  directory, params = saved
  tensors = load_file(directory / hf.SINGLE)
  # q_proj.weight is [N*H, D]: output row n*H + h, so column d of row (1, 2) is our q[d, 1, 2].
  np.testing.assert_array_equal(
    tensors["model.layers.1.self_attn.q_proj.weight"][1 * 6 + 2], params["layers"]["q"][1, :, 1, 2]
  )
  # o_proj.weight is [D, N*H].
  np.testing.assert_array_equal(
    tensors["model.layers.0.self_attn.o_proj.weight"][:, 3 * 6 + 1], params["layers"]["o"][0, 3, 1]
  )
  assert "lm_head.weight" not in tensors
  assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": 3}


def test_shards_keep_to_their_limit_and_the_index_counts_them(tmp_path):
  hf.save(tmp_path / "model", QWEN2, random_params(QWEN2), max_shard_bytes=5000)
  index = json.loads((tmp_path / "model" / hf.INDEX).read_text())
  files = sorted((tmp_path / "model").glob("*.safetensors"))
  assert {file.name for file in files} == set(index["weight_map"].values())
  sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
  assert max(sizes) <= 5000 and sum(sizes) == index["metadata"]["total_size"]
  assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"


def test_bfloat16_both_ways(tmp_path):
  params = random_params(TIED)
  hf.save(tmp_path / "half", TIED, params, dtype="bfloat16")
  assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
  assert load_file(tmp_path / "half" / hf.SINGLE)["model.norm.weight"].dtype == ml_dtypes.bfloat16
  config, halves = hf.load(tmp_path / "half", dtype="bfloat16")
  assert config.dtype == "bfloat16" and halves["layers"]["gate"].dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(halves["embed"], params["embed"].astype(ml_dtypes.bfloat16))
  config, wide = hf.load(tmp_path / "half")
  assert config.dtype == "float32" and wide["embed"].dtype == np.float32
  hf.save(tmp_path / "again", dataclasses.replace(config, dtype="bfloat16"), jax.device_put(halves))
  for name, tensor in load_file(tmp_path / "again" / hf.SINGLE).items():
    np.testing.assert_array_equal(tensor, load_file(tmp_path / "half" / hf.SINGLE)[name])


def test_a_tokenizer_goes_along(tmp_path):
  class Files:
    stop_ids = (5, 7)

    def save(self, directory):
      (directory / "tokenizer.json").write_text("{}")

  hf.save(tmp_path / "model", TIED, random_params(TIED), tokenizer=Files())
  assert (tmp_path / "model" / "tokenizer.json").exists()
  assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == [5, 7]


def test_every_leaf_of_the_decoder_has_its_row():
  for config in (TIED, QWEN2, QWEN3):
    hf_names.check_params(config, random_params(config))
  names = [row.hf for row in (*hf_names.TOP, *hf_names.LAYER)]
  assert len(set(names)) == len(names)


def test_a_config_survives_the_round_trip():
  for config in (TIED, QWEN2, QWEN3):
    assert model_config.from_hf(model_config.to_hf(config)) == config
  # A Qwen3 configuration without head_dim means 128, as in transformers; the others divide.
  fields = model_config.to_hf(QWEN3)
  del fields["head_dim"]
  assert model_config.from_hf(fields).head_dim == 128
  assert model_config.from_hf(model_config.to_hf(TIED) | {"head_dim": None}).head_dim == 24 // 4


# ---- what real checkpoints carry besides


def test_a_tied_head_and_old_buffers_are_dropped(saved):
  directory, params = saved

  def change(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)

  rewrite(directory, change)
  jax.tree.map(np.testing.assert_array_equal, hf.load(directory)[1], params)


@pytest.mark.parametrize("head", ["other values", "other shape"])
def test_a_tied_head_that_differs_is_refused(saved, head):
  directory, _ = saved

  def change(tensors):
    embed = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embed + np.float32(1) if head == "other values" else embed[:-1].copy()

  rewrite(directory, change)
  with pytest.raises(ValueError, match=r"lm_head.weight differs .* tie_word_embeddings"):
    hf.load(directory)


# ---- what is refused


def pop(name):
  return lambda tensors: tensors.pop(name)


def put(name, shape):
  return lambda tensors: tensors.__setitem__(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
  "change, message",
  [
    (pop("model.layers.1.mlp.up_proj.weight"), "1 tensors .* are missing: model.layers.1.mlp.up_proj.weight"),
    (
      put("model.layers.2.mlp.up_proj.weight", (20, 24)),
      "1 tensors have no place in .* with 2 layers: model.layers.2.mlp",
    ),
    (put("model.layers.0.self_attn.q_proj.bias", (24,)), "no place in a LlamaForCausalLM"),
    (put("model.layers.0.self_attn.k_proj.weight", (24, 12)), r"shape \(24, 12\), .* asks for \(12, 24\) \(K\*H x D\)"),
    (put("model.norm.weight", (25,)), r"model.norm.weight has shape \(25,\), .* asks for \(24,\)"),
  ],
)
def test_a_checkpoint_must_fit_tensor_by_tensor(saved, change, message):
  directory, _ = saved
  rewrite(directory, change)
  with pytest.raises(ValueError, match=message):
    hf.load(directory)


def test_many_missing_tensors_are_counted_and_a_few_named(saved):
  directory, _ = saved
  edit_json(directory / "config.json", num_hidden_layers=4)
  with pytest.raises(ValueError, match=r"18 tensors .* and 14 more$"):  # 9 tensors a layer
    hf.load(directory)


def test_what_is_not_there(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such model: .*nowhere"):
    hf.load(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match="no config.json"):
    hf.load(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(model_config.to_hf(TIED)))
  with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
    hf.load(tmp_path)
  (tmp_path / "pytorch_model.bin").write_bytes(b"")
  with pytest.raises(FileNotFoundError, match="pytorch_model.bin is a pickle and is not read"):
    hf.load(tmp_path)
  (tmp_path / "notes.txt").write_text("")
  with pytest.raises(ValueError, match="neither a directory nor a .gguf file"):
    hf.load(tmp_path / "notes.txt")


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
    ({"architectures": None, "model_type": "gemma"}, "model_type=gemma is not supported"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_bias": True}, "attention_bias"),
    ({"mlp_bias": True}, "MLP biases"),
    ({"num_attention_heads": 5}, "num_heads=5 is not a multiple of num_kv_heads=2"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
  ],
)
def test_a_configuration_of_something_else_is_refused(saved, fields, message):
  directory, _ = saved
  edit_json(directory / "config.json", **fields)
  with pytest.raises(ValueError, match=message):
    hf.load(directory)


@pytest.mark.parametrize(
  "text, message",
  [
    ("{", "not valid JSON"),
    ("[]", "holds a list"),
    ('{"architectures": ["LlamaForCausalLM"]}', "has no field 'num_att"),
  ],
)
def test_a_broken_configuration_is_named(saved, text, message):
  directory, _ = saved
  (directory / "config.json").write_text(text)
  with pytest.raises(ValueError, match=message):
    hf.load(directory)


def test_a_truncated_file_is_named(saved):
  directory, _ = saved
  content = (directory / hf.SINGLE).read_bytes()
  (directory / hf.SINGLE).write_bytes(content[: len(content) // 2])
  with pytest.raises(ValueError, match="model.safetensors is not a readable safetensors file"):
    hf.load(directory)


def test_an_index_must_match_its_files(tmp_path):
  directory = tmp_path / "model"
  hf.save(directory, TIED, random_params(TIED), max_shard_bytes=5000)
  index = json.loads((directory / hf.INDEX).read_text())
  first = directory / next(iter(index["weight_map"].values()))

  def with_map(change):
    (directory / hf.INDEX).write_text(json.dumps(index | {"weight_map": change}))

  with_map(index["weight_map"] | {"ghost": first.name})
  with pytest.raises(ValueError, match="names 1 tensors that its files do not hold, such as ghost"):
    hf.load(directory)
  moved = next(name for name, file in index["weight_map"].items() if file == first.name)
  other = next(file for file in index["weight_map"].values() if file != first.name)
  with_map(index["weight_map"] | {moved: other})
  with pytest.raises(ValueError, match=f"index.json names {other} for {moved}, which is in {first.name}"):
    hf.load(directory)
  with_map(index["weight_map"] | {"ghost": "../elsewhere.safetensors"})
  with pytest.raises(ValueError, match="file names beside it"):
    hf.load(directory)
  with_map(None)
  with pytest.raises(ValueError, match="no weight_map"):
    hf.load(directory)
  with_map(index["weight_map"] | {"ghost": "copy.safetensors"})
  (directory / "copy.safetensors").write_bytes(first.read_bytes())
  with pytest.raises(ValueError, match="in another shard too"):
    hf.load(directory)
  with_map(index["weight_map"])
  first.unlink()
  with pytest.raises(FileNotFoundError, match="names model-00001-of-0.*, which is not there"):
    hf.load(directory)
