"""What this machine can do: float32 matmul rate and memory bandwidth, measured through jax in the same run.

Shapes: n side of a square matrix; m elements of a long vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.table import Row

ABOUT = "float32 matmul rate and memory bandwidth of this machine"


@dataclasses.dataclass(frozen=True)
class Probe:
  """A program whose work is known: `work` floating-point operations, or bytes, a call."""

  run: Callable[[], object]
  work: float


def matmul(n: int) -> Probe:
  """[n, n] @ [n, n] in float32: 2 n^3 operations."""
  a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.float32)
  product = jax.jit(lambda a, b: jnp.dot(a, b, precision="highest"))
  return Probe(lambda: product(a, b), 2.0 * n**3)


def read(m: int) -> Probe:
  """The sum of m float32: 4 m bytes read and nothing written, as decode reads weights and cache."""
  x = jnp.ones((m,), jnp.float32)
  # one matrix-vector product: XLA gives it to all cores, which it does not do for every reduction
  rows = x.reshape(-1, 4096)
  v = jnp.ones((4096,), jnp.float32)
  product = jax.jit(jnp.dot)
  return Probe(lambda: product(rows, v), 4.0 * m)


def stream(m: int) -> Probe:
  """a + s * b over m float32: 8 m bytes read and 4 m written (12 m; a write-allocate cache moves 4 m more)."""
  a, b = jnp.ones((m,), jnp.float32), jnp.full((m,), 2.0, jnp.float32)
  triad = jax.jit(lambda a, b: a + 3.0 * b)
  return Probe(lambda: triad(a, b), 12.0 * m)


def lasting(probe: Probe, rate: float, seconds: float) -> Probe:
  """So many calls of the probe that it takes about `seconds`: a short one would miss, or be ruined by, what a long
  measurement averages over.
  """
  calls = max(round(seconds * rate / probe.work), 1)
  return Probe(lambda: [probe.run() for _ in range(calls)], calls * probe.work)


@dataclasses.dataclass(frozen=True)
class Machine:
  """The best of each kind of probe; `flops` and `bandwidth` a second, in this run."""

  compute: Probe
  memory: Probe
  flops: float
  bandwidth: float
  rates: dict[str, float]  # of every probe that was tried

  def share(
    self, *, work_seconds: list[float], flops: float, num_bytes: float, probes: dict[str, list[float]]
  ) -> float:
    """Least seconds that `flops` operations and `num_bytes` bytes take here, as a share of the measured ones.

    Least seconds = max(flops / rate, bytes / bandwidth); the rates are those of the probes that ran in turn with the
    measured runs (`in_turn` with `probes()` among the functions), so that drift cancels; the median over the pairs.
    """
    shares = []
    for i, measured in enumerate(work_seconds):
      compute = flops * probes["compute"][i] / self.compute.work
      memory = num_bytes * probes["memory"][i] / self.memory.work
      shares.append(max(compute, memory) / measured)
    return timing.median(shares)

  def probes(self) -> dict[str, Callable]:
    """The two probes, to be timed in turn with what is measured."""
    return {"compute": self.compute.run, "memory": self.memory.run}


def measure(*, quick: bool = False) -> Machine:
  """Tries sizes and takes the best rate of each kind: a limit must not be too low, or shares would flatter."""
  sides = (256, 512) if quick else (1024, 2048, 4096)
  length = 4096 * (256 if quick else 16 * 1024)  # 4 MiB, or 256 MiB: far more than any cache
  probes = {f"matmul {n}": matmul(n) for n in sides} | {"read": read(length), "stream": stream(length)}
  taken = timing.in_turn({name: p.run for name, p in probes.items()}, 2 if quick else 5)
  rates = {name: probes[name].work / min(taken[name]) for name in probes}
  best = lambda names: max(names, key=rates.get)  # noqa: E731
  compute = best([n for n in probes if n.startswith("matmul")])
  memory = best(["read", "stream"])
  lasts = 0.01 if quick else 0.4
  again = {name: lasting(probes[name], rates[name], lasts) for name in (compute, memory)}
  return Machine(again[compute], again[memory], rates[compute], rates[memory], rates)


def run(options) -> Iterator[Row]:
  """Two rows: the rates that the other rows' `limit` refers to."""
  m = options.machine
  sides = ", ".join(f"{k.split()[1]}: {v / 1e9:.0f}" for k, v in m.rates.items() if k.startswith("matmul"))
  yield Row("roofline: float32 matmul", m.flops / 1e9, unit="GFLOP/s", note=f"by side of the square matrices {sides}")
  others = ", ".join(f"{k} {m.rates[k] / 1e9:.1f}" for k in ("read", "stream"))
  yield Row("roofline: memory bandwidth", m.bandwidth / 1e9, unit="GB/s", note=f"GB/s: {others} (a + s b)")
