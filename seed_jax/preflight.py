"""Stage `preflight`: does this config fit that slice, how long will an iteration take, and what does it cost?

Needs no TPU: the programs of the run are compiled for the slice by its own compiler, which says what memory they take
and refuses what does not fit. Seconds are predicted from counts (`roofline`), never measured. Leaves preflight.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
from etils import epath

from seed_jax import preflight_plans as plans
from seed_jax import preflight_table, roofline, topologies
from seed_jax.metrics import say
from seed_jax.preflight_compile import GIB, Compiled, compile_program
from seed_jax.preflight_programs import Training, programs
from seed_jax.roofline import Plan, Work
from seed_jax.workdir import ConfigError, Workdir

LOOPS = {"score": 1, "update": 1, "decode": 1}  # of these, collectives are those of one micro-batch, of one token
OWN = {  # what of the memory that is taken throughout a program has among its own arguments or results
  "score": ("params",),
  "update": ("params",),
  "optimizer": ("params", "moments"),
  "prefill": ("actor", "cache"),
  "decode": ("actor", "cache"),
  "grow": ("cache",),
  "cast": ("params", "actor"),  # the old copy is gone by then, the new one is not there yet
  "place": (),  # its array is counted among the actor's, too: an upper bound
}


NOTHING = "none"  # config.preflight.programs: predictions alone, no compiler


class DoesNotFit(RuntimeError):
  """The config does not fit the slice; the message says what would."""


class Preflight(Workdir):
  """A work directory and a slice; makes this process one that compiles for TPUs."""

  def __init__(self, config, workdir, *, topology: str, **options):
    super().__init__(config, workdir, **options)
    self.slice = topologies.parse(topology)
    topologies.compile_only(needed=self.config.preflight.programs != NOTHING)

  def check(self) -> None:
    """Raises ConfigError or ValueError for a config that has no plan on the slice."""
    plans.check_sizes(self.config)
    plans.plan_of(self.config, self.slice)
    plans.work_of(self.config)

  @property
  def stamps(self) -> epath.Path:
    """Where it is kept what was compiled: beside the compiled programs of runs, or in the work directory."""
    return epath.Path(jax.config.jax_compilation_cache_dir or self.workdir) / "preflight"


def run_preflight(run: Preflight) -> dict:
  """Compiles, predicts, prints, and writes preflight.json; raises DoesNotFit, with advice, where it does not fit."""
  c = run.config.preflight
  plan, work, training = plans.plan_of(run.config, run.slice), plans.work_of(run.config), plans.training_of(run.config)
  names = [name for name in c.programs.split(",") if name]
  between = run.notice.check
  compiled = [] if c.programs == NOTHING else check(plan, training, names, run.stamps, say, between)
  found = {program.name: program for program in compiled}
  if "update" in found:
    plan = dataclasses.replace(plan, update_received=found["update"].received)
  result = summary(plan, work, training, found, price=c.price, least=c.fewest)
  if result["fits"] is False:
    result["advice"] = advice(plan, work, training, names, c.tries, run.stamps, say, between, least=c.fewest)
  print(preflight_table.text(result), flush=True)
  run.finish("preflight", result)
  if result["fits"] is False:
    raise DoesNotFit(f"the config does not fit {run.slice.name}: {result['advice']['text']}")
  return result


def check(
  plan: Plan, training: Training, names: Sequence[str], stamps, tell, between: Callable[[], None] = lambda: None
) -> Iterator[Compiled]:
  """The programs of these names (none: all) through the compiler, one by one; `between` is called before each and may
  raise. What is compiled by then is kept in `stamps`.
  """
  layers = plan.model.num_layers if plan.model.scan_layers else 1
  every = programs(plan, training)
  unknown = sorted(set(names) - set(every))
  if unknown:
    raise ConfigError(f"config.preflight.programs: {unknown[0]!r} is no program; there are {', '.join(every)}")
  for name, lower in every.items():
    if not names or name in names:
      between()
      tell(f"preflight: {name} on {plan.slice.name}")
      options = dict(target=plan.slice.name, layers=layers, loops=LOOPS.get(name, 0), stamps=stamps)
      yield compile_program(name, lower(), **options)


def total_bytes(plan: Plan, work: Work, training: Training, program: Compiled) -> float:
  """What a chip holds while a program runs: its own, and what else lies there through the whole iteration, or, while
  arrays go to the actors, between two programs.
  """
  held = roofline.resident_bytes(plan, work, training.capacity)
  if program.name == "place":
    held["cast"] = roofline.cast_bytes(plan)
  return program.peak + sum(size for name, size in held.items() if name not in OWN[program.name])


def advice(
  plan: Plan,
  work: Work,
  training: Training,
  names: Sequence[str],
  tries: int,
  stamps,
  tell,
  between: Callable[[], None] = lambda: None,
  *,
  least: int = 0,
) -> dict:
  """The fastest change of remat, rows, slots or actors that the compiler accepts, else the smallest slice that may do.

  At most `tries` changes are compiled, in the order of their predicted seconds, each up to what does not fit.
  """
  others = plans.candidates(plan, work, training.capacity)
  for other in others[:tries]:
    options = plans.settings(plan, other)
    tell("preflight: does it fit with " + " ".join(options) + "?")
    changed = plans.retrained(training, other)
    compiled = check(other, changed, names, stamps, lambda text: None, between)
    if all(total_bytes(other, work, changed, program) <= plan.slice.chip.hbm for program in compiled):
      return {"text": "it fits with " + " ".join(options), "options": options}
  fewest = plans.fewest_chips(plan, work, training.capacity, least=least)
  larger = f"{fewest.name} ({fewest.chips} chips) is the smallest slice for it" if fewest else "no slice holds it"
  said = f"of {len(others)} other choices of remat, rows, slots and actors {min(len(others), tries)} were compiled"
  return {"text": f"{said} and none fits; by the estimate {larger}", "options": []}


def summary(
  plan: Plan, work: Work, training: Training, found: dict[str, Compiled], *, price: float, least: int = 0
) -> dict:
  """preflight.json: memory by program, predicted seconds by phase, and what an iteration costs at `price` dollars a
  chip-hour. No slice of fewer chips than `least` is named, where the config's argument refuses those.
  """
  limit = plan.slice.chip.hbm
  held = roofline.resident_bytes(plan, work, training.capacity)
  phases = {phase.name: phase for phase in roofline.iteration(plan, work)}
  rows = {}
  for name, program in found.items():
    total, phase = total_bytes(plan, work, training, program), phases.get(name)
    rows[name] = {
      "peak_gib": program.peak / GIB,
      "with_rest_gib": total / GIB,
      "limit_gib": limit / GIB,
      "fits": total <= limit,
      "predicted_seconds": phase.seconds if phase else None,
      "mfu": phase.mfu(plan.slice) if phase else None,
      "collectives": program.counts,
      "received_gib": program.received / GIB,
      "compile_seconds": program.seconds,
      "known": program.again,
    }
  total = sum(phase.seconds for phase in phases.values())
  fewest = plans.fewest_chips(plan, work, training.capacity, least=least)
  return {
    "fits": all(row["fits"] for row in rows.values()) if rows else None,
    "topology": plan.slice.name,
    "chips": plan.slice.chips,
    "limit_gib": limit / GIB,
    "programs": rows,
    "held_gib": {name: size / GIB for name, size in held.items()},
    "phases": {name: _row(phase, plan) for name, phase in phases.items()},
    "predicted_seconds": total,
    "predicted_seconds_without_overlap": sum(phase.without_overlap for phase in phases.values()),
    "mfu": phases["update"].mfu(plan.slice),
    "dominates": max(phases.values(), key=lambda phase: phase.seconds).name,
    "chips_needed": fewest.chips if fewest else None,
    "cost_per_iteration": total / 3600 * plan.slice.chips * price if price else None,
    "work": dataclasses.asdict(work),
    "scaling": list(plans.scaling(plan, work, training.capacity, least=max(least, 16))),
  }


def _row(phase, plan):
  terms = {name: getattr(phase, name) for name in ("compute", "memory", "transfer", "latency")}
  more = {"dominates": phase.term, "mfu": phase.mfu(plan.slice)}
  return {"seconds": phase.seconds, "without_overlap": phase.without_overlap} | terms | more
