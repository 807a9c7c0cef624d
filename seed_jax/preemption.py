"""A machine that is about to be taken away: the notice, and the places at which a run stops for it.

The notice is SIGTERM, SIGUSR1, or what the metadata server of a Google Cloud machine says (`maintenance-event` is not
NONE, `preempted` is TRUE). It only sets a flag. The run looks at the flag where it can stop without losing work
(`check`, between the steps of an engine) and where all processes stand at the same place (`meet`, before the collective
programs of an iteration); there `Preempted` is raised, and the stage writes down what it has.

With several processes `jax.experimental.multihost_utils.reached_preemption_sync_point` is not used: it counts steps
that all processes take together, so a rollout, in which each process goes its own pace, would have to be played to its
end, and its handler takes SIGTERM for itself and knows no other notice. Instead the first process with a notice leaves
a word in jax's coordination service, which the others read every second, so that all cut their rollouts short; at the
next `meet` they agree, and nobody waits for somebody who has left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command again goes on
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}  # what the metadata server says as long as nothing is up
_WORD = "seed_jax/preempted"  # a key of the coordination service


class Preempted(Exception):
  """The run was asked to stop, and has stopped at a place from which the same command goes on."""


class Notice:
  """Whether this run was asked to stop, and why. Without `watch` nobody asks but who calls `give`."""

  def __init__(self, any_of: Callable[[bool], bool] | None = None):
    """any_of(flag): whether the flag of any process is set, called by all of them; by default the hosts of the job."""
    self.reason = ""
    self._any_of = any_of

  def give(self, reason: str) -> None:
    """Asks the run to stop. The first reason stays."""
    self.reason = self.reason or reason

  def check(self) -> None:
    """Raises Preempted where this process was asked to stop. For work that each process does at its own pace: its
    results so far must be kept, and all processes must then `meet`.
    """
    if self.reason:
      raise Preempted(self.reason)

  def meet(self, what: str = "a place where the run may stop") -> None:
    """Raises Preempted in all processes where any of them was asked to stop; all of them must call it, for the same
    `what`.
    """
    flag = bool(self.reason)
    if _any_host(flag, what) if self._any_of is None else self._any_of(flag):
      self.give("another process was asked to stop")
      raise Preempted(self.reason)

  @contextlib.contextmanager
  def apart(self) -> Iterator[None]:
    """Work of the first kind: where `check` cuts it short, no more of it is done; at its end all processes meet."""
    with contextlib.suppress(Preempted):
      yield
    self.meet()


@contextlib.contextmanager
def on_preempted(action: Callable[[], None]) -> Iterator[None]:
  """Calls `action` where the context ends in Preempted, which goes on."""
  try:
    yield
  except Preempted:
    action()
    raise


@contextlib.contextmanager
def watch(notice: Notice, *, server: str | None = None, every: float = 1.0) -> Iterator[Notice]:
  """Signals, the metadata server and the other processes reach `notice` as long as the context lasts.

  server: host[:port] of the metadata server; by default GCE_METADATA_HOST, else Google's name for it, and where there
  is none at the start it is not asked again. every: seconds between two looks.
  """
  before = {}
  if threading.current_thread() is threading.main_thread():
    for number in SIGNALS:
      before[number] = signal.signal(number, lambda n, _: notice.give(signal.Signals(n).name))
  over = threading.Event()
  threads = [
    threading.Thread(target=loop, args=(notice, over, every, *more), daemon=True)
    for loop, more in ((_ask_server, (server or _metadata_host(),)), (_ask_processes, ()))
  ]
  for thread in threads:
    thread.start()
  try:
    yield notice
  finally:
    over.set()
    for number, handler in before.items():
      signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's


def _metadata_host() -> str:
  return os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP") or "metadata.google.internal"


def _ask_server(notice: Notice, over: threading.Event, every: float, server: str) -> None:
  """Asks the metadata server until it announces something. A server that is not there is asked once."""
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy

  def said(name):
    request = urllib.request.Request(
      f"http://{server}/computeMetadata/v1/instance/{name}", headers={"Metadata-Flavor": "Google"}
    )
    with opener.open(request, timeout=5) as answer:
      return answer.read(100).decode("ascii", "replace").strip()

  found = False
  while not over.is_set() and not notice.reason:
    for name, quiet in QUIET.items():
      try:
        word, found = said(name), True
      except (OSError, ValueError):  # nobody there, or for once no answer
        if not found:
          return
        continue
      if word and word.upper() != quiet:
        notice.give(f"{name}: {word}")
    over.wait(every)


def _ask_processes(notice: Notice, over: threading.Event, every: float) -> None:
  """Passes a notice on to the other processes of a distributed run, and takes theirs."""
  from jax._src import distributed  # the only way to the coordination service that jax has

  while not over.is_set():
    client = distributed.global_state.client
    if client is not None:
      with contextlib.suppress(Exception):  # a service that is gone ends the run by itself
        if notice.reason:
          client.key_value_set(_WORD, notice.reason, allow_overwrite=True)
          return
        with contextlib.suppress(Exception):  # NOT_FOUND
          notice.give(client.key_value_try_get(_WORD))
    over.wait(every)


def _any_host(flag: bool, what: str) -> bool:
  from seed_jax import hosts  # and with it jax, which the command line does without until it is needed

  return any(hosts.gather(what, flag)) if hosts.several() else flag
