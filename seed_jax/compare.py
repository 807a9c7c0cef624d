"""Stage `compare`: arms x seeds of one config, in pairs: all arms of a seed begin from one SFT checkpoint and play one
panel.

An arm is a method with overrides of the config. The arms run one after the other, on all hosts of the job, each in a
work directory of its own, DIR/compare/seed<N>/<arm>; the starting stages of a seed run once, in
DIR/compare/seed<N>/start.
Killed at any moment, the same command goes on: finished arms are skipped, the arm under way resumes.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import gc
import importlib
import re
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from seed_jax import compare_page, compare_results, hosts, methods
from seed_jax.curve import panel_tasks
from seed_jax.fields import at
from seed_jax.metrics import is_writer, progress, read_rows, say, write_text
from seed_jax.page import exact_duration
from seed_jax.run import START_SECTIONS, START_STAGES, ConfigError, Run, process_seed
from seed_jax.train_config import check_tasks

# what arms have in common: no override changes it
FIXED = (*START_SECTIONS, "method", "start", "compare", "evaluate", "train.panel", "train.split")
# what arms have in common unless an override or their method changes it: the results say which do
USUAL = (
  "train.iterations",
  "train.num_tasks",
  "train.tasks_per_iteration",
  "train.group_size",
  "train.max_generations",
)


@dataclasses.dataclass(frozen=True)
class Arm:
  """A method with changes of the config, "FIELD=VALUE" each."""

  name: str
  method: str
  overrides: tuple[str, ...] = ()

  @property
  def folder(self) -> str:
    """The name as a folder's."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.name).strip("-.") or "arm"


def run_compare(run: Run) -> dict:
  """Runs what is left of config.compare; writes compare.json, .md, .html and .svg after every arm."""
  arms, seeds = plan(run)
  jobs = [(seed, arm) for seed in seeds for arm in arms]
  results: dict = {}
  with progress(total=len(jobs), desc="compare", unit="arm", plain=run.plain) as bar:
    for number, (seed, arm) in enumerate(jobs, 1):
      own = arm_run(run, arm, seed)
      if own.done("train") is None:
        _finish(start_run(run, seed), START_STAGES)
      _finish(own, ("train",))  # a finished arm too: it must be of this config
      rows = read_rows(own.workdir / "curve.jsonl")
      say(
        f"compare: seed {seed}, {arm.name}: {rows[0]['success']:.1%} -> {rows[-1]['success']:.1%} in "
        f"{rows[-1]['episodes']:,} episodes, {exact_duration(rows[-1]['seconds'])} ({number} of {len(jobs)})"
      )
      bar.update(1)
      results = write_results(run, arms, seeds)
  if is_writer():
    print(compare_results.text_table(results["arms"], results["baseline"]))
    print(f"comparison: {run.workdir / 'compare.html'}", flush=True)
  return results


def write_results(run: Run, arms: Sequence[Arm], seeds: Sequence[int]) -> dict:
  """The summary of the arms that are finished, as compare.json, .md, .html and .svg; returns it."""
  curves = {}
  for arm in arms:
    runs = {seed: arm_run(run, arm, seed) for seed in seeds}
    curves[arm.name] = {s: read_rows(r.workdir / "curve.jsonl") for s, r in runs.items() if _is_finished(r)}
  base = baseline(run.config, arms)
  found = compare_results.summarize_arms(curves, base)
  for arm in arms:
    if arm.name in found:
      found[arm.name] = {"method": arm.method, "overrides": list(arm.overrides)} | found[arm.name]
  told = about(run, arms, seeds, sum(map(len, curves.values())))
  values = {"baseline": base, "panel": run.config.train.panel.to_dict(), "about": told, "arms": found}
  if is_writer():
    write_text(run.workdir / "compare.md", compare_results.markdown(found, base, told))
    compare_page.build(run.workdir, values)
  return run.finish("compare", values)


def about(run: Run, arms: Sequence[Arm], seeds: Sequence[int], finished: int) -> list[str]:
  """What was compared and how, in sentences that hold for these arms."""
  p, every, iterations = run.config.train.panel, panel_every(run.config), run.config.train.iterations
  configs = {arm.name: arm_run(run, arm, seeds[0]).config for arm in arms}
  from_base = _but_for(
    [n for n, config in configs.items() if config.train.start_from == "base"], "from the base policy"
  )
  others = {name: _unusual(config, run.config) for name, config in configs.items()}
  others = "; ".join(f"{name}: {', '.join(found)}" for name, found in others.items() if found)
  shown = [arm.name for arm in arms if methods.get(arm.method).in_evaluation]
  tests = (
    "Intervals: t over seeds; for differences the paired t-test by seed, and a bootstrap over seeds x tasks; Holm's "
    "p-values are corrected for the number of arms, within each measure."
    if len(seeds) > 1
    else "There are no intervals and no tests: one seed has no interval."
  )
  return [
    f"{len(arms)} arms with {len(seeds)} seeds ({', '.join(map(str, seeds))}), {finished} of {len(arms) * len(seeds)} "
    f"runs are finished. All arms of a seed begin from one SFT checkpoint{from_base}. "
    f"Iterations ({iterations}), tasks, steps of an episode, history and sampling as the config says"
    f"{f', but for {others}' if others else ''}.",
    f"Panel: {p.tasks} tasks of the split {p.split}, each played {p.samples} x at temperature {p.temperature}, no "
    f"skill in any prompt{_but_for(shown, 'text of the skill library')}, every {every} iterations. Figures are those "
    "of the last iteration; no step was chosen by the panel.",
    f"{tests} Time is that of training iterations, without compilation and without the panels.",
  ]


def _unusual(config, common) -> list[str]:
  """What an arm does otherwise than others: FIELD=VALUE of USUAL, and of the section rollout, which its panel has."""
  fields = [*sorted(f"rollout.{name}" for name in common.rollout), *USUAL]
  values = {field: [at(c, field) for c in (config, common)] for field in fields}
  return [f"{field}={ours}" for field, (ours, theirs) in values.items() if ours != theirs]


def _but_for(names: Sequence[str], what: str) -> str:
  return f", but for {', '.join(names)}: {what}" if names else ""


# ---------------------------------------------------------------- what is to be run


def plan(run: Run) -> tuple[list[Arm], list[int]]:
  """The arms and seeds of config.compare. Raises ConfigError, before anything is written, for what cannot be run."""
  seeds = list(run.config.compare.seeds)
  if not all(type(seed) is int for seed in seeds) or len(set(seeds)) != len(seeds) or not seeds:
    raise ConfigError(
      f"config.compare.seeds={tuple(seeds)}: name at least one seed, each once, all whole numbers; example: (0, 1, 2)"
    )
  if run.config.start:
    raise ConfigError("config.start must be empty: the stage compare makes the start of every seed itself")
  if methods.settings(run.config.method):
    raise ConfigError(
      f"the config is that of {run.config.method}, whose own settings the other arms would get too; begin from a "
      "method without any, such as seed, and name it in config.compare.methods"
    )
  if panel_every(run.config) < 1:
    raise ConfigError("config.compare.every=0 and config.train.panel.every=0: a comparison needs a learning curve")
  arms = read_arms(run.config)
  baseline(run.config, arms)
  for seed in seeds:
    played = set()  # the same tasks are looked at once: some benchmarks read them from files
    for arm in arms:
      own = arm_run(run, arm, seed)
      own.benchmark = run.benchmark  # that of all arms
      t = own.config.train
      try:
        if seed == seeds[0]:  # no seed changes what may be trained
          own.check()
        if (t.split, t.num_tasks, t.tasks_per_iteration) not in played:
          tasks = own.benchmark.tasks(t.split, t.num_tasks, process_seed(seed, "train tasks"))
          check_tasks(own.config, tasks)
          panel_tasks(own, tasks)
      except (ValueError, TypeError) as error:
        raise ConfigError(f"arm {arm.name!r}: {error}") from error
      played.add((t.split, t.num_tasks, t.tasks_per_iteration))
      if not hosts.index():  # the folders of arms are process 0's
        try:
          own.configs()
        except ConfigError as error:
          raise ConfigError(f"arm {arm.name!r}: {error}, or give the arm another name") from error
  return arms, seeds


def read_arms(config) -> list[Arm]:
  """config.compare as arms: methods x values of `vary`, then those of `arms`."""
  c = config.compare
  field, values = _swept(c.vary)
  changes = [("", ())] if not field else [(f" {field.rpartition('.')[2]}={v}", (f"{field}={v}",)) for v in values]
  arms = [Arm(f"{method}{name}", method, override) for method in c.methods for name, override in changes]
  for entry in c.arms:
    try:
      name, method, overrides = entry
      arms.append(Arm(str(name), str(method), tuple([overrides] if isinstance(overrides, str) else overrides)))
    except (TypeError, ValueError) as error:
      raise ConfigError(f'config.compare.arms: {entry!r} is not (name, method, ("FIELD=VALUE", ...))') from error
  if not arms:
    raise ConfigError(f"config.compare names no arm; methods: {', '.join(methods.names())}")
  for arm in arms:
    try:
      methods.get(arm.method)
      _override(_copy(config), arm)
    except ValueError as error:
      raise ConfigError(f"arm {arm.name!r}: {error}") from error
  folders = [arm.folder.lower() for arm in arms]  # some file systems know no case
  twice = sorted({arm.name for arm in arms if folders.count(arm.folder.lower()) > 1 or arm.folder == "start"})
  if twice:
    raise ConfigError(f"config.compare: the arms {', '.join(twice)} need folders of their own: give them other names")
  return arms


def baseline(config, arms: Sequence[Arm]) -> str:
  """The name of the arm that the others are compared with."""
  names = [arm.name for arm in arms]
  asked = config.compare.baseline
  if asked and asked not in names:
    raise ConfigError(f"config.compare.baseline={asked!r} is no arm; there are {', '.join(names)}")
  return asked or ("grpo" if "grpo" in names else names[0])


def panel_every(config) -> int:
  """Iterations between two points of a curve: train.panel's own where it has some, else compare's."""
  return config.train.panel.every or config.compare.every


def start_run(run: Run, seed: int) -> Run:
  """The run that makes the SFT checkpoint of a seed."""
  config = _copy(run.config)
  config.seed = seed
  del config.compare
  return Run(config, run.workdir / "compare" / f"seed{seed}" / "start", plain=run.plain, notice=run.notice)


def arm_run(run: Run, arm: Arm, seed: int) -> Run:
  """The run of an arm with a seed. Its config has no section `compare`: more arms and seeds may be asked for later."""
  config = _copy(run.config)
  config.seed, config.method = seed, arm.method
  folder = run.workdir / "compare" / f"seed{seed}"
  config.start = str(folder / "start")
  config.train.panel.every = panel_every(config)
  config.update_from_flattened_dict(methods.settings(arm.method))
  _override(config, arm)
  del config.compare
  return ArmRun(config, folder / arm.folder, plain=run.plain, notice=run.notice)


class ArmRun(Run):
  """A run whose start lies beside it, wherever the comparison is moved to."""

  def free(self) -> dict:
    return super().free() | {"start": None}


def _is_finished(own: Run) -> bool:
  """Whether this very run is finished: its folder may hold one of another config."""
  if own.done("train") is None:
    return False
  try:
    own.configs()
  except ConfigError:
    return False
  return True


def _finish(own: Run, stages: Sequence[str]) -> None:
  """Runs the stages that are left, and lets go of what they compiled."""
  hosts.first_then_others(f"the work directory {own.workdir}", own.open)
  for stage in own.plan(stages):
    own.notice.meet()  # no host has begun the stage before all have seen that it is left
    getattr(importlib.import_module(f"seed_jax.{stage}"), f"run_{stage}")(own)
    gc.collect()
    jax.clear_caches()  # the next arm has programs of its own; those that it shares lie in the cache on disk


def _swept(text: str) -> tuple[str, list[Any]]:
  """ "a.b=1,2" -> ("a.b", [1, 2])."""
  if not text:
    return "", []
  field, equals, given = text.partition("=")
  if not equals or not given:
    raise ConfigError(f"config.compare.vary={text!r} is not FIELD=VALUE,VALUE,...")
  values = _value(given)
  if isinstance(values, str):
    values = [part.strip() for part in values.split(",")]
  return field.strip(), list(values) if isinstance(values, (tuple, list)) else [values]


def _value(text: str) -> Any:
  """A Python literal, else the text itself."""
  try:
    return ast.literal_eval(text.strip())
  except (ValueError, SyntaxError):
    return text.strip()


def _override(config: ConfigDict, arm: Arm) -> None:
  """Applies the overrides of an arm. Raises ConfigError for a field that is not there, that all arms share, or that
  holds values of another type.
  """
  for text in arm.overrides:
    field, equals, given = (part.strip() for part in str(text).partition("="))
    *sections, last = field.split(".")
    place = config
    for section in sections:
      place = place[section] if hasattr(place, "keys") and section in place else None
    if not equals or not hasattr(place, "keys") or last not in place:
      raise ConfigError(f"override {text!r}: the config has no field {field!r}")
    if any(f"{field}.".startswith(f"{fixed}.") for fixed in FIXED):
      raise ConfigError(f"override {text!r}: all arms of a seed share {field}; change it for all of them")
    if hasattr(place[last], "keys"):
      raise ConfigError(f"override {text!r}: this is a section; its fields are {', '.join(place[last])}")
    try:
      place[last] = _value(given)
    except TypeError as error:
      raise ConfigError(f"override {text!r}: the field holds {place[last]!r} in the config") from error


def _copy(frozen) -> ConfigDict:
  return copy.deepcopy(ConfigDict(frozen)).unlock()
