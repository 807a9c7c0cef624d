"""TRL's GRPO loss and entropy on the oracles' cases, in float64. Runs in the environment of TRL."""

from __future__ import annotations

import collections
import types

import numpy as np
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import entropy_from_logits

from benchmarks.peers import oracle


def loss(case, loss_type: str, *, level: str = "token", beta: float = 0.0, delta: float | None = oracle.DUAL_CLIP):
  """[value, *gradient] of `GRPOTrainer._compute_loss`, called on a stand-in that holds the settings it reads."""
  rows, tokens = case["mask"].shape
  wide = {k: torch.tensor(case[k], dtype=torch.float64) for k in ("logprobs", "old", "ref", "mask", "advantages")}
  logprobs = wide["logprobs"].requires_grad_()
  stand_in = types.SimpleNamespace(
    _get_per_token_logps_and_entropies=lambda *unused, **also: (logprobs, torch.zeros(rows, tokens), None),
    _metrics={"train": collections.defaultdict(list)},
    _entropy_bonus_enabled=False,
    accelerator=types.SimpleNamespace(
      num_processes=1, gather=lambda x: x.reshape(-1), reduce=lambda x, reduction=None: x
    ),
    args=types.SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
    aux_loss_enabled=False,
    beta=beta,
    current_gradient_accumulation_steps=1,
    epsilon_high=oracle.CLIP,
    epsilon_low=oracle.CLIP,
    importance_sampling_level=level,
    loss_type=loss_type,
    max_completion_length=tokens,
    model=types.SimpleNamespace(training=True),
    off_policy_mask_threshold=None,
    top_entropy_quantile=1.0,
    use_vllm=False,
    vllm_importance_sampling_correction=False,
  )
  inputs = dict(
    advantages=wide["advantages"],
    completion_ids=torch.zeros(rows, tokens, dtype=torch.long),
    completion_mask=wide["mask"],
    num_items_in_batch=wide["mask"].sum(),
    old_per_token_logps=wide["old"],
    prompt_ids=torch.zeros(rows, 1, dtype=torch.long),
    prompt_mask=torch.ones(rows, 1),
    ref_per_token_logps=wide["ref"],
  )
  value = GRPOTrainer._compute_loss(stand_in, None, inputs)
  value.backward()
  return np.concatenate([[value.item()], logprobs.grad.numpy().ravel()])


def answers(case, logits):
  # TRL divides by all rows, empty ones included; the definition compared takes rows with a token.
  rows = len(case["mask"]) / oracle.sequences(case)
  return {
    "loss token_mean": loss(case, "bnpo"),
    "loss token_mean + KL": loss(case, "dapo", beta=oracle.KL_COEFFICIENT),
    "loss sequence_mean_token_mean": rows * loss(case, "grpo"),
    "loss sequence_mean_token_sum": rows * loss(case, "luspo"),
    "loss sequence_mean_token_sum_norm": rows * loss(case, "dr_grpo"),
    "loss GSPO": rows * loss(case, "grpo", level="sequence", delta=None),
    "entropy": entropy_from_logits(torch.tensor(logits, dtype=torch.float64)),
  }


if __name__ == "__main__":
  oracle.main(answers)
