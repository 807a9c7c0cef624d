"""Many environments, played by events: submit resets and steps for slots, take the results as they come.

A slot is one environment with one episode at a time. Slot s lives in worker s % num_workers, in an environment object
of its own that is made once and reused. A worker is a separate program, started afresh (never a fork of this process,
which may hold a device) and without this program's main module, so that it never loads jax. It plays one request at a
time; a deadline runs from the moment at which the request reaches it. With `num_workers=0` the environments live in
this process: nothing is copied, and deadlines do not apply.

What goes wrong in an environment never ends the run. An exception in reset() or step() comes back as that slot's
result, in `error`, and the slot takes its next reset. When a worker hangs, is killed or crashes, the request it was
playing carries `error`, and so does the next step of each other slot that was in an episode there, for that episode
is lost; the worker is replaced, and waiting resets are played by the new one. What raises is a pool that cannot
start: a worker that cannot load its benchmark, or that dies three times in a row before it is ready.
"""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing.connection as mp_connection
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from envs.pool_worker import Player, Result, describe, pack, receive, send

__all__ = ["Pool", "Result"]

START_SECONDS = 180.0  # imports and the first environment object, on a machine that is busy
GIVE_UP_AFTER = 3  # workers in a row that died without one answer

_BOOTSTRAP = (
  "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from envs.pool_worker import serve; serve(int(sys.argv[1]))"
)


class Pool:
  """`reset(slot, payload)` and `step(slot, action)` submit; `ready()` returns the finished ones as [(slot, Result)],
  by slot.

  benchmark: a name for `envs.benchmark(name)`, a Benchmark (its `make` is used), or a callable without arguments that
  makes an environment; with workers it must be importable from a module (not the main script), as a dataclass or a
  function.
  num_envs: number of slots. num_workers: processes, 0 for none; more than num_envs are not started.
  step_timeout, reset_timeout: seconds a worker may spend on one request.
  """

  def __init__(
    self,
    benchmark: str | Any | Callable[[], Any],
    num_envs: int,
    num_workers: int = 0,
    *,
    step_timeout: float = 60.0,
    reset_timeout: float = 120.0,
  ):
    if num_envs < 1 or num_workers < 0:
      raise ValueError(f"num_envs={num_envs} must be at least 1 and num_workers={num_workers} at least 0")
    if step_timeout <= 0 or reset_timeout <= 0:
      raise ValueError(f"step_timeout={step_timeout} and reset_timeout={reset_timeout} must be positive seconds")
    self.num_envs, self.num_workers = num_envs, min(num_workers, num_envs)
    self.restarts = 0  # workers replaced so far
    self._timeouts = {"step": step_timeout, "reset": reset_timeout}
    self._pending: set[int] = set()  # submitted, result not handed out yet
    self._done: list[tuple[int, Result]] = []
    self._closed = False
    if self.num_workers == 0:
      self._local = Player(benchmark)
      self._workers = []
    else:
      source = describe(benchmark)
      self._workers = [_Worker(source, index) for index in range(self.num_workers)]
    self._finalizer = weakref.finalize(self, _stop, self._workers)  # also at interpreter exit

  def reset(self, slot: int, payload: Mapping[str, Any] | None = None) -> None:
    """Submits a new episode for `slot`: env.reset(options={"task": payload})."""
    self._submit(slot, "reset", payload)

  def step(self, slot: int, action: Any) -> None:
    """Submits env.step(action) for `slot`."""
    self._submit(slot, "step", action)

  def ready(self, timeout: float | None = None) -> list[tuple[int, Result]]:
    """Finished requests, at least one unless none is pending or `timeout` seconds pass first; sorted by slot within a
    call."""
    self._check_open()
    until = None if timeout is None else time.monotonic() + timeout
    while self._pending and not self._done:
      left = None if until is None else until - time.monotonic()
      if left is not None and left < 0:
        break
      self._poll(left)
    if self._done and self._workers:
      self._poll(0.0)  # what else has arrived in the meantime
    results, self._done = sorted(self._done, key=lambda item: item[0]), []
    self._pending.difference_update(slot for slot, _ in results)
    return results

  def close(self) -> None:
    """Closes every environment and ends the workers; safe to call twice."""
    if not self._closed:
      self._closed = True
      if self.num_workers == 0:
        self._local.close()
      self._finalizer()

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  def _check_open(self) -> None:
    if self._closed:
      raise ValueError("the environment pool is closed")

  def _submit(self, slot: int, kind: str, argument: Any) -> None:
    self._check_open()
    if not 0 <= slot < self.num_envs:
      raise ValueError(f"slot {slot} is outside 0..{self.num_envs - 1}")
    if slot in self._pending:
      raise ValueError(f"slot {slot} has a request already; take its result with ready() first")
    if self.num_workers:
      pack(argument)  # refuses, here and now, what cannot be sent
    self._pending.add(slot)
    if self.num_workers == 0:
      self._done.append((slot, self._local.play(slot, kind, argument)))
      return
    worker = self._workers[slot % self.num_workers]
    if kind == "step" and slot in worker.lost:
      self._done.append((slot, Result.failed(worker.lost[slot])))
      return
    worker.queue.append((slot, kind, argument))
    self._feed(worker)

  def _poll(self, timeout: float | None) -> None:
    """Waits for an answer, a death or a deadline, at most `timeout` seconds, and deals with all that has happened."""
    deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
    if deadlines:
      until_deadline = max(0.0, min(deadlines) - time.monotonic())
      timeout = until_deadline if timeout is None else min(timeout, until_deadline)
    waiting = {worker.connection: worker for worker in self._workers}
    for connection in mp_connection.wait(list(waiting), timeout):
      worker = waiting[connection]
      try:
        answer = receive(connection)
      except (EOFError, OSError):
        self._replace(worker, f"worker process ended ({worker.ended()})")
        continue
      if isinstance(answer, str):
        raise RuntimeError(f"environment worker {worker.index} cannot start: {answer}")
      worker.failures = 0
      if answer is not None:  # None: the worker is ready
        (slot, kind, _), worker.playing = worker.playing, None
        if kind == "reset":
          worker.lost.pop(slot, None)
        result = Result(*answer)
        (worker.live.discard if result.error else worker.live.add)(slot)
        self._done.append((slot, result))
      worker.started, worker.deadline = True, None
      self._feed(worker)
    now = time.monotonic()
    for worker in self._workers:
      if worker.deadline is not None and now >= worker.deadline:
        what = f"{worker.playing[1]} took" if worker.playing else "start took"
        self._replace(worker, f"{what} longer than {worker.limit:g} s; its worker process was killed")

  def _feed(self, worker: _Worker) -> None:
    """Hands the next waiting request to an idle worker."""
    if not worker.started or worker.playing is not None or not worker.queue:
      return
    request = worker.queue.popleft()
    worker.playing, worker.limit = request, self._timeouts[request[1]]
    worker.deadline = time.monotonic() + worker.limit
    try:
      send(worker.connection, request)
    except OSError:  # it died while idle, and the request never reached it
      worker.queue.appendleft(request)
      worker.playing = None
      self._replace(worker, f"worker process ended ({worker.ended()})")

  def _replace(self, worker: _Worker, why: str) -> None:
    worker.kill()
    error = f"WorkerLost: {why}"
    if worker.playing is not None:
      self._fail(worker, worker.playing[0], error)
    for slot in worker.live:
      worker.lost[slot] = f"{error}; the episode of this slot is lost"
    waiting, worker.queue = list(worker.queue), collections.deque()
    for request in waiting:
      if request[1] == "step":
        self._fail(worker, request[0], worker.lost.get(request[0], error))
      else:
        worker.queue.append(request)
    worker.live.clear()
    worker.failures += 1
    self.restarts += 1
    if worker.failures >= GIVE_UP_AFTER:
      raise RuntimeError(
        f"environment worker {worker.index} failed {worker.failures} times in a row before it was ready: {why}"
      )
    worker.start()

  def _fail(self, worker: _Worker, slot: int, error: str) -> None:
    worker.live.discard(slot)
    worker.lost.pop(slot, None)
    self._done.append((slot, Result.failed(error)))


class _Worker:
  """The parent's side of one worker process."""

  def __init__(self, source: list, index: int):
    self.source, self.index = source, index
    self.queue: collections.deque = collections.deque()  # (slot, kind, argument) not sent yet
    self.live: set[int] = set()  # slots whose environment in the process has been reset
    self.lost: dict[int, str] = {}  # slots whose episode went down with an earlier process -> why
    self.failures = 0
    self.start()

  def start(self) -> None:
    ours, theirs = socket.socketpair()
    # A program of its own, not multiprocessing's spawn: that would import the parent's main module, and with it jax.
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    with theirs:
      self.process = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), path],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
      )
    self.connection = mp_connection.Connection(ours.detach())
    self.started, self.playing, self.limit = False, None, START_SECONDS
    self.deadline: float | None = time.monotonic() + START_SECONDS
    with contextlib.suppress(OSError):  # a process that died at once is noticed by the next poll
      send(self.connection, self.source)

  def ended(self) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.process.wait(1.0)
    code = self.process.returncode
    return "still running" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

  def kill(self) -> None:
    self.connection.close()
    self.process.kill()
    self.process.wait()


def _stop(workers: list[_Worker]) -> None:
  for worker in workers:
    worker.connection.close()  # end of input: an idle worker closes its environments and leaves
  until = time.monotonic() + 2.0
  for worker in workers:
    try:
      worker.process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
      worker.process.kill()
      worker.process.wait()
