"""What SEED adds to a GRPO iteration on the same samples: rollout, analysis, score, update.

The learning rate is 0, so both methods play the same episodes in every iteration and only their own work differs.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks import echo, process, timing, workload
from benchmarks.table import Row
from seed_jax import batching, learn, metrics, rollout, sharding, train

ABOUT = "a SEED iteration against a GRPO iteration on the same samples, phase by phase"

PHASES = ("rollout", "analysis", "batch", "score", "update")
METHODS = ("seed", "grpo")


def run(options) -> Iterator[Row]:
  """The whole iteration and its phases; of the quickstart with --start=DIR, else of a synthetic one of its shape."""
  if options.start:
    taken, what = started(options.start, options)
  else:
    taken, what = synthetic(options)
  total = {m: [sum(phases.values()) for phases in taken[m]] for m in METHODS}
  cost = timing.paired_ratio(total["seed"], total["grpo"])
  yield Row(
    "iteration: SEED against GRPO",
    timing.median(total["seed"]),
    timing.median(total["grpo"]),
    1 / cost,
    unit="s",
    goal=">= 0.77x",
    note=f"{what}; SEED costs {cost:.2f} times GRPO (goal: at most 1.3), the ratio is the inverse",
  )
  for phase in PHASES:
    values = {m: timing.median([phases.get(phase, 0.0) for phases in taken[m]]) for m in METHODS}
    yield Row(f"iteration: {phase}", values["seed"], values["grpo"], unit="s", note="SEED (ours) and GRPO (peer)")


def started(start: str, options) -> tuple[dict, str]:
  """Both methods by the train stage itself, from the policy of a work directory, in turn; iterations that compiled
  something are left out.
  """
  try:
    config = json.loads((pathlib.Path(start) / "config.json").read_text(encoding="utf-8"))
    seed, ask = config["seed"], config["analysis"]["ask"]
  except (OSError, ValueError, KeyError) as error:
    raise ValueError(f"--start={start} is no work directory of the quickstart: {error}") from None
  count = 3 if options.quick else 6
  taken = {m: [] for m in METHODS}
  with tempfile.TemporaryDirectory() as folder:
    for round_number in range(options.repeats):
      for method in METHODS:
        workdir = pathlib.Path(folder) / f"{method}{round_number}"
        timing.say(f"  iteration: {method}, round {round_number + 1} of {options.repeats}")
        command = [sys.executable, "-m", "seed_jax.main", f"--config=configs/quickstart.py:{method}"]
        command += [f"--workdir={workdir}", "--stages=train", "--plain", f"--config.start={start}"]
        command += [f"--config.seed={seed}", f"--config.analysis.ask={ask}", f"--config.train.iterations={count}"]
        command += ["--config.train.optimizer.learning_rate=0.0", "--config.train.optimizer.weight_decay=0.0"]
        process.call(command, name=f"train stage of {method}")
        rows = [r for r in metrics.read_rows(workdir / "metrics.jsonl") if not r["compilations"]]
        if not rows:
          raise ValueError(f"every iteration of {method} compiled something")
        taken[method].append({p: timing.median([r.get(f"seconds/{p}", 0.0) for r in rows]) for p in PHASES})
        rate = rows[-1].get("parse_rate")
        if method == "seed":
          parsed = f"{100 * rate:.0f} % of the analyses parsed"
  return taken, f"quickstart from {pathlib.Path(start).name}/policy/sft, 64 episodes, {parsed}, analysis.ask={ask}"


def synthetic(options) -> tuple[dict, str]:
  """Both methods on episodes of a random policy in the echo game; every one gets a skill of 40 tokens, and every
  analysis is as long as it may be.
  """
  size, games, slots = ("micro", 4, 4) if options.quick else ("quickstart", 64, 64)
  config, mesh = workload.model(size), sharding.make_mesh()
  shapes = [batching.RowShape(512, 256, 2, skill_length=640)]
  turns = echo.varied_turns(games, least=2, times=5)  # about 220 tokens an episode, as in the quickstart
  reading = rollout.Reading(lambda t: _transcript(t)[-256:], 4 if options.quick else 40)
  work = {}
  for method in METHODS:
    state, step, scoring = workload.trainer(config, mesh, method=method, learning_rate=0.0, kl_coef=0.01)
    engine, play = echo.player(
      config, mesh, state.params, slots=slots, environments=slots, capacity=512, max_new=3, smallest=min(16, slots)
    )
    reference = workload.params(config, mesh)
    work[method] = dict(state=state, step=step, scoring=scoring, engine=engine, play=play, reference=reference)

  def iteration(method):
    w, timer = work[method], metrics.Timer()
    skills = w["scoring"].method.needs_skills
    w["engine"].set_params(w["state"].params)
    trajectories = train.timed_play(timer, w["play"], echo.episodes(turns), reading=reading if skills else None)
    with timer("batch"), jax.set_mesh(mesh):
      values = [np.linspace(-1, 1, t.length).astype(np.float32) for t in trajectories]
      samples = batching.episode_samples(trajectories, values, _with_skill if skills else lambda *_: None)
      parts = learn.mini_batches(samples, 2, 0)
      minibatches = [batching.to_batches(part, shapes, mesh, skills=skills) for part in parts]
    with timer("score"), jax.set_mesh(mesh):
      scored = learn.score_all(minibatches, w["state"].params, w["reference"], w["scoring"])
      jax.block_until_ready(scored)
    with timer("update"), jax.set_mesh(mesh):
      w["state"], _ = jax.block_until_ready(learn.update_all(w["step"], w["state"], scored, w["scoring"]))
    return timer.take("")

  taken = timing.in_turn({m: lambda m=m: iteration(m) for m in METHODS}, options.repeats, measure=lambda f: f())
  return taken, f"synthetic, {games} episodes of {min(turns)} to {max(turns)} turns, a skill on all of them"


def _transcript(trajectory) -> list[int]:
  return [int(i) for turn in trajectory.turns for ids in (turn.prompt_ids, turn.response_ids) for i in ids]


def _with_skill(trajectory, turn) -> list[int]:
  return [*map(int, trajectory.turns[turn].prompt_ids), *range(1, 41)]
