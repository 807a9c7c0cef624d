"""Checkpoints: an orbax tree of arrays plus a JSON record of the host's side, complete or absent, checked when read.

A checkpoint is `DIR/<step>/` (orbax) and `DIR/<step>.json`, written last. A step without its record was interrupted and
counts as absent; a step that is not what it was is damaged and is named. `save` returns as soon as the arrays have left
the device; a thread writes the rest.

What the record knows: size and SHA-256 of every small file, the size of every large one, and a sum of each array that
the device computes (`array_sums`), before it is written and again after it was read. So no large file is read twice,
however slow the storage, and what is compared is what the run goes on with.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from seed_jax import hosts
from seed_jax.metrics import plain_value, read_json, write_json
from seed_jax.preemption import Preempted

ALONE = 5.0  # seconds that a host which fails waits for a checkpoint: what the others do not write never ends
SMALL = 1 << 20  # bytes up to which a file has a SHA-256 in the record


class CheckpointError(ValueError):
  """A checkpoint that cannot be used; the message names the last good one."""


class Checkpoints:
  """The checkpoints of one stage in `directory`: the newest `keep` stay, and the `keep_best` with the highest metric.

  As a context it waits at its end for what is still being written.
  """

  def __init__(self, directory: epath.PathLike, *, keep: int = 2, keep_best: int = 0):
    if keep < 1 or keep_best < 0:
      raise ValueError(f"keep={keep} must be at least 1 and keep_best={keep_best} at least 0")
    self.directory, self.keep, self.keep_best = epath.Path(directory), keep, keep_best
    if "://" not in str(directory):
      self.directory = self.directory.absolute()  # orbax refuses a relative path
    self.newest: int | None = None  # the step that was last saved or restored here
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None

  def steps(self) -> list[int]:
    """Complete checkpoints, oldest first."""
    if not self.directory.exists():
      return []
    return sorted(
      int(f.stem) for f in self.directory.glob("*.json") if f.stem.isdigit() and (self.directory / f.stem).exists()
    )

  def best(self) -> list[tuple[float, int]]:
    """(metric, step) of the complete checkpoints that have a metric, best first; of two equal ones the older is."""
    found = [(read_json(self._note(step)).get("metric"), step) for step in self.steps()]
    return sorted(((m, s) for m, s in found if m is not None), key=lambda pair: (-pair[0], pair[1]))

  def save(self, step: int, state: Any, record: Mapping[str, Any], *, metric: float | None = None) -> None:
    """Writes the arrays of `state` and the JSON values of `record`. Returns when `state` may be changed: the checkpoint
    counts as soon as a thread has written all of it, before the next `save` or at the latest when `finish` returns.

    metric: what `keep_best` goes by; a checkpoint without one is never among the best.
    """
    self.finish()
    self.directory.mkdir(parents=True, exist_ok=True)
    if hosts.index() == 0:
      self._note(step).unlink(missing_ok=True)
      self._sweep(self.steps())  # what a killed process left, a half-written tree of this very step too
    sums = array_sums(state)
    writer = ocp.StandardCheckpointer()
    writer.save(self.directory / str(step), state)
    note = plain_value({"record": record, "metric": metric})
    self._thread = threading.Thread(target=self._complete, args=(writer, step, note, sums), daemon=hosts.several())
    self._thread.start()
    self.newest = step

  def finish(self) -> None:
    """Waits until the last checkpoint is on disk. Raises what its writing raised."""
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    error, self._error = self._error, None
    if error is not None:
      raise error

  def _complete(self, writer: ocp.StandardCheckpointer, step: int, note: dict, sums) -> None:
    """The end of a `save`, in a thread of its own. The writer returns when every process has written its share."""
    try:
      writer.close()
      if hosts.index() == 0:
        note["arrays"] = [int(x) for x in jax.device_get(sums)]
        self._describe(step, note)
        best = [s for _, s in self.best()[: self.keep_best]] if self.keep_best else []
        self._sweep([*self.steps()[-self.keep :], *best])
    except BaseException as error:  # for the thread that waits
      self._error = error

  def weigh(self, step: int, metric: float | None) -> None:
    """Gives a checkpoint that has none yet the metric that `keep_best` goes by; without either it does nothing."""
    self.finish()
    if hosts.index() == 0 and metric is not None and step in self.steps():
      note = read_json(self._note(step))
      if note["metric"] is None:
        note.pop("sum")
        self._seal(step, note | plain_value({"metric": metric}))

  def restore(self, target: Any, step: int | None = None) -> tuple[int, Any, dict] | None:
    """(step, state, record) of a checkpoint, the newest by default, in the shapes and shardings of `target`; None where
    there is none. Compiles what `save` will need for such a state.

    Raises CheckpointError, which names the last good step, where the checkpoint is damaged or missing.
    """
    self.finish()
    array_sums(target)
    steps = self.steps()
    if step is None:
      if not steps:
        return None
      step = steps[-1]
    if step not in steps:
      raise CheckpointError(f"there is no checkpoint {step} in {self.directory}; there are {steps or 'none'}")
    fault = self._fault(step)
    if fault is None:
      note = read_json(self._note(step))
      try:
        with ocp.StandardCheckpointer() as reader:
          state = read_checked(lambda: reader.restore(self.directory / str(step), target), note["arrays"])
        self.newest = step
        return step, state, note["record"]
      except CheckpointError as error:
        fault = str(error)
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
    steps = self.steps()
    if hosts.index() == 0 and steps and steps[-1] > step:
      self._sweep([s for s in steps if s <= step])

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, kind, *unused) -> None:
    if kind is None or issubclass(kind, Preempted) or not hosts.several():
      try:
        self.finish()
      except Exception:
        if kind is None or issubclass(kind, Preempted):  # else the first error is the one to tell
          raise
    elif self._thread is not None:
      self._thread.join(ALONE)

  def _describe(self, step: int, note: dict) -> None:
    """Writes the record: from here on the step counts."""
    note["files"] = {str(f.relative_to(self.directory)): _of_file(f) for f in self._files(step)}
    self._seal(step, note)

  def _seal(self, step: int, note: dict) -> None:
    write_json(self._note(step), note | {"sum": _sum(note)})

  def _sweep(self, kept: list[int]) -> None:
    """Removes what does not belong to the steps in `kept`; records go first, so that no step is ever half there."""
    names = {str(step) for step in kept}
    for item in sorted(self.directory.iterdir(), key=lambda item: item.suffix != ".json"):
      if (item.stem if item.suffix == ".json" else item.name) not in names:
        item.rmtree() if item.is_dir() else item.unlink()

  def _note(self, step) -> epath.Path:
    return self.directory / f"{step}.json"

  def _files(self, step) -> list[epath.Path]:
    """Every file of a step but its record, sorted."""
    return sorted(_files(self.directory / str(step)))

  def _fault(self, step) -> str | None:
    """What is wrong with a checkpoint, as far as that can be seen without reading its large files."""
    try:
      note = read_json(self._note(step))
      if note.pop("sum") != _sum(note):
        return "its record differs from its sum"
      expected = note["files"]
    except (ValueError, KeyError, TypeError, AttributeError):
      return "its record cannot be read"
    found = {str(f.relative_to(self.directory)): f for f in self._files(step)}
    wrong = sorted(expected.keys() ^ found.keys())
    wrong += [name for name in sorted(expected.keys() & found.keys()) if expected[name] != _of_file(found[name])]
    return f"{len(wrong)} of {len(expected)} files differ from their sums, first {wrong[0]}" if wrong else None


# ---------------------------------------------------------------- sums


def read_checked(read: Callable[[], Any], sums: Sequence[int] | None) -> Any:
  """The tree that `read` brings, if its arrays have these sums (None: none are known). All that is read from a
  checkpoint comes through here.

  Raises CheckpointError, which says what is wrong and not where, also for what `read` raises.
  """
  try:
    found = read()
    values = [] if sums is None else [int(x) for x in jax.device_get(array_sums(found))]
    wrong = sum(a != b for a, b in zip(values, sums or (), strict=True))
  except Exception as error:  # the reader has many types for damage
    raise CheckpointError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
  if wrong:
    many = f"{wrong} of {len(values)} arrays differ from their sums"
    raise CheckpointError(many if len(values) > 1 else "the array differs from its sum")
  return found


def array_sums(state: Any) -> list[jax.Array]:
  """A 32-bit sum of every array of a tree, in the order of its leaves: sum over elements of bits * (2 index + 1) mod
  2^32, index counted through the array. It does not depend on how the array is sharded, and any single element that
  changed, or two that changed places, change it.
  """
  arrays = [x for x in jax.tree.leaves(state) if hasattr(x, "dtype")]
  together: dict[tuple, list[int]] = {}  # one program for the arrays that lie on the same devices
  for place, x in enumerate(arrays):
    together.setdefault(tuple(sorted(d.id for d in x.devices())) if isinstance(x, jax.Array) else (), []).append(place)
  sums = {}
  for places in together.values():
    sums |= zip(places, _array_sums([arrays[place] for place in places]), strict=True)
  return [sums[place] for place in range(len(arrays))]


@jax.jit
def _array_sums(arrays):
  return [_array_sum(x) for x in arrays]


def _array_sum(x):
  bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
  bits = jax.lax.bitcast_convert_type(bits, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[bits.dtype.itemsize])
  spec = jax.typeof(x).sharding
  where = functools.partial(jax.lax.broadcasted_iota, jnp.uint32, x.shape, out_sharding=spec)
  strides = [math.prod(x.shape[d + 1 :]) % 2**32 for d in range(x.ndim)]
  index = sum((where(d) * jnp.uint32(s) for d, s in enumerate(strides)), jnp.zeros((), jnp.uint32))
  return jnp.sum(bits.astype(jnp.uint32) * (2 * index + 1), dtype=jnp.uint32)  # odd factors: none loses a bit


def _sum(note: dict) -> str:
  return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


def _of_file(path: epath.Path) -> dict[str, Any]:
  """What the record says about a file."""
  size = path.stat().length
  if size > SMALL:
    return {"size": size}
  return {"size": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _files(place: epath.Path) -> list[epath.Path]:
  """Every file below `place` (epath's own recursive glob refuses, for the sake of object storage)."""
  found = []
  for item in place.iterdir():
    found += _files(item) if item.is_dir() else [item]
  return found


def same(a: Any, b: Any) -> bool:
  """Whether two trees hold the same arrays, bit for bit."""
  left, right = jax.tree.leaves(a), jax.tree.leaves(b)
  return len(left) == len(right) and all(
    np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True) for x, y in zip(left, right, strict=True)
  )


def check(checkpoints: Checkpoints, step: int) -> list[int]:
  """The sums of a checkpoint's arrays, in the order of its leaves, for `read_checked`. Raises CheckpointError where it
  is missing or its files are not what they were when it was written, as far as their sums are known.
  """
  if step not in checkpoints.steps():
    raise CheckpointError(
      f"there is no checkpoint {step} in {checkpoints.directory}; there are {checkpoints.steps() or 'none'}"
    )
  fault = checkpoints._fault(step)
  if fault is not None:
    raise CheckpointError(f"checkpoint {step} in {checkpoints.directory} is damaged ({fault}); choose another step")
  return read_json(checkpoints._note(step))["arrays"]


def seal(directory: epath.PathLike, name: str, tree: Any) -> None:
  """Writes `directory/<name>.json` about the arrays of `tree`, which lie in `directory/<name>`: a checkpoint's record
  for a tree outside a run.
  """
  sums = [int(array_sums([leaf])[0]) for leaf in jax.tree.leaves(tree)]  # one by one, for the sake of memory
  Checkpoints(directory)._describe(name, {"record": {}, "metric": None, "arrays": sums})


def sealed(directory: epath.PathLike, name: str) -> list[int] | None:
  """The sums that `seal` wrote, None where it never did. Raises CheckpointError where the files are others."""
  place = Checkpoints(directory)
  if not place._note(name).exists():
    return None
  fault = place._fault(name)
  if fault is not None:
    raise CheckpointError(fault)
  return read_json(place._note(name))["arrays"]
