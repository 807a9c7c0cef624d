"""The quickstart in miniature, for tests of whole runs: every stage; the policy wins nothing but writes skills."""

import pathlib
import runpy

QUICKSTART = pathlib.Path(__file__).parent.parent / "configs" / "quickstart.py"


def get_config(method: str = "seed"):
  c = runpy.run_path(str(QUICKSTART))["get_config"](method)
  c.model.shape.update(
    dict(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=128)
  )
  c.rollout.update(dict(slots=16, smallest_bucket=16, max_steps=4, max_response=6))
  c.analysis.max_response = 40
  c.checkpoint.update(dict(every=1, keep=2))
  c.base.update(dict(episodes=400, vocabulary_episodes=60, log_every=3, save_every=4))
  c.collect.update(dict(tasks=8, samples=8, tasks_per_part=4))
  c.sft.update(dict(epochs=15, replay=0.0, check=4, batch_tokens=1_500, log_every=4, save_every=6))
  c.train.update(dict(num_tasks=16, tasks_per_iteration=4, group_size=4, iterations=4))
  c.base.optimizer.learning_rate, c.sft.optimizer.learning_rate = 1e-2, 3e-3  # not what the quickstart is tuned to
  c.train.loss.entropy_coef = 0.05  # few win here: without it hardly a gradient would move the policy
  c.evaluate.update(dict(tasks=12, mechanism_tasks=4, mechanism_samples=1))
  return c
