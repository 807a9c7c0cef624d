"""Random cases on which our functions are compared with other implementations, in plain numpy and from a seed.

Shapes: B = groups * members rows, T tokens. Every case is reproducible from its number; among any 30 there are empty
rows, whole empty groups, groups of one member, groups of equal rewards, masks with holes and ratios far from 1.
"""

from __future__ import annotations

import numpy as np

COUNT = 200
SHAPES = ((2, 4, 12), (3, 1, 5), (1, 5, 9), (2, 2, 1), (4, 3, 6))  # groups, members, tokens; few, for each compiles


def case(number: int) -> dict:
  """Case `number`: float32 arrays [B, T] (logprobs, old, ref, skill, mask), [B] (rewards, groups, skilled), and sizes.

  `logprobs` are those of the policy, `old` of the policy that sampled, `ref` of the reference, `skill` of the skill
  context; `skilled` is 1 where a row has a skill.
  """
  rng = np.random.default_rng([2026, number])
  groups, members, tokens = SHAPES[number % len(SHAPES)]
  rows = groups * members
  logprobs = -rng.exponential(1.0, (rows, tokens))
  spread = (0.05, 0.3, 1.0)[number % 3]

  def near(scale):
    return (logprobs + scale * rng.standard_normal((rows, tokens))).astype(np.float32)

  mask = (np.arange(tokens) < rng.integers(0, tokens + 1, (rows, 1))).astype(np.float32)
  if number % 2:
    mask *= rng.random((rows, tokens)) < 0.7  # a transcript: what the environment says lies between
  if number % 7 == 0:
    mask[:members] = 0.0
  if number % 30 == 1:
    mask[:] = 0.0
  kinds = (rng.random(rows), 10.0 * (rng.random(rows) < 0.4), rng.standard_normal(rows))
  rewards = kinds[(number // 2) % 3]
  if number % 4 == 0:
    rewards[:members] = rewards[0]
  return dict(
    logprobs=logprobs.astype(np.float32),
    old=near(spread),
    ref=near(0.2),
    skill=near(0.5),
    mask=mask,
    rewards=rewards.astype(np.float32),
    groups=np.repeat(np.arange(groups), members),
    skilled=(rng.random(rows) < 0.7).astype(np.float32),
    advantages=rng.standard_normal(rows).astype(np.float32),
    num_groups=groups,
    members=members,
  )


def logits(number: int) -> np.ndarray:
  """Logits [B, T, V] float32 that go with case `number`, V = 17."""
  groups, members, tokens = SHAPES[number % len(SHAPES)]
  return np.random.default_rng([7, number]).normal(size=(groups * members, tokens, 17)).astype(np.float32)


def cases(count: int = COUNT):
  """The first `count` cases."""
  return (case(number) for number in range(count))


def padded(c: dict, rows: int = 12, tokens: int = 12) -> dict:
  """The case in arrays of one size for all cases: masks and `skilled` are 0 and `groups` -1 where nothing is."""
  out = dict(c)
  for name, value in c.items():
    if isinstance(value, np.ndarray):
      size = (rows, tokens)[: value.ndim]
      out[name] = np.full(size, -1 if name == "groups" else 0, value.dtype)
      out[name][tuple(slice(n) for n in value.shape)] = value
  return out
