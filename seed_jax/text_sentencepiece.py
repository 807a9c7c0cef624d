"""A small vocabulary trained on the spot, with a compact chat format of its own.

A conversation is `<|user|> text <|assistant|> response <|end|> <|user|> text <|assistant|> ...`: one token each. Text
is cut at line ends and at the caller's symbols, which are tokens of their own, and each part is encoded by itself; so
a word is the same piece at the start of a line as inside it, and any text comes back as it was (save U+2581, with
which sentencepiece writes a space).
"""

from __future__ import annotations

import collections
import functools
import io
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Sequence

MODEL, OPTIONS = "spm.model", "seed_tokenizer.json"
PAD, END, UNKNOWN, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>"
NEWLINE = "\n"
WORD = re.compile(r"[^\W\d_]+|\d+|.")
SPACE = "\u2581"  # how sentencepiece writes a space


class SentencePieceTokenizer:
  """Text <-> ids of a directory with `spm.model`; see `text.Tokenizer` for the contract."""

  def __init__(self, directory):
    import sentencepiece

    directory = pathlib.Path(directory)
    options = json.loads((directory / OPTIONS).read_text("utf-8"))
    self._proto = (directory / MODEL).read_bytes()
    self._options = options
    self._pieces = sentencepiece.SentencePieceProcessor(model_proto=self._proto)
    self._symbols = {symbol: self._id(symbol, directory) for symbol in options["symbols"]}
    self._texts = {token_id: symbol for symbol, token_id in self._symbols.items()}
    self._pattern = _splitter(options["symbols"])
    self.vocab_size: int = self._pieces.vocab_size()
    self.pad_id, self.eos_id = self._id(PAD, directory), self._id(END, directory)
    self.stop_ids: tuple[int, ...] = (self.eos_id,)
    # environments say the same things over and over, and the segmentation of a line takes a good part of a millisecond
    self._encoded = functools.lru_cache(maxsize=1 << 15)(self._encode)
    self._user, self._assistant = self._id(USER, directory), self._id(ASSISTANT, directory)

  def encode(self, text: str) -> list[int]:
    """The ids of plain text; `<|end|>` and the like in it are ordinary characters."""
    return list(self._encoded(text))

  def _encode(self, text):
    parts = self._pattern.split(text.encode("utf-8", "replace").decode("utf-8"))  # half a surrogate pair becomes "?"
    encoded = iter(self._pieces.encode([part for part in parts[::2] if part]))
    ids: list[int] = []
    for i, part in enumerate(parts):
      if i % 2:
        ids.append(self._symbols[part])
      elif part:
        ids.extend(next(encoded))
    return tuple(ids)

  def decode(self, ids: Iterable[int]) -> str:
    """The text of response ids, without control tokens."""
    parts: list[str] = []
    run: list[int] = []
    for token_id in map(int, ids):
      if token_id in self._texts:
        parts += [self._pieces.decode(run), self._texts[token_id]]
        run = []
      elif 0 <= token_id < self.vocab_size and not self._pieces.is_control(token_id):
        run.append(token_id)
    return "".join([*parts, self._pieces.decode(run)])

  def first(self, user: str) -> list[int]:
    """The opening of a conversation with `user` as its only message."""
    return [self._user, *self.encode(user), self._assistant]

  def following(self, user: str, *, ended: bool = True) -> list[int]:
    """The ids between two responses; `ended=False` puts the end of turn first, for a response that was cut off."""
    return ([] if ended else [self.eos_id]) + self.first(user)

  def save(self, directory) -> None:
    """Writes `spm.model` and the list of symbols."""
    _write(directory, self._proto, self._options)

  def _id(self, piece: str, directory) -> int:
    token_id = self._pieces.piece_to_id(piece)
    if token_id == self._pieces.unk_id():
      raise ValueError(
        f"{directory / MODEL} has no piece {piece!r}; it was not made by seed_jax.text.train_sentencepiece"
      )
    return token_id


def train(
  texts: Iterable[str],
  path,
  *,
  vocab_size: int,
  symbols: Sequence[str] = (),
  phrases: Sequence[str] = (),
  byte_fallback: bool = True,
) -> SentencePieceTokenizer:
  """Trains a unigram vocabulary of at most `vocab_size` pieces on `texts`, writes it to `path`, and loads it.

  The seeds of the vocabulary are the whole words of the texts, so with room for all of them every word is one piece
  (a number may be its digits); what does not fit is spelled in characters, the rarest words first. The same texts, in
  any order, give the same file: one thread, no sampling.

  Args:
    texts: a corpus; only its counts of words matter.
    path: a directory.
    vocab_size: the most pieces, everything included; a small corpus gives fewer.
    symbols: strings that are always one token, such as the fixed parts of a reply in JSON. The line end is one already.
    phrases: several words that are one piece wherever they follow a space or start a text, such as a name and its
    number.
    byte_fallback: 256 pieces for single bytes, so that any text comes back as it was. Without them (for vocabularies
      of about 300) all printable ASCII is kept, and another character that the texts do not have is read as unknown,
      which decodes to " ⁇ ".

  Raises ValueError where `vocab_size` has no room for the characters and symbols.
  """
  import sentencepiece

  symbols = list(dict.fromkeys([NEWLINE, *symbols]))
  whole = [SPACE + phrase.replace(" ", SPACE) for phrase in dict.fromkeys(phrases)]
  splitter = _splitter(symbols)
  counts = collections.Counter(
    word for text in texts for part in splitter.split(text)[::2] for word in part.split(" ") if word
  )
  seeds: collections.Counter = collections.Counter()
  for word, count in list(counts.items()):
    parts = WORD.findall(word)
    for i, part in enumerate(parts):
      seeds[SPACE * (i == 0) + part] += count
    if len(parts) > 1 and word[0].isalpha():
      # "1," and "closed." as one piece, where there is room: sequences get a quarter shorter. The bare word counts as
      # often, so that it stays a piece though it may never have stood alone.
      seeds[SPACE + word] += count
      counts[parts[0]] += count
  if not counts:
    raise ValueError("there is no word to train a vocabulary on")
  characters = set("".join(counts)) | ({chr(code) for code in range(33, 127)} if not byte_fallback else set())
  characters -= set(symbols)
  least = 5 + len(symbols) + len(whole) + len(characters) + 1 + 256 * byte_fallback
  if least > vocab_size:
    hint = "; byte_fallback=False saves 256" if byte_fallback else ""
    raise ValueError(
      f"vocab_size={vocab_size} has no room: control tokens, {len(symbols)} symbols, characters take {least}{hint}"
    )
  model = io.BytesIO()
  with tempfile.TemporaryDirectory() as temporary:
    # Without given seeds, sentencepiece takes repeated substrings of the corpus and misses words that never vary.
    file = pathlib.Path(temporary, "seeds.tsv")
    file.write_text("".join(f"{seed}\t{seeds[seed]}\n" for seed in sorted(seeds)), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([f"{word}\t{counts[word]}" for word in sorted(counts)]),
      input_format="tsv",
      seed_sentencepieces_file=str(file),
      model_writer=model,
      model_type="unigram",
      vocab_size=vocab_size,
      hard_vocab_limit=False,
      byte_fallback=byte_fallback,
      required_chars="".join(sorted(characters)),
      character_coverage=1.0,
      max_sentencepiece_length=64,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      split_by_unicode_script=False,
      add_dummy_prefix=True,
      num_threads=1,
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      pad_piece=PAD,
      eos_piece=END,
      unk_piece=UNKNOWN,
      control_symbols=[USER, ASSISTANT],
      user_defined_symbols=symbols + whole,
      minloglevel=2,
    )
  _write(path, _without_paths(model.getvalue()), {"format": "sentencepiece-chat-1", "symbols": symbols})
  return SentencePieceTokenizer(path)


def _without_paths(proto: bytes) -> bytes:
  """The trainer notes the name of the temporary file of seeds; without it equal texts give equal files."""
  from sentencepiece import sentencepiece_model_pb2

  model = sentencepiece_model_pb2.ModelProto.FromString(proto)
  model.trainer_spec.ClearField("seed_sentencepieces_file")
  return model.SerializeToString(deterministic=True)


def _splitter(symbols: Sequence[str]) -> re.Pattern:
  return re.compile("(" + "|".join(map(re.escape, sorted(symbols, key=len, reverse=True))) + ")")


def _write(directory, proto: bytes, options: dict) -> None:
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  contents = {OPTIONS: (json.dumps(options, indent=2) + "\n").encode(), MODEL: proto}
  for name, content in contents.items():
    temporary = directory / f".{name}.{os.getpid()}"
    temporary.write_bytes(content)
    temporary.replace(directory / name)
