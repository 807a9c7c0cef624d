"""Environments that misbehave on command, in a module that pool workers can import."""

import dataclasses
import os
import sys
import time

import numpy as np


class Fake:
  """Adds up the numbers it is sent; a word does what it says."""

  made = 0
  offset = 0
  fields = ()

  def __init__(self):
    Fake.made += 1
    self.total = None

  def reset(self, *, seed=None, options=None):
    task = (options or {}).get("task") or {}
    if task.get("do"):
      self.step(task["do"])
    self.total = task.get("start", 0) + self.offset
    return f"start {self.total}", {"task": "add", "admissible": ("1", "2"), "won": False}

  def step(self, action):
    if action == "crash":
      os._exit(3)
    if action == "hang":
      time.sleep(600)
    if action == "raise":
      raise ValueError("no such number")
    if action == "exit":
      sys.exit(4)
    if action == "lambda":
      return "", 0.0, False, False, {"won": False, "bad": lambda: None}
    if action == "about":
      about = {
        "pid": os.getpid(),
        "made": Fake.made,
        "jax": "jax" in sys.modules,
        "main": hasattr(sys.modules["__main__"], "MARK"),
      }
      return "about", 0.0, False, False, about
    if action == "show":
      shown = {"array": np.arange(6, dtype=np.uint8).reshape(2, 3), "number": np.float32(0.5), "fields": self.fields}
      return np.ones((2, 2), np.float32), 0.0, False, False, {"won": False, "nested": {"list": [1, (2, "é")]}, **shown}
    if action.startswith("sleep "):
      time.sleep(float(action.split()[1]))
      action = "0"
    self.total += int(action)
    won = self.total >= 10
    return f"total {self.total}", float(won), won, False, {"task": "add", "admissible": ("1", "2"), "won": won}

  def close(self):
    pass


def broken():
  raise OSError("the data folder is missing")


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """Makes environments that count from `offset`; `fields` shows what arrived in the worker."""

  offset: int = 0
  fields: tuple = ()

  def make(self):
    env = Fake()
    env.offset, env.fields = self.offset, self.fields
    return env
