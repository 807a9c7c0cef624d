"""Between a checkpoint's tensors and the shards of our stacked arrays: each host holds what its devices hold, no more.

A parameter of ours is [L, ...] or [...], cut over a mesh; a checkpoint has a matrix [rows, columns] for each layer
(`hf_names.file_matrix`). Reading goes leaf by leaf and layer by layer into the buffers of this host's shards; writing
brings one tensor at a time to a host.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from seed_jax import sharding
from seed_jax.models import hf_names
from seed_jax.models.config import ModelConfig
from seed_jax.models.hf_files import Safetensors

ALIGNMENT = 64  # bytes; a CPU device takes such a buffer over without a copy


@dataclasses.dataclass(frozen=True)
class Leaf:
  """A parameter and the tensors that it is made of."""

  row: hf_names.Row
  config: ModelConfig
  layered: bool  # stacked over L

  @property
  def names(self) -> list[str]:
    layers = range(self.config.num_layers) if self.layered else [None]
    return [hf_names.hf_name(self.row, layer) for layer in layers]

  @property
  def shape(self) -> tuple[int, ...]:
    return (*([self.config.num_layers] * self.layered), *self.row.shape(self.config))

  @property
  def matrix(self) -> tuple[int, int]:
    """Rows and columns of each of its tensors."""
    rows, *columns = self.row.file_shape(self.config)
    return rows, math.prod(columns)


def read(source: Safetensors, config: ModelConfig, mesh: Mesh, dtype: np.dtype | None) -> dict:
  """The parameters on `mesh` under `sharding.param_specs`, read from a checkpoint that fits `config`.

  A host needs memory for its share of the parameters and for a few blocks of `hf_files.BLOCK` bytes; with accelerators
  only for its share of the largest leaf. With `dtype` None a leaf has the dtype of its tensors. One process reads
  directly; in a job of several, each row is read by one of them.

  Raises ValueError where a dimension does not divide over its mesh axes.
  """
  leaves = {row.leaf: Leaf(row, config, layered=False) for row in hf_names.top_rows(config)}
  leaves["layers"] = {row.leaf: Leaf(row, config, layered=True) for row in hf_names.layer_rows(config)}
  shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32), leaves)
  sharding.check_divisible(shapes, mesh)

  def of(leaf, spec):
    target = NamedSharding(mesh, spec)
    kind = np.result_type(*{source.dtypes[name] for name in leaf.names}) if dtype is None else dtype
    return (read_directly if target.is_fully_addressable else read_once)(source, leaf, target, kind)

  with jax.set_mesh(mesh):
    specs = sharding.param_specs(shapes)
  return jax.tree.map(of, leaves, specs)


class OnHost:
  """Brings one layer of a leaf after the other, in `dtype` if given, to this host.

  A leaf that lies on several hosts is gathered by all of them: every process must ask for the same, and every device
  needs room for a layer of it. Of a leaf of this host its shards are fetched at its first layer and kept up to the next
  leaf (a CPU device's memory is read where it is). A host that does not want the arrays gets None.
  """

  def __init__(self, dtype: np.dtype | None = None, *, wanted: bool = True):
    self._dtype, self._wanted = dtype, wanted
    self._leaf, self._parts = None, []

  def take(self, leaf, layer: int | None) -> np.ndarray | None:
    """`leaf[layer]`, or with layer None the leaf, as a numpy array."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
      with jax.set_mesh(leaf.sharding.mesh):
        array = jax.block_until_ready(_gather(leaf, layer, dtype=self._dtype))
      return np.asarray(array) if self._wanted else None
    if not self._wanted:
      return None
    if isinstance(leaf, jax.Array):
      array = self._joined(leaf, layer)
    else:
      array = np.asarray(leaf if layer is None else leaf[layer])
    return array if self._dtype is None else array.astype(self._dtype, copy=False)

  def _joined(self, leaf, layer):
    if self._leaf is not leaf:
      self._leaf, self._parts = None, []  # not two at a time
      shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
      shards = shards or leaf.addressable_shards[:1]  # replicated over hosts, the first of which has replica 0
      self._leaf, self._parts = leaf, [(shard.index, _fetched(shard.data)) for shard in shards]
    if layer is None:
      parts, shape = self._parts, leaf.shape
    else:
      spans = [(index, index[0].indices(leaf.shape[0])[:2], part) for index, part in self._parts]
      parts = [(index[1:], part[layer - start]) for index, (start, stop), part in spans if start <= layer < stop]
      shape = leaf.shape[1:]
    if len(parts) == 1:
      return parts[0][1]
    out = np.empty(shape, leaf.dtype if self._dtype is None else self._dtype)
    for index, part in parts:
      out[index] = part
    return out


def _fetched(array: jax.Array) -> np.ndarray:
  """An array of one device as numpy's. jax keeps a copy with the array that was asked: that is another name of it."""
  return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array]))


def read_directly(source: Safetensors, leaf: Leaf, target: NamedSharding, dtype: np.dtype) -> jax.Array:
  """A leaf under `target`; each host reads the rows of which its devices need any column."""

  def locate(part, buffer):
    return (*hf_names.file_part(leaf.row, part, leaf.config), hf_names.file_matrix(leaf.row, buffer))

  return _filled(source, leaf.names, leaf.shape, target, dtype, locate, stacked=leaf.layered)


def read_once(source: Safetensors, leaf: Leaf, target: NamedSharding, dtype: np.dtype) -> jax.Array:
  """A leaf under `target`, of which the whole job reads each row once: the rows are dealt out to all devices of the
  mesh, which then exchange what belongs elsewhere. A device needs room for its shard about three times meanwhile.

  Most of a checkpoint's matrices have our sharded axis D in their columns: read directly, every host would read nearly
  every row of the checkpoint, and keep its columns.
  """
  row, mesh = leaf.row, target.mesh
  spec = (*target.spec, *[None] * len(leaf.shape))[: len(leaf.shape)]
  layers, *own = spec if leaf.layered else (None, *spec)
  first, second = (row.num_inner, 0) if row.linear else (0, len(own) - 1)
  rows, columns = own[first], own[second] if second != first and not row.flat else None
  # [layers, parts of the rows that `target` keeps apart, rows of a part, columns]: a part is dealt out to those who
  # share it, with rows that count for nothing at its end where it does not divide.
  used = (*_axes(layers), *_axes(rows), *_axes(columns))
  others = tuple(axis for axis in mesh.axis_names if axis not in used)
  dealt = (*_axes(columns), *others)
  parts, holders = (math.prod(mesh.shape[axis] for axis in axes) for axes in (_axes(rows), dealt))
  size = leaf.matrix[0] // parts
  shape = (len(leaf.names), parts, -(-size // holders) * holders, leaf.matrix[1])

  def locate(place, buffer):
    (part, _), (start, stop), own_columns = place
    start, stop = min(start, size), min(stop, size)
    return (part * size + start, part * size + stop), own_columns, buffer[0, : stop - start]

  kind = np.result_type(*{source.dtypes[name] for name in leaf.names})  # is exchanged as it is stored
  by_rows = NamedSharding(mesh, P(layers, rows, dealt, None))
  staged = _filled(source, leaf.names, shape, by_rows, kind, locate, stacked=True)

  # Step by step, for a partitioner that is told the two shardings alone may make the leaf whole on every device.
  def exchange(matrices):
    matrices = jax.lax.all_gather(matrices, others, axis=2, tiled=True) if others else matrices
    if columns is not None:
      matrices = jax.lax.all_to_all(matrices, _axes(columns), split_axis=3, concat_axis=2, tiled=True)
    matrices = matrices[:, 0, :size]
    return (matrices.swapaxes(1, 2) if row.linear else matrices).reshape(target.shard_shape(leaf.shape)).astype(dtype)

  with jax.set_mesh(mesh):
    exchange = jax.shard_map(exchange, in_specs=by_rows.spec, out_specs=target.spec, check_vma=False)
    return jax.block_until_ready(jax.jit(exchange)(staged))


def _filled(source, names, shape, target: NamedSharding, dtype, locate, *, stacked: bool) -> jax.Array:
  """An array whose shards on this host are filled from the tensors `names`, those of a `stacked` one along axis 0.

  `locate(part, buffer)` gives rows, columns and the matrix to fill for one layer's part of the array.
  """
  devices: dict[tuple, list] = {}  # part of the array -> who holds it
  for device, index in target.addressable_devices_indices_map(shape).items():
    part = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
    devices.setdefault(part, []).append(device)
  buffers = {part: _aligned([stop - start for start, stop in part], dtype) for part in devices}
  for layer, name in enumerate(names):
    pieces = []
    for part, buffer in buffers.items():
      (start, stop), *rest = part if stacked else ((0, 1), *part)
      if start <= layer < stop:
        pieces.append(locate(tuple(rest), buffer[layer - start] if stacked else buffer))
    source.fill(name, pieces)
  arrays = [jax.device_put(buffers[part], device) for part, holders in devices.items() for device in holders]
  # Before the next leaf is read: a transfer under way would hold this one's buffers beside the next one's.
  return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, target, arrays))


def _axes(entry) -> tuple[str, ...]:
  """Mesh axes of one entry of a PartitionSpec."""
  return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _aligned(shape, dtype) -> np.ndarray:
  size = math.prod(shape) * np.dtype(dtype).itemsize
  raw = np.empty(size + ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)


@functools.partial(jax.jit, static_argnames="dtype")
def _gather(leaf, layer, *, dtype):
  array = leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
  return sharding.replicate(array if dtype is None else array.astype(dtype))
