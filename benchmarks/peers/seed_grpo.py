"""GRPO in seed_jax, with the steps of its training loop: engine, packed batch, scores, update."""

from __future__ import annotations

import time

import jax
import numpy as np

from benchmarks import workload
from benchmarks.peers import shared
from seed_jax import advantages, batching, decode, engine, learn, sharding


def requests(step: int) -> list[engine.Request]:
  """Every prompt once a member; a request's coordinates seed its samples."""
  return [
    engine.Request((p, m), shared.encode(prompt), (step, p, m, 0, 0), keep=False)
    for p, prompt in enumerate(shared.prompts(step))
    for m in range(shared.MEMBERS)
  ]


def samples(asked, completions) -> list[batching.Sample]:
  """One sample a completion, with its group-normalised reward on every sampled token."""
  rewards = np.asarray([shared.reward(shared.decode(c.tokens)) for c in completions], np.float32)
  groups = np.arange(len(rewards)) // shared.MEMBERS
  values = np.asarray(advantages.group_advantages(rewards, groups, num_groups=shared.PROMPTS))
  out = []
  for request, completion, value in zip(asked, completions, values, strict=True):
    n, r = len(request.tokens), len(completion.tokens)
    out.append(
      batching.Sample(
        tokens=np.concatenate([request.tokens, completion.tokens]).astype(np.int32)[:-1],
        index=np.arange(n - 1, n - 1 + r, dtype=np.int32),
        targets=completion.tokens,
        advantages=np.full(r, value, np.float32),
        logprobs=completion.logprobs,
      )
    )
  return out


def main() -> None:
  flags = shared.flags()
  config = workload.model(flags.size)
  mesh = sharding.make_mesh()
  state, step_fn, scoring = workload.trainer(
    config, mesh, kl_coef=shared.KL_COEFFICIENT, learning_rate=shared.LEARNING_RATE
  )
  reference = workload.params(config, mesh)
  count = shared.PROMPTS * shared.MEMBERS
  longest = max(len(shared.encode(p)) for step in range(flags.steps + 1) for p in shared.prompts(step))
  sampler = engine.Engine(
    config,
    mesh,
    num_slots=count,
    capacity=longest + shared.NEW_TOKENS,
    max_new=shared.NEW_TOKENS,
    sampling=decode.Sampling(),
    stop_ids=(shared.EOS,),
    seed=0,
    smallest=count,
    check_every=shared.NEW_TOKENS,
    prefill_buckets=(longest,),
    refill=1.0,  # nobody waits for a slot
    share_prefix=0,  # reading so short a prompt four times takes less than reading it first
  )
  # a row holds one sample; the last token of a response predicts nothing
  shape = batching.RowShape(longest + shared.NEW_TOKENS - 1, shared.NEW_TOKENS, count)
  watch, tokens, first = shared.Stopwatch(), [], None
  for step in range(flags.steps + 1):
    began = time.perf_counter()
    sampler.set_params(state.params)
    asked = requests(step)
    completions = sampler.turn(asked)
    sampled = time.perf_counter()
    with jax.set_mesh(mesh):
      batches = batching.to_batches(samples(asked, completions), [shape], mesh, skills=False, micro_batches=1)
      batched = time.perf_counter()
      # one mini-batch: the old log-probabilities are the update's own, so only the reference is scored
      minibatches = jax.block_until_ready(learn.score_all([batches], state.params, reference, scoring))
      scored = time.perf_counter()
      state, _ = jax.block_until_ready(learn.update_all(step_fn, state, minibatches, scoring))
    ended = time.perf_counter()
    first = shared.since_start() if first is None else first
    watch.ends.append(ended)
    tokens.append(sum(len(c.tokens) for c in completions))
    for phase, start, end in (
      ("generation", began, sampled),
      ("scoring", batched, scored),
      ("update", scored, ended),
    ):
      watch.add(phase, end - start)
  shared.report(
    params=workload.num_params(reference),
    tokens=tokens[1:],
    first_update=first,
    step=watch.steps(),
    **{phase: seconds[1:] for phase, seconds in watch.seconds.items()},
  )


if __name__ == "__main__":
  main()
