"""Stage `preflight`: does this config fit that slice, how long will an iteration take, and what does it cost?

Needs no TPU: the programs of the run are compiled for the slice by its own compiler, which says what memory they take
and refuses what does not fit. Seconds are predicted from counts (`roofline`), never measured. Leaves preflight.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
from etils import epath

from seed_jax import decode, learn, methods, optimizer, preflight_table, roofline, topologies, update
from seed_jax.metrics import say
from seed_jax.models.config import REMAT
from seed_jax.preflight_compile import GIB, Compiled, compile_program
from seed_jax.preflight_programs import Training, programs
from seed_jax.roofline import Plan, Work
from seed_jax.run import optimizer_config, preset_model, row_shapes
from seed_jax.topologies import Slice
from seed_jax.train import loss_config
from seed_jax.workdir import ConfigError, Workdir

LOOPS = {"score": 1, "update": 1, "decode": 1}  # of these the collectives of one pass of the outermost loop are counted
PHASE = {name: name for name in ("score", "update", "optimizer", "prefill", "decode", "reshard")}  # program -> phase
OWN = {  # what of the memory that is taken throughout a program has among its own arguments
  "score": ("params",),
  "update": ("params",),
  "optimizer": ("params", "moments"),
  "prefill": ("actor", "cache"),
  "decode": ("actor", "cache"),
  "grow": ("actor", "cache"),
  "reshard": ("params", "actor"),
}
TRIES = 6  # candidates that the search compiles


class DoesNotFit(RuntimeError):
  """The config does not fit the slice; the message says what would."""


class Preflight(Workdir):
  """A work directory and a slice; makes this process one that compiles for TPUs."""

  def __init__(self, config, workdir, *, topology: str, **options):
    super().__init__(config, workdir, **options)
    self.slice = topologies.parse(topology)
    topologies.compile_only()

  def check(self) -> None:
    """Raises ConfigError or ValueError for a config that has no plan on the slice."""
    plan_of(self.config, self.slice)
    work_of(self.config)

  @property
  def stamps(self) -> epath.Path:
    """Where it is kept what was compiled: beside the compiled programs of runs, or in the work directory."""
    return epath.Path(jax.config.jax_compilation_cache_dir or self.workdir) / "preflight"


def run_preflight(run: Preflight) -> dict:
  """Compiles, predicts, prints, and writes preflight.json; raises DoesNotFit, with advice, where it does not fit."""
  slice_ = run.slice
  plan, work, training = plan_of(run.config, slice_), work_of(run.config), training_of(run.config, slice_)
  stamps = run.stamps
  found = check(plan, work, training, stamps, say)
  plan = dataclasses.replace(plan, update_received=found["update"].received if "update" in found else 0.0)
  result = summary(plan, work, training, found, price=run.config.preflight.price)
  if not result["fits"]:
    result["advice"] = advice(plan, work, training, stamps, say)
  print(preflight_table.text(result), flush=True)
  run.finish("preflight", result)
  if not result["fits"]:
    raise DoesNotFit(f"the config does not fit {slice_.name}; {result['advice']['text']}")
  return result


# ---------------------------------------------------------------- from a config


def plan_of(config, slice_: Slice) -> Plan:
  """The meshes and sizes of a config on a slice; ConfigError where they are not of one size."""
  c, mesh, actors = config, config.mesh, config.actor_mesh
  chips = mesh.data * mesh.fsdp * mesh.tp
  if chips != slice_.chips:
    raise ConfigError(
      f"config.mesh {mesh.data}x{mesh.fsdp}x{mesh.tp} (data, fsdp, tp) has {chips} chips and {slice_.name} has "
      f"{slice_.chips}: choose the config's argument or config.mesh for this slice"
    )
  actor_tp = actors.tp or mesh.tp
  if actors.fsdp != 1 or slice_.host_chips % actor_tp:
    raise ConfigError(
      f"config.actor_mesh (fsdp={actors.fsdp}, tp={actor_tp}) does not lie within a host of {slice_.host_chips} chips"
    )
  if len(c.train.row_lengths) > 1:
    say(f"preflight: of {len(c.train.row_lengths)} row lengths the longest is compiled")
  shape = _shape(c, slice_)
  return Plan(
    model=preset_model(c),
    slice=slice_,
    data=mesh.data,
    fsdp=mesh.fsdp,
    tp=mesh.tp,
    actor_tp=actor_tp,
    row_length=shape.length,
    rows=shape.rows,
    slots=_slots(c.rollout.slots, slice_, actor_tp),
    moment_bytes=2 if c.train.optimizer.moment_dtype == "bfloat16" else 4,
  )


def _slots(total: int, slice_: Slice, actor_tp: int) -> int:
  """Slots of one host: config.rollout.slots are those of all hosts, and every copy of the weights has equally many."""
  copies = slice_.host_chips // actor_tp
  return max(math.ceil(total / slice_.hosts / copies), 1) * copies


def _shape(config, slice_):
  shards = config.mesh.data * config.mesh.fsdp
  return max(row_shapes(config.train, shards), key=lambda shape: shape.length)


def work_of(config) -> Work:
  """What an iteration of the config asks for; numbers of tokens are means, of config.preflight."""
  t, p, method = config.train, config.preflight, methods.get(config.method)
  return Work(
    episodes=t.tasks_per_iteration * t.group_size,
    turns=config.rollout.max_steps,
    window=config.rollout.mode == "window",
    skills=method.needs_skills,
    reference=bool(t.loss.kl_coef),
    minibatches=t.minibatches,
    workers=max(config.rollout.workers, 1),
    **{name: p[name] for name in p if name in {f.name for f in dataclasses.fields(Work)}},
  )


def training_of(config, slice_: Slice) -> Training:
  """All else that decides what is compiled."""
  c = config
  method, loss, model = methods.get(c.method), loss_config(c), preset_model(c)
  chain = optimizer.make_optimizer(optimizer_config(c.train.optimizer), c.train.iterations * c.train.minibatches)
  capacity = max(c.rollout.capacity, c.analysis.max_prompt + c.analysis.max_response)
  return Training(
    scoring=learn.Scoring(model, method, loss, c.train.rescore),
    step=update.make_update(model, update.MethodLoss(method, loss), chain, temperature=loss.temperature),
    optimizer=chain,
    shape=_shape(c, slice_),
    reference=bool(loss.kl_coef),
    minibatches=c.train.minibatches,
    sampling=decode.Sampling(loss.temperature, c.rollout.top_k, c.rollout.top_p),
    stop_ids=(model.eos_id or 0,),
    capacity=capacity,
    smaller=tuple(sorted(b for b in c.rollout.capacity_buckets if b < capacity)),
    prefill_tokens=c.rollout.prefill_tokens,
    prefill_width=max(c.rollout.prefill_buckets),
  )


# ---------------------------------------------------------------- does it fit


def check(
  plan: Plan, work: Work, training: Training, stamps, tell=lambda text: None, names=None
) -> dict[str, Compiled]:
  """Every program through the compiler, in the order of `names` (default: all); stops behind the first that it refuses."""
  layers = plan.model.num_layers if plan.model.scan_layers else 1
  found = {}
  for name, lower in programs(plan, training).items():
    if names is not None and name not in names:
      continue
    tell(f"preflight: {name} for {plan.slice.name}")
    found[name] = compile_program(name, lower(), layers=layers, loops=LOOPS.get(name, 0), stamps=stamps)
    if names is None:
      continue
    if total_bytes(plan, work, training, found[name]) > plan.slice.chip.hbm:
      break
  return found


def total_bytes(plan: Plan, work: Work, training: Training, program: Compiled) -> float:
  """What a chip holds while a program runs: its own, and what else lies there through the whole iteration."""
  held = roofline.resident_bytes(plan, work, training.capacity)
  return program.peak + sum(size for name, size in held.items() if name not in OWN[program.name])


# ---------------------------------------------------------------- what would fit


def advice(plan: Plan, work: Work, training: Training, stamps, tell) -> dict:
  """The fastest change of remat, rows, slots or actors that the compiler accepts, and the smallest slice that would do."""
  tried = 0
  for other in candidates(plan, work, training.capacity):
    if tried == TRIES:
      break
    tried += 1
    tell(f"preflight: would {_difference(plan, other)} fit?")
    changed = retrained(training, other)
    found = check(other, work, changed, stamps, names=("update", "score", "optimizer", "prefill", "decode", "reshard"))
    if max(total_bytes(other, work, changed, p) for p in found.values()) <= plan.slice.chip.hbm:
      options = settings(plan, other)
      return {"text": "it fits with " + " ".join(options), "options": options, "tried": tried}
  fewest = fewest_chips(plan, work, training.capacity)
  slices = (
    f"by the estimate {fewest.name} ({fewest.chips} chips) is the smallest slice" if fewest else "no slice is enough"
  )
  return {
    "text": f"no choice of remat, rows, slots and actors does on this slice: {slices}",
    "options": [],
    "tried": tried,
  }


def candidates(plan: Plan, work: Work, capacity: int) -> list[Plan]:
  """Plans with other remat, fewer rows, fewer slots or more chips an actor, the fastest first; none that is hopeless."""
  shards, host = plan.row_chips, plan.slice.host_chips
  rows = [n * shards for n in _halves(plan.rows // shards)]
  tps = [n for n in (1, 2, 4, 8) if host % n == 0 and n >= plan.actor_tp and plan.model.num_kv_heads % n == 0]
  out = []
  for remat, r, tp in itertools.product(REMAT, rows, tps or [plan.actor_tp]):
    for slots in _halves(max(plan.slots // (host // tp), 1)):
      model = dataclasses.replace(plan.model, remat=remat)
      out.append(dataclasses.replace(plan, model=model, rows=r, actor_tp=tp, slots=slots * (host // tp)))
  out = [p for p in out if p != plan and roofline.estimate(p, work, capacity) <= plan.slice.chip.hbm]
  return sorted(out, key=lambda p: sum(phase.seconds for phase in roofline.iteration(p, work)))


def _halves(n: int) -> list[int]:
  """n, n/2, n/4 ... 1."""
  return [n >> i for i in range(n.bit_length())]


def retrained(training: Training, plan: Plan) -> Training:
  """The same training for another plan of the same slice."""
  s = training.scoring
  scoring = dataclasses.replace(s, model=plan.model)
  step = update.make_update(
    plan.model, update.MethodLoss(s.method, s.loss), training.optimizer, temperature=s.loss.temperature
  )
  shape = dataclasses.replace(training.shape, rows=plan.rows)
  return dataclasses.replace(training, scoring=scoring, step=step, shape=shape)


def settings(plan: Plan, other: Plan) -> list[str]:
  """What to write on the command line to get from one plan to the other."""
  changed = {
    "model.remat": (plan.model.remat, other.model.remat),
    "train.micro_tokens": (plan.rows * plan.row_length, other.rows * plan.row_length),
    "rollout.slots": (plan.slots * plan.slice.hosts, other.slots * plan.slice.hosts),
    "actor_mesh.tp": (plan.actor_tp, other.actor_tp),
    "actor_mesh.data": (plan.slice.host_chips // plan.actor_tp, plan.slice.host_chips // other.actor_tp),
  }
  return [f"--config.{name}={new}" for name, (old, new) in changed.items() if new != old]


def _difference(plan, other):
  return ", ".join(option.removeprefix("--config.") for option in settings(plan, other))


def on_slice(plan: Plan, slice_: Slice) -> Plan:
  """The plan on another slice of the same chip: as many rows and slots a chip, `fsdp` as wide as it gets."""
  fsdp = slice_.chips // (plan.data * plan.tp)
  rows = plan.rows // plan.row_chips * plan.data * fsdp
  slots = max(plan.slots // plan.slice.host_chips, 1) * slice_.host_chips
  return dataclasses.replace(plan, slice=slice_, fsdp=fsdp, rows=rows, slots=slots, update_received=0.0)


def fewest_chips(plan: Plan, work: Work, capacity: int) -> Slice | None:
  """The smallest slice of the same chip that holds the model with full remat, one row a shard and one slot a copy."""
  chip = plan.slice.chip
  for slice_ in sorted((topologies.parse(f"{chip.name}:{shape}") for shape in chip.shapes), key=lambda s: s.chips):
    if slice_.chips % (plan.data * plan.tp):
      continue
    least = on_slice(plan, slice_)
    for tp in (1, 2, 4):
      if slice_.host_chips % tp or plan.model.num_kv_heads % tp:
        continue
      model = dataclasses.replace(plan.model, remat="full")
      small = dataclasses.replace(least, model=model, rows=least.row_chips, slots=slice_.host_chips // tp, actor_tp=tp)
      if roofline.estimate(small, work, capacity) <= chip.hbm:
        return slice_
  return None


# ---------------------------------------------------------------- what it says


def summary(plan: Plan, work: Work, training: Training, found: dict[str, Compiled], *, price: float) -> dict:
  """preflight.json."""
  limit = plan.slice.chip.hbm
  held = roofline.resident_bytes(plan, work, training.capacity)
  phases = {phase.name: phase for phase in roofline.iteration(plan, work)}
  rows = {}
  for name, program in found.items():
    total, phase = total_bytes(plan, work, training, program), phases.get(PHASE.get(name, ""))
    rows[name] = {
      "peak_gib": program.peak / GIB,
      "with_rest_gib": total / GIB,
      "limit_gib": limit / GIB,
      "fits": not program.needed and total <= limit,
      "predicted_seconds": phase.seconds if phase else None,
      "mfu": phase.mfu(plan.slice) if phase else None,
      "collectives": program.counts,
      "received_gib": program.received / GIB,
      "compile_seconds": program.seconds,
      "known": program.again,
    }
  total = sum(phase.seconds for phase in phases.values())
  fewest = fewest_chips(plan, work, training.capacity)
  learning = phases["update"], phases["optimizer"]
  return {
    "fits": all(row["fits"] for row in rows.values()),
    "topology": plan.slice.name,
    "chips": plan.slice.chips,
    "limit_gib": limit / GIB,
    "programs": rows,
    "resident_gib": {name: size / GIB for name, size in held.items()},
    "phases": {name: phase_row(phase, plan.slice) for name, phase in phases.items()},
    "predicted_seconds": total,
    "predicted_seconds_without_overlap": sum(phase.without_overlap for phase in phases.values()),
    "mfu": learning[0].useful / sum(p.seconds for p in learning) / (plan.slice.chips * plan.slice.chip.flops),
    "dominates": max(phases.values(), key=lambda phase: phase.seconds).name,
    "chips_needed": fewest.chips if fewest else None,
    "cost_per_iteration": total / 3600 * plan.slice.chips * price if price else None,
    "work": dataclasses.asdict(work),
  }


def phase_row(phase: roofline.Phase, slice_: Slice) -> dict:
  """A phase for preflight.json."""
  terms = {name: getattr(phase, name) for name in ("compute", "memory", "transfer", "latency")}
  return (
    {"seconds": phase.seconds, "without_overlap": phase.without_overlap}
    | terms
    | {
      "dominates": phase.term,
      "mfu": phase.mfu(slice_),
    }
  )


def scaling(plan: Plan, work: Work, *, least: int = 16, most: int = 512) -> Iterator[dict]:
  """The same plan on slices of `least` to `most` chips, nothing compiled: as many episodes a chip (weak scaling), and the
  same episodes on all (strong scaling).
  """
  chip = plan.slice.chip
  for slice_ in sorted((topologies.parse(f"{chip.name}:{shape}") for shape in chip.shapes), key=lambda s: s.chips):
    if not least <= slice_.chips <= most:
      continue
    other = on_slice(plan, slice_)
    more = dataclasses.replace(work, episodes=max(work.episodes * slice_.chips // plan.slice.chips, 1))
    weak, strong = roofline.iteration(other, more), roofline.iteration(other, work)
    update = next(phase for phase in weak if phase.name == "update")
    longest = max(weak, key=lambda phase: phase.seconds)
    yield {
      "topology": slice_.name,
      "chips": slice_.chips,
      "episodes": more.episodes,
      "seconds": sum(phase.seconds for phase in weak),
      "dominates": f"{longest.name} ({longest.term})",
      "update_mfu": update.mfu(slice_),
      "chip_hours": sum(phase.seconds for phase in weak) * slice_.chips / 3600,
      "strong_seconds": sum(phase.seconds for phase in strong),
    }
