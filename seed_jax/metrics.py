"""What a run leaves for people and programs: JSON files, metric rows, timers, a compile counter; and progress lines.

Process 0 writes, every process may call. Paths are anything that `etils.epath` opens (a folder here, `gs://bucket/folder`).
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from seed_jax.progress import Progress, is_writer, progress, say

__all__ = [
  "CompileCounter",
  "Progress",
  "Timer",
  "Writer",
  "is_writer",
  "keep_examples",
  "plain_value",
  "progress",
  "read_json",
  "read_rows",
  "say",
  "write_json",
  "write_text",
]

_REQUIRED = object()


# ---------------------------------------------------------------- JSON files


def plain_value(value: Any) -> Any:
  """JSON values of numpy and jax scalars and arrays, tuples, sets and paths; NaN and infinities become None."""
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, Mapping):
    return {str(key): plain_value(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain_value(item) for item in value]
  if isinstance(value, (set, frozenset)):
    return [plain_value(item) for item in sorted(value)]
  if hasattr(value, "__array__"):
    return plain_value(np.asarray(value).tolist())
  return str(value)


def write_json(path: epath.PathLike, value: Any) -> None:
  """Writes `value` so that a reader sees the old file or the whole new one, never a part. NaN is written as null."""
  text = json.dumps(plain_value(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
  write_text(path, text)


def read_json(path: epath.PathLike, default: Any = _REQUIRED) -> Any:
  """The value of a JSON file, or `default` where there is no such file.

  Raises:
    FileNotFoundError: no file and no default.
    ValueError: the file is not JSON; the message names it.
  """
  path = epath.Path(path)
  if default is not _REQUIRED and not path.exists():
    return default
  try:
    return json.loads(path.read_text())
  except ValueError as error:  # UnicodeDecodeError is one too.
    raise ValueError(f"{path} is not a JSON file ({error}); remove it and run its stage again") from error


def write_text(path: epath.PathLike, text: str) -> None:
  """Writes a text file so that a reader sees the old one or the whole new one, never a part. Process 0 only."""
  if not is_writer():
    return
  path = epath.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
  temporary.write_bytes(_encode(text))
  temporary.replace(path)


def _encode(text: str) -> bytes:
  """UTF-8; half a character in a sampled text becomes its escape, which JSON reads back as what it was."""
  return text.encode("utf-8", "backslashreplace")


# ---------------------------------------------------------------- metric rows


def read_rows(path: epath.PathLike, *, key: str = "iteration") -> list[dict[str, Any]]:
  """The rows of a JSONL file in order of `key`. Of two rows with one key the later counts; other lines are left out."""
  path = epath.Path(path)
  rows: dict[Any, dict[str, Any]] = {}
  for line in path.read_bytes().splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError):
      row = json.loads(line)
      if isinstance(row, dict) and isinstance(row.get(key), int):
        rows[row[key]] = row
  return [rows[index] for index in sorted(rows)]


class Writer:
  """One row of numbers an iteration: `DIR/<name>.jsonl`, TensorBoard, and Weights & Biases where asked for.

  A row is on disk when `write` returns. Opening mends what a killed process left: a torn last line goes, and with
  `resume=n` all rows after iteration n, which the resumed run writes again.
  """

  def __init__(
    self,
    directory: epath.PathLike,
    *,
    name: str = "metrics",
    key: str = "iteration",
    resume: int | None = None,
    tensorboard: bool = True,
    wandb: str | None = None,
    config: Mapping[str, Any] | None = None,
  ):
    self.key = key
    self.path = epath.Path(directory) / f"{name}.jsonl"
    self._file = self._board = self._wandb = None
    self._active = is_writer()
    if not self._active:
      return
    self.path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for row in read_rows(self.path, key=key) if resume is None or row[key] <= resume]
    text = "".join(_line(row) for row in rows)
    if self.path.exists() and self.path.read_bytes() != _encode(text):
      write_text(self.path, text)
    # An object store cannot append: there the whole text is written again, at most every half minute.
    self._remote = "://" in str(self.path)
    self._text, self._written = text, time.monotonic()
    if not self._remote:
      self._file = open(os.fspath(self.path), "a", encoding="utf-8", errors="backslashreplace")
    if tensorboard:
      self._board = _open_board(epath.Path(directory) / "tensorboard" / name, resume)
    if wandb:
      self._wandb = _open_wandb(wandb, directory, config)

  def write(self, iteration: int, values: Mapping[str, Any]) -> None:
    """Appends a row. A number that is not finite is written as null and named in the row's list `nonfinite`."""
    if not self._active:
      return
    row: dict[str, Any] = {self.key: int(iteration)}
    numbers, bad = {}, []
    for name, value in values.items():
      if hasattr(value, "__array__"):
        value = np.asarray(value).tolist()
      row[name] = plain_value(value)
      if isinstance(value, (bool, int, float)):
        numbers[name] = float(value)
        if not math.isfinite(value):
          bad.append(name)
    if bad:
      row["nonfinite"] = bad
      say(f"warning: {', '.join(bad)} not finite at {self.key} {iteration}")
    line = _line(row)
    if self._file is not None:
      self._file.write(line)
      self._file.flush()
    else:
      self._text += line
      if time.monotonic() - self._written > 30:
        self._flush_remote()
    if self._board is not None:
      for name, number in numbers.items():
        self._board.add_scalar(name, number, int(iteration))
    if self._wandb is not None:
      self._wandb.log(numbers, step=int(iteration))

  def close(self) -> None:
    """Writes what is left; the writer is not used afterwards. Closing twice is harmless."""
    if self._file is not None:
      self._file.close()
    elif self._active:
      self._flush_remote()
    if self._board is not None:
      self._board.close()
    if self._wandb is not None:
      self._wandb.finish()
    self._file = self._board = self._wandb = None
    self._active = False

  def _flush_remote(self) -> None:
    write_text(self.path, self._text)
    self._written = time.monotonic()

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *unused) -> None:
    self.close()


def _line(row: Mapping[str, Any]) -> str:
  return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _open_board(directory: epath.Path, resume: int | None):
  """A TensorBoard writer, or None with one warning: a run must not die for a missing viewer."""
  try:
    import tensorboardX

    purge = None if resume is None else resume + 1
    return tensorboardX.SummaryWriter(logdir=os.fspath(directory), purge_step=purge, flush_secs=10)
  except Exception as error:  # Any failure of an optional library, on import or on a path that it cannot open.
    say(f"warning: no TensorBoard files ({type(error).__name__}: {error})")
    return None


def _open_wandb(project: str, directory: epath.PathLike, config: Mapping[str, Any] | None):
  try:
    import wandb

    # One id per work directory: a resumed run continues its curves.
    name = epath.Path(directory).name
    return wandb.init(project=project, name=name, id=name, resume="allow", config=plain_value(config or {}))
  except Exception as error:
    say(f"warning: no Weights & Biases run ({type(error).__name__}: {error})")
    return None


def keep_examples(
  workdir: epath.PathLike, trajectories: Iterable[Any], *, split: str, iteration: int | None = None, count: int = 6
) -> None:
  """Adds episodes to `workdir/examples.json` for the report: half of them won, half lost, as many families as possible.

  Takes `seed_jax.trajectory.Trajectory` or whatever has its fields. Examples of the same split and iteration are
  replaced, so a stage that runs again leaves the same file.
  """
  if not is_writer():
    return
  chosen: list[Any] = []
  episodes = [episode for episode in trajectories if episode.turns and not episode.error]
  for won, share in ((True, (count + 1) // 2), (False, count // 2)):
    seen: collections.Counter = collections.Counter()
    ranked = []  # The first of every family, then the second of every family, ...
    for place, episode in enumerate(episodes):
      if bool(episode.won) == won:
        ranked.append((seen[episode.family], place, episode))
        seen[episode.family] += 1
    chosen += [episode for *_, episode in sorted(ranked, key=lambda item: item[:2])[:share]]
  path = epath.Path(workdir) / "examples.json"
  kept = [
    item for item in read_json(path, default=[]) if (item.get("split"), item.get("iteration")) != (split, iteration)
  ]
  write_json(path, kept + [_example(episode, split, iteration) for episode in chosen])


def _example(episode: Any, split: str, iteration: int | None) -> dict[str, Any]:
  return {
    "task": episode.task[:4_000],
    "family": episode.family,
    "won": bool(episode.won),
    "split": split,
    "iteration": iteration,
    "summary": episode.summary[:4_000],
    "skill": episode.skill[:4_000],
    "parsed": bool(episode.skill) if episode.analysis else None,
    "turns": [
      {name: getattr(turn, name)[:4_000] for name in ("observation", "action", "response")}
      | {"valid": bool(turn.valid)}
      for turn in episode.turns
    ],
  }


# ---------------------------------------------------------------- time and compilations


class Timer:
  """Seconds by named phase: `with timer("rollout"): ...`, then `timer.take()` once an iteration.

  JAX returns before the device is done: a phase that ends in device work must block on its result inside the `with`.
  """

  def __init__(self):
    self._seconds: dict[str, float] = collections.defaultdict(float)

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    import jax  # names the phase in a profile

    start = time.perf_counter()
    try:
      with jax.profiler.TraceAnnotation(phase):
        yield
    finally:
      self._seconds[phase] += time.perf_counter() - start

  def add(self, phase: str, seconds: float) -> None:
    """Seconds that were measured elsewhere."""
    self._seconds[phase] += seconds

  def take(self, prefix: str = "seconds/") -> dict[str, float]:
    """The seconds since the last call, by prefixed phase name."""
    taken = {prefix + phase: seconds for phase, seconds in self._seconds.items()}
    self._seconds.clear()
    return taken


class CompileCounter:
  """What XLA compiles in this process from now to `close`: `count`, `seconds`, and `names` (program -> times).

  After warm-up `take()` should be 0 every iteration: anything else is a shape that changed.
  """

  _EVENT = "/jax/core/compile/backend_compile_duration"

  def __init__(self):
    import jax.monitoring

    self.count, self.seconds, self.names = 0, 0.0, collections.Counter()
    self._taken = 0
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, duration: float, **facts: Any) -> None:
    if event == self._EVENT:
      self.count += 1
      self.seconds += duration
      self.names[str(facts.get("fun_name", "?"))] += 1

  def take(self) -> int:
    """Compilations since the last call."""
    new, self._taken = self.count - self._taken, self.count
    return new

  def close(self) -> None:
    """Stops counting; the numbers stay."""
    import jax.monitoring

    with contextlib.suppress(ValueError, AssertionError):  # Closed before.
      jax.monitoring.unregister_event_duration_listener(self._listen)

  def __enter__(self) -> CompileCounter:
    return self

  def __exit__(self, *unused) -> None:
    self.close()
