"""The learning half of an iteration: which passes are made, that leaving some out changes nothing, what is compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_cases import CONFIG as TWO_LAYERS
from batch_cases import samples

from seed_jax import batching, learn, methods, score, sharding, skill_quality, update
from seed_jax.batching import RowShape
from seed_jax.metrics import CompileCounter
from seed_jax.models import decoder
from seed_jax.update import LossConfig, MethodLoss

CONFIG = batching.dataclasses.replace(TWO_LAYERS, num_layers=1)  # half the time that compiling takes
SHAPES = (RowShape(24, 16, 4), RowShape(48, 32, 4))
LOSS = LossConfig(kl_coef=0.05, opd_coef=0.3, temperature=0.8)
MESH = sharding.make_mesh()


@pytest.fixture(scope="module")
def params():
  return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, decoder.init(jax.random.key(1), CONFIG))


def scoring(method="seed", rescore="iteration", loss=LOSS):
  return learn.Scoring(CONFIG, methods.get(method), loss, rescore)


def parts_of(some, count, skills=True, shapes=SHAPES[1:]):
  parts = learn.mini_batches(some, count, seed=5)
  return parts, [batching.to_batches(part, shapes, MESH, skills=skills) for part in parts]


def with_sampler(some, params):
  """The samples with the policy's own log-probabilities, a little off, as the sampler's."""
  rng = np.random.default_rng(3)
  out = []
  for s in some:
    logits = np.asarray(decoder.logits(params, s.tokens[None], CONFIG))[0, s.index]
    own = np.asarray(jax.nn.log_softmax(logits / LOSS.temperature))[np.arange(len(s.index)), s.targets]
    gaps = rng.normal(size=len(own)).astype(np.float32) * 0.1
    out.append((batching.dataclasses.replace(s, logprobs=own + gaps), np.abs(gaps)))
  return [s for s, _ in out], np.concatenate([g for _, g in out])


def make(params, scores, optimizer):
  step = update.make_update(CONFIG, MethodLoss(scores.method, scores.loss), optimizer, temperature=LOSS.temperature)
  return step, update.init_state(sharding.put_params(params, MESH), optimizer)


def test_mini_batches_share_out_every_sample_once():
  parts = learn.mini_batches(list(range(10)), 3, seed=5)
  assert sorted(sum(parts, [])) == list(range(10)) and [len(p) for p in parts] == [4, 3, 3]
  assert all(p == sorted(p) for p in parts) and parts == learn.mini_batches(list(range(10)), 3, seed=5)
  assert [len(p) for p in learn.mini_batches([1, 2], 4, seed=5)] == [1, 1]
  assert learn.mini_batches([], 2, seed=5) == [[]]


@pytest.mark.parametrize("method, rescore", [("seed", "iteration"), ("seed", "minibatch"), ("grpo", "iteration")])
def test_an_old_policy_that_is_not_scored_is_the_updates_own(params, method, rescore):
  """Every log-probability by score_pair beforehand, as the contract has it, against as few passes as possible."""
  scores = scoring(method, rescore)
  some, gaps = with_sampler(samples(14, skills=method == "seed"), params)
  with jax.set_mesh(MESH):
    _, minibatches = parts_of(some, 2, skills=method == "seed")
    step, state = make(params, scores, optax.sgd(0.1))
    reference = jax.tree.map(lambda x: 0.9 * x, state.params)

    def everything(batch):
      if batch.skill is None:
        pair = score.score(state.params, batch.ordinary, batch.targets, batch.count, CONFIG, temperature=0.8), None
      else:
        pair = score.score_pair(
          state.params, batch.ordinary, batch.skill, batch.targets, batch.count, CONFIG, temperature=0.8
        )
      ref = score.score(reference, batch.ordinary, batch.targets, batch.count, CONFIG, temperature=0.8)
      return batch.replace(old_logprobs=pair[0], skill_logprobs=pair[1], ref_logprobs=ref)

    whole = [[everything(b) for b in part] for part in minibatches]
    few = learn.score_all(minibatches, state.params, reference, scores)
    start = jax.tree.map(jnp.copy, state)
    got, metrics = learn.update_all(step, state, few, scores)
    expected, expected_metrics = learn.update_all(step, start, whole, scores)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got.params, expected.params)
  assert metrics.keys() == expected_metrics.keys()
  for name in metrics:
    assert metrics[name] == pytest.approx(expected_metrics[name], abs=1e-5), name
  # measured without a pass of its own
  assert metrics["mismatch_max"] == pytest.approx(gaps.max(), abs=1e-5)
  assert metrics["mismatch_mean"] == pytest.approx(gaps.mean(), rel=0.2)  # a mean of two means


@pytest.mark.parametrize("rescore", learn.RESCORE)
def test_a_teacher_that_does_not_move_reads_the_skill_context_and_nothing_else(params, rescore):
  held = scoring("seed_frozen_teacher", rescore)
  policy = jax.tree.map(lambda x: x * 1.1, params)
  with jax.set_mesh(MESH):
    _, minibatches = parts_of(samples(9), 2)
    ours, start = sharding.put_params(policy, MESH), sharding.put_params(params, MESH)
    found = learn.score_all(minibatches, ours, start, held, start)
    by_policy = learn.score_all(minibatches, ours, start, scoring())
    by_start = learn.score_all(minibatches, start, start, scoring())
  assert not held.rescores
  for part, own, other in zip(found, by_policy, by_start, strict=True):
    for batch, mine, starts in zip(part, own, other, strict=True):
      np.testing.assert_allclose(batch.old_logprobs, mine.old_logprobs, atol=1e-5)
      np.testing.assert_allclose(batch.ref_logprobs, mine.ref_logprobs, atol=1e-5)
      np.testing.assert_allclose(batch.skill_logprobs, starts.skill_logprobs, atol=1e-5)
      assert np.abs(np.asarray(batch.skill_logprobs) - np.asarray(mine.skill_logprobs)).max() > 0.01


def test_what_has_no_skill_is_left_out_of_the_skill_pass(params):
  scores = scoring(loss=LossConfig(kl_coef=0.0))
  shapes = (RowShape(24, 16, 1),)
  with jax.set_mesh(MESH):
    (part,), ((batch,),) = parts_of(samples(9), 1, shapes=shapes)
    on_mesh = sharding.put_params(params, MESH)
    first = learn.scored(batch, on_mesh, None, scores, first=True)
    later = learn.scored(batch, on_mesh, None, scores, first=False)
  with_skill = int(batch.skill_count)
  assert 0 < with_skill < int(batch.count)
  assert sum(s.skill_tokens is None for s in part) > 0
  for scored in (first, later):
    assert (
      np.asarray(scored.skill_logprobs)[:with_skill].any() and not np.asarray(scored.skill_logprobs)[with_skill:].any()
    )
    assert not (np.asarray(batch.skill_mask) * np.asarray(batch.mask))[with_skill:].any()
  assert first.ref_logprobs is None and bool(first.own_old) and not bool(later.own_old)
  with jax.set_mesh(MESH):  # the later one's old log-probabilities are there for every row
    old = score.score(on_mesh, batch.ordinary, batch.targets, batch.count, CONFIG)
  np.testing.assert_allclose(later.old_logprobs, old, atol=1e-6)


@pytest.mark.parametrize("method, rescore", [("seed", "iteration"), ("seed", "minibatch"), ("grpo", "iteration")])
def test_after_the_warm_up_nothing_is_compiled_whatever_the_number_of_samples(params, method, rescore):
  scores, skills = scoring(method, rescore), method == "seed"
  optimizer = optax.adamw(1e-2)
  with jax.set_mesh(MESH), CompileCounter() as compiled:
    step, state = make(params, scores, optimizer)
    reference = sharding.put_params(params, MESH)
    before = jax.tree.map(np.asarray, state)
    todo = learn.programs(step, state, reference, scores, SHAPES, MESH, minibatches=2)
    for _, compile_it in todo:
      compile_it()
    jax.tree.map(np.testing.assert_array_equal, state, before)
    assert compiled.take() > 0 and len({name for name, _ in todo}) == len(todo)
    programs_of = {name: n for name, n in compiled.names.items() if "score" in name or "accumulate" in name}
    for count in (11, 3, 400, 1, 0, 40):
      some = samples(count, seed=count, skills=skills)
      _, minibatches = parts_of(some, 2, skills, SHAPES)
      assert 0 <= batching.row_fill(some, [b for part in minibatches for b in part]) <= 1
      assert count < 400 or max(len(part) for part in minibatches) > 2  # more than one batch of a row shape
      state, metrics = learn.update_all(
        step, state, learn.score_all(minibatches, state.params, reference, scores), scores
      )
      assert np.isfinite(metrics["loss"])
  assert compiled.take() == 0, compiled.names
  for name, n in programs_of.items():
    assert n <= len(SHAPES), (name, n)  # each once a row shape


def test_the_largest_of_a_metric_is_kept_and_the_others_are_means():
  metrics = iter([{"loss": 1.0, "mismatch_max": 0.5}, {"loss": 2.0, "mismatch_max": 0.25}])

  class Step:
    def pieces(self, state, part):
      yield
      return state + 1, jax.tree.map(np.float32, next(metrics))

  state, log = learn.update_all(Step(), 0, [[], []], scoring())
  assert state == 2 and log == {"loss": 1.5, "mismatch_max": 0.5}


def test_importance_weights_reach_the_gradient(params):
  """Every token's weight at the cap: the policy gradient, and it alone, is multiplied by the cap."""
  some = [batching.dataclasses.replace(s, logprobs=np.full(len(s.targets), -50.0, np.float32)) for s in samples(6)]

  def moved(**changes):
    scores = scoring("grpo", loss=LossConfig(kl_coef=0.0, temperature=0.8, **changes))
    with jax.set_mesh(MESH):
      _, minibatches = parts_of(some, 1, skills=False)
      step, state = make(params, scores, optax.sgd(1.0))
      state, metrics = learn.update_all(step, state, learn.score_all(minibatches, state.params, None, scores), scores)
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.params, params), metrics

  plain, metrics = moved()
  weighed, with_weights = moved(tis_cap=2.0)
  assert "tis_weight_mean" not in metrics and with_weights["tis_weight_mean"] == pytest.approx(2.0)
  assert with_weights["tis_capped_fraction"] == pytest.approx(1.0) and metrics["mismatch_mean"] > 40
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), weighed, jax.tree.map(lambda x: 2 * x, plain))


def test_pairs_are_those_of_the_tokens_with_a_skill_each_with_its_episode():
  """Every sample's numbers say whose they are: the sampler's -i - j/100, the skill's a hundred above, token j."""
  skills = [i % 3 != 0 for i in range(23)]  # as `samples` has it
  some = [
    batching.dataclasses.replace(
      s, episode=i, logprobs=-i - np.arange(len(s.targets), dtype=np.float32) / 100, targets=np.full(len(s.targets), i)
    )
    for i, s in enumerate(samples(23))
  ]
  parts = learn.mini_batches(some, 3, seed=5)
  shapes = (RowShape(24, 16, 1), RowShape(48, 32, 2))
  scored = []
  for part in parts:
    batches = batching.to_batches(part, shapes, MESH, skills=True)
    scored.append([b.replace(skill_logprobs=b.sampler_logprobs + 100.0) for b in batches])
  found = learn.skill_pairs(scored, parts, shapes)
  tokens = sum(len(s.targets) for s, has in zip(some, skills, strict=True) if has)
  assert {name: x.shape for name, x in found.items()} == dict.fromkeys(found, (1, tokens))
  assert found["episode"].dtype == np.int32 and found["mask"].all()
  assert sorted(set(found["episode"][0])) == [i for i in range(23) if skills[i]]
  for i in set(found["episode"][0]):
    own = found["episode"][0] == i
    expected = np.sort(some[i].logprobs)
    np.testing.assert_allclose(np.sort(found["logprobs"][0, own]), expected, atol=1e-5)
    np.testing.assert_allclose(np.sort(found["skill_logprobs"][0, own]), expected + 100, atol=1e-4)
  gains = skill_quality.gain_by_episode(**found, num_episodes=23)
  assert [bool(np.isfinite(g)) for g in gains] == skills
  np.testing.assert_allclose(gains[np.isfinite(gains)], 100.0, rtol=1e-6)


@pytest.mark.parametrize("rescore", learn.RESCORE)
def test_pairs_hold_what_is_scored_before_the_first_update(params, rescore):
  some = [batching.dataclasses.replace(s, episode=i) for i, s in enumerate(samples(12))]
  parts, minibatches = parts_of(some, 2)
  with jax.set_mesh(MESH):
    scored = learn.score_all(minibatches, sharding.put_params(params, MESH), None, scoring(rescore=rescore))
  found = learn.skill_pairs(scored, parts, SHAPES[1:])
  counted = parts[0] if rescore == "minibatch" else some
  assert set(found["episode"][0]) == {s.episode for s in counted if s.skill_tokens is not None}
  assert np.isfinite(found["skill_logprobs"]).all() and (found["skill_logprobs"] < 0).all()


@pytest.mark.parametrize("count", [0, 1, 4])
def test_pairs_of_no_skill_are_empty(count):
  some = samples(count, skills=False)
  parts = learn.mini_batches(some, 2, seed=5)
  scored = [batching.to_batches(part, SHAPES, MESH, skills=True) for part in parts]
  scored = [[b.replace(skill_logprobs=b.sampler_logprobs) for b in part] for part in scored]
  found = learn.skill_pairs(scored, parts, SHAPES)
  assert {name: x.shape for name, x in found.items()} == dict.fromkeys(
    ("logprobs", "skill_logprobs", "mask", "episode"), (1, 0)
  )
  assert np.isnan(skill_quality.gain_by_episode(**found, num_episodes=2)).all()


def test_scores_of_two_policies_are_not_mixed_in_an_advantage():
  for name in ("rlsd", "opid"):
    with pytest.raises(ValueError, match=f"method '{name}' compares .* with rescore='minibatch' it would .*; use resc"):
      scoring(name, "minibatch")
    assert not scoring(name).rescores
  held = dataclasses.replace(methods.get("rlsd"), teacher="start")
  assert not learn.Scoring(CONFIG, held, LOSS, "minibatch").rescores  # one teacher for all of them: nothing to mix


def test_an_unknown_rescore_is_refused():
  with pytest.raises(ValueError, match="rescore='never' is unknown; choose iteration"):
    scoring(rescore="never")
