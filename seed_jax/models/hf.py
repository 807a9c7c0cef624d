"""Weights: a Hugging Face directory or a GGUF file -> our tree; our tree -> a directory that `transformers` loads.

Only safetensors and GGUF are read: both are data, where a pickle would be a program. `hf_names.py` has the rename
table, `hf_files.py` the files, `hf_shards.py` the way between tensors and the shards of our arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from seed_jax import hosts, sharding
from seed_jax.models import config as model_config
from seed_jax.models import gguf_file, hf_files, hf_names, hf_shards
from seed_jax.models.config import ModelConfig
from seed_jax.models.hf_files import INDEX, SINGLE, local_copy  # noqa: F401  (re-exported)

HARMLESS = (".rotary_emb.inv_freq",)  # recomputed from rope_theta; old exports still carry it


def load(path, *, dtype=np.float32) -> tuple[ModelConfig, dict]:
  """Reads a checkpoint into `(config, params)`: numpy arrays of `dtype` (so is `config.dtype`), stacked over layers.

  `path` is a HF directory (`config.json` with `model.safetensors`, or with shards and their index), a `.gguf` file,
  or a directory with one; `gs://` works too. Nothing is guessed: every tensor of the checkpoint must have its place and
  its exact shape, and none may be missing.

  Raises:
    FileNotFoundError: no such path, or no weights in it.
    ValueError: an unsupported architecture or option, a tensor too many, too few, or of another shape, a damaged file.
  """
  dtype = np.dtype(dtype)
  with _opened(path) as (config, source, name_of):
    return dataclasses.replace(config, dtype=dtype.name), hf_names.assemble(config, source, name_of, dtype)


def load_sharded(path, mesh: Mesh, *, dtype=np.float32) -> tuple[ModelConfig, dict]:
  """Like `load`, but the parameters lie on `mesh` under `sharding.param_specs`, and no host holds more than its share.

  Peak memory of a host: with CPU devices its share and a few blocks of 16 MiB, with accelerators its share of the
  largest leaf. Every process of the mesh must call it. With `dtype` None each parameter keeps the checkpoint's dtype.
  GGUF is dequantised whole on every host.

  Raises what `load` raises, and ValueError where a dimension does not divide over its mesh axes.
  """
  dtype = None if dtype is None else np.dtype(dtype)
  with _opened(path) as (config, source, name_of):
    if isinstance(source, hf_files.Safetensors):
      params = hf_shards.read(source, config, mesh, dtype)
    else:
      params = sharding.put_params(hf_names.assemble(config, source, name_of, dtype or np.dtype(np.float32)), mesh)
  return dataclasses.replace(config, dtype=params["embed"].dtype.name), params


def read_config(path) -> ModelConfig:
  """The sizes of the model at `path`, of which no weights are read. Raises what `load` raises for its configuration."""
  place = epath.Path(path)
  found = find_gguf(place)
  if found is None:
    return _read_config(place)
  with local_copy(found) as local:
    return gguf_file.GGUFFile(local).config


def save(
  path, config: ModelConfig, params: dict, *, tokenizer=None, dtype=None, max_shard_bytes: int = 4 << 30
) -> None:
  """Writes a directory that `transformers.AutoModelForCausalLM` loads with no key missing and none unexpected.

  The directory appears as a whole: it is written beside `path` under another name and renamed, replacing an earlier
  export (an object store has no such name: there config.json is written last). One tensor of the checkpoint at a time
  is made on the host, from its own shards of one leaf, and goes straight to its file. In a run of several processes all
  of them call it: each tensor is gathered, for which every device needs room, process 0 writes, and all return when
  everything is written.

  Args:
    path: the directory to make, or `gs://...`; an existing one is replaced only if it holds a `config.json` or nothing.
    config: sizes of `params`.
    params: the tree of the decoder; numpy or (sharded) jax arrays.
    tokenizer: its files are added (`save(directory)`) and its stop ids go to `generation_config.json`.
    dtype: of the file, e.g. "bfloat16"; the default keeps each array's own.
    max_shard_bytes: beyond it the weights are split into numbered files with an index.

  Raises:
    ValueError: `params` is not the tree of `config`, or `path` is a directory of something else.
    hosts.HostError: another process is late or gone.
  """
  hf_names.check_params(config, params)
  dtype = None if dtype is None else np.dtype(dtype)
  writes = jax.process_index() == 0
  with hf_files.replacing(path) if writes else contextlib.nullcontext() as directory:
    _write_weights(directory, config, params, dtype, max_shard_bytes)
    if writes:
      save_description(directory, config, dtype or params["embed"].dtype, tokenizer=tokenizer)
  hosts.meet(f"the model in {path}")  # whoever returns finds all of it


def save_description(directory, config: ModelConfig, dtype, *, tokenizer=None) -> None:
  """Writes all of a model's directory but its weights, which have `dtype`: tokenizer, generation_config.json and, last,
  config.json.
  """
  directory = epath.Path(directory)
  if tokenizer is not None:
    with contextlib.nullcontext(directory) if "://" not in str(directory) else tempfile.TemporaryDirectory() as place:
      tokenizer.save(pathlib.Path(place))
      if "://" in str(directory):
        for file in sorted(pathlib.Path(place).iterdir()):
          epath.Path(file).copy(directory / file.name, overwrite=True)
  stops = config.eos_id if tokenizer is None else list(tokenizer.stop_ids)
  ids = {"bos_token_id": config.bos_id, "eos_token_id": stops, "pad_token_id": config.pad_id}
  known = {key: token for key, token in ids.items() if token is not None}
  hf_files.write_json(directory / "generation_config.json", known)
  values = model_config.to_hf(config) | {"torch_dtype": np.dtype(dtype).name}
  hf_files.write_json(directory / "config.json", values)


def find_gguf(path):
  """The GGUF file that `path` means, or None where it is a HF directory; FileNotFoundError where there is nothing."""
  if not path.exists():
    raise FileNotFoundError(f"no such model: {path}")
  if path.is_file():
    if path.suffix != ".gguf":
      raise ValueError(f"{path} is neither a directory nor a .gguf file")
    return path
  files = sorted(path.glob("*.gguf"))
  if (path / "config.json").exists() or not files:
    return None
  if len(files) > 1:
    raise ValueError(f"{path} has {len(files)} GGUF files; name one of them: {', '.join(file.name for file in files)}")
  return files[0]


@contextlib.contextmanager
def _opened(path) -> Iterator[tuple[ModelConfig, hf_names.Source, Callable[..., str]]]:
  """(config, source, names) of the checkpoint at `path`, of which every tensor is known to have its place."""
  place = epath.Path(path)
  found = find_gguf(place)
  if found is not None:
    with local_copy(found) as local:
      source = gguf_file.GGUFFile(local)
      hf_names.check(source.config, source, hf_names.gguf_name)
      yield source.config, source, hf_names.gguf_name
    return
  config = _read_config(place)
  with hf_files.Safetensors(place) as source:
    ignored = {name for name in source.shapes if name.endswith(HARMLESS)} | _drop_tied_head(config, source)
    hf_names.check(config, source, hf_names.hf_name, ignored=ignored)
    yield config, source, hf_names.hf_name


def _read_config(directory: epath.Path) -> ModelConfig:
  path = directory / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{directory} has no config.json; a model is a Hugging Face directory or a .gguf file")
  values = hf_files.read_json(path)
  if values.get("quantization_config"):
    raise ValueError(
      f"{path}: quantised Hugging Face checkpoints are not supported; use the original weights or a GGUF file"
    )
  try:
    return model_config.from_hf(values)
  except KeyError as error:
    raise ValueError(f"{path} has no field {error}") from error
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def _drop_tied_head(config: ModelConfig, source: hf_files.Safetensors) -> set[str]:
  """A tied model may still carry its head: it must be the embedding itself, and then it is dropped."""
  head, embed = (row.hf for row in (hf_names.TOP[2], hf_names.TOP[0]))
  if not config.tie_embeddings or head not in source.shapes:
    return set()
  if embed in source.shapes and not source.same(head, embed):
    raise ValueError(
      f"{source.where}: the embeddings are tied, but {head} differs from {embed}; set tie_word_embeddings to false"
    )
  return {head}


def _write_weights(directory, config: ModelConfig, params: dict, dtype, max_shard_bytes: int) -> None:
  """Numbered files in the order of the table; every process brings each tensor to its host, the one with a `directory`
  writes it.
  """

  def leaf_of(row, layer):
    return params[row.leaf] if layer is None else params["layers"][row.leaf]

  shards, sizes = [[]], [0]
  for row, layer in hf_names.rows_with_layers(config):
    kind = np.dtype(leaf_of(row, layer).dtype) if dtype is None else dtype
    nbytes = math.prod(row.shape(config)) * kind.itemsize
    if shards[-1] and sizes[-1] + nbytes > max_shard_bytes:
      shards.append([])
      sizes.append(0)
    shards[-1].append((row, layer, kind))
    sizes[-1] += nbytes
  names = (
    [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
  )
  placed, host = {}, hf_shards.OnHost(dtype, wanted=directory is not None)
  for name, shard in zip(names, shards, strict=True):
    shard.sort(key=lambda item: -item[2].itemsize)  # every tensor begins at a multiple of its item size
    tensors = {hf_names.hf_name(row, layer): (kind, row.file_shape(config)) for row, layer, kind in shard}
    placed |= dict.fromkeys(tensors, name)
    with (
      contextlib.nullcontext() if directory is None else hf_files.Writer(epath.Path(directory / name), tensors) as file
    ):
      for row, layer, _ in shard:
        array = host.take(leaf_of(row, layer), layer)
        if file is not None:
          file.write(hf_names.file_matrix(row, array))
        del array  # before the next one comes
  if directory is not None and len(names) > 1:
    hf_files.write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": placed})
