"""How full the slots are where episodes differ in length, and what more environments than slots bring."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import echo, timing, workload
from benchmarks.peers import shared
from benchmarks.table import Row
from seed_jax import sharding

ABOUT = "share of slots at work on episodes of 1x to 5x turns; throughput by number of environments"


def run(options) -> Iterator[Row]:
  """Utilisation and tokens a second at one, two and four environments a slot, the same episodes each time."""
  size, slots, games, least = ("micro", 2, 6, 1) if options.quick else ("small", 16, 96, 2)
  config, mesh = workload.model(size), sharding.make_mesh()
  params = workload.params(config, mesh)
  turns = echo.varied_turns(games, least=least, times=5)
  capacity = 128 + max(turns) * (shared.NEW_TOKENS + 24)
  times = (1, 2, 4)
  players = {
    t: echo.player(config, mesh, params, slots=slots, environments=t * slots, capacity=capacity, smallest=min(4, slots))
    for t in times
  }
  tokens, stats = {}, {}

  def play(t):
    engine, start = players[t]
    engine.take_stats()
    trajectories = start(echo.episodes(turns))
    stats[t] = engine.take_stats()
    tokens[t] = sum(trajectory.response_tokens for trajectory in trajectories)

  taken = timing.in_turn({t: lambda t=t: play(t) for t in times}, options.repeats)
  spread = f"{games} episodes of {min(turns)} to {max(turns)} turns, {slots} slots"
  yield Row(
    "utilisation: slots at work",
    100 * stats[1].utilisation,
    unit="%",
    goal=">= 90 %",
    note=f"{spread}, as many environments; decoded slots that held a request",
  )
  for t in times:
    rates = [tokens[t] / seconds for seconds in taken[t]]
    yield Row(
      f"utilisation: environments {t}x slots",
      timing.median(rates),
      timing.median([tokens[1] / s for s in taken[1]]) if t > 1 else None,
      timing.paired_ratio(taken[1], taken[t]) if t > 1 else None,
      unit="tokens/s",
      goal=">= 1x" if t > 1 else "",
      note=f"{spread}; peer: as many environments as slots; slots at work "
      + ", ".join(f"{k}x: {100 * stats[k].utilisation:.0f} %" for k in times),
    )
