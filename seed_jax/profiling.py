"""Traces of chosen iterations, with the phases of an iteration by name: what `jax.profiler` records, for XProf,
TensorBoard or Perfetto (docs/profiling.md).
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable

import jax
from etils import epath

from seed_jax import hosts
from seed_jax.metrics import Timer, say


class Profiler:
  """Records the iterations in `iterations` (counted from 0) into `folder`; neighbours come into one trace.

  Call `begin` where an iteration begins; the last one ends with the context. Without iterations it does nothing.
  """

  def __init__(self, folder: epath.PathLike, iterations: Iterable[int]):
    self.folder, self.iterations = epath.Path(folder), frozenset(iterations)
    self._step, self._trace = contextlib.ExitStack(), contextlib.ExitStack()
    self._recording = False

  def begin(self, iteration: int) -> None:
    """The one before has ended, and this one begins."""
    self._step.close()
    if self._recording and iteration not in self.iterations:
      self._stop()
    if iteration in self.iterations:
      if not self._recording:
        self._recording = True
        self._trace.enter_context(_trace(self.folder))
        say(f"train: the profiler records from iteration {iteration} on")
      self._step.enter_context(jax.profiler.StepTraceAnnotation("iteration", step_num=iteration))

  def _stop(self) -> None:
    self._recording = False
    self._trace.close()
    say(f"train: a trace is in {self.folder}")

  def __enter__(self) -> Profiler:
    return self

  def __exit__(self, *unused) -> None:
    self._step.close()
    if self._recording:
      self._stop()


@contextlib.contextmanager
def _trace(folder: epath.Path):
  """A trace from here to the end of the context. The profiler writes local files only; to object storage they are
  copied.
  """
  with contextlib.ExitStack() as stack:
    local = folder
    if "://" in str(folder):
      local = epath.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    jax.profiler.start_trace(str(local))
    try:
      yield
    finally:
      jax.profiler.stop_trace()
      if local != folder:
        _copy(local, folder)


def _copy(source: epath.Path, target: epath.Path) -> None:
  target.mkdir(parents=True, exist_ok=True)
  for item in source.iterdir():
    if item.is_dir():
      _copy(item, target / item.name)
    else:
      item.copy(target / item.name, overwrite=True)


def timed_play(timer: Timer, play: Callable, *args, **options):
  """`play(*args, **options)`, its seconds told apart, and its parts named in a trace: `rollout` until the last episode
  has ended, `analysis` what skills take after that, `wait` until the other hosts have played their share.
  """
  start = ended = time.perf_counter()

  def on_episode(_):
    nonlocal ended
    ended = time.perf_counter()

  hosts.take_waited()
  with jax.profiler.TraceAnnotation("rollout"):
    trajectories = play(*args, on_episode=on_episode, **options)
  waited = hosts.take_waited()
  timer.add("rollout", ended - start)
  timer.add("analysis", time.perf_counter() - ended - waited)
  if hosts.several():
    timer.add("wait", waited)
  return trajectories
