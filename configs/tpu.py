"""Which slices of Cloud TPU a model is shipped for, and what a config must say there: meshes, remat, rows, slots.

One table (`TABLE`) and one estimate of memory (`estimate`), from which a model that does not fit is refused before
anything is compiled. The estimate is arithmetic on paper; what a slice really holds, its compiler says (stage
`preflight`). A configuration is as follows.

- Learner: parameters, both moments, the reference and the gradients lie over all chips, `fsdp` first. A mini-batch of
  256 samples of about 600 tokens fills 64 rows of 2,560 (longest prompt and response) and no more, so beyond 64 chips
  the rest are `tp`: more rows would be padding. `tp` may exceed the key/value heads; they are then repeated.
- Actors: each host has a bfloat16 copy of its own over its chips, `data` x `tp`, and plays its share of the episodes.

Shape legend: D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary, L layers, T tokens
of a row, C tokens of a slot.
"""

from __future__ import annotations

import dataclasses
import math

from ml_collections import ConfigDict

from seed_jax import roofline, topologies
from seed_jax.models import presets

GIB = topologies.GIB
SPARE = 0.07  # of a chip's memory, what the estimate leaves free
MAX_ROW_SHARDS = 64  # 256 samples x 600 tokens / 2,560 tokens of a row = 60 rows of a mini-batch


@dataclasses.dataclass(frozen=True)
class Chip:
  """memory: GiB that a program may use, as the TPU compiler states it when it refuses one; slices: the topologies."""

  memory: float
  slices: tuple[str, ...]


CHIPS = {  # of seed_jax/topologies.py, from four chips on
  name: Chip(chip.hbm / GIB, tuple(s for s in chip.shapes if topologies.parse(f"{name}:{s}").chips >= 4))
  for name, chip in topologies.CHIPS.items()
}


@dataclasses.dataclass(frozen=True)
class Shipped:
  """A model on a kind of chip, from `fewest` chips on.

  actor_tp: chips that share an actor's copy. slots: conversations that decode at a time, a chip; 128 in all are enough.
  bf16_below: chips below which AdamW's moments are bfloat16. tp: the learner's, at the least. rows: of a micro-batch, a
  row shard: the weights are gathered once for all of them.
  """

  fewest: int
  actor_tp: int
  slots: int
  bf16_below: int = 0
  tp: int = 1
  rows: int = 1


# The table: all that is shipped. actor_tp divides the key/value heads (2, 4, 8): a cache holds no head twice.
TABLE: dict[tuple[str, str], Shipped] = {
  ("qwen3_1_7b", "v4"): Shipped(4, actor_tp=4, slots=8),
  ("qwen3_1_7b", "v5e"): Shipped(8, actor_tp=4, slots=4, bf16_below=16),
  ("qwen3_1_7b", "v5p"): Shipped(4, actor_tp=4, slots=32),
  ("qwen3_1_7b", "v6e"): Shipped(4, actor_tp=4, slots=8, rows=2),
  ("qwen2_5_3b", "v4"): Shipped(4, actor_tp=2, slots=8, bf16_below=8),
  ("qwen2_5_3b", "v5e"): Shipped(16, actor_tp=2, slots=4),
  ("qwen2_5_3b", "v5p"): Shipped(4, actor_tp=2, slots=32),
  ("qwen2_5_3b", "v6e"): Shipped(4, actor_tp=2, slots=8, bf16_below=8, tp=2, rows=2),
  ("qwen2_5_7b", "v4"): Shipped(16, actor_tp=4, slots=4),
  ("qwen2_5_7b", "v5e"): Shipped(32, actor_tp=4, slots=2, tp=2),
  ("qwen2_5_7b", "v5p"): Shipped(4, actor_tp=4, slots=32),
  ("qwen2_5_7b", "v6e"): Shipped(16, actor_tp=4, slots=4, tp=2, rows=2),
}
# What the backward pass finds stored, the fastest first; a config takes the first that fits.
REMATS = ("dots", "dots_no_batch", "attention_gate", "attention", "attention_out", "full")
MODELS = tuple(dict.fromkeys(model for model, _ in TABLE))


def parse(topology: str) -> tuple[str, int]:
  """("v5e", 16) of "v5e:4x4"; ValueError with the known ones for another."""
  generation, _, shape = topology.partition(":")
  if generation not in CHIPS or shape not in CHIPS[generation].slices:
    known = "; ".join(f"{name}: {', '.join(chip.slices)}" for name, chip in CHIPS.items())
    raise ValueError(f"topology {topology!r} is not shipped; choose CHIP:SHAPE of {known}")
  return generation, math.prod(map(int, shape.split("x")))


def shipped() -> list[tuple[str, str]]:
  """All (model, topology) of the table."""
  return [
    (model, f"{chip}:{shape}")
    for (model, chip), row in TABLE.items()
    for shape in CHIPS[chip].slices
    if row.fewest <= parse(f"{chip}:{shape}")[1]
  ]


def apply(c: ConfigDict, model: str, topology: str) -> None:
  """Sets in `c` what depends on the model and the slice; the lengths in `c.rollout` and `c.analysis` must be there.

  Raises ValueError for an unknown model or topology, and for a slice that cannot hold the model, with the numbers.
  """
  chip, chips = parse(topology)
  row = _row(model, chip)
  settings(c, model, topology, row, chips)
  if chips < row.fewest:
    smallest = next(s for s in CHIPS[chip].slices if parse(f"{chip}:{s}")[1] >= row.fewest)
    parts = estimate(c)  # Stage 2 takes more where nothing is kept
    listed = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
    raise ValueError(
      f"{model} does not fit {topology}: about {sum(parts.values()):.1f} GiB a chip ({listed}), and of a chip's "
      f"{CHIPS[chip].memory:.2f} GiB {(1 - SPARE) * CHIPS[chip].memory:.1f} are planned with; "
      f"the smallest {chip} slice for it is {chip}:{smallest}"
    )


def settings(c: ConfigDict, model: str, topology: str, row: Shipped, chips: int) -> None:
  """`apply` without its check."""
  config = presets.get(model)
  c.model.preset = model
  c.model.dtype = "bfloat16"  # of the products; parameters, norms, softmax and logits stay float32
  c.model.scan_layers = True

  tp = max(chips // MAX_ROW_SHARDS, row.tp)
  while config.num_heads % tp:
    tp //= 2
  c.mesh.update(dict(data=1, fsdp=chips // tp, tp=tp))
  a_host = topologies.parse(topology).host_chips
  c.actor_mesh.update(dict(data=a_host // row.actor_tp, fsdp=1, tp=row.actor_tp))

  # an actor, of which there are chips / actor_tp, has a slot at the least
  c.rollout.slots = max(min(row.slots * chips, 128), chips // row.actor_tp)
  c.train.optimizer.moment_dtype = "bfloat16" if chips < row.bf16_below else "float32"
  c.sft.optimizer.moment_dtype = c.train.optimizer.moment_dtype
  shards = chips // tp
  rows = max(min(row.rows, MAX_ROW_SHARDS // shards), 1)
  c.train.micro_tokens = rows * shards * max(c.train.row_lengths)
  c.sft.micro_tokens = shards * max(c.sft.row_lengths)

  for c.model.remat in REMATS:
    if largest(c) <= (1 - SPARE) * CHIPS[parse(topology)[0]].memory:
      break


def estimate(c: ConfigDict, section: str = "train") -> dict[str, float]:
  """GiB a chip of what lies in memory while the policy is updated, by part; in Stage 1 with `section` "sft".

  learner: 4 bytes a parameter for the parameters, the reference (with a KL term; in Stage 1 what it began with), the
  sum of gradients and those of a micro-batch, and AdamW's two moments, over all chips. actor: 2 bytes a parameter over
  actor_tp. slots: keys and values, 2 L K H C of 2 bytes each, twice as long as they grow from one capacity to the next.
  update: what remat keeps of every layer, and the larger of the head with its gradient and the logits of a chunk, and
  one layer's work. Of the updates of 7B on v6e:4x4 and v5p:4x4x4 and 3B on v5e:4x4 it says up to 1 GiB more than the
  compiler.
  """
  m = presets.get(c.model.preset)
  D, F, L, N, K, H, V = (
    m.hidden_size,
    m.intermediate_size,
    m.num_layers,
    m.num_heads,
    m.num_kv_heads,
    m.head_dim,
    m.vocab_size,
  )
  size, tp, actor = m.num_parameters, c.mesh.tp, c.actor_mesh
  chips = c.mesh.data * c.mesh.fsdp * tp
  moments = {"float32": 8, "bfloat16": 4}[c.train.optimizer.moment_dtype]
  copies = 4 if section == "sft" or c.train.loss.kl_coef else 3
  learner = size * (4 * copies + moments) / (c.mesh.fsdp * tp)
  capacities = sum(
    {*c.rollout.capacity_buckets, max(c.rollout.capacity, c.analysis.max_prompt + c.analysis.max_response)}
  )
  actors = chips // actor.tp
  cache = 2 * L * max(K // actor.tp, 1) * H * capacities * 2 * -(-c.rollout.slots // actors)
  T = c[section].micro_tokens // (chips // tp)  # of a row shard
  head = 6 * V * D // tp + 3 * 2**28  # in bfloat16, and its gradient in float32
  work = 4 * T * (4 * F + 4 * N * H) // tp + 16 * T * D + 2 * 2 * (3 * D * F + 2 * D * N * H) // tp
  kept = roofline.kept_bytes(dataclasses.replace(m, remat=c.model.remat), T, tp)
  parts = {"learner": learner, "update": kept + max(head, work)}
  if section == "train":
    parts |= {"actor": 2 * size / actor.tp, "slots": cache}
  return {name: value / GIB for name, value in parts.items()}


def largest(c: ConfigDict) -> float:
  """GiB a chip of the stage that takes most."""
  return max(sum(estimate(c, section).values()) for section in ("train", "sft"))


def _row(model, chip) -> Shipped:
  if (model, chip) not in TABLE:
    raise ValueError(f"model {model!r} is not shipped for TPUs; choose one of {', '.join(MODELS)}")
  return TABLE[model, chip]
