"""Batches, paired scoring and the update: packing, micro-batches and meshes change nothing; the pair needs no
collective.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_cases import CONFIG, samples

from seed_jax import batching, losses, methods, score, sharding, update
from seed_jax.batching import RowShape
from seed_jax.models import decoder
from seed_jax.update import LossConfig, MethodLoss

SHAPES = (RowShape(24, 16, 8), RowShape(48, 32, 8, skill_length=52))
LOSS = LossConfig(kl_coef=0.05, opd_coef=0.3, entropy_coef=0.01, temperature=0.8)


@pytest.fixture(scope="module")
def params():
  return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, decoder.init(jax.random.key(1), CONFIG))


def one_by_one(params, sample, which):
  """Log-probabilities of one sample by a plain forward pass over it alone."""
  tokens, index = (sample.tokens, sample.index) if which == "ordinary" else (sample.skill_tokens, sample.skill_index)
  logits = np.asarray(decoder.logits(params, np.asarray(tokens)[None], CONFIG))[0]
  return np.asarray(jax.nn.log_softmax(logits[index] / LOSS.temperature))[np.arange(len(index)), sample.targets]


def scored_batches(params, some, mesh, shapes=SHAPES, skills=True):
  with jax.set_mesh(mesh):
    on_mesh = sharding.put_params(params, mesh)
    out = []
    for batch in batching.to_batches(some, shapes, mesh, skills=skills):
      old, skill = score.score_pair(
        on_mesh, batch.ordinary, batch.skill, batch.targets, batch.count, CONFIG, temperature=LOSS.temperature
      )
      ref = 0.9 * old
      out.append(batch.replace(old_logprobs=old - 0.1 * batch.mask, skill_logprobs=skill, ref_logprobs=ref, skill=None))
    return out


def by_sample(batches, field, some, shapes=SHAPES):
  """Values of a [M, B, R] field put back in the order of the samples."""
  values = {}
  for batch, (_, rows) in zip(batches, batching.pack(some, shapes).items(), strict=True):
    flat = np.asarray(getattr(batch, field)).reshape(-1, batch.targets.shape[-1])
    assert len(rows) <= len(flat)
    for line, row in zip(flat, rows, strict=False):
      at = 0
      for s in row:
        values[id(s)] = line[at : at + len(s.targets)]
        at += len(s.targets)
  return [values[id(s)] for s in some]


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (1, 4, 2), (2, 2, 2)])
def test_packed_pair_equals_each_sample_alone(params, shape):
  some = samples()
  batches = scored_batches(params, some, sharding.make_mesh(*shape))
  old, skill = by_sample(batches, "old_logprobs", some), by_sample(batches, "skill_logprobs", some)
  for s, o, k in zip(some, old, skill, strict=True):
    np.testing.assert_allclose(o + 0.1, one_by_one(params, s, "ordinary"), atol=1e-5)
    if s.skill_tokens is not None:
      np.testing.assert_allclose(k, one_by_one(params, s, "skill"), atol=1e-5)
    else:
      np.testing.assert_allclose(k, o + 0.1, atol=1e-6)  # no skill: both branches are the ordinary one


def test_empty_rows_and_padding_have_no_mask():
  some = samples(5)
  batches = batching.to_batches(some, SHAPES, sharding.make_mesh(), skills=True)
  total = sum(float(np.asarray(b.mask).sum()) for b in batches)
  assert total == sum(len(s.targets) for s in some)
  active = sum(float((np.asarray(b.mask) * np.asarray(b.skill_mask)).sum()) for b in batches)
  assert active == sum(len(s.targets) for s in some if s.skill_tokens is not None)


def one_step(params, some, mesh, shapes=SHAPES, method="seed", optimizer=None, config=LOSS):
  optimizer = optimizer or optax.sgd(1.0)
  step = update.make_update(CONFIG, MethodLoss(methods.get(method), config), optimizer, temperature=LOSS.temperature)
  with jax.set_mesh(mesh):
    state = update.init_state(sharding.put_params(params, mesh), optimizer)
    return step(state, scored_batches(params, some, mesh, shapes))


def gradient(params, some, mesh, shapes=SHAPES, method="seed", config=LOSS):
  new, metrics = one_step(params, some, mesh, shapes, method, config=config)
  return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, new.params), {
    k: float(v) for k, v in metrics.items()
  }


def test_gradient_is_that_of_the_loss_over_unpacked_samples(params):
  """The definition: every sample in a row of its own, one batch, one call of losses.seed_loss."""
  some = samples()
  R = max(len(s.targets) for s in some)
  mesh = sharding.make_mesh()
  on_rows = lambda values: sharding.put_rows(np.asarray(values), mesh)  # noqa: E731
  pad = lambda values: on_rows([np.pad(np.asarray(v, np.float32), (0, R - len(v))) for v in values])  # noqa: E731
  mask, skill_mask = (
    pad([np.ones(len(s.targets)) for s in some]),
    on_rows([[float(s.skill_tokens is not None)] * R for s in some]),
  )
  old = [one_by_one(params, s, "ordinary") for s in some]
  skill = [one_by_one(params, s, "skill") if s.skill_tokens is not None else o for s, o in zip(some, old, strict=True)]

  T = max(len(s.tokens) for s in some)
  whole = lambda values, width: on_rows([np.pad(v, (0, width - len(v))).astype(np.int32) for v in values])  # noqa: E731
  rows = score.Context(
    whole([s.tokens for s in some], T),
    whole([np.arange(len(s.tokens)) for s in some], T),
    whole([np.ones(len(s.tokens)) for s in some], T),
    whole([s.index for s in some], R),
  )

  def loss(params):
    logprobs, entropy = score.response_logprobs(
      params, rows, whole([s.targets for s in some], R), CONFIG, temperature=LOSS.temperature
    )
    return losses.seed_loss(
      logprobs=logprobs,
      old_logprobs=pad(old) - 0.1 * mask,
      advantages=pad([s.advantages for s in some]),
      skill_logprobs=pad(skill),
      mask=mask,
      skill_mask=skill_mask,
      ref_logprobs=0.9 * pad(old),
      entropy=entropy,
      opd_coef=LOSS.opd_coef,
      opd_beta=LOSS.opd_beta,
      kl_coef=LOSS.kl_coef,
      entropy_coef=LOSS.entropy_coef,
    )

  with jax.set_mesh(mesh):
    (value, expected_metrics), expected = jax.value_and_grad(loss, has_aux=True)(sharding.put_params(params, mesh))
  got, metrics = gradient(params, some, sharding.make_mesh())
  assert metrics["loss"] == pytest.approx(float(value), abs=1e-5)
  for name, metric in expected_metrics.items():
    assert metrics[name] == pytest.approx(float(metric), abs=1e-5), name
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, expected)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 4, 2), (2, 2, 2)])
def test_update_on_a_mesh_is_the_update_on_one_device(params, shape):
  one, metrics_one = gradient(params, samples(), sharding.make_mesh())
  many, metrics_many = gradient(params, samples(), sharding.make_mesh(*shape))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, many)
  for name in metrics_one:
    assert metrics_many[name] == pytest.approx(metrics_one[name], rel=1e-5, abs=1e-5), name  # a norm of 8 in float32


def test_micro_batches_and_row_lengths_do_not_change_the_gradient(params):
  wide = gradient(params, samples(), sharding.make_mesh(), (RowShape(64, 48, 16),))[0]
  narrow = gradient(params, samples(), sharding.make_mesh(), (RowShape(20, 12, 1), RowShape(30, 16, 2)))[0]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), wide, narrow)


@pytest.mark.parametrize("method", ["gspo", "dr_grpo"])
def test_losses_of_sequences_do_not_depend_on_how_samples_are_packed(params, method):
  # clip wide enough that some ratios are inside, and a row of the first shape holds several samples
  changes = methods.loss_settings(method) | dict(clip_low=0.2, clip_high=0.2, kl_coef=0.05)
  config = dataclasses.replace(LOSS, **changes)
  alone = (RowShape(48, 32, 8),)
  results = []
  for mesh, shapes, place in (
    (sharding.make_mesh(), alone, batching.one_per_row),
    (sharding.make_mesh(), (RowShape(64, 48, 4),), batching.pack),
    (sharding.make_mesh(2, 2, 2), SHAPES, batching.pack),
  ):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(batching.to_batches, "__kwdefaults__", batching.to_batches.__kwdefaults__ | dict(place=place))
      results.append(gradient(params, samples(), mesh, shapes, method, config))
  for got, metrics in results[1:]:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, results[0][0])
    for name, value in metrics.items():
      assert value == pytest.approx(results[0][1][name], rel=1e-5, abs=1e-5), name
  assert results[0][1]["grad_norm"] > 0


def test_a_transforms_strength_may_change_over_the_run(params):
  mesh = sharding.make_mesh()
  step = update.make_update(
    CONFIG,
    MethodLoss(methods.get("rlsd"), dataclasses.replace(LOSS, transform_coef=0.5)),
    optax.sgd(1.0),
    temperature=LOSS.temperature,
  )
  with jax.set_mesh(mesh):
    batches = scored_batches(params, samples(), mesh)
    losses_of = {}
    for coef in (None, 0.5, 0.0):
      traced = [b if coef is None else b.replace(transform_coef=jnp.float32(coef)) for b in batches]
      _, metrics = step(update.init_state(sharding.put_params(params, mesh), optax.sgd(1.0)), traced)
      losses_of[coef] = float(metrics["pg_loss"])
  grpo = gradient(params, samples(), mesh, method="grpo")[1]["pg_loss"]
  assert losses_of[None] == losses_of[0.5] != losses_of[0.0]
  assert losses_of[0.0] == pytest.approx(grpo, abs=1e-6)


def test_state_keeps_the_specs_of_the_parameters(params):
  mesh = sharding.make_mesh(2, 2, 2)
  state, _ = one_step(params, samples(), mesh, optimizer=optax.adamw(1e-3))
  specs = sharding.param_specs(state.params)
  for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
    jax.tree.map(
      lambda x, s: pytest.fail(f"{x.sharding.spec} is not {s}") if x.sharding.spec != s else None, tree, specs
    )


def test_grpo_ignores_the_skill_branch_and_equals_seed_without_skills(params):
  seed = gradient(params, samples(skills=False), sharding.make_mesh(), method="seed")[0]
  grpo = gradient(params, samples(), sharding.make_mesh(), method="grpo")[0]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), seed, grpo)


def test_a_batch_without_a_valid_token_changes_nothing_and_is_not_nan(params):
  mesh = sharding.make_mesh()
  step = update.make_update(CONFIG, MethodLoss(methods.get("seed"), LOSS), optax.sgd(1.0), temperature=LOSS.temperature)
  with jax.set_mesh(mesh):
    batches = [b.replace(mask=jnp.zeros_like(b.mask)) for b in scored_batches(params, samples(4), mesh)]
    state, metrics = step(update.init_state(sharding.put_params(params, mesh), optax.sgd(1.0)), batches)
  assert float(metrics["grad_norm"]) == 0.0 and float(metrics["loss"]) == 0.0
  jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_a_step_with_nan_gradients_is_skipped(params):
  mesh = sharding.make_mesh()
  step = update.make_update(
    CONFIG, MethodLoss(methods.get("grpo"), LOSS), optax.adamw(1.0), temperature=LOSS.temperature
  )
  with jax.set_mesh(mesh):
    batches = [b.replace(advantages=b.advantages * jnp.nan) for b in scored_batches(params, samples(4), mesh)]
    state, metrics = step(update.init_state(sharding.put_params(params, mesh), optax.adamw(1.0)), batches)
  assert float(metrics["skipped"]) == 1.0 and int(state.step) == 1
  jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_interleaving_the_pair_needs_no_collective():
  mesh = sharding.make_mesh(4, 2, 1)
  with jax.set_mesh(mesh):
    rows = sharding.put_rows(np.zeros((8, 24), np.int32), mesh)
    context = score.Context(rows, rows, rows, rows)
    text = (
      jax.jit(lambda a, b: score.split_pair(score.interleave(a, b).tokens)).lower(context, context).compile().as_text()
    )
  assert not [
    word for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter") if word in text
  ]


def test_sft_loss_is_the_mean_negative_log_likelihood(params):
  some = [batching.text_sample([3, 4, 5], [6, 7, 1]), batching.text_sample([], [8, 9, 10, 11])]
  mesh = sharding.make_mesh()
  step = update.make_update(CONFIG, update.sft_loss, optax.sgd(0.0))
  with jax.set_mesh(mesh):
    _, metrics = step(
      update.init_state(sharding.put_params(params, mesh), optax.sgd(0.0)),
      batching.to_batches(some, SHAPES, mesh, skills=False),
    )
  expected = []
  for prompt, response in (([3, 4, 5], [6, 7, 1]), ([8], [9, 10, 11])):
    ids = np.asarray([prompt + response])
    logp = np.asarray(jax.nn.log_softmax(decoder.logits(params, ids, CONFIG)))[0, len(prompt) - 1 : -1]
    expected += [-logp[i, t] for i, t in enumerate(response)]
  assert float(metrics["loss"]) == pytest.approx(np.mean(expected), abs=1e-5)


def test_pack_refuses_what_fits_no_row_with_the_numbers():
  long = batching.text_sample([2] * 40, [3] * 20)
  with pytest.raises(ValueError, match=r"59 tokens \(20 sampled\) fits no row of \[\(24, 16\), \(48, 32\)\]"):
    batching.pack([long], SHAPES)


def test_pack_never_overfills_and_loses_nothing():
  some = samples(60, seed=3)
  rows = batching.pack(some, SHAPES)
  placed = [s for r in rows.values() for row in r for s in row]
  assert sorted(map(id, placed)) == sorted(map(id, some))
  for shape, filled in rows.items():
    for row in filled:
      assert (np.sum([s.needs for s in row], axis=0) <= shape.room).all()


def test_scanned_layers_give_the_same_gradient(params, monkeypatch):
  unrolled = gradient(params, samples(), sharding.make_mesh())[0]
  monkeypatch.setattr(f"{__name__}.CONFIG", dataclasses.replace(CONFIG, scan_layers=True))
  scanned = gradient(params, samples(), sharding.make_mesh())[0]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), unrolled, scanned)
