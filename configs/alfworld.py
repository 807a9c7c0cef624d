# extras: alfworld
"""SEED on ALFWorld as in the paper, on Cloud TPU: 2,400 official games, 150 iterations of 16 tasks x 8 episodes.

  python -m seed_jax.main --config=configs/alfworld.py:qwen2_5_3b,v5e:4x4 --workdir=gs://BUCKET/alfworld_3b \
    --config.model.path=gs://BUCKET/Qwen2.5-3B-Instruct

The argument is MODEL,TOPOLOGY[,METHOD]: qwen3_1_7b, qwen2_5_3b or qwen2_5_7b on a slice of v4, v5e, v5p or v6e (see
configs/tpu.py, which has what depends on them), with `seed` or any other method of docs/methods.md. `config.model.path`
is a Hugging Face directory with the weights, `config.model.preset` (set by the argument) its sizes: without weights the
programs can still be planned and compiled. ALFWORLD_DATA must name the folder with json_2.1.1. Stage 1 asks
an OpenAI-compatible endpoint for skills (`config.annotate.external`); the key is taken from the environment.

Hyper-parameters are those of the paper (tables 3 and 5) and of its scripts. What differs, and why:

- An update takes an eighth of an iteration's samples (about 2,000, so about 256, the paper's mini-batch): the number of
  updates, on which a schedule rests, does not depend on how long episodes get.
- A policy reads an episode in at most 7,168 tokens and answers in 1,024 (paper: 16,384 and 4,096): thirty steps are
  about 6,000, an answer is a few sentences, and a slot of the cache must hold both. Longer episodes lose the middle of
  their longest observations and responses, never the instruction.
- Samples fill rows with zero-mask padding; none is duplicated.

Expected: nothing has been measured on a TPU yet; stage `preflight` predicts the time of an iteration on a slice.
"""

from ml_collections import ConfigDict

from configs import quickstart, tpu
from seed_jax import methods


def get_config(argument: str = "qwen2_5_3b,v5e:4x4") -> ConfigDict:
  model, topology, method = _parts(argument)
  c = quickstart.get_config(method)
  c.benchmark = ConfigDict(dict(name="alfworld", options=dict(plain=False, strict=False, max_steps=30)))

  if model.startswith("qwen3"):  # as in the paper
    c.model.tokenizer_options.template_options = ConfigDict(dict(enable_thinking=False))

  c.rollout.update(dict(mode="window", history=5, max_steps=30, max_prompt=2_048, max_response=512, capacity=2_560))
  c.rollout.update(dict(capacity_buckets=(2_560,), prefill_buckets=(128, 512), prefill_tokens=8_192, share_prefix=64))
  c.rollout.update(dict(smallest_bucket=8, refill=0.125, answer_after=1, workers=16, temperature=1.0))
  c.analysis.update(dict(ask="message", max_prompt=7_168, max_response=1_024, template="full"))
  c.checkpoint.update(dict(every=10, keep=2))

  # Stage 1: 30 tasks of each of the six families x 8 episodes; 3 epochs of 8 episodes an update
  c.collect.update(dict(split="train", tasks=180, samples=8, tasks_per_part=60, temperature=0.4))
  c.annotate = ConfigDict(
    dict(analyzer="external", external=dict(base_url="", model="", api_key_env="ANALYZER_API_KEY"))
  )
  c.annotate.external.update(dict(max_tokens=1_024, temperature=0.0, max_attempts=5))
  c.sft.update(dict(epochs=3, replay=0.0, validation=0.1, check=128, batch_tokens=32_768, row_lengths=(8_192,)))
  c.sft.update(dict(response_fraction=0.125, log_every=10, save_every=50))
  c.sft.optimizer = quickstart.optimizer(learning_rate=5e-6, warmup=0.1, final_fraction=0.0)

  # Stage 2
  c.train.update(dict(split="train", num_tasks=2_400, tasks_per_iteration=16, group_size=8, iterations=150))
  c.train.update(dict(minibatches=8, invalid_penalty=0.1, normalize="mean_std", per_step=True, reward_scale=10.0))
  c.train.update(dict(row_lengths=(2_560,), response_fraction=0.4, skill_room=0.2))  # skill rows of 3,072
  c.train.loss.update(dict(kl_coef=0.01, entropy_coef=0.001, opd_coef=0.01, opd_beta=5.0))
  c.train.optimizer = quickstart.optimizer(learning_rate=1e-6, schedule="constant", b2=0.999, warmup=0.0)
  c.train.panel.update(dict(every=5, split="valid_seen", tasks=128, temperature=0.4))

  c.evaluate.update(dict(split="valid_seen", tasks=140, temperature=0.4))
  c.evaluate.update(dict(mechanism_tasks=60, mechanism_samples=4, mechanism_split="valid_unseen"))
  c.evaluate.also = (("valid_unseen", 134),)

  # SDAR's log of this setting with Qwen2.5-3B has 599 tokens a sample, a fifth of them sampled; TextWorld takes 10-15
  # steps a second.
  c.preflight.update(dict(prompt=480.0, response=120.0, analysis_prompt=6_000.0, analysis_response=300.0))
  c.preflight.environment_seconds = 0.08

  tpu.apply(c, model, topology)
  c.update_from_flattened_dict(methods.settings(method))
  return c


def _parts(argument: str) -> tuple[str, str, str]:
  """(model, topology, method) of MODEL,TOPOLOGY[,METHOD]."""
  parts = argument.split(",")
  if len(parts) not in (2, 3):
    raise ValueError(f"the argument {argument!r} of configs/alfworld.py is not MODEL,TOPOLOGY[,METHOD]")
  return parts[0], parts[1], parts[2] if len(parts) == 3 else "seed"
