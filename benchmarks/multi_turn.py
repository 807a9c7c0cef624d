"""Eight turns in sixteen environments with a growing transcript: ours beside tunix, transcript beside window."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import echo, timing, workload
from benchmarks.grpo import compare, token_rates
from benchmarks.peers import shared
from benchmarks.table import Row
from seed_jax import sharding

ABOUT = "8 turns x 16 environments end to end, beside tunix's agentic mode; tokens computed by window and transcript"

QUANTITIES = (
  ("end to end", "tokens/s", lambda r: timing.median(token_rates(r | {"generation": r["step"]})), True),
  ("start to first games", "s", lambda r: r["first_update"], False),
)
NOTES = {
  "end to end": f"{shared.ENVIRONMENTS} environments x {shared.TURNS} turns x {shared.NEW_TOKENS} tokens, "
  "sampled tokens a second of all, environments included",
}


def run(options) -> Iterator[Row]:
  """Rows against tunix where it was asked for (TRL has no such loop), then our two modes."""
  modules = {"ours": "seed_multi_turn"} | ({"tunix": "tunix_multi_turn"} if "tunix" in options.peers else {})
  for size in ("micro",) if options.quick else ("tiny", "small"):
    yield from compare(
      modules,
      size,
      repeats=1 if options.quick else options.repeats,
      steps=dict.fromkeys(modules, 1 if size != "tiny" else 3),
      quantities=QUANTITIES,
      title=f"multi_turn {size}",
      goals={("tunix", size, "end to end"): ">= 5x"},
      notes=NOTES,
    )
  yield from modes("micro" if options.quick else "small", 4 if options.quick else shared.ENVIRONMENTS, options)


def modes(size: str, environments: int, options) -> Iterator[Row]:
  """Tokens computed (read and sampled) and tokens a second, transcript (ours) against window (peer)."""
  config, mesh = workload.model(size), sharding.make_mesh()
  params = workload.params(config, mesh)
  players = {
    mode: echo.player(config, mesh, params, slots=environments, environments=environments, capacity=512, mode=mode)
    for mode in ("transcript", "window")
  }
  stats, tokens = {}, {}

  def play(mode):
    engine, start = players[mode]
    engine.take_stats()
    trajectories = start(echo.episodes([shared.TURNS] * environments))
    stats[mode] = engine.take_stats()
    tokens[mode] = sum(t.response_tokens for t in trajectories)

  taken = timing.in_turn({mode: lambda mode=mode: play(mode) for mode in players}, options.repeats)
  computed = {mode: s.tokens_prefilled + s.tokens_sampled for mode, s in stats.items()}
  reused = ", ".join(f"{mode} {s.tokens_reused:,}" for mode, s in stats.items())
  yield Row(
    "multi_turn: tokens computed, transcript against window",
    computed["transcript"],
    computed["window"],
    computed["window"] / computed["transcript"],
    unit="tokens",
    goal=">= 3x",
    note=f"read and sampled, {size}, {environments} environments x {shared.TURNS} turns; a window shows the "
    f"task and the last {echo.HISTORY} pairs; tokens taken over from a cache: {reused}",
  )
  yield Row(
    "multi_turn: end to end, transcript against window",
    tokens["transcript"] / timing.median(taken["transcript"]),
    tokens["window"] / timing.median(taken["window"]),
    timing.paired_ratio(taken["window"], taken["transcript"]),
    unit="tokens/s",
    note="sampled tokens a second",
  )
