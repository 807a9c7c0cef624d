"""Games of echoes in seed_jax: its environment loop and engine, a transcript's cache kept from turn to turn."""

from __future__ import annotations

import time

from benchmarks import echo, workload
from benchmarks.peers import shared
from seed_jax import sharding


def main() -> None:
  flags = shared.flags(environments=shared.ENVIRONMENTS)
  config, mesh = workload.model(flags.size), sharding.make_mesh()
  sampler, play = echo.player(
    config,
    mesh,
    workload.params(config, mesh),
    slots=flags.environments,
    environments=flags.environments,
    capacity=512,
    capacity_buckets=(128, 256),  # a conversation begins in a small slot
    check_every=shared.NEW_TOKENS,  # a turn is rarely shorter
    refill=0.5,
  )
  seconds, tokens, first, computed = [], [], None, 0
  for iteration in range(flags.steps + 1):
    sampler.take_stats()
    began = time.perf_counter()
    trajectories = play(echo.episodes([shared.TURNS] * flags.environments), iteration)
    seconds.append(time.perf_counter() - began)
    first = shared.since_start() if first is None else first
    stats = sampler.take_stats()
    tokens.append(sum(t.response_tokens for t in trajectories))
    computed = stats.tokens_prefilled + stats.tokens_sampled
  shared.report(step=seconds[1:], tokens=tokens[1:], first_update=first, computed=computed)


if __name__ == "__main__":
  main()
