"""The engine's bookkeeping, beside what decode_test.py shows of its samples: slots, room, limits, keys."""

import dataclasses

import jax
import numpy as np
import pytest

from seed_jax import decode, sharding
from seed_jax.engine import Engine
from seed_jax.metrics import CompileCounter
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
from seed_jax.requests import Request

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


def drain(made):
  out = []
  while made.busy:
    out += made.step()
  return out


def alone(params, prompt, coordinates, **options):
  """The request by itself, in an engine of its own that shares nothing."""
  made = engine(params, share_prefix=0, **options)
  return made.turn([Request("x", prompt, coordinates)])[0]


def same(a, b):
  assert a.tokens.tolist() == b.tokens.tolist() and a.stopped == b.stopped
  np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


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


def test_a_turn_takes_one_request_a_conversation_and_no_more_than_there_are_slots(params):
  made = engine(params)
  assert made.turn([]) == [] and made.step() == []
  with pytest.raises(ValueError, match="2 requests for 4 slots"):
    made.turn([Request(1, [3], (0,)), Request(1, [4], (1,))])
  with pytest.raises(ValueError, match="5 requests for 4 slots"):
    made.turn([Request(i, [3], (i,)) for i in range(5)])


def test_what_cannot_be_submitted_is_refused_and_changes_nothing(params):
  made = engine(params)
  made.submit(Request("a", [3], (0,)))
  with pytest.raises(ValueError, match="'a' has a request already"):
    made.submit(Request("a", [3], (0,)))
  with pytest.raises(ValueError, match="more than 5"):
    made.submit(Request("b", [3], (0, 1, 2, 3, 4, 5)))
  with pytest.raises(ValueError, match="33 tokens does not fit a slot of 32"):
    made.submit(Request("b", [3] * 33, (0,)))
  with pytest.raises(ValueError, match="no cache to continue"):
    made.submit(Request("b", [3], (0,), fresh=False))
  assert [name for name, _ in drain(made)] == ["a"] and not made.busy


def test_a_fresh_request_forgets_the_conversation_before_it(params):
  made = engine(params)
  first = made.turn([Request(0, [3, 4, 5], (7,))])[0]
  made.turn([Request(0, [9, 9], (8,), fresh=False)])
  again = made.turn([Request(0, [3, 4, 5], (7,))])[0]
  assert again.tokens.tolist() == first.tokens.tolist()
  np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-6)


def test_counters_count_what_was_read_and_sampled(params):
  made = engine(params, share_prefix=0)
  made.turn([Request(0, [3, 4, 5], (0,)), Request(1, [3], (1,))])
  first = made.take_stats()
  assert (first.tokens_prefilled, first.tokens_sampled, first.decoded, first.tokens_reused) == (4, 8, 6, 0)
  assert (first.decode_steps, first.slot_steps, first.utilisation) == (3, 6, 1.0)  # two slots for two conversations
  made.turn([Request(0, [3, 4], (0,), fresh=False)])
  assert (made.stats.tokens_prefilled, made.stats.tokens_sampled) == (1 + 2, 4)  # the pending token is read first
  assert made.stats.utilisation == 0.5  # the other conversation keeps its slot and rests


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
  assert made.table.size == 2
  made.turn([Request(i, [3, i + 4], (i,)) for i in range(2, 7)])
  assert made.table.size == 8
  for slot in range(1, 7):
    made.release(slot)
  kept = made.turn([Request(0, [9], (9,), fresh=False)])[0]
  assert made.table.size == 2
  other = engine(params)
  other.turn([Request(0, [3, 4], (0,))])
  assert kept.tokens.tolist() == other.turn([Request(0, [9], (9,), fresh=False)])[0].tokens.tolist()


def test_slots_are_rounded_up_to_the_row_shards_of_the_mesh():
  mesh = sharding.make_mesh(4, 2, 1)
  made = Engine(
    CONFIG, mesh, num_slots=11, capacity=16, max_new=2, sampling=decode.Sampling(), stop_ids=(), seed=0, smallest=2
  )
  assert made.num_slots == 16 and made.slot_buckets == (8, 16) and made.shards == 8


# ---- continuous batching


def test_a_short_response_does_not_wait_for_a_long_one_and_its_slot_is_filled_at_once(params):
  made = engine(params, num_slots=2, max_new=16, check_every=4)
  lengths = {"long": 16, "a": 2, "b": 3, "c": 2, "d": 1}
  for i, (name, n) in enumerate(lengths.items()):
    made.submit(Request(name, [3, 4 + i], (i,), keep=False, max_new=n))
  order = drain(made)
  assert [name for name, _ in order] == ["a", "b", "c", "d", "long"]
  for i, (name, n) in enumerate(lengths.items()):
    answer = dict(order)[name]
    assert len(answer.tokens) == n
    same(answer, alone(params, [3, 4 + i], (i,), max_new=n))


def test_a_conversation_goes_on_while_others_still_answer(params):
  made = engine(params, num_slots=4, max_new=12, check_every=3, refill=0.01)
  made.submit(Request("slow", [3, 4], (0,)))
  made.submit(Request("fast", [5, 6], (1,), max_new=2))
  turns, answers = 0, {}
  while made.busy:
    for name, answer in made.step():
      answers.setdefault(name, []).append(answer)
      if name == "fast" and turns < 2:
        assert "slow" not in answers  # it is still being sampled
        turns += 1
        made.submit(Request("fast", [7], (1, turns), fresh=False, max_new=2))
  assert len(answers["fast"]) == 3 and len(answers["slow"]) == 1
  context = [5, 6]
  for turn, answer in enumerate(answers["fast"]):
    same(answer, alone(params, context, (1, turn) if turn else (1,), max_new=2))
    context += [*answer.tokens.tolist(), 7]
  same(answers["slow"][0], alone(params, [3, 4], (0,), max_new=12))


def test_requests_wait_for_conversations_that_hold_all_slots(params):
  made = engine(params, num_slots=2)
  made.turn([Request(i, [3, i + 4], (i,)) for i in range(2)])
  made.submit(Request("late", [9, 9], (7,)))
  assert made.busy and not made.can_work and made.step() == []
  made.release(0)
  assert made.can_work
  same(dict(drain(made))["late"], alone(params, [9, 9], (7,)))


def test_a_request_chooses_its_temperature_and_length(params):
  made = engine(params, max_new=6)
  prompts = [[3, 4, 5], [6, 7], [8, 9]]
  made.submit(Request(0, prompts[0], (0,)))
  made.submit(Request(1, prompts[1], (1,), temperature=0.0, max_new=5))
  made.submit(Request(2, prompts[2], (2,), temperature=0.5))
  out = dict(drain(made))
  same(out[0], alone(params, prompts[0], (0,), max_new=6))
  same(out[1], alone(params, prompts[1], (1,), max_new=5, sampling=decode.Sampling(0.0)))
  same(out[2], alone(params, prompts[2], (2,), max_new=6, sampling=decode.Sampling(0.5)))


def test_a_request_without_stop_strings_runs_past_them(params):
  made = engine(params, max_new=8, find_stop=lambda ids: 2 if len(ids) >= 2 else None, check_every=4)
  made.submit(Request("cut", [3, 4], (0,)))
  made.submit(Request("whole", [3, 4], (0,), stop_strings=False))
  out = dict(drain(made))
  assert len(out["cut"].tokens) == 2 and out["cut"].stopped
  assert len(out["whole"].tokens) == 8 and out["whole"].tokens[:2].tolist() == out["cut"].tokens.tolist()


def test_a_released_conversation_is_forgotten_wherever_it_stands(params):
  made = engine(params, num_slots=2, max_new=8, check_every=2)
  for name in ("runs", "stays", "waits"):
    made.submit(Request(name, [3, 4], (0,)))
  made.step()
  made.release("runs")
  made.release("waits")
  assert [name for name, _ in drain(made)] == ["stays"]
  same(made.turn([Request("waits", [3, 4], (0,))])[0], alone(params, [3, 4], (0,), max_new=8))


def test_slots_grow_with_their_longest_conversation(params):
  made = engine(params, capacity_buckets=(12, 20), check_every=4, max_new=20)
  made.submit(Request("short", [3, 4], (0,), max_new=2))
  made.submit(Request("long", [5, 6], (1,), max_new=20))
  rooms, out = [], {}
  while made.busy:
    out |= dict(made.step())
    rooms.append(made.slots.shape[1])
  assert rooms[0] == 12 and rooms[-1] == 32 and 20 in rooms and rooms == sorted(rooms)
  same(out["short"], alone(params, [3, 4], (0,), max_new=2))
  same(out["long"], alone(params, [5, 6], (1,), max_new=20))
  after = made.turn([Request("short", [9] * 20, (2,), fresh=False, max_new=2)])[0]
  context = [3, 4, *out["short"].tokens.tolist(), *[9] * 20]
  same(after, alone(params, context, (2,), max_new=2))
  made.reset()
  made.turn([Request("new", [3, 4], (0,), max_new=2)])
  assert made.slots.shape[1] == 12


# ---- prefixes and pieces


PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_members_of_a_group_share_the_prefill_of_their_prompt(params):
  made = engine(params, num_slots=4, share_prefix=4)
  out = made.turn([Request(i, PROMPT, (i,)) for i in range(4)])
  assert made.stats.tokens_prefilled == 12 + 3 and made.stats.tokens_reused == 3 * 11  # the last token gives the logits
  for i, answer in enumerate(out):
    same(answer, alone(params, PROMPT, (i,)))
  assert len({tuple(a.tokens.tolist()) for a in out}) > 1


def test_a_prompt_takes_over_the_prefix_that_another_slot_has_read(params):
  made = engine(params, num_slots=4, share_prefix=4)
  made.turn([Request("a", PROMPT, (0,))])
  longer = [*PROMPT[:8], 40, 41, 42]
  same(made.turn([Request("b", longer, (1,))])[0], alone(params, longer, (1,)))
  assert made.stats.tokens_reused == 8
  after = made.turn([Request("a", [50], (2,), fresh=False)])[0]  # the source is what it was
  fresh = engine(params)
  fresh.turn([Request("a", PROMPT, (0,))])
  same(after, fresh.turn([Request("a", [50], (2,), fresh=False)])[0])


def test_a_prefix_that_is_promised_to_a_slot_is_taken_from_where_it_lies(params):
  """Two requests in one call: the first slot is to copy the prefix of the last one, and has nothing itself yet."""
  made = engine(params, smallest=4, share_prefix=4)
  prompt = list(range(3, 15))
  made.turn([*(Request(name, [50], (0,)) for name in "abc"), Request("holds it", prompt, (1,))])
  for name in "abc":
    made.release(name)
  asked = {name: Request(name, [*prompt, name], (name,)) for name in (20, 21)}
  for request in asked.values():
    made.submit(request)
  done = dict(drain(made))
  assert made.stats.tokens_reused == 2 * len(prompt)
  for name, request in asked.items():
    same(done[name], alone(params, request.tokens, request.coordinates))


def test_the_next_window_of_an_episode_begins_in_its_own_slot(params):
  made = engine(params, num_slots=2, share_prefix=4)
  for turn in range(3):
    prompt = [*PROMPT[:6], 20 + turn, 21 + turn]
    same(
      made.turn([Request("w", prompt, (turn,), keep=False)])[0],
      alone(params, prompt, (turn,)),
    )
  assert made.stats.tokens_reused == 2 * 6 and made.stats.tokens_prefilled == 8 + 2 * 2


def test_what_a_stop_string_takes_back_is_no_prefix_for_others(params):
  prompt = PROMPT[:5]
  find = lambda ids: 2 if len(ids) >= 2 else None  # noqa: E731
  made = engine(params, share_prefix=2, find_stop=find, check_every=4)
  said = made.turn([Request("a", prompt, (0,))])[0].tokens.tolist()
  made.take_stats()
  again = [*prompt, *said, 30]
  same(
    made.turn([Request("b", again, (1,), stop_strings=False)])[0],
    alone(params, again, (1,)),
  )
  assert made.stats.tokens_reused == 5


def test_a_prefix_that_is_still_to_be_copied_is_none_for_others(params):
  """Two requests take a prefix over at once, the first one into a slot that stands before the prefix's own: what that
  slot held before must not pass for the prefix.
  """
  made = engine(params, num_slots=4, share_prefix=4)
  others = [[50 + i] * 12 for i in range(3)]
  made.turn([Request(name, p, (9,)) for name, p in zip("xayz", [others[0], PROMPT, *others[1:]], strict=True)])
  for name in "xz":
    made.release(name)
  prompts = {"b": [*PROMPT[:11], 40], "c": [*PROMPT[:11], 41]}
  found = made.turn([Request(name, prompt, (1,)) for name, prompt in prompts.items()])
  assert made.stats.tokens_reused == 2 * 11
  for answer, prompt in zip(found, prompts.values(), strict=True):
    same(answer, alone(params, prompt, (1,)))


def test_new_parameters_leave_no_prefix_behind(params):
  made = engine(params, share_prefix=2)
  made.turn([Request("a", PROMPT, (0,))])
  other = jax.tree.map(lambda x: x * 1.1, params)
  made.set_params(other)
  same(made.turn([Request("a", PROMPT, (0,))])[0], alone(other, PROMPT, (0,)))
  assert made.stats.tokens_reused == 0


def test_a_long_prompt_is_read_in_pieces_between_which_others_answer(params):
  made = engine(params, num_slots=4, prefill_buckets=(2, 4), prefill_tokens=4, check_every=1, max_new=4)
  made.submit(Request("short", [3, 4], (0,)))
  assert not made.step()
  made.submit(Request("long", list(range(2, 26)), (1,)))
  order = drain(made)
  assert [name for name, _ in order] == ["short", "long"]
  same(order[0][1], alone(params, [3, 4], (0,)))
  same(order[1][1], alone(params, list(range(2, 26)), (1,)))


# ---- on a mesh, and warm


@pytest.mark.parametrize("shape", [(2, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_prefixes_and_turns_on_a_mesh(params, shape):
  mesh = sharding.make_mesh(*shape)
  config = CONFIG if shape[2] == 1 else dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=2)
  weights = decoder.init(jax.random.key(3), config)
  made, plain = (
    Engine(
      config,
      m,
      num_slots=8,
      capacity=32,
      max_new=4,
      sampling=decode.Sampling(1.0),
      stop_ids=(),
      seed=5,
      smallest=2,
      share_prefix=share,
    )
    for m, share in ((mesh, 4), (sharding.make_mesh(), 0))
  )
  made.set_params(sharding.put_params(weights, mesh))
  plain.set_params(sharding.put_params(weights, plain.mesh))
  for turn in range(3):
    requests = [Request(i, PROMPT if turn == 0 else [20 + turn, i + 3], (turn, i), fresh=turn == 0) for i in range(7)]
    for a, b in zip(made.turn(requests), plain.turn(requests), strict=True):
      same(a, b)
  assert (made.stats.tokens_reused > 0) == (made.shards < 8)  # one slot a shard leaves nobody to share with


def test_after_the_warm_up_nothing_compiles(params):
  made = engine(
    params, num_slots=8, prefill_buckets=(4, 8), prefill_tokens=16, max_new=3, check_every=4, capacity_buckets=(16,)
  )
  names = []
  for name, run in made.programs():
    run()
    names.append(name)
  assert len(set(names)) == len(names) and "decode 8 slots of 32" in names and "prefill 4x4 in 8 slots of 16" in names
  rng = np.random.default_rng(0)
  with CompileCounter() as compiled:
    for round_ in range(3):
      made.set_params(params)
      for i in range(11):
        tokens = [3, 4, 5, 6, *rng.integers(2, 60, rng.integers(1, 20)).tolist()]
        made.submit(Request(i, tokens, (round_, i), keep=i % 2 == 0))
      while made.busy:
        for name, _ in made.step():
          if name % 4:
            made.release(name)
    assert compiled.take() == 0, compiled.names


def test_a_budget_below_the_smallest_piece_still_reads(params):
  made = engine(params, prefill_buckets=(8,), prefill_tokens=2)
  same(made.turn([Request(0, PROMPT, (0,))])[0], alone(params, PROMPT, (0,)))


def test_a_warm_up_in_the_middle_of_a_conversation_is_refused(params):
  made = engine(params)
  made.turn([Request(0, [3], (0,))])
  with pytest.raises(ValueError, match="1 conversations are open"):
    next(made.programs())[1]()
