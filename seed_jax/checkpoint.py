"""Checkpoints: an orbax tree of arrays plus a JSON record of the host's side, complete or absent, checked when read.

A checkpoint is `DIR/<step>/` (orbax) and `DIR/<step>.json`, written last: the host's record and a SHA-256 of every file
of the tree. A step without its record was interrupted and counts as absent; a step whose files do not match their sums
is corrupt and is named.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from seed_jax import hosts
from seed_jax.metrics import plain_value, read_json, write_json


class CheckpointError(ValueError):
  """A checkpoint that cannot be used; the message names the last good one."""


class Checkpoints:
  """The checkpoints of one stage in `directory`; the newest `keep` stay."""

  def __init__(self, directory: epath.PathLike, *, keep: int = 2):
    if keep < 1:
      raise ValueError(f"keep={keep} must be at least 1")
    self.directory, self.keep = epath.Path(directory), keep
    if "://" not in str(directory):
      self.directory = self.directory.absolute()  # orbax refuses a relative path

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
    if jax.process_index() == 0:
      self._note(step).unlink(missing_ok=True)
      self._sweep(self.steps())  # what a killed process left, a half-written tree of this very step too
    with ocp.StandardCheckpointer() as writer:
      writer.save(place, state)
      writer.wait_until_finished()
    if jax.process_index() == 0:
      note = plain_value({"record": record, "files": _sums(place)})
      write_json(self._note(step), note | {"sum": _sum(note)})
      self._sweep(self.steps()[-self.keep :])

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
    """Removes checkpoints newer than `step`, when a run goes back to it. All processes call it."""
    hosts.meet(f"the checkpoint {step} that is read")  # nobody looks at the newer ones any more
    if hosts.index():
      return
    for newer in [s for s in self.steps() if s > step]:
      self._note(newer).unlink()  # first: without it the step counts as absent
      (self.directory / str(newer)).rmtree()

  def _sweep(self, kept: list[int]) -> None:
    """Removes what does not belong to the steps in `kept`; records go first, so that no step is ever half there."""
    names = {str(step) for step in kept}
    for item in sorted(self.directory.iterdir(), key=lambda item: item.suffix != ".json"):
      if item.name not in names and (item.suffix != ".json" or item.stem not in names):
        item.rmtree() if item.is_dir() else item.unlink()

  def _note(self, step):
    return self.directory / f"{step}.json"

  def _fault(self, step) -> str | None:
    try:
      note = read_json(self._note(step))
      if note.pop("sum") != _sum(note):
        return "its record differs from its sum"
      expected = note["files"]
    except (ValueError, KeyError, TypeError, AttributeError):
      return "its record cannot be read"
    found = _sums(self.directory / str(step))
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    return f"{len(wrong)} of {len(expected)} files differ from their sums, first {wrong[0]}" if wrong else None


def _sum(note: dict) -> str:
  return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


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
