"""The learning curve of a run: a fixed panel that the policy plays during training, without a skill in any prompt but
for methods whose own recipe shows library text there (`Method.in_evaluation`).

Training does not notice: the panel has sampling keys of its own, every rollout begins on an engine that was reset, and
its seconds count nowhere. `config.train.panel` says how often (every=0: never) and on what: to choose hyper-parameters
a split of training rooms, to report a method the unseen ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence

from envs.pool import Pool
from envs.protocol import Task
from seed_jax.engine import Engine
from seed_jax.intervals import summarize
from seed_jax.metrics import is_writer, plain_value, read_rows, say, write_text
from seed_jax.rollout import Episode
from seed_jax.run import ConfigError, Run
from seed_jax.unfinished import Plays

KEYS = 1 << 30  # added to the iteration in the sampling keys of a panel: no training episode has such a number
COUNTED = ("episodes", "environment_steps", "tokens_sampled", "tokens_trained", "seconds")


def panel_tasks(run: Run, training: Sequence[Task]) -> list[Task]:
  """The tasks of config.train.panel, sorted by id. Raises ConfigError where training plays one of them."""
  p = run.config.train.panel
  tasks = sorted(run.benchmark.tasks(p.split, p.tasks, p.seed), key=lambda task: task.id)
  shared = {task.id for task in tasks} & {task.id for task in training}
  if shared:
    raise ConfigError(
      f"config.train.panel: {len(shared)} of its {len(tasks)} tasks of the split {p.split!r} are tasks of training; "
      "choose another split, or another config.train.panel.seed"
    )
  return tasks


def metric_of(name: str, row: Mapping[str, float], curve: Curve, iteration: int) -> float | None:
  """What config.checkpoint.best_metric names, higher being better: a field of the training row, or SPLIT/FIELD of the
  panel's row after so many iterations, where the panel of that split was played. None where there is no such number,
  or no row. Raises ConfigError where the row has no such field.
  """
  split, slash, field = name.rpartition("/")
  value = curve.value(iteration, field) if slash and split == curve.panel.split else row.get(name)
  if not slash and name and row and name not in row:
    raise ConfigError(f"config.checkpoint.best_metric={name} is no column of metrics.jsonl; there are {', '.join(row)}")
  return None if value is None else float(value)


class Curve:
  """DIR/curve.jsonl: a row at iteration 0, every config.train.panel.every iterations, and at the last one.

  A row holds iteration, success and macro (fractions in [0, 1]), families, outcomes (task id -> share won), errors,
  panel_seconds, and what training had used by then: episodes, environment_steps, tokens_sampled, tokens_trained
  (response tokens in the loss), seconds (of iterations; neither compilation nor panels).
  """

  def __init__(
    self,
    run: Run,
    training: Sequence[Task],
    resume: int = 0,
    counts: Mapping[str, float] | None = None,
    *,
    skill: str | Callable = "",
  ) -> None:
    """Opens the curve at iteration `resume`: later rows go, they will be measured again. `counts` is what `counts` held
    at that iteration. `skill` is what the prompts hold (`rollout.Episode`): nothing, but for methods that say so.
    """
    self._skill = skill
    self.panel = run.config.train.panel
    self.counts = dict.fromkeys(COUNTED, 0) | dict(counts or {})
    self.seconds = 0.0  # of the panels that this process played
    self.plays = Plays(run, "panel")
    self._run, self._last = run, run.config.train.iterations
    self._path = run.workdir / "curve.jsonl"
    self._rows, self._tasks = [], []
    if self.panel.every:
      self._rows = [row for row in read_rows(self._path) if row["iteration"] <= resume]
      self._tasks = panel_tasks(run, training)
      self._write()

  def count(self, row: Mapping[str, float]) -> None:
    """Adds what an iteration used."""
    for name in COUNTED:
      self.counts[name] += row[name]

  def due(self, iteration: int) -> bool:
    """Whether the policy is to play after so many iterations. A point that is there already is not played again."""
    if not self.panel.every or any(row["iteration"] == iteration for row in self._rows):
      return False
    return iteration % self.panel.every == 0 or iteration == self._last

  def value(self, iteration: int, name: str) -> float | None:
    """A field of the row after so many iterations; None where there is no such row."""
    return next((row[name] for row in self._rows if row["iteration"] == iteration), None)

  def point(self, iteration: int, engine: Engine, pool: Pool, params) -> None:
    """Plays the panel with the parameters after `iteration` iterations where that is due, and writes its row.

    The engine keeps these parameters: whoever plays next sets its own.
    """
    if not self.due(iteration):
      return
    started, seconds_before = time.monotonic(), self.seconds
    engine.set_params(params)
    episodes = [
      Episode(task, group, member, self._skill)
      for group, task in enumerate(self._tasks)
      for member in range(self.panel.samples)
    ]
    options = dict(iteration=KEYS + iteration, temperature=self.panel.temperature)
    try:
      trajectories = self.plays(iteration, engine, pool, episodes, params, **options)
    finally:  # also of a panel that is cut short
      self.seconds = seconds_before + time.monotonic() - started
    engine.take_stats()  # tokens of the panel are no tokens of training
    played = [t for t in trajectories if not t.error]
    found = summarize((t.task_id, t.family, t.won) for t in played)
    self._rows.append(
      {"iteration": iteration}
      | {name: found[name] for name in ("success", "macro")}
      | self.counts
      | {"errors": len(trajectories) - len(played), "panel_seconds": self.seconds - seconds_before}
      | {name: found[name] for name in ("families", "outcomes")}
    )
    self._write()
    say(f"train: {found['success']:.1%} of {len(played)} panel episodes after {iteration} iterations")

  def _write(self) -> None:
    """The whole file: it is short, and an object store cannot append."""
    if is_writer():
      lines = [json.dumps(plain_value(row), ensure_ascii=False, allow_nan=False) for row in self._rows]
      write_text(self._path, "".join(line + "\n" for line in lines))
