"""The cost model: counts against those of the programs themselves, seconds against numbers worked out by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from seed_jax import ops, roofline, sharding, topologies
from seed_jax.models import decoder, presets
from seed_jax.models.config import REMAT, ModelConfig
from seed_jax.roofline import Plan, Work

SMALL = ModelConfig("Qwen2ForCausalLM", 512, 64, 3, 4, 2, 16, 160, qkv_bias=True)
UNTIED = ModelConfig("Qwen3ForCausalLM", 512, 64, 2, 4, 4, 16, 96, qk_norm=True, tie_embeddings=False)


def product_flops(jaxpr) -> float:
  """Operations of all matrix products of a program: 2 x the output's size x the contracted length; a loop's as often
  as it runs.
  """
  total = 0.0
  for eqn in jaxpr.eqns:
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      left = eqn.invars[0].aval.shape
      total += 2.0 * eqn.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
    for value in eqn.params.values():
      for inner in value if isinstance(value, tuple | list) else (value,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          total += times * product_flops(inner)
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


def training(model, B, T, R):
  """The program of gradients of log-probabilities at R positions, without what nothing reads, and its parameters."""
  columns = jnp.broadcast_to(jnp.arange(T), (B, T))

  def loss(params, tokens, index):
    hidden = decoder.forward(params, tokens, columns, jnp.ones_like(tokens), model)
    picked = decoder.gather_positions(hidden, index)
    logprobs, _ = ops.token_logprobs(picked, decoder.stored_head(params), index)
    return jnp.sum(logprobs)

  with jax.set_mesh(sharding.make_mesh()):
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model))
    numbers = [jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (T, R)]
    program = jax.make_jaxpr(jax.grad(loss))(params, *numbers).jaxpr
  return partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[0], params


@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("model", [SMALL, UNTIED])
def test_the_operations_of_a_training_step_are_those_of_the_program(model, remat):
  """On a CPU, where the backward pass of attention is one of five products."""
  B, T, R = 2, 128, 16
  model = dataclasses.replace(model, remat=remat, scan_layers=True)
  ours = roofline.training_flops(model, tokens=B * T, keys=T, logits=B * R, backward=2.5)
  assert product_flops(training(model, B, T, R)[0]) == ours


@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
@pytest.mark.parametrize("model", [SMALL, UNTIED])
def test_the_bytes_that_are_kept_are_those_between_the_passes(model, remat):
  """What the loop over layers of the forward pass leaves, stacked, but for copies of weights."""
  B, T = 2, 128
  model = dataclasses.replace(model, remat=remat, scan_layers=True, dtype="bfloat16")
  program, params = training(model, B, T, 16)
  forward = next(eqn for eqn in program.eqns if eqn.primitive.name == "scan")
  weights = {leaf.shape for leaf in jax.tree.leaves(params["layers"])}
  left = [v.aval for v in forward.outvars[forward.params["num_carry"] :] if v.aval.shape not in weights]
  log_totals = 4 * B * T * model.num_layers * model.num_heads * (not roofline.computed_again(model)[1])
  assert sum(a.size * a.dtype.itemsize for a in left) == roofline.kept_bytes(model, B * T) + log_totals


def test_what_is_kept_lies_over_tp_but_for_what_is_whole_on_every_chip():
  """Of 7B and a token on two chips: in a layer 2 D, and half of N H twice, of 2 K H and of 2 F."""
  model = dataclasses.replace(presets.get("qwen2_5_7b"), remat="dots")
  of_layer = 2 * 3584 + (2 * 3584 + 2 * 512 + 2 * 18_944) / 2
  assert roofline.kept_bytes(model, 1, tp=2) == 2 * 28 * of_layer


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
  layers, head = 16 * 2560 * 2 * roofline.layer_params(m), 2 * 16 * 1024 * 151_936 * 2048
  attention = 16 * 2560 * 4 * 36 * 16 * 128 * 1280
  blocks = 1.2 * attention  # of five blocks of 512 queries the n-th meets n blocks of keys, in all 15 of 12.5
  # Forward, backward of twice that, and again all of a layer but "down": D (2N + 2K) H + 2 D F of 3 D F. The kernels
  # of attention: 2 products, 2 again, 3 and 4. Logits: forward, again, and two gradients.
  again = (36 * 128 + 2 * 11_008) / (36 * 128 + 3 * 11_008)
  got = roofline.learner_pass(plan, train=True)
  done = (3 + again) * layers + 5.5 * blocks + 4 * head
  assert got.compute == pytest.approx(done / 16 / (197e12 * 0.75), rel=1e-9)
  assert got.useful == pytest.approx(3 * (layers + attention + head))
  scored = roofline.learner_pass(plan, train=False).compute
  assert scored == pytest.approx((layers + blocks + head) / 16 / (197e12 * 0.75))


def test_what_is_gathered_grows_with_the_chips_and_no_further():
  one, many = (roofline.learner_pass(plan_of(topology=t), train=True).transfer for t in ("v5e:1x1", "v5e:4x4"))
  assert one == 0.0
  m = presets.get("qwen2_5_3b")
  # two gathers and the gradients in bfloat16, over two links of 50 GB/s
  assert many == pytest.approx(6 * roofline.num_params(m) * 15 / 16 / (2 * 50e9 * 0.9), rel=1e-9)


def test_rematerialisation_costs_operations_and_saves_memory():
  names = ("none", "dots", "dots_no_batch", "attention_gate", "attention", "attention_out", "full")
  plans = [plan_of(remat=name) for name in names]
  computed = [phase(p, "update").compute for p in plans]
  assert set(names) == set(REMAT) and computed == sorted(computed)
  assert computed[0] == computed[1] < 0.83 * computed[-1]
  kept = [roofline.kept_bytes(p.model, 1000) for p in plans]
  assert kept == sorted(kept, reverse=True)


def test_heads_over_tp_add_sums_and_save_gathers():
  """7B on 8 x 2 chips with two rows a shard: half the weights gathered over two links, and four sums of [5120, D] a
  layer over the one link of a pair.
  """
  plan = plan_of("qwen2_5_7b", "v6e:4x4", tp=2, rows=2, remat="dots")
  gathered = 6 * roofline.num_params(plan.model) / 2 * 7 / 8
  summed = 4 * 28 * 5120 * 3584 * 2  # of two chips, each receives half of a sum to scatter and half of one to gather
  got = roofline.learner_pass(plan, train=True).transfer
  assert got == pytest.approx((gathered / 2 + summed) / (100e9 * 0.9), rel=1e-9)
  again = dataclasses.replace(plan, model=dataclasses.replace(plan.model, remat="full"))
  assert roofline.learner_pass(again, train=True).transfer == pytest.approx((gathered / 2 + 1.25 * summed) / 90e9)


def test_mfu_counts_no_recomputation_and_never_exceeds_the_chips_efficiency():
  for remat in ("none", "full"):
    update = phase(plan_of(remat=remat, rows=8), "update")
    assert 0.2 < update.mfu(topologies.parse("v5e:4x4")) < 0.75


def test_the_goals_of_the_shipped_presets_are_met_on_paper():
  work = Work(minibatches=8, analysis_prompt=6000, analysis_response=300)
  plan = plan_of(slots=16)
  assert sum(p.seconds for p in roofline.iteration(plan, work)) < 240
  assert phase(plan, "update", work).mfu(plan.slice) >= 0.45
  for changes in (dict(topology="v5p:4x4x4", slots=8), dict(topology="v6e:4x4", tp=2, rows=2, slots=16)):
    large = plan_of("qwen2_5_7b", remat="dots", actor_tp=4, **changes)
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


@pytest.mark.parametrize(
  "model, changes, compiled",
  [
    ("qwen2_5_3b", dict(remat="attention", slots=16), 11.70),
    ("qwen2_5_3b", dict(slots=16), 10.53),
    ("qwen2_5_7b", dict(topology="v6e:4x4", remat="dots", tp=2, rows=2, actor_tp=4, slots=16), 26.27),
    ("qwen2_5_7b", dict(topology="v6e:4x4", actor_tp=4, slots=16), 20.00),
    ("qwen2_5_7b", dict(topology="v5p:4x4x4", remat="dots", actor_tp=4, slots=8), 17.41),
  ],
)
def test_the_estimate_of_memory_is_a_little_more_than_the_compiler_says(model, changes, compiled):
  """GiB of updates "with the rest", as docs/preflight.md has them."""
  parts = roofline.memory(plan_of(model, **changes), Work(), capacity=8192)
  assert compiled <= sum(parts.values()) / 2**30 <= compiled + 0.65


def test_memory_is_that_of_the_stage_that_takes_more():
  """Stage 1 has no actors, and its longer rows keep more."""
  plan = plan_of(remat="dots", slots=16)
  short, long = (dataclasses.replace(plan, sft_length=n, sft_rows=16) for n in (2560, 8192))
  stage_2 = roofline.memory(plan, Work(), 8192)
  assert roofline.memory(short, Work(), 8192) == stage_2 and "actor" in stage_2
  stage_1 = roofline.memory(long, Work(reference=False), 8192)
  assert stage_1.keys() == {"params", "moments", "reference", "update"}
  assert stage_1["update"] - stage_2["update"] >= roofline.kept_bytes(plan.model, 8192 - 2560)
  assert sum(stage_1.values()) > 15.75 * 2**30 and not roofline.fits(long, Work(), 8192)
  assert roofline.fits(plan_of(slots=16), Work(), 8192)
