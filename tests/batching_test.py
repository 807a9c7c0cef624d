"""Trajectories to samples to rows: advantages by hand, the pair's columns, and what fits."""

import numpy as np
import pytest
from turn_cases import trajectory, turn

from seed_jax import batching, sharding
from seed_jax.batching import RowShape

EPISODE = [turn([10, 11], [1, 2]), turn([12], [3]), turn([13, 14], [4, 5, 6])]
SKILL = [10, 90, 91, 11]


def test_a_transcript_is_one_sample_and_its_columns_predict_its_targets():
  (sample,) = batching.episode_samples([trajectory(EPISODE)], [np.asarray([1.0, 2.0, 3.0])], lambda t, step: SKILL)
  whole = [10, 11, 1, 2, 12, 3, 13, 14, 4, 5, 6]
  assert sample.tokens.tolist() == whole[:-1]  # the last token predicts nothing
  assert sample.index.tolist() == [1, 2, 4, 7, 8, 9]
  assert sample.targets.tolist() == [1, 2, 3, 4, 5, 6] == [whole[i + 1] for i in sample.index]
  assert sample.advantages.tolist() == [1, 1, 2, 3, 3, 3]
  assert sample.logprobs.tolist() == [-0.5] * 6
  assert sample.skill_tokens.tolist() == [*SKILL, *whole[2:-1]]
  assert sample.skill_index.tolist() == [i + 2 for i in sample.index]  # two tokens of skill
  assert sample.length == 12 and sample.tokens.dtype == sample.index.dtype == sample.targets.dtype == np.int32


def test_window_mode_gives_a_sample_a_turn_each_with_its_own_skill_prompt():
  prompts = {0: SKILL, 1: None, 2: [13, 92, 14]}
  out = batching.episode_samples(
    [trajectory(EPISODE, mode="window")], [np.asarray([1.0, 2.0, 3.0])], lambda t, step: prompts[step]
  )
  assert [s.tokens.tolist() for s in out] == [[10, 11, 1], [12], [13, 14, 4, 5]]
  assert [s.index.tolist() for s in out] == [[1, 2], [0], [1, 2, 3]]
  assert [s.targets.tolist() for s in out] == [[1, 2], [3], [4, 5, 6]]
  assert [s.advantages.tolist() for s in out] == [[1, 1], [2], [3, 3, 3]]
  assert out[0].skill_tokens.tolist() == [10, 90, 91, 11, 1] and out[0].skill_index.tolist() == [3, 4]
  assert out[1].skill_tokens is None and out[1].skill_index is None
  assert out[2].skill_tokens.tolist() == [13, 92, 14, 4, 5] and out[2].skill_index.tolist() == [2, 3, 4]


def test_episodes_that_broke_off_or_never_began_give_no_sample():
  some = [trajectory(EPISODE, error="died"), trajectory([]), trajectory(EPISODE[:1])]
  out = batching.episode_samples(some, [np.zeros(3), np.zeros(0), np.zeros(1)], lambda t, step: None)
  assert [s.tokens.tolist() for s in out] == [[10, 11, 1]]


def test_text_sample_trains_the_response_alone():
  sample = batching.text_sample([10, 11, 12], [1, 2])
  assert sample.tokens.tolist() == [10, 11, 12, 1] and sample.index.tolist() == [2, 3]
  assert sample.targets.tolist() == [1, 2] and sample.advantages.tolist() == [0, 0] and sample.skill_tokens is None


def test_text_sample_without_a_prompt_trains_all_but_the_first_token():
  sample = batching.text_sample([], [7, 8, 9])
  assert sample.tokens.tolist() == [7, 8] and sample.index.tolist() == [0, 1] and sample.targets.tolist() == [8, 9]


def sample(tokens, responses, skill=0):
  made = batching.text_sample(range(1, tokens - responses + 2), range(50, 50 + responses))
  if skill:
    changed = batching.text_sample(range(1, skill - responses + 2), range(50, 50 + responses))
    made = batching.dataclasses.replace(made, skill_tokens=changed.tokens, skill_index=changed.index)
  return made


def test_a_skill_context_is_given_up_before_its_sample_and_the_rest_is_counted():
  shapes = (RowShape(10, 4, 1), RowShape(20, 4, 1))
  some = [sample(8, 3, skill=20), sample(8, 3, skill=21), sample(21, 3), sample(8, 5)]
  kept, dropped = batching.that_fit(some, shapes)
  assert dropped == 2 and [s.length for s in kept] == [20, 8]
  assert kept[0] is some[0] and kept[1].skill_tokens is None and kept[1].tokens is some[1].tokens


def test_rows_on_the_device_read_back_as_the_samples():
  some = [sample(6, 2, skill=8), sample(5, 3), sample(9, 1, skill=10), sample(4, 2)]
  shape = RowShape(16, 6, 2)
  (batch,) = batching.to_batches(some, [shape], sharding.make_mesh(), skills=True)
  rows = batching.pack(some, [shape])[shape]
  width = batch.targets.shape[-1]
  for line, row in enumerate(rows):
    m, b = divmod(line, shape.rows)
    at = 0
    for number, s in enumerate(row, start=1):
      columns = slice(at, at + len(s.targets))
      skill = s.tokens if s.skill_tokens is None else s.skill_tokens
      for context, tokens in ((batch.ordinary, s.tokens), (batch.skill, skill)):
        place = np.flatnonzero(np.asarray(context.segment_ids)[m, b] == number)
        np.testing.assert_array_equal(np.asarray(context.tokens)[m, b, place], tokens)
        np.testing.assert_array_equal(np.asarray(context.positions)[m, b, place], np.arange(len(tokens)))
        index = np.asarray(context.index)[m, b, columns]
        assert (np.asarray(context.segment_ids)[m, b, index] == number).all()
        np.testing.assert_array_equal(np.asarray(context.tokens)[m, b, index[1:]], s.targets[:-1])
      np.testing.assert_array_equal(np.asarray(batch.targets)[m, b, columns], s.targets)
      assert (np.asarray(batch.skill_mask)[m, b, columns] == (s.skill_tokens is not None)).all()
      at += len(s.targets)
    assert np.asarray(batch.mask)[m, b].tolist() == [1.0] * at + [0.0] * (width - at)
  assert float(batch.mask.sum()) == 8 and int(batch.count) == -(-len(rows) // 2)


def test_skills_can_be_left_out_of_a_batch():
  (batch,) = batching.to_batches([sample(6, 2, skill=8)], [RowShape(8, 4, 1)], sharding.make_mesh(), skills=False)
  assert batch.skill is None


@pytest.mark.parametrize(
  "count, filled", [(1, [1]), (2, [1]), (3, [2]), (7, [4]), (8, [4]), (9, [4, 1]), (17, [4, 4, 1])]
)
def test_every_batch_has_the_same_number_of_micro_batches_and_its_count_says_what_is_filled(count, filled):
  batches = batching.to_batches(
    [sample(8, 2)] * count, [RowShape(8, 2, 2)], sharding.make_mesh(), skills=False, micro_batches=4
  )
  assert [int(b.count) for b in batches] == filled
  for batch in batches:
    assert batch.targets.shape == (4, 2, 2) and float(batch.mask[int(batch.count) :].sum()) == 0
  assert sum(float(b.mask.sum()) for b in batches) == 2 * count


def test_no_samples_are_one_empty_batch():
  (batch,) = batching.to_batches([], [RowShape(16, 4, 1), RowShape(8, 2, 2)], sharding.make_mesh(), skills=True)
  assert batch.ordinary.tokens.shape == (batching.MICRO_BATCHES, 2, 8) and int(batch.count) == 0
  assert float(batch.mask.sum()) == 0 and int(batch.skill_count) == 0


def test_rows_with_a_skill_come_first_and_what_has_none_fills_them_up():
  some = [sample(10, 1), sample(3, 1), sample(9, 1, skill=12), sample(8, 1), sample(7, 1, skill=9)]
  shape = RowShape(12, 8, 1, skill_length=15)
  rows = batching.pack(some, [shape])[shape]
  # by length 12 | 9; the 9 does not fit beside the 12 (9 + 7 > 12). Then 10 and 8 begin rows, 3 fits the first: 9 + 3
  # ordinary tokens of 12, 12 + 3 of 15 in the skill context.
  assert [[len(s.tokens) for s in row] for row in rows] == [[9, 3], [7], [10], [8]]
  (batch,) = batching.to_batches(some, [shape], sharding.make_mesh(), skills=True)
  assert int(batch.count) == 4 and int(batch.skill_count) == 2
  assert batch.ordinary.tokens.shape[-1] == 12 and batch.skill.tokens.shape[-1] == 15


def test_a_longer_skill_row_fills_the_ordinary_one():
  some = [sample(10, 2, skill=14) for _ in range(4)]
  equal, longer = RowShape(20, 8, 1), RowShape(20, 8, 1, skill_length=28)
  assert len(batching.pack(some, [equal])[equal]) == 4 and len(batching.pack(some, [longer])[longer]) == 2
  assert longer.holds(sample(20, 2, skill=28)) and not longer.holds(sample(20, 2, skill=29))


@pytest.mark.parametrize("place", [batching.pack, batching.one_per_row])
@pytest.mark.parametrize("count", [0, 1, 5, 23])
def test_a_grid_of_the_host_lines_up_with_the_batches(count, place):
  """Row lengths, several batches of one, skills or none: the targets as a grid are those of the batches."""
  rng = np.random.default_rng(count)
  shapes = [RowShape(8, 4, 2), RowShape(16, 8, 1, skill_length=20), RowShape(24, 8, 2)]
  some = []
  for i in range(count):
    length = int(rng.integers(3, 24))
    made = sample(length, int(rng.integers(1, min(length, 9))), skill=length + 2 if i % 3 and length < 18 else 0)
    some.append(batching.dataclasses.replace(made, targets=made.targets + 100 * i, episode=i))
  some, dropped = batching.that_fit(some, shapes)
  options = dict(micro_batches=2, place=place)
  batches = batching.to_batches(some, shapes, sharding.make_mesh(), skills=True, **options)
  grids = batching.token_grids(some, shapes, lambda s: s.targets, **options)
  episodes = batching.token_grids(some, shapes, lambda s: np.full(len(s.targets), s.episode), **options)
  if not some:
    assert len(batches) == 1 and float(batches[0].mask.sum()) == 0
  assert dropped == 0 and (count < 23 or len(batches) > len(shapes))
  for batch, grid, episode in zip(batches, grids, episodes, strict=True):
    assert grid.dtype == np.int32 and grid.shape == batch.targets.shape
    np.testing.assert_array_equal(grid, batch.targets)
    counted = np.asarray(batch.mask) > 0
    np.testing.assert_array_equal(episode[counted], (np.asarray(batch.targets)[counted] - 50) // 100)
    assert not episode[~counted].any()


def test_the_padded_layout_has_a_row_for_each_sample():
  shapes = [RowShape(8, 4, 2), RowShape(16, 4, 2)]
  some = [sample(6, 2), sample(5, 2, skill=7), sample(16, 2)]
  mesh = sharding.make_mesh()
  padded = batching.to_batches(some, shapes, mesh, skills=False, place=batching.one_per_row)
  packed = batching.to_batches(some, shapes, mesh, skills=False)
  assert [(b.ordinary.tokens.shape[-1], int(b.count)) for b in padded] == [(16, 2)]
  assert sorted((b.ordinary.tokens.shape[-1], int(b.count)) for b in packed) == [(8, 1), (16, 1)]
  # 27 tokens in two micro-batches of 2 x 16 columns, or in one of 2 x 8 and one of 2 x 16
  assert batching.row_fill(some, padded) == 27 / 64 and batching.row_fill(some, packed) == 27 / 48
  with pytest.raises(ValueError, match="17 tokens"):
    batching.one_per_row([sample(17, 2)], shapes)
