"""Theory as instruments: the SEED paper's propositions measured during training, on contexts drawn from its batches.

Shapes: M micro-batches, B rows, R response tokens of a row, C contexts of a row.

B rows that hold a skill are drawn from the iteration's batches, and of each up to C response positions with a skill;
what is measured of them stands in `propositions`. It belongs to the policy that sampled: measure before the first
update of the iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from seed_jax import batching, losses, propositions, sharding
from seed_jax.batching import RowShape, Sample
from seed_jax.learn import Scoring
from seed_jax.methods import Method
from seed_jax.propositions import Contexts
from seed_jax.trajectory import Trajectory
from seed_jax.update import Batch

ROWS = sharding.ROWS[0]


@functools.cache
def check(method: Method, beta: float) -> None:
  """Raises ValueError for a method of whose loss the propositions say nothing.

  They are about an auxiliary loss whose weight of a token, w = -d loss / d logprobs at the policy that sampled, is
  SEED's gate or differs from it by a constant: r = pi w / Z of proposition 1 needs a w that is not negative, and
  proposition 3's beta / 4 is the steepest slope of the sigmoid. Measured on numbers, so that it holds for a loss of
  one's own, too. A method that moves its advantages by the skill context has no zero RL gradient of its own to measure.
  """
  why = "the propositions of train.theory_every are about an auxiliary loss that weighs tokens by the gate, but method"
  if not method.needs_skills:
    raise ValueError(f"{why} {method.name!r} scores no skill context; set train.theory_every=0")
  if method.auxiliary is None or method.transform is not None or method.regrade is not None:
    raise ValueError(f"{why} {method.name!r} changes advantages by the skill context; set train.theory_every=0")
  gaps = np.linspace(-4.0, 4.0, 9)  # and where the gate bends
  logprobs, gap = np.meshgrid(np.linspace(-6.0, -0.1, 7), [*gaps, *gaps / max(beta, 1.0)])
  logprobs, pair = logprobs.astype(np.float32), dict(skill_logprobs=(logprobs + gap).astype(np.float32))

  def loss(x):
    return jnp.sum(method.auxiliary(logprobs=x, old_logprobs=jax.lax.stop_gradient(x), beta=beta, **pair))

  apart = -jax.grad(loss)(logprobs) - losses.opd_gate(logprobs=logprobs, beta=beta, **pair)
  if not float(jnp.ptp(apart)) < 1e-4:  # NaN, too
    raise ValueError(
      f"{why} {method.name!r} weighs them otherwise (by up to {float(jnp.ptp(apart)):.3g} at opd_beta={beta:g}); "
      "set train.theory_every=0"
    )


def measure(
  params: dict,
  start_params: dict,
  minibatches: Sequence[Sequence[Batch]],
  scoring: Scoring,
  *,
  tied: Sequence[Sequence[jax.Array]],
  contexts: int = 32,
  seed: int = 0,
) -> dict[str, float]:
  """The three propositions on a bounded set of contexts, as metrics; what is passed in stays as it is.

  Args:
    params: the current policy, theta_k.
    start_params: the policy that training started from; the same shapes.
    minibatches: the iteration's, scored or not: tokens, masks and advantages are read, log-probabilities are not.
    scoring: the method with its loss and its teacher, the model, beta and temperature.
    tied: for each batch of `minibatches` float32 [M, B, R], 1 on the tokens of groups whose rewards are all equal.
    contexts: how many at most; each row gives contexts // B, but at least one.
    seed: of the draw of batch, rows, positions and tokens.

  Returns:
    theory_contexts, the number of contexts, and theory_prop1_NAME, theory_prop2_NAME, theory_prop3_NAME with the NAMEs
    of `propositions.proposition_1`, `propositions.proposition_2` and `propositions.proposition_3`.

  Needs the mesh to be set, and memory for four gradients. Compiled once a row shape, see `programs`.

  Raises:
    ValueError: batches without a skill context, or a method that `check` refuses.
  """
  check(scoring.method, float(scoring.loss.opd_beta))
  pairs = [pair for part, flags in zip(minibatches, tied, strict=True) for pair in zip(part, flags, strict=True)]
  if any(batch.skill is None for batch, _ in pairs):
    raise ValueError(f"method {scoring.method.name!r} scores no skill context; the propositions compare two contexts")
  filled = np.asarray(jax.device_get([batch.skill_count for batch, _ in pairs]), np.float64)
  shares = filled / filled.sum() if filled.any() else None
  batch, flags = pairs[np.random.default_rng(seed).choice(len(pairs), p=shares)]
  _, B, R = batch.mask.shape
  seed = np.uint32(seed % 2**32)
  chosen = choose(batch, flags, seed, columns=min(max(contexts // B, 1), R))
  teacher = start_params if scoring.method.teacher == "start" else params
  found = {
    "prop1": propositions.proposition_1(params, teacher, chosen, seed, scoring),
    "prop2": propositions.proposition_2(params, teacher, chosen, scoring),
    "prop3": propositions.proposition_3(params, start_params, chosen, scoring),
  }
  named = {"theory_contexts": chosen.count} | {
    f"theory_{group}_{name}": value for group, values in found.items() for name, value in values.items()
  }
  return {name: float(value) for name, value in jax.device_get(named).items()}


def programs(
  params, scoring: Scoring, shapes: Sequence[RowShape], mesh: jax.sharding.Mesh, *, contexts: int = 32
) -> list[tuple[str, Callable[[], None]]]:
  """What `measure` will compile, as (name, a call that compiles it); each call needs the mesh to be set."""

  def warm(shape):
    empty = batching.empty_batch(shape, mesh, skills=True)
    measure(params, params, [[empty]], scoring, tied=[[empty.mask]], contexts=contexts)

  return [(f"propositions, rows of {shape.length}", functools.partial(warm, shape)) for shape in shapes]


def tied_turns(scores: Sequence[np.ndarray], groups: Sequence[int]) -> list[np.ndarray]:
  """Whether the rewards of an episode's group are all equal, float32[turns] of 0 and 1 per episode.

  scores[i]: rewards of the turns of episode i, as its advantage sees them (`credit.turn_scores`), none for an episode
  that does not count because its environment failed; groups[i]: its group. A group of one is tied.
  """
  seen: dict[int, set[float]] = {}
  for group, values in zip(groups, scores, strict=True):
    seen.setdefault(group, set()).update(np.asarray(values, np.float32).tolist())
  return [np.full(len(v), len(seen[group]) <= 1, np.float32) for group, v in zip(groups, scores, strict=True)]


def tied_grids(
  trajectories: Sequence[Trajectory],
  scores: Sequence[np.ndarray],
  parts: Sequence[Sequence[Sample]],
  shapes: Sequence[RowShape],
  mesh: jax.sharding.Mesh,
) -> list[list[jax.Array]]:
  """`measure`'s `tied` for mini-batches made of the samples `parts`; `scores` of the turns as in `tied_turns`."""
  counted = [s[:0] if t.error else s for s, t in zip(scores, trajectories, strict=True)]
  flags = [bool(f.any()) for f in tied_turns(counted, [t.group for t in trajectories])]

  def on_mesh(samples):
    grids = batching.token_grids(samples, shapes, lambda s: np.full(len(s.targets), flags[s.episode]))
    return [sharding.put_rows(grid.astype(np.float32), mesh, axis=1) for grid in grids]

  return [on_mesh(samples) for samples in parts]


# --- the contexts ---------------------------------------------------------------------------------------------------


def choose(batch: Batch, tied: jax.Array, seed: jax.Array, *, columns: int) -> Contexts:
  """B random rows among those with a skill, each from the M that lie at its place, and C = `columns` random positions
  of each: rows stay on their device.
  """
  per_token = dict(targets=batch.targets, advantages=batch.advantages, tied=tied)
  active = batch.mask, batch.skill_mask
  return _choose(dict(ordinary=batch.ordinary, skill=batch.skill), per_token, active, seed, columns=columns)


@jax.jit(static_argnames="columns")
def _choose(contexts, per_token, active, seed, *, columns):
  active = active[0] * active[1] > 0
  M, B, R = active.shape
  key_rows, key_columns = jax.random.split(jax.random.key(seed))
  priority = jax.sharding.reshard(jax.random.uniform(key_rows, (M, B)), P(None, ROWS))
  row = jnp.argmax(jnp.where(jnp.any(active, axis=-1), priority, -1.0), axis=0)  # [B]
  taken = jnp.arange(M)[:, None, None] == row[:, None]
  of_rows = lambda x: jnp.sum(jnp.where(taken, x, 0), axis=0, dtype=x.dtype)  # noqa: E731
  contexts, per_token, active = jax.tree.map(of_rows, (contexts, per_token, active.astype(jnp.float32)))
  priority = jax.sharding.reshard(jax.random.uniform(key_columns, (B, R)), P(ROWS, None))

  def pick(priority, tree):
    column = jax.lax.top_k(priority, columns)[1]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, column, axis=1), tree)

  index = {name: context.index for name, context in contexts.items()}
  index, per_token, active = jax.sharding.auto_axes(pick, out_sharding=P(ROWS, None))(
    jnp.where(active > 0, priority, -1.0), (index, per_token, active)
  )
  contexts = {name: context.replace(index=index[name]) for name, context in contexts.items()}
  count = jnp.sum(active)
  return Contexts(**contexts, **per_token, weights=active / jnp.maximum(count, 1.0), count=count)
