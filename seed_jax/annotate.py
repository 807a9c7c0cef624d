"""Stage `annotate`: an analyzer from outside reads every collected episode; what parses is kept (paper, hindsight skill
annotation).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from etils import epath

from seed_jax import hosts, skills
from seed_jax.analyzers import Analyzer, ExternalAnalyzer, ScriptedAnalyzer
from seed_jax.collect import load_collected
from seed_jax.metrics import say
from seed_jax.preemption import Preempted
from seed_jax.run import ConfigError, Run
from seed_jax.trajectory import Trajectory, load_trajectories, save_trajectories


def make_analyzer(run: Run):
  """The analyzer that config.annotate names: `scripted` (the benchmark's own) or `external` (an OpenAI-compatible
  endpoint).
  """
  a = run.config.annotate
  if a.analyzer == "scripted":
    return ScriptedAnalyzer(run.benchmark.analyze)
  if a.analyzer == "external":
    options = dict(cache_dir=str(run.workdir / "analyzer_cache"), progress=lambda *_: hosts.advance())
    return ExternalAnalyzer(**options | a.external.to_dict())
  raise ConfigError(f"config.annotate.analyzer={a.analyzer!r} is unknown; choose scripted or external")


def analyses(run: Run, analyzer: Analyzer, episodes: Sequence[Trajectory]) -> list[str | None]:
  """`analyzer.analyze(episodes)`, which process 0 does for all hosts. Raises Preempted on all of them where the run was
  asked to stop; the answers of an endpoint stay in its cache.
  """

  def ask():
    with contextlib.suppress(Preempted):
      return analyzer.analyze(episodes, between=run.notice.check)

  texts = hosts.from_first("the analyses", ask, patience=analyzer.patience)
  run.notice.meet("the end of the analyses")
  return texts


def run_annotate(run: Run) -> dict:
  """Annotates the collected episodes; writes trajectories/annotated (the ones with a skill)."""
  started = time.monotonic()
  trajectories = load_collected(run)
  readable = [t for t in trajectories if t.turns and not t.error]
  texts = analyses(run, make_analyzer(run), readable)
  parsed = skills.attach_analyses(readable, texts)
  kept = [t for t in readable if t.skill]
  if not kept:
    raise ConfigError(f"no analysis of {len(readable)} episodes could be used; look at the analyzer")
  for t in kept:
    t.analysis = skills.format_analysis(skills.Analysis(t.summary, t.skill))
  save_trajectories(str(run.workdir / "trajectories" / "annotated"), kept)
  say(f"annotate: {len(kept)} of {len(trajectories)} episodes have a skill")
  return run.finish(
    "annotate",
    {
      "episodes": len(trajectories),
      "kept": len(kept),
      "parse_rate": parsed / max(len(readable), 1),
      "seconds": time.monotonic() - started,
    },
  )


def load_annotated(run: Run):
  """The annotated trajectories, in order; those of the run that this one took its start from, where it did."""
  own = run.workdir / "trajectories" / "annotated"
  place = own if own.exists() or not run.config.start else epath.Path(run.config.start) / "trajectories" / "annotated"
  return load_trajectories(str(place))
