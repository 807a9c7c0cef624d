"""What preflight plans, reads of a compiler's answer, and advises; nothing is compiled for a TPU here."""

import dataclasses
import json
import re

import pytest

from configs import alfworld, tpu
from seed_jax import main, preflight_compile, preflight_plans, preflight_table, roofline, topologies
from seed_jax import preflight as stage
from seed_jax.models.config import REMAT
from seed_jax.preemption import Notice, Preempted
from seed_jax.preflight_compile import GIB, Compiled, collectives, compile_program, memory_needed
from seed_jax.workdir import ConfigError

OPTIMISED = """\
HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %s = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: bf16[16,64]) -> bf16[4,64] {
  %whole = bf16[16,64]{1,0:T(8,128)} all-reduce(%p), channel_id=4, replica_groups={{0,1,2,3}}, to_apply=%add
}

%start (p: f32[8,32]) -> (f32[8,32], f32[32,32]) {
  %g = bf16[32,32]{1,0} all-gather(%p), channel_id=1, replica_groups=mesh['a'=4,'b'=1] {'a'}, dimensions={0}
}

%done (p: f32[8,32]) -> f32[32,32] {
  %g = bf16[32,32]{1,0} all-gather(%p), channel_id=1, replica_groups=mesh['a'=4,'b'=1] {'a'}, dimensions={0}
}

%layer (p: (s32[], f32[8,32])) -> (s32[], f32[8,32]) {
  %a = f32[32,32] fusion(%p), kind=kCustom, calls=%start
  %b = f32[32,32] fusion(%a), kind=kCustom, calls=%done
  %c = bf16[4,64] fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
}

%micro (p: (s32[], f32[8,32])) -> (s32[], f32[8,32]) {
  %w = (s32[], f32[8,32]) while(%p), condition=%end, body=%layer
  %r = (f32[10]{0}, f32[]) all-reduce(%x, %y), channel_id=2, replica_groups=[1,4]<=[4], to_apply=%add
}

ENTRY %main (p: f32[8,32]) -> f32[8,32] {
  %w = (s32[], f32[8,32]) while(%p), condition=%end, body=%micro
  %d = f32[8,8]{1,0} collective-permute(%p), channel_id=3, source_target_pairs={{0,1}}
  %e = f32[8,8]{1,0} collective-permute(%d), channel_id=3, source_target_pairs={{0,1}}
}
"""


def test_collectives_are_counted_as_often_as_they_run():
  counts, received = collectives(OPTIMISED, layers=10, loops=1)
  assert counts == {"all-gather": 10, "reduce-scatter": 10, "all-reduce": 1, "collective-permute": 2}
  # of four chips each receives 3/4 of what is gathered or scattered, twice that of what is summed
  gathered, scattered, summed, sent = 32 * 32 * 2 * 0.75, 16 * 64 * 2 * 0.75, 2 * 44 * 0.75, 2 * 8 * 8 * 4
  assert received == 10 * (gathered + scattered) + summed + sent


def test_the_start_of_a_collective_names_its_operands_too():
  line = "  %s = ({0}, {0}, u32[]) collective-permute-start(%p), source_target_pairs={{{{0,1}},{{1,2}}}}"
  assert collectives(line.format("bf16[48,2048]{1,0}"))[1] == pytest.approx(48 * 2048 * 2, abs=4)
  line = "  %s = (f32[8,32], f32[32,32]) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}"
  assert collectives(line)[1] == 32 * 32 * 4 * 3 / 4


def test_a_scatter_that_is_compiled_as_a_sum_counts_as_one():
  """As on 4x4 slices: the whole is summed on every chip, and each cuts its part out."""
  groups = ",".join(map(str, range(16)))
  text = f"""\
ENTRY %main (p: bf16[64,32]) -> bf16[4,32] {{
  %s = bf16[64,32]{{1,0}} all-reduce(%p), channel_id=2, replica_groups={{{{{groups}}}}}, to_apply=%add
  %c = bf16[4,32]{{1,0}} fusion(%s, %i), kind=kLoop, calls=%cut
}}
"""
  assert collectives(text) == ({"all-reduce": 1}, 2 * 64 * 32 * 2 * 15 / 16)


def test_outside_of_a_loop_nothing_is_multiplied():
  counts, _ = collectives(OPTIMISED, layers=10, loops=0)
  assert counts["all-reduce"] == 10 and counts["collective-permute"] == 2


@pytest.mark.parametrize(
  "message, gib",
  [
    (
      "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (29.50G) exceeds available HBM (15.75G).",
      29.5,
    ),
    ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Used 32.25G of 15.75G hbm. Exceeded hbm capacity by 16.5G", 32.25),
    ("INTERNAL: (3.0G) exceeds available HBM", 0),
  ],
)
def test_the_compilers_refusal_says_how_much_it_needed(message, gib):
  assert memory_needed(message) == gib * GIB


class Lowered:
  """Stands in for a lowered program; counts how often it is compiled."""

  compiled = 0

  def as_text(self):
    return "module"

  def compile(self):
    self.compiled += 1
    raise preflight_compile.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: (20.0G) exceeds available HBM (15.75G)")


def test_nothing_is_compiled_twice(monkeypatch, tmp_path):
  monkeypatch.setattr(preflight_compile, "versions", lambda: ["compiler 1"])
  lowered = Lowered()
  options = dict(target="v5e:4x4", layers=36, stamps=tmp_path)
  first, second = (compile_program("update", lowered, **options) for _ in range(2))
  assert lowered.compiled == 1 and not first.again and second.again
  assert second.peak == second.needed == 20 * GIB
  monkeypatch.setattr(preflight_compile, "versions", lambda: ["compiler 2"])
  assert not compile_program("update", lowered, **options).again
  assert lowered.compiled == 2
  # the text of a program does not say for which chip it is: that of a host is the same on v5e and v6e
  assert not compile_program("update", lowered, **options | {"target": "v6e:4x4"}).again
  assert lowered.compiled == 3


@pytest.mark.parametrize("text", ["", '{"name": "upd', "[]", "null", '{"peak": 1}', "peak", "counts"])
def test_a_damaged_stamp_is_compiled_again(monkeypatch, tmp_path, text):
  monkeypatch.setattr(preflight_compile, "versions", lambda: ["compiler 1"])
  lowered, options = Lowered(), dict(target="v5e:4x4", stamps=tmp_path)
  whole = compile_program("update", lowered, **options)
  (stamp,) = tmp_path.glob("*.json")
  told = json.loads(stamp.read_text())
  wrong = {"peak": "20", "counts": {"all-gather": None}}
  stamp.write_text(json.dumps(told | {text: wrong[text]}) if text in wrong else text)
  again = compile_program("update", lowered, **options)
  assert lowered.compiled == 2 and not again.again and again.peak == whole.peak
  assert compile_program("update", lowered, **options).again and lowered.compiled == 2  # it was written anew


def test_a_notice_ends_it_between_two_programs(monkeypatch, tmp_path):
  """The first is compiled when the notice comes; it is kept, and the second is not begun."""
  notice, compiled = Notice(), []

  def compile_one(name, lowered, **options):
    compiled.append(name)
    notice.give("SIGTERM")
    return Compiled(name, peak=GIB, arguments=0)

  monkeypatch.setattr(stage, "compile_program", compile_one)
  monkeypatch.setattr(stage, "programs", lambda plan, training: dict.fromkeys(("score", "update"), lambda: None))
  monkeypatch.setattr(topologies, "compile_only", lambda needed: None)
  run = stage.Preflight(case()[0], tmp_path, topology="v5e:4x4", notice=notice)
  with pytest.raises(Preempted, match="SIGTERM"):
    stage.run_preflight(run)
  assert compiled == ["score"]


@pytest.mark.parametrize(
  "changes, told",
  [
    ({"rollout.slots": 0}, "config.rollout.slots=0: nothing is sampled without a slot; give 1 or more"),
    ({"train.micro_tokens": 1}, "config.train.micro_tokens=1 is less than a row of 2560 tokens; give that or more"),
    ({"sft.micro_tokens": 0}, "config.sft.micro_tokens=0 is less than a row of 8192 tokens"),
    ({"preflight.price": -3.0}, "config.preflight.price=-3.0 is negative; give dollars a chip-hour, or 0"),
  ],
)
def test_numbers_of_which_there_is_no_plan_are_refused(monkeypatch, tmp_path, changes, told):
  monkeypatch.setattr(topologies, "compile_only", lambda needed: None)
  run = stage.Preflight(case(**changes)[0], tmp_path / "w", topology="v5e:4x4")
  with pytest.raises(ConfigError, match=f"^{re.escape(told)}"):
    run.open()
  assert not (tmp_path / "w").exists()


def case(argument="qwen2_5_3b,v5e:4x4", **changes):
  c = alfworld.get_config(argument)
  c.update_from_flattened_dict(changes)
  slice_ = topologies.parse(argument.split(",")[1])
  return c, preflight_plans.plan_of(c, slice_), preflight_plans.work_of(c)


def test_a_config_becomes_a_plan():
  c, plan, work = case()
  assert (plan.data, plan.fsdp, plan.tp, plan.actor_tp, plan.row_length, plan.rows) == (1, 16, 1, 2, 2560, 16)
  assert plan.slots == c.rollout.slots // 4  # of one of four hosts
  assert (work.episodes, work.turns, work.minibatches, work.reference, work.skills) == (128, 30, 8, True, True)
  assert work.prompt + work.response == 600
  assert not preflight_plans.work_of(alfworld.get_config("qwen2_5_3b,v5e:4x4,grpo")).skills


@pytest.mark.parametrize("argument", ["qwen2_5_3b,v5e:4x4", "qwen2_5_7b,v5p:4x4x4", "qwen2_5_7b,v6e:4x4"])
def test_the_updates_of_the_presets_reach_45_percent_on_paper(argument):
  _, plan, work = case(argument)
  assert roofline.update_phase(plan, work).mfu(plan.slice) >= 0.45


def test_a_mesh_of_another_size_than_the_slice_is_refused_with_the_numbers():
  c = alfworld.get_config("qwen2_5_3b,v5e:4x4")
  with pytest.raises(
    ConfigError, match=re.escape("config.mesh 1x16x1 (data, fsdp, tp) has 16 chips and v5e:4x8 has 32")
  ):
    preflight_plans.plan_of(c, topologies.parse("v5e:4x8"))
  c.actor_mesh.update(dict(data=2, tp=4))  # the run would refuse it, on a slice that is paid for
  with pytest.raises(ValueError, match=re.escape("data=2, fsdp=1, tp=4 is not a mesh of the 4 devices of a host")):
    preflight_plans.plan_of(c, topologies.parse("v5e:4x4"))


@pytest.mark.parametrize(
  "shape, planned",
  [
    (dict(data=1, fsdp=2, tp=2), (2, 2, True)),  # as the run allows it
    (dict(data=0, fsdp=0, tp=0), (4, 1, True)),  # chosen: as much fsdp of the learner's as a host has
    (dict(data=0, fsdp=1, tp=0), (1, 1, True)),
  ],
)
def test_the_actors_mesh_is_what_the_run_makes_of_the_config(shape, planned):
  c = alfworld.get_config("qwen2_5_3b,v5e:4x4")
  c.actor_mesh.update(shape)
  plan = preflight_plans.plan_of(c, topologies.parse("v5e:4x4"))
  assert (plan.actor_fsdp, plan.actor_tp, plan.own_copy) == planned
  data = 4 // (plan.actor_fsdp * plan.actor_tp)
  assert plan.actor_shape == dict(data=data, fsdp=plan.actor_fsdp, tp=plan.actor_tp)


def test_one_host_plays_on_the_learners_mesh_where_the_config_says_no_other():
  c = alfworld.get_config("qwen3_1_7b,v6e:2x4")
  c.actor_mesh.update(dict(data=0, fsdp=1, tp=0))
  plan = preflight_plans.plan_of(c, topologies.parse("v6e:2x4"))
  assert (plan.actor_fsdp, plan.actor_tp, plan.own_copy, plan.actor_shape) == (8, 1, False, {})
  work = preflight_plans.work_of(c)
  assert roofline.resident_bytes(plan, work, 8192)["actor"] == 0
  more = preflight_plans.on_slice(plan, topologies.parse("v6e:4x4"))  # whose hosts cannot
  assert (more.actor_fsdp, more.actor_tp, more.own_copy) == (1, 1, True)
  options = preflight_plans.settings(plan, preflight_plans.with_actors(plan, 2))
  assert options == ["--config.actor_mesh.data=4", "--config.actor_mesh.fsdp=1", "--config.actor_mesh.tp=2"]


def test_candidates_come_fastest_first_and_the_hopeless_are_left_out():
  _, plan, work = case(**{"model.remat": "none", "train.micro_tokens": 16 * 4 * 2560})
  others = preflight_plans.candidates(plan, work, capacity=8192)
  seconds = [preflight_plans.seconds(p, work) for p in others]
  assert others and seconds == sorted(seconds)
  assert all(roofline.fits(p, work, 8192, spare=0.0) for p in others)
  assert {"full", "attention_out", "attention"} == {p.model.remat for p in others} < set(REMAT)  # Stage 1 holds no more
  last = others[-1]
  options = preflight_plans.settings(plan, last)
  assert f"--config.model.remat={last.model.remat}" in options
  changed = dict(option.removeprefix("--config.").split("=") for option in options)
  values = {k: v if k == "model.remat" else int(v) for k, v in changed.items()}
  _, again, _ = case(**values)
  assert again == last  # what is advised on the command line is that plan


def test_the_smallest_slice_by_the_estimate():
  _, plan, work = case("qwen2_5_7b,v5e:8x8")
  least = preflight_plans.fewest_chips(plan, work, capacity=8192)
  assert 16 <= least.chips <= 64  # 20 bytes of each of 7.6e9 parameters alone fill nine chips
  with_more = dataclasses.replace(work, reference=False)
  assert preflight_plans.fewest_chips(plan, with_more, capacity=8192).chips <= least.chips


@pytest.mark.parametrize("model, topology", tpu.shipped(), ids=map(",".join, tpu.shipped()))
def test_no_slice_is_named_that_the_config_refuses(model, topology):
  c, plan, work = case(f"{model},{topology}")
  training = dataclasses.make_dataclass("Training", ["capacity"])(preflight_plans.capacity_of(c))
  result = stage.summary(plan, work, training, {}, price=0.0, least=c.preflight.fewest)
  offered = {t for m, t in tpu.shipped() if m == model}
  named = [row["topology"] for row in result["scaling"]]
  assert set(named) <= offered and (plan.slice.chips < 16 or topology in named)
  assert tpu.TABLE[model, plan.slice.chip.name].fewest <= result["chips_needed"] <= plan.slice.chips


def test_a_config_that_was_changed_names_no_refused_slice_either():
  """Without a reference and with moments in bfloat16 the estimate would allow 3B eight v5e chips."""
  c, plan, work = case(**{"train.loss.kl_coef": 0.0, "train.optimizer.moment_dtype": "bfloat16"})
  short = dataclasses.replace(plan, sft_rows=0)
  assert preflight_plans.fewest_chips(short, work, 8192).chips == 8
  assert preflight_plans.fewest_chips(short, work, 8192, least=c.preflight.fewest).chips == 16
  assert min(row["chips"] for row in preflight_plans.scaling(short, work, 8192, least=c.preflight.fewest)) == 16


@pytest.mark.parametrize("slots", [8, 16, 64])
def test_the_own_slice_of_the_scaling_is_the_prediction(slots):
  c, plan, work = case(**{"rollout.slots": slots})
  plan = dataclasses.replace(plan, update_received=9e9)  # as compiled
  assert preflight_plans.on_slice(plan, plan.slice) == plan
  row = next(row for row in preflight_plans.scaling(plan, work, 8192) if row["topology"] == "v5e:4x4")
  assert row["seconds"] == row["strong_seconds"] == preflight_plans.seconds(plan, work)
  more = preflight_plans.on_slice(plan, topologies.parse("v5e:8x8"))
  assert more.slots * more.slice.hosts == max(slots, 8) * 4  # two copies on each of four hosts have a slot at the least


def test_a_slice_with_less_room_is_told_with_a_policy_that_fits():
  _, plan, work = case("qwen2_5_3b,v5e:8x8")
  four = preflight_plans.on_slice(plan, topologies.parse("v5e:4x4"))
  assert plan.model.remat == "attention_gate"
  assert preflight_plans.fitted(plan, work, 8192) == plan
  assert preflight_plans.fitted(four, work, 8192).model.remat == "attention"
  assert preflight_plans.fitted(preflight_plans.on_slice(plan, topologies.parse("v5e:2x2")), work, 8192) is None


def test_memory_counts_what_else_lies_there():
  c, plan, work = case()
  training = preflight_plans.training_of(c)
  held = roofline.resident_bytes(plan, work, training.capacity)
  update = Compiled("update", peak=5 * GIB, arguments=GIB)
  # its own parameters are in its peak, the moments, the reference, the actors' copy and their cache are not
  assert stage.total_bytes(plan, work, training, update) == 5 * GIB + sum(held.values()) - held["params"]
  result = stage.summary(plan, work, training, {"update": update}, price=1.2)
  assert result["fits"] and result["programs"]["update"]["limit_gib"] == 15.75
  assert result["cost_per_iteration"] == pytest.approx(result["predicted_seconds"] / 3600 * 16 * 1.2)
  assert json.loads(json.dumps(result)) and "fits" in preflight_table.text(result)
  tight = dataclasses.replace(update, peak=10 * GIB)
  assert not stage.summary(plan, work, training, {"update": tight}, price=0.0)["fits"]


def test_what_does_not_fit_is_told_with_advice():
  c, plan, work = case()
  training = preflight_plans.training_of(c)
  told = stage.advice(plan, work, training, (), 0, None, lambda text: None)
  assert re.search(
    r"0 were compiled and none fits; by the estimate v5e:\dx4 \(\d+ chips\) is the smallest", told["text"]
  )


def test_the_tables_are_a_hundred_columns_wide_and_say_what_is_predicted():
  _, plan, work = case("qwen2_5_7b,v5p:8x8x8")
  training = preflight_plans.training_of(alfworld.get_config("qwen2_5_7b,v5p:8x8x8"))
  counts = dict.fromkeys(preflight_compile.OPS, 12_345)
  found = {name: Compiled(name, 90 * GIB, 0, counts=counts, received=123e9, seconds=1234.0) for name in stage.OWN}
  text = preflight_table.text(stage.summary(plan, work, training, found, price=4.2))
  assert max(map(len, text.splitlines())) <= 100
  assert re.search(r"^predicted +seconds +compute", text, re.MULTILINE)
  assert re.search(r"^update +114\.55 +12345 +12345", text, re.MULTILINE)


def test_scaling_names_the_term_that_dominates():
  _, plan, work = case("qwen2_5_7b,v5p:4x4x4")
  rows = list(preflight_plans.scaling(plan, work, 8192))
  assert [row["chips"] for row in rows] == [16, 32, 64, 128, 256, 512]
  assert all(row["episodes"] == 2 * row["chips"] and re.fullmatch(r"\w+ \(\w+\)", row["dominates"]) for row in rows)
  strong = [row["strong_seconds"] for row in rows]
  assert strong == sorted(strong, reverse=True)  # the same work on more chips
  weak = [row["seconds"] for row in rows]
  assert max(weak) < 1.5 * min(weak)  # as much work a chip
  assert preflight_table.scaling(rows, 4.2, 128).count("\n") == 7


@pytest.mark.parametrize(
  "arguments, told",
  [
    (["--stages=preflight"], "preflight runs alone and for a slice; example: --stages=preflight --topology=v5e:4x4"),
    (["--stages=preflight,train", "--topology=v5e:4x4"], "preflight runs alone and for a slice"),
    (["--stages=preflight", "--topology=v5e-16"], "the topology 'v5e-16' is unknown; there are "),
  ],
)
def test_a_wrong_command_ends_in_one_line(capfd, tmp_path, arguments, told):
  command = ["main", "--config=configs/alfworld.py:qwen2_5_3b,v5e:4x4", f"--workdir={tmp_path / 'w'}", *arguments]
  command[1] = command[1].replace("configs", str(main.pathlib.Path(main.__file__).parents[1] / "configs"))
  assert main.cli(command) in (1, 2)
  assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: {told}")
  assert not (tmp_path / "w").exists()
