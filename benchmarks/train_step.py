"""A training step of 20 million parameters against the matmul rate of the machine, and what takes the rest.

Shapes: B rows, T tokens of a row, R sampled tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks import timing, workload
from benchmarks.table import Row
from seed_jax import batching, learn, score, sharding

ABOUT = "a GRPO step of 20 M parameters against the machine's matmul rate, and its parts"


def run(options) -> Iterator[Row]:
  """The whole step, and its parts: forward pass, forward and backward pass, optimizer."""
  size, length, rows, micro = ("micro", 32, 2, 2) if options.quick else ("twenty", 256, 8, 2)
  yield from measure(size, length, rows, micro, options, parts=True)


def measure(size, length, rows, micro, options, *, parts=False, title="train_step") -> Iterator[Row]:
  """Rows for one size: `micro` micro-batches of `rows` rows of `length` tokens, a quarter of them sampled.

  The operations that count: three times those of a forward pass (one forward, two backward), causal attention as a
  half square, logits at sampled positions only. Recomputation and masked halves are our own loss.
  """
  config, mesh = workload.model(size), sharding.make_mesh()
  count = rows * micro
  samples = workload.random_samples(config, [length] * count, [length // 4] * count)
  shape = batching.RowShape(length, length // 4, rows)
  forward = workload.forward_flops(config, samples)
  with jax.set_mesh(mesh):
    state, step, scoring = workload.trainer(config, mesh)
    batch = batching.to_batches(samples, [shape], mesh, skills=False, micro_batches=micro)[0]
    batch = jax.block_until_ready(learn.scored(batch, state.params, None, scoring, first=True))
    empty = batching.empty_batch(shape, mesh, skills=False, micro_batches=micro)
    empty = jax.block_until_ready(learn.scored(empty, state.params, None, scoring, first=True))
    params = jax.tree.map(jnp.copy, state.params)  # the update donates its own
    held = {"state": state}

    def update(batches):
      held["state"], metrics = step(held["state"], batches)
      return metrics["grad_norm"]

    functions = {"step": lambda: update([batch])} | options.machine.probes()
    if parts:
      functions["forward"] = lambda: score.score(params, batch.ordinary, batch.targets, batch.count, config)
      functions["optimizer"] = lambda: update([empty])
    taken = timing.in_turn(functions, options.repeats)
  probes = {name: taken[name] for name in options.machine.probes()}
  share = lambda name, flops: options.machine.share(  # noqa: E731
    work_seconds=taken[name], flops=flops, num_bytes=0.0, probes=probes
  )
  tokens = length * count
  about = f"{workload.num_params(params) / 1e6:.3g} M parameters, {tokens} tokens, rows of {length}"
  seconds = {name: timing.median(taken[name]) for name in taken}
  yield Row(
    f"{title}: whole step" if parts else title,
    tokens / seconds["step"],
    unit="tokens/s",
    limit=share("step", 3 * forward),
    goal=">= 50 %" if parts else "",
    note=about,
  )
  if parts:
    yield Row(f"{title}: forward", seconds["forward"], unit="s", limit=share("forward", forward), note=about)
    backward = [s - f - o for s, f, o in zip(taken["step"], taken["forward"], taken["optimizer"], strict=True)]
    limit = options.machine.share(work_seconds=backward, flops=2 * forward, num_bytes=0.0, probes=probes)
    yield Row(f"{title}: backward", timing.median(backward), unit="s", limit=limit, note=about)
    # read parameter, gradient and two moments; write parameter, moments and the zeroed gradient
    moved = 8 * 4.0 * workload.num_params(params)
    limit = options.machine.share(work_seconds=taken["optimizer"], flops=0.0, num_bytes=moved, probes=probes)
    note = "limit: of the memory bandwidth, 8 reads and writes of 4 bytes a parameter; a step with no sample"
    yield Row(f"{title}: optimizer", seconds["optimizer"], unit="s", limit=limit, note=note)
