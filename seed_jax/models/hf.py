"""Weights: a Hugging Face directory or a GGUF file -> our tree; our tree -> a directory that `transformers` loads.

Only safetensors and GGUF are read: both are data, where a pickle would be a program. `hf_names.py` has the rename
table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
import tempfile
import uuid

import jax
import ml_dtypes  # noqa: F401  gives numpy the name "bfloat16"
import numpy as np

from seed_jax.models import config as model_config
from seed_jax.models import gguf_file, hf_names
from seed_jax.models.config import ModelConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HARMLESS = (".rotary_emb.inv_freq",)  # recomputed from rope_theta; old exports still carry it


def load(path, *, dtype=np.float32) -> tuple[ModelConfig, dict]:
  """Reads a checkpoint into `(config, params)`: numpy arrays of `dtype` (so is `config.dtype`), stacked over layers.

  `path` is a HF directory (`config.json` with `model.safetensors`, or with shards and their index), a `.gguf` file,
  or a directory with one. `gs://` works too (copied to a temporary directory first). Nothing is guessed: every tensor
  of the checkpoint must have its place and its exact shape, and none may be missing.

  Raises:
    FileNotFoundError: no such path, or no weights in it.
    ValueError: an unsupported architecture or option, a tensor too many, too few, or of another shape, a damaged file.
  """
  with local_copy(path) as local:
    found = find_gguf(local)
    if found:
      source, name_of, ignored = gguf_file.GGUFFile(found), hf_names.gguf_name, set()
      config = source.config
    else:
      config = _read_config(local)
      source, name_of = _Safetensors(local), hf_names.hf_name
      ignored = {name for name in source.shapes if name.endswith(HARMLESS)} | _drop_tied_head(config, source)
    hf_names.check(config, source, name_of, ignored=ignored)
    dtype = np.dtype(dtype)
    return dataclasses.replace(config, dtype=dtype.name), hf_names.assemble(config, source, name_of, dtype)


def save(
  path, config: ModelConfig, params: dict, *, tokenizer=None, dtype=None, max_shard_bytes: int = 4 << 30
) -> None:
  """Writes a directory that `transformers.AutoModelForCausalLM` loads with no key missing and none unexpected.

  The directory appears as a whole: it is written beside `path` under another name and renamed, replacing an earlier
  export. In a run of several processes all of them call it (arrays are gathered leaf by leaf) and process 0 writes.

  Args:
    path: the directory to make, or `gs://...`; an existing one is replaced only if it holds a `config.json` or nothing.
    config: sizes of `params`.
    params: the tree of the decoder; numpy or (sharded) jax arrays.
    tokenizer: its files are added (`save(directory)`) and its stop ids go to `generation_config.json`.
    dtype: of the file, e.g. "bfloat16"; the default keeps each array's own.
    max_shard_bytes: beyond it the weights are split into numbered files with an index.

  Raises:
    ValueError: `params` is not the tree of `config`, or `path` is a directory of something else.
  """
  hf_names.check_params(config, params)
  writes = jax.process_index() == 0
  with _replacing(path) if writes else contextlib.nullcontext() as directory:
    _write_weights(directory, config, params, None if dtype is None else np.dtype(dtype), max_shard_bytes)
    if writes:
      head = params["embed"].dtype if dtype is None else np.dtype(dtype)
      _write_json(directory / "config.json", model_config.to_hf(config) | {"torch_dtype": head.name})
      stops = config.eos_id if tokenizer is None else list(tokenizer.stop_ids)
      ids = {"bos_token_id": config.bos_id, "eos_token_id": stops, "pad_token_id": config.pad_id}
      _write_json(directory / "generation_config.json", {key: token for key, token in ids.items() if token is not None})
      if tokenizer is not None:
        tokenizer.save(directory)
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("hf.save")


def find_gguf(path: pathlib.Path) -> pathlib.Path | None:
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


class _Safetensors:
  """The tensors of one file or of an index of shards; a file is mapped, and a tensor is read when it is asked for."""

  def __init__(self, directory: pathlib.Path):
    from safetensors import SafetensorError, safe_open

    self.where = str(directory)
    index, single = directory / INDEX, directory / SINGLE
    if index.exists():
      placed = _read_json(index).get("weight_map")
      if not isinstance(placed, dict) or not all(isinstance(file, str) and "/" not in file for file in placed.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to file names beside it")
    elif single.exists():
      placed = None
    else:
      pickles = ", ".join(sorted(file.name for file in directory.glob("*.bin")))
      hint = f"; {pickles} is a pickle and is not read: convert it to safetensors" if pickles else ""
      raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}{hint}")
    names = [SINGLE] if placed is None else sorted(set(placed.values()))
    self._files, self.shapes = {}, {}
    for name in names:
      if not (directory / name).exists():
        raise FileNotFoundError(f"{index} names {name}, which is not there")
      try:
        file = safe_open(directory / name, framework="numpy")
      except (SafetensorError, OSError) as error:
        raise ValueError(f"{directory / name} is not a readable safetensors file: {error}") from error
      for key in file.keys():
        if key in self._files:
          raise ValueError(f"{directory}: tensor {key} is in {name} and in another shard too")
        self._files[key] = file
        self.shapes[key] = tuple(file.get_slice(key).get_shape())
    lost = sorted(set(placed or ()) - set(self._files))
    if lost:
      raise ValueError(f"{index} names {len(lost)} tensors that its files do not hold, such as {lost[0]}")

  def read(self, name: str) -> np.ndarray:
    return self._files[name].get_tensor(name)

  def same(self, one: str, other: str) -> bool:
    """Whether two tensors are equal, compared a block of rows at a time."""
    if self.shapes[one] != self.shapes[other]:
      return False
    left, right = self._files[one].get_slice(one), self._files[other].get_slice(other)
    rows, step = self.shapes[one][0], 8192
    blocks = (slice(i, min(i + step, rows)) for i in range(0, rows, step))  # a slice here may not reach past the end
    return all(np.array_equal(left[block], right[block]) for block in blocks)


def _read_config(directory: pathlib.Path) -> ModelConfig:
  path = directory / "config.json"
  if not path.exists():
    raise FileNotFoundError(f"{directory} has no config.json; a model is a Hugging Face directory or a .gguf file")
  values = _read_json(path)
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


def _drop_tied_head(config: ModelConfig, source: _Safetensors) -> set[str]:
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
  """Shards in the order of the table: each stacked leaf is gathered once, and only one is held besides a shard."""
  from safetensors.numpy import save_file

  def leaf_of(row, layer):
    return params[row.leaf] if layer is None else params["layers"][row.leaf]

  shards, sizes, total = [[]], [0], 0
  for row, layer in hf_names.rows_with_layers(config):
    nbytes = math.prod(row.shape(config)) * (leaf_of(row, layer).dtype if dtype is None else dtype).itemsize
    if shards[-1] and sizes[-1] + nbytes > max_shard_bytes:
      shards.append([])
      sizes.append(0)
    shards[-1].append((row, layer))
    sizes[-1] += nbytes
    total += nbytes
  names = (
    [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
  )
  placed, gathered, held = {}, None, None
  for name, shard in zip(names, shards, strict=True):
    tensors = {}
    for row, layer in shard:
      if gathered is not row:
        gathered, held = row, _on_host(leaf_of(row, layer))
      key = hf_names.hf_name(row, layer)
      placed[key] = name
      if directory is not None:
        array = held if layer is None else held[layer]
        tensors[key] = hf_names.tensor_of(row, array if dtype is None else array.astype(dtype), config)
    if directory is not None:
      save_file(tensors, directory / name, metadata={"format": "pt"})
  if directory is not None and len(names) > 1:
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _on_host(array) -> np.ndarray:
  if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(array, tiled=True)
  return np.asarray(array)


@contextlib.contextmanager
def local_copy(path):
  """`path` itself, or a temporary copy of a remote directory or file."""
  if "://" not in str(path):
    yield pathlib.Path(path)
    return
  from etils import epath

  remote = epath.Path(path)
  if not remote.exists():
    raise FileNotFoundError(f"no such model: {path}")
  with tempfile.TemporaryDirectory() as temporary:
    local = pathlib.Path(temporary, remote.name)
    if remote.is_dir():
      local.mkdir()
      for file in remote.iterdir():
        if file.is_file():
          file.copy(local / file.name)
    else:
      remote.copy(local)
    yield local


@contextlib.contextmanager
def _replacing(path):
  """A directory to fill, which then takes the place of `path`; on an error it goes, and the old one is untouched."""
  if "://" in str(path):
    from etils import epath

    with tempfile.TemporaryDirectory() as temporary:
      yield pathlib.Path(temporary)
      remote = epath.Path(path)
      remote.mkdir(parents=True, exist_ok=True)
      # A store has no rename of directories: config.json goes last, and a reader without it finds no model.
      for file in sorted(pathlib.Path(temporary).iterdir(), key=lambda file: file.name == "config.json"):
        epath.Path(file).copy(remote / file.name, overwrite=True)
    return
  path = pathlib.Path(path).absolute()
  if path.exists() and not (path.is_dir() and ((path / "config.json").exists() or not any(path.iterdir()))):
    raise ValueError(f"{path} exists and is not a model directory; choose another path or remove it")
  path.parent.mkdir(parents=True, exist_ok=True)
  fresh, old = (path.with_name(f".{path.name}.{kind}-{uuid.uuid4().hex[:8]}") for kind in ("new", "old"))
  fresh.mkdir()
  try:
    yield fresh
    if path.exists():
      path.rename(old)
    try:
      fresh.rename(path)
    except OSError:
      if old.exists():
        old.rename(path)
      raise
  finally:
    shutil.rmtree(fresh, ignore_errors=True)
    if path.exists():
      shutil.rmtree(old, ignore_errors=True)


def _read_json(path: pathlib.Path) -> dict:
  try:
    values = json.loads(path.read_text("utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(values, dict):
    raise ValueError(f"{path} holds a {type(values).__name__}, not an object")
  return values


def _write_json(path: pathlib.Path, values: dict) -> None:
  path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
