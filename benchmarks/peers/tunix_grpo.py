"""GRPO in google-tunix through its public learner: one prompt batch a step, a frozen reference, one update a step."""

from __future__ import annotations

import jax
import numpy as np
from tunix.rl.grpo import grpo_learner

from benchmarks.peers import shared, tunix_policy


def main() -> None:
  flags = shared.flags()
  steps = flags.steps + 1
  tokens, first = [], []
  with tunix_policy.one_device_mesh() as mesh:
    cluster = tunix_policy.cluster(
      flags.size,
      mesh,
      prompt_length=shared.PROMPT_LENGTH,
      cache=shared.PROMPT_LENGTH + shared.NEW_TOKENS,
      steps=steps,
    )
    learner = grpo_learner.GRPOLearner(
      rl_cluster=cluster,
      reward_fns=lambda prompts, completions, **unused: [shared.reward(c) for c in completions],
      algo_config=grpo_learner.GRPOConfig(
        num_generations=shared.MEMBERS, num_iterations=1, beta=shared.KL_COEFFICIENT, epsilon=shared.CLIP
      ),
    )
    params = lambda: tunix_policy.params(cluster.actor_trainer.model)  # noqa: E731
    watch = shared.Stopwatch(lambda value: jax.block_until_ready((value, params()))[0])
    watch.wrap(cluster, "generate", "generation", after=lambda out: tokens.append(sum(map(len, out.tokens))))
    watch.wrap(cluster, "get_ref_per_token_logps", "scoring")
    watch.wrap(
      cluster, "update_actor", "update", after=lambda _: first or first.append(shared.since_start()), last=True
    )
    learner.train([{"prompts": np.array(shared.prompts(step))} for step in range(steps)])
    count = tunix_policy.num_params(cluster.actor_trainer.model)
  shared.report(
    params=count,
    tokens=tokens[1:],
    first_update=first[0],
    step=watch.steps(),
    **{k: v[1:] for k, v in watch.seconds.items()},
  )


if __name__ == "__main__":
  main()
