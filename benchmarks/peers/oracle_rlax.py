"""rlax's clipped surrogate and entropy on the oracles' cases, in float64. Runs in the environment of rlax."""

from __future__ import annotations

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import rlax

from benchmarks.peers import oracle


def answers(case, logits):
  rows, columns = np.nonzero(case["mask"])
  old, advantages = (jnp.asarray(case[k], float) for k in ("old", "advantages"))

  def value(logprobs):
    ratios = jnp.exp(logprobs - old)[rows, columns]
    return rlax.clipped_surrogate_pg_loss(ratios, advantages[rows], oracle.CLIP)

  loss, gradient = jax.value_and_grad(value)(jnp.asarray(case["logprobs"], float))
  return {
    "loss token_mean without dual clip": np.concatenate([[loss], np.ravel(gradient)]),
    "entropy": distrax.Categorical(logits=jnp.asarray(logits, float)).entropy(),
  }


if __name__ == "__main__":
  jax.config.update("jax_enable_x64", True)
  oracle.main(answers)
