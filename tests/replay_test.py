"""SPEAR's replay: hand numbers, and clip-cov against a loop on 200 random cases."""

import jax
import numpy as np
from loss_references import tokens_of

from benchmarks.oracle_cases import cases, padded
from seed_jax import replay


def test_admission():
  np.testing.assert_array_equal(replay.admitted([0.5, 1.0, 1.2]), [False, False, True])


def test_replay_advantages_by_hand():
  ring = np.array([0.2, 0.8, 0.4, 0.0, 0.0])
  advantages, kept = replay.replay_advantages([1.0, 0.4, 0.1], ring, count=3)  # the median of .2, .8, .4 is .4
  np.testing.assert_allclose(advantages, [0.6, 0, 0], rtol=1e-6)
  np.testing.assert_array_equal(kept, [True, False, False])
  advantages, _ = replay.replay_advantages([1.0], ring, count=2)
  np.testing.assert_allclose(advantages, [0.5], rtol=1e-6)  # of two, their middle
  advantages, kept = jax.jit(replay.replay_advantages)(np.ones(2), ring, count=0)
  assert not advantages.any() and not kept.any()


def test_clip_cov_on_200_cases():
  mask_of = jax.jit(replay.clip_cov_mask, static_argnames=("low", "high", "fraction"))
  drawn = 0
  for number, c in enumerate(cases()):
    places = [(i, t) for i in range(len(c["mask"])) for t in tokens_of(c, i)]
    value = {p: float(c["logprobs"][p]) for p in places}
    mean_a = np.mean([c["advantages"][i].astype(float) for i, _ in places]) if places else 0.0
    mean_l = np.mean(list(value.values())) if places else 0.0
    candidates, edge = set(), set()
    for i, t in places:
      a, r = float(c["advantages"][i]), np.exp(value[i, t] - float(c["old"][i, t]))
      covariance = (a - mean_a) * (value[i, t] - mean_l)
      clipped = r > 1.2 if a > 0 else r < 0.8
      if min(abs(covariance - 0.2), abs(covariance - 2.0), abs(r - 1.2), abs(r - 0.8)) < 1e-5:
        edge.add((i, t))
      elif 0.2 < covariance < 2.0 and not clipped:
        candidates.add((i, t))
    big = padded(c)
    args = dict(logprobs=big["logprobs"], old_logprobs=big["old"], advantages=big["advantages"], mask=big["mask"])
    out = np.asarray(mask_of(jax.random.key(number), **args, fraction=0.1, low=0.2, high=2.0))
    zeros = {tuple(p) for p in np.argwhere(out == 0).tolist()}
    assert zeros <= candidates | edge and set(np.unique(out)) <= {0.0, 1.0}, number
    allowed = max(1, int(0.1 * len(places)))
    assert min(allowed, len(candidates)) <= len(zeros) <= allowed, number
    drawn += len(zeros)
  assert drawn > 200


def test_the_ramp_is_half_a_cosine():
  values = [replay.cosine_ramp(i, peak=2.0, iterations=100) for i in (0, 25, 50, 100, 150)]
  np.testing.assert_allclose(values, [0, 1 - np.sqrt(0.5), 1, 2, 2], atol=1e-12)
  assert replay.cosine_ramp(0, peak=2.0, iterations=0) == 2.0
