"""Random parameters that the tests of checkpoints share."""

import jax
import numpy as np

from seed_jax.models import decoder


def random_params(config, seed=0):
  """The decoder's own tree, every leaf random (its initial norms and biases would hide a swap)."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda key: decoder.init(key, config), jax.random.key(0))
  return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
