"""The engine's bookkeeping, beside what decode_test.py shows of its samples: slots, room, limits, keys."""

import jax
import numpy as np
import pytest

from seed_jax import decode, sharding
from seed_jax.engine import Engine, Request
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig

CONFIG = ModelConfig("Qwen3ForCausalLM", 64, 32, 1, 2, 1, 8, 48, qk_norm=True, rope_theta=100.0)


@pytest.fixture(scope="module")
def params():
  return sharding.put_params(
    jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, decoder.init(jax.random.key(3), CONFIG)), sharding.make_mesh()
  )


def engine(params, **changes):
  options = dict(num_slots=4, capacity=32, max_new=4, sampling=decode.Sampling(1.0), stop_ids=(), seed=5, smallest=2)
  made = Engine(CONFIG, sharding.make_mesh(), **(options | changes))
  made.set_params(params)
  return made


def test_room_is_what_the_cache_and_the_last_token_leave(params):
  made = engine(params)
  assert made.room(0, fresh=True) == made.room(0, fresh=False) == 32
  made.turn([Request(0, [3, 4, 5], (0,))])
  assert made.room(0, fresh=False) == 32 - 3 - 4  # three of the prompt, four sampled
  made.turn([Request(0, [6] * 25, (1,), fresh=False)])  # exactly full: one answer token, which needs no room
  assert made.room(0, fresh=False) == -1 and made.room(0, fresh=True) == 32
  made.release(0)
  assert made.room(0, fresh=False) == 32


def test_a_request_into_a_full_slot_is_refused(params):
  made = engine(params)
  made.turn([Request(0, [3, 4, 5], (0,))])
  with pytest.raises(ValueError, match="33 tokens does not fit a slot of 32"):
    made.turn([Request(0, [6] * 26, (1,), fresh=False)])


def test_requests_name_slots_of_their_own_and_no_more_than_there_are(params):
  made = engine(params)
  assert made.turn([]) == []
  with pytest.raises(ValueError, match="2 requests for 4 slots"):
    made.turn([Request(1, [3], (0,)), Request(1, [4], (1,))])
  with pytest.raises(ValueError, match="5 requests for 4 slots"):
    made.turn([Request(i, [3], (i,)) for i in range(5)])


def test_a_fresh_request_forgets_the_conversation_before_it(params):
  made = engine(params)
  first = made.turn([Request(0, [3, 4, 5], (7,))])[0]
  made.turn([Request(0, [9, 9], (8,), fresh=False)])
  again = made.turn([Request(0, [3, 4, 5], (7,))])[0]
  assert again.tokens.tolist() == first.tokens.tolist()
  np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-6)


def test_counters_count_what_was_read_and_sampled(params):
  made = engine(params)
  made.turn([Request(0, [3, 4, 5], (0,)), Request(1, [3], (1,))])
  assert (made.tokens_prefilled, made.tokens_sampled) == (4, 8)
  made.turn([Request(0, [3, 4], (0,), fresh=False)])
  assert (made.tokens_prefilled, made.tokens_sampled) == (4 + 1 + 2, 12)  # the pending token is read with the prompt


def test_checking_for_stop_strings_in_chunks_changes_no_token(params):
  prompts = [[3, 4, 5], [6, 7]]
  requests = [Request(i, p, (i,)) for i, p in enumerate(prompts)]
  whole = engine(params, max_new=10).turn(requests)
  for every in (1, 4):
    cut = engine(params, max_new=10, find_stop=lambda ids: None, check_every=every).turn(requests)
    for a, b in zip(whole, cut, strict=True):
      assert a.tokens.tolist() == b.tokens.tolist() and not b.stopped  # 10 is no multiple of 4
      np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_the_seed_and_every_coordinate_choose_the_sample(params):
  def tokens(seed, coordinates):
    return engine(params, seed=seed, max_new=12).turn([Request(0, [3, 4, 5], coordinates)])[0].tokens.tolist()

  base = tokens(5, (1, 2, 3))
  others = [
    tokens(6, (1, 2, 3)),
    tokens(5, (2, 2, 3)),
    tokens(5, (1, 3, 3)),
    tokens(5, (1, 2, 4)),
    tokens(5, (2, 1, 3)),
  ]
  assert base == tokens(5, (1, 2, 3)) and all(base != other for other in others)


def test_slots_grow_with_the_conversations_and_shrink_when_most_have_ended(params):
  made = engine(params, num_slots=8)
  made.turn([Request(i, [3, i + 4], (i,)) for i in range(2)])
  assert len(made._length) == 2
  made.turn([Request(i, [3, i + 4], (i,)) for i in range(2, 7)])
  assert len(made._length) == 8
  for slot in range(1, 7):
    made.release(slot)
  kept = made.turn([Request(0, [9], (9,), fresh=False)])[0]
  assert len(made._length) == 2
  other = engine(params)
  other.turn([Request(0, [3, 4], (0,))])
  assert kept.tokens.tolist() == other.turn([Request(0, [9], (9,), fresh=False)])[0].tokens.tolist()


def test_slots_are_rounded_up_to_the_row_shards_of_the_mesh():
  mesh = sharding.make_mesh(4, 2, 1)
  made = Engine(
    CONFIG, mesh, num_slots=11, capacity=16, max_new=2, sampling=decode.Sampling(), stop_ids=(), seed=0, smallest=2
  )
  assert made.num_slots == 16 and made.slot_buckets == (8, 16)
