"""Runs of the tiny config without Stage 1, for tests of the stages after it."""

import shutil

from tiny_config import get_config

from seed_jax import base
from seed_jax.run import Run


def tiny(method="seed"):
  """The tiny config with less of a corpus and fewer programs."""
  config = get_config(method)
  config.base.update(dict(episodes=60, vocabulary_episodes=60))
  config.rollout.capacity_buckets = ()  # fewer programs
  return config


def started(workdir, method):
  """A work directory that others may start from; its SFT policy is the starting policy. Returns `workdir`."""
  run = Run(tiny(method), workdir, plain=True)
  run.open()
  base.run_base(run)
  shutil.copytree(run.policy_path("base"), run.policy_path("sft"))
  run.finish("sft", {})
  return run.workdir
