"""The process reward model: its update is the gradient of the pairwise loss, whatever the packing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_cases import CONFIG, samples
from skill_cases import episode

from seed_jax import batching, learn, reward_model, sharding
from seed_jax.batching import RowShape
from seed_jax.metrics import CompileCounter
from seed_jax.models import decoder
from seed_jax.regrade import Line, Room
from seed_jax.reward_model import RewardModel
from seed_jax.step_advantages import implicit_step_rewards, pairwise_prm_loss

SHAPES = (RowShape(48, 32, 4),)
MESH = sharding.make_mesh()
ROOM = Room(tokens=200, turns=40, groups=4)
BETA = 0.5


@pytest.fixture(scope="module")
def params():
  return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, decoder.init(jax.random.key(1), CONFIG))


def iteration(params, won, count=9):
  """Episodes of two turns, three a group, their samples in two mini-batches, and batches with old log-probabilities."""
  episodes, made = [], []
  for number, sample in enumerate(samples(count, seed=2, skills=False)):
    turns = (np.arange(len(sample.targets)) >= len(sample.targets) // 2).astype(np.int32)
    made.append(dataclasses.replace(sample, episode=number, turns=turns))
    episodes.append(episode(group=number // 3, member=number % 3, turns=2, won=won[number]))
  parts = learn.mini_batches(made, 2, seed=5)
  batches = [batching.to_batches(part, SHAPES, MESH, skills=False) for part in parts]
  return episodes, parts, batches, made


def model_of(params, rate=1.0, **options):
  return RewardModel(
    CONFIG, params, optax.sgd(rate), pairwise_prm_loss, episodes=12, temperature=0.8, beta=BETA, **options
  )


def token_logprobs(params, some):
  """Of every sample its targets' log-probabilities, each sample alone in a padded row."""
  length = max(len(s.tokens) for s in some)
  rows = np.stack([np.pad(s.tokens, (0, length - len(s.tokens))) for s in some])
  all_words = jax.nn.log_softmax(decoder.logits(params, rows, CONFIG) / 0.8)
  pick = lambda i, s: (np.eye(len(some))[i], np.eye(length)[s.index], np.eye(CONFIG.vocab_size)[s.targets])  # noqa: E731
  return [jnp.einsum("b,rt,rv,btv->r", *pick(i, s), all_words) for i, s in enumerate(some)]


WON = [True, False, False, True, True, False, True, True, True]  # 2 + 2 + 0 pairs


def test_an_update_is_the_gradient_of_the_pairwise_loss(params):
  old = jax.tree.map(lambda x: 0.9 * x, params)
  with jax.set_mesh(MESH):
    episodes, parts, batches, made = iteration(params, WON)
    model = model_of(sharding.put_params(params, MESH))
    other = model_of(sharding.put_params(old, MESH))
    line = Line(parts, SHAPES, episodes, ROOM)
    gaps = line.flat(model.score(batches)) - line.flat(other.score(batches))
    log = model.train(batches, line, episodes, gaps)

  def loss(params):
    scores = []
    for s, new, before in zip(made, token_logprobs(params, made), token_logprobs(old, made), strict=True):
      gap = new - jax.lax.stop_gradient(before)
      rewards = [
        implicit_step_rewards(
          prm_logprobs=gap[None], old_logprobs=jnp.zeros_like(gap)[None], mask=s.turns[None] == i, beta=BETA
        )
        for i in (0, 1)
      ]
      scores.append(jnp.mean(jnp.stack(rewards)))
    scores = jnp.stack(scores)
    return pairwise_prm_loss(scores=scores, group_ids=np.arange(9) // 3, success=np.asarray(WON)), scores

  with jax.set_mesh(MESH):
    (value, scores), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  assert log["reward_pairs"] == 4 and log["reward_loss"] == pytest.approx(float(value), rel=1e-4)
  pairs = [(0, 1), (0, 2), (3, 5), (4, 5)]
  assert log["reward_in_order"] == np.mean([scores[a] > scores[b] for a, b in pairs])
  moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, model.state.params)
  assert log["reward_grad_norm"] == pytest.approx(float(optax.global_norm(slope)), rel=1e-3) and value != np.log(2)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), moved, slope)


def test_without_a_pair_nothing_moves(params):
  with jax.set_mesh(MESH):
    episodes, parts, batches, _ = iteration(params, [True] * 9)
    model = model_of(sharding.put_params(params, MESH))
    before = model.state
    line = Line(parts, SHAPES, episodes, ROOM)
    assert model.train(batches, line, episodes, np.zeros((1, 200), np.float32)) == {"reward_pairs": 0.0}
  assert model.state is before


def test_updates_part_successes_from_failures(params):
  with jax.set_mesh(MESH):
    episodes, parts, batches, _ = iteration(params, WON)
    model, first = model_of(sharding.put_params(params, MESH), rate=0.3), None
    line, losses = Line(parts, SHAPES, episodes, ROOM), []
    for _ in range(6):
      scores = line.flat(model.score(batches))
      first = scores if first is None else first
      log = model.train(batches, line, episodes, scores - first)
      losses.append(log["reward_loss"])
  assert losses[0] == pytest.approx(np.log(2)) and all(b < a for a, b in zip(losses, losses[1:], strict=False))
  assert log["reward_in_order"] == 1.0


def test_all_is_compiled_before_the_first_iteration(params):
  with jax.set_mesh(MESH), CompileCounter() as compiled:
    model = model_of(sharding.put_params(params, MESH))
    before = jax.tree.map(np.asarray, model.state)
    model.compile(SHAPES, MESH)
    jax.tree.map(np.testing.assert_array_equal, model.state, before)
    assert compiled.take() > 0
    for count in (9, 3, 1):
      episodes, parts, batches, _ = iteration(params, WON, count)
      batches = [[b.replace(old_logprobs=np.asarray(b.mask)) for b in part] for part in batches]
      line = Line(parts, SHAPES, episodes, ROOM)
      model.train(batches, line, episodes, line.flat(model.score(batches)))
    assert compiled.take() == 0, compiled.names


def test_more_episodes_than_there_is_room_for():
  model = RewardModel.__new__(RewardModel)
  model._episodes = 2
  with pytest.raises(ValueError, match="3 episodes, but there is room for 2"):
    model._padded(np.zeros(3), [0] * 3, [True] * 3)
  assert [len(x) for x in model._padded(np.zeros(1), [0], [True])] == [2, 2, 2] and reward_model.BETA == 0.05
