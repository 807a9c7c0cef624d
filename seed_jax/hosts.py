"""One process a host: how the processes of a job find each other, share their work, and meet.

On Cloud TPU jax finds the other hosts by itself. Elsewhere the environment says it, the same on every host but for the
last line:

  SEED_JAX_COORDINATOR=HOST:PORT   an address of process 0 that the others reach; nothing may listen there yet
  SEED_JAX_NUM_PROCESSES=2         1: this is the only process, whatever the machine says
  SEED_JAX_PROCESS_ID=0            from 0

All processes run the same command and pass the same meetings in the same order. What a meeting carries goes through
jax's coordination service, a key-value store in process 0, and not through a device program: there is nothing to
compile, lengths may differ from host to host, and whoever does not come is known by name. Waiting ends after
SEED_JAX_WAIT_SECONDS (default 1800), counted from the last time that the late host told of progress (`advance`), where
it did. A host that gives no heartbeat for SEED_JAX_LOST_SECONDS (default 30) ends the job with one line and exit code
76, wherever the others are (liveness.py).

A job of one process passes through all of this without doing anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from seed_jax import liveness
from seed_jax.liveness import AGAIN, PREFIX

EXIT_LOST = liveness.EXIT_LOST
PART = 4 << 20  # bytes of one value of the key-value store
_TPU = ("/dev/accel0", "/dev/vfio/0")  # one of them is there where a TPU is
_NAMES = ("SEED_JAX_COORDINATOR", "SEED_JAX_NUM_PROCESSES", "SEED_JAX_PROCESS_ID")


class HostError(RuntimeError):
  """Another process is late, gone, or somewhere else; the message names it and says what to do."""


@dataclasses.dataclass
class _Job:
  """The processes of this job, as one of them sees them."""

  client: Any
  index: int
  count: int
  wait: float  # seconds
  watch: liveness.Watch
  meetings: int = 0
  waited: float = 0.0  # seconds, since `take_waited`


_job: _Job | None = None


# ---------------------------------------------------------------- who is there


def start(environment: Mapping[str, str] = os.environ) -> None:
  """Joins the job that the environment names, or the one that a TPU slice of several hosts is; else does nothing.

  To be called before jax looks for devices. Raises HostError where a process does not appear or is not like this one,
  and ValueError for an environment that makes no sense.
  """
  global _job
  place = _place(environment) if _job is None else None
  if place is None:
    return
  seconds = lambda name, default: float(environment.get(name, "") or default)  # noqa: E731
  wait, lost_after = seconds("SEED_JAX_WAIT_SECONDS", 1800), seconds("SEED_JAX_LOST_SECONDS", 30)
  options = dict(initialization_timeout=int(min(wait, 600)), shutdown_timeout_seconds=60)
  options["heartbeat_timeout_seconds"] = int(3 * lost_after + 30)  # ours speak first
  try:
    with liveness.quiet_client():
      jax.distributed.initialize(**place, **options)
  except (jax.errors.JaxRuntimeError, RuntimeError) as error:
    raise HostError(
      f"process {place.get('process_id', '?')} of {place.get('num_processes', '?')} found no job at "
      f"{place.get('coordinator_address', 'the address that the TPU names')} ({' '.join(str(error).split())[:200]}); "
      f"start the same command on every host; {_NAMES[1]}=1 says that there is no other"
    ) from error
  from jax._src import distributed  # jax has no other way to its key-value store

  state = distributed.global_state
  if state.num_processes == 1:
    return
  watch = liveness.Watch(state.client, state.process_id, state.num_processes, lost_after)
  _job = _Job(state.client, state.process_id, state.num_processes, wait, watch)
  found = gather("the start", {"name": socket.gethostname(), "jax": jax.__version__})
  watch.names = [each["name"] for each in found]
  devices = gather("the count of devices", jax.local_device_count())
  for what, values in (("versions of jax", [each["jax"] for each in found]), ("numbers of devices", devices)):
    if len(set(values)) > 1:
      told = ", ".join(f"{watch.name(host)} {value}" for host, value in enumerate(values))
      raise HostError(f"the hosts have different {what}: {told}")


def count() -> int:
  """Processes of this job. Starts no device."""
  return 1 if _job is None else _job.count


def index() -> int:
  """The number of this process, from 0. Starts no device."""
  return 0 if _job is None else _job.index


def several() -> bool:
  """Whether this process is one of several."""
  return _job is not None


def share(items: Sequence) -> Sequence:
  """This host's part of a list: contiguous, so that the episodes of a task mostly stay together, and of nearly equal
  size. The parts of all hosts, end to end, are the list.
  """
  return items[index() * len(items) // count() : (index() + 1) * len(items) // count()]


def largest_share(number: int) -> int:
  """The length of the longest part of a list of so many items."""
  return -(-number // count())


# ---------------------------------------------------------------- meetings


def exchange(what: str, payload: bytes, *, patience: float = 0.0) -> list[bytes]:
  """The payloads of all processes, in their order; returns when all are there. `what` names the place in the run.

  patience: seconds without progress that are no cause for concern here, where that is more than the job's limit.

  Raises HostError with the names of those who are late, gone, or at another place.
  """
  if _job is None:
    return [payload]
  job, begun = _job, time.monotonic()
  limit = max(job.wait, patience)
  job.meetings += 1
  body = zlib.compress(payload, 1)
  parts = [body[at : at + PART] for at in range(0, len(body), PART)]
  try:
    for number, part in enumerate(parts):
      job.client.key_value_set_bytes(_key(job, job.index, number), part)
    job.client.key_value_set_bytes(_key(job, job.index), json.dumps([what, len(parts)]).encode())
    out = []
    for host in range(job.count):
      theirs, number = json.loads(_get(job, host, what, begun, limit))
      if theirs != what:
        who, me = job.watch.name(host), job.watch.name(job.index)
        raise HostError(f"{who} is at {theirs!r} and {me} at {what!r}: they run different commands or files")
      out.append(zlib.decompress(b"".join(_get(job, host, what, begun, limit, part) for part in range(number))))
    # all are at this meeting, so all have read the one before
    job.client.key_value_delete(f"{PREFIX}{job.meetings - 1}/{job.index}/")
  except jax.errors.JaxRuntimeError as error:
    raise HostError(lost(error) or f"the hosts could not meet at {what!r}: {error}") from error
  job.waited += time.monotonic() - begun
  return out


def gather(what: str, value: Any, *, patience: float = 0.0) -> list:
  """The JSON values of all processes, in their order."""
  return [json.loads(found) for found in exchange(what, json.dumps(value).encode(), patience=patience)]


def meet(what: str) -> None:
  """Returns when all processes are here."""
  exchange(what, b"")


def from_first(what: str, function: Callable[[], Any], *, patience: float = 0.0) -> Any:
  """The JSON value of `function()`, which process 0 alone calls, on all of them; the others wait for it, as long as it
  takes where it tells of progress (`advance`). `patience` as in `exchange`.
  """
  if _job is None:
    return function()
  value = None
  if not index():
    with _job.watch.busy():
      value = function()
  return gather(what, value, patience=patience)[0]


def advance() -> None:
  """Tells the others that work for which they wait gets on: from now on they wait for this process anew."""
  if _job is not None:
    _job.watch.advance()


def first_then_others(what: str, function: Callable[[], None]) -> None:
  """`function()` on all processes, on the others when process 0 is done with it."""
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


def fetch(tree):
  """`jax.device_get`, also of arrays that lie on the devices of several hosts: whole on every host.

  All processes call it with the same tree. Each sends the parts that it holds; nothing is compiled.
  """
  leaves, structure = jax.tree.flatten(tree)
  far = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not _here(x)]
  near = jax.device_get([None if i in far else x for i, x in enumerate(leaves)])
  if far:
    mine = [(i, s) for i in far for s in leaves[i].addressable_shards if s.replica_id == 0]
    bounds = lambda index, shape: [b.indices(n)[:2] for b, n in zip(index, shape, strict=True)]  # noqa: E731
    head = json.dumps([[i, bounds(s.index, leaves[i].shape)] for i, s in mine]).encode()
    body = b"".join(np.asarray(s.data).tobytes() for _, s in mine)
    found = exchange("arrays of all hosts", head + b"\n" + body)
    for i in far:
      near[i] = np.zeros(leaves[i].shape, leaves[i].dtype)
    for payload in found:
      head, _, body = payload.partition(b"\n")
      at = 0
      for i, bound in json.loads(head):
        place = near[i][tuple(slice(*b) for b in bound)]
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
  _job.watch.close()
  _job = None
  jax.distributed.shutdown()


def lost(error: BaseException) -> str:
  """Why the job has to end, where it is not this process that failed; "" where it is, or where there is one process.

  A program of all hosts breaks where one of them is gone: then it takes a moment until the heartbeats tell which.
  """
  if _job is None:
    return ""
  if isinstance(error, HostError):
    return str(error)
  texts, seen = [], error
  while seen is not None and len(texts) < 9:
    texts += [str(seen)] if isinstance(seen, jax.errors.JaxRuntimeError) else []
    seen = seen.__cause__ or seen.__context__
  if not texts or any("RESOURCE_EXHAUSTED" in text for text in texts):
    return ""
  return _job.watch.verdict()


def leave(code: int, message: str = "") -> None:
  """Ends this process of several at once, without the meeting at the end; the others are told the `message`."""
  if _job is None:
    return
  _job.watch.leaving = _job.watch.said = True
  if message:
    _job.watch.fail(message)
  if not _job.index:
    time.sleep(3 * liveness.BEAT)  # the others read it in this process
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


# ---------------------------------------------------------------- inside


def _place(environment) -> dict | None:
  """Arguments of jax.distributed.initialize, {} where jax finds out by itself, None for a job of one process."""
  address, number, process = (environment.get(name, "") for name in _NAMES)
  if number == "1":
    return None
  if address or number or process:
    place = None
    with contextlib.suppress(ValueError):
      place = dict(coordinator_address=address, num_processes=int(number), process_id=int(process))
    if place is None or ":" not in address or not 0 <= place["process_id"] < place["num_processes"]:
      given = ", ".join(f"{name}={environment.get(name, '')!r}" for name in _NAMES)
      raise ValueError(f"{given}: want HOST:PORT, a number of processes, and a number from 0 below it")
    return place | {"cluster_detection_method": "deactivate"}
  asked = environment.get("JAX_PLATFORMS", "")
  tpu = any(map(os.path.exists, _TPU)) and importlib.util.find_spec("libtpu") is not None
  return {} if tpu and (not asked or "tpu" in asked) else None


def _here(x: jax.Array) -> bool:
  return x.is_fully_addressable or x.is_fully_replicated


def _key(job, host, part="what"):
  return f"{PREFIX}{job.meetings}/{host}/{part}"


def _get(job, host, what, begun, limit, part="what") -> bytes:
  """A value that another process sets, as soon as it is there. In short steps, so that signals are heard."""
  while True:
    if job.watch.lost:
      job.watch.leaving = True
      raise HostError(job.watch.lost)
    try:
      return job.client.blocking_key_value_get_bytes(_key(job, host, part), 500)
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error):
        raise
    moved = job.watch.moved[host]
    if time.monotonic() - max(begun, moved) > limit:
      late = ", ".join(job.watch.name(h) for h in range(job.count) if not _is_there(job, h))
      since = "its last sign of progress" if moved > begun else job.watch.name(job.index)
      raise HostError(
        f"{late} did not reach {what!r} within {limit:.0f} s of {since} (SEED_JAX_WAIT_SECONDS); look at its log, then "
        f"{AGAIN}"
      )


def _is_there(job, host) -> bool:
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    return bool(job.client.key_value_try_get_bytes(_key(job, host)))
  return False
