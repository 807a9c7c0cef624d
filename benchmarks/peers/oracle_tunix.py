"""tunix's GRPO loss, KL estimators, entropy and advantages on the oracles' cases. Runs in the environment of tunix.

Its losses are float32, its advantages numpy of whatever comes in.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
from tunix.rl import algo_core, common

from benchmarks.peers import oracle

MODES = {
  "token_mean": "token-mean",
  "sequence_mean_token_mean": "sequence-mean-token-mean",
  "sequence_mean_token_sum": "seq-mean-token-sum",
  "sequence_mean_token_sum_norm": "sequence-mean-token-scale",
}


def loss(case, mode: str, *, algorithm: str = "grpo", dual_clip: float | None = oracle.DUAL_CLIP, beta: float = 0.0):
  """[value, *gradient] of `grpo_loss_fn`, with the model's pass replaced by the case's log-probabilities."""
  rows, tokens = case["mask"].shape
  example = common.TrainExample(
    prompt_ids=jnp.zeros((rows, 1), int),
    prompt_mask=jnp.ones((rows, 1)),
    completion_ids=jnp.zeros((rows, tokens), int),
    completion_mask=jnp.asarray(case["mask"]),
    advantages=jnp.asarray(case["advantages"]),
    ref_per_token_logps=jnp.asarray(case["ref"]) if beta else None,
    old_per_token_logps=jnp.asarray(case["old"]),
  )
  settings = types.SimpleNamespace(
    beta=beta,
    epsilon=oracle.CLIP,
    epsilon_high=oracle.CLIP,
    epsilon_c=dual_clip,
    loss_algo=algorithm,
    loss_agg_mode=mode,
    temperature=1.0,
    kl_loss_mode="low_var_kl",
    kl_clamp_value=10.0,
  )

  def value(logprobs):
    real, split = common.compute_per_token_logps, algo_core.nnx.split
    common.compute_per_token_logps = lambda *unused, **also: (logprobs, jnp.zeros((rows, tokens, 2)))
    algo_core.nnx.split = lambda model: (None, None)
    try:
      return algo_core.grpo_loss_fn(None, example, settings, 0, 1)[0]
    finally:
      common.compute_per_token_logps, algo_core.nnx.split = real, split

  value, gradient = jax.value_and_grad(value)(jnp.asarray(case["logprobs"]))
  return np.concatenate([[float(value)], np.ravel(gradient)])


def answers(case, logits):
  out = {f"loss {name}": loss(case, mode) for name, mode in MODES.items()}
  out["loss token_mean + KL"] = loss(case, "token-mean", beta=oracle.KL_COEFFICIENT)
  gspo = loss(case, "sequence-mean-token-mean", algorithm="gspo-token", dual_clip=None)
  out["loss GSPO"] = out["loss GSPO-token"] = gspo
  pair = [jnp.asarray(case[k]) for k in ("logprobs", "ref")]
  names = {"k1": "kl", "k2": "mse_kl", "k3": "low_var_kl"}
  out |= {f"KL {k}": common.compute_kl_divergence(*pair, mode, clamp_value=10.0) for k, mode in names.items()}
  out["entropy"] = algo_core.compute_entropy_from_logits(jnp.asarray(logits))
  rewards, members = case["rewards"].astype(np.float64), case["members"]
  alone = members == 1  # its deviation of one is NaN
  out["advantages mean_std"] = 0 * rewards if alone else algo_core.compute_advantages(rewards, members)
  out["advantages mean"] = algo_core.compute_drgrpo_advantages(rewards, members)
  out["advantages RLOO"] = algo_core.compute_rloo_advantages(jnp.asarray(case["rewards"]), members)
  return out


if __name__ == "__main__":
  oracle.main(answers)
