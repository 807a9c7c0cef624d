"""iStar's implicit process reward model: a second policy whose log-probabilities say what a step is worth.

Shapes: E episodes, n sampled tokens of an iteration in one line (`regrade.Line`).

A step's reward is r = beta * sum over its tokens of (log phi - log pi_old), an episode's score q the mean of its steps'
rewards, and phi learns from the pairs of one success and one failure of the same task (`pairwise_prm_loss` of q). The
loss needs whole groups, but phi only enters through sums over tokens, so that

  d loss / d phi = sum over tokens of w * d log phi,   w = d loss / d q * beta / (steps of the episode)

with w a number that is known once all tokens are scored: the update is one of weighted log-likelihoods, a micro-batch
at a time, and its gradient is exactly that of the loss. Source: arXiv:2509.19199. Our reconstruction: one update an
iteration, over all of its pairs; without a pair none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from seed_jax import batching, update
from seed_jax.batching import RowShape
from seed_jax.models.config import ModelConfig
from seed_jax.score import score
from seed_jax.trajectory import Trajectory, group_numbers
from seed_jax.update import Batch

BETA = 0.05


class RewardModel:
  """phi and its optimizer. `state` is what a checkpoint has to hold.

  loss: (*, scores [E], group_ids [E], success [E]) -> scalar; `episodes` is how many there can be at most.
  """

  def __init__(
    self,
    model: ModelConfig,
    params,
    optimizer: optax.GradientTransformation,
    loss: Callable,
    *,
    episodes: int,
    temperature: float = 1.0,
    beta: float = BETA,
  ):
    self.state = update.init_state(params, optimizer)
    self._model, self._episodes, self._temperature, self._beta = model, episodes, temperature, beta
    self._step = update.make_update(model, weighted_loss, optimizer, temperature=temperature)
    slope = jax.value_and_grad(lambda scores, ids, won: loss(scores=scores, group_ids=ids, success=won))
    self._slope = jax.jit(slope)

  def score(self, minibatches: Sequence[Sequence[Batch]]) -> list[list[jax.Array]]:
    """log phi of every sampled token, [M, B, R], batch by batch."""
    return [[self._score(b) for b in part] for part in minibatches]

  def compile(self, shapes: Sequence[RowShape], mesh: jax.sharding.Mesh) -> None:
    """Compiles all that `score` and `train` call; needs the mesh to be set."""
    self._slope(*self._padded(np.zeros(0), [], []))
    for shape in shapes:
      batch = batching.empty_batch(shape, mesh, skills=False)
      jax.block_until_ready(self._score(batch))
      self._step.compile(self.state, _bare(batch))

  def train(self, minibatches, line, trajectories: Sequence[Trajectory], gaps: np.ndarray) -> dict[str, float]:
    """One update with the iteration's pairs; metrics: the loss before it, how many of the pairs are in order, and the
    norm of the gradient.

    gaps: float32[1, n], log phi - log pi_old of the tokens of `line`, a `regrade.Line` of these mini-batches.
    """
    turns, counted = line.turn_ids[0], line.mask[0] > 0
    episode_of = np.repeat(np.arange(len(trajectories)), [t.length for t in trajectories])  # of a turn
    episodes = episode_of[turns[counted]]
    present = np.unique(turns[counted])
    steps = np.bincount(episode_of[present], minlength=len(trajectories))
    sums = np.bincount(episodes, gaps[0][counted], minlength=len(trajectories))
    scores = self._beta * sums / np.maximum(steps, 1)
    numbers = group_numbers(trajectories)
    groups = np.asarray([numbers[t.group] if n else -1 for t, n in zip(trajectories, steps, strict=True)], np.int32)
    won = np.asarray([t.won for t in trajectories], bool)
    pairs = (groups[:, None] == groups) & (groups >= 0) & won[:, None] & ~won
    if not pairs.any():
      return {"reward_pairs": 0.0}
    loss, slope = self._slope(*self._padded(scores, groups, won))
    weights = np.zeros(line.mask.shape, np.float32)
    weights[0, counted] = (np.asarray(slope)[: len(steps)] * self._beta / np.maximum(steps, 1))[episodes]
    batches = [_bare(b) for part in line.write(minibatches, weights) for b in part]
    self.state, metrics = self._step(self.state, batches)
    return {
      "reward_pairs": float(pairs.sum()),
      "reward_loss": float(loss),
      "reward_in_order": float((scores[:, None] > scores)[pairs].mean()),
      "reward_grad_norm": float(metrics["grad_norm"]),
    }

  def _score(self, batch: Batch) -> jax.Array:
    nothing = jnp.zeros_like(batch.count)
    options = dict(temperature=self._temperature, start=nothing)
    return score(self.state.params, batch.ordinary, batch.targets, batch.count, self._model, **options)

  def _padded(self, scores, groups, won):
    more = self._episodes - len(scores)
    if more < 0:
      raise ValueError(f"{len(scores)} episodes, but there is room for {self._episodes}")
    pad = lambda values, fill, dtype: np.pad(np.asarray(values, dtype), (0, more), constant_values=fill)  # noqa: E731
    return pad(scores, 0, np.float32), pad(groups, -1, np.int32), pad(won, False, bool)


def weighted_loss(logprobs, entropy, batch: Batch, denominators):
  """sum over tokens of weight * logprob, the weights being the batch's `advantages`: linear in log phi."""
  del entropy, denominators
  share = jnp.sum(jnp.where(batch.mask > 0, batch.advantages * logprobs, 0.0))
  return share, {"loss": jax.lax.stop_gradient(share)}


def _bare(batch: Batch) -> Batch:
  """What the loss reads, so that one program does for batches at every stage of scoring."""
  names = ("skill", "old_logprobs", "own_old", "skill_logprobs", "ref_logprobs", "transform_coef")
  return batch.replace(**dict.fromkeys(names))
