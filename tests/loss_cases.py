"""A random case that the tests of the losses share."""

import numpy as np


def random_batch(rows=6, tokens=5, seed=0):
  """Arguments of seed_loss; row 1 is fully masked, row 2 has no skill."""
  rng = np.random.default_rng(seed)
  logprobs = -rng.exponential(1.0, (rows, tokens)).astype(np.float32)

  def near(scale):
    return (logprobs + scale * rng.standard_normal((rows, tokens))).astype(np.float32)

  mask = (np.arange(tokens) < rng.integers(1, tokens + 1, (rows, 1))).astype(np.float32)
  mask[1:2] = 0
  skill_mask = np.ones(rows, np.float32)
  skill_mask[2:3] = 0
  return dict(
    logprobs=logprobs,
    old_logprobs=near(0.3),
    advantages=rng.standard_normal(rows).astype(np.float32),
    skill_logprobs=near(0.5),
    mask=mask,
    skill_mask=skill_mask,
    ref_logprobs=near(0.2),
    entropy=rng.random((rows, tokens)).astype(np.float32),
  )
