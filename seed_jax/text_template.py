"""Tokenizers with a chat template: a Hugging Face directory, or the one inside a GGUF file.

The template is rendered once, at load, with a mark in the place of the user's text. What is left is a list of control
ids and of plain text; a message is put into the plain text and encoded with control tokens switched off. So the ids
are those of `apply_chat_template`, the text of a message can never open or close a turn, and no conversation is ever
rendered again.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable

OPTIONS = "seed_tokenizer.json"  # how the template is called, kept beside it: a model is trained on both
USER, ASSISTANT = (
  "\ue000user\ue000",
  "\ue000assistant\ue000",
)  # marks in a rendered template; private use, so in no template
PROBES = ("probe", " two\n\nlines: a1 ", "\n", "x <y> 'z'\n\n")  # what `_verify` encodes both ways


class TemplateTokenizer:
  """Text <-> ids under a chat template; see `text.Tokenizer` for the contract.

  Args:
    tokenizer: a `transformers` fast tokenizer. Its backend is switched to treat control tokens in text as text.
    system: a system message; None leaves it to the template, which may have one of its own (SmolLM2, Qwen2.5).
    template_options: variables of the template, e.g. `{"enable_thinking": False}` (Qwen3).
    stop_ids: further ids that end a response, besides the template's own end of turn.
    where: the path, for messages.

  Raises ValueError where there is no template, or one whose turns do not end in a control token.
  """

  def __init__(
    self,
    tokenizer,
    *,
    system: str | None = None,
    template_options: dict | None = None,
    stop_ids=(),
    where: str = "tokenizer",
  ):
    self.hf = tokenizer
    self.where = where
    self.system = system
    self.template_options = dict(template_options or {})
    self._backend = tokenizer.backend_tokenizer
    self._backend.no_truncation()
    self._backend.no_padding()
    if not tokenizer.chat_template:
      raise ValueError(f"{where} has no chat template; give one with chat_template=")
    added = self._backend.get_added_tokens_decoder()
    self._special = frozenset(token_id for token_id, token in added.items() if token.special)
    self._added = {token.content: token_id for token_id, token in added.items()}
    # Leftmost and longest, as the tokenizer itself finds them.
    self._pattern = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
    self._special_pattern = re.compile(
      "|".join(re.escape(text) for text, token_id in self._added.items() if token_id in self._special) or r"(?!)"
    )

    opening = self._render([{"role": "user", "content": USER}])
    whole = self._render(
      [{"role": "user", "content": "u"}, {"role": "assistant", "content": ASSISTANT}, {"role": "user", "content": USER}]
    )
    if whole.count(ASSISTANT) != 1:
      raise ValueError(f"{where}: the chat template does not show an assistant's message exactly once")
    after = whole.split(ASSISTANT)[1]
    end = self._pattern.search(after)
    if end is None or after[: end.start()].strip() or self._added[end[0]] not in self._special:
      raise ValueError(
        f"{where}: the chat template does not end an assistant's turn with a control token, so ids cannot be kept"
      )
    self.eos_id: int = self._added[end[0]]
    self.stop_ids: tuple[int, ...] = tuple(
      dict.fromkeys(i for i in (self.eos_id, tokenizer.eos_token_id, *stop_ids) if i is not None)
    )
    self.pad_id: int = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
    self._strips = f" {USER} " not in self._render([{"role": "user", "content": f" {USER} "}])
    self._opening = self._pieces(opening)
    self._continuation = self._pieces(after[end.end() :])
    self._verify(opening)
    self._backend.encode_special_tokens = True

  def encode(self, text: str) -> list[int]:
    """The ids of plain text; control tokens that it spells out are encoded as text."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair becomes "?"
    ids = self._backend.encode(text, add_special_tokens=False).ids
    if self._special.isdisjoint(ids):
      return ids
    # A vocabulary may reach a control token from its letters; then the word is cut in two so that it cannot.
    cuts = [match.start() + 1 for match in self._special_pattern.finditer(text)]
    parts = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [
      i for part in parts for i in self._backend.encode(part, add_special_tokens=False).ids if i not in self._special
    ]

  def decode(self, ids: Iterable[int]) -> str:
    """The text of response ids, without control tokens; ids of padded rows give nothing, broken UTF-8 gives U+FFFD."""
    return self._backend.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True)

  def first(self, user: str) -> list[int]:
    """The template up to and including the assistant's header, with `user` as the only message."""
    return self._fill(self._opening, user)

  def following(self, user: str, *, ended: bool = True) -> list[int]:
    """The ids between a response and the next: the rest of the turn's end, `user`, the assistant's header.

    `ended=False` is for a response that was cut off before its end-of-turn token; the token is put first.
    """
    return ([] if ended else [self.eos_id]) + self._fill(self._continuation, user)

  def save(self, directory) -> None:
    """Writes tokenizer.json and the like, the template, and how it is called."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    self.hf.save_pretrained(directory)
    options = {"system": self.system, "template_options": self.template_options, "stop_ids": list(self.stop_ids)}
    (directory / OPTIONS).write_text(json.dumps(options, indent=2) + "\n", "utf-8")

  def _fill(self, pieces: list[int | str], user: str) -> list[int]:
    user = user.strip() if self._strips else user
    ids: list[int] = []
    for piece in pieces:
      ids.extend([piece] if isinstance(piece, int) else self.encode(piece.replace(USER, user)))
    return ids

  def _pieces(self, rendered: str) -> list[int | str]:
    """Rendered template -> control ids and plain text in order; the user's mark is in one of the texts."""
    if rendered.count(USER) != 1:
      raise ValueError(f"{self.where}: the chat template does not show the user's message exactly once")
    pieces, start = [], 0
    for match in self._pattern.finditer(rendered):
      pieces += [rendered[start : match.start()], self._added[match[0]]]
      start = match.end()
    return [piece for piece in [*pieces, rendered[start:]] if piece != ""]

  def _render(self, messages: list[dict]) -> str:
    from jinja2 import TemplateError

    if self.system is not None:
      messages = [{"role": "system", "content": self.system}, *messages]
    try:
      return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self.template_options)
    except TemplateError as error:
      raise ValueError(f"{self.where}: the chat template refuses a conversation: {error}") from error

  def _verify(self, opening: str) -> None:
    """Pieces encoded apart must be what the tokenizer makes of the whole; one that adds a space to each text fails."""
    for probe in PROBES:
      text = probe.strip() if self._strips else probe
      if self.first(probe) != self._backend.encode(opening.replace(USER, text), add_special_tokens=False).ids:
        raise ValueError(f"{self.where}: text between control tokens is encoded differently on its own; not supported")


def from_hf(path: pathlib.Path, *, chat_template: str | None = None, **options) -> TemplateTokenizer:
  """The tokenizer of a local Hugging Face directory; nothing is downloaded and no code of the directory is run."""
  from transformers import AutoTokenizer

  tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
  if not tokenizer.is_fast:
    raise ValueError(f"{path} has no tokenizer.json; only fast tokenizers are supported")
  tokenizer.chat_template = chat_template or tokenizer.chat_template
  saved, generation = _json(path / OPTIONS), _json(path / "generation_config.json")
  eos = generation.get("eos_token_id")
  stops = [*saved.get("stop_ids", ()), *(eos if isinstance(eos, list) else [eos])]
  options = {
    name: saved.get(name) if options.get(name) is None else options[name] for name in ("system", "template_options")
  }
  return TemplateTokenizer(tokenizer, **options, stop_ids=stops, where=str(path))


def from_gguf(path: pathlib.Path, *, chat_template: str | None = None, **options) -> TemplateTokenizer:
  """The byte-level BPE tokenizer inside a GGUF file; ValueError for another kind or an unknown way to split words."""
  import tokenizers
  from transformers import PreTrainedTokenizerFast

  from seed_jax.models import gguf_file

  reader = gguf_file.reader(path)

  def get(key, default=None):
    return gguf_file.value(reader, f"tokenizer.{key}", default)

  model, split = get("ggml.model"), get("ggml.pre", "default")
  if model != "gpt2" or split not in SPLITS:
    raise ValueError(f"{path}: tokenizer {model}/{split} is not supported; supported: gpt2/{', gpt2/'.join(SPLITS)}")
  tokens, kinds = get("ggml.tokens"), get("ggml.token_type")
  merges = [tuple(merge.split(" ")) for merge in get("ggml.merges")]
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
  )
  backend.pre_tokenizer = _split(split)
  backend.decoder = tokenizers.decoders.ByteLevel()
  # token_type 3 is a control token, 4 one that a user added (plain text, but always one token).
  backend.add_special_tokens(
    [tokenizers.AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == 3]
  )
  backend.add_tokens(
    [tokenizers.AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == 4]
  )
  names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
  ids = {name: get(f"ggml.{key}_token_id") for name, key in names.items()}
  tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend,
    chat_template=chat_template or get("chat_template"),
    clean_up_tokenization_spaces=False,
    **{name: tokens[i] for name, i in ids.items() if i is not None},
  )
  return TemplateTokenizer(tokenizer, **options, stop_ids=[get("ggml.eot_token_id")], where=str(path))


# llama.cpp's name for the way to cut text before BPE -> the expression, where it is not GPT-2's (`smollm` cuts single
# digits first).
QWEN2_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {"smollm": None, "gpt-2": None, "default": None, "qwen2": QWEN2_SPLIT}


def _split(name: str):
  from tokenizers import Regex
  from tokenizers import pre_tokenizers as pre

  if SPLITS[name] is not None:
    return pre.Sequence(
      [pre.Split(Regex(SPLITS[name]), "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
  byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=True)
  return pre.Sequence([pre.Digits(individual_digits=True), byte_level]) if name == "smollm" else byte_level


def _json(path: pathlib.Path) -> dict:
  return json.loads(path.read_text("utf-8")) if path.exists() else {}
