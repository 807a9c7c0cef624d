"""Between a checkpoint's tensors and the shards of our stacked arrays: each host holds what its devices hold, no more.

A parameter of ours is [L, ...] or [...], cut over a mesh; a checkpoint has a matrix [rows, columns] for each layer
(`hf_names.file_matrix`). Reading goes leaf by leaf and layer by layer into the buffers of this host's shards; writing
brings one tensor at a time to a host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from seed_jax import sharding
from seed_jax.models import hf_names
from seed_jax.models.config import ModelConfig
from seed_jax.models.hf_files import Safetensors

ALIGNMENT = 64  # bytes; a CPU device takes such a buffer over without a copy


def read(source: Safetensors, config: ModelConfig, mesh: Mesh, dtype: np.dtype | None) -> dict:
  """The parameters on `mesh` under `sharding.param_specs`, read from a checkpoint that fits `config`.

  A host needs memory for its share of the parameters and for a few blocks of `hf_files.BLOCK` bytes; with accelerators
  only for its share of the largest leaf. With `dtype` None a leaf has the dtype of its tensors.

  Raises ValueError where a dimension does not divide over its mesh axes.
  """
  shapes = _tree(config, lambda row, shape: jax.ShapeDtypeStruct(shape, np.float32))
  sharding.check_divisible(shapes, mesh)
  specs = sharding.param_specs(shapes)

  def leaf(row, shape):
    spec = specs[row.leaf] if row in hf_names.TOP else specs["layers"][row.leaf]
    return _read_leaf(source, row, config, shape, NamedSharding(mesh, spec), dtype)

  return _tree(config, leaf)


def on_host(leaf, layer: int | None, dtype: np.dtype | None = None) -> np.ndarray:
  """One layer of a stacked leaf (or, with layer None, a leaf) as a numpy array, in `dtype` if given.

  A leaf that lies on several hosts is gathered by all of them: every process must ask for the same, and every device
  needs room for it. Of a leaf of this host nothing but the result is made.
  """
  if not isinstance(leaf, jax.Array):
    array = np.asarray(leaf if layer is None else leaf[layer])
    return array if dtype is None else array.astype(dtype, copy=False)
  if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
    with jax.set_mesh(leaf.sharding.mesh):
      return np.asarray(jax.block_until_ready(_gather(leaf, layer, dtype=dtype)))
  out = None
  for shard in leaf.addressable_shards:
    if shard.replica_id and not leaf.is_fully_replicated:
      continue
    # A new array of one device: numpy's copy of it, which jax keeps with an array, goes with it.
    part = np.asarray(_pick(shard.data, layer))
    if part.shape == _shape(leaf, layer):
      return part if dtype is None else part.astype(dtype, copy=False)
    if out is None:
      out = np.empty(_shape(leaf, layer), leaf.dtype if dtype is None else dtype)
    out[shard.index if layer is None else shard.index[1:]] = part
  return out


def _read_leaf(source, row, config, shape, target: NamedSharding, dtype) -> jax.Array:
  layered = row in hf_names.LAYER
  names = [hf_names.hf_name(row, layer) for layer in (range(config.num_layers) if layered else [None])]
  dtype = np.result_type(*{source.dtypes[name] for name in names}) if dtype is None else dtype
  devices: dict[tuple, list] = {}  # part of the array -> who holds it
  for device, index in target.addressable_devices_indices_map(shape).items():
    part = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
    devices.setdefault(part, []).append(device)
  buffers = {part: _aligned([stop - start for start, stop in part], dtype) for part in devices}
  for layer, name in enumerate(names):
    pieces = []
    for part, buffer in buffers.items():
      if not layered:
        pieces.append((*hf_names.file_part(row, part, config), hf_names.file_matrix(row, buffer)))
      elif part[0][0] <= layer < part[0][1]:
        own = buffer[layer - part[0][0]]
        pieces.append((*hf_names.file_part(row, part[1:], config), hf_names.file_matrix(row, own)))
    source.fill(name, pieces)
  arrays = [jax.device_put(buffers[part], device) for part, holders in devices.items() for device in holders]
  # Before the next leaf is read: a transfer under way would hold this one's buffers beside the next one's.
  return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, target, arrays))


def _tree(config: ModelConfig, make: Callable[[hf_names.Row, tuple[int, ...]], object]) -> dict:
  layers = {row.leaf: make(row, (config.num_layers, *row.shape(config))) for row in hf_names.layer_rows(config)}
  return {row.leaf: make(row, row.shape(config)) for row in hf_names.top_rows(config)} | {"layers": layers}


def _aligned(shape, dtype) -> np.ndarray:
  size = math.prod(shape) * np.dtype(dtype).itemsize
  raw = np.empty(size + ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)


def _shape(leaf, layer) -> tuple[int, ...]:
  return leaf.shape if layer is None else leaf.shape[1:]


def _pick(array: jax.Array, layer: int | None) -> jax.Array:
  """A part of an array of one device, which no mesh that the caller may have set need know."""
  with jax.set_mesh(_mesh_of(*array.devices())):
    return array.copy() if layer is None else array[layer]


@functools.cache
def _mesh_of(device) -> Mesh:
  return sharding.make_mesh(devices=[device])


@functools.partial(jax.jit, static_argnames="dtype")
def _gather(leaf, layer, *, dtype):
  array = leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
  return sharding.replicate(array if dtype is None else array.astype(dtype))
