"""What every driver has in common, in plain Python: no package of any of the systems is imported here.

The sizes of the random Qwen2, the prompts, the byte tokens, the reward, the environment that echoes, and the one line
of JSON that a driver prints.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time

PAD, BOS, EOS, VOCABULARY = 256, 257, 258, 512

# Qwen2 with tied embeddings, float32; `micro` is for --quick and tests
SIZES = {
  "micro": dict(layers=1, hidden=32, feed_forward=64, heads=2, kv_heads=1),
  "tiny": dict(layers=2, hidden=64, feed_forward=128, heads=4, kv_heads=2),
  "small": dict(layers=6, hidden=384, feed_forward=1024, heads=6, kv_heads=2),
}
PROMPTS, MEMBERS, PROMPT_LENGTH, NEW_TOKENS = 4, 4, 32, 32
KL_COEFFICIENT, CLIP, LEARNING_RATE, DEVIATION = 0.04, 0.2, 1e-3, 0.02

ENVIRONMENTS, TURNS = 16, 8
INSTRUCTIONS = "You play a game of echoes. Your task is to: say a word, read the answer, say another one."


def encode(text: str) -> list[int]:
  """Token ids of a text: its code points (all below 512)."""
  return [ord(c) for c in text]


def decode(ids) -> str:
  """The inverse of `encode`, so that what is sampled keeps its length; the three special tokens leave nothing."""
  return "".join(chr(i) for i in map(int, ids) if i not in (PAD, BOS, EOS))


def prompts(step: int, count: int = PROMPTS) -> list[str]:
  """The prompts of a step, none of which comes again."""
  return [f"task {step * count + i}: say words" for i in range(count)]


def reward(completion: str) -> float:
  """The share of lower-case letters."""
  return sum(c.islower() for c in completion) / max(len(completion), 1)


class Echo:
  """A game of TURNS turns that answers each response with its first six characters: nothing but text handling."""

  def __init__(self, number: int):
    self.number, self.turn = number, 0

  def reset(self) -> str:
    self.turn = 0
    return f"{INSTRUCTIONS} Game {self.number}."

  def step(self, action: str) -> tuple[str, float, bool]:
    """(observation, reward, whether the game is over)."""
    self.turn += 1
    return f"{self.turn}: {action[:6]}", reward(action), self.turn >= TURNS


def user_turn(observation: str) -> str:
  """What is put in front of a response: the observation between its marks."""
  return f"\nU:{observation}\nA:"


def flags(*arguments, **defaults) -> argparse.Namespace:
  """The driver's flags; `steps` counts what is timed, after the first one."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--size", default="tiny", choices=SIZES)
  parser.add_argument("--steps", type=int, default=4)
  for name, value in defaults.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
  return parser.parse_args(*arguments)


def since_start() -> float:
  """Seconds since the parent started this process (BENCHMARK_STARTED), or NaN where it did not say when."""
  return time.time() - float(os.environ.get("BENCHMARK_STARTED", "nan"))


def peak_mib() -> float:
  """The peak resident memory of this process so far, in MiB.

  Linux says it in VmHWM; what getrusage says begins there with the size of the process that started this one.
  """
  try:
    with open("/proc/self/status", encoding="ascii") as file:
      return next(float(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024
  except (OSError, StopIteration):
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)


def report(**values) -> None:
  """The driver's last line of output: its values and its peak memory."""
  print(json.dumps(values | {"peak_mib": peak_mib()}), flush=True)


class Stopwatch:
  """Wraps the phases of somebody else's loop: `seconds[phase]` lists what each call took, until its arrays exist."""

  def __init__(self, wait=lambda value: value):
    self.seconds: dict[str, list[float]] = {}
    self.ends: list[float] = []  # of the last phase of each step
    self._wait = wait

  def wrap(self, owner, method: str, phase: str, *, after=None, last: bool = False) -> None:
    """Replaces owner.method by one that is timed under `phase`; `after(result)` looks at what it returned."""
    original = getattr(owner, method)

    def timed(*args, **kwargs):
      started = time.perf_counter()
      result = self._wait(original(*args, **kwargs))
      self.add(phase, time.perf_counter() - started)
      if after:
        after(result)
      if last:
        self.ends.append(time.perf_counter())
      return result

    setattr(owner, method, timed)

  def add(self, phase: str, seconds: float) -> None:
    """One more call of a phase."""
    self.seconds.setdefault(phase, []).append(seconds)

  def steps(self) -> list[float]:
    """Seconds from the end of each step to the end of the next: everything between is counted."""
    return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
