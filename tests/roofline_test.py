"""The cost model: counts against those of the programs themselves, seconds against numbers worked out by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from seed_jax import roofline, sharding, topologies
from seed_jax.models import decoder, presets
from seed_jax.models.config import ModelConfig
from seed_jax.roofline import Plan, Work

SMALL = ModelConfig("Qwen2ForCausalLM", 512, 64, 3, 4, 2, 16, 160, qkv_bias=True)
UNTIED = ModelConfig("Qwen3ForCausalLM", 512, 64, 2, 4, 4, 16, 96, qk_norm=True, tie_embeddings=False)


def product_flops(jaxpr) -> float:
  """Operations of all matrix products of a program: 2 x the output's size x the contracted length."""
  total = 0.0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      left = eqn.invars[0].aval.shape
      total += 2.0 * eqn.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          total += product_flops(inner)
  return total


@pytest.mark.parametrize("model", [SMALL, UNTIED])
def test_the_operations_of_a_forward_pass_are_those_of_the_program(model):
  B, T, R = 2, 128, 16  # up to 128 columns every query meets every key

  def forward(params, tokens, index):
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    hidden = decoder.forward(params, tokens, positions, jnp.ones_like(tokens), model)
    return decoder.logits_at(params, decoder.gather_positions(hidden, index), model)

  with jax.set_mesh(sharding.make_mesh()):
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model))
    jaxpr = jax.make_jaxpr(forward)(params, jnp.zeros((B, T), jnp.int32), jnp.zeros((B, R), jnp.int32))
  assert product_flops(jaxpr.jaxpr) == roofline.forward_flops(model, tokens=B * T, keys=T, logits=B * R)


def test_the_compilers_count_of_an_unrolled_model_is_ours_and_a_little_for_norms():
  B, T = 1, 128

  @jax.jit
  def forward(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(T), tokens.shape)
    hidden = decoder.forward(params, tokens, positions, jnp.ones_like(tokens), SMALL)
    return decoder.logits_at(params, hidden, SMALL)

  with jax.set_mesh(sharding.make_mesh()):
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), SMALL))
    cost = forward.lower(params, jax.ShapeDtypeStruct((B, T), jnp.int32)).compile().cost_analysis()
  ours = roofline.forward_flops(SMALL, tokens=B * T, keys=T, logits=B * T)
  assert ours < cost["flops"] < 1.1 * ours


@pytest.mark.parametrize("model", [SMALL, UNTIED, *presets.PRESETS.values()])
def test_the_number_of_parameters_is_that_of_the_tree(model):
  tree = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model))
  assert roofline.num_params(model) == sum(leaf.size for leaf in jax.tree.leaves(tree)) == model.num_parameters


def plan_of(model="qwen2_5_3b", topology="v5e:4x4", tp=1, rows=1, **changes):
  """A plan with full remat, as the ALFWorld preset has it."""
  slice_ = topologies.parse(topology)
  preset = dataclasses.replace(presets.get(model), remat=changes.pop("remat", "full"))
  shards = slice_.chips // tp
  base = Plan(preset, slice_, 1, shards, tp, actor_tp=2, row_length=2560, responses=1024, rows=rows * shards, slots=32)
  return dataclasses.replace(base, **changes)


def phase(plan, name, work=None):
  return next(p for p in roofline.iteration(plan, work or Work()) if p.name == name)


def test_a_decode_step_reads_the_weights_and_the_cache():
  """A copy of 3B on two chips: 3.085e9 weights x 2 bytes / 2 = 3.085 GB, and its 16 slots of 540 tokens x 36,864 bytes
  / 2 chips = 0.159 GB; over 819 GB/s x 0.8 that is 4.95 ms a token.
  """
  work = Work(episodes=128, turns=1, skills=False)  # 32 a host, all at once, 120 tokens each
  step = phase(plan_of(), "decode", work).memory / work.response
  weights = 2 * (roofline.layer_params(presets.get("qwen2_5_3b")) + 151_936 * 2048) / 2
  assert weights == pytest.approx(3.085e9, rel=1e-3)
  assert step == pytest.approx((weights + 16 * 540 * 36_864 / 2) / (819e9 * 0.8), rel=1e-9)
  assert step == pytest.approx(4.95e-3, rel=0.01)


def test_a_micro_batch_takes_its_operations_over_the_rate():
  plan = plan_of()
  m = plan.model
  forward = 16 * 2560 * (2 * roofline.layer_params(m) + 4 * 36 * 16 * 128 * 1280) + 2 * 16 * 1024 * 151_936 * 2048
  got = roofline.learner_pass(plan, train=True)
  # forward, backward of twice that, and with full remat all layers once more
  assert got.compute == pytest.approx(4 * forward / 16 / (197e12 * 0.75), rel=1e-9)
  assert got.useful == pytest.approx(3 * forward)
  assert roofline.learner_pass(plan, train=False).compute == pytest.approx(got.compute / 4)


def test_what_is_gathered_grows_with_the_chips_and_no_further():
  one, many = (roofline.learner_pass(plan_of(topology=t), train=True).transfer for t in ("v5e:1x1", "v5e:4x4"))
  assert one == 0.0
  m = presets.get("qwen2_5_3b")
  # two gathers and the gradients in bfloat16, over two links of 50 GB/s
  assert many == pytest.approx(6 * roofline.num_params(m) * 15 / 16 / (2 * 50e9 * 0.9), rel=1e-9)


def test_rematerialisation_costs_operations_and_saves_memory():
  plans = [plan_of(remat=name) for name in ("none", "dots_no_batch", "attention_out", "full")]
  computed = [phase(p, "update").compute for p in plans]
  assert computed == sorted(computed) and computed[0] == pytest.approx(0.75 * computed[-1])
  kept = [roofline.kept_bytes(p.model, 1000, p.model.remat) for p in plans]
  assert kept == sorted(kept, reverse=True)


def test_mfu_counts_no_recomputation_and_never_exceeds_the_chips_efficiency():
  for remat in ("none", "full"):
    update = phase(plan_of(remat=remat, rows=8), "update")
    assert 0.2 < update.mfu(topologies.parse("v5e:4x4")) < 0.75


def test_the_goals_of_the_shipped_presets_are_met_on_paper():
  work = Work(minibatches=8, analysis_prompt=6000, analysis_response=300)
  plan = plan_of(slots=16)
  assert sum(p.seconds for p in roofline.iteration(plan, work)) < 240
  assert phase(plan, "update", work).mfu(plan.slice) >= 0.45
  large = plan_of("qwen2_5_7b", "v5p:4x4x4", remat="dots_no_batch", actor_tp=4, slots=8)
  assert phase(large, "update", work).mfu(large.slice) >= 0.45


def test_scoring_passes_are_those_of_the_learner():
  """One mini-batch: the skill context; four: that and three quarters of the ordinary one; then the reference's."""
  plan = plan_of(widening=1.2)
  score = lambda **changes: phase(plan, "score", Work(**changes)).compute  # noqa: E731
  one = score(skills=False, reference=True)
  assert score(skills=True, reference=False) == pytest.approx(1.2 * one)
  many = dict(minibatches=4, episodes=1024)
  each = score(**many, skills=False, reference=True) / 1.75
  assert score(**many) == pytest.approx(each * (1.2 * 1.75 + 1))


def test_the_actors_copy_is_cast_and_received():
  """3.086e9 weights over 16 chips, cast from 4 bytes to 2 and received by every chip, over two links of 50 GB/s; summed
  instead where heads lie otherwise at the learner's."""
  plan, n = plan_of(), roofline.num_params(presets.get("qwen2_5_3b"))
  assert phase(plan, "cast").memory == pytest.approx(6 * n / 16 / (819e9 * 0.8))
  assert phase(plan, "place").transfer == pytest.approx(2 * n * 15 / 16 / (2 * 50e9 * 0.9))
  same = plan_of(tp=2)
  assert phase(same, "place").transfer == pytest.approx(n * 7 / 8 / (2 * 50e9 * 0.9))
  other = plan_of(tp=4)
  assert phase(other, "place").transfer == pytest.approx(4 * n * 15 / 16 / (2 * 50e9 * 0.9))
  names = [p.name for p in roofline.iteration(plan_of(own_copy=False, actor_fsdp=2), Work())]
  assert "decode" in names and not {"cast", "place"} & set(names)


def test_actors_that_store_their_weights_over_fsdp_gather_them_at_every_token():
  plan = plan_of(actor_fsdp=2)
  work = Work(episodes=128, turns=1, skills=False)
  more = phase(plan, "decode", work).transfer - phase(plan_of(), "decode", work).transfer
  m = plan.model
  weights = 2 * (roofline.layer_params(m) + roofline.head_params(m)) / 2
  assert more == pytest.approx(work.response * weights / 2 / (2 * 50e9 * 0.9))
  held = roofline.resident_bytes(plan, work, 8192)["actor"]
  assert held == roofline.num_params(m) * 2 / 4


def test_each_mini_batch_ends_in_a_micro_batch_that_is_not_full():
  work = Work(episodes=1, turns=1, reference=False)
  one, four = (phase(plan_of(), "update", dataclasses.replace(work, minibatches=n)) for n in (1, 4))
  assert four.compute == pytest.approx(4 * one.compute)


def test_memory_of_a_chip_that_lies_there_all_the_time():
  """3.086e9 parameters over 16 chips: 4, 8 and 4 bytes; the actors' 2 over two chips; 8 slots of a chip pair's copy."""
  held = roofline.resident_bytes(plan_of(slots=16), Work(), capacity=8192)
  gib = {name: round(size / 2**30, 2) for name, size in held.items()}
  assert gib == {"params": 0.72, "moments": 1.44, "reference": 0.72, "actor": 2.87, "cache": 1.12}
  halved = roofline.resident_bytes(plan_of(moment_bytes=2), Work(reference=False), capacity=8192)
  assert halved["moments"] == held["moments"] / 2 and halved["reference"] == 0
