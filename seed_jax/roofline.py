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

from seed_jax.models.config import ModelConfig
from seed_jax.topologies import Slice

MEMORY_SHARE = 0.8  # of an HBM's bandwidth that streaming reads reach (decode of arXiv:2604.15464: 0.86)
LINK_SHARE = 0.9  # of a link's
HOP = 1e-6  # seconds that one step of a ring takes, however little it carries
# What the backward pass computes again, in forward passes, by ModelConfig.remat: matrix products, attention.
AGAIN = {"none": (0, 0), "dots": (0, 0), "dots_no_batch": (0, 1), "attention_out": (1, 0), "full": (1, 1)}
# Values kept of a token and layer for the backward pass, bfloat16, as (multiples of D, N H, K H, F).
KEPT = {
  "none": (8, 5, 4, 4),
  "dots": (3, 2, 2, 2),
  "dots_no_batch": (3, 2, 2, 2),
  "attention_out": (1, 1, 0, 0),
  "full": (1, 0, 0, 0),
}


# ---------------------------------------------------------------- counts of a model


def layer_params(m: ModelConfig) -> int:
  """Weights of the matrices of all layers: q, k, v, o, gate, up, down."""
  attention = m.hidden_size * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
  return m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)


def head_params(m: ModelConfig) -> int:
  """Weights of the output matrix, V D."""
  return m.vocab_size * m.hidden_size


def num_params(m: ModelConfig) -> int:
  """All weights: matrices, embeddings (once where they are tied), norms, biases."""
  small = 2 * m.hidden_size
  small += (m.num_heads + 2 * m.num_kv_heads) * m.head_dim if m.qkv_bias else 0
  small += 2 * m.head_dim if m.qk_norm else 0
  tables = 1 if m.tie_embeddings else 2
  return layer_params(m) + tables * head_params(m) + m.num_layers * small + m.hidden_size


def attention_flops(m: ModelConfig, keys: float) -> float:
  """Of one query token over `keys` keys, in all layers: 2 N H a key for the scores, as many for the mix."""
  return 4.0 * m.num_layers * m.num_heads * m.head_dim * keys


def forward_flops(m: ModelConfig, *, tokens: float, keys: float, logits: float) -> float:
  """A forward pass over `tokens` tokens, each seeing `keys` keys on average, with logits at `logits` positions."""
  return tokens * (2.0 * layer_params(m) + attention_flops(m, keys)) + 2.0 * logits * head_params(m)


def kv_bytes(m: ModelConfig, size: int = 2) -> int:
  """Keys and values of one token in all layers."""
  return 2 * m.num_layers * m.num_kv_heads * m.head_dim * size


def kept_bytes(m: ModelConfig, tokens: float, remat: str) -> float:
  """What a training step keeps for its backward pass of `tokens` tokens of one chip; bfloat16."""
  d, n, k, f = KEPT[remat]
  of_layer = d * m.hidden_size + (n * m.num_heads + k * m.num_kv_heads) * m.head_dim + f * m.intermediate_size
  return 2.0 * tokens * m.num_layers * of_layer


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
  keys = plan.row_length / 2
  forward = forward_flops(m, tokens=micro_tokens, keys=keys, logits=logits)
  again = AGAIN[m.remat] if train else (0, 0)
  attention = micro_tokens * attention_flops(m, keys)
  matrices = forward - attention
  done = forward * (3 if train else 1) + again[0] * matrices + again[1] * attention
  passes = 2 + (again[0] or again[1]) if train else 1  # that read the weights
  weights = num_params(m)
  local = micro_tokens / plan.row_chips
  # of a token and layer: what the products and norms read and write, twice of it backwards
  touched = 2.0 * m.num_layers * local * (10 * m.hidden_size + 6 * m.intermediate_size / plan.tp)
  memory = passes * (plan.gather_bytes + 2) * weights / plan.tp + touched * (3 + max(again) if train else 1)
  gathered = (2 if train else 1) * plan.gather_bytes * weights / plan.tp * _ring(plan.fsdp)
  if train:
    memory += 3 * 4 * weights / (plan.fsdp * plan.tp)  # the sum of gradients
    gathered += plan.gradient_bytes * weights / plan.tp * _ring(plan.fsdp)
    gathered += 2 * plan.gradient_bytes * weights / (plan.tp * plan.fsdp) * _ring(plan.data)
  # two sums over tp a layer, of [T, D], in bfloat16, each a scatter and a gather
  summed = 2 * m.num_layers * 2 * 2 * local * m.hidden_size * _ring(plan.tp) * (passes + 1 if train else 1)
  collectives = m.num_layers * ((passes + 1) * (plan.fsdp > 1) + 2 * passes * (plan.tp > 1))
  return Phase(
    "update" if train else "score",
    compute=done / chips / flops,
    memory=memory / bandwidth,
    transfer=(plan.update_received if train and plan.update_received else gathered + summed) / network,
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
  """What the gradients of a micro-batch take of a chip besides the parameters, roughly: their sum, what the backward
  pass keeps, two gathered layers and their gradients, the table and its gradient, and a layer's work.

  It orders candidates and leaves the hopeless ones out; whether one fits, the compiler says.
  """
  m = plan.model
  tokens = plan.rows * plan.row_length / plan.row_chips
  gradients = 4 * num_params(m) / (plan.fsdp * plan.tp)
  layer = layer_params(m) / m.num_layers * (2 + plan.gather_bytes) / plan.tp
  table = head_params(m) * (4 + plan.gradient_bytes + plan.gather_bytes) / plan.tp  # gathered; its gradient; as sent
  work = 2.0 * tokens * (8 * m.hidden_size + 6 * m.intermediate_size / plan.tp)
  return gradients + kept_bytes(m, tokens, m.remat) / plan.tp + 2 * layer + table + work


def memory(plan: Plan, work: Work, capacity: int) -> dict[str, float]:
  """Bytes of a chip while the policy is updated, roughly, by part."""
  return resident_bytes(plan, work, capacity) | {"update": update_bytes(plan)}


def estimate(plan: Plan, work: Work, capacity: int) -> float:
  """The sum of `memory`, with 7 % that should be left."""
  return sum(memory(plan, work, capacity).values()) * 1.07
