"""Which slices of Cloud TPU a model is shipped for, and what a config must say there: meshes, remat, rows, slots.

One table (`TABLE`), from which a model that does not fit is refused before anything is compiled, with the estimate of
memory of `seed_jax/roofline.py`. That is arithmetic on paper; what a slice really holds, its compiler says (stage
`preflight`). A configuration is as follows.

- Learner: parameters, both moments, the reference and the gradients lie over all chips, `fsdp` first. A mini-batch of
  256 samples of about 600 tokens fills 64 rows of 2,560 (longest prompt and response) and no more, so beyond 64 chips
  the rest are `tp`: more rows would be padding. `tp` may exceed the key/value heads; they are then repeated.
- Actors: each host has a bfloat16 copy of its own over its chips, `data` x `tp`, and plays its share of the episodes.
"""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

from seed_jax import roofline, topologies
from seed_jax.models import presets
from seed_jax.topologies import CHIPS, GIB, Slice

MAX_ROW_SHARDS = 64  # 256 samples x 600 tokens / 2,560 tokens of a row = 60 rows of a mini-batch


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


def slices(chip: str) -> list[Slice]:
  """All slices of a kind of chip, the smallest first."""
  return [topologies.parse(f"{chip}:{shape}") for shape in CHIPS[chip].shapes]


def shipped() -> list[tuple[str, str]]:
  """All (model, topology) of the table."""
  return [(m, s.name) for (m, chip), row in TABLE.items() for s in slices(chip) if s.chips >= row.fewest]


def apply(c: ConfigDict, model: str, topology: str) -> None:
  """Sets in `c` what depends on the model and the slice; the lengths in `c.rollout` and `c.analysis` must be there.

  Raises ValueError for an unknown model or topology, and for a slice that cannot hold the model, with the numbers.
  """
  slice_ = topologies.parse(topology)
  chip, row = slice_.chip, _row(model, slice_.chip.name)
  settings(c, model, slice_, row)
  if slice_.chips < row.fewest:
    smallest = next(s for s in slices(chip.name) if s.chips >= row.fewest)
    parts = memory(c, slice_)
    listed = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
    raise ValueError(
      f"{model} does not fit {topology}: about {sum(parts.values()):.1f} GiB a chip ({listed}), and of a chip's "
      f"{chip.hbm / GIB:.2f} GiB {(1 - roofline.SPARE) * chip.hbm / GIB:.1f} are planned with; "
      f"the smallest {chip.name} slice for it is {smallest.name}"
    )


def settings(c: ConfigDict, model: str, slice_: Slice, row: Shipped) -> None:
  """`apply` without its check."""
  config, chips = presets.get(model), slice_.chips
  c.model.preset = model
  c.model.dtype = "bfloat16"  # of the products; parameters, norms, softmax and logits stay float32
  c.model.scan_layers = True
  c.preflight.fewest = row.fewest  # what is refused here is not recommended there

  tp = max(chips // MAX_ROW_SHARDS, min(row.tp, chips))
  while config.num_heads % tp:
    tp //= 2
  c.mesh.update(dict(data=1, fsdp=chips // tp, tp=tp))
  actor_tp = min(row.actor_tp, slice_.host_chips)
  c.actor_mesh.update(dict(data=slice_.host_chips // actor_tp, fsdp=1, tp=actor_tp))

  # an actor, of which there are chips / actor_tp, has a slot at the least
  c.rollout.slots = max(min(row.slots * chips, 128), chips // actor_tp)
  c.train.optimizer.moment_dtype = "bfloat16" if chips < row.bf16_below else "float32"
  c.sft.optimizer.moment_dtype = c.train.optimizer.moment_dtype
  shards = chips // tp
  rows = max(min(row.rows, MAX_ROW_SHARDS // shards), 1)
  c.train.micro_tokens = rows * shards * max(c.train.row_lengths)
  c.sft.micro_tokens = shards * max(c.sft.row_lengths)

  for c.model.remat in REMATS:
    if fits(c, slice_):
      break


def memory(c: ConfigDict, slice_: Slice) -> dict[str, float]:
  """GiB a chip of what lies in memory while the policy is updated, by part, as `roofline.memory` estimates it."""
  return {name: size / GIB for name, size in roofline.memory(*_planned(c, slice_)).items()}


def fits(c: ConfigDict, slice_: Slice) -> bool:
  """Whether the estimate leaves enough of a chip's memory free."""
  return roofline.fits(*_planned(c, slice_))


def _planned(c, slice_):
  from seed_jax import preflight_plans as plans  # not above: it loads the trainer, and most who ask load it anyway

  return plans.plan_of(c, slice_), plans.work_of(c), plans.capacity_of(c)


def _row(model, chip) -> Shipped:
  if (model, chip) not in TABLE:
    raise ValueError(f"model {model!r} is not shipped for TPUs; choose one of {', '.join(MODELS)}")
  return TABLE[model, chip]
