"""Stage `base`: the starting policy where a config names no pretrained weights.

It stands in for a language model's pre-training and is named so: a corpus of generated episodes by demonstrators of
mixed quality, in part with a skill in context that the demonstrator follows. The policy learns to act validly, to win
sometimes, and to heed a skill; it learns no analysis.
"""

from __future__ import annotations

import re
import time

import jax
import numpy as np

from seed_jax import hosts, sharding, text
from seed_jax.batching import Sample
from seed_jax.metrics import say
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
from seed_jax.run import ConfigError, Run, process_seed
from seed_jax.supervised import fit

JSON_PIECES = ('{"episode_summary": "', '", "episode_skill": "', '"}')  # the fixed parts of an analysis
BLOCK_PIECES = ("[", "]")  # around a skill in a prompt
NAME = re.compile(r"\b[a-z]+ \d+\b")  # a numbered thing, "fridge 1"
PHRASES = ("go to", "you see", "You see", "Nothing happens.", "Your task is to:", "is closed.", "You pick up")


def run_base(run: Run) -> dict:
  """Corpus, vocabulary, and training of the starting policy; writes policy/base."""
  c = run.config.base
  started = time.monotonic()
  if run.config.model.path:
    return run.finish("base", {"pretrained": str(run.config.model.path)})
  if run.config.model.get("preset"):
    raise ConfigError(
      f"config.model.path is empty: the preset {run.config.model.preset} gives sizes and no weights; "
      "name a Hugging Face directory with --config.model.path"
    )
  demonstrations = list(run.benchmark.demonstrations(c.episodes, process_seed(run.config.seed, "base corpus")))
  won = [d.won for d in demonstrations if not d.skill]
  say(f"base: {len(demonstrations)} demonstrations, {np.mean(won):.0%} of those without a skill succeed")

  folder = run.workdir / "tokenizer"
  if not hosts.from_first("the vocabulary", (folder / "spm.model").exists):
    lines = [line for d in demonstrations[: c.vocabulary_episodes] for line in _texts(run, d)]
    names = sorted(
      {name for line in lines for name in NAME.findall(line)}
    )  # one piece a name: a place is then copied in one step
    options = dict(symbols=JSON_PIECES + BLOCK_PIECES, phrases=[*PHRASES, *names], byte_fallback=False)

    def train():
      text.train_sentencepiece(lines, str(folder), vocab_size=c.vocab_size, **options)

    hosts.from_first("the vocabulary that was trained", train)
  tokenizer = text.load_tokenizer(str(folder))
  run.tokenizer = tokenizer  # the policy's own, before the policy exists

  m = run.config.model.shape
  model = run.runtime(
    ModelConfig(
      **m.to_dict(), vocab_size=-(-tokenizer.vocab_size // 8) * 8, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id
    )
  )
  samples = [demonstration_sample(run, d, c.observation_weight) for d in demonstrations]
  held_out = max(len(samples) // 50, 1)
  with jax.set_mesh(run.mesh):
    params = sharding.put_params(
      decoder.init(jax.random.key(process_seed(run.config.seed, "base init")), model), run.mesh
    )
  params, curve = fit(run, "base", c, model, params, samples[held_out:], samples[:held_out])
  run.save_policy("base", model, params)
  size = sum(x.size for x in jax.tree.leaves(params))
  return run.finish(
    "base",
    {
      "parameters": size,
      "vocabulary": tokenizer.vocab_size,
      "demonstrations": len(demonstrations),
      "demonstrator_success": float(np.mean(won)),
      "tokens": int(sum(s.length for s in samples)),
      "curve": curve,
      "seconds": time.monotonic() - started,
    },
  )


def demonstration_sample(run: Run, demonstration, observations: bool) -> Sample:
  """An episode as one sequence laid out as in transcript mode; trained on every token (or on the actions only)."""
  tokens, wanted = [], []
  for step, (observation, action) in enumerate(demonstration.steps):
    message = (
      run.benchmark.first_prompt("", observation, ()) if step == 0 else run.benchmark.turn_prompt(observation, ())
    )
    prompt = run.prompter.tokens(message, step, demonstration.skill)
    response = [*run.tokenizer.encode(action), run.tokenizer.eos_id]
    tokens += prompt + response
    wanted += [observations] * len(prompt) + [True] * len(response)
  tokens = np.asarray(tokens, np.int32)
  index = np.flatnonzero(wanted[1:]).astype(np.int32)
  zeros = np.zeros(len(index), np.float32)
  return Sample(tokens[:-1], index, tokens[1:][index], zeros, zeros)


def _texts(run, demonstration) -> list[str]:
  steps = [(o, a, True) for o, a in demonstration.steps]
  task = demonstration.steps[0][0].rpartition("Your task is to: ")[2].rstrip(".")
  analysis = run.benchmark.analyze(task, steps, demonstration.won)
  lines = [text_ for step in demonstration.steps for text_ in step]
  lines.append(run.benchmark.analysis_prompt(task, steps, demonstration.won))
  return lines + ([*analysis.values(), run.benchmark.skill_block(analysis["episode_skill"])] if analysis else [])
