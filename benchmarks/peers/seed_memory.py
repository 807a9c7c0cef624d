"""Two SEED steps on long rows; what counts is the peak memory in the report."""

from __future__ import annotations

import jax

from benchmarks import workload
from benchmarks.peers import shared
from seed_jax import batching, learn, sharding


def main() -> None:
  flags = shared.flags(length=512)
  config, mesh = workload.model(flags.size), sharding.make_mesh()
  skill = flags.length // 8
  samples = workload.random_samples(config, [flags.length - skill] * 4, [flags.length // 4] * 4, skill=skill)
  shapes = [batching.RowShape(flags.length, flags.length // 2, 1)]
  state, step, scoring = workload.trainer(config, mesh, method="seed")
  with jax.set_mesh(mesh):
    batches = batching.to_batches(samples, shapes, mesh, skills=True)
    for _ in range(2):
      scored = learn.score_all([batches], state.params, None, scoring)
      state, _ = learn.update_all(step, state, scored, scoring)
  jax.block_until_ready(state)
  shared.report()


if __name__ == "__main__":
  main()
