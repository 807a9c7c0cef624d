"""The skill side of a training run: who writes the skills, whose text stands in the skill context of an episode, what
is kept of them. `methods.SKILL_SOURCES` says what there is; here a run's policies, files and benchmark come in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from etils import epath

from seed_jax import hosts, library, retrieval, skill_log, skill_quality, skill_sources
from seed_jax.annotate import analyses, make_analyzer
from seed_jax.engine import Engine
from seed_jax.library_stage import FILE as LIBRARY
from seed_jax.library_stage import run_library
from seed_jax.methods import Method
from seed_jax.metrics import is_writer, say
from seed_jax.run import Run, process_seed
from seed_jax.trajectory import Trajectory

SKILLS = "skills"  # folder of a work directory: the skills of every iteration
COUNTS = ("tokens_sampled", "tokens_prefilled", "tokens_reused", "decode_steps")  # of an engine, sums
OTHER_WRITERS = ("frozen_analyzer", "external")  # differ in who writes the skill of an episode, not in whose it gets


def library_text(run: Run) -> Callable[[str, str], str]:
  """text(task, family): what the run's skill library says about a task, within config.library.max_tokens."""
  c = run.config.library
  found = library.load(_library_path(run))
  options = dict(top_k=c.top_k, render=c.render, max_mistakes=c.max_mistakes)

  @functools.cache  # once a family
  def unmet(family):
    by = f"config.library.rules={c.rules!r} give" if c.retrieval == "keyword" else "the benchmark gives"
    say(
      f"warning: the skill library has no skill of the family {family!r} that {by} a task; it has "
      f"{', '.join(found.families)}. Such tasks get what it says of all families alone"
    )

  if c.retrieval == "family":
    retrieve = retrieval.by_family(found, unmet=unmet, **options)
  elif c.retrieval == "keyword":
    retrieve = retrieval.by_keyword(found, c.rules, unmet=unmet, **options)
  else:
    embed = retrieval.sentence_embedder(c.embedder) if c.embedder else retrieval.word_embedder()
    retrieve = retrieval.by_embedding(found, embed, **options)
  fits = lambda text: len(run.tokenizer.encode(text)) <= c.max_tokens  # noqa: E731
  return functools.cache(lambda task, family: retrieve(task, family, fits=fits))


def shown(run: Run, wanted: bool) -> str | Callable[[Trajectory], str]:
  """`rollout.Episode.skill` of episodes whose prompts hold library text where that is wanted, and none otherwise."""
  if not wanted:
    return ""
  text = library_text(run)
  return lambda trajectory: text(trajectory.task, trajectory.family)


class SkillBranch:
  """What a method's skill context needs in the loop of stage `train`.

  reading: how the policy reads its episodes while others are still played; None where it writes no skills.
  """

  def __init__(self, run: Run, method: Method, start_params, *, resume: int = 0):
    """`start_params` are those of the policy that training began from; `resume` is the iteration that comes next."""
    self.run, self.method = run, method
    self._start_params = start_params if method.skill_source == "frozen_analyzer" else None
    own = method.needs_analysis and method.skill_source not in OTHER_WRITERS
    self.reading = run.reading() if own else None
    self.shown = shown(run, method.in_rollouts)
    self._analyzer = make_analyzer(run) if method.skill_source == "external" else None
    self._keep = run.config.train.keep_skills if method.needs_analysis else 0
    self._seen, self._known = skill_quality.Seen(), []
    if method.needs_skills:
      name = "own" if method.skill_source in OTHER_WRITERS else method.skill_source
      self._source = skill_sources.get(name)
      self._words = skill_sources.vocabulary(run.tokenizer) if name == "random_text" else ()
      text = library_text(run) if name == "library" else None
      self._retrieve = None if text is None else lambda task, family, *, fits=None: text(task, family)
    if self._keep and is_writer():  # what was seen is a metric, and process 0 writes those
      skill_log.drop_after(run.workdir / SKILLS, resume)
      self._seen.add(row["skill"] for row in skill_log.read(run.workdir / SKILLS))
      path = _library_file(run)
      self._known = library.load(path).texts if path.exists() else []

  @property
  def keeps(self) -> bool:
    """Whether `keep` is to be called."""
    return bool(self._keep)

  def write(self, trajectories: Sequence[Trajectory], engine: Engine, iteration: int) -> dict[str, float]:
    """Skills of an iteration's episodes, by whoever writes them; metrics of parsing, and of a frozen analyzer what it
    asked of the engine (COUNTS), to be added to what the episodes did. The engine keeps the parameters of a frozen
    analyzer: whoever plays next sets its own.
    """
    if not self.method.needs_analysis:
      return {}
    if self._start_params is not None:
      engine.set_params(self._start_params)
      found = self.run.analyze(engine, trajectories, iteration=iteration)
      stats = hosts.totals("the counters of the analyzer", dataclasses.asdict(engine.take_stats()))
      return found | {name: stats[name] for name in COUNTS}
    if self._analyzer is not None:
      readable = [t for t in trajectories if t.turns and not t.error]
      texts = analyses(self.run, self._analyzer, readable)
      for t, text in zip(readable, texts, strict=True):
        t.analysis = text or ""
    return self.run.parse(trajectories)

  def prompts(self, trajectories: Sequence[Trajectory], iteration: int) -> tuple[Callable, dict[str, float]]:
    """`batching.episode_samples`' function of (trajectory, turn), and metrics of the texts that it inserts."""
    if not self.method.needs_skills:
      return lambda *_: None, {}
    context = skill_sources.Context(
      seed=process_seed(self.run.config.seed, "skill sources"),
      iteration=iteration,
      retrieve=self._retrieve,
      words=self._words,
      tokens=lambda text: len(self.run.tokenizer.encode(text)),
    )
    texts = self._source(trajectories, context)
    log = {"skill_same_as_own": skill_quality.agreement(texts, [t.skill for t in trajectories])}
    return skill_sources.skill_tokens(self.run.prompter, trajectories, texts), log

  def keep(self, trajectories: Sequence[Trajectory], tokens: Mapping[str, np.ndarray], iteration: int) -> dict:
    """Writes the skills of an iteration with what each is worth, and returns their measures.

    tokens: `logprobs`, `skill_logprobs`, `mask` (1 where a token has a skill context) and `episode` (index into
    `trajectories`), all [rows, R].
    """
    gains = skill_quality.gain_by_episode(**tokens, num_episodes=len(trajectories))
    won = np.asarray([t.won for t in trajectories], bool)
    pair = {name: tokens[name] for name in ("logprobs", "skill_logprobs", "mask")}
    worth = skill_quality.log_prob_gain(**pair, won=won[np.clip(tokens["episode"], 0, None)])
    options = dict(tokens=lambda text: len(self.run.tokenizer.encode(text)), references=self._known)
    log = skill_quality.measure(trajectories, self._seen, **options)
    rows = skill_log.rows_of(trajectories, gains)
    kept = skill_log.write(self.run.workdir / SKILLS, iteration, rows, max_rows=self._keep)
    self._seen.add(row["skill"] for row in kept)
    return log | {"skill_gain_on_success": worth["gain"], "skill_gain_positive": worth["positive"]}


def _library_file(run: Run) -> epath.Path:
  """Where the run's skill library is, or would be: config.library.path, else in the work directory."""
  return epath.Path(run.config.library.path) if run.config.library.path else run.workdir / LIBRARY


def _library_path(run: Run) -> epath.Path:
  """`_library_file`; the one of the work directory is built where it is missing."""
  path = _library_file(run)
  if run.config.library.path:
    return path
  if hosts.from_first("the skill library", path.exists):
    return path
  run_library(run)
  hosts.meet("the skill library that was built")
  return path
