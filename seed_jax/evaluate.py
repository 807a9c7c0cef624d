"""Stage `evaluate`: the fixed panel, without skills, for the final policy and for the one that training began from."""

from __future__ import annotations

import time

from seed_jax import hosts, methods
from seed_jax.intervals import summarize
from seed_jax.mechanism import run_mechanism
from seed_jax.metrics import progress, say
from seed_jax.rollout import Episode
from seed_jax.run import Run, process_seed
from seed_jax.skill_branch import shown
from seed_jax.unfinished import Plays


def run_evaluate(run: Run) -> dict:
  """Plays the panel with both policies; writes evaluate.json with overall and macro success and 95 % intervals."""
  e = run.config.evaluate
  started = time.monotonic()
  start_name = (run.done("train") or {}).get("start_from", "sft")
  results, plays = {}, Plays(run, "evaluate")
  for number, name in enumerate((start_name, "final")):
    if not run.policy_path(name).exists():
      continue
    results[name] = evaluate_policy(run, name, number, plays)
    say(f"evaluate: {name} {results[name]['success']:.1%} of {results[name]['episodes']} episodes")
  last = "final" if "final" in results else start_name
  values = results[last] | {
    "start": results[start_name],
    "panel": {"split": e.split, "tasks": e.tasks, "samples": e.samples, "seed": e.seed},
  }
  if e.mechanism_tasks:
    values["mechanism"] = run_mechanism(run, plays=plays)
  values = run.finish("evaluate", values | {"seconds": time.monotonic() - started})
  plays.done()
  return values


def evaluate_policy(run: Run, name: str, number: int = 0, plays: Plays | None = None) -> dict:
  """Success of one policy on the panel, `samples` episodes a task at the evaluation temperature, no skill in any
  prompt (but for the methods of which that is a part: a library's). `number`: of the play in `plays`.
  """
  e = run.config.evaluate
  model, params = run.load_policy(name)
  engine = run.engine(model, temperature=e.temperature, seed=process_seed(run.config.seed, "evaluate samples"))
  engine.set_params(params)
  panel = run.panel()
  also = [task for split, count in e.get("also", ()) for task in run.benchmark.tasks(split, count, e.seed)]
  skill = shown(run, methods.get(run.config.method).in_evaluation)
  episodes = [
    Episode(task, group, member, skill) for group, task in enumerate(panel + also) for member in range(e.samples)
  ]
  with (
    run.pool(len(episodes)) as pool,
    progress(total=hosts.largest_share(len(episodes)), desc=f"evaluate {name}", unit="episode", plain=run.plain) as bar,
  ):
    plays = plays or Plays(run, f"evaluate {name}")
    trajectories = plays(number, engine, pool, episodes, params, on_episode=lambda t: bar.update(1))
  rest = [t for t in trajectories if t.group >= len(panel)]  # config.evaluate.also: told apart from the panel
  trajectories = [t for t in trajectories if t.group < len(panel)]
  played = [t for t in trajectories if not t.error]
  also = (
    {"also": [{"task": t.task_id, "won": t.won, "turns": t.length, "error": t.error} for t in rest]} if rest else {}
  )
  return (
    summarize((t.task_id, t.family, t.won) for t in played)
    | also
    | {
      "checkpoint": str(run.policy_path(name)),
      "errors": len(trajectories) - len(played),
      "turns": sum(t.length for t in played) / max(len(played), 1),
      "temperature": e.temperature,
    }
  )
