"""What an iteration's episodes and engines have done, as columns of metrics.jsonl."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from seed_jax import hosts
from seed_jax.requests import Stats
from seed_jax.trajectory import Trajectory


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Means over the episodes of an iteration that were played to their end; how many were not."""
  played = [t for t in trajectories if not t.error]
  turns = [turn for t in played for turn in t.turns]
  groups: dict[int, list[bool]] = {}
  for t in played:
    groups.setdefault(t.group, []).append(t.won)
  return {
    "episodes": len(trajectories),
    "environment_steps": sum(t.length for t in trajectories),
    "success": float(np.mean([t.won for t in played])) if played else 0.0,
    "return": float(np.mean([t.episode_return for t in played])) if played else 0.0,
    "turns": float(np.mean([t.length for t in played])) if played else 0.0,
    "valid_actions": float(np.mean([turn.valid for turn in turns])) if turns else 0.0,
    "response_tokens": float(np.mean([len(turn.response_ids) for turn in turns])) if turns else 0.0,
    "tied_groups": float(np.mean([len(set(g)) == 1 for g in groups.values()])) if groups else 0.0,
    "errors": float(len(trajectories) - len(played)),
  }


def engine_metrics(stats: Stats) -> dict[str, float]:
  """What an iteration asked of the engines of all hosts."""
  stats = Stats(**hosts.totals("the counters of the engines", dataclasses.asdict(stats)))
  return {
    "tokens_sampled": stats.tokens_sampled,
    "tokens_prefilled": stats.tokens_prefilled,
    "tokens_reused": stats.tokens_reused,
    "decode_steps": stats.decode_steps,
    "slot_utilisation": stats.utilisation,
  }
