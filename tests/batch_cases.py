"""A tiny model and random samples that the tests of batches, scoring and updates share."""

import numpy as np

from seed_jax.batching import Sample
from seed_jax.models.config import ModelConfig

CONFIG = ModelConfig("Qwen2ForCausalLM", 64, 32, 2, 4, 2, 8, 48, qkv_bias=True, rope_theta=100.0)


def samples(count=11, seed=0, skills=True):
  """Conversations of two turns: prompt, response, prompt, response; the skill context has a longer first prompt."""
  rng = np.random.default_rng(seed)
  made = []
  for i in range(count):
    p1, r1, p2, r2 = (rng.integers(2, 60, n).astype(np.int32) for n in rng.integers([3, 1, 2, 1], [7, 5, 5, 6]))
    skill = rng.integers(2, 60, 4).astype(np.int32)
    tokens = np.concatenate([p1, r1, p2, r2])
    index = np.concatenate(
      [len(p1) - 1 + np.arange(len(r1)), len(p1) + len(r1) + len(p2) - 1 + np.arange(len(r2))]
    ).astype(np.int32)
    targets = np.concatenate([r1, r2])
    has = skills and i % 3 != 0
    made.append(
      Sample(
        tokens[:-1],
        index,
        targets,
        rng.normal(size=len(targets)).astype(np.float32),
        np.zeros(len(targets), np.float32),
        np.concatenate([p1[:1], skill, tokens[1:-1]]) if has else None,
        index + 4 if has else None,
      )
    )
  return made
