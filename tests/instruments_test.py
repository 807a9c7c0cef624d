"""The propositions on a decoder: every number against its definition in plain rows, and what they are at the limits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_cases import CONFIG as TWO_LAYERS
from batch_cases import samples
from tiny_config import get_config

from seed_jax import batching, instruments, learn, methods, ops, propositions, sharding
from seed_jax.batching import RowShape
from seed_jax.metrics import CompileCounter
from seed_jax.models import decoder
from seed_jax.run import Run
from seed_jax.update import LossConfig

CONFIG = dataclasses.replace(TWO_LAYERS, num_layers=1, num_valid_tokens=61)  # three rows of the table are no tokens
SHAPE = RowShape(48, 32, 8)
MESH = sharding.make_mesh()
BETA, TEMPERATURE = 5.0, 0.8
ALL = 8 * 32  # every response position of 8 rows


def random_params(seed):
  return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, decoder.init(jax.random.key(seed), CONFIG))


@pytest.fixture(scope="module")
def params():
  return random_params(1)


@pytest.fixture(scope="module")
def start():
  return random_params(2)


def scoring(beta=BETA, method="seed", **changes):
  loss = LossConfig(opd_beta=beta, temperature=TEMPERATURE, **changes)
  return learn.Scoring(CONFIG, methods.get(method), loss)


def tied_samples(count=12):
  """Samples 0, 2, 4, ... are of tied groups: their advantage is 0."""
  rng = np.random.default_rng(7)
  return [
    dataclasses.replace(s, advantages=np.full(len(s.targets), i % 2 * rng.normal(), np.float32))
    for i, s in enumerate(samples(count, seed=4))
  ]


def batches_of(some, flags, mesh=MESH, shape=SHAPE):
  """The samples as batches, and for each batch the flags per token."""
  flagged = [dataclasses.replace(s, advantages=np.full(len(s.targets), f)) for s, f in zip(some, flags, strict=True)]
  made = batching.to_batches(some, (shape,), mesh, skills=True)
  return made, [b.advantages for b in batching.to_batches(flagged, (shape,), mesh, skills=True)]


def measured(params, start, some, flags, *, mesh=MESH, scores=None):
  with jax.set_mesh(mesh):
    made, tied = batches_of(some, flags, mesh)
    on_mesh, start = sharding.put_params(params, mesh), sharding.put_params(start, mesh)
    return instruments.measure(on_mesh, start, [made], scores or scoring(), tied=[tied], contexts=ALL)


def alone(proposition, *policies, some, flags, scores=None, seed=0, shape=SHAPE, contexts=ALL):
  """One proposition's numbers, on one device."""
  with jax.set_mesh(MESH):
    (batch,), (tied,) = batches_of(some, flags, shape=shape)
    chosen = instruments.choose(batch, tied, np.uint32(seed), columns=contexts // shape.rows)
    policies = [sharding.put_params(p, MESH) for p in policies]
    out = proposition(*policies, chosen, *SEED_OF.get(proposition, ()), scores or scoring())
    return {name: float(value) for name, value in out.items()}


SEED_OF = {propositions.proposition_1: (np.uint32(0),)}


def even(some):
  return [float(i % 2 == 0) for i in range(len(some))]


# --- the definitions, in plain rows: one sample a row, all logits, float64 where no gradient is taken ----------------


def padded(rows):
  width = max(map(len, rows))
  return np.stack([np.pad(r, (0, width - len(r))) for r in rows])


def log_policy(params, contexts):
  """log pi [n, V] at every response position of all samples, one after the other; contexts: [(tokens, index)]."""
  logits = decoder.logits(params, padded([tokens for tokens, _ in contexts]), CONFIG) / TEMPERATURE
  logits = jax.sharding.reshard(logits, jax.sharding.PartitionSpec())
  rows = np.concatenate([np.full(len(index), i) for i, (_, index) in enumerate(contexts)])
  return jax.nn.log_softmax(logits[rows, np.concatenate([index for _, index in contexts])], axis=-1)[:, :61]


def tree_norm(tree):
  return float(np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree))))


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


@pytest.fixture(scope="module")
def expected(params, start):
  """All numbers but the redrawn one, for `tied_samples`."""
  with jax.set_mesh(MESH):
    return by_definition(params, start)


def by_definition(params, start, *, teacher="current", less=0.0):
  """Of a loss that weighs tokens by the gate less a constant, with the skill context read by that teacher."""
  some = tied_samples()
  with_skill = [s for s in some if s.skill_tokens is not None]
  tied = np.concatenate([np.full(len(s.targets), i % 2 == 0) for i, s in enumerate(some) if s.skill_tokens is not None])
  ordinary, skill = [(s.tokens, s.index) for s in with_skill], [(s.skill_tokens, s.skill_index) for s in with_skill]
  targets = np.concatenate([s.targets for s in with_skill])
  n, at = len(targets), np.arange(len(targets))
  own, now, old = (
    np.asarray(log_policy(p, c), np.float64) for p, c in ((params, ordinary), (params, skill), (start, skill))
  )
  pi, w = np.exp(own), sigmoid(BETA * ((now if teacher == "current" else old) - own))
  stale, fresh = sigmoid(BETA * (old - own)), sigmoid(BETA * (now - own))

  @jax.jit
  def gradient(coefficients):  # of -mean over contexts of the sum of coefficient * log pi
    return jax.grad(lambda p: -jnp.sum(coefficients * log_policy(p, ordinary)) / n)(params)

  one = np.zeros_like(pi)
  one[at, targets] = 1
  exact, trained = gradient(pi * w), gradient(one * (w - less))
  inner = sum(
    np.sum(np.asarray(a, np.float64) * b) for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(trained), strict=True)
  )
  variance = (pi * w**2).sum(1) - (pi * w).sum(1) ** 2
  steepness = max(n * tree_norm(gradient(one * (at == i)[:, None])) for i in range(n))
  moved = tree_norm(jax.tree.map(jnp.subtract, gradient(one * fresh), gradient(one * stale)))
  gap = np.abs(now - old)[at, targets].mean()
  return {
    "contexts": n,
    "prop1_norm": tree_norm(exact),
    "prop1_kl_norm": tree_norm(exact),
    "prop1_sampled_norm": tree_norm(trained),
    "prop1_sampled_cosine": inner / tree_norm(exact) / tree_norm(trained),
    "prop2_opd": variance.mean(),
    "prop2_variance": variance.mean(),
    "prop2_tied_share": tied.mean(),
    "prop2_tied_opd": variance[tied].mean(),
    "prop2_tied_variance": variance[tied].mean(),
    "prop3_measured": moved,
    "prop3_steepness": steepness,
    "prop3_gap": gap,
    "prop3_bound": BETA * steepness / 4 * gap,
    "prop3_ratio": moved / (BETA * steepness / 4 * gap),
  }


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_every_number_is_that_of_its_definition(params, start, expected, mesh):
  some = tied_samples()
  out = measured(params, start, some, even(some), mesh=sharding.make_mesh(*mesh))
  for name, value in expected.items():
    assert out[f"theory_{name}"] == pytest.approx(float(value), rel=2e-5), name
  assert out["theory_prop1_norm"] > 0.1 and out["theory_prop2_tied_opd"] > 0.01
  assert out["theory_prop1_difference"] < 1e-5 and out["theory_prop2_difference"] < 1e-5
  assert out["theory_prop2_tied_rl"] == 0.0
  extra = {"theory_prop1_difference", "theory_prop1_redrawn_cosine", "theory_prop2_difference", "theory_prop2_tied_rl"}
  assert out.keys() - {f"theory_{name}" for name in expected} == extra


@pytest.mark.parametrize(
  ("method", "of_it"),
  [
    ("seed_centred_gate", dict(less=0.5)),
    ("seed_frozen_teacher", dict(teacher="start")),
    ("seed_centred_frozen_teacher", dict(less=0.5, teacher="start")),
  ],
)
def test_what_is_measured_is_the_methods_own_loss_and_teacher(params, start, expected, method, of_it):
  some = tied_samples()
  out = measured(params, start, some, even(some), scores=scoring(method=method))
  with jax.set_mesh(MESH):
    own = by_definition(params, start, **of_it)
  for name, value in own.items():
    assert out[f"theory_{name}"] == pytest.approx(float(value), rel=2e-5), name
  assert out["theory_prop1_difference"] < 1e-5 and out["theory_prop2_difference"] < 1e-5
  other = "prop1_sampled_norm" if "less" in of_it else "prop2_opd"  # not what SEED's loss would give
  assert abs(out[f"theory_{other}"] / expected[other] - 1) > 0.05


def test_pieces_of_the_vocabulary_change_nothing(params, monkeypatch):
  some = tied_samples()
  for proposition in (propositions.proposition_1, propositions.proposition_2):
    monkeypatch.setattr(ops, "CHUNK_LOGITS", 2**26)
    whole = alone(proposition, params, params, some=some, flags=even(some))
    monkeypatch.setattr(ops, "CHUNK_LOGITS", 5 * 8 * 64)  # five of the 32 columns at a time: the last piece is padded
    pieces = alone(
      proposition, params, params, some=some, flags=even(some), scores=scoring(kl_coef=0.5)
    )  # another program
    assert pieces.pop("difference") < 1e-5
    for name, value in pieces.items():
      assert value == pytest.approx(whole[name], rel=1e-5), name


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_constant_gate_carries_no_signal_and_does_not_age(params, start):
  some = tied_samples()
  out = measured(params, start, some, even(some), scores=scoring(beta=0.0))
  assert out["theory_prop1_norm"] < 1e-6 and out["theory_prop1_kl_norm"] < 1e-6
  assert out["theory_prop1_sampled_norm"] > 0.1  # a token's own push, 1/2, is there; it is 0 in expectation only
  for name in ("opd", "variance", "tied_opd", "tied_variance"):
    assert 0 <= out[f"theory_prop2_{name}"] < 1e-12, name
  assert out["theory_prop3_measured"] == out["theory_prop3_bound"] == out["theory_prop3_ratio"] == 0.0


def test_no_skill_and_no_tie_give_zero_and_no_nan(params, start):
  none = measured(params, start, samples(12, skills=False), np.ones(12))
  assert none.keys() and all(value == 0.0 for value in none.values()), none
  some = tied_samples()
  out = measured(params, start, some, np.zeros(len(some)))
  assert all(np.isfinite(value) for value in out.values())
  assert [value for name, value in out.items() if "_tied_" in name] == [0.0] * 4 and out["theory_prop2_opd"] > 0.01


def test_rewards_that_differ_have_an_rl_gradient(params):
  some = tied_samples()
  flags = [1.0 - f for f in even(some)]
  second = functools.partial(alone, propositions.proposition_2, params, params, some=some, flags=flags)
  assert second()["tied_rl"] > 0.1
  silent = dataclasses.replace(methods.get("seed"), policy_gradient=False)
  assert second(scores=dataclasses.replace(scoring(), method=silent))["tied_rl"] == 0.0


def test_staleness_is_within_its_bound(params):
  third = functools.partial(alone, propositions.proposition_3, params, some=samples(12), flags=np.zeros(12))
  assert third(params)["measured"] == 0.0 and third(params)["bound"] == 0.0
  for beta in (BETA, 40.0):
    for seed in range(3):
      other = random_params(10 + seed)
      for distance in (1e-3, 0.1, 1.0, 5.0):
        old = jax.tree.map(lambda a, b, d=distance: a + d * (b - a), params, other)
        out = third(old, scores=scoring(beta=beta), seed=seed)
        assert 0 < out["measured"] <= out["bound"], (beta, seed, distance, out)


def test_the_bound_of_staleness_is_reached(params, start):
  """One context, a skill that changes nothing and a policy close by: there the sigmoid has its slope of 1/4."""
  s = samples(2)[1]
  one = dataclasses.replace(
    s, index=s.index[:1], targets=s.targets[:1], advantages=s.advantages[:1], logprobs=s.logprobs[:1]
  )
  one = dataclasses.replace(one, skill_tokens=one.tokens, skill_index=one.index)
  near = jax.tree.map(lambda a, b: a + 1e-3 * (b - a), params, start)
  out = alone(propositions.proposition_3, params, near, some=[one], flags=[0.0])  # the programs of the test above
  assert 0.99 < out["ratio"] < 1.001


# --- the draw --------------------------------------------------------------------------------------------------------


def test_contexts_are_distinct_tokens_with_a_skill_and_no_more_than_asked_for():
  some = samples(90, seed=2)
  with jax.set_mesh(MESH):
    (batch,), (tied,) = batches_of(some, np.ones(len(some)))
    draws = [jax.tree.map(np.asarray, instruments.choose(batch, tied, np.uint32(i), columns=5)) for i in (0, 0, 1)]
  assert int(batch.skill_count) > 1
  jax.tree.map(np.testing.assert_array_equal, *draws[:2])
  assert (draws[0].ordinary.tokens != draws[2].ordinary.tokens).any()
  starts = {tuple(s.skill_tokens) for s in some if s.skill_tokens is not None}
  for chosen in draws:
    counted = chosen.weights > 0
    assert chosen.count == counted.sum() == 40 and chosen.weights.sum() == pytest.approx(1.0)
    for b in range(8):
      assert len(set(chosen.ordinary.index[b][counted[b]])) == counted[b].sum()
      for j in np.flatnonzero(counted[b]):
        i, k = chosen.ordinary.index[b, j], chosen.skill.index[b, j]
        segment = chosen.skill.segment_ids[b] == chosen.skill.segment_ids[b, k]
        assert chosen.ordinary.tokens[b, i] == chosen.skill.tokens[b, k]  # the same last token in both contexts
        assert tuple(chosen.skill.tokens[b][segment]) in starts


def test_tokens_drawn_anew_are_the_policys(params):
  some = samples(12)
  with jax.set_mesh(MESH):
    (batch,), (tied,) = batches_of(some, np.zeros(12))
    on_mesh = sharding.put_params(params, MESH)
    chosen = instruments.choose(batch, tied, np.uint32(0), columns=8)
    scores = scoring()

    @jax.jit
    def draw(params, seed):
      hidden, head = propositions._hidden(params, chosen.ordinary, scores), decoder.head(params)
      logprobs = propositions._log_policy(hidden, head, scores)
      tokens = propositions.redrawn(hidden, head, seed, scores)
      return tokens, logprobs, propositions.redrawn(0 * hidden, head, seed, scores)

    drawn = [draw(on_mesh, np.uint32(seed)) for seed in range(60)]
  logprobs = np.asarray(drawn[0][1], np.float64)[..., :61]
  tokens = np.stack([np.asarray(t) for t, *_ in drawn])  # [60, B, C]
  assert tokens.max() < 61 and (tokens[0] != tokens[1]).mean() > 0.5
  found = np.take_along_axis(logprobs[None], tokens[..., None], axis=-1).mean()
  assert found == pytest.approx((np.exp(logprobs) * logprobs).sum(-1).mean(), abs=0.08)  # 3,840 draws: 0.02
  assert len(np.unique(drawn[0][2])) > 30  # 64 places of one uniform policy, each with a key of its own


# --- in the loop -----------------------------------------------------------------------------------------------------


def test_after_the_warm_up_nothing_is_compiled_and_nothing_is_changed(params, start):
  scores, shapes = scoring(), (RowShape(24, 16, 8), SHAPE)
  with jax.set_mesh(MESH), CompileCounter() as compiled:
    on_mesh, old = sharding.put_params(params, MESH), sharding.put_params(start, MESH)
    for _, compile_it in instruments.programs(on_mesh, scores, shapes, MESH, contexts=ALL):
      compile_it()
    compiled.take()
    for count in (12, 3, 0, 200):
      parts = learn.mini_batches(samples(count, seed=count), 2, seed=1)
      minibatches = [batching.to_batches(part, shapes, MESH, skills=True) for part in parts]
      minibatches = learn.score_all(minibatches, on_mesh, None, scores)
      before = jax.tree.map(np.asarray, minibatches)
      compiled.take()
      for seed in range(3):  # some of these draw a batch of the other row shape
        tied = [[b.mask for b in part] for part in minibatches]
        out = instruments.measure(on_mesh, old, minibatches, scores, tied=tied, contexts=ALL, seed=seed)
        assert bool(out["theory_contexts"]) == bool(count)
      assert compiled.take() == 0, compiled.names
      jax.tree.map(np.testing.assert_array_equal, minibatches, before)
  jax.tree.map(np.testing.assert_array_equal, on_mesh, params)
  jax.tree.map(np.testing.assert_array_equal, old, start)


def test_a_method_without_a_skill_context_is_refused(params):
  with jax.set_mesh(MESH):
    batch = batching.empty_batch(SHAPE, MESH, skills=False)
    with pytest.raises(ValueError, match="method 'grpo' scores no skill context"):
      instruments.measure(params, params, [[batch]], scoring(method="grpo"), tied=[[batch.mask]])


REFUSED = {
  "grpo": "scores no skill context",
  "vanilla": "scores no skill context",
  "istar": "scores no skill context",
  "rlsd": "changes advantages by the skill context",
  "opid": "changes advantages by the skill context",
  "grsd": "changes advantages by the skill context",
  "skill_sd": "weighs them otherwise",
}


def test_the_propositions_are_about_losses_that_weigh_by_the_gate():
  for name, why in REFUSED.items():
    with pytest.raises(ValueError, match=f"method '{name}' {why}.*; set train.theory_every=0") as raised:
      instruments.check(methods.get(name), BETA)
    assert "\n" not in str(raised.value)
  for name in ("seed", "seed_without_sft", "seed_on_ties", "seed_centred_frozen_teacher", "sdar", "opsd"):
    instruments.check(methods.get(name), BETA)
  instruments.check(methods.get("grpo_opsd"), 0.0)

  def own(*, logprobs, skill_logprobs, old_logprobs, beta):  # the gate, written in another way, and 3
    return -logprobs * jax.lax.stop_gradient(1 / (1 + jnp.exp(beta * (old_logprobs - skill_logprobs))) + 3)

  instruments.check(dataclasses.replace(methods.get("seed"), name="own", auxiliary=own), BETA)
  with pytest.raises(ValueError, match="method 'own' weighs them otherwise .by up to 0.538 at opd_beta=5.; set"):
    # 1 where the gap is above 0: at a gap of 1 / beta the gate is sigmoid(1) = 0.731, at - 1 / beta 0.269
    step = lambda *, logprobs, skill_logprobs, **_: jnp.maximum(skill_logprobs - logprobs, 0.0)  # noqa: E731
    instruments.check(dataclasses.replace(methods.get("seed"), name="own", auxiliary=step), BETA)


def test_a_run_refuses_them_before_its_first_stage(tmp_path):
  for name, why in (("grpo", "scores no skill context"), ("skill_sd", "weighs them otherwise")):
    config = get_config(name)
    config.train.theory_every = 10
    with pytest.raises(ValueError, match=why):
      Run(config, tmp_path / name, plain=True).open()
    assert not (tmp_path / name).exists()


def test_a_group_is_tied_when_no_turn_of_it_has_another_reward():
  scores = [np.full(2, 10.0), np.full(3, 10.0), np.full(1, 10.0), np.zeros(2), np.asarray([0.0, -0.1]), np.zeros(0)]
  flags = instruments.tied_turns(scores, [0, 0, 1, 1, 2, 0])
  assert [f.tolist() for f in flags] == [[1, 1], [1, 1, 1], [0], [0, 0], [0, 0], []]


def test_an_iteration_without_a_sample_has_a_grid_for_its_batch():
  with jax.set_mesh(MESH):
    (batch,) = batching.to_batches([], [SHAPE], MESH, skills=True)
    (grids,) = instruments.tied_grids([], [], [[]], [SHAPE], MESH)
  assert [g.shape for g in grids] == [batch.mask.shape]
