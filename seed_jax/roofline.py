"""How long an iteration should take on a slice: operations, bytes and transfers by hand, over what a chip can do.

A compiler's own count does not serve: it takes the body of a loop once, and kernels for nothing. Every phase takes
  max(operations / (flops * efficiency), bytes / (bandwidth * 0.8), transferred / (links * link * 0.9)),
that is, transfers hide behind arithmetic. Where none do, the sum is what it takes; both are given.

Shapes: T tokens of a row, D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary, L
layers.
"""

from __future__ import annotations

import dataclasses
import math

from seed_jax import ops
from seed_jax.counts import (
  computed_again,
  forward_flops,
  head_params,
  kept_bytes,
  kv_bytes,
  layer_params,
  num_params,
  training_flops,
)
from seed_jax.models.config import SAVED, ModelConfig
from seed_jax.topologies import Slice

MEMORY_SHARE = 0.8  # of an HBM's bandwidth that streaming reads reach (decode of arXiv:2604.15464: 0.86)
LINK_SHARE = 0.9  # of a link's
HOP = 1e-6  # seconds that one step of a ring takes, however little it carries
SPARE = 0.07  # of a chip's memory, what is left free by the estimate wherever a slice is offered
ATTENTION_BLOCK = 512  # of queries and of keys; on the diagonal a block is computed whole


# ---------------------------------------------------------------- what is run, and where


@dataclasses.dataclass(frozen=True)
class Work:
  """One iteration, in means over its samples; a sample is a turn (window mode) or an episode (transcript mode).

  The default numbers of tokens are those of ALFWorld in the paper's setting (SDAR's log of Qwen2.5-3B: 599 tokens a
  sample, of which a fifth is sampled).
  """

  episodes: int = 128
  turns: float = 30
  prompt: float = 480  # tokens that a turn adds to read
  response: float = 120  # tokens sampled in a turn
  analysis_prompt: float = 3000  # tokens that the request for a skill adds to read
  analysis_response: float = 250
  window: bool = True
  skills: bool = True  # whether the method scores a skill context
  reference: bool = True  # whether the loss has a KL term
  minibatches: int = 1
  fill: float = 0.95  # share of the columns of packed rows that hold a token
  environment_seconds: float = 0.08  # of one environment step (TextWorld takes 10-15 steps a second)
  workers: int = 32  # environment processes of one host

  @property
  def samples(self) -> float:
    return self.episodes * (self.turns if self.window else 1)

  @property
  def length(self) -> float:
    """Tokens of a sample."""
    return (self.prompt + self.response) * (1 if self.window else self.turns)

  @property
  def targets(self) -> float:
    """Sampled tokens of a sample."""
    return self.response * (1 if self.window else self.turns)


@dataclasses.dataclass(frozen=True)
class Plan:
  """A model on a slice: the learner's mesh over all chips, the actors' over those of one host, and their sizes."""

  model: ModelConfig
  slice: Slice
  data: int
  fsdp: int
  tp: int
  actor_tp: int
  row_length: int
  responses: int  # of a row: columns for which there are logits
  rows: int  # of a micro-batch, on all chips
  slots: int  # of one host
  sft_length: int = 0  # of a row in Stage 1; 0: not planned
  sft_rows: int = 0  # of a micro-batch there, on all chips
  widening: float = 1.0  # length of a row in the skill context, where scored in pairs of both, over row_length
  gather_bytes: int = 2  # of a weight that `fsdp` gathers: 2 where it is cast before, 4 where after
  gradient_bytes: int = 2  # of a weight's gradient that is summed and scattered over `fsdp`, see `ops.product`
  moment_bytes: int = 4
  actor_fsdp: int = 1
  own_copy: bool = True  # of the weights, in bfloat16, for actors; else they read the learner's
  update_received: float = 0.0  # bytes that a chip receives for a micro-batch's gradients, where a compiler has told

  @property
  def row_chips(self) -> int:
    """Row shards of the learner's mesh."""
    return self.data * self.fsdp

  @property
  def actor_shape(self) -> dict[str, int]:
    """Sizes of a host's mesh, as config.actor_mesh has them; none where actors play on the learner's."""
    if not self.own_copy:
      return {}
    data = self.slice.host_chips // (self.actor_fsdp * self.actor_tp)
    return dict(data=data, fsdp=self.actor_fsdp, tp=self.actor_tp)


@dataclasses.dataclass(frozen=True)
class Phase:
  """Seconds of one phase of an iteration, by what could bound it; `useful` operations over the slice."""

  name: str
  compute: float = 0.0
  memory: float = 0.0
  transfer: float = 0.0
  latency: float = 0.0  # of collectives and of the environments, which nothing hides
  useful: float = 0.0

  @property
  def seconds(self) -> float:
    return max(self.compute, self.memory, self.transfer) + self.latency

  @property
  def without_overlap(self) -> float:
    return self.compute + self.memory + self.transfer + self.latency

  @property
  def term(self) -> str:
    """What dominates."""
    terms = {name: getattr(self, name) for name in ("compute", "memory", "transfer", "latency")}
    return max(terms, key=terms.get)

  def mfu(self, slice_: Slice) -> float:
    """Model FLOPs utilisation: useful operations a second as a share of the peak; recomputation is not useful."""
    return self.useful / self.seconds / (slice_.chips * slice_.chip.flops) if self.seconds else 0.0

  def times(self, factor: float) -> Phase:
    return dataclasses.replace(
      self, **{f: getattr(self, f) * factor for f in ("compute", "memory", "transfer", "latency", "useful")}
    )


# ---------------------------------------------------------------- the phases


def _rate(plan: Plan) -> tuple[float, float, float]:
  chip = plan.slice.chip
  links = max(plan.slice.links, 1)
  return chip.flops * chip.efficiency, chip.bandwidth * MEMORY_SHARE, chip.link * links * LINK_SHARE


def _ring(n: int) -> float:
  """Share of a gathered array that a chip receives from others."""
  return (n - 1) / n


def learner_pass(plan: Plan, *, train: bool) -> Phase:
  """One micro-batch on all chips, forward, or forward and backward; its useful operations are those of full rows."""
  m, s = plan.model, plan.slice
  micro_tokens, logits = plan.rows * plan.row_length, plan.rows * plan.responses
  flops, bandwidth, network = _rate(plan)
  chips = plan.row_chips * plan.tp
  counts = dict(tokens=micro_tokens, keys=plan.row_length / 2, logits=logits)
  forward = forward_flops(m, **counts)
  counts["keys"] += min(ATTENTION_BLOCK, plan.row_length) / 2
  done = training_flops(m, **counts) if train else forward_flops(m, **counts)
  again = computed_again(m)[0] / layer_params(m) if train else 0.0
  passes = 2 + again if train else 1  # that read the weights
  weights = num_params(m)
  local = micro_tokens / plan.row_chips
  # of a token and layer: what the products and norms read and write, twice of it backwards
  touched = 2.0 * m.num_layers * local * (10 * m.hidden_size + 6 * m.intermediate_size / plan.tp)
  memory = passes * (plan.gather_bytes + 2) * weights / plan.tp + touched * (3 + again if train else 1)
  gathered = (2 if train else 1) * plan.gather_bytes * weights / plan.tp * _ring(plan.fsdp)
  if train:
    memory += 3 * 4 * weights / (plan.fsdp * plan.tp)  # the sum of gradients
    gathered += plan.gradient_bytes * weights / plan.tp * _ring(plan.fsdp)
    gathered += 2 * plan.gradient_bytes * weights / (plan.tp * plan.fsdp) * _ring(plan.data)
  # Sums over tp, of [T, D] in bfloat16, each a scatter and a gather. In a layer two forward, behind "o" and "down", two
  # backward, of the gradients of what q, k, v and gate, up read, and that behind "o" again where it is not kept.
  sums = 2 * (2 if train else 1) + (train and m.remat != "none" and "attention_sum" not in SAVED[m.remat])
  summed = sums * m.num_layers * 2 * 2 * local * m.hidden_size * _ring(plan.tp)
  # Two chips of a pair share one link, and what goes over it holds up as much as the other links would carry.
  detour = summed * (max(s.links, 1) / max(min(s.links, plan.tp - 1), 1) - 1)
  collectives = m.num_layers * ((3 if train else 1) * (plan.fsdp > 1) + sums * (plan.tp > 1))
  return Phase(
    "update" if train else "score",
    compute=done / chips / flops,
    memory=memory / bandwidth,
    transfer=((plan.update_received if train and plan.update_received else gathered + summed) + detour) / network,
    latency=collectives * math.sqrt(s.chips) * HOP,
    useful=forward * (3 if train else 1),
  )


def score_phase(plan: Plan, work: Work) -> Phase:
  """All scoring passes of an iteration, as `learn` makes them: the skill context of every sample, the ordinary one of
  all mini-batches but the first, and the reference's where there is a KL term.
  """
  later = 1 - 1 / work.minibatches
  pair = later * plan.widening + plan.widening if work.skills else later
  passes = pair + (1 if work.reference else 0)
  return _over_samples(plan, work, train=False).times(passes)


def update_phase(plan: Plan, work: Work) -> Phase:
  """Gradients over all samples."""
  return _over_samples(plan, work, train=True)


def optimizer_phase(plan: Plan, work: Work) -> Phase:
  """A step for every mini-batch: reads gradient, parameter and two moments, writes all but the gradient, in float32."""
  step = 28 * num_params(plan.model) / (plan.fsdp * plan.tp) / (plan.slice.chip.bandwidth * MEMORY_SHARE)
  return Phase("optimizer", memory=work.minibatches * step)


def _over_samples(plan, work, *, train):
  micro_tokens = plan.rows * plan.row_length
  columns = work.samples * work.length / work.fill
  # each mini-batch ends in a micro-batch that is not full
  count = work.minibatches * math.ceil(columns / work.minibatches / micro_tokens)
  phase = learner_pass(plan, train=train).times(count)
  forward = forward_flops(
    plan.model, tokens=work.samples * work.length, keys=work.length / 2, logits=work.samples * work.targets
  )
  return dataclasses.replace(phase, useful=forward * (3 if train else 1))


def cast_bytes(plan: Plan) -> float:
  """A chip's share of the weights in bfloat16."""
  return 2 * num_params(plan.model) / (plan.fsdp * plan.tp)


def copy_phases(plan: Plan) -> list[Phase]:
  """The actors' copy of the weights, where they have their own, in bfloat16: a chip casts its share, receives what the
  others have, and keeps its part.

  The TPU compiler gathers the shards of an array over `fsdp`. With a `tp` of the learner's that is not the actors' it
  sums the whole array over all chips instead, each of which has its shard and zeros: twice as much.
  """
  if not plan.own_copy:
    return []
  _, bandwidth, network = _rate(plan)
  weights = 2 * num_params(plan.model)
  kept = weights / (plan.actor_fsdp * plan.actor_tp)
  if plan.tp in (1, plan.actor_tp):
    whole = weights / plan.tp
    received = whole * _ring(plan.fsdp)
  else:
    whole = weights
    received = 2 * whole * _ring(plan.fsdp * plan.tp)
  return [
    Phase("cast", memory=3 * cast_bytes(plan) / bandwidth),  # 4 bytes read, 2 written
    Phase("place", memory=(whole + 2 * kept) / bandwidth, transfer=received / network),
  ]


def rollout_phases(plan: Plan, work: Work) -> list[Phase]:
  """What a host does for its share of the episodes: prompts, sampled tokens, environments; each turn waits for its own.

  All of a host's slots sample at the same time, and every episode plays all its turns: an upper bound.
  """
  m, s = plan.model, plan.slice
  flops, bandwidth, network = _rate(plan)
  chips, hosts = s.host_chips, s.hosts
  tp, data = plan.actor_tp, s.host_chips // plan.actor_tp  # rows lie over `data` and `fsdp` alike
  episodes = math.ceil(work.episodes / hosts)
  waves = math.ceil(episodes / plan.slots)
  slots = min(episodes, plan.slots) / data  # of one copy of the weights
  requests = work.turns * work.prompt + (work.analysis_prompt if work.skills else 0)
  sampled = work.turns * work.response + (work.analysis_response if work.skills else 0)
  context = work.prompt + work.response / 2 if work.window else (work.prompt + work.response) * work.turns / 2

  read = forward_flops(m, tokens=episodes * requests, keys=context / 2, logits=episodes * work.turns)
  of_chip = 2 * (layer_params(m) + head_params(m)) / tp  # with `fsdp`, layer by layer
  gathered = of_chip * _ring(plan.actor_fsdp)
  weights = of_chip if plan.own_copy or plan.actor_fsdp > 1 else 2 * of_chip  # the learner's are float32
  calls = waves * work.turns * 4  # prompts arrive in pieces
  prefill = Phase(
    "prefill",
    compute=read / chips / flops,
    memory=calls * weights / bandwidth,
    transfer=(2 * m.num_layers * 2 * 2 * episodes * requests / data * m.hidden_size * _ring(tp) + calls * gathered)
    / network,
    useful=read * hosts,
  )
  steps = waves * sampled
  one = forward_flops(m, tokens=slots, keys=context, logits=slots)
  decode = Phase(
    "decode",
    compute=steps * one / tp / flops,
    memory=steps * (weights + slots * context * kv_bytes(m) / min(tp, m.num_kv_heads)) / bandwidth,
    transfer=steps * (2 * m.num_layers * 2 * 2 * slots * m.hidden_size * _ring(tp) + gathered) / network,
    latency=steps * 2 * m.num_layers * 2 * (tp - 1) * HOP,
    useful=steps * one * data * hosts,
  )
  turns = waves * work.turns * math.ceil(min(episodes, plan.slots) / work.workers)
  return [prefill, decode, Phase("environments", latency=turns * work.environment_seconds)]


def iteration(plan: Plan, work: Work) -> list[Phase]:
  """All phases of an iteration, in their order."""
  learner = (score_phase(plan, work), update_phase(plan, work), optimizer_phase(plan, work))
  return [*rollout_phases(plan, work), *learner, *copy_phases(plan)]


# ---------------------------------------------------------------- memory, roughly


def resident_bytes(plan: Plan, work: Work, capacity: int) -> dict[str, float]:
  """What lies in a chip's memory through the whole iteration: parameters in float32 and both moments, the reference,
  the actors' copy in bfloat16, if they have one, and their cache of slots of `capacity` tokens.
  """
  m = plan.model
  shard = num_params(m) / (plan.fsdp * plan.tp)
  slots = plan.slots * plan.actor_tp / plan.slice.host_chips
  return {
    "params": 4 * shard,
    "moments": 2 * plan.moment_bytes * shard,
    "reference": 4 * shard if work.reference else 0.0,
    "actor": 2 * num_params(m) / (plan.actor_fsdp * plan.actor_tp) if plan.own_copy else 0.0,
    "cache": slots * capacity * kv_bytes(m) / min(plan.actor_tp, m.num_kv_heads),
  }


def update_bytes(plan: Plan) -> float:
  """What the gradients of a micro-batch take of a chip besides the parameters, roughly: their sum and those of the
  micro-batch, in float32, what the backward pass keeps, and the larger of two things that are never there together: the
  head as it is gathered, its gradient in float32 and the logits of a chunk; and one layer's work, its weights and
  their gradients.

  What the compiler says of updates of 7B on v6e:4x4 and v5p:4x4x4 and of 3B on v5e:4x4 is up to 0.65 GiB less
  (tests/roofline_test.py).
  """
  m, tp = plan.model, plan.tp
  tokens = plan.rows * plan.row_length / plan.row_chips
  gradients = 8 * num_params(m) / (plan.fsdp * tp)
  head = head_params(m) * (plan.gather_bytes + 4) / tp + 3 * 4 * ops.CHUNK_LOGITS
  layer = layer_params(m) / m.num_layers * (plan.gather_bytes + plan.gradient_bytes) / tp
  wide = 16 * m.intermediate_size + 16 * m.num_heads * m.head_dim
  work = tokens * (wide / tp + 16 * m.hidden_size) + layer
  return gradients + kept_bytes(m, tokens, tp) + max(head, work)


def memory(plan: Plan, work: Work, capacity: int) -> dict[str, float]:
  """Bytes of a chip while the policy is updated, roughly, by part, in the stage that takes more: Stage 2, or, where the
  plan has rows of Stage 1, that one, whose reference is the policy that it began with, and which has no actors.
  """
  held = resident_bytes(plan, work, capacity)
  stage_2 = held | {"update": update_bytes(plan)}
  if not plan.sft_rows:
    return stage_2
  rows = dataclasses.replace(plan, row_length=plan.sft_length, rows=plan.sft_rows)
  learner = {name: held[name] for name in ("params", "moments")}
  stage_1 = learner | {"reference": held["params"], "update": update_bytes(rows)}
  return max(stage_2, stage_1, key=lambda parts: sum(parts.values()))


def fits(plan: Plan, work: Work, capacity: int, *, spare: float = SPARE) -> bool:
  """Whether `memory` leaves so large a share of a chip's free. With `SPARE`: whether the slice is offered at all."""
  return sum(memory(plan, work, capacity).values()) <= (1 - spare) * plan.slice.chip.hbm
