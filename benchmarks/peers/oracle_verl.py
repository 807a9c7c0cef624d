"""verl's losses, KL estimators and advantages on the oracles' cases, in float64. Runs in the environment of verl."""

from __future__ import annotations

import types

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from benchmarks.peers import oracle

MODES = {
  "token_mean": "token-mean",
  "sequence_mean_token_mean": "seq-mean-token-mean",
  "sequence_mean_token_sum": "seq-mean-token-sum",
  "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
NONE = np.array([np.nan])


def loss(case, mode: str, gspo: bool = False):
  """[value, *gradient] of the clipped surrogate, or of GSPO's, under an aggregation."""
  wide = {k: torch.tensor(case[k], dtype=torch.float64) for k in ("logprobs", "old", "mask", "advantages")}
  logprobs = wide["logprobs"].requires_grad_()
  arguments = dict(
    old_log_prob=wide["old"],
    log_prob=logprobs,
    advantages=wide["advantages"][:, None].expand_as(logprobs),
    response_mask=wide["mask"],
    loss_agg_mode=mode,
  )
  if gspo:
    sizes = dict(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, ppo_mini_batch_size=1)  # what it insists on
    clip = dict(clip_ratio=oracle.CLIP, clip_ratio_low=oracle.CLIP, clip_ratio_high=oracle.CLIP)
    config = ActorConfig(**sizes, **clip)
    value = core_algos.compute_policy_loss_gspo(**arguments, config=config)[0]
  else:
    value = core_algos.compute_policy_loss(**arguments, cliprange=oracle.CLIP, clip_ratio_c=oracle.DUAL_CLIP)[0]
  value.backward()
  return np.concatenate([[value.item()], logprobs.grad.numpy().ravel()])


def advantage(case, function, at_last_token=True, **settings):
  """[B] of an estimator on rewards at a row's last token; a group of one, which verl leaves its reward, as 0."""
  mask = torch.tensor(case["mask"], dtype=torch.float64) if at_last_token else torch.ones(len(case["mask"]), 1).double()
  rewards = torch.zeros_like(mask)
  last = [int(np.flatnonzero(row)[-1]) if row.any() else 0 for row in mask.numpy()]
  rewards[torch.arange(len(last)), last] = torch.tensor(case["rewards"], dtype=torch.float64)
  try:
    out = function(token_level_rewards=rewards, response_mask=mask, index=case["groups"], **settings)[0]
  except ValueError:  # whitening of fewer than two tokens
    return NONE
  return out[torch.arange(len(last)), last].numpy() * (case["members"] > 1 or "config" in settings)


def answers(case, logits):
  pair = [torch.tensor(case[k], dtype=torch.float64) for k in ("logprobs", "ref")]
  out = {f"loss {name}": loss(case, mode) for name, mode in MODES.items()}
  out["loss GSPO"] = out["loss GSPO-token"] = loss(case, "seq-mean-token-mean", gspo=True)
  out |= {f"KL {k}": core_algos.kl_penalty(*pair, k).numpy() for k in ("k1", "k2", "k3")}
  grpo, rloo = core_algos.compute_grpo_outcome_advantage, core_algos.compute_rloo_outcome_advantage
  out["advantages mean_std"] = advantage(case, grpo, False)
  out["advantages mean"] = advantage(case, grpo, False, norm_adv_by_std_in_grpo=False)
  out["advantages RLOO"] = advantage(case, rloo, False)
  plus = core_algos.compute_reinforce_plus_plus_outcome_advantage
  # Its mean is sum / (tokens + 1e-8): of equal returns up to 5e-4 is left, where ours is exactly 0.
  equal = len(set(case["rewards"][case["mask"].any(1)].tolist())) < 2
  settings = types.SimpleNamespace(gamma=1.0)
  out["advantages REINFORCE++"] = NONE if equal else advantage(case, plus, config=settings)
  baseline = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
  out["advantages REINFORCE++-baseline"] = advantage(case, baseline) if case["members"] > 1 else NONE
  return out


if __name__ == "__main__":
  oracle.main(answers)
