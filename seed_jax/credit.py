"""What every turn of finished episodes is worth: scores, and their advantages within groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from seed_jax.advantages import group_advantages
from seed_jax.step_advantages import anchor_ids, discounted_returns
from seed_jax.trajectory import Trajectory, group_numbers


def turn_scores(trajectories: Sequence[Trajectory], *, reward_scale: float, invalid_penalty: float) -> list[np.ndarray]:
  """Score of every turn: the scaled episode return, minus the penalty at a turn with an invalid action (there only;
  method.md 4.1).
  """
  return [
    np.asarray([reward_scale * t.episode_return - invalid_penalty * (not turn.valid) for turn in t.turns], np.float32)
    for t in trajectories
  ]


def turn_advantages(
  trajectories: Sequence[Trajectory],
  *,
  reward_scale: float = 10.0,
  invalid_penalty: float = 0.1,
  normalize: str = "mean_std",
  per_step: bool = True,
  advantage: Callable = group_advantages,
  step_advantage: Callable | None = None,
  step_weight: float = 1.0,
  gamma: float = 0.95,
  num_groups: int = 0,
  num_turns: int = 0,
) -> list[np.ndarray]:
  """Group-relative advantage of every turn, float32[turns] per trajectory.

  per_step=True takes mean and deviation over all turns of the group (official code); False weighs each episode once
  (paper). With `step_advantage` the credit of single steps is added, `step_weight` times: their returns, discounted by
  `gamma`, against those of the group's other steps from the same observation (GiGPO). Episodes whose environment failed
  are left out of the statistics and get 0. `num_groups` and `num_turns` are what there can be at most: with them the
  compiled shape is always the same.
  """
  scores = turn_scores(trajectories, reward_scale=reward_scale, invalid_penalty=invalid_penalty)
  groups = group_numbers(trajectories)
  count = sum(map(len, scores))
  # without a bound a power of two: few compiled shapes
  room = num_turns if num_turns >= count else 1 << max(count - 1, 0).bit_length()

  def flat(parts, dtype):  # fill has weight 0
    joined = np.concatenate([np.zeros(0), *parts]).astype(dtype)
    return np.pad(joined, (0, room - count))

  def each(value):
    return flat([np.full(len(s), value(s, t)) for s, t in zip(scores, trajectories, strict=True)], np.float32)

  weights = each(lambda s, t: 0.0 if t.error else 1.0 if per_step else 1.0 / max(len(s), 1))
  ids = each(lambda s, t: groups[t.group]).astype(np.int32)
  at_most = max(len(groups), num_groups)
  total = advantage(flat(scores, np.float32), ids, num_groups=at_most, normalize=normalize, weights=weights)
  if step_advantage is not None:
    rewards = [
      np.asarray([reward_scale * turn.reward - invalid_penalty * (not turn.valid) for turn in t.turns], np.float32)
      for t in trajectories
    ]
    seen = [turn.observation for t in trajectories for turn in t.turns]
    anchors = np.pad(anchor_ids(seen, ids[:count]), (0, room - count))
    returns = flat([discounted_returns(r, gamma=gamma) for r in rewards], np.float32)
    counted = each(lambda s, t: float(not t.error))
    total = total + step_weight * step_advantage(
      returns, anchors, num_groups=room, normalize=normalize, weights=counted
    )
  ends = np.cumsum([len(s) for s in scores[:-1]], dtype=int)
  return np.split(np.asarray(total)[:count], ends)[: len(scores)]


def kept_groups(trajectories, group_filter):
  """The episodes of the groups that `group_filter(returns, group_ids, num_groups=...)` keeps.

  The filter sees an episode that broke off as one of no group (-1): its return is no evidence.
  """
  numbers = group_numbers(trajectories)
  ids = np.asarray([-1 if t.error else numbers[t.group] for t in trajectories], np.int32)
  returns = np.asarray([t.episode_return for t in trajectories], np.float32)
  keep = np.asarray(group_filter(returns, ids, num_groups=len(numbers)))
  return [t for t in trajectories if keep[numbers[t.group]]]
