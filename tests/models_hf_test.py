"""Checkpoints in and out: what is read exactly, what is refused in which words, what stays when a save fails."""

import dataclasses
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from seed_jax.models import config as model_config
from seed_jax.models import decoder, gguf_file, hf, hf_names
from seed_jax.models.config import ModelConfig

TIED = ModelConfig("LlamaForCausalLM", 37, 24, 2, 4, 2, 6, 20, rope_theta=500.0, rms_norm_eps=1e-5, eos_id=3)
QWEN2 = dataclasses.replace(TIED, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_embeddings=False)
QWEN3 = dataclasses.replace(TIED, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=8)


def random_params(config, seed=0):
  """The decoder's own tree, every leaf random (its initial norms and biases would hide a swap)."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda key: decoder.init(key, config), jax.random.key(0))
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


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


# ---- saving


def test_parameters_of_another_shape_are_not_saved(tmp_path):
  params = random_params(TIED)
  with pytest.raises(ValueError, match=r"missing .*layers.q_bias.* unknown none"):
    hf.save(tmp_path / "model", dataclasses.replace(QWEN2, tie_embeddings=True), params)
  with pytest.raises(ValueError, match=r"embed has shape \(37, 24\), this LlamaForCausalLM has \(38, 24\)"):
    hf.save(tmp_path / "model", dataclasses.replace(TIED, vocab_size=38), params)
  assert not list(tmp_path.iterdir())


def test_a_save_replaces_a_model_and_nothing_else(saved, tmp_path):
  directory, _ = saved
  (directory / "stale").write_text("")
  params = random_params(TIED, seed=1)
  hf.save(directory, TIED, params)
  assert not (directory / "stale").exists()
  np.testing.assert_array_equal(hf.load(directory)[1]["embed"], params["embed"])
  (tmp_path / "empty").mkdir()
  hf.save(tmp_path / "empty", TIED, params)
  (tmp_path / "photos").mkdir()
  (tmp_path / "photos" / "one.jpg").write_text("x")
  for wrong in ("photos", "photos/one.jpg"):
    with pytest.raises(ValueError, match="exists and is not a model directory"):
      hf.save(tmp_path / wrong, TIED, params)
  assert (tmp_path / "photos" / "one.jpg").read_text() == "x"


def test_a_failed_save_leaves_the_old_model(saved, tmp_path):
  directory, params = saved

  class Broken:
    stop_ids = (1,)

    def save(self, directory):
      raise OSError("disk full")

  with pytest.raises(OSError, match="disk full"):
    hf.save(directory, TIED, random_params(TIED, seed=1), tokenizer=Broken())
  np.testing.assert_array_equal(hf.load(directory)[1]["embed"], params["embed"])
  assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_remote_directory_is_copied(saved, tmp_path, monkeypatch):
  from etils import epath

  store, real = tmp_path / "store", epath.Path
  monkeypatch.setattr(epath, "Path", lambda path: real(str(path).replace("gs://bucket", str(store))))
  params = random_params(TIED, seed=2)
  for _ in range(2):  # the second time it is there already
    hf.save("gs://bucket/policy/final", TIED, params)
  jax.tree.map(np.testing.assert_array_equal, hf.load("gs://bucket/policy/final")[1], params)
  with pytest.raises(FileNotFoundError, match="no such model: gs://bucket/policy/first"):
    hf.load("gs://bucket/policy/first")
  write_gguf(store / "tiny.gguf", TIED, params)
  assert hf.load("gs://bucket/tiny.gguf")[0].num_layers == 2


# ---- GGUF


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
    tensor = hf_names.tensor_of(row, array, config)
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
  pathlib.Path(tmp_path, "other.gguf").write_bytes(b"")
  with pytest.raises(ValueError, match="2 GGUF files; name one of them: other.gguf, tiny.gguf"):
    hf.load(tmp_path)


def test_a_gguf_file_cut_short_is_named(tmp_path):
  path = write_gguf(tmp_path / "tiny.gguf", TIED, random_params(TIED))
  content = path.read_bytes()
  for length in (40, 400, len(content) // 2):
    path.write_bytes(content[:length])
    with pytest.raises(ValueError, match="tiny.gguf"):
      hf.load(path)
