"""Is the mechanism alive? What a hindsight skill in context is worth to the policy that starts training.

On tasks where the policy has won once, three fresh sets of episodes: no skill, the skill of that success, the skill of
another task's success.
"""

from __future__ import annotations

import numpy as np

from seed_jax.intervals import paired_difference
from seed_jax.metrics import say
from seed_jax.rollout import Episode
from seed_jax.run import Run, process_seed
from seed_jax.unfinished import Plays

FIRST = 2  # number of the first play within the stage `evaluate`


def run_mechanism(run: Run, policy: str = "sft", plays: Plays | None = None) -> dict:
  """Success with no, own and foreign skill on the same tasks; gains with 95 % intervals over tasks."""
  e, plays = run.config.evaluate, plays or Plays(run, "mechanism")
  model, params = run.load_policy(policy)
  engine = run.engine(model, temperature=e.temperature, seed=process_seed(run.config.seed, "mechanism"))
  engine.set_params(params)
  tasks = run.benchmark.tasks(e.mechanism_split, e.mechanism_tasks, process_seed(run.config.seed, "mechanism tasks"))
  with run.pool(len(tasks) * e.mechanism_samples) as pool:
    episodes = [Episode(t, g, m) for g, t in enumerate(tasks) for m in range(e.mechanism_samples)]
    first = plays(FIRST, engine, pool, episodes, params, iteration=0, reading=run.reading())
    stats = run.parse(first)
    own = {}
    for t in first:
      if t.won and t.skill:
        own.setdefault(t.group, t.skill)
    groups = sorted(own)
    if len(groups) < 2:
      say("mechanism: fewer than two tasks were won; nothing can be said")
      return {"tasks": len(groups), "parse_rate": stats["parse_rate"]}
    foreign = {g: own[groups[(i + len(groups) // 2) % len(groups)]] for i, g in enumerate(groups)}
    rates = {}
    for number, (name, skills) in enumerate({"none": {}, "own": own, "foreign": foreign}.items(), 1):
      episodes = [Episode(tasks[g], g, m, skills.get(g, "")) for g in groups for m in range(e.mechanism_samples)]
      played = plays(FIRST + number, engine, pool, episodes, params, iteration=number)
      rates[name] = np.asarray([np.mean([t.won for t in played if t.group == g]) for g in groups])
  own_gain, foreign_gain = (
    paired_difference(rates["own"], rates["none"]),
    paired_difference(rates["foreign"], rates["none"]),
  )
  say(
    f"mechanism: on {len(groups)} tasks that were won once, success {rates['none'].mean():.1%} without a skill, "
    f"{rates['own'].mean():.1%} with its own, {rates['foreign'].mean():.1%} with another task's"
  )
  return {
    "policy": policy,
    "tasks": len(groups),
    "episodes_each": len(groups) * e.mechanism_samples,
    "parse_rate": stats["parse_rate"],
    **{name: float(rate.mean()) for name, rate in rates.items()},
    "own_gain": list(own_gain),
    "foreign_gain": list(foreign_gain),
  }
