"""Text <-> token ids, and what a prompt may lose when it is too long.

Token in, token out: `first(u1) + sampled ids + following(u2) + sampled ids + ...` *is* the token sequence of a
conversation. What was sampled is never decoded and encoded again, and a message is only ever text: control tokens
that it spells out are not honoured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from seed_jax import text_sentencepiece, text_template
from seed_jax.models import hf
from seed_jax.text_sentencepiece import train as train_sentencepiece

__all__ = ["Tokenizer", "find_stop", "load_tokenizer", "train_sentencepiece", "truncate_prompt"]

# Where a prompt states the task, and where what must stay whole at its end begins.
TASK_ANCHORS = ("Your task is to:", "Your current task is:", "Your task is:", "Your question:", "Your goal is")
TAIL_ANCHORS = ("You are now at step", "Your current observation", "Now it's your turn")
PIECE = re.compile(r"(?=\[Observation \d+)|(?=\[Action \d+)|(?=Step \d+:)|(?<=\n)")  # places where a history may be cut


@runtime_checkable
class Tokenizer(Protocol):
  """What every tokenizer here is."""

  vocab_size: int  # ids are below it; a model may have more rows than that
  eos_id: int  # ends an assistant's turn
  pad_id: int  # may equal eos_id: a mask comes from positions, never from values
  stop_ids: tuple[int, ...]  # any of them ends a response; eos_id first

  def encode(self, text: str) -> list[int]:
    """The ids of plain text."""

  def decode(self, ids: Iterable[int]) -> str:
    """The text of response ids, without control tokens such as the end of turn."""

  def first(self, user: str) -> list[int]:
    """The opening of a conversation, up to the assistant's header, with `user` as its only user message."""

  def following(self, user: str, *, ended: bool = True) -> list[int]:
    """What stands between two responses; `ended=False` if the first was cut off before its end of turn."""

  def save(self, directory) -> None:
    """Writes the files from which `load_tokenizer` gives the same tokenizer."""


def load_tokenizer(
  path, *, system: str | None = None, template_options: dict | None = None, chat_template: str | None = None
) -> Tokenizer:
  """The tokenizer at `path`: a directory with `spm.model`, a Hugging Face directory, a `.gguf` file or its directory.

  `system`, `template_options` (such as `{"enable_thinking": False}` for Qwen3) and `chat_template` are for tokenizers
  with a chat template; what is not given comes from the directory, where `save` keeps the first two. Raises
  FileNotFoundError, or ValueError for a kind of tokenizer that is not supported.
  """
  options = {"system": system, "template_options": template_options, "chat_template": chat_template}
  with hf.local_copy(path) as local:
    if not local.exists():
      raise FileNotFoundError(f"no such tokenizer: {path}")
    if local.is_dir() and (local / text_sentencepiece.MODEL).exists():
      if any(value is not None for value in options.values()):
        raise ValueError(
          f"{path} is a sentencepiece tokenizer: it has no chat template, system message or template options"
        )
      return text_sentencepiece.SentencePieceTokenizer(local)
    if local.is_dir() and any((local / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
      return text_template.from_hf(local, **options)
    found = local if local.is_file() else hf.find_gguf(local)
    if found is None or found.suffix != ".gguf":
      raise FileNotFoundError(
        f"{path} has no tokenizer: no {text_sentencepiece.MODEL}, no tokenizer.json and no .gguf file"
      )
    return text_template.from_gguf(found, **options)


def find_stop(tokenizer: Tokenizer, ids: Sequence[int], stop_strings: Sequence[str]) -> int | None:
  """The number of leading ids to keep so that their text has the first stop string whole; None if there is none in it.

  Text grows with the ids, so the place is found by bisection: a few decodings whatever the length.
  """
  ids, stop_strings = list(ids), [stop for stop in stop_strings if stop]

  def stopped(count: int) -> bool:
    text = tokenizer.decode(ids[:count])
    return any(stop in text for stop in stop_strings)

  return _least(stopped, len(ids)) if stopped(len(ids)) else None


def truncate_prompt(
  tokenizer: Tokenizer,
  prompt: str,
  max_tokens: int,
  *,
  anchors: Sequence[str] = TASK_ANCHORS,
  tail_anchors: Sequence[str] = TAIL_ANCHORS,
) -> str:
  """The prompt with its oldest history dropped until `tokenizer.first` of it has at most `max_tokens` ids.

  Kept in any case: everything up to the end of the line with the task (the first line with one of `anchors`), and
  everything from the first later line with one of `tail_anchors` (the current observation and what may be done);
  without such a line, the last line. Between them lies the history; it loses whole lines, or whole bracketed
  observations and actions, from its start. A prompt that fits comes back as it is. Raises ValueError with the numbers
  where nothing is left to drop, or no line states the task.
  """
  count = len(tokenizer.first(prompt))
  if count <= max_tokens:
    return prompt
  lines = prompt.splitlines(keepends=True)
  tasks = [i for i, line in enumerate(lines) if any(anchor in line for anchor in anchors)]
  if not tasks:
    raise ValueError(
      f"a prompt of {count} tokens exceeds {max_tokens}, and none of its lines has the task ({' | '.join(anchors)})"
    )
  # A model may quote the anchor in its history; the task is stated before that.
  start = tasks[0] + 1
  tails = [i for i in range(start, len(lines)) if any(anchor in lines[i] for anchor in tail_anchors)]
  end = tails[0] if tails else max(start, len(lines) - 1)
  head, history, tail = ("".join(part) for part in (lines[:start], lines[start:end], lines[end:]))
  pieces = [piece for piece in PIECE.split(history) if piece]

  def shortened(dropped: int) -> str:
    return head + "".join(pieces[dropped:]) + tail

  def fits(dropped: int) -> bool:
    return len(tokenizer.first(shortened(dropped))) <= max_tokens

  if not fits(len(pieces)):
    least = len(tokenizer.first(shortened(len(pieces))))
    raise ValueError(
      f"a prompt of {count} tokens exceeds {max_tokens}: task and current step alone take {least}; allow longer prompts"
    )
  return shortened(_least(fits, len(pieces)))


def _least(holds, limit: int) -> int:
  """The least n in 0..limit with holds(n), which must hold at limit and, once it holds, go on holding."""
  low, high = 0, limit
  while low < high:
    middle = (low + high) // 2
    if holds(middle):
      high = middle
    else:
      low = middle + 1
  return low
