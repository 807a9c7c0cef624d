"""Supervised training on packed samples: the loop under `base` and `sft`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from seed_jax import batching, hosts, optimizer, preemption, update
from seed_jax.batching import Sample
from seed_jax.checkpoint import Checkpoints
from seed_jax.metrics import progress, say
from seed_jax.models.config import ModelConfig
from seed_jax.run import Run, optimizer_config, process_seed
from seed_jax.score import score


def fit(
  run: Run,
  name: str,
  section,
  model: ModelConfig,
  params,
  samples: Sequence[Sample],
  validation: Sequence[Sample],
) -> tuple[dict, list[dict]]:
  """Supervised training of `params` with a config section (epochs, batch_tokens, row_lengths, micro_tokens, optimizer,
  ...); resumable.

  The order of an epoch is drawn from (seed, name, epoch). Returns the parameters and the curve of losses.
  """
  shapes = run.row_shapes(section)
  num_batches = len(_split(samples, range(len(samples)), section.batch_tokens))
  plan = [(epoch, number) for epoch in range(section.epochs) for number in range(num_batches)]
  chain = optimizer.make_optimizer(optimizer_config(section.optimizer), len(plan))
  step_fn = update.make_update(model, update.sft_loss, chain)
  with jax.set_mesh(run.mesh):
    state = update.init_state(params, chain)
  checkpoints = Checkpoints(run.workdir / "checkpoints" / name, keep=run.config.checkpoint.keep)
  found = checkpoints.restore(state, run.resume_step(name))
  curve, losses, start = [], [], 0
  if found:
    start, state, record = found
    curve, losses = record["curve"], record["losses"]
    checkpoints.drop_after(start)
    say(f"{name}: resumed at update {start} of {len(plan)}")
  batches, loaded = [], -1
  step = start

  def save():
    """The state as it is before update `step` (counted from 0), after the last one where there is none."""
    if checkpoints.newest != step:
      checkpoints.save(step, state, {"curve": curve, "losses": jax.device_get(losses)})

  with (
    progress(total=len(plan), initial=start, desc=name, unit="update", plain=run.plain) as bar,
    checkpoints,
    preemption.on_preempted(save),
  ):
    for step in range(start, len(plan)):
      if step and step % section.save_every == 0:
        save()
      run.notice.meet()
      epoch, number = plan[step]
      if loaded != epoch:
        batches, loaded = (
          _shuffled(samples, section.batch_tokens, process_seed(run.config.seed, f"{name} {epoch}")),
          epoch,
        )
      with jax.set_mesh(run.mesh):
        state, metrics = step_fn(state, batching.to_batches(batches[number], shapes, run.mesh, skills=False))
      losses.append(metrics["loss"])
      bar.update(1, loss=float(metrics["loss"])) if step % 10 == 0 else bar.update(1)
      last = step + 1 == len(plan)
      if (step + 1) % section.log_every == 0 or last:
        point = {"update": step + 1, "loss": float(np.mean(np.asarray(jax.device_get(losses), np.float64)))}
        if last or plan[step + 1][0] != epoch:
          point["validation"] = evaluate_loss(run, model, state.params, validation, shapes)
        curve.append(point)
        losses = []
    step = len(plan)
    save()  # what the stage does with these parameters may be cut short
  return state.params, curve


def evaluate_loss(run: Run, model: ModelConfig, params, samples: Sequence[Sample], shapes) -> float:
  """Mean negative log-likelihood in nats per response token."""
  total = count = 0.0
  with jax.set_mesh(run.mesh):
    for batch in batching.to_batches(samples, shapes, run.mesh, skills=False):
      logprobs, mask = hosts.fetch((score(params, batch.ordinary, batch.targets, batch.count, model), batch.mask))
      total, count = total - float((logprobs * mask).sum()), count + float(mask.sum())
  return total / max(count, 1.0)


def _shuffled(samples, batch_tokens, seed) -> list[list[Sample]]:
  return _split(samples, np.random.default_rng(seed).permutation(len(samples)), batch_tokens)


def _split(samples, order, batch_tokens) -> list[list[Sample]]:
  """Batches of equal numbers of samples, about batch_tokens tokens each (whatever the order, the same number of
  batches).
  """
  mean = sum(s.length for s in samples) / max(len(samples), 1)
  size = max(round(batch_tokens / max(mean, 1)), 1)
  return [[samples[i] for i in order[at : at + size]] for at in range(0, len(samples), size)]
