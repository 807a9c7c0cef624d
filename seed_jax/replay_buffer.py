"""SPEAR's buffer: successes of the run's last iterations, replayed beside the fresh episodes of an iteration.

DIR/replay/000012.npz holds what iteration 12 added, its samples and the mean return of each of its groups, so that a
run that resumes has the buffer it had. Source: arXiv:2509.22601. Our reconstruction: an iteration replays at most as
many samples as it has fresh ones, drawn evenly; intrinsic rewards for tool calls, and the filters of overlong,
incomplete, repetitive and unreadable episodes, are not here.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
from etils import epath

from seed_jax import batching, hosts, learn, replay, sharding, token_line
from seed_jax.batching import RowShape, Sample
from seed_jax.metrics import is_writer
from seed_jax.replay import ReplayConfig
from seed_jax.run import Run, process_seed
from seed_jax.trajectory import Trajectory
from seed_jax.update import Batch

FOLDER = "replay"
_NAME = re.compile(r"(\d{6,})\.npz")
_FIELDS = ("tokens", "index", "targets", "logprobs")


@dataclasses.dataclass(frozen=True)
class Added:
  """What an iteration put in: samples, the return of each one's episode, and the mean return of every group."""

  samples: list[Sample]
  returns: np.ndarray  # float32[samples]
  baselines: np.ndarray  # float32[groups]


class ReplayBuffer:
  """Samples of earlier iterations. `add` after every iteration, `draw` in the next; both count iterations from 1."""

  def __init__(self, directory: epath.PathLike, config: ReplayConfig, *, resume: int = 0):
    """`resume`: the last iteration that counts; what was added later goes."""
    self.directory, self.config = epath.Path(directory), config
    there = sorted(self.directory.iterdir()) if self.directory.exists() else []
    numbers = {int(found[1]): path for path in there if (found := _NAME.fullmatch(path.name))}
    if is_writer():
      for number in [n for n in numbers if n > resume]:
        numbers[number].unlink()
    self._added = {n: _read(path.read_bytes()) for n, path in numbers.items() if n <= resume}

  def add(
    self, iteration: int, trajectories: Sequence[Trajectory], samples: Sequence[Sample], returns: Sequence[float]
  ) -> int:
    """Takes in the samples of the successes whose advantage is above the threshold; returns how many.

    samples: of the iteration, `Sample.episode` being an index into `trajectories`; their advantages count.
    returns: of the episodes, in the units of the advantages.
    """
    # `replay.admitted`, on the host: its input has another length in every iteration
    enters = [s.advantages.mean() > self.config.threshold for s in samples]
    chosen = [s for s, good in zip(samples, enters, strict=True) if good and trajectories[s.episode].won]
    groups: dict[int, list[float]] = {}
    for t, value in zip(trajectories, returns, strict=True):
      if not t.error:
        groups.setdefault(t.group, []).append(value)
    added = Added(
      [dataclasses.replace(s, episode=0, turns=None, skill_tokens=None, skill_index=None) for s in chosen],
      np.asarray([returns[s.episode] for s in chosen], np.float32),
      np.asarray([np.mean(values) for values in groups.values()], np.float32),
    )
    self._added[iteration] = added
    if is_writer():
      self.directory.mkdir(parents=True, exist_ok=True)
      path = self.directory / f"{iteration:06d}.npz"
      half = self.directory / f".{path.name}.new"  # a file is there whole or not at all
      half.write_bytes(_written(added))
      half.replace(path)
    return len(chosen)

  def draw(self, iteration: int, count: int, seed: int) -> list[Sample]:
    """At most `count` samples, drawn evenly of those that are still better than the median group, in order of age; the
    advantage of their tokens is return - median.
    """
    c = self.config
    ages = [n for n in sorted(self._added) if 0 < iteration - n <= c.max_age]
    held = [pair for n in ages for pair in zip(self._added[n].samples, self._added[n].returns, strict=True)][-c.size :]
    known = [self._added[n].baselines for n in sorted(self._added) if n < iteration]
    advantages, good = still_better([value for _, value in held], np.concatenate([np.zeros(0), *known]), c)
    chosen = np.sort(np.random.default_rng(seed).permutation(np.flatnonzero(good))[:count])
    full = lambda s, a: np.full(len(s.targets), a, np.float32)  # noqa: E731
    return [dataclasses.replace(held[i][0], advantages=full(held[i][0], advantages[i])) for i in chosen]


class Replay:
  """What stage `train` replays beside an iteration's own mini-batches: nothing, where the method has no `replay`."""

  def __init__(self, run: Run, scoring: learn.Scoring, shapes: Sequence[RowShape], *, resume: int = 0):
    c, r = run.config.train, run.config.rollout
    self.run, self.scoring, self.shapes, self.config = run, scoring, shapes, scoring.method.replay
    self._room = c.tasks_per_iteration * c.group_size * r.max_steps * r.max_response  # tokens
    if self.config is not None:
      self.buffer = ReplayBuffer(run.workdir / FOLDER, self.config, resume=resume)

  def programs(self) -> list[tuple[str, Callable[[], None]]]:
    """What calls compile beside the programs of `learn.programs` with a second mini-batch."""
    if self.config is None:
      return []
    zeros = [np.zeros((1, self._room), np.float32)] * 4
    return [
      ("replay advantages", lambda: still_better(np.zeros(0), np.zeros(0), self.config)),
      ("clip-cov", lambda: self._clip_cov(0, *zeros)),
    ]

  def __call__(self, trajectories, samples: Sequence[Sample], iteration: int, params, reference):
    """(batches for `learn.updates`, metrics), and the iteration's successes enter the buffer; `iteration` from 0."""
    if self.config is None:
      return [], {}
    c, seed = self.run.config.train, process_seed(self.run.config.seed, f"replay {iteration}")
    drawn = self.buffer.draw(iteration + 1, len(samples), seed)
    returns = [c.reward_scale * t.episode_return for t in trajectories]
    log = {"replay_admitted": float(self.buffer.add(iteration + 1, trajectories, samples, returns))}
    coef = replay.cosine_ramp(iteration, peak=self.config.coef, iterations=self.config.ramp)
    log |= {"replay_samples": float(len(drawn)), "replay_coef": coef}
    if not drawn or coef == 0:
      return [], log
    options = self.scoring.batch_options
    parts = [
      [
        learn.scored(b, params, reference, self.scoring, first=False)
        for b in batching.to_batches(part, self.shapes, self.run.mesh, **options)
      ]
      for part in learn.mini_batches(drawn, c.minibatches, seed)
    ]
    out, taken_out = self._weighed(parts, coef, seed)
    return out, log | {"replay_clip_cov": taken_out}

  def _weighed(self, parts, coef: float, seed: int) -> tuple[list[list[Batch]], float]:
    """The batches with `coef` and clip-cov's mask in their advantages (the loss is linear in those above 0), ratios to
    the policy that sampled, and the share of tokens that clip-cov took out.
    """
    flat = [b for part in parts for b in part]
    rows = hosts.fetch([(b.old_logprobs, b.sampler_logprobs, b.advantages, b.mask) for b in flat])
    places = [row[3] > 0 for row in rows]
    lines = [token_line.filled(token_line.gather(column, places), self._room) for column in zip(*rows, strict=True)]
    kept = np.asarray(self._clip_cov(seed, *lines))[0]
    grids = iter(token_line.scatter(coef * lines[2][0] * kept, places))

    def weigh(b):
      advantages = sharding.put(next(grids), b.advantages.sharding)
      return b.replace(advantages=advantages, old_logprobs=b.sampler_logprobs)

    taken_out = 1.0 - kept[: sum(place.sum() for place in places)].mean()
    return [[weigh(b) for b in part] for part in parts], float(taken_out)

  def _clip_cov(self, seed, logprobs, old_logprobs, advantages, mask):
    loss = self.scoring.loss
    lines = dict(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    return _clip_cov(np.uint32(seed % 2**32), lines, clip_low=loss.clip_low, clip_high=loss.clip_high)


@functools.partial(jax.jit, static_argnames=("clip_low", "clip_high"))
def _clip_cov(seed, lines, *, clip_low, clip_high):
  return replay.clip_cov_mask(jax.random.key(seed), **lines, clip_low=clip_low, clip_high=clip_high)


_replay_advantages = jax.jit(replay.replay_advantages)


def still_better(returns: np.ndarray, baselines: np.ndarray, config: ReplayConfig) -> tuple[np.ndarray, np.ndarray]:
  """`replay.replay_advantages` in a compiled shape that does not depend on how much there is; the newest baselines."""
  baselines = np.asarray(baselines, np.float32)[-config.baselines :]
  padded = lambda values, size: np.pad(np.asarray(values, np.float32), (0, size - len(values)))  # noqa: E731
  found = _replay_advantages(
    padded(returns, config.size), padded(baselines, config.baselines), count=np.int32(len(baselines))
  )
  advantages, kept = (np.asarray(values)[: len(returns)] for values in found)
  return advantages, kept


def _written(added: Added) -> bytes:
  out = io.BytesIO()
  arrays = {}
  for name in _FIELDS:
    values = [getattr(s, name) for s in added.samples]
    arrays[name] = np.concatenate([np.zeros(0), *values]).astype(np.float32 if name == "logprobs" else np.int32)
    arrays[name + "_counts"] = np.asarray([len(v) for v in values], np.int64)
  np.savez(out, returns=added.returns, baselines=added.baselines, **arrays)
  return out.getvalue()


def _read(data: bytes) -> Added:
  with np.load(io.BytesIO(data), allow_pickle=False) as found:
    columns = {
      name: np.split(found[name], np.cumsum(found[name + "_counts"])[:-1]) if len(found["returns"]) else []
      for name in _FIELDS
    }
    returns, baselines = found["returns"], found["baselines"]
  rows = zip(*(columns[name] for name in _FIELDS), strict=True)
  samples = [Sample(t, i, y, np.zeros(len(y), np.float32), logprobs) for t, i, y, logprobs in rows]
  return Added(samples, returns, baselines)
