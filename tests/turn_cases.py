"""Turns and trajectories by their ids and returns, for tests of credit and batches."""

import numpy as np

from seed_jax.trajectory import Trajectory, Turn


def turn(prompt, response, *, valid=True, logprob=-0.5):
  ids = np.asarray(response, np.int32)
  logprobs = np.full(len(ids), logprob, np.float32)
  return Turn("o", (), "p", np.asarray(prompt, np.int32), ids, logprobs, "r", "a", valid, 0.0)


def trajectory(turns, *, group=0, member=0, reward=0.0, mode="transcript", error=""):
  return Trajectory(
    "id",
    "pick",
    "task",
    mode,
    group,
    member,
    turns,
    won=reward > 0,
    episode_return=reward,
    truncated=False,
    error=error,
  )
