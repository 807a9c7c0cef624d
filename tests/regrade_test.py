"""Advantages from scores: every token finds its turn and group, and its advantage the way back."""

import dataclasses

import jax
import numpy as np
import pytest
from batch_cases import samples
from skill_cases import episode

from seed_jax import batching, learn, losses, regrade, sharding
from seed_jax.batching import RowShape
from seed_jax.regrade import Line, Room

SHAPES = (RowShape(24, 16, 4), RowShape(48, 32, 4))
MESH = sharding.make_mesh()
ROOM = Room(tokens=300, turns=64, groups=8)


def scored(count=23, minibatches=2):
  """(episodes, samples by mini-batch, their batches with log-probabilities): two turns each, three episodes a group."""
  rng = np.random.default_rng(4)
  episodes, made = [], []
  for number, sample in enumerate(samples(count, seed=2)):
    cut = rng.integers(1, len(sample.targets))
    turns = (np.arange(len(sample.targets)) >= cut).astype(np.int32)
    advantages = np.where(turns, *rng.normal(size=2)).astype(np.float32)
    made.append(dataclasses.replace(sample, episode=number, turns=turns, advantages=advantages))
    episodes.append(episode(group=100 + number // 3, member=number % 3, turns=2))
  parts = learn.mini_batches(made, minibatches, seed=5)
  draw = lambda like: -rng.exponential(1.0, like.shape).astype(np.float32)  # noqa: E731
  with jax.set_mesh(MESH):
    batches = [
      [
        b.replace(old_logprobs=draw(b.mask), skill_logprobs=draw(b.mask))
        for b in batching.to_batches(part, SHAPES, MESH, skills=True, micro_batches=2)
      ]
      for part in parts
    ]
  return episodes, parts, batches


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
  real = batching.token_grids
  monkeypatch.setattr(batching, "token_grids", lambda *arguments: real(*arguments, micro_batches=2))


def test_advantages_come_back_to_their_places():
  episodes, parts, batches = scored()
  assert max(len(part) for part in batches) > 1  # several batches of a mini-batch
  line = Line(parts, SHAPES, episodes, ROOM)
  count = sum(len(s.targets) for part in parts for s in part)
  assert line.mask.sum() == count and line.mask[0, :count].all() and set(line.group_ids[0, :count]) == set(range(8))
  assert len(set(line.turn_ids[0, :count])) == 2 * len(episodes)
  same = line.write(batches, line.read(batches, lambda b: b.advantages))
  double = line.write(batches, 2 * line.read(batches, lambda b: b.advantages))
  for part, one, two in zip(batches, same, double, strict=True):
    for b, x, y in zip(part, one, two, strict=True):
      np.testing.assert_array_equal(b.advantages, x.advantages)
      np.testing.assert_array_equal(2 * np.asarray(b.advantages), y.advantages)
      assert x.advantages.sharding == b.advantages.sharding and x.targets is b.targets


def test_grsd_over_mini_batches_is_the_loop_over_turns():
  """Turns of a group lie in different mini-batches, batches and rows; sums over them by hand."""
  episodes, parts, batches = scored()
  assert any({s.episode // 3 for s in parts[0]} & {s.episode // 3 for s in part} for part in parts[1:])
  line = Line(parts, SHAPES, episodes, ROOM)
  with jax.set_mesh(MESH):
    new, log = regrade.regraded(losses.grsd_advantages, line, batches, coef=0.5)
  tokens = {}  # (episode, turn) -> (advantage, gap, new advantage) of every token
  for before, after, part in zip(batches, new, parts, strict=True):
    grids = [
      batching.token_grids(part, SHAPES, field)
      for field in (lambda s: np.full(len(s.targets), s.episode), lambda s: s.turns)
    ]
    for b, a, *places in zip(before, after, *grids, strict=True):
      for where in np.argwhere(np.asarray(b.mask) > 0):
        at = tuple(where)
        value = lambda x: float(np.asarray(x)[at])  # noqa: B023, E731
        gap = value(b.skill_logprobs) - value(b.old_logprobs) if value(b.skill_mask) else None
        key = tuple(int(place[at]) for place in places)
        tokens.setdefault(key, []).append((value(b.advantages), gap, value(a.advantages)))
  q = {
    key: np.expm1(np.sign(found[0][0]) * np.mean([gap for _, gap, _ in found]))
    for key, found in tokens.items()
    if found[0][1] is not None
  }
  assert 0 < len(q) < len(tokens)  # some episodes have no skill
  changes = []
  for key, found in tokens.items():
    scale = np.mean([abs(x) for other, x in q.items() if other[0] // 3 == key[0] // 3] or [1.0])
    weight = max(0.1, 1 + 0.5 * np.clip(q[key] / scale, -0.2, 0.2)) if key in q else 1.0
    for advantage, _, got in found:
      assert got == pytest.approx(weight * advantage, rel=1e-4, abs=1e-6)
      changes.append((abs(got - advantage), abs(advantage)))
  change, size = np.sum(changes, axis=0)
  assert log["regrade_change"] == pytest.approx(change / size, rel=1e-4) and log["regrade_change"] > 0.01


def test_the_program_is_compiled_once_whatever_there_is():
  with jax.set_mesh(MESH):
    regrade.compile_call(losses.grsd_advantages, ROOM)
    known = regrade.call._cache_size()
    for count in (5, 23, 1):
      episodes, parts, batches = scored(count)
      regrade.regraded(losses.grsd_advantages, Line(parts, SHAPES, episodes, ROOM), batches, coef=0.25)
    assert regrade.call._cache_size() == known


def test_an_iteration_without_a_sample_stays_as_it_is():
  with jax.set_mesh(MESH):
    (batch,) = batching.to_batches([], SHAPES, MESH, skills=True, micro_batches=2)
    batch = batch.replace(old_logprobs=batch.mask, skill_logprobs=batch.mask)
    new, log = regrade.regraded(losses.grsd_advantages, Line([[]], SHAPES, [], ROOM), [[batch]], coef=0.5)
  assert log == {"regrade_change": 0.0}
  jax.tree.map(np.testing.assert_array_equal, new[0][0], batch)


def test_more_than_the_room_holds_is_refused_with_the_numbers():
  episodes, parts, _ = scored()
  with pytest.raises(ValueError, match="46 turns of 8 groups, but there is room for 45 of 8"):
    Line(parts, SHAPES, episodes, Room(300, 45, 8))
  with pytest.raises(ValueError, match="sampled tokens, but there is room for 20"):
    Line(parts, SHAPES, episodes, Room(20, 46, 8))
