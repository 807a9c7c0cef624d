"""The parameters of an orbax checkpoint without the rest of it: each array is read when it is asked for.

A checkpoint of training holds moments of twice the parameters' size, and with some methods another set of parameters;
a conversion needs none of that, and only one array of what it needs at a time. An array whose sum is known is compared
with it before anybody sees the array, as a checkpoint's state is when a run goes on with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from seed_jax.checkpoint import CheckpointError, read_checked
from seed_jax.update import TrainState

FIELDS = {field.name for field in dataclasses.fields(TrainState)}


class Stored:
  """An array in a checkpoint. numpy reads it; indexing reads it too, and the file keeps the one that was read last."""

  def __init__(self, file: _File, path: tuple, shape: tuple[int, ...], dtype: Any, total: int | None):
    self._file, self._path, self._total = file, path, total
    self.shape, self.dtype = tuple(shape), np.dtype(dtype)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    array = self._file.read(self._path, self._total)
    return array if dtype is None else array.astype(dtype)

  def __getitem__(self, index) -> np.ndarray:
    return np.asarray(self)[index]


def stored_params(directory: epath.PathLike, sums: Sequence[int] | None = None) -> dict:
  """The tree of parameters of an orbax checkpoint, with a `Stored` for each array.

  The checkpoint is a `TrainState`, a tuple that begins with one (what a training with more than a state saves), or the
  bare parameters. Raises ValueError where it is none of these. A `Stored` raises CheckpointError where it is read and
  cannot be, or is not what it was.

  Args:
    directory: the checkpoint.
    sums: of all its arrays, in the order of its leaves (`checkpoint.array_sums`); None where they are not known.
  """
  file = _File(epath.Path(directory))
  at, tree = (), file.tree
  if isinstance(tree, list | tuple) and tree:
    at, tree = (*at, 0), tree[0]
  state = TrainState(**tree) if isinstance(tree, dict) and set(tree) == FIELDS else tree  # for the order of its leaves
  known = None if sums is None else dict(zip(map(id, jax.tree.leaves(state)), sums, strict=False))
  if isinstance(tree, dict) and "params" in tree:
    at, tree = (*at, "params"), tree["params"]
  if not isinstance(tree, dict) or "embed" not in tree or "layers" not in tree:
    raise ValueError(f"{directory} is a checkpoint without a decoder's parameters")

  def stored(path, leaf):
    total = None if known is None else known[id(leaf)]
    return Stored(file, (*at, *(step.key for step in path)), leaf.shape, leaf.dtype, total)

  return jax.tree_util.tree_map_with_path(stored, tree)


class _File:
  def __init__(self, directory: epath.Path):
    self._directory = directory if "://" in str(directory) else directory.absolute()  # orbax refuses a relative path
    with ocp.PyTreeCheckpointer() as reader:
      found = reader.metadata(self._directory).item_metadata
    if found is None:
      raise ValueError(f"{directory} is no orbax checkpoint of a tree of arrays")
    self.tree = found.tree
    self._last: tuple[tuple, np.ndarray] | None = None

  def read(self, path: tuple, total: int | None) -> np.ndarray:
    """The array at `path`, if its sum is `total`."""
    if self._last is None or self._last[0] != path:
      self._last = None  # not two at a time
      try:
        found = read_checked(lambda: self._read(path), None if total is None else [total])
      except CheckpointError as error:
        raise CheckpointError(f"{'.'.join(map(str, path))}: {error}") from error
      self._last = path, np.asarray(found)
    return self._last[1]

  def _read(self, path: tuple) -> jax.Array:
    item = jax.tree.map(lambda _: ocp.PLACEHOLDER, self.tree)  # what stays where it is
    _put(item, path, 0)
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    with ocp.PyTreeCheckpointer() as reader:
      found = reader.restore(self._directory, args=ocp.args.PyTreeRestore(item=item, restore_args=how))
    for step in path:
      found = found[step]
    return jax.device_put(found)  # of which the sum is computed without a copy, and which numpy reads without one


def _put(tree, path: tuple, value) -> None:
  for step in path[:-1]:
    tree = tree[step]
  tree[path[-1]] = value
