"""Scores and advantages of turns, by hand."""

import math

import numpy as np
from turn_cases import trajectory, turn

from seed_jax import credit
from seed_jax.step_advantages import step_advantages

# One group: an episode of return 1 with a valid and an invalid turn, and one of return 0 with one turn.
PAIR = [
  trajectory([turn([1], [2]), turn([1], [2], valid=False)], reward=1.0),
  trajectory([turn([1], [2])], member=1),
]


def test_scores_scale_the_return_and_punish_the_invalid_turn_alone():
  first, second = credit.turn_scores(PAIR, reward_scale=10.0, invalid_penalty=1.0)
  assert first.tolist() == [10.0, 9.0] and second.tolist() == [0.0]


def test_advantages_over_all_turns_of_a_group():
  # 10, 9, 0: mean 19/3, deviations 11/3, 8/3, -19/3, variance (121 + 64 + 361) / 9 / 2 = 91/3
  first, second = credit.turn_advantages(PAIR, reward_scale=10.0, invalid_penalty=1.0, per_step=True)
  deviation = math.sqrt(91 / 3)
  np.testing.assert_allclose(first, [11 / 3 / deviation, 8 / 3 / deviation], rtol=1e-5)
  np.testing.assert_allclose(second, [-19 / 3 / deviation], rtol=1e-5)


def test_advantages_that_weigh_each_episode_once():
  # the long episode's turns weigh 1/2 each: mean (9.5 + 0) / 2 = 4.75, variance ((5.25^2 + 4.25^2) / 2 + 4.75^2) / 1
  first, second = credit.turn_advantages(PAIR, reward_scale=10.0, invalid_penalty=1.0, per_step=False)
  deviation = math.sqrt((5.25**2 + 4.25**2) / 2 + 4.75**2)
  np.testing.assert_allclose(first, [5.25 / deviation, 4.25 / deviation], rtol=1e-5)
  np.testing.assert_allclose(second, [-4.75 / deviation], rtol=1e-5)


def test_advantages_without_division():
  first, second = credit.turn_advantages(PAIR, reward_scale=10.0, invalid_penalty=0.0, normalize="mean", per_step=False)
  np.testing.assert_allclose([*first, *second], [5.0, 5.0, -5.0], rtol=1e-6)


def test_failed_episodes_are_left_out_and_groups_do_not_mix():
  some = [
    trajectory([turn([1], [2])], group=7, reward=1.0),
    trajectory([turn([1], [2])], group=7),
    trajectory([turn([1], [2])] * 3, group=7, reward=float("nan"), error="the environment died"),
    trajectory([], group=7, error="it never started"),
    trajectory([turn([1], [2])], group=2, reward=1.0),  # alone: no baseline
  ]
  out = credit.turn_advantages(some, per_step=True)
  assert [len(a) for a in out] == [1, 1, 3, 0, 1]
  root = math.sqrt(0.5)  # 10 and 0: deviations 5 and -5, standard deviation sqrt(50)
  np.testing.assert_allclose(np.concatenate(out), [root, -root, 0, 0, 0, 0], rtol=1e-5)


def test_a_methods_own_advantage_is_asked():
  asked = {}

  def advantage(returns, group_ids, **options):
    asked.update(options, groups=np.asarray(group_ids))
    return np.asarray(returns) + 100.0

  out = credit.turn_advantages(PAIR, invalid_penalty=0.0, per_step=False, advantage=advantage)
  np.testing.assert_array_equal(np.concatenate(out), [110.0, 110.0, 100.0])
  assert asked["num_groups"] == 1 and asked["normalize"] == "mean_std"
  np.testing.assert_array_equal(asked["weights"], [0.5, 0.5, 1.0, 0.0])  # filled to a power of two, without weight


def test_a_bound_on_the_turns_gives_one_compiled_shape():
  asked = []

  def advantage(returns, group_ids, *, num_groups, **options):
    asked.append((len(returns), num_groups))
    return np.asarray(returns)

  for trajectories in (PAIR, PAIR[:1], []):
    out = credit.turn_advantages(trajectories, advantage=advantage, num_turns=12, num_groups=3)
    assert sum(map(len, out)) == sum(t.length for t in trajectories)
  assert asked == [(12, 3)] * 3


# ---- credit of single steps


def observed(text, reward=0.0, valid=True):
  one = turn([1], [2], valid=valid)
  one.observation, one.reward = text, reward
  return one


def test_step_credit_compares_what_followed_the_same_observation():
  episodes = [
    trajectory([observed("door"), observed("hall", 1.0)], reward=1.0),
    trajectory([observed("door"), observed("cellar"), observed("door")], member=1),
    trajectory([observed("door", 1.0)], group=1, reward=1.0),  # the same text in another group is another place
  ]
  options = dict(reward_scale=10.0, invalid_penalty=0.0, normalize="mean", step_advantage=step_advantages)
  plain = credit.turn_advantages(episodes, **options | dict(step_advantage=None))
  for weight in (1.0, 0.5):
    out = credit.turn_advantages(episodes, **options, step_weight=weight, gamma=0.5)
    added = [(a - b) / weight for a, b in zip(out, plain, strict=True)]
    # at the door: 0.5 * 10 was still to come in the first episode, nothing twice in the second: mean 5 / 3
    np.testing.assert_allclose(added[0], [5 - 5 / 3, 0.0], atol=1e-5)
    np.testing.assert_allclose(added[1], [-5 / 3, 0.0, -5 / 3], atol=1e-5)
    np.testing.assert_allclose(added[2], [0.0], atol=1e-5)


def test_step_credit_counts_an_invalid_step_against_itself_and_what_led_there():
  episodes = [
    trajectory([observed("a"), observed("b", valid=False)]),
    trajectory([observed("a"), observed("b")], member=1),
  ]
  options = dict(reward_scale=10.0, invalid_penalty=1.0, normalize="mean", step_advantage=step_advantages, gamma=0.5)
  plain = credit.turn_advantages(episodes, **options | dict(step_advantage=None))
  out = credit.turn_advantages(episodes, **options)
  np.testing.assert_allclose(out[0] - plain[0], [-0.25, -0.5], atol=1e-6)
  np.testing.assert_allclose(out[1] - plain[1], [0.25, 0.5], atol=1e-6)


def test_step_credit_leaves_broken_episodes_out():
  episodes = [
    trajectory([observed("a", 1.0)], reward=1.0),
    trajectory([observed("a")], member=1),
    trajectory([observed("a", 9.0)], member=2, reward=9.0, error="died"),
  ]
  out = credit.turn_advantages(episodes, normalize="mean", step_advantage=step_advantages)
  np.testing.assert_allclose(np.concatenate(out), [10.0, -10.0, 0.0], atol=1e-5)
