"""A vocabulary trained on the spot: whole words, exact round trips, one token a header, the same file every time."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_jax import text, text_sentencepiece

SYMBOLS = ('{"episode_summary": "', '", "episode_skill": "', '"}')
ROOMS = [
  "Your task is to: heat some potato and put it in fridge.\nYou see shelf 1, toiletpaperhanger 12.\n> go to fridge 1",
  'Nothing happens.\n{"episode_summary": "It looked in the fridge", "episode_skill": "Look in (fridge 1) first."}',
]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
  return text.train_sentencepiece(ROOMS * 20, tmp_path_factory.mktemp("pieces"), vocab_size=512, symbols=SYMBOLS)


def test_every_word_of_the_corpus_is_one_piece(pieces):
  assert pieces.vocab_size <= 512
  for word in "Your task is to heat some potato toiletpaperhanger fridge Look in first".split():
    assert len(pieces.encode(word)) == 1, word
    # The same piece at the start of a text, inside a line, at the start of a line, and after a symbol.
    (piece,) = pieces.encode(word)
    for before in ("heat ", "heat\n", SYMBOLS[0]):
      assert pieces.encode(before + word)[-1] == piece
  assert len(pieces.encode("go to fridge 1")) == 4
  for symbol in (*SYMBOLS, "\n"):
    assert len(pieces.encode(symbol)) == 1
  assert len(pieces.encode('{"episode_summary": "heat", "episode_skill": "Look"}')) == 5


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.one_of(st.text(), st.sampled_from([*SYMBOLS, *ROOMS, " ", "\n", "<|end|>"]))).map("".join))
def test_any_text_comes_back(pieces, message):
  message = message.replace(text_sentencepiece.SPACE, "")
  assert pieces.decode(pieces.encode(message)) == message


def test_its_conversation_is_one_token_a_header(pieces):
  user, assistant = pieces.first("")
  assert len({user, assistant, pieces.eos_id, pieces.pad_id}) == 4
  assert pieces.first("go\nto") == [user, *pieces.encode("go\nto"), assistant]
  assert pieces.following("it") == [user, *pieces.encode("it"), assistant]
  assert pieces.following("it", ended=False) == [pieces.eos_id, *pieces.following("it")]
  assert pieces.stop_ids == (pieces.eos_id,)
  assert isinstance(pieces, text.Tokenizer)
  response = [*pieces.encode("go to\nfridge 1"), pieces.eos_id]
  assert pieces.decode(np.array([*response, pieces.pad_id, 9999, -1])) == "go to\nfridge 1"
  assert pieces.decode(pieces.encode("\ud800")) == "?"


def test_its_control_tokens_are_text_in_a_message(pieces):
  control = {*pieces.first(""), pieces.eos_id, pieces.pad_id}
  for name in ("<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "<|unknown|>"):
    ids = pieces.encode(f"heat {name}it")
    assert not control & set(ids)
    assert pieces.decode(ids) == f"heat {name}it"


def test_training_is_reproducible_and_saved(pieces, tmp_path):
  again = text.train_sentencepiece(reversed(ROOMS * 20), tmp_path / "a", vocab_size=512, symbols=SYMBOLS)
  pieces.save(tmp_path / "b")
  for name in (text_sentencepiece.MODEL, text_sentencepiece.OPTIONS):
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
  assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["seed_tokenizer.json", "spm.model"]
  loaded = text.load_tokenizer(tmp_path / "b")
  for message in (*ROOMS, "漢", "<|end|>"):
    assert loaded.first(message) == pieces.first(message) == again.first(message)
  with pytest.raises(ValueError, match="sentencepiece tokenizer: it has no chat template"):
    text.load_tokenizer(tmp_path / "b", system="x")


def test_a_small_vocabulary_without_bytes(tmp_path):
  with pytest.raises(ValueError, match=r"vocab_size=200 has no room: .* take 29\d; byte_fallback=False saves 256"):
    text.train_sentencepiece(ROOMS, tmp_path, vocab_size=200, symbols=SYMBOLS)
  small = text.train_sentencepiece(ROOMS, tmp_path, vocab_size=200, symbols=SYMBOLS, byte_fallback=False)
  assert small.vocab_size <= 200
  printable = "".join(map(chr, range(32, 127)))
  assert small.decode(small.encode(printable)) == printable
  assert small.decode(small.encode("a漢b")) == "a \u2047 b", "the documented loss"
  with pytest.raises(ValueError, match="take 1"):
    text.train_sentencepiece(ROOMS, tmp_path, vocab_size=50, byte_fallback=False)
  with pytest.raises(ValueError, match="no word"):
    text.train_sentencepiece(["", "\n"], tmp_path, vocab_size=512)


def test_a_symbol_may_be_a_single_character(tmp_path):
  tokenizer = text.train_sentencepiece(ROOMS, tmp_path, vocab_size=200, symbols=("[", "]"), byte_fallback=False)
  assert len(tokenizer.encode("[fridge]")) == 3
  assert tokenizer.decode(tokenizer.encode("[fridge] [1]")) == "[fridge] [1]"


def test_a_word_glued_to_a_full_stop_is_a_piece_and_so_is_the_bare_word(tmp_path):
  tokenizer = text.train_sentencepiece(["it is closed.", "open it."] * 9, tmp_path, vocab_size=512)
  for word in ("closed.", "closed", "open", "it.", "it"):
    assert len(tokenizer.encode(word)) == 1, word


def test_what_does_not_fit_is_spelled_the_rarest_first(tmp_path):
  words = [f"{letter}{letter}word" for letter in "abcdefgh"]
  texts = [word for i, word in enumerate(words) for _ in range(3**i)]
  tight = text.train_sentencepiece(texts, tmp_path, vocab_size=105, byte_fallback=False)
  counts = [len(tight.encode(word)) for word in words]
  assert counts[0] > 1 and counts[-1] == 1


def test_a_foreign_model_is_refused(pieces, tmp_path):
  pieces.save(tmp_path)
  (tmp_path / text_sentencepiece.OPTIONS).write_text(json.dumps({"symbols": ["no such piece"]}))
  with pytest.raises(ValueError, match="no piece 'no such piece'; it was not made by"):
    text.load_tokenizer(tmp_path)
