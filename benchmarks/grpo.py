"""GRPO end to end, ours and each peer in turn: 4 prompts x 4 members x 32 tokens, KL to a frozen reference, float32."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import process, timing
from benchmarks.table import Row

ABOUT = "GRPO beside its peers: generation, update, whole step, cold start, memory"

# timed steps of one process, after the first one, so that each takes seconds and not minutes
STEPS = {"micro": 2, "tiny": 24, "small": 5}
PEER_STEPS = {("trl", "tiny"): 6, ("trl", "small"): 2}

# (row, unit, what a run's report gives for it, whether more is better)
QUANTITIES = (
  ("generation", "tokens/s", lambda r: timing.median(token_rates(r)), True),
  ("update", "s", lambda r: timing.median(r["update"]) if "update" in r else None, False),
  ("scoring and update", "s", lambda r: timing.median(scoring_and_update(r)), False),
  ("step", "s", lambda r: timing.median(r["step"]), False),
  ("start to first update", "s", lambda r: r["first_update"], False),
  ("peak memory", "MiB", lambda r: r["peak_mib"], False),
)
GOALS = {
  ("tunix", "small", "generation"): ">= 3x",
  ("tunix", "tiny", "generation"): ">= 1.5x",
  ("tunix", "small", "update"): ">= 2x",
  ("tunix", "tiny", "start to first update"): ">= 2x",
  ("tunix", "small", "start to first update"): ">= 2x",
  ("trl", "tiny", "step"): ">= 20x",
  ("trl", "small", "step"): ">= 8x",
}
NOTES = {
  "update": "the reference's log-probabilities are not in it",
  "start to first update": "from the start of the process, no compilation cache on either side",
  "peak memory": "resident, of the whole process",
}


def token_rates(report: dict) -> list[float]:
  """Sampled tokens a second of every step; what an early stop token left out is not counted on any side."""
  return [t / s for t, s in zip(report["tokens"], report["generation"], strict=False)]


def scoring_and_update(report: dict) -> list[float]:
  """Seconds a step of both; what a driver cannot tell apart it reports under this name."""
  if "scoring_and_update" in report:
    return report["scoring_and_update"]
  return [s + u for s, u in zip(report["scoring"], report["update"], strict=False)]


def run(options) -> Iterator[Row]:
  """For every size: rows for each peer, or for ours alone where none was asked for."""
  for size in ("micro",) if options.quick else ("tiny", "small"):
    yield from compare(
      {name: ("seed_grpo" if name == "ours" else f"{name}_grpo") for name in ("ours", *options.peers)},
      size,
      repeats=1 if options.quick else options.repeats,
      steps={name: PEER_STEPS.get((name, size), STEPS[size]) for name in ("ours", *options.peers)},
      quantities=QUANTITIES,
      title=f"grpo {size}",
      goals=GOALS,
      notes=NOTES,
    )


def compare(modules, size, *, repeats, steps, quantities, title, goals, notes) -> Iterator[Row]:
  """Runs the drivers `modules` (system -> module) in turn, `repeats` rounds, and yields the rows of every peer.

  A peer that cannot be run gives one row that says why, and is left out of the rounds that follow. Ours must run.
  """
  reports = {name: [] for name in modules}
  broken: dict[str, str] = {}
  for round_number in range(repeats):
    for name, module in modules.items():
      if name in broken:
        continue
      timing.say(f"  {title}: {name}, round {round_number + 1} of {repeats}")
      try:
        reports[name].append(process.drive(name, module, f"--size={size}", f"--steps={steps[name]}"))
      except process.PeerError as error:
        if name == "ours":
          raise
        broken[name] = str(error)
        timing.say(f"  {error}")
  peers = [name for name in modules if name != "ours"] or [None]
  for peer in peers:
    if peer in broken:
      yield Row(f"{title} vs {peer}", note=broken[peer])
    if peer is None or reports[peer]:
      yield from _rows(reports["ours"], reports.get(peer, []), peer, size, quantities, title, goals, notes)


def _rows(ours, theirs, peer, size, quantities, title, goals, notes):
  for quantity, unit, value, more in quantities:
    mine = [v for v in map(value, ours) if v is not None]
    other = [v for v in map(value, theirs) if v is not None]
    if not mine or (peer and not other):
      continue
    ratio = timing.paired_ratio(*((mine, other) if more else (other, mine))) if peer else None
    yield Row(
      f"{title}: {quantity}" + (f" vs {peer}" if peer else ""),
      timing.median(mine),
      timing.median(other),
      ratio,
      unit=unit,
      goal=goals.get((peer, size, quantity), ""),
      note=notes.get(quantity, ""),
    )
