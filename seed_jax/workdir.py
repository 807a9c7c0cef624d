"""A work directory: which config it belongs to, which stages are done in it, and what they left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence

import jax
from etils import epath
from ml_collections import ConfigDict, FrozenConfigDict

from seed_jax import hosts, methods
from seed_jax.metrics import read_json, write_json
from seed_jax.preemption import Notice

STAGES = ("base", "collect", "annotate", "sft", "train", "evaluate", "report")
EXTRA_STAGES = ("library", "compare", "preflight")  # run where they are asked for
START_STAGES = ("base", "collect", "annotate", "sft")  # what a run may take over from another one with config.start
START_SECTIONS = ("seed", "benchmark", "model", "analysis", *START_STAGES)  # what such runs have in common

# what may change from command to command: the arms of a comparison have configs of their own, a profile changes
# nothing, and a preflight only predicts
FREE = {"compare": None, "profile": None, "preflight": None}


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
    differences = _differences(ours | FREE, theirs | FREE) if theirs else []
    if differences and (
      hosts.index() or {item.name for item in self.workdir.iterdir()} - {"config.json", "preflight.json"}
    ):
      shown = "; ".join(differences[:4]) + ("; ..." if len(differences) > 4 else "")
      raise ConfigError(f"{self.workdir} belongs to another config ({shown}); choose another --workdir")
    return ours, theirs

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
    differences = _differences({k: ours.get(k) for k in START_SECTIONS}, {k: theirs.get(k) for k in START_SECTIONS})
    if differences:
      raise ConfigError(f"config.start={other} started from another config ({'; '.join(differences[:4])})")
    for name in ("base", "sft"):
      source, place = other / "policy" / name, self.workdir / "policy" / name
      if source.exists() and not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.parent / f".{name}.partial"
        if partial.exists():
          partial.rmtree()
        shutil.copytree(source, partial)
        partial.rename(place)
    for stage in START_STAGES:
      found = read_json(other / f"{stage}.json", None)
      if found is not None and self.done(stage) is None:
        write_json(self.workdir / f"{stage}.json", found | {"start": str(other)})


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


def _differences(ours, theirs, path="") -> list[str]:
  if isinstance(ours, dict) and isinstance(theirs, dict):
    return [
      d
      for key in sorted(ours.keys() | theirs.keys())
      for d in _differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    ]
  return [] if ours == theirs else [f"{path}: {theirs} there, {ours} here"]
