"""Checkpoints: an orbax tree of arrays plus a JSON record of the host's side, complete or absent, checked when read.

A checkpoint is `DIR/<step>/` (orbax) and `DIR/<step>.json`, written last: the host's record and a SHA-256 of every file
of the tree. A step without its record was interrupted and counts as absent; a step whose files do not match their sums
is corrupt and is named.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from seed_jax.metrics import read_json, write_json


class CheckpointError(ValueError):
  """A checkpoint that cannot be used; the message names the last good one."""


class Checkpoints:
  """The checkpoints of one stage in `directory`; the newest `keep` stay."""

  def __init__(self, directory: epath.PathLike, *, keep: int = 2):
    if keep < 1:
      raise ValueError(f"keep={keep} must be at least 1")
    self.directory, self.keep = epath.Path(directory), keep

  def steps(self) -> list[int]:
    """Complete checkpoints, oldest first."""
    if not self.directory.exists():
      return []
    return sorted(
      int(f.stem) for f in self.directory.glob("*.json") if f.stem.isdigit() and (self.directory / f.stem).exists()
    )

  def save(self, step: int, state: Any, record: dict) -> None:
    """Writes the arrays of `state` and the JSON values of `record`; returns when both are on disk."""
    self.directory.mkdir(parents=True, exist_ok=True)
    place = self.directory / str(step)
    self._note(step).unlink(missing_ok=True)
    if place.exists():
      place.rmtree()
    with ocp.StandardCheckpointer() as writer:
      writer.save(place, state)
      writer.wait_until_finished()
    if jax.process_index() == 0:
      write_json(self._note(step), {"record": record, "files": _sums(place)})
      for old in self.steps()[: -self.keep]:
        self._note(old).unlink()
        (self.directory / str(old)).rmtree()

  def restore(self, target: Any, step: int | None = None) -> tuple[int, Any, dict] | None:
    """(step, state, record) of a checkpoint, the newest by default, in the shapes and shardings of `target`; None where
    there is none.

    Raises CheckpointError, which names the last good step, where the checkpoint is damaged or missing.
    """
    steps = self.steps()
    if step is None:
      if not steps:
        return None
      step = steps[-1]
    if step not in steps:
      raise CheckpointError(f"there is no checkpoint {step} in {self.directory}; there are {steps or 'none'}")
    fault = self._fault(step)
    if fault is None:
      try:
        with ocp.StandardCheckpointer() as reader:
          state = reader.restore(self.directory / str(step), target)
        return step, state, read_json(self._note(step))["record"]
      except Exception as error:  # the reader has many types for damage
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    good = [s for s in steps if s != step and self._fault(s) is None]
    advice = (
      f"the last good one is {good[-1]}: add --resume_from={good[-1]}"
      if good
      else "no other one is good: delete the folder to start again"
    )
    raise CheckpointError(f"checkpoint {step} in {self.directory} is damaged ({fault}); {advice}")

  def drop_after(self, step: int) -> None:
    """Removes checkpoints newer than `step`, when a run goes back to it."""
    for newer in [s for s in self.steps() if s > step]:
      self._note(newer).unlink()
      (self.directory / str(newer)).rmtree()

  def _note(self, step):
    return self.directory / f"{step}.json"

  def _fault(self, step) -> str | None:
    try:
      expected = read_json(self._note(step))["files"]
    except (ValueError, KeyError, TypeError):
      return "its record cannot be read"
    found = _sums(self.directory / str(step))
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    return f"{len(wrong)} of {len(expected)} files differ from their sums, first {wrong[0]}" if wrong else None


def _sums(place: epath.Path) -> dict[str, str]:
  return {str(f.relative_to(place)): hashlib.sha256(f.read_bytes()).hexdigest() for f in _files(place)}


def _files(place: epath.Path) -> list[epath.Path]:
  """Every file below `place`, sorted (epath's own recursive glob refuses, for the sake of object storage)."""
  found = []
  for item in sorted(place.iterdir()):
    found += _files(item) if item.is_dir() else [item]
  return found


def same(a: Any, b: Any) -> bool:
  """Whether two trees hold the same arrays, bit for bit."""
  left, right = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(left) == len(right) and all(
    np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True) for x, y in zip(left, right, strict=True)
  )
