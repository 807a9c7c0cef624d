"""The shipped TPU configs: they load in moments, divide over their meshes, and what does not fit is refused."""

import pathlib

import pytest

from configs import alfworld, tpu
from seed_jax import main, preflight_plans, roofline, run, topologies
from seed_jax.models.config import REMAT
from seed_jax.optimizer import make_optimizer
from seed_jax.update import LossConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]


def planned(c, slice_):
  """The share of a chip's memory that the config takes by the estimate."""
  return sum(tpu.memory(c, slice_).values()) * topologies.GIB / slice_.chip.hbm


@pytest.mark.parametrize("model, topology", tpu.shipped(), ids=map(",".join, tpu.shipped()))
def test_a_shipped_preset_is_planned_within_a_chips_memory(model, topology):
  c = alfworld.get_config(f"{model},{topology}")
  slice_ = topologies.parse(topology)
  assert c.mesh.data * c.mesh.fsdp * c.mesh.tp == slice_.chips
  assert planned(c, slice_) <= 1 - roofline.SPARE
  assert preflight_plans.plan_of(c, slice_).own_copy
  assert c.actor_mesh.data * c.actor_mesh.tp == (8 if topology in ("v5e:2x4", "v6e:2x4") else 4)
  assert c.rollout.slots % (slice_.chips // c.actor_mesh.tp) == 0  # every actor has as many
  assert c.model.dtype == "bfloat16" and c.model.scan_layers and c.model.remat in tpu.REMATS


def test_every_chip_is_shipped_from_a_few_chips_to_its_largest_slice():
  chips = {(model, t.partition(":")[0]): set() for model, t in tpu.shipped()}
  for model, topology in tpu.shipped():
    chips[model, topology.partition(":")[0]].add(topologies.parse(topology).chips)
  assert len(chips) == 12
  assert all(max(found) == (512 if chip in ("v4", "v5p") else 256) for (_, chip), found in chips.items())


@pytest.mark.parametrize(
  "argument, remat",
  [
    ("qwen2_5_3b,v5e:4x4", "attention"),
    ("qwen2_5_7b,v6e:4x4", "dots"),
    ("qwen2_5_7b,v5p:4x4x4", "dots"),
    ("qwen2_5_7b,v4:2x4x4", "attention_gate"),
  ],
)
def test_a_preset_keeps_as_much_as_fits(argument, remat):
  c, slice_ = alfworld.get_config(argument), topologies.parse(argument.split(",")[1])
  assert set(tpu.REMATS) == set(REMAT) - {"none"} and c.model.remat == remat
  for faster in tpu.REMATS[: tpu.REMATS.index(remat)]:
    c.model.remat = faster
    assert planned(c, slice_) > 1 - roofline.SPARE


def test_the_long_rows_of_stage_1_count_too():
  """3B on v5e:8x8 has room for "dots" in Stage 2, and not in rows of 8,192 tokens."""
  c, slice_ = alfworld.get_config("qwen2_5_3b,v5e:8x8"), topologies.parse("v5e:8x8")
  assert c.model.remat == "attention_gate"
  c.model.remat = "dots"
  c.sft.update(dict(row_lengths=(2_560,), micro_tokens=64 * 2_560))
  assert planned(c, slice_) <= 1 - roofline.SPARE


def test_what_is_left_out_leaves_less_room_by_the_same_estimate():
  for (model, chip), row in tpu.TABLE.items():
    for slice_ in (s for s in tpu.slices(chip) if s.chips < row.fewest):
      c = alfworld.get_config(f"{model},v5p:2x2x1")
      tpu.settings(c, model, slice_, row)
      assert planned(c, slice_) > 1 - roofline.SPARE, (model, slice_.name)


def test_the_estimate_that_refuses_is_that_of_preflight():
  """Parts in the error's order; 7.6e9 parameters over four chips: 4 bytes each are 7.1 GiB."""
  with pytest.raises(ValueError) as told:
    alfworld.get_config("qwen2_5_7b,v5e:2x2")
  c, slice_ = alfworld.get_config("qwen2_5_7b,v5e:8x8"), topologies.parse("v5e:2x2")
  tpu.settings(c, "qwen2_5_7b", slice_, tpu.TABLE["qwen2_5_7b", "v5e"])
  plan, work = preflight_plans.plan_of(c, slice_), preflight_plans.work_of(c)
  parts = roofline.memory(plan, work, preflight_plans.capacity_of(c))
  assert f"({', '.join(f'{name} {size / 2**30:.1f}' for name, size in parts.items())})" in str(told.value)
  assert "(params 7.1, moments 14.2, " in str(told.value)


@pytest.mark.parametrize(
  "argument, message",
  [
    ("qwen2_5_7b,v5e:2x2", r"qwen2_5_7b does not fit v5e:2x2: about \d\d\.\d GiB a chip \(params 7\.1, .*v5e:4x8$"),
    ("qwen3_1_7b,v6e:1x1", r"qwen3_1_7b does not fit v6e:1x1: about 5\d\.\d GiB a chip .*v6e:2x2$"),
    ("qwen2_5_7b,v5e-4", r"the topology 'v5e-4' is unknown; there are v4:\{2x2x1,"),
    ("qwen2_5_0_5b,v5e:2x2", r"model 'qwen2_5_0_5b' is not shipped for TPUs; choose one of qwen3_1_7b, "),
    ("qwen2_5_3b", r"'qwen2_5_3b' of configs/alfworld.py is not MODEL,TOPOLOGY\[,METHOD\]"),
    ("qwen2_5_3b,v5e:4x4,sed", r"sed"),
  ],
)
def test_a_wrong_argument_is_refused_in_one_line(argument, message):
  with pytest.raises(main.UsageError, match=message):
    main.load_config(f"{ROOT / 'configs/alfworld.py'}:{argument}")


def test_the_numbers_of_the_paper():
  c = main.load_config(f"{ROOT / 'configs/alfworld.py'}:qwen2_5_3b,v5e:4x4")
  assert (c.method, c.train.tasks_per_iteration, c.train.group_size, c.train.iterations) == ("seed", 16, 8, 150)
  assert (c.rollout.max_steps, c.rollout.history, c.rollout.max_prompt, c.rollout.max_response) == (30, 5, 2048, 512)
  loss = LossConfig(**c.train.loss.to_dict())
  assert (loss.opd_coef, loss.opd_beta, loss.kl_coef, loss.clip_low, loss.clip_high) == (0.01, 5.0, 0.01, 0.2, 0.2)
  assert (c.train.optimizer.learning_rate, c.train.optimizer.weight_decay, c.train.optimizer.warmup) == (1e-6, 0.01, 0)
  assert c.rollout.capacity >= c.rollout.max_prompt + c.rollout.max_response <= min(c.train.row_lengths)
  for section in (c.train, c.sft):
    make_optimizer(run.optimizer_config(section.optimizer), 10)


def test_a_method_is_the_third_word_and_a_preset_is_the_models_shape():
  c = alfworld.get_config("qwen3_1_7b,v5p:4x4x4,grpo")
  assert c.method == "grpo"
  model = run.preset_model(c)
  assert (model.num_layers, model.num_kv_heads, model.dtype, model.remat) == (28, 8, "bfloat16", "dots")
  c.model.preset = ""
  with pytest.raises(run.ConfigError, match=r"config\.model\.preset is empty: .* choose qwen2_5_0_5b, "):
    run.preset_model(c)
