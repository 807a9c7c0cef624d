"""Packed rows against padded ones, for scoring plus update, on a length distribution like that of ALFWorld steps.

Shapes: n tokens of a sample, r sampled tokens of a sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks import timing, workload
from benchmarks.table import Row
from seed_jax import batching, learn, sharding

ABOUT = "packed rows against one sample a row of 2,560 tokens: seconds of scoring plus update"


def step_lengths(count: int, *, longest: int, mean: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """(n, r) of `count` samples: n log-normal (sigma 0.6) of that mean, at most `longest`; r likewise, a sixth of it.

  A stand-in for steps of ALFWorld episodes: prompts and responses of 600 tokens on average (599 in the token counts of
  a public run) of the 2,560 that a row must allow for, 100 of them sampled. Evenly spaced quantiles, shuffled.
  """
  rng = np.random.default_rng(seed)
  normal = statistics.NormalDist()
  quantiles = np.asarray([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
  # exp of a normal with deviation sigma has mean exp(mu + sigma^2 / 2)
  draw = lambda m: np.exp(np.log(m) - 0.18 + 0.6 * rng.permutation(quantiles))  # noqa: E731
  n = np.clip(draw(mean), 8, longest).astype(int)
  r = np.clip(draw(mean / 6), 4, n // 2).astype(int)
  return n, r


def run(options) -> Iterator[Row]:
  """One row: seconds for scoring and update of the same samples, packed (ours) and padded (peer)."""
  longest, count, size = (64, 8, "micro") if options.quick else (2560, 32, "quickstart")
  lengths, responses = step_lengths(count, longest=longest, mean=longest * 600 / 2560)
  config, mesh = workload.model(size), sharding.make_mesh()
  samples = workload.random_samples(config, lengths, responses, skill=max(longest // 40, 1))
  width = longest + max(longest // 40, 1)
  shapes = {
    "packed": [
      batching.RowShape(width * part // 4, width * part // 8, 1) for part in ((4,) if options.quick else (1, 2, 4))
    ],
    "padded": [batching.RowShape(width, width // 2, 1)],
  }
  place = {"packed": batching.pack, "padded": batching.one_per_row}
  states, steps, minibatches = {}, {}, {}
  fill = {}
  with jax.set_mesh(mesh):
    for way in shapes:
      states[way], steps[way], scoring = workload.trainer(config, mesh, method="seed")
      batches = batching.to_batches(samples, shapes[way], mesh, skills=True, place=place[way])
      minibatches[way], fill[way] = [batches], batching.row_fill(samples, batches)

    def score_and_update(way):
      ready = jax.block_until_ready(learn.score_all(minibatches[way], states[way].params, None, scoring))
      states[way], metrics = learn.update_all(steps[way], states[way], ready, scoring)
      jax.block_until_ready(states[way])
      return metrics["loss"]

    first = {way: score_and_update(way) for way in shapes}  # compiles, and shows that both compute the same
    if not np.allclose(first["packed"], first["padded"], rtol=1e-3, atol=1e-5):
      raise ValueError(f"the losses differ: {first}")
    taken = timing.in_turn({way: lambda way=way: score_and_update(way) for way in shapes}, options.repeats, warm_up=0)
  yield Row(
    "packing: scoring and update",
    timing.median(taken["packed"]),
    timing.median(taken["padded"]),
    timing.paired_ratio(taken["padded"], taken["packed"]),
    unit="s",
    goal=">= 2.5x",
    note=f"{count} samples of {np.mean(lengths):.0f} tokens on average, {max(lengths)} at most "
    f"({np.mean(responses):.0f} sampled), each with a skill; peer: one a row of {width}; tokens fill "
    f"{100 * fill['packed']:.0f} % of the packed and {100 * fill['padded']:.0f} % of the padded rows",
  )
