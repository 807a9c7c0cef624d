"""The helpers of the training stage: which tasks an iteration plays and what it reports."""

import numpy as np
import pytest

from seed_jax import train
from seed_jax.advantages import unequal_groups
from seed_jax.trajectory import Trajectory, Turn


def test_an_epoch_plays_every_task_once_and_the_next_in_another_order():
  tasks = list(range(12))
  epoch = [train.iteration_tasks(tasks, i, 4, seed=3) for i in range(3)]
  assert all(len(part) == 4 for part in epoch) and sorted(sum(epoch, [])) == tasks
  second = [train.iteration_tasks(tasks, i, 4, seed=3) for i in range(3, 6)]
  assert sorted(sum(second, [])) == tasks and second != epoch


def test_tasks_that_fill_no_iteration_wait_for_another_epoch():
  epoch = sum((train.iteration_tasks(list(range(11)), i, 4, seed=0) for i in range(2)), [])
  assert len(set(epoch)) == 8
  seen = {task for i in range(20) for task in train.iteration_tasks(list(range(11)), i, 4, seed=0)}
  assert seen == set(range(11))


def test_tasks_are_fixed_by_the_seed_and_the_iteration_alone():
  tasks = list(range(50))
  assert train.iteration_tasks(tasks, 7, 5, seed=1) == train.iteration_tasks(tasks, 7, 5, seed=1)
  assert train.iteration_tasks(tasks, 7, 5, seed=1) != train.iteration_tasks(tasks, 7, 5, seed=2)


@pytest.mark.parametrize("count, rounds", [(24, 3), (40, 10), (12, 10)])
def test_the_first_round_of_an_iteration_plays_what_a_method_of_one_round_plays(count, rounds):
  tasks = list(range(count))
  for iteration in range(9):
    drawn = [train.iteration_tasks(tasks, iteration, 4, seed=3, number=n, rounds=rounds) for n in range(rounds)]
    assert drawn[0] == train.iteration_tasks(tasks, iteration, 4, seed=3)
    several = min(rounds, count // 4)  # further rounds play others as long as there are any
    assert len(set(sum(drawn[:several], []))) == 4 * several


def episode(group, won, valid=(True,), reward=None, error=""):
  turns = [
    Turn("o", (), "p", np.ones(3, np.int32), np.ones(i + 1, np.int32), np.zeros(i + 1, np.float32), "r", "a", ok, 0.0)
    for i, ok in enumerate(valid)
  ]
  value = float(won) if reward is None else reward
  return Trajectory("t", "pick", "x", "transcript", group, 0, turns, won, value, truncated=False, error=error)


def test_episode_metrics_by_hand():
  log = train.episode_metrics(
    [
      episode(0, True, (True, True)),
      episode(0, False, (True, False, False)),
      episode(1, True),
      episode(1, True, reward=0.5),
      episode(1, False, (False,) * 9, reward=-5.0, error="died"),  # no evidence: counted as an error, else nowhere
    ]
  )
  assert log == pytest.approx(
    {
      "episodes": 5,
      "environment_steps": 2 + 3 + 1 + 1 + 9,
      "success": 3 / 4,
      "return": (1 + 0 + 1 + 0.5) / 4,
      "turns": 7 / 4,
      "valid_actions": 5 / 7,
      "response_tokens": (1 + 2 + 1 + 2 + 3 + 1 + 1) / 7,
      "tied_groups": 1 / 2,
      "errors": 1.0,
    }
  )


def test_episode_metrics_of_nothing_are_zero():
  log = train.episode_metrics([episode(0, False, error="died")])
  assert [log.pop(name) for name in ("errors", "episodes", "environment_steps")] == [1, 1, 1]
  assert set(log.values()) == {0.0}


# ---- groups that are left out


def kept(trajectories, group_filter):
  return [(t.group, t.member) for t in train.kept_groups(trajectories, group_filter)]


def two(group, returns, error=""):
  made = [episode(group, value > 0, reward=value, error=error if not value else "") for value in returns]
  for member, t in enumerate(made):
    t.member = member
  return made


def test_whole_groups_are_kept_in_their_order():
  some = [*two(7, (1, 0)), *two(3, (0, 0)), *two(5, (0, 1)), *two(9, (1, 1))]
  assert kept(some, unequal_groups) == [(7, 0), (7, 1), (5, 0), (5, 1)]
  assert kept(some, lambda returns, ids, *, num_groups: np.arange(num_groups) == 3) == [(9, 0), (9, 1)]
  assert kept(some, lambda returns, ids, *, num_groups: np.ones(num_groups, bool)) == [
    (t.group, t.member) for t in some
  ]
  assert kept(some[2:4] + some[6:], unequal_groups) == []


def test_a_filter_is_called_with_the_returns_and_dense_numbers_of_groups():
  told = []

  def group_filter(returns, ids, *, num_groups):
    told.append((returns.tolist(), ids.tolist(), num_groups))
    return np.zeros(num_groups, bool)

  assert kept([*two(7, (1, 0.5)), *two(3, (0, 1))], group_filter) == []
  assert told == [([1.0, 0.5, 0.0, 1.0], [0, 0, 1, 1], 2)]


def test_an_episode_that_broke_off_makes_no_difference_in_its_group():
  assert kept(two(0, (1, 1, 0), error="died"), unequal_groups) == []
  assert kept([*two(0, (0, 0), error="died"), *two(1, (1, 0.5, 0), error="died")], unequal_groups) == [
    (1, 0),
    (1, 1),
    (1, 2),
  ]
