"""One process a host: how the processes of a job find each other, share their work, meet, and notice who is gone.

On Cloud TPU jax finds the other hosts by itself. Elsewhere the environment says it, the same on every host but for the
last one:

  SEED_JAX_COORDINATOR=HOST:PORT   an address of process 0 that the others reach; nothing may listen there yet
  SEED_JAX_NUM_PROCESSES=2         1: this is the only process, whatever the machine says
  SEED_JAX_PROCESS_ID=0            from 0

All processes run the same command and pass the same meeting points in the same order. What a meeting carries goes
through jax's coordination service, a key-value store in process 0, and not through a device program: there is nothing
to compile, lengths may differ from host to host, and whoever does not come is known by name. Waiting ends after
SEED_JAX_WAIT_SECONDS (default 1800), and every process looks after the others by heartbeats: a host that is silent for
SEED_JAX_LOST_SECONDS (default 30) ends the job with one line, also where the main thread hangs in a collective program.

A job of one process passes through all of this without doing anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

EXIT_LOST = 76  # another process failed or is gone: the same command on all hosts goes on from the last checkpoint
AGAIN = "start the same command on all hosts again: it goes on from the last checkpoint"
PREFIX = "seed_jax/hosts/"
PART = 4 << 20  # bytes of one value of the key-value store
BEAT = 1.0  # seconds between two heartbeats
_TPU = ("/dev/accel0", "/dev/vfio/0")  # one of them is there where a TPU is


class HostError(RuntimeError):
  """Another process is late, gone, or somewhere else; the message names it and says what to do."""


@dataclasses.dataclass
class _Job:
  """The processes of this job, as one of them sees them."""

  client: Any
  index: int
  count: int
  wait: float  # seconds
  lost_after: float  # seconds
  names: list[str]  # of all hosts, as far as they are known
  meetings: int = 0
  waited: float = 0.0  # seconds, since `take_waited`
  lost: str = ""  # why the job has to end
  leaving: bool = False  # the main thread knows, and will say it
  busy: bool = False  # the interpreter may stand still for a while: no heartbeats


_job: _Job | None = None


# ---------------------------------------------------------------- who is there


def start(environment: Mapping[str, str] = os.environ) -> None:
  """Joins the job that the environment names, or the one that a TPU slice of several hosts is; else does nothing.

  To be called before jax looks for devices. Raises HostError where a process does not appear, and ValueError for an
  environment that makes no sense.
  """
  global _job
  if _job is not None:
    return
  place = _place(environment)
  if place is None:
    return
  if environment.get("JAX_PLATFORMS", "") == "cpu":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
  options = dict(initialization_timeout=300, heartbeat_timeout_seconds=100, shutdown_timeout_seconds=60)
  try:
    with _quiet_client():
      jax.distributed.initialize(**place, **options)
  except RuntimeError as error:
    raise HostError(
      f"process {place.get('process_id', '?')} of {place.get('num_processes', '?')} found no job at "
      f"{place.get('coordinator_address', 'the address that the TPU names')} ({' '.join(str(error).split())[:200]}); "
      "start the same command on every host"
    ) from error
  from jax._src import distributed  # jax has no other way to its key-value store

  state = distributed.global_state
  if state.num_processes == 1:
    return
  seconds = lambda name, default: float(environment.get(name, "") or default)  # noqa: E731
  wait, lost_after = seconds("SEED_JAX_WAIT_SECONDS", 1800), seconds("SEED_JAX_LOST_SECONDS", 30)
  _job = _Job(state.client, state.process_id, state.num_processes, wait, lost_after, [""] * state.num_processes)
  _on_abort()
  threading.Thread(target=_watch, args=(_job,), daemon=True).start()
  mine = {"name": socket.gethostname(), "jax": jax.__version__, "devices": jax.local_device_count()}
  found = gather("the start of the job", mine)
  _job.names = [each["name"] for each in found]
  for what in ("jax", "devices"):
    if len({each[what] for each in found}) > 1:
      told = ", ".join(f"{each['name']} {each[what]}" for each in found)
      raise HostError(f"the hosts differ in {what}: {told}")


def count() -> int:
  """Processes of this job. Starts no device."""
  return 1 if _job is None else _job.count


def index() -> int:
  """The number of this process, from 0. Starts no device."""
  return 0 if _job is None else _job.index


def share(items: Sequence) -> Sequence:
  """This host's part of a list: contiguous, so that the episodes of a task mostly stay together, and of nearly equal
  size. The parts of all hosts, end to end, are the list.
  """
  return items[index() * len(items) // count() : (index() + 1) * len(items) // count()]


def largest_share(number: int) -> int:
  """The length of the longest part of a list of so many items."""
  return -(-number // count())


# ---------------------------------------------------------------- meetings


def exchange(what: str, payload: bytes) -> list[bytes]:
  """The payloads of all processes, in their order; returns when all are there. `what` names the place in the run.

  Raises HostError with the names of those who are late, gone, or at another place.
  """
  if _job is None:
    return [payload]
  job, begun = _job, time.monotonic()
  job.meetings += 1
  body = zlib.compress(payload, 1)
  parts = [body[at : at + PART] for at in range(0, len(body), PART)]
  try:
    for number, part in enumerate(parts):
      job.client.key_value_set_bytes(_key(job.meetings, job.index, number), part)
    job.client.key_value_set_bytes(_key(job.meetings, job.index), json.dumps([what, len(parts)]).encode())
    out = []
    for host in range(job.count):
      their, parts = json.loads(_get(job, host, what, begun))
      if their != what:
        raise HostError(
          f"{_name(host)} is at {their!r} and {_name(job.index)} at {what!r}: they run different commands"
        )
      out.append(zlib.decompress(b"".join(_get(job, host, what, begun, number) for number in range(parts))))
    if job.meetings > 1:  # all are at this meeting, so all have read the last one
      job.client.key_value_delete(f"{PREFIX}{job.meetings - 1}/{job.index}/")
  except jax.errors.JaxRuntimeError as error:
    raise HostError(lost(error) or f"the hosts could not meet at {what!r}: {error}") from error
  job.waited += time.monotonic() - begun
  return out


def gather(what: str, value: Any) -> list:
  """The JSON values of all processes, in their order."""
  return [json.loads(found) for found in exchange(what, json.dumps(value).encode())]


def meet(what: str) -> None:
  """Returns when all processes are here."""
  exchange(what, b"")


def from_first(what: str, function: Callable[[], Any]) -> Any:
  """The JSON value of `function()`, which process 0 alone calls, on all of them; the others wait for it."""
  if _job is None:
    return function()
  if not index():
    with busy():
      value = function()
  return gather(what, None if index() else value)[0]


def first_then_others(what: str, function: Callable[[], None]) -> None:
  """`function()` on all processes, on the others when process 0 is done with it."""
  if _job is None:
    function()
    return
  if not index():
    function()
  meet(what)
  if index():
    function()


def totals(what: str, values: Mapping[str, float]) -> dict[str, float]:
  """The sum over all processes of every number."""
  found = gather(what, dict(values))
  return {name: sum(each[name] for each in found) for name in values}


def take_waited() -> float:
  """Seconds that this process has waited at meetings since the last call."""
  if _job is None:
    return 0.0
  waited, _job.waited = _job.waited, 0.0
  return waited


@contextlib.contextmanager
def busy():
  """Around work that may keep the interpreter, and so the heartbeat, for longer than the others would wait."""
  if _job is None:
    yield
    return
  _job.busy = True
  _beat(_job, "busy")
  try:
    yield
  finally:
    _job.busy = False


def fetch(tree):
  """`jax.device_get`, also of arrays that lie on the devices of several hosts: whole on every host.

  All processes call it with the same tree. Each sends the parts that it holds; nothing is compiled.
  """
  leaves, structure = jax.tree.flatten(tree)
  far = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not _here(x)]
  if not far:
    return jax.device_get(tree)
  near = jax.device_get([None if i in far else x for i, x in enumerate(leaves)])
  mine = [(i, s) for i in far for s in leaves[i].addressable_shards if s.replica_id == 0]
  blocks = [np.ascontiguousarray(s.data) for _, s in mine]
  bounds = lambda index, shape: [b.indices(n)[:2] for b, n in zip(index, shape, strict=True)]  # noqa: E731
  head = json.dumps([[i, bounds(s.index, leaves[i].shape)] for i, s in mine]).encode()
  found = exchange("an array of all hosts", b"".join([head, b"\n", *(b.tobytes() for b in blocks)]))
  for i in far:
    near[i] = np.zeros(leaves[i].shape, leaves[i].dtype)
  for payload in found:
    head, _, body = payload.partition(b"\n")
    at = 0
    for i, bounds in json.loads(head):
      place = near[i][tuple(slice(*b) for b in bounds)]
      place[...] = np.frombuffer(body, place.dtype, place.size, at).reshape(place.shape)
      at += place.nbytes
  return jax.tree.unflatten(structure, near)


# ---------------------------------------------------------------- the end


def finish() -> None:
  """Leaves the job when the work is done: no process goes before the last has come."""
  global _job
  if _job is None:
    return
  meet("the end")
  _job.leaving, _job = True, None
  jax.distributed.shutdown()


def lost(error: BaseException) -> str:
  """Why the job has to end, where it is not this process that failed; "" where it is, or where there is one process.

  A program of all hosts breaks where one of them is gone: then it takes a moment until the heartbeats tell which.
  """
  if isinstance(error, HostError):
    return str(error)
  causes = []
  while error is not None and error not in causes:
    causes.append(error)
    error = error.__cause__ or error.__context__
  if _job is None or not any(isinstance(e, jax.errors.JaxRuntimeError) for e in causes):
    return ""
  if any("RESOURCE_EXHAUSTED" in str(e) for e in causes):
    return ""
  _job.leaving = True
  end = time.monotonic() + _job.lost_after + 3 * BEAT
  while not _job.lost and time.monotonic() < end:
    time.sleep(0.1)
  return _job.lost


def leave(code: int, message: str = "") -> None:
  """Ends this process of several at once, without the meeting at the end; `message` is what the others are told."""
  if _job is None:
    return
  _job.leaving = True
  if message:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      _job.client.key_value_set(f"{PREFIX}failed/{_job.index}", message[:400], allow_overwrite=True)
  if not _job.index:
    time.sleep(3 * BEAT)  # the others read it in this process
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def several() -> bool:
  """Whether this process is one of several."""
  return _job is not None


# ---------------------------------------------------------------- inside


def _place(environment) -> dict | None:
  """Arguments of jax.distributed.initialize, {} where jax finds out by itself, None for a job of one process."""
  names = ("SEED_JAX_COORDINATOR", "SEED_JAX_NUM_PROCESSES", "SEED_JAX_PROCESS_ID")
  address, number, process = (environment.get(name, "") for name in names)
  if number == "1":
    return None
  if address or number or process:
    try:
      place = dict(coordinator_address=address, num_processes=int(number), process_id=int(process))
    except ValueError:
      place = None
    if place is None or ":" not in address or not 0 <= place["process_id"] < place["num_processes"]:
      given = ", ".join(f"{name}={environment.get(name, '')!r}" for name in names)
      raise ValueError(f"{given}: want HOST:PORT, a number of processes, and a number from 0 below it")
    return place | {"cluster_detection_method": "deactivate"}
  asked = environment.get("JAX_PLATFORMS", "")
  tpu = any(map(os.path.exists, _TPU)) and importlib.util.find_spec("libtpu") is not None
  return {} if tpu and (not asked or "tpu" in asked) else None


def _here(x: jax.Array) -> bool:
  return x.is_fully_addressable or x.is_fully_replicated


def _key(meeting, host, part=None):
  return f"{PREFIX}{meeting}/{host}/{'what' if part is None else part}"


def _get(job, host, what, begun, part=None) -> bytes:
  """A value that another process sets, as soon as it is there. In short steps, so that signals are heard."""
  while True:
    if job.lost:
      job.leaving = True
      raise HostError(job.lost)
    try:
      return job.client.blocking_key_value_get_bytes(_key(job.meetings, host, part), 500)
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise
    if time.monotonic() - begun > job.wait:
      late = [h for h in range(job.count) if not _is_there(job, h)]
      raise HostError(
        f"{', '.join(map(_name, late))} did not reach {what!r} within {job.wait:.0f} s of {_name(job.index)} "
        f"(SEED_JAX_WAIT_SECONDS); look at its log, then {AGAIN}"
      )


def _is_there(job, host) -> bool:
  try:
    return bool(job.client.key_value_try_get_bytes(_key(job.meetings, host)))
  except jax.errors.JaxRuntimeError:
    return False


def _name(host: int) -> str:
  name = "" if _job is None else _job.names[host]
  return f"host {host} ({name})" if name else f"host {host}"


def _beat(job, value) -> None:
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    job.client.key_value_set(f"{PREFIX}beat/{job.index}", value, allow_overwrite=True)


def _watch(job: _Job) -> None:
  """Beats, and listens to the others; ends the process where one of them is gone and the main thread hangs."""
  seen = {host: ("", time.monotonic()) for host in range(job.count)}
  number, answered = 0, time.monotonic()
  while _job is job:
    number += 1
    _beat(job, "busy" if job.busy else str(number))
    now = time.monotonic()
    try:
      beats = {int(key.rpartition("/")[2]): value for key, value in job.client.key_value_dir_get(f"{PREFIX}beat/")}
      failed = job.client.key_value_dir_get(f"{PREFIX}failed/")
      answered = now
    except jax.errors.JaxRuntimeError:
      beats, failed = {}, []
    for host, value in beats.items():
      if value != seen[host][0] or value == "busy":
        seen[host] = value, now
    silent = [h for h, (_, when) in seen.items() if h != job.index and now - when > job.lost_after]
    gone = "had no heartbeat for {:.0f} s and {} taken for dead".format(job.lost_after, "are" if silent[1:] else "is")
    if failed:
      host = int(failed[0][0].rpartition("/")[2])
      job.lost = f"{_name(host)} failed: {failed[0][1]}"
    elif now - answered > job.lost_after:
      job.lost = f"{_name(0)}, through which the hosts meet, does not answer; {AGAIN}"
    elif silent:
      job.lost = f"{', '.join(map(_name, silent))} {gone}; {AGAIN}"
    if job.lost:
      break
    time.sleep(BEAT)
  time.sleep(5 * BEAT)  # the main thread says it where it can
  if job.lost and not job.leaving:
    _end(job.lost)


def _end(message: str) -> None:
  os.write(2, f"error: {message}\n".encode())
  os._exit(EXIT_LOST)


@contextlib.contextmanager
def _quiet_client():
  """Makes jax's client call us where it would end the process with a stack trace, because process 0 is gone.

  jaxlib 0.10 cannot hand the reason to a Python function and aborts instead, without a trace: `_on_abort` speaks then.
  """
  try:
    from jax._src.lib import _jax

    real = _jax.get_distributed_runtime_client
  except (ImportError, AttributeError):
    yield
    return
  gone = lambda *_: _end(_gone())  # noqa: E731
  _jax.get_distributed_runtime_client = lambda *a, **k: real(*a, **k, missed_heartbeat_callback=gone)
  try:
    yield
  finally:
    _jax.get_distributed_runtime_client = real


_handlers = []  # ctypes does not keep them


def _on_abort() -> None:
  """An abort of jax's coordination agent, which a thread of its own decides on, ends with our line."""

  def handler(_):
    if _job is not None:
      _end(_job.lost or _gone())
    os._exit(128 + signal.SIGABRT)

  _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(handler))
  ctypes.CDLL(None).signal(int(signal.SIGABRT), _handlers[-1])
  sys.stderr.flush()


def _gone() -> str:
  return f"{_name(0)}, through which the hosts meet, is gone; {AGAIN}"
