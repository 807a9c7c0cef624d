"""Curves: tokens a second and peak memory by batch, context, parameters and number of environments."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from benchmarks import decode, echo, process, timing, train_step, workload
from benchmarks.peers import shared
from benchmarks.table import Row
from seed_jax import sharding

ABOUT = "curves by batch, context, parameters and environments; peak memory of an update by row length"


def run(options) -> Iterator[Row]:
  """Decode by batch and by context, a training step by parameters, a rollout by environments, memory by row length."""
  few = dataclasses.replace(options, repeats=min(options.repeats, 3))
  size, tokens = ("micro", 4) if options.quick else ("small", 32)
  for slots in (1, 2) if options.quick else (1, 4, 16, 64, 128):
    yield from decode.measure(size, slots, 16 if options.quick else 128, few, tokens=tokens, title="scaling: decode")
  for context in (32,) if options.quick else (256, 512, 1024):
    yield from decode.measure(size, 2 if options.quick else 16, context, few, tokens=tokens, title="scaling: decode")
  for name in ("micro",) if options.quick else ("tiny", "quickstart", "small", "twenty"):
    length, rows = (32, 2) if options.quick else (256, 4)
    yield from train_step.measure(name, length, rows, 2, few, title=f"scaling: train {name}")
  yield from environments(size, (1, 2) if options.quick else (1, 4, 16, 64), few)
  for length in (32, 64) if options.quick else (512, 1024, 2048):
    yield memory(size, length)


def environments(size: str, counts, options) -> Iterator[Row]:
  """Echo games end to end, a slot for every environment."""
  config, mesh = workload.model(size), sharding.make_mesh()
  params = workload.params(config, mesh)
  turns = 1 if options.quick else 3
  tokens = {}
  players = {
    n: echo.player(config, mesh, params, slots=n, environments=n, capacity=256 if turns > 1 else 160, smallest=n)[1]
    for n in counts
  }

  def play(n):
    tokens[n] = sum(t.response_tokens for t in players[n](echo.episodes([turns] * n)))

  taken = timing.in_turn({n: lambda n=n: play(n) for n in counts}, options.repeats)
  for n in counts:
    rate = timing.median([tokens[n] / seconds for seconds in taken[n]])
    note = f"echo games of {turns} turns x {shared.NEW_TOKENS} tokens, {size}, a slot for every environment"
    yield Row(f"scaling: {n} environments", rate, unit="tokens/s", note=note)


def memory(size: str, length: int) -> Row:
  """Peak resident memory of a process that takes two steps on one row of `length` tokens at a time."""
  module = "benchmarks.peers.seed_memory"
  report = process.child([sys.executable, "-m", module, f"--size={size}", f"--length={length}"], name="memory")
  note = f"whole process, {size}, SEED steps on rows of that length, one a micro-batch, a quarter of them sampled"
  return Row(f"scaling: memory, rows of {length}", report["peak_mib"], unit="MiB", note=note)
