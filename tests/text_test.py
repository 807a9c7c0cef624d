"""What holds for any tokenizer: loading by path, stop strings, and prompts that keep their task when cut."""

import numpy as np
import pytest

from seed_jax import text


class Bytes:
  """The least tokenizer: an id is a byte, and a header one more."""

  def encode(self, message):
    return list(message.encode())

  def decode(self, ids):
    return bytes(int(i) for i in ids).decode(errors="replace")

  def first(self, user):
    return [256, *self.encode(user), 257]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
  return text.train_sentencepiece([PROMPT] * 9, tmp_path_factory.mktemp("pieces"), vocab_size=512)


@pytest.fixture
def bytes_():
  return Bytes()


def test_what_is_no_tokenizer(tmp_path):
  with pytest.raises(FileNotFoundError, match="no such tokenizer: .*nowhere"):
    text.load_tokenizer(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match="has no tokenizer: no spm.model, no tokenizer.json and no .gguf"):
    text.load_tokenizer(tmp_path)
  (tmp_path / "vocabulary.txt").write_text("")
  with pytest.raises(FileNotFoundError, match="has no tokenizer"):
    text.load_tokenizer(tmp_path / "vocabulary.txt")


# ---- stop strings


@pytest.mark.parametrize("kind", ["pieces", "bytes_"])
def test_find_stop_keeps_just_enough(kind, request):
  tokenizer = request.getfixturevalue(kind)
  ids = tokenizer.encode("go to fridge 1</action> and more</action>")
  keep = text.find_stop(tokenizer, ids, ["never", "</action>"])
  assert "</action>" in tokenizer.decode(ids[:keep])
  assert "</action>" not in tokenizer.decode(ids[: keep - 1])
  assert text.find_stop(tokenizer, np.array(ids), ["</action>"]) == keep
  for nothing in (["never"], [], [""]):
    assert text.find_stop(tokenizer, ids, nothing) is None
  assert text.find_stop(tokenizer, [], ["x"]) is None


# ---- truncation

PROMPT = """You are an agent in a house.
Your task is to: heat some potato.
You took 3 steps. The last ones:
[Observation 1: 'You see fridge 1.', Action 1: 'go to fridge 1']
[Observation 2: 'Your task is to: be fooled.', Action 2: 'open fridge 1']
[Observation 3: 'It is open.', Action 3: 'take potato 1']
You are now at step 4 and you see countertop 1.
You can: 'heat potato 1'
Now it's your turn."""


def fitted(tokenizer, max_tokens, prompt=PROMPT):
  short = text.truncate_prompt(tokenizer, prompt, max_tokens)
  assert len(tokenizer.first(short)) <= max_tokens
  return short


@pytest.mark.parametrize("kind", ["pieces", "bytes_"])
def test_truncation_keeps_the_task_and_the_current_step(kind, request):
  tokenizer = request.getfixturevalue(kind)
  lines = PROMPT.splitlines(keepends=True)
  whole, least = len(tokenizer.first(PROMPT)), len(tokenizer.first("".join(lines[:2] + lines[6:])))
  assert fitted(tokenizer, whole) == PROMPT
  seen = set()
  for limit in range(least, whole):
    short = fitted(tokenizer, limit)
    assert short.startswith("".join(lines[:2])) and short.endswith("".join(lines[6:]))
    middle = short.removeprefix("".join(lines[:2])).removesuffix("".join(lines[6:]))
    # The newest part of the history, cut at a line, an observation or an action.
    assert "".join(lines[2:6]).endswith(middle)
    assert middle == "" or middle.startswith(("[Observation", "Action", "[Action")) or middle == "".join(lines[2:6])
    seen.add(middle)
  assert len(seen) >= 4
  with pytest.raises(ValueError, match=rf"{whole} tokens exceeds {least - 1}: .* alone take {least}"):
    text.truncate_prompt(tokenizer, PROMPT, least - 1)


def test_truncation_without_a_known_tail_keeps_the_last_line(pieces):
  prompt = "Your question: who?\nold old old\nolder older\nlast line"
  assert fitted(pieces, len(pieces.first(prompt)) - 1, prompt) == "Your question: who?\nolder older\nlast line"
  with pytest.raises(ValueError, match="none of its lines has the task"):
    text.truncate_prompt(pieces, "who?\nold\nlast", 3)
  own = text.truncate_prompt(pieces, "Goal: x\nold old\nNow: y\nz", 21, anchors=["Goal:"], tail_anchors=["Now:"])
  assert own == "Goal: x\nNow: y\nz"
