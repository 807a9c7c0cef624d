"""What the stages share: the work directory, the mesh, the benchmark, the tokenizer, the policies, engines and pools of
one run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
from etils import epath
from ml_collections import ConfigDict

import envs
from envs.pool import Pool
from envs.protocol import Task
from seed_jax import actors, decode, hosts, library, methods, sharding, skills, text
from seed_jax.batching import RowShape
from seed_jax.engine import Engine
from seed_jax.metrics import read_json, write_json
from seed_jax.models import hf, presets
from seed_jax.models.config import ModelConfig
from seed_jax.optimizer import OptimizerConfig, make_optimizer
from seed_jax.rollout import (
  Episode,
  Finished,
  Prompter,
  Reading,
  Setting,
  analyze_episodes,
  of_all_hosts,
  play,
  task_number,
)
from seed_jax.train_config import check_train
from seed_jax.trajectory import MODES, Trajectory
from seed_jax.workdir import (  # noqa: F401  (re-exported)
  EXTRA_STAGES,
  STAGES,
  START_SECTIONS,
  START_STAGES,
  ConfigError,
  Workdir,
  held,
  resolve_model,
)

RETRIEVALS = ("family", "keyword", "embedding")  # how a library finds what it says about a task
ASKS = ("message", "turn")  # how the policy is asked for the analysis of an episode


class Run(Workdir):
  """A work directory with all that its stages work with."""

  def __init__(self, config: ConfigDict, workdir: epath.PathLike, **options):
    super().__init__(config, workdir, **options)
    self.mesh = sharding.make_mesh(**self.config.mesh)
    self.actor_mesh = actors.actor_mesh(self.mesh, self.config.get("actor_mesh"))
    actors.connect(self.mesh)

  def check(self) -> None:
    """Raises ConfigError or ValueError, before anything is written, for what would fail only stages later."""
    c = self.config
    methods.get(c.method)
    if c.model.path:
      resolve_model(c.model.path)
    if c.model.get("preset"):
      presets.get(c.model.preset)
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
    if c.library.retrieval not in RETRIEVALS:
      raise ConfigError(
        f"config.library.retrieval={c.library.retrieval!r} is unknown; choose one of {', '.join(RETRIEVALS)}"
      )
    library.rendering(c.library.render)
    if c.library.path:
      library.load(c.library.path)
    if hosts.several() and c.train.async_level:
      raise ConfigError(
        f"config.train.async_level={c.train.async_level} works on one host only: the update would run between the "
        f"rollouts of {hosts.count()} hosts, which go their own pace; use async_level=0"
      )
    check_train(c)
    self._check_checkpoint(c.checkpoint, c.train.panel)
    for number in c.profile.iterations:
      if type(number) is not int or number < 0:
        raise ConfigError(
          f"config.profile.iterations={tuple(c.profile.iterations)}: {number!r} is no iteration; they count from 0"
        )
    for name in ("base", "sft", "train"):
      if name in c and "optimizer" in c[name]:
        make_optimizer(optimizer_config(c[name].optimizer), total_updates=1)

  @staticmethod
  def _check_checkpoint(c, panel) -> None:
    if c.keep_best and not c.best_metric:
      raise ConfigError(f"config.checkpoint.keep_best={c.keep_best} needs config.checkpoint.best_metric, as in success")
    split, slash, _ = c.best_metric.rpartition("/")
    if slash and split != "seconds" and (split != panel.split or not panel.every or c.every % panel.every):
      raise ConfigError(
        f"config.checkpoint.best_metric={c.best_metric} needs the panel of that split at every checkpoint; "
        f"config.train.panel has split={panel.split!r}, every={panel.every}, and config.checkpoint.every={c.every}"
      )

  # -- models --

  @functools.cached_property
  def benchmark(self):
    return envs.benchmark(self.config.benchmark.name, **self.config.benchmark.options.to_dict())

  @functools.cached_property
  def tokenizer(self) -> text.Tokenizer:
    return text.load_tokenizer(str(self.policy_path("base")), **self.config.model.tokenizer_options.to_dict())

  def load_policy(self, name: str) -> tuple[ModelConfig, dict]:
    """A policy's shape and its parameters on the mesh; a host reads no more than its share into memory."""
    path = str(self.policy_path(name))
    if self.config.model.get("preset"):
      presets.check(self.config.model.preset, hf.read_config(path))
    config, params = hf.load_sharded(path, self.mesh)
    return self.runtime(config), params

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
    if hosts.index() == 0 and "://" not in str(self.workdir) and (self.workdir / "policy").exists():
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
    """Environments for this host's share of so many episodes: at most config.rollout.environments at a time (0: as many
    as slots).
    """
    r = self.config.rollout
    count = hosts.largest_share(min(r.environments or r.slots, num_episodes))
    return Pool(
      self.benchmark, count, min(r.workers, count), step_timeout=r.step_timeout, reset_timeout=r.reset_timeout
    )

  def engine(self, model: ModelConfig, *, temperature: float, seed: int) -> Engine:
    """An engine of this host that acts, with at most config.rollout.max_response tokens a turn, and writes analyses.
    Its `set_params` takes the learner's parameters; all hosts call that at the same time.
    """
    r, a = self.config.rollout, self.config.analysis
    return Engine(
      model,
      self.actor_mesh,
      num_slots=hosts.largest_share(r.slots),
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
      place=actors.to_actor(self.mesh, self.actor_mesh, model.dtype),
    )

  def play(self, engine: Engine, pool: Pool, episodes: Sequence[Episode], **options) -> list[Trajectory]:
    """`rollout.play` as the config says. Of several hosts each plays its share, and every one gets all episodes. Raises
    Preempted, on all hosts, where the run was asked to stop.

    finished: of all `episodes`, also of those that are another host's share.
    """
    options = dict(answer_after=self.config.rollout.answer_after, between=self.notice.check) | options
    mine = hosts.share(range(len(episodes)))
    with options.pop("finished", Finished()).part(mine) as finished, self.notice.apart():
      played = play(engine, pool, self.prompter, hosts.share(episodes), finished=finished, **options)
    return of_all_hosts(played)

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
    mine = hosts.share(readable)
    with self.notice.apart():
      analyze_episodes(engine, self.tokenizer, mine, self.reading(), iteration=iteration, between=self.notice.check)
    analyses = [each for part in hosts.gather("analyses", [t.analysis for t in mine]) for each in part]
    for trajectory, analysis in zip(readable, analyses, strict=True):
      trajectory.analysis = analysis
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
    """Row shapes of a config section on this run's mesh."""
    return row_shapes(section, sharding.num_row_shards(self.mesh))

  # -- helpers --

  def _stop_finder(self, strings: tuple[str, ...]):
    return functools.partial(text.find_stop, self.tokenizer, stop_strings=strings) if strings else None


def row_shapes(section, rows: int) -> tuple[RowShape, ...]:
  """Row shapes of a config section over so many row shards: micro-batches of about `micro_tokens` tokens; with
  `skill_room` (a fraction) the skill rows are so much longer than the ordinary ones, which the room for skills would
  leave unfilled.
  """
  shapes = []
  for length in section.row_lengths:
    count = max(section.micro_tokens // length // rows, 1) * rows
    responses = max(int(length * section.response_fraction), 1)
    shapes.append(RowShape(length, responses, count, int(length * (1 + section.get("skill_room", 0.0)))))
  return tuple(shapes)


def _readable(trajectories):
  return [t for t in trajectories if t.turns and not t.error]


def preset_model(config: ConfigDict) -> ModelConfig:
  """The policy's shape with the run's compute settings where no weights are needed: that of config.model.preset.

  Raises ConfigError where the config names none.
  """
  m = config.model
  if not m.get("preset"):
    raise ConfigError(f"config.model.preset is empty: the policy's sizes; choose {', '.join(presets.PRESETS)}")
  return dataclasses.replace(presets.get(m.preset), dtype=m.dtype, scan_layers=m.scan_layers, remat=m.remat)


def optimizer_config(section) -> OptimizerConfig:
  """The optimizer of a config section (fields of OptimizerConfig)."""
  return OptimizerConfig(**section.to_dict())


def process_seed(seed: int, purpose: str) -> int:
  """A 31-bit seed for one purpose of a run."""
  return task_number(f"{seed}/{purpose}")


def set_up_jax(cache_dir: epath.PathLike | None) -> None:
  """The persistent compilation cache: a second run of the same shapes compiles nothing."""
  if cache_dir:
    jax.config.update("jax_compilation_cache_dir", str(cache_dir))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
