"""Reads the model half of a GGUF file: sizes from its metadata, tensors dequantised one at a time.

llama.cpp stores the query and key rows of the llama architecture interleaved (a rotated pair lies in neighbouring
rows), while its qwen2 and qwen3 architectures keep the halves apart as Hugging Face does; `read` undoes the first, so
that the decoder needs one kind of rotation only.
"""

from __future__ import annotations

import pathlib
import re

import numpy as np

from seed_jax.models import config as model_config
from seed_jax.models.config import ModelConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
INTERLEAVED = re.compile(r"blk\.\d+\.attn_(q|k)\.weight")


class GGUFFile:
  """A GGUF file, memory-mapped: `config`, the `shapes` of its tensors and `read(name)`, float32.

  Raises ValueError where the file is not GGUF, is one part of several, or holds an unsupported architecture.
  """

  def __init__(self, path: pathlib.Path):
    self.where = str(path)
    self._reader = reader(path)
    parts = value(self._reader, "split.count", 1)
    if parts > 1:
      raise ValueError(
        f"{path} is one of {parts} parts; merge them into one GGUF file first (llama-gguf-split --merge)"
      )
    self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
    # GGUF lists the fastest axis first.
    self.shapes = {name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self._tensors.items()}
    self.config = self._read_config()

  def read(self, name: str) -> np.ndarray:
    """The tensor, dequantised to float32, in the row order of Hugging Face."""
    import gguf

    tensor = self._tensors[name]
    try:
      array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(
        f"{self.where}: {name} is stored as {tensor.tensor_type.name}, which gguf cannot dequantise"
      ) from error
    array = np.asarray(array, np.float32).reshape(self.shapes[name])
    interleaved = INTERLEAVED.fullmatch(name)
    if interleaved and self.config.architecture == "LlamaForCausalLM":
      heads = self.config.num_heads if interleaved[1] == "q" else self.config.num_kv_heads
      array = _halves(array, heads)
    return array

  def _read_config(self) -> ModelConfig:
    arch = value(self._reader, "general.architecture")
    if arch not in ARCHITECTURES:
      raise ValueError(
        f"{self.where}: architecture {arch} is not supported; supported in GGUF: {', '.join(ARCHITECTURES)}"
      )

    def get(key, default=None):
      found = value(self._reader, f"{arch}.{key}", default)
      if found is None:
        raise ValueError(f"{self.where}: the metadata has no {arch}.{key}")
      return found

    if "token_embd.weight" not in self.shapes:
      raise ValueError(f"{self.where}: has no tensor token_embd.weight")
    scaling = value(self._reader, f"{arch}.rope.scaling.type", "none")
    heads = int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", get("embedding_length") // heads))
    if (
      int(get("attention.value_length", head_dim)) != head_dim or int(get("rope.dimension_count", head_dim)) != head_dim
    ):
      raise ValueError(f"{self.where}: keys, values and the rotation must all have head size {head_dim}")
    return model_config.from_hf(
      {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": self.shapes["token_embd.weight"][0],
        "hidden_size": int(get("embedding_length")),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "intermediate_size": int(get("feed_forward_length")),
        "rope_theta": float(get("rope.freq_base", 10_000.0)),
        "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
        # Stored as float32: seven digits give back the decimal number that was meant (1e-5, not 9.99999974e-06).
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.7g}"),
        "tie_word_embeddings": "output.weight" not in self.shapes,
        "max_position_embeddings": int(get("context_length", 32_768)),
        "bos_token_id": value(self._reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": value(self._reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": value(self._reader, "tokenizer.ggml.padding_token_id"),
      }
    )


def reader(path: pathlib.Path):
  """A `gguf.GGUFReader`; ValueError in one line where the file is none."""
  import gguf

  try:
    return gguf.GGUFReader(path)
  except (ValueError, IndexError, KeyError, OSError) as error:
    raise ValueError(f"{path} is not a readable GGUF file: {error}") from error


def value(reader, key: str, default=None):
  """One entry of the metadata as a plain Python value."""
  field = reader.get_field(key)
  return default if field is None else field.contents()


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
  """`[heads * (H/2 pairs of 2), D]` -> `[heads * (2 halves of H/2), D]`."""
  rows, columns = array.shape
  return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
