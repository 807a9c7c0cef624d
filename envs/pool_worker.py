"""The side of the environment pool that plays: environments by slot, the worker program, and what goes over its socket.

Messages are JSON, so that nothing that an environment or a model wrote is ever turned into an object of its choosing.
Tuples and numpy arrays keep their kind; other objects are refused with their type's name.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import importlib
import json
import multiprocessing.connection as mp_connection
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass
class Result:
  """What a reset or a step gave. After an error the episode is over: `observation` is "", `truncated` True."""

  observation: Any
  reward: float = 0.0
  terminated: bool = False
  truncated: bool = False
  info: dict[str, Any] = dataclasses.field(default_factory=dict)
  error: str = ""

  @classmethod
  def failed(cls, error: str) -> Result:
    return cls("", truncated=True, info={"task": "", "admissible": (), "won": False}, error=error)


class Player:
  """The environments of one process, made when their slot is first used."""

  def __init__(self, benchmark: Any):
    if isinstance(benchmark, str):
      benchmark = importlib.import_module("envs").benchmark(benchmark)
    self._make, self._envs = getattr(benchmark, "make", benchmark), {}

  def play(self, slot: int, kind: str, argument: Any) -> Result:
    if slot not in self._envs:
      self._envs[slot] = self._make()  # an error here is not one of an episode: nothing can be played, so it is raised
    env = self._envs[slot]
    try:
      if kind == "reset":
        observation, info = env.reset(options=None if argument is None else {"task": argument})
        return Result(observation, info=dict(info))
      observation, reward, terminated, truncated, info = env.step(argument)
      return Result(observation, float(reward), bool(terminated), bool(truncated), dict(info))
    except (Exception, SystemExit) as error:  # a library that calls exit() must not end the run
      return Result.failed(_told(error))

  def close(self) -> None:
    for env in self._envs.values():
      with contextlib.suppress(Exception):
        env.close()
    self._envs.clear()


def describe(benchmark: Any) -> list:
  """How a worker gets hold of a benchmark or factory: [name] or [module, attribute path, fields of a dataclass or
  None]."""
  if isinstance(benchmark, str):
    return [benchmark]
  fields = None
  if dataclasses.is_dataclass(benchmark) and not isinstance(benchmark, type):
    fields = {each.name: getattr(benchmark, each.name) for each in dataclasses.fields(benchmark) if each.init}
    benchmark = type(benchmark)
  module, path = getattr(benchmark, "__module__", ""), getattr(benchmark, "__qualname__", "")
  if not module or not path or "<" in path or module == "__main__":
    raise TypeError(
      f"workers cannot import {benchmark!r}: give a benchmark's name or object, or a function of a module"
    )
  return [module, path, fields]


def pack(value: Any) -> Any:
  """A JSON value for `value`: tuples and dictionaries are marked with "t" and "d", arrays with "a"."""
  if value is None or isinstance(value, str | bool | int | float):
    return value
  if isinstance(value, list):
    return [pack(each) for each in value]
  if isinstance(value, tuple):
    return {"t": [pack(each) for each in value]}
  if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
    return {"d": {key: pack(each) for key, each in value.items()}}
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
    return {"a": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
  raise TypeError(f"a {type(value).__name__} cannot be sent between the pool and its workers")


def unpack(value: Any) -> Any:
  """The inverse of `pack`."""
  if isinstance(value, list):
    return [unpack(each) for each in value]
  if not isinstance(value, dict):
    return value
  if "t" in value:
    return tuple(unpack(each) for each in value["t"])
  if "d" in value:
    return {key: unpack(each) for key, each in value["d"].items()}
  dtype, shape, data = value["a"]
  return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()


def send(connection: mp_connection.Connection, value: Any) -> None:
  connection.send_bytes(json.dumps(pack(value)).encode())


def receive(connection: mp_connection.Connection) -> Any:
  return unpack(json.loads(connection.recv_bytes()))


def serve(descriptor: int) -> None:
  """The worker program: answers requests from the socket until the pool closes it.

  It receives the benchmark's description and says None when it is ready, then receives (slot, kind, argument) and
  sends the fields of a `Result`, or a text where nothing can be played at all.
  """
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the parent's to handle: it closes the socket
    signal.signal(number, signal.SIG_IGN)
  threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
  with mp_connection.Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
    try:
      player = Player(_found(*receive(connection)))
    except (EOFError, ConnectionError):
      return
    except Exception as error:
      send(connection, _told(error))
      return
    send(connection, None)
    while True:
      try:
        request = receive(connection)
      except (EOFError, ConnectionError):
        player.close()
        return
      try:
        answer = tuple(vars(player.play(*request)).values())
      except Exception as error:  # the environment cannot be made
        answer = _told(error)
      try:
        send(connection, answer)
      except TypeError as error:
        send(connection, tuple(vars(Result.failed(_told(error))).values()))


def _found(module: str, path: str = "", fields: dict[str, Any] | None = None) -> Any:
  if not path:
    return module  # a benchmark's name
  found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
  return found if fields is None else found(**fields)


def _told(error: BaseException) -> str:
  return f"{type(error).__name__}: {error}"


def _leave_with(parent: int) -> None:
  # The socket tells an idle worker that the parent is gone; a hung one would stay for ever.
  while os.getppid() == parent:
    time.sleep(2.0)
  os._exit(1)
