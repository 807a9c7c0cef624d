"""Stage `sft`: teaches the policy to write hindsight skills (paper, Stage 1)."""

from __future__ import annotations

import time

import numpy as np

from seed_jax import batching
from seed_jax.annotate import load_annotated
from seed_jax.base import demonstration_sample
from seed_jax.batching import Sample
from seed_jax.metrics import say
from seed_jax.run import Run, process_seed
from seed_jax.supervised import fit


def run_sft(run: Run) -> dict:
  """Trains on (analysis request, skill JSON) pairs; writes policy/sft."""
  c = run.config.sft
  started = time.monotonic()
  model, params = run.load_policy("base")
  trajectories = load_annotated(run)
  order = np.random.default_rng(process_seed(run.config.seed, "sft split")).permutation(len(trajectories))
  held_out = set(order[: max(round(c.validation * len(trajectories)), 1)].tolist())
  samples = [skill_sample(run, t) for t in trajectories]
  train = [s for i, s in enumerate(samples) if i not in held_out]
  validation = [s for i, s in enumerate(samples) if i in held_out]

  replayed = replay(run, round(c.replay * len(train)))
  params, curve = fit(run, "sft", c, model, params, train + replayed, validation)
  run.save_policy("sft", model, params)

  # what the paper's Stage 1 is for: does the policy now answer in the form that can be parsed?
  engine = run.engine(model, temperature=0.0, seed=run.config.seed)
  engine.set_params(params)
  unseen = [t for i, t in enumerate(trajectories) if i in held_out][: c.check]
  wanted = [t.skill for t in unseen]
  with run.notice.apart():
    stats = run.analyze(engine, unseen, iteration=-1)
  exact = float(np.mean([t.skill == w for t, w in zip(unseen, wanted, strict=True)])) if unseen else 0.0
  say(
    f"sft: validation loss {curve[-1]['validation']:.3f}, parse rate {stats['parse_rate']:.1%}, "
    f"{exact:.1%} of the skills word for word the annotator's"
  )
  return run.finish(
    "sft",
    {
      "examples": len(train),
      "replayed": len(replayed),
      "validation_examples": len(validation),
      "curve": curve,
      "parse_rate": stats["parse_rate"],
      "exact_skills": exact,
      "seconds": time.monotonic() - started,
    },
  )


def replay(run: Run, count: int) -> list[Sample]:
  """Fresh episodes of the starting policy's own corpus, mixed into Stage 1 so that a very small policy does not forget
  how to act.

  A language model that acts already needs none (config.sft.replay = 0): at the paper's learning rate its acting
  survives a few hundred small steps. In window mode each step is a sample of its own.
  """
  if not count:
    return []
  demonstrations = run.benchmark.demonstrations(count, process_seed(run.config.seed, "sft replay"))
  if run.config.rollout.mode == "window":
    return [sample for d in demonstrations for sample in window_samples(run, d)]
  return [demonstration_sample(run, d, observations=False) for d in demonstrations]


def window_samples(run: Run, demonstration) -> list[Sample]:
  """The steps of a demonstration as they would be prompted for in window mode, each trained on its response alone."""
  history, samples = run.config.rollout.history, []
  for step, (observation, action) in enumerate(demonstration.steps):
    past = demonstration.steps[max(step - history, 0) : step]
    message = run.benchmark.window_prompt(demonstration.sentence, past, step, observation, demonstration.shown[step])
    response = [*run.tokenizer.encode(run.benchmark.response(action)), run.tokenizer.eos_id]
    samples.append(batching.text_sample(run.prompter.tokens(message, step), response))
  return samples


def skill_sample(run: Run, trajectory) -> Sample:
  """The request for an episode's analysis as prompt, the annotation and the end of turn as response."""
  response = [*run.tokenizer.encode(trajectory.analysis), run.tokenizer.eos_id]
  return batching.text_sample(run.analysis_prompt(trajectory), response)
