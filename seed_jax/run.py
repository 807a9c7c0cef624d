"""What the stages share: the work directory, the mesh, the benchmark, the tokenizer, the policies, engines and pools of
one run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Sequence

import jax
from etils import epath
from ml_collections import ConfigDict, FrozenConfigDict

import envs
from envs.pool import Pool
from envs.protocol import Task
from seed_jax import decode, library, methods, sharding, skills, text
from seed_jax.batching import RowShape
from seed_jax.engine import Engine
from seed_jax.metrics import read_json, write_json
from seed_jax.models import hf
from seed_jax.models.config import ModelConfig
from seed_jax.optimizer import OptimizerConfig, make_optimizer
from seed_jax.rollout import Episode, Prompter, Reading, Setting, analyze_episodes, play, task_number
from seed_jax.trajectory import MODES, Trajectory

STAGES = ("base", "collect", "annotate", "sft", "train", "evaluate", "report")
ASKS = ("message", "turn")  # how the policy is asked for the analysis of an episode
EXTRA_STAGES = ("library", "compare")  # run where they are asked for
START_STAGES = ("base", "collect", "annotate", "sft")  # what a run may take over from another one with config.start
START_SECTIONS = ("seed", "benchmark", "model", "analysis", *START_STAGES)  # what such runs have in common


class ConfigError(ValueError):
  """A config that cannot be run; the message says what to change."""


class Run:
  """One config in one work directory."""

  def __init__(
    self, config: ConfigDict, workdir: epath.PathLike, *, plain: bool | None = None, resume_from: int | None = None
  ):
    self.config = FrozenConfigDict(config)
    self.workdir = epath.Path(workdir)
    self.plain, self.resume_from = plain, resume_from
    self.mesh = sharding.make_mesh(**self.config.mesh)

  # -- the work directory --

  def open(self) -> None:
    """Checks the config, then creates the work directory or checks that it belongs to this config.

    Raises ConfigError: for a field that cannot be run, or with the fields that differ from those of the work directory.
    """
    self.check()
    ours = json.loads(self.config.to_json_best_effort())
    path = self.workdir / "config.json"
    theirs = read_json(path) if path.exists() else {}
    # what is compared may grow; the arms have configs of their own
    differences = _differences(ours | {"compare": None}, theirs | {"compare": None}) if theirs else []
    if differences and {item.name for item in self.workdir.iterdir()} - {"config.json"}:
      shown = "; ".join(differences[:4]) + ("; ..." if len(differences) > 4 else "")
      raise ConfigError(f"{self.workdir} belongs to another config ({shown}); choose another --workdir")
    if ours != theirs:  # where nothing was done yet, a corrected command may follow a wrong one
      self.workdir.mkdir(parents=True, exist_ok=True)
      write_json(path, ours)
    if self.config.start and self.done(START_STAGES[-1]) is None:
      self._take_start(epath.Path(self.config.start))

  def check(self) -> None:
    """Raises ConfigError or ValueError, before anything is written, for what would fail only stages later."""
    c = self.config
    methods.get(c.method)
    if c.model.path:
      resolve_model(c.model.path)
    if c.rollout.mode not in MODES:
      raise ConfigError(f"config.rollout.mode={c.rollout.mode!r} is unknown; choose one of {', '.join(MODES)}")
    if c.analysis.ask not in ASKS:
      raise ConfigError(f"config.analysis.ask={c.analysis.ask!r} is unknown; choose one of {', '.join(ASKS)}")
    if c.analysis.ask == "turn" and c.rollout.mode != "transcript":
      raise ConfigError(
        "config.analysis.ask='turn' goes on from a conversation, which config.rollout.mode="
        f"{c.rollout.mode!r} does not keep; choose message, or transcript mode"
      )
    if c.annotate.analyzer == "external" and "external" not in c.annotate:
      raise ConfigError("config.annotate.analyzer='external' needs config.annotate.external (base_url, model, ...)")
    for name in ("base", "sft", "train"):
      if name in c and "optimizer" in c[name]:
        make_optimizer(optimizer_config(c[name].optimizer), total_updates=1)

  def plan(self, stages: Sequence[str]) -> list[str]:
    """Those of `stages` that are not done yet; the report is always made anew.

    Raises ConfigError where one needs a stage that is missing.
    """
    left, there = [], {stage for stage in STAGES if self.done(stage) is not None}
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
    """Marks a stage as done: DIR/<stage>.json."""
    write_json(self.workdir / f"{stage}.json", values)
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

  # -- models --

  @functools.cached_property
  def benchmark(self):
    return envs.benchmark(self.config.benchmark.name, **self.config.benchmark.options.to_dict())

  @functools.cached_property
  def tokenizer(self) -> text.Tokenizer:
    return text.load_tokenizer(str(self.policy_path("base")), **self.config.model.tokenizer_options.to_dict())

  def load_policy(self, name: str) -> tuple[ModelConfig, dict]:
    """A policy's shape and its parameters on the mesh."""
    config, params = hf.load(str(self.policy_path(name)))
    return self.runtime(config), sharding.put_params(params, self.mesh)

  def runtime(self, config: ModelConfig) -> ModelConfig:
    """A model's shape with this run's compute settings."""
    return dataclasses.replace(
      config,
      dtype=self.config.model.dtype,
      scan_layers=self.config.model.scan_layers,
      remat=self.config.model.remat,
      num_valid_tokens=min(self.tokenizer.vocab_size, config.vocab_size),
    )

  def save_policy(self, name: str, config: ModelConfig, params) -> None:
    """Writes a policy's folder, whole or not at all; what killed processes left beside it goes."""
    if jax.process_index() == 0 and "://" not in str(self.workdir) and (self.workdir / "policy").exists():
      for item in (self.workdir / "policy").iterdir():
        if item.name.startswith((f".{name}.new-", f".{name}.old-")):
          item.rmtree()
    hf.save(str(self.policy_path(name)), config, params, tokenizer=self.tokenizer)

  # -- playing and analysing --

  def setting(self) -> Setting:
    r = self.config.rollout
    block = getattr(self.benchmark, "skill_block", None)
    lines = methods.get(self.config.method).skill_source == "library" and self.config.library.render != "compact"
    return Setting(
      mode=r.mode,
      history=r.history,
      max_steps=r.max_steps,
      max_prompt=r.max_prompt,
      skill_block=block,
      prepare=library.tidy if lines else None,  # a skill is one line, a library's text may have many
    )

  @functools.cached_property
  def prompter(self) -> Prompter:
    return Prompter(self.benchmark, self.tokenizer, self.setting())

  def pool(self, num_episodes: int) -> Pool:
    """Environments for so many episodes: at most config.rollout.environments at a time (0: as many as slots)."""
    r = self.config.rollout
    count = min(r.environments or r.slots, num_episodes)
    return Pool(
      self.benchmark, count, min(r.workers, count), step_timeout=r.step_timeout, reset_timeout=r.reset_timeout
    )

  def engine(self, model: ModelConfig, *, temperature: float, seed: int) -> Engine:
    """An engine that acts, with at most config.rollout.max_response tokens a turn, and writes analyses."""
    r, a = self.config.rollout, self.config.analysis
    return Engine(
      model,
      self.mesh,
      num_slots=r.slots,
      capacity=max(r.capacity, a.max_prompt + a.max_response),
      max_new=r.max_response,
      sampling=decode.Sampling(temperature, r.top_k, r.top_p),
      stop_ids=self.tokenizer.stop_ids,
      seed=seed,
      find_stop=self._stop_finder(tuple(r.stop_strings)),
      prefill_buckets=tuple(r.prefill_buckets),
      prefill_tokens=r.prefill_tokens,
      smallest=r.smallest_bucket,
      refill=r.refill,
      share_prefix=r.share_prefix,
      capacity_buckets=tuple(r.capacity_buckets),
    )

  def play(self, engine: Engine, pool: Pool, episodes: Sequence[Episode], **options) -> list[Trajectory]:
    """`rollout.play` as the config says."""
    return play(engine, pool, self.prompter, episodes, answer_after=self.config.rollout.answer_after, **options)

  def reading(self) -> Reading:
    """How the policy analyses its episodes: greedily, as the config says."""
    return Reading(self.analysis_prompt, self.config.analysis.max_response)

  def analysis_prompt(self, trajectory: Trajectory) -> list[int]:
    """Token ids of the request for a skill.

    config.analysis.ask: "message" is one user message with the whole episode in it, at most config.analysis.max_prompt
    tokens (paper). "turn" goes on from the conversation of the episode itself, whose tokens are in the engine's cache:
    nothing but the question is read (transcript mode only).
    """
    a = self.config.analysis
    if a.ask == "turn":
      ids = [int(i) for t in trajectory.turns for part in (t.prompt_ids, t.response_ids) for i in part]
      ended = ids[-1] in self.tokenizer.stop_ids
      return ids + self.tokenizer.following(self._analysis_question(trajectory), ended=ended)
    if hasattr(self.benchmark, "analysis_prompt"):
      message = self.benchmark.analysis_prompt(trajectory.task, trajectory.action_steps, trajectory.won)
    else:
      fits = lambda m: len(self.tokenizer.first(m)) <= a.max_prompt  # noqa: E731
      message = skills.analysis_prompt(trajectory, a.template, fits=fits)
    return self.tokenizer.first(message)

  def _analysis_question(self, trajectory):
    if hasattr(self.benchmark, "analysis_question"):
      return self.benchmark.analysis_question(trajectory.won)
    return skills.analysis_question(trajectory, self.config.analysis.template)

  def analyze(self, engine: Engine, trajectories: Sequence[Trajectory], *, iteration: int) -> dict[str, float]:
    """The policy reads finished episodes: fills analysis, summary and skill. Returns parse statistics.

    An episode that broke off, or whose request is too long, gets no analysis; one whose answer does not parse gets no
    skill.
    """
    readable = _readable(trajectories)
    analyze_episodes(engine, self.tokenizer, readable, self.reading(), iteration=iteration)
    return self.parse(readable)

  def parse(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Summary and skill of every episode from its analysis. Returns parse statistics."""
    readable = _readable(trajectories)
    parsed = skills.attach_analyses(readable, [t.analysis for t in readable])
    return {"analyzed": len(readable), "parsed": parsed, "parse_rate": parsed / max(len(readable), 1)}

  def panel(self) -> list[Task]:
    """The fixed list of evaluation tasks, sorted by id, written into the work directory."""
    e = self.config.evaluate
    path = self.workdir / "panel.json"
    tasks = sorted(self.benchmark.tasks(e.split, e.tasks, e.seed), key=lambda t: t.id)
    ids = [t.id for t in tasks]
    written = read_json(path, None)
    if written is None:
      write_json(path, {"split": e.split, "seed": e.seed, "tasks": ids})
    elif written["tasks"] != ids:
      raise ConfigError(
        f"the evaluation panel of {self.workdir} was {len(written['tasks'])} tasks that are no longer the benchmark's; "
        "use another --workdir"
      )
    return tasks

  def row_shapes(self, section) -> tuple[RowShape, ...]:
    """Row shapes of a config section: micro-batches of about `micro_tokens` tokens; with `skill_room` (a fraction) the
    skill rows are so much longer than the ordinary ones, which the room for skills would leave unfilled.
    """
    rows = sharding.num_row_shards(self.mesh)
    shapes = []
    for length in section.row_lengths:
      count = max(section.micro_tokens // length // rows, 1) * rows
      responses = max(int(length * section.response_fraction), 1)
      shapes.append(RowShape(length, responses, count, int(length * (1 + section.get("skill_room", 0.0)))))
    return tuple(shapes)

  # -- helpers --

  def _stop_finder(self, strings: tuple[str, ...]):
    return functools.partial(text.find_stop, self.tokenizer, stop_strings=strings) if strings else None

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
        self.finish(stage, found | {"start": str(other)})


def _readable(trajectories):
  return [t for t in trajectories if t.turns and not t.error]


def optimizer_config(section) -> OptimizerConfig:
  """The optimizer of a config section (fields of OptimizerConfig)."""
  return OptimizerConfig(**section.to_dict())


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


def process_seed(seed: int, purpose: str) -> int:
  """A 31-bit seed for one purpose of a run."""
  return task_number(f"{seed}/{purpose}")


def _differences(ours, theirs, path="") -> list[str]:
  if isinstance(ours, dict) and isinstance(theirs, dict):
    return [
      d
      for key in sorted(ours.keys() | theirs.keys())
      for d in _differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    ]
  return [] if ours == theirs else [f"{path}: {theirs} there, {ours} here"]


def set_up_jax(cache_dir: epath.PathLike | None) -> None:
  """The persistent compilation cache: a second run of the same shapes compiles nothing."""
  if cache_dir:
    jax.config.update("jax_compilation_cache_dir", str(cache_dir))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
