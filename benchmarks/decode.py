"""Decode steps against what the machine's bandwidth and matmul rate allow.

Shapes: S slots, C capacity of a slot, N tokens of one measurement.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from benchmarks import timing, workload
from benchmarks.table import Row
from seed_jax import decode, sharding

ABOUT = "decode steps of 20 M parameters by batch and context, against the machine's limits"


def run(options) -> Iterator[Row]:
  """Batches of 1 to 64 at a context of 256, and contexts of 128 and 512 at a batch of 32."""
  if options.quick:
    yield from measure("micro", 2, 16, options, tokens=4)
    return
  for slots, context in ((1, 256), (8, 256), (32, 128), (32, 256), (32, 512), (64, 256)):
    yield from measure("twenty", slots, context, options)


def measure(size, slots, context, options, *, tokens=32, title="decode") -> Iterator[Row]:
  """One row: tokens a second of `slots` conversations that grow from context - tokens to `context`, all of them live.

  The least time of a step is max(bytes / bandwidth, operations / rate): every matrix and every live key and value is
  read once.
  """
  config, mesh = workload.model(size), sharding.make_mesh()
  params = workload.params(config, mesh)
  with jax.set_mesh(mesh):
    put = lambda x: sharding.put_rows(np.asarray(x), mesh)  # noqa: E731
    draw = decode.Draw(
      coordinates=put(np.arange(slots * 5, dtype=np.int32).reshape(slots, 5)),
      number=put(np.zeros(slots, np.int32)),
      temperature=put(np.ones(slots, np.float32)),
    )
    length = put(np.full(slots, context - tokens, np.int32))
    token, left = put(np.zeros(slots, np.int32)), put(np.full(slots, tokens, np.int32))
    held = {"cache": decode.init_cache(config, slots, context)}

    def loop():
      sampled, held["cache"] = decode.generate(
        params, held["cache"], length, token, left, draw, np.int32(0), np.int32(slots + 1), config,
        sampling=decode.Sampling(), max_new=tokens, stop_ids=(),
      )  # fmt: skip
      return sampled.count

    counts = np.asarray(loop())
    if not (counts == tokens).all():
      raise ValueError(f"{counts} tokens were sampled instead of {tokens}")
    taken = timing.in_turn({"loop": loop} | options.machine.probes(), options.repeats)
  mean = context - tokens / 2
  limit = options.machine.share(
    work_seconds=[seconds / tokens for seconds in taken["loop"]],
    flops=workload.decode_flops(config, slots, mean),
    num_bytes=workload.decode_bytes(config, slots, mean),
    probes={name: taken[name] for name in options.machine.probes()},
  )
  yield Row(
    f"{title}: batch {slots}, context {context}",
    slots * tokens / timing.median(taken["loop"]),
    unit="tokens/s",
    limit=limit,
    goal=">= 40 %" if title == "decode" else "",
    note=f"{title}: {workload.num_params(params) / 1e6:.3g} M parameters; the limit is max(bytes / bandwidth, "
    "operations / matmul rate)",
  )
