"""Whether the other processes of a job are still there: heartbeats, and the end of a process whose job cannot go on.

Every process writes a heartbeat into jax's coordination service (a key-value store in process 0) and reads those of the
others. jax itself notices a lost process too, but by aborting with a stack trace, after a longer time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

EXIT_LOST = 76  # another process failed or is gone: the same command on all hosts goes on from the last checkpoint
AGAIN = "start the same command on all hosts again: it goes on from the last checkpoint"
PREFIX = "seed_jax/hosts/"  # of our keys
BEAT = 1.0  # seconds between two heartbeats

_current: Watch | None = None
_handlers: list = []  # C calls them, and ctypes does not keep them


class Watch:
  """Looks after the processes of a job in a thread of its own.

  lost: why the job has to end, "" as long as it goes on. The main thread says it where it can (`leaving`, and `said`
  when it has); where it hangs in a program of all hosts, which the missing one will never join, the thread says it and
  ends the process.
  moved: of every process when it last told of progress (`advance`), as time.monotonic, 0 where it never did.
  """

  def __init__(self, client: Any, index: int, count: int, lost_after: float):
    """lost_after: seconds without a heartbeat after which a process is taken for dead."""
    global _current
    self.client, self.index, self.count, self.lost_after = client, index, count, lost_after
    self.names = [""] * count  # host names, as far as they are known
    self.lost, self.leaving, self.said = "", False, False
    self._over, self._busy = threading.Event(), False
    self.moved, self._steps = [0.0] * count, 0
    _current = self
    _on_abort()
    threading.Thread(target=self._loop, daemon=True).start()

  def name(self, host: int) -> str:
    """A process in words."""
    return f"host {host} ({self.names[host]})" if self.names[host] else f"host {host}"

  @contextlib.contextmanager
  def busy(self) -> Iterator[None]:
    """Around work that may keep the interpreter, and so the heartbeat, for longer than the others would wait."""
    self._busy = True
    self._beat(0)
    try:
      yield
    finally:
      self._busy = False

  def advance(self) -> None:
    """Tells the others, with the next heartbeat, that work for which they wait gets on."""
    self._steps += 1

  def fail(self, message: str) -> None:
    """Tells the others that this process ends, and why."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self.client.key_value_set(f"{PREFIX}failed/{self.index}", message[:400], allow_overwrite=True)

  def verdict(self) -> str:
    """`lost`, after as long as it takes the heartbeats to tell; "" where all are well."""
    end = time.monotonic() + self.lost_after + 3 * BEAT
    while not self.lost and time.monotonic() < end:
      time.sleep(0.1)
    self.leaving = bool(self.lost)
    return self.lost

  def close(self) -> None:
    """The job has ended well."""
    global _current
    self._over.set()
    _current = None

  def _loop(self) -> None:
    seen = {host: ("", time.monotonic()) for host in range(self.count)}  # last heartbeat, and when it came
    steps = ["0"] * self.count
    number, answered = 0, time.monotonic()
    while not self.lost and not self._over.wait(BEAT):
      number += 1
      self._beat(number)
      now, beats, failed = time.monotonic(), {}, []
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        beats = {_host(key): value for key, value in self.client.key_value_dir_get(f"{PREFIX}beat/")}
        failed = self.client.key_value_dir_get(f"{PREFIX}failed/")
        answered = now
      for host, value in beats.items():
        beat, _, at = value.partition(" ")
        if beat == "busy" or value != seen[host][0]:
          seen[host] = value, now
        if at != steps[host]:
          steps[host], self.moved[host] = at, now
      silent = [h for h, (_, when) in seen.items() if h != self.index and now - when > self.lost_after]
      if failed:
        self.lost = f"{self.name(_host(failed[0][0]))} failed: {failed[0][1]}"
      elif now - answered > self.lost_after:
        self.lost = f"{self.name(0)}, through which the hosts meet, does not answer; {AGAIN}"
      elif silent:
        gave = "gave no heartbeat for {:.0f} s and {} taken for dead".format(
          self.lost_after, "are" if silent[1:] else "is"
        )
        self.lost = f"{', '.join(map(self.name, silent))} {gave}; {AGAIN}"
    if not self.lost:
      return
    time.sleep(5 * BEAT)  # the main thread says it where it can
    if not self.leaving:
      _end(self.lost)
    time.sleep(30)  # and has some time to tidy up
    if not self.said:
      _end(self.lost)
    os._exit(EXIT_LOST)

  def _beat(self, number: int) -> None:
    value = f"{'busy' if self._busy else number} {self._steps}"
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self.client.key_value_set(f"{PREFIX}beat/{self.index}", value, allow_overwrite=True)


@contextlib.contextmanager
def quiet_client() -> Iterator[None]:
  """Around jax.distributed.initialize: the client that it makes calls us, where it would otherwise end the process with
  a stack trace because process 0 is gone.

  jaxlib 0.10 fails to hand the reason to a Python function and then aborts without a trace: `_on_abort` speaks for it.
  """
  try:
    from jax._src.lib import _jax

    real = _jax.get_distributed_runtime_client
  except (ImportError, AttributeError):
    yield
    return
  _jax.get_distributed_runtime_client = lambda *a, **k: real(*a, **k, missed_heartbeat_callback=_process_0_is_gone)
  try:
    yield
  finally:
    _jax.get_distributed_runtime_client = real


def _on_abort() -> None:
  """An abort, on which a thread of jax's decides, ends in our line. In C: Python's own handlers wait for the main
  thread, which hangs.
  """
  _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(_process_0_is_gone))
  libc = ctypes.CDLL(None)
  libc.signal.restype = ctypes.c_void_p
  libc.signal(int(signal.SIGABRT), _handlers[-1])


def _process_0_is_gone(*_) -> None:
  if _current is None:
    os._exit(128 + signal.SIGABRT)
  if _current.said:
    os._exit(EXIT_LOST)
  _end(_current.lost or f"{_current.name(0)}, through which the hosts meet, is gone; {AGAIN}")


def _end(message: str) -> None:
  os.write(2, f"error: {message}\n".encode())
  os._exit(EXIT_LOST)


def _host(key: str) -> int:
  return int(key.rpartition("/")[2])
