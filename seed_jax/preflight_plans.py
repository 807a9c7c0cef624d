"""From a config to a plan on a slice, and from a plan to others: of the same slice, or of more chips."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from seed_jax import actors, decode, learn, methods, optimizer, roofline, topologies, update
from seed_jax.batching import RowShape
from seed_jax.models.config import REMAT
from seed_jax.preflight_programs import Training
from seed_jax.roofline import Plan, Work
from seed_jax.run import optimizer_config, preset_model, row_shapes
from seed_jax.topologies import Slice
from seed_jax.train_config import loss_config
from seed_jax.workdir import ConfigError

# ---------------------------------------------------------------- from a config


def plan_of(config, slice_: Slice) -> Plan:
  """The meshes and sizes of a config on a slice; ValueError where they are not of one size, or of none."""
  c, mesh = config, config.mesh
  chips = mesh.data * mesh.fsdp * mesh.tp
  if chips != slice_.chips:
    raise ConfigError(
      f"config.mesh {mesh.data}x{mesh.fsdp}x{mesh.tp} (data, fsdp, tp) has {chips} chips and {slice_.name} has "
      f"{slice_.chips}: choose the config's argument or config.mesh for this slice"
    )
  learner = dict(data=mesh.data, fsdp=mesh.fsdp, tp=mesh.tp)
  own = actors.actor_shape(learner, slice_.hosts, c.get("actor_mesh"))
  actor = learner if own is None else own
  row_shards = actor["data"] * actor["fsdp"]
  shape, sft = longest_rows(c), longest_rows(c, "sft")
  return Plan(
    model=preset_model(c),
    slice=slice_,
    data=mesh.data,
    fsdp=mesh.fsdp,
    tp=mesh.tp,
    actor_tp=actor["tp"],
    actor_fsdp=actor["fsdp"],
    own_copy=own is not None,
    row_length=shape.length,
    responses=shape.responses,
    widening=max(shape.skill_length, shape.length) / shape.length,
    rows=shape.rows,
    sft_length=sft.length,
    sft_rows=sft.rows,
    # config.rollout.slots are those of all hosts, and every row shard of a host has equally many
    slots=max(math.ceil(c.rollout.slots / slice_.hosts / row_shards), 1) * row_shards,
    moment_bytes=2 if c.train.optimizer.moment_dtype == "bfloat16" else 4,
  )


def check_sizes(config) -> None:
  """Raises ConfigError for numbers of which there is no plan."""
  if config.rollout.slots < 1:
    raise ConfigError(f"config.rollout.slots={config.rollout.slots}: nothing is sampled without a slot; give 1 or more")
  for name in ("sft", "train"):
    tokens, longest = config[name].micro_tokens, max(config[name].row_lengths)
    if tokens < longest:
      raise ConfigError(
        f"config.{name}.micro_tokens={tokens} is less than a row of {longest} tokens; give that or more"
      )
  if config.preflight.price < 0:
    raise ConfigError(f"config.preflight.price={config.preflight.price} is negative; give dollars a chip-hour, or 0")


def longest_rows(config, section: str = "train") -> RowShape:
  """The row shape of training that takes most memory, that of Stage 1 with `section` "sft"."""
  return max(row_shapes(config[section], config.mesh.data * config.mesh.fsdp), key=lambda shape: shape.length)


def work_of(config) -> Work:
  """What an iteration of the config asks for; the mean numbers of tokens are those of config.preflight."""
  t, p, method = config.train, config.preflight, methods.get(config.method)
  return Work(
    episodes=t.tasks_per_iteration * t.group_size,
    turns=config.rollout.max_steps,
    window=config.rollout.mode == "window",
    skills=method.needs_skills,
    reference=bool(t.loss.kl_coef),
    minibatches=t.minibatches,
    workers=max(config.rollout.workers, 1),
    **{f.name: p[f.name] for f in dataclasses.fields(Work) if f.name in p},
  )


def capacity_of(config) -> int:
  """Tokens of a slot: a conversation's, or a request for a skill and its answer."""
  return max(config.rollout.capacity, config.analysis.max_prompt + config.analysis.max_response)


def training_of(config) -> Training:
  """All else that decides what is compiled."""
  c = config
  method, loss, model = methods.get(c.method), loss_config(c), preset_model(c)
  chain = optimizer.make_optimizer(optimizer_config(c.train.optimizer), c.train.iterations * c.train.minibatches)
  capacity = capacity_of(c)
  return Training(
    scoring=learn.Scoring(model, method, loss, c.train.rescore),
    step=update.make_update(model, update.MethodLoss(method, loss), chain, temperature=loss.temperature),
    optimizer=chain,
    shape=longest_rows(c),
    reference=bool(loss.kl_coef),
    minibatches=c.train.minibatches,
    sampling=decode.Sampling(loss.temperature, c.rollout.top_k, c.rollout.top_p),
    stop_ids=(model.eos_id or 0,),
    capacity=capacity,
    smaller=tuple(sorted(b for b in c.rollout.capacity_buckets if b < capacity)),
    prefill_tokens=c.rollout.prefill_tokens,
    prefill_width=max(c.rollout.prefill_buckets),
  )


# ---------------------------------------------------------------- other choices on the same slice


def candidates(plan: Plan, work: Work, capacity: int) -> list[Plan]:
  """Plans with other remat, fewer rows, fewer slots or more chips an actor, the fastest first, and none that is
  hopeless by the estimate.
  """
  shards, host = plan.row_chips, plan.slice.host_chips
  rows = [n * shards for n in _halves(plan.rows // shards)]
  out = []
  for remat, r, tp in itertools.product(REMAT, rows, _actor_tps(plan, plan.slice)):
    for slots in _halves(max(plan.slots // (host // tp), 1)):
      model = dataclasses.replace(plan.model, remat=remat)
      out.append(dataclasses.replace(with_actors(plan, tp), model=model, rows=r, slots=slots * (host // tp)))
  out = [p for p in out if p != plan and roofline.fits(p, work, capacity, spare=0.0)]
  return sorted(out, key=lambda p: seconds(p, work))


def _actor_tps(plan, slice_):
  """Chips that a copy of the weights may lie over, the plan's or more: they divide a host and the key/value heads."""
  more = (n for n in (1, 2, 4, 8) if slice_.host_chips % n == 0 and plan.model.num_kv_heads % n == 0)
  return sorted({n for n in more if n > plan.actor_tp} | {min(plan.actor_tp, slice_.host_chips)})


def with_actors(plan: Plan, tp: int) -> Plan:
  """The same plan with a copy of the weights over `tp` chips, or as it is where they lie over so many already."""
  return plan if tp == plan.actor_tp else dataclasses.replace(plan, actor_tp=tp, actor_fsdp=1, own_copy=True)


def _halves(n: int) -> list[int]:
  """n, n/2, n/4 ... 1."""
  return [n >> i for i in range(n.bit_length())]


def seconds(plan: Plan, work: Work) -> float:
  """Of an iteration."""
  return sum(phase.seconds for phase in roofline.iteration(plan, work))


def retrained(training: Training, plan: Plan) -> Training:
  """The same training for another plan of the same slice."""
  s = training.scoring
  loss = update.MethodLoss(s.method, s.loss)
  return dataclasses.replace(
    training,
    scoring=dataclasses.replace(s, model=plan.model),
    step=update.make_update(plan.model, loss, training.optimizer, temperature=s.loss.temperature),
    shape=dataclasses.replace(training.shape, rows=plan.rows),
  )


def settings(plan: Plan, other: Plan) -> list[str]:
  """What to write on the command line to get from one plan to the other."""
  hosts = plan.slice.hosts
  changed = {
    "model.remat": (plan.model.remat, other.model.remat),
    "train.micro_tokens": (plan.rows * plan.row_length, other.rows * plan.row_length),
    "rollout.slots": (plan.slots * hosts, other.slots * hosts),
    **{f"actor_mesh.{axis}": (plan.actor_shape.get(axis), size) for axis, size in other.actor_shape.items()},
  }
  return [f"--config.{name}={new}" for name, (old, new) in changed.items() if new != old]


# ---------------------------------------------------------------- other slices


def slices(plan: Plan) -> list[Slice]:
  """All slices of the plan's chip over which its learner divides, the smallest first."""
  chip = plan.slice.chip
  every = (topologies.parse(f"{chip.name}:{shape}") for shape in chip.shapes)
  return sorted((s for s in every if s.chips % (plan.data * plan.tp) == 0), key=lambda s: s.chips)


def on_slice(plan: Plan, slice_: Slice) -> Plan:
  """The plan on another slice of the same chip: as many rows and slots a chip, `fsdp` as wide as it gets. Every row
  shard of a host has a slot at the least. On its own slice the plan is what it was.
  """
  if slice_ == plan.slice:
    return plan
  fsdp = slice_.chips // (plan.data * plan.tp)
  rows, sft_rows = (n // plan.row_chips * plan.data * fsdp for n in (plan.rows, plan.sft_rows))
  actor, copies = dict(actor_fsdp=fsdp), fsdp * plan.data  # of one host, on the learner's mesh
  if plan.own_copy or slice_.hosts > 1:
    tp = math.gcd(plan.actor_tp, slice_.host_chips)
    inner = math.gcd(plan.actor_fsdp, slice_.host_chips // tp) if plan.own_copy else 1
    actor, copies = dict(actor_fsdp=inner, actor_tp=tp, own_copy=True), slice_.host_chips // tp
  slots = max(plan.slots * slice_.host_chips // (plan.slice.host_chips * copies), 1) * copies
  sizes = dict(rows=rows, sft_rows=sft_rows, slots=slots)
  return dataclasses.replace(plan, slice=slice_, fsdp=fsdp, update_received=0.0, **sizes, **actor)


def fewest_chips(plan: Plan, work: Work, capacity: int, *, least: int = 0) -> Slice | None:
  """The smallest slice of the same chip, of `least` chips or more, that by the estimate holds the model with full
  remat, one row a shard and one slot for every copy of the weights, and leaves `roofline.SPARE` of its memory free.
  """
  model = dataclasses.replace(plan.model, remat="full")
  one = dict(model=model, rows=plan.row_chips, sft_rows=plan.row_chips if plan.sft_rows else 0)
  for slice_ in slices(plan):
    smallest = on_slice(dataclasses.replace(plan, **one), slice_)
    for tp in _actor_tps(plan, slice_):
      small = dataclasses.replace(with_actors(smallest, tp), slots=slice_.host_chips // tp)
      if slice_.chips >= least and roofline.fits(small, work, capacity):
        return slice_
  return None


def fitted(plan: Plan, work: Work, capacity: int) -> Plan | None:
  """The plan, or, where it leaves too little free by the estimate, that with the fastest policy of remat that does."""
  others = (dataclasses.replace(plan, model=dataclasses.replace(plan.model, remat=remat)) for remat in REMAT)
  kept = lambda p: roofline.kept_bytes(p.model, 1)  # noqa: E731
  less = sorted((p for p in others if kept(p) < kept(plan)), key=kept, reverse=True)
  return next((p for p in (plan, *less) if roofline.fits(p, work, capacity)), None)


def scaling(plan: Plan, work: Work, capacity: int, *, least: int = 16, most: int = 512) -> Iterator[dict]:
  """The same plan on the slices of `least` to `most` chips that hold it (`fitted`), nothing compiled: as many episodes
  a chip (weak scaling), and the same episodes on all (strong scaling). Its own slice is as it is planned.
  """
  for slice_ in slices(plan):
    other = plan if slice_ == plan.slice else fitted(on_slice(plan, slice_), work, capacity)
    if other is None or not least <= slice_.chips <= most:
      continue
    more = dataclasses.replace(work, episodes=max(work.episodes * slice_.chips // plan.slice.chips, 1))
    phases = roofline.iteration(other, more)
    learning = next(phase for phase in phases if phase.name == "update")
    longest = max(phases, key=lambda phase: phase.seconds)
    total = seconds(other, more)
    yield {
      "topology": slice_.name,
      "chips": slice_.chips,
      "episodes": more.episodes,
      "seconds": total,
      "dominates": f"{longest.name} ({longest.term})",
      "update_mfu": learning.mfu(slice_),
      "chip_hours": total * slice_.chips / 3600,
      "strong_seconds": seconds(other, work),
    }
