"""A work directory: which config it belongs to, which stages are done in it, and what they left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from etils import epath
from ml_collections import ConfigDict, FrozenConfigDict

from seed_jax import hosts, methods
from seed_jax.metrics import read_json, write_json, write_text
from seed_jax.preemption import Notice

STAGES = ("base", "collect", "annotate", "sft", "train", "evaluate", "report")
EXTRA_STAGES = ("library", "compare", "preflight")  # run where they are asked for
START_STAGES = ("base", "collect", "annotate", "sft")  # what a run may take over from another one with config.start
START_SECTIONS = ("seed", "benchmark", "model", "analysis", *START_STAGES)  # what such runs have in common

LOCK = ".lock"  # in a work directory; holds who works there, or did last
# what may change from command to command: the arms of a comparison have configs of their own, a profile changes
# nothing, and a preflight only predicts
FREE = {"compare": None, "profile": None, "preflight": None}

# Fields that came later than others, each with the value under which a run does what it did before: that is what a
# config without such a field means. A new field gets a line here where there is such a value.
LATER = {
  "actor_mesh.data": 0,
  "actor_mesh.fsdp": 1,
  "actor_mesh.tp": 0,
  "model.preset": "",
  "model.remat": "none",
  "analysis.ask": "message",
  "checkpoint.keep_best": 0,
  "checkpoint.best_metric": "",
  "collect.also": [],
  "evaluate.also": [],
  "train.async_level": 0,
  "train.max_generations": 1,
  "train.theory_every": 0,
  "train.theory_contexts": 32,
  **{f"{section}.optimizer.moment_dtype": "float32" for section in ("base", "sft", "train")},
  **{f"{section}.skill_room": 0.0 for section in ("base", "sft", "train")},
}
WHOLE = "config.json"  # of a policy's folder: the file that is written last


class ConfigError(ValueError):
  """A config that cannot be run; the message says what to change."""


class Workdir:
  """One config in one folder. Whoever inherits says with `check` what can be run."""

  def __init__(
    self,
    config: ConfigDict,
    workdir: epath.PathLike,
    *,
    plain: bool | None = None,
    resume_from: int | None = None,
    notice: Notice | None = None,
  ):
    """notice: who asks this run to stop; by default nobody does."""
    self.config = FrozenConfigDict(config)
    self.workdir = epath.Path(workdir)
    self.plain, self.resume_from = plain, resume_from
    self.notice = notice or Notice()

  def open(self, also: Callable[[], object] = lambda: None) -> None:
    """Checks the config, then creates the work directory or checks that it belongs to this config.

    also: what else must hold; called before anything is written.

    Raises ConfigError: for a field that cannot be run, or with the fields that differ from those of the work directory.
    """
    self.check()
    ours, theirs = self.configs()
    also()
    if ours != theirs:  # where nothing was done yet, a corrected command may follow a wrong one
      self.workdir.mkdir(parents=True, exist_ok=True)
      write_json(self.workdir / "config.json", ours)
    if self.config.start and self.done(START_STAGES[-1]) is None:
      self._take_start(epath.Path(self.config.start))

  def configs(self) -> tuple[dict, dict]:
    """This config and that of the work directory ({}: it has none) as JSON values. Writes nothing.

    Raises ConfigError, with the fields that differ, where something was done in the work directory with another config.
    """
    ours = json.loads(self.config.to_json_best_effort())
    path = self.workdir / "config.json"
    if hosts.index() and not path.exists():  # process 0 has written it
      raise ConfigError(f"{self.workdir} is not the same folder on all hosts; name one that all of them see (gs://...)")
    theirs = read_json(path) if path.exists() else {}
    free = self.free()
    differences = _differences(ours | free, theirs | free) if theirs else []
    if differences and (
      hosts.index() or {item.name for item in self.workdir.iterdir()} - {"config.json", "preflight.json", LOCK}
    ):
      shown = "; ".join(differences[:4]) + ("; ..." if len(differences) > 4 else "")
      raise ConfigError(f"{self.workdir} belongs to another config ({shown}); choose another --workdir")
    return ours, theirs

  def free(self) -> dict:
    """The sections and fields of a config that may differ from those of the work directory, each as None."""
    return FREE

  def check(self) -> None:
    """Raises ConfigError or ValueError for a config that cannot be run."""

  def plan(self, stages: Sequence[str]) -> list[str]:
    """Those of `stages` that are not done yet; the report is always made anew.

    Raises ConfigError where one needs a stage that is missing.
    """
    left, there = [], {stage for stage in (*STAGES, "library") if self.done(stage) is not None}
    for stage in stages:
      if stage in there and stage != "report":
        continue
      needed = self.needed(stage)
      if needed and not there.intersection(needed):
        raise ConfigError(
          f"stage {stage} needs stage {needed[0]}, which is not done in {self.workdir}: run it first"
          f" (--stages={needed[0]},{stage}, or all stages without --stages)"
        )
      left.append(stage)
      there.add(stage)
    return left

  def needed(self, stage: str) -> tuple[str, ...]:
    """The stages of which one must be done before `stage`."""
    if stage == "train":
      start = self.config.train.start_from or ("sft" if methods.get(self.config.method).needs_sft else "base")
      return (start,)
    return {
      "collect": ("base",),
      "annotate": ("collect",),
      "sft": ("annotate",),
      "library": ("annotate",),
      "evaluate": ("train", "sft"),
    }.get(stage, ())

  def headline(self, config_path: str, stages: Sequence[str], left: Sequence[str]) -> str:
    """What this command is about to do, in one line."""
    devices = jax.devices()
    steps = ", ".join(stage if stage in left else f"{stage} (done)" for stage in stages)
    machine = f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}, jax {jax.__version__}"
    return f"{config_path} ({self.config.method}) in {self.workdir}; {machine}; stages: {steps}"

  def done(self, stage: str) -> dict | None:
    """What the stage wrote when it was done, or None."""
    return read_json(self.workdir / f"{stage}.json", None)

  def finish(self, stage: str, values: dict) -> dict:
    """Marks a stage as done: DIR/<stage>.json. Returns when all hosts have done it, so that they see its files."""
    write_json(self.workdir / f"{stage}.json", values)
    hosts.meet(f"the end of stage {stage}")
    return values

  def policy_path(self, name: str) -> epath.Path:
    """Folder of a policy (Hugging Face layout): base, sft or final. A pretrained base lies where config.model.path
    says.
    """
    if name == "base" and self.config.model.path:
      return epath.Path(resolve_model(self.config.model.path))
    return self.workdir / "policy" / name

  def resume_step(self, stage: str) -> int | None:
    """The checkpoint that --resume_from asks for; None means the newest. Only the first stage that asks gets it: it
    was under way, and those after it only begin.
    """
    step, self.resume_from = self.resume_from, None
    return step

  def _take_start(self, other: epath.Path) -> None:
    """Takes the starting stages of another run over: same seed, same model, same data, so only the method differs."""
    theirs = read_json(other / "config.json", None)
    if theirs is None or not (other / "sft.json").exists():
      raise ConfigError(f"config.start={other} is no work directory with a finished sft stage")
    ours = json.loads(self.config.to_json_best_effort())
    differences = _differences(*({k: c[k] for k in START_SECTIONS if k in c} for c in (ours, theirs)))
    if differences:
      raise ConfigError(f"config.start={other} started from another config ({'; '.join(differences[:4])})")
    for name in ("base", "sft"):
      source, place = other / "policy" / name, self.workdir / "policy" / name
      if source.exists() and not (place / WHOLE).exists():
        _copy(source, place)
    for stage in START_STAGES:
      found = read_json(other / f"{stage}.json", None)
      if found is not None and self.done(stage) is None:
        write_json(self.workdir / f"{stage}.json", found | {"start": str(other)})


@contextlib.contextmanager
def held(folder: epath.PathLike) -> Iterator[None]:
  """No other process can hold the folder, a work directory, as long as the context lasts. Of several hosts the first
  one holds it for all.

  The kernel keeps the lock (flock) and gives it back when the process ends, however it ends: none is ever left over.
  Object storage has no such lock, and a file system without one does as well. Raises ConfigError, which says who holds
  it.
  """
  if hosts.index() or "://" in str(folder):
    yield
    return
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, LOCK), "a+", encoding="utf-8") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      who = file.read(200).strip() or "another process"
      told = f"{folder} is in use by {who}; stop that one or wait for it, or choose another --workdir"
      raise ConfigError(told) from None
    except OSError:  # there are no locks here
      pass
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%F %T %Z')}\n")
    file.flush()
    yield


def resolve_model(path: str) -> str:
  """A model's path; `package:NAME/FILE` names a file that an installed Python package carries."""
  if not path.startswith("package:"):
    if "://" not in path and not epath.Path(path).exists():
      raise ConfigError(f"config.model.path={path} does not exist")
    return path
  import importlib.util

  package, _, file = path.removeprefix("package:").partition("/")
  spec = importlib.util.find_spec(package)
  if spec is None or not spec.submodule_search_locations:
    raise ConfigError(f"config.model.path={path}: the Python package {package} is not installed")
  found = epath.Path(next(iter(spec.submodule_search_locations))) / file
  if not found.exists():
    raise ConfigError(f"config.model.path={path}: {package} carries no {file}")
  return str(found)


def _copy(source: epath.Path, place: epath.Path) -> None:
  """Copies a policy's folder between anything that epath opens. WHOLE comes last: a copy without it was broken off, and
  is made again. (A folder that is renamed when it is complete is not to be had in an object store.)
  """
  place.mkdir(parents=True, exist_ok=True)
  for item in sorted(source.iterdir(), key=lambda item: (item.name == WHOLE, item.name)):
    if item.name == WHOLE:
      write_text(place / WHOLE, item.read_text())
    elif item.is_dir():
      _copy(item, place / item.name)
    else:
      item.copy(place / item.name, overwrite=True)


def _differences(ours, theirs, path="") -> list[str]:
  """The fields in which two configs differ, in words. A field that one of them lacks is what LATER says."""
  if not isinstance(ours, dict) or not isinstance(theirs, dict):
    return [] if ours == theirs else [f"{path}: {theirs} there, {ours} here"]
  found = []
  for key in sorted(ours.keys() | theirs.keys()):
    name = f"{path}.{key}" if path else key
    without = {} if isinstance(ours.get(key, theirs.get(key)), dict) else LATER.get(name)
    found += _differences(ours.get(key, without), theirs.get(key, without), name)
  return found
