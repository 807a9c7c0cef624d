"""The parameters of an orbax checkpoint without the rest of it: each array is read when it is asked for.

A checkpoint of training holds moments of twice the parameters' size, and with some methods another set of parameters;
a conversion needs none of that, and only one array of what it needs at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath


class Stored:
  """An array in a checkpoint. numpy reads it; indexing reads it too, and the file keeps the one that was read last."""

  def __init__(self, file: _File, path: tuple, shape: tuple[int, ...], dtype: Any):
    self._file, self._path, self.shape, self.dtype = file, path, tuple(shape), np.dtype(dtype)

  def __array__(self, dtype=None, copy=None) -> np.ndarray:
    array = self._file.read(self._path)
    return array if dtype is None else array.astype(dtype)

  def __getitem__(self, index) -> np.ndarray:
    return np.asarray(self)[index]


def stored_params(directory: epath.PathLike) -> dict:
  """The tree of parameters of an orbax checkpoint, with a `Stored` for each array.

  The checkpoint is a `TrainState`, a tuple that begins with one (what a training with more than a state saves), or the
  bare parameters. Raises ValueError where it is none of these.
  """
  file = _File(epath.Path(directory))
  at, tree = (), file.tree
  if isinstance(tree, list | tuple) and tree:
    at, tree = (*at, 0), tree[0]
  if isinstance(tree, dict) and "params" in tree:
    at, tree = (*at, "params"), tree["params"]
  if not isinstance(tree, dict) or "embed" not in tree or "layers" not in tree:
    raise ValueError(f"{directory} is a checkpoint without a decoder's parameters")

  def stored(path, leaf):
    return Stored(file, (*at, *(step.key for step in path)), leaf.shape, leaf.dtype)

  return jax.tree_util.tree_map_with_path(stored, tree)


class _File:
  def __init__(self, directory: epath.Path):
    self._directory = directory if "://" in str(directory) else directory.absolute()  # orbax refuses a relative path
    with ocp.PyTreeCheckpointer() as reader:
      self.tree = reader.metadata(self._directory).item_metadata.tree
    self._last: tuple[tuple, np.ndarray] | None = None

  def read(self, path: tuple) -> np.ndarray:
    if self._last is None or self._last[0] != path:
      self._last = None  # not two at a time
      item = jax.tree.map(lambda _: ocp.PLACEHOLDER, self.tree)  # what stays where it is
      _put(item, path, 0)
      how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
      with ocp.PyTreeCheckpointer() as reader:
        found = reader.restore(self._directory, args=ocp.args.PyTreeRestore(item=item, restore_args=how))
      for step in path:
        found = found[step]
      self._last = path, found
    return self._last[1]


def _put(tree, path: tuple, value) -> None:
  for step in path[:-1]:
    tree = tree[step]
  tree[path[-1]] = value
