"""One mesh, one table from logical axes to mesh axes, and the specs that follow from it.

The mesh has the axes `data` (replicas), `fsdp` (parameters are stored sharded and gathered layer by layer) and `tp`
(tensor parallel). It always exists: on a laptop it is 1x1x1. Axis types are Explicit, so every array carries its
sharding in its type and a gradient has its parameter's spec.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tp")

# The table. Logical axis -> mesh axes, for arrays as they are stored.
TABLE: dict[str, str | tuple[str, ...] | None] = {
  "rows": ("data", "fsdp"),  # B, S: batch rows and slots
  "tokens": None,  # T, R
  "vocab": "tp",  # V
  "model": "fsdp",  # D of a parameter; of an activation it is whole
  "heads": "tp",  # N
  "kv_heads": "tp",  # K; whole on every device where tp has more of these than K, see `held_kv_heads`
  "head_size": None,  # H
  "feed_forward": "tp",  # F
  "layers": None,  # L
  "replicated": None,
}

ROWS = P(("data", "fsdp"))  # [B, ...]: rows over both data axes


def make_mesh(data: int = 1, fsdp: int = 1, tp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A (data, fsdp, tp) mesh of explicit axes over `devices` (default: the first data*fsdp*tp of this job).

  Raises ValueError if there are fewer devices than the product.
  """
  need = data * fsdp * tp
  devices = jax.devices() if devices is None else list(devices)
  if len(devices) < need:
    raise ValueError(f"mesh {data}x{fsdp}x{tp} (data, fsdp, tp) needs {need} devices; this job has {len(devices)}")
  # jax.make_mesh refuses meshes for which an axis of the slice must be split: 8x2 on v6e:4x4, 64x2 on v5p:4x4x8.
  grid = mesh_utils.create_device_mesh((data, fsdp, tp), devices[:need], allow_split_physical_axes=True)
  return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * 3)


@contextlib.contextmanager
def ensure_mesh():
  """The mesh in force, or, where the caller set none, one of a single device: library calls work without ceremony."""
  if jax.sharding.get_abstract_mesh().empty:
    with jax.set_mesh(make_mesh()):
      yield
  else:
    yield


def platform() -> str:
  """The platform that the mesh in force compiles for ("cpu", "gpu", "tpu"): not always the one this process runs on."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def spec(*logical: str, table: dict | None = None) -> P:
  """PartitionSpec of an array whose dimensions have these logical names; a mesh axis used twice raises ValueError."""
  table = TABLE if table is None else table
  unknown = [name for name in logical if name not in table]
  if unknown:
    raise ValueError(f"unknown logical axes {unknown}; known: {sorted(table)}")
  axes = [table[name] for name in logical]
  flat = [a for axis in axes for a in ((axis,) if isinstance(axis, str) else axis or ())]
  if len(flat) != len(set(flat)):
    raise ValueError(f"logical axes {logical} map to {axes}: a mesh axis occurs twice")
  return P(*axes)


def param_axes(params) -> dict:
  """Tree of logical axis names for a decoder's parameter tree (see models/config.py for the shapes)."""
  layer = {
    "attn_norm": ("layers", "replicated"),
    "mlp_norm": ("layers", "replicated"),
    "q": ("layers", "model", "heads", "head_size"),
    "k": ("layers", "model", "kv_heads", "head_size"),
    "v": ("layers", "model", "kv_heads", "head_size"),
    "o": ("layers", "heads", "head_size", "model"),
    "q_bias": ("layers", "heads", "head_size"),
    "k_bias": ("layers", "kv_heads", "head_size"),
    "v_bias": ("layers", "kv_heads", "head_size"),
    "q_norm": ("layers", "replicated"),
    "k_norm": ("layers", "replicated"),
    "gate": ("layers", "model", "feed_forward"),
    "up": ("layers", "model", "feed_forward"),
    "down": ("layers", "feed_forward", "model"),
  }
  top = {"embed": ("vocab", "model"), "final_norm": ("replicated",), "head": ("model", "vocab")}
  axes = {name: top[name] for name in params if name != "layers"}
  return axes | {"layers": {name: layer[name] for name in params["layers"]}}


def param_specs(params, mesh: Mesh | None = None) -> dict:
  """Tree of PartitionSpecs with which the parameters (arrays or their shapes) are stored on `mesh` (None: in force).

  Raises ValueError for key/value heads that `held_kv_heads` refuses.
  """
  table = dict(TABLE)
  layers = params.get("layers", {})
  if "k" in layers:
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    heads = layers["k"].shape[-2]
    if not mesh.empty and held_kv_heads(heads, mesh.shape["tp"]) != heads:
      table["kv_heads"] = None
  return jax.tree.map(lambda axes: spec(*axes, table=table), param_axes(params), is_leaf=lambda x: isinstance(x, tuple))


def held_kv_heads(heads: int, tp: int) -> int:
  """Key/value heads that `tp` devices hold between them: all K where they divide, else tp, K of them over and over.

  With tp a multiple of K, device i computes with head i * K // tp, the one that its query heads share. Its cache holds
  this head alone; the projections of keys and values, which are small, lie whole on every device. Raises ValueError
  where neither divides the other.
  """
  if heads % tp == 0:
    return heads
  if tp % heads == 0:
    return tp
  raise ValueError(
    f"{heads} key/value heads neither divide over tp={tp} nor does tp divide into copies of them; "
    f"choose a tp that divides {heads} or is a multiple of it"
  )


def check_divisible(params, mesh: Mesh) -> None:
  """Raises ValueError, with the numbers, where a dimension of a parameter does not divide over its mesh axes."""

  def check(path, leaf, axes):
    for size, name in zip(leaf.shape, axes, strict=True):
      mesh_axes = TABLE[name] or ()
      mesh_axes = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
      parts = math.prod(mesh.shape[a] for a in mesh_axes)
      if name == "kv_heads":
        held_kv_heads(size, parts)
      elif size % parts:
        where = "/".join(str(getattr(p, "key", p)) for p in path)
        raise ValueError(
          f"{where} {tuple(leaf.shape)}: {name}={size} does not divide over {mesh_axes}={parts}; "
          "choose a smaller mesh axis"
        )

  jax.tree_util.tree_map_with_path(check, params, param_axes(params))


def gathered(spec_: P) -> P:
  """The spec under which a stored parameter is computed with: the `fsdp` axis is gathered, `tp` stays."""
  return P(*(None if axis == "fsdp" else axis for axis in spec_))


def put_params(params, mesh: Mesh):
  """Parameters (numpy or jax) on the mesh under their stored specs."""
  check_divisible(params, mesh)
  return jax.tree.map(lambda x, s: put(x, NamedSharding(mesh, s)), params, param_specs(params, mesh))


def put(tree, place: NamedSharding):
  """Arrays under one sharding. Where it spans several hosts each of them calls this with the same values, and no byte
  travels: a host reads its own parts of them.
  """
  if place.is_fully_addressable:
    return jax.device_put(tree, place)  # one call for all arrays

  def one(x):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      return jax.device_put(x, place)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

  return jax.tree.map(one, tree)


def put_rows(tree, mesh: Mesh, axis: int = 0):
  """Host arrays on the mesh, dimension `axis` (rows) over the data axes, everything else whole."""
  lead = P(*([None] * axis), *ROWS)
  return put(jax.tree.map(np.asarray, tree), NamedSharding(mesh, lead))


def put_replicated(tree, mesh: Mesh):
  """Host arrays on every device of the mesh."""
  return jax.tree.map(lambda x: put(x, NamedSharding(mesh, P())), tree)


def num_row_shards(mesh: Mesh) -> int:
  """Batches have a multiple of this many rows."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def replicate(x: jax.Array) -> jax.Array:
  """Inside jit: the same value, whole on every device."""
  return jax.sharding.reshard(x, P(*([None] * jnp.ndim(x))))
