"""SPEAR's buffer: who enters, who is drawn and at what worth, what a resumed run has, and what the update does."""

import dataclasses
import types

import jax
import numpy as np
import optax
import pytest
from batch_cases import CONFIG, samples
from skill_cases import episode

from seed_jax import batching, learn, methods, replay_buffer, sharding, update
from seed_jax.batching import RowShape
from seed_jax.models import decoder
from seed_jax.replay import ReplayConfig
from seed_jax.replay_buffer import Replay, ReplayBuffer, still_better
from seed_jax.update import LossConfig, MethodLoss

SHAPES = (RowShape(48, 32, 4),)
MESH = sharding.make_mesh()


def iteration(advantages, won, seed=0):
  """Episodes, two a group, and a sample each with that advantage on all tokens."""
  made = [
    dataclasses.replace(s, episode=i, advantages=np.full(len(s.targets), advantages[i], np.float32))
    for i, s in enumerate(samples(len(won), seed=seed, skills=False))
  ]
  return [episode(group=i // 2, member=i % 2, won=w) for i, w in enumerate(won)], made


def same(one, other):
  return all(
    np.array_equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "index", "targets", "logprobs")
  )


def test_successes_above_the_threshold_enter(tmp_path):
  buffer = ReplayBuffer(tmp_path, ReplayConfig())
  episodes, made = iteration([5.0, 1.0, 1.1, 5.0], [True, True, True, False])
  assert buffer.add(1, episodes, made, [10.0, 10.0, 10.0, 0.0]) == 2  # 1.0 is not above 1, the last one lost
  drawn = buffer.draw(2, 10, seed=0)
  # groups' means 10 and 5, their median 7.5: a success is worth 2.5 today
  assert [same(d, made[i]) for d, i in zip(drawn, (0, 2), strict=True)] == [True, True]
  assert all(set(d.advantages) == {2.5} and len(d.advantages) == len(d.targets) for d in drawn)
  assert all(d.skill_tokens is None and d.turns is None and d.episode == 0 for d in drawn)


def test_what_the_median_has_overtaken_is_not_drawn(tmp_path):
  buffer = ReplayBuffer(tmp_path, ReplayConfig(baselines=4))
  episodes, made = iteration([5.0, -5.0, 5.0, -5.0], [True, False, True, False])
  buffer.add(1, episodes, made, [10.0, 0.0, 8.0, 0.0])
  assert len(buffer.draw(2, 10, seed=0)) == 2
  for number in (2, 3):  # the ring holds four means: 9 and 9, twice
    buffer.add(number, *iteration([0.0] * 4, [True] * 4), [9.0] * 4)
  (left,) = buffer.draw(4, 10, seed=0)
  assert set(left.advantages) == {1.0} and same(left, made[0])


def test_age_size_and_count_bound_what_is_drawn(tmp_path):
  buffer = ReplayBuffer(tmp_path, ReplayConfig(max_age=2, size=3))
  for number in (1, 2, 3):
    buffer.add(number, *iteration([5.0, -5.0] * 2, [True, False] * 2, seed=number), [10.0, 0.0] * 2)
  assert buffer.draw(1, 9, seed=0) == []  # nothing is older
  assert len(buffer.draw(2, 9, seed=0)) == 2
  assert len(buffer.draw(4, 9, seed=0)) == 3  # 1 is too old; of the four of 2 and 3 the newest three stay
  assert len(buffer.draw(5, 9, seed=0)) == 2 and buffer.draw(6, 9, seed=0) == []
  one = [buffer.draw(4, 1, seed=s)[0] for s in range(20)]
  assert all(same(a, b) for a, b in zip(one, [buffer.draw(4, 1, seed=s)[0] for s in range(20)], strict=True))
  assert len({tuple(d.tokens) for d in one}) == 3  # evenly


def test_a_resumed_run_has_the_buffer_it_had(tmp_path):
  buffer = ReplayBuffer(tmp_path, ReplayConfig())
  for number in (1, 2, 3):
    won = [True, False] * 2 if number != 2 else [False] * 4  # iteration 2 adds nothing but its means
    buffer.add(number, *iteration([5.0 * (1 if w else -1) for w in won], won, seed=number), [10.0 * w for w in won])
  expected = buffer.draw(3, 9, seed=4)
  again = ReplayBuffer(tmp_path, ReplayConfig(), resume=2)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["000001.npz", "000002.npz"]
  found = again.draw(3, 9, seed=4)
  assert len(found) == len(expected) == 2 and all(same(a, b) for a, b in zip(found, expected, strict=True))
  assert [a.advantages.tolist() for a in found] == [a.advantages.tolist() for a in expected]
  assert found[0].tokens.dtype == np.int32 and found[0].logprobs.dtype == np.float32
  assert ReplayBuffer(tmp_path, ReplayConfig()).draw(3, 9, seed=4) == [] and list(tmp_path.iterdir()) == []


def test_nothing_is_better_than_an_empty_ring():
  advantages, kept = still_better(np.array([1.0, 2.0]), np.zeros(0), ReplayConfig(size=4, baselines=8))
  assert not kept.any() and not advantages.any()


# ---- in the update


@pytest.fixture(scope="module")
def params():
  return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, decoder.init(jax.random.key(1), CONFIG))


LOSS = LossConfig(kl_coef=0.0, temperature=0.8, aggregation="sequence_mean_token_sum")


def test_replayed_batches_add_the_gradient_of_their_own_mean(params):
  fresh, old = samples(6, skills=False), samples(3, seed=7, skills=False)
  scores = learn.Scoring(CONFIG, methods.get("spear"), LOSS)
  step = update.make_update(CONFIG, MethodLoss(scores.method, LOSS), optax.sgd(1.0), temperature=0.8)
  with jax.set_mesh(MESH):
    own = sharding.put_params(params, MESH)

    def moved(part, replayed=()):
      state = update.init_state(own, optax.sgd(1.0))
      batches = [[b.replace(skill=None) for b in parts] for parts in (part, *replayed)]
      state, metrics = update.Pieces(step.pieces(state, *batches)).finish()
      return jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), state.params, own), metrics

    def scored(some, first):
      batches = batching.to_batches(some, SHAPES, MESH, skills=False)
      return [learn.scored(b, own, None, scores, first=first) for b in batches]

    both, metrics = moved(scored(fresh, True), [scored(old, False)])
    (one, alone), (two, _) = moved(scored(fresh, True)), moved(scored(old, False))
  jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b + c, rtol=1e-4, atol=1e-6), both, one, two)
  assert metrics["pg_loss"] == alone["pg_loss"] and metrics["grad_norm"] != alone["grad_norm"]
  assert optax.global_norm(two) > 0.01


def test_coefficient_and_clip_cov_reach_the_advantages(params, tmp_path, monkeypatch):
  train = types.SimpleNamespace(tasks_per_iteration=2, group_size=2, minibatches=2, reward_scale=10.0)
  config = types.SimpleNamespace(train=train, rollout=types.SimpleNamespace(max_steps=4, max_response=16), seed=0)
  run = types.SimpleNamespace(config=config, workdir=tmp_path, mesh=MESH)
  method = dataclasses.replace(methods.get("spear"), replay=ReplayConfig(coef=0.5, ramp=4))
  scoring = learn.Scoring(CONFIG, method, LOSS)
  episodes, made = iteration([5.0, -5.0] * 2, [True, False] * 2)
  made = [dataclasses.replace(s, logprobs=np.full(len(s.targets), -1.5, np.float32)) for s in made]
  with jax.set_mesh(MESH):
    own = sharding.put_params(params, MESH)
    loop = Replay(run, scoring, SHAPES)
    for _, compile_it in loop.programs():
      compile_it()
    assert loop(episodes, made, 0, own, None) == ([], {"replay_admitted": 2, "replay_samples": 0, "replay_coef": 0})
    # half of the ramp: 0.5 * (1 - cos(pi / 2)) / 2
    monkeypatch.setattr(replay_buffer, "_clip_cov", lambda seed, lines, **_: np.asarray(lines["mask"]) * 0 + 1)
    parts, log = loop(episodes, made, 2, own, None)
    assert log == pytest.approx({"replay_admitted": 2, "replay_samples": 2, "replay_coef": 0.25, "replay_clip_cov": 0})
    assert len(parts) == 2
    for part in parts:
      for batch in part:
        counted = np.asarray(batch.mask) > 0
        assert counted.any() and set(np.asarray(batch.advantages)[counted]) == {np.float32(0.25 * 5)}
        np.testing.assert_array_equal(np.asarray(batch.old_logprobs)[counted], -1.5)
        assert not bool(batch.own_old)
    first = lambda seed, lines, **_: 1.0 - (np.arange(lines["mask"].size) == 0)[None]  # noqa: E731
    monkeypatch.setattr(replay_buffer, "_clip_cov", first)
    parts, log = loop(episodes, made, 3, own, None)
  batches = [b for part in parts for b in part]
  values = np.concatenate([np.asarray(b.advantages)[np.asarray(b.mask) > 0] for b in batches])
  assert values[0] == 0 and (values[1:] > 0).all() and log["replay_clip_cov"] == pytest.approx(1 / len(values))


def test_other_methods_replay_nothing(tmp_path):
  train = types.SimpleNamespace(tasks_per_iteration=2, group_size=2)
  config = types.SimpleNamespace(train=train, rollout=types.SimpleNamespace(max_steps=4, max_response=16))
  run = types.SimpleNamespace(config=config, workdir=tmp_path)
  loop = Replay(run, learn.Scoring(CONFIG, methods.get("grpo"), LOSS), SHAPES)
  assert loop.programs() == [] and loop([], [], 0, None, None) == ([], {}) and list(tmp_path.iterdir()) == []
