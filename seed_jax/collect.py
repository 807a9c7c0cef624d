"""Stage `collect`: the base policy plays; nothing is filtered (paper, Stage 1, offline trajectory collection)."""

from __future__ import annotations

import time

import numpy as np

from seed_jax import hosts
from seed_jax.metrics import progress, say
from seed_jax.rollout import Episode
from seed_jax.run import Run, process_seed
from seed_jax.trajectory import load_trajectories, save_trajectories
from seed_jax.unfinished import Plays


def run_collect(run: Run) -> dict:
  """K0 episodes for each of the collection tasks; writes trajectories/collected."""
  c = run.config.collect
  started = time.monotonic()
  model, params = run.load_policy("base")
  seed = process_seed(run.config.seed, "collect")
  tasks = run.benchmark.tasks(c.split, c.tasks, seed)
  tasks += [task for split, count in c.get("also", ()) for task in run.benchmark.tasks(split, count, seed)]
  engine = run.engine(model, temperature=c.temperature, seed=process_seed(run.config.seed, "collect samples"))
  engine.set_params(params)
  done, plays = [], Plays(run, "collect")
  batches = _parts(tasks, c.tasks_per_part)
  with run.pool(c.tasks_per_part * c.samples) as pool:
    with progress(
      total=hosts.largest_share(len(tasks) * c.samples), desc="collect", unit="episode", plain=run.plain
    ) as bar:
      for number, part in enumerate(batches):
        place = run.workdir / "trajectories" / f"collected-{number:03d}"
        try:
          trajectories = load_trajectories(str(place))  # a part that an interrupted run finished
        except ValueError:
          episodes = [Episode(task, group, member) for group, task in enumerate(part) for member in range(c.samples)]
          trajectories = plays(number, engine, pool, episodes, params, on_episode=lambda t: bar.update(1))
          save_trajectories(str(place), trajectories)
        plays.drop_before(number + 1)
        done += trajectories
  won = float(np.mean([t.won for t in done]))
  valid = float(np.mean([turn.valid for t in done for turn in t.turns]))
  failed = sum(bool(t.error) for t in done)
  say(
    f"collect: {len(done)} episodes, success {won:.1%}, valid actions {valid:.1%}"
    + (f", {failed} broke off" if failed else "")
  )
  summary = run.finish(
    "collect",
    {
      "episodes": len(done),
      "parts": len(batches),
      "success": won,
      "valid_actions": valid,
      "errors": failed,
      "mean_turns": float(np.mean([t.length for t in done])),
      "seconds": time.monotonic() - started,
    },
  )
  plays.done()
  return summary


def load_collected(run: Run):
  """Every collected trajectory, in order."""
  parts = run.done("collect")["parts"]
  return [t for n in range(parts) for t in load_trajectories(str(run.workdir / "trajectories" / f"collected-{n:03d}"))]


def _parts(tasks, size):
  return [tasks[i : i + size] for i in range(0, len(tasks), size)]
