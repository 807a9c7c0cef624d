"""One rename table between checkpoints and our parameter tree, and the exact shape check of every tensor.

Shape legend: D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary, L layers.

A checkpoint keeps one tensor per layer and linear maps as `[out, in]`; ours are stacked over L and read `[in...,
out...]`, so that einsum strings name the axes. `assemble` goes one way and `file_matrix` the other; both are driven by
the same rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from seed_jax.models.config import ModelConfig

MAX_LISTED = 4  # names shown in an error; the rest is counted


@dataclasses.dataclass(frozen=True)
class Row:
  """One parameter: our leaf, its name in a HF checkpoint and in GGUF, and its axes.

  `axes` holds the letters of the legend; `"D NH"` is a linear map from D to N x H (a checkpoint has `[N*H, D]`), a
  word alone is kept in order. `flat` tells that the checkpoint flattens it (a bias over N x H).
  """

  leaf: str
  hf: str
  gguf: str
  axes: str
  flat: bool = False

  @property
  def linear(self) -> bool:
    return " " in self.axes

  @property
  def num_inner(self) -> int:
    """Of a linear map: how many of our axes it reads from (the checkpoint's columns); the others it writes to."""
    return len(self.axes.partition(" ")[0])

  def shape(self, config: ModelConfig) -> tuple[int, ...]:
    """Our shape, without the stacked L."""
    sizes = _sizes(config)
    return tuple(sizes[axis] for axis in self.axes if axis != " ")

  def file_shape(self, config: ModelConfig) -> tuple[int, ...]:
    """The shape in the checkpoint."""
    sizes = _sizes(config)
    if self.linear:
      inner, outer = self.axes.split()
      return math.prod(sizes[axis] for axis in outer), math.prod(sizes[axis] for axis in inner)
    shape = self.shape(config)
    return (math.prod(shape),) if self.flat else shape

  def file_letters(self) -> str:
    """The checkpoint's shape in words, for messages: `N*H x D`."""
    if self.linear:
      inner, outer = self.axes.split()
      return f"{'*'.join(outer)} x {'*'.join(inner)}"
    return ("*" if self.flat else " x ").join(self.axes)


TOP = (
  Row("embed", "model.embed_tokens.weight", "token_embd.weight", "VD"),
  Row("final_norm", "model.norm.weight", "output_norm.weight", "D"),
  Row("head", "lm_head.weight", "output.weight", "D V"),
)
LAYER = (
  Row("attn_norm", "input_layernorm.weight", "attn_norm.weight", "D"),
  Row("q", "self_attn.q_proj.weight", "attn_q.weight", "D NH"),
  Row("k", "self_attn.k_proj.weight", "attn_k.weight", "D KH"),
  Row("v", "self_attn.v_proj.weight", "attn_v.weight", "D KH"),
  Row("o", "self_attn.o_proj.weight", "attn_output.weight", "NH D"),
  Row("q_bias", "self_attn.q_proj.bias", "attn_q.bias", "NH", flat=True),
  Row("k_bias", "self_attn.k_proj.bias", "attn_k.bias", "KH", flat=True),
  Row("v_bias", "self_attn.v_proj.bias", "attn_v.bias", "KH", flat=True),
  Row("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", "H"),
  Row("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", "H"),
  Row("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "D"),
  Row("gate", "mlp.gate_proj.weight", "ffn_gate.weight", "D F"),
  Row("up", "mlp.up_proj.weight", "ffn_up.weight", "D F"),
  Row("down", "mlp.down_proj.weight", "ffn_down.weight", "F D"),
)


class Source(Protocol):
  """A checkpoint that is read one tensor at a time."""

  where: str  # for messages
  shapes: Mapping[str, tuple[int, ...]]

  def read(self, name: str) -> np.ndarray: ...


def top_rows(config: ModelConfig) -> tuple[Row, ...]:
  """The rows outside the layers; a tied model has no head."""
  return tuple(row for row in TOP if row.leaf != "head" or not config.tie_embeddings)


def layer_rows(config: ModelConfig) -> tuple[Row, ...]:
  """The rows of one layer of this architecture."""
  absent = set()
  if not config.qkv_bias:
    absent |= {"q_bias", "k_bias", "v_bias"}
  if not config.qk_norm:
    absent |= {"q_norm", "k_norm"}
  return tuple(row for row in LAYER if row.leaf not in absent)


def hf_name(row: Row, layer: int | None = None) -> str:
  """`model.layers.3.self_attn.q_proj.weight`, or the row's own name outside the layers."""
  return row.hf if layer is None else f"model.layers.{layer}.{row.hf}"


def gguf_name(row: Row, layer: int | None = None) -> str:
  """`blk.3.attn_q.weight`, or the row's own name outside the layers."""
  return row.gguf if layer is None else f"blk.{layer}.{row.gguf}"


def rows_with_layers(config: ModelConfig) -> list[tuple[Row, int | None]]:
  """Every tensor of a checkpoint, leaf by leaf."""
  rows: list[tuple[Row, int | None]] = [(row, None) for row in top_rows(config)]
  return rows + [(row, layer) for row in layer_rows(config) for layer in range(config.num_layers)]


def check(config: ModelConfig, source: Source, name_of: Callable[..., str], *, ignored: Iterable[str] = ()) -> None:
  """Raises ValueError unless the checkpoint holds exactly this architecture's tensors in exactly its shapes."""
  expected = {name_of(row, layer): row for row, layer in rows_with_layers(config)}
  missing = sorted(set(expected) - set(source.shapes))
  if missing:
    raise ValueError(
      f"{source.where}: {len(missing)} tensors of a {config.architecture} are missing: {_listed(missing)}"
    )
  left_over = sorted(set(source.shapes) - set(expected) - set(ignored))
  if left_over:
    raise ValueError(
      f"{source.where}: {len(left_over)} tensors have no place in a {config.architecture} "
      f"with {config.num_layers} layers: {_listed(left_over)}"
    )
  for name, row in expected.items():
    got, want = tuple(source.shapes[name]), row.file_shape(config)
    if got != want:
      raise ValueError(
        f"{source.where}: {name} has shape {got}, its configuration asks for {want} ({row.file_letters()})"
      )


def assemble(config: ModelConfig, source: Source, name_of: Callable[..., str], dtype: np.dtype) -> dict:
  """The parameter tree as numpy arrays stacked over L; at most one tensor is held besides the result."""
  params: dict = {row.leaf: source.read(name_of(row)) for row in top_rows(config)}
  params = {row.leaf: _ours(row, params[row.leaf], config).astype(dtype) for row in top_rows(config)}
  layers = {}
  for row in layer_rows(config):
    stacked = np.empty((config.num_layers, *row.shape(config)), dtype)
    for layer in range(config.num_layers):
      stacked[layer] = _ours(row, source.read(name_of(row, layer)), config)
    layers[row.leaf] = stacked
  return {**params, "layers": layers}


def file_matrix(row: Row, array: np.ndarray) -> np.ndarray:
  """Our array of one layer (or of the top), or a part of it, as the checkpoint's matrix [rows, columns]: a view where
  `array` is contiguous. A vector of the checkpoint is [n, 1].
  """
  if row.linear:
    return array.reshape(math.prod(array.shape[: row.num_inner]), -1).T
  return array.reshape(array.shape[0], -1) if len(row.axes) > 1 and not row.flat else array.reshape(-1, 1)


def file_part(row: Row, index: Sequence[tuple[int, int]], config: ModelConfig) -> tuple[tuple, tuple]:
  """Rows (start, stop) and columns (start, stop) of that matrix which our part `index`, (start, stop) an axis, takes.

  Raises ValueError where an axis is cut within what the checkpoint flattens, such as H in N*H: that is no range.
  """
  shape = row.shape(config)

  def flat(first, last):
    inner = math.prod(shape[first + 1 : last])
    for axis in range(first + 1, last):
      if index[axis] != (0, shape[axis]):
        raise ValueError(f"{row.leaf}: axis {axis} of {shape} is cut, and {row.hf} has it within an axis; cut another")
    return index[first][0] * inner, index[first][1] * inner

  if row.linear:
    return flat(row.num_inner, len(shape)), flat(0, row.num_inner)
  return (flat(0, len(shape)), (0, 1)) if row.flat or len(shape) == 1 else (index[0], flat(1, len(shape)))


def check_params(config: ModelConfig, params: dict) -> None:
  """Raises ValueError unless `params` is the tree of `config`: no leaf more, none less, exact shapes."""
  layers = params.get("layers", {})
  found = {name: leaf for name, leaf in params.items() if name != "layers"} | {
    f"layers.{name}": leaf for name, leaf in layers.items()
  }
  wanted = {row.leaf: row.shape(config) for row in top_rows(config)}
  wanted |= {f"layers.{row.leaf}": (config.num_layers, *row.shape(config)) for row in layer_rows(config)}
  if set(found) != set(wanted):
    raise ValueError(
      f"the parameters do not fit a {config.architecture}: missing {_listed(sorted(set(wanted) - set(found)))}, "
      f"unknown {_listed(sorted(set(found) - set(wanted)))}"
    )
  for name, shape in wanted.items():
    if tuple(found[name].shape) != shape:
      raise ValueError(f"parameter {name} has shape {tuple(found[name].shape)}, this {config.architecture} has {shape}")


def _ours(row: Row, tensor: np.ndarray, config: ModelConfig) -> np.ndarray:
  return (tensor.T if row.linear else tensor).reshape(row.shape(config))


def _sizes(config: ModelConfig) -> dict[str, int]:
  return {
    "D": config.hidden_size,
    "N": config.num_heads,
    "K": config.num_kv_heads,
    "H": config.head_dim,
    "F": config.intermediate_size,
    "V": config.vocab_size,
  }


def _listed(names: list[str]) -> str:
  more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
  return (", ".join(names[:MAX_LISTED]) or "none") + more
