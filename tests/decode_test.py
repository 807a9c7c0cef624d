"""Decode programs and the engine: the scorer sees what was sampled, whatever the slots, buckets and neighbours."""

import jax
import numpy as np
import pytest

from seed_jax import decode, score, sharding
from seed_jax.engine import Engine
from seed_jax.metrics import CompileCounter
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
from seed_jax.requests import Request, bucket, geometric
from seed_jax.score import Context

CONFIG = ModelConfig("Qwen3ForCausalLM", 64, 32, 2, 4, 2, 8, 48, qk_norm=True, rope_theta=100.0)
STOP = (1,)


@pytest.fixture(scope="module")
def params():
  raw = decoder.init(jax.random.key(3), CONFIG)
  return jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, raw)  # sharper than at random, so that choices matter


def engine(params, mesh=None, config=CONFIG, **changes):
  mesh = mesh or sharding.make_mesh()
  options = dict(num_slots=8, capacity=64, max_new=6, sampling=decode.Sampling(1.0), stop_ids=STOP, seed=5, smallest=2)
  made = Engine(config, mesh, **(options | changes))
  made.set_params(sharding.put_params(params, mesh))
  return made


def prompts(count, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.integers(2, 60, rng.integers(3, 15)).tolist() for _ in range(count)]


def greedy(params, prompt, steps):
  """The plain definition: the whole sequence again for every token."""
  ids = list(prompt)
  for _ in range(steps):
    ids.append(int(np.argmax(decoder.logits(params, np.asarray([ids]), CONFIG)[0, -1])))
    if ids[-1] in STOP:
      break
  return ids[len(prompt) :]


def test_greedy_decoding_is_the_argmax_of_the_full_forward(params):
  some = prompts(5)
  out = engine(params, sampling=decode.Sampling(0.0)).turn([Request(i, p, (i,)) for i, p in enumerate(some)])
  for prompt, completion in zip(some, out, strict=True):
    assert completion.tokens.tolist() == greedy(params, prompt, 6)


@pytest.mark.parametrize("temperature, top_k, top_p", [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (0.9, 0, 0.6)])
def test_sampled_logprobs_are_the_scorers_over_the_full_vocabulary(params, temperature, top_k, top_p):
  some = prompts(4, seed=1)
  out = engine(params, sampling=decode.Sampling(temperature, top_k, top_p)).turn(
    [Request(i, p, (i,)) for i, p in enumerate(some)]
  )
  for prompt, completion in zip(some, out, strict=True):
    ids = np.asarray([*prompt, *completion.tokens])[None]
    logits = np.asarray(decoder.logits(params, ids, CONFIG))[0, len(prompt) - 1 : -1] / temperature
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(completion.tokens)), completion.tokens]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_top_k_one_and_a_tiny_nucleus_are_greedy(params):
  some = prompts(3, seed=2)
  plain = engine(params, sampling=decode.Sampling(0.0)).turn([Request(i, p, (i,)) for i, p in enumerate(some)])
  for sampling in (decode.Sampling(1.0, top_k=1), decode.Sampling(1.0, top_p=1e-6)):
    out = engine(params, sampling=sampling).turn([Request(i, p, (i,)) for i, p in enumerate(some)])
    assert [c.tokens.tolist() for c in out] == [c.tokens.tolist() for c in plain]


def test_a_request_samples_the_same_alone_in_another_slot_and_in_another_bucket(params):
  some = prompts(7, seed=3)
  together = engine(params).turn([Request(i, p, (9, i)) for i, p in enumerate(some)])
  alone = engine(params, num_slots=2).turn([Request(1, some[4], (9, 4))])
  assert together[4].tokens.tolist() == alone[0].tokens.tolist()
  np.testing.assert_allclose(together[4].logprobs, alone[0].logprobs, atol=1e-5)
  other = engine(params).turn([Request(0, some[4], (9, 5))])
  assert other[0].tokens.tolist() != alone[0].tokens.tolist()  # other coordinates, other noise


def test_a_conversation_continues_where_its_cache_ends(params):
  """Turn by turn with the cache equals one prompt with everything in it, also after the slots have been compacted."""
  some = prompts(6, seed=4)
  kept = engine(params)
  history = {i: list(p) for i, p in enumerate(some)}
  for turn in range(4):
    live = [i for i in history if turn < 2 or i in (2, 5)]  # most episodes end: the slots move to a smaller set
    for i in set(history) - set(live):
      kept.release(i)
      history.pop(i)
    new = {i: some[i] if turn == 0 else [7 + turn, 8, 9 + i] for i in live}
    out = kept.turn([Request(i, new[i], (turn, i), fresh=turn == 0) for i in live])
    for i, completion in zip(live, out, strict=True):
      if turn:
        history[i] += new[i]
      whole = engine(params).turn([Request(0, history[i], (turn, i))])[0]
      assert completion.tokens.tolist() == whole.tokens.tolist()
      np.testing.assert_allclose(completion.logprobs, whole.logprobs, atol=1e-5)
      history[i] += completion.tokens.tolist()


def test_stop_token_is_kept_and_ends_the_response(params):
  some = prompts(40, seed=5)
  made = engine(params, num_slots=40, max_new=30)
  out = made.turn([Request(i, p, (i,)) for i, p in enumerate(some)])
  stopped = [c for c in out if c.stopped]
  assert stopped and all(c.tokens[-1] == 1 and 1 not in c.tokens[:-1] for c in stopped)
  assert all(len(c.tokens) == 30 and 1 not in c.tokens for c in out if not c.stopped)


def test_a_stop_string_cuts_the_response_and_the_cache_forgets_the_rest(params):
  prompt = prompts(1, seed=6)[0]
  free = engine(params, max_new=12).turn([Request(0, prompt, (1,))])[0].tokens.tolist()
  find = lambda ids: 5 if len(ids) >= 5 else None  # noqa: E731 - "stop after the fifth token", found at the next check
  made = engine(params, max_new=12, find_stop=find, check_every=4)
  cut = made.turn([Request(0, prompt, (1,))])[0]
  assert cut.tokens.tolist() == free[:5] and cut.stopped
  after = made.turn([Request(0, [9, 9], (2,), fresh=False)])[0]
  whole = engine(params, max_new=12, find_stop=find, check_every=4).turn(
    [Request(0, [*prompt, *free[:5], 9, 9], (2,))]
  )[0]
  assert after.tokens.tolist() == whole.tokens.tolist()


def test_a_full_slot_ends_the_response_and_too_long_a_prompt_is_refused(params):
  made = engine(params, capacity=16, max_new=30, stop_ids=())
  out = made.turn([Request(0, list(range(2, 14)), (0,))])[0]
  assert len(out.tokens) == 16 - 12 + 1 and not out.stopped  # the last one needs no room
  with pytest.raises(ValueError, match="17 tokens does not fit a slot of 16"):
    made.turn([Request(0, list(range(2, 19)), (0,))])


def test_new_parameters_end_every_conversation(params):
  made = engine(params)
  made.turn([Request(0, [3, 4, 5], (0,))])
  made.set_params(made.params)
  with pytest.raises(ValueError, match="no cache to continue"):
    made.turn([Request(0, [6], (0,), fresh=False)])


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 4, 2), (2, 2, 2)])
def test_decoding_on_a_mesh_is_decoding_on_one_device(params, shape):
  some = prompts(8, seed=7)
  requests = [Request(i, p, (i,)) for i, p in enumerate(some)]
  one = engine(params).turn(requests)
  mesh = engine(params, mesh=sharding.make_mesh(*shape)).turn(requests)
  for a, b in zip(one, mesh, strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_scanned_and_unrolled_layers_agree(params):
  import dataclasses

  some = [Request(i, p, (i,)) for i, p in enumerate(prompts(4, seed=8))]
  unrolled = engine(params).turn(some)
  scanned = engine(params, config=dataclasses.replace(CONFIG, scan_layers=True)).turn(some)
  for a, b in zip(unrolled, scanned, strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_padded_vocabulary_is_never_sampled_and_has_no_mass(params):
  import dataclasses

  config = dataclasses.replace(CONFIG, num_valid_tokens=40)
  requests = [Request(i, [t % 40 for t in p], (i,)) for i, p in enumerate(prompts(8, seed=9))]
  out = engine(params, config=config).turn(requests)
  assert max(int(c.tokens.max()) for c in out) < 40
  ids = np.asarray([*requests[0].tokens, *out[0].tokens])[None]
  with jax.set_mesh(sharding.make_mesh()):
    at = np.arange(len(requests[0].tokens) - 1, ids.shape[1] - 1)[None]
    rows = Context(ids, np.arange(ids.shape[1])[None], np.ones_like(ids), at)
    logprobs, _ = jax.jit(lambda p: score.response_logprobs(p, rows, out[0].tokens[None], config))(params)
  np.testing.assert_allclose(logprobs[0], out[0].logprobs, atol=1e-5)


def test_buckets():
  assert geometric(16, 64) == (16, 32, 64) and geometric(16, 48) == (16, 32, 48) and geometric(8, 8) == (8,)
  assert geometric(4, 64, 4) == (4, 16, 64)
  assert bucket(17, (16, 64)) == 64
  with pytest.raises(ValueError, match="65 does not fit the largest bucket 64"):
    bucket(65, (16, 64))


def test_nothing_compiles_again_for_new_lengths_or_new_parameters(params):
  made = engine(params, num_slots=4, smallest=4)
  made.turn([Request(i, p, (i,)) for i, p in enumerate(prompts(4, seed=10))])
  with CompileCounter() as compiled:
    for seed in range(11, 14):
      made.set_params(made.params)
      made.turn([Request(i, p, (i,)) for i, p in enumerate(prompts(4, seed=seed))])
    assert compiled.take() == 0, compiled.names
