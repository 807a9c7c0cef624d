"""What skills are like: do they parse, how long are they, how new, how near to a library, and what are they worth.

Shapes: B rows, T tokens, E episodes. Everything is a pure function on the host; texts that are "" are no skills and
count only where it says so. Shares are in [0, 1]; 0 where there is nothing to take a share of.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

NGRAM = 3  # words
# A word is a run of letters and digits; scripts that are written without spaces give one word a character.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")

Ngram = tuple[str, ...]


# ---- texts


def words(text: str) -> list[str]:
  """The words of a text in compatible form (NFKC) and folded case; a text without any is one word, itself."""
  folded = unicodedata.normalize("NFKC", text).casefold()
  return _WORD.findall(folded) or folded.split()


def normalised(text: str) -> str:
  """The text as words alone: two skills are the same if only case, marks and spaces differ."""
  return " ".join(words(text))


def ngrams(text: str, n: int = NGRAM) -> set[Ngram]:
  """The distinct runs of n words; all words as one run where there are fewer; nothing of an empty text."""
  found = words(text)
  return {tuple(found[i : i + n]) for i in range(max(len(found) - n, 0) + 1)} if found else set()


def coverage(text: str, known: set[Ngram], n: int = NGRAM) -> float:
  """Share of the distinct n-grams of a text that are in `known`; 0 for an empty text."""
  own = ngrams(text, n)
  return len(own & known) / len(own) if own else 0.0


def distinct_count(texts: Iterable[str]) -> int:
  """How many different skills there are, by normalised text."""
  return len({normalised(text) for text in texts if text})


def overlap(texts: Iterable[str], references: Iterable[str], n: int = NGRAM) -> float:
  """Mean over the skills of the share of their n-grams that occur in `references`, such as `Library.texts`."""
  known = set().union(*(ngrams(text, n) for text in references))
  return _mean([coverage(text, known, n) for text in texts if text])


def lengths(texts: Iterable[str], tokens: Callable[[str], int] | None = None) -> dict[str, float]:
  """Mean and largest length of the skills: in tokens by `tokens(text)`, in words without it."""
  sizes = [tokens(text) if tokens else len(words(text)) for text in texts if text]
  return {"length": _mean(sizes), "length_max": float(max(sizes, default=0))}


def parse_rate(trajectories: Sequence[Any]) -> float:
  """Share of the analysed episodes (with turns, not broken off) that have a skill."""
  readable = [t for t in trajectories if t.turns and not t.error]
  return _mean([bool(t.skill) for t in readable])


def agreement(one: Sequence[str], other: Sequence[str]) -> float:
  """Share of the places where both have a skill at which it is the same by normalised text: how much of a control with
  another episode's skill is no control, since both episodes had the same to say.
  """
  pairs = [(a, b) for a, b in zip(one, other, strict=True) if a and b]
  return _mean([normalised(a) == normalised(b) for a, b in pairs])


# ---- novelty


@dataclasses.dataclass
class Seen:
  """The skills of earlier iterations. `add` them in any order: what is novel depends on the set alone."""

  texts: set[str] = dataclasses.field(default_factory=set)
  known: set[Ngram] = dataclasses.field(default_factory=set)
  n: int = NGRAM

  def add(self, texts: Iterable[str]) -> None:
    """Counts these skills as seen from now on."""
    for text in texts:
      if text:
        self.texts.add(normalised(text))
        self.known |= ngrams(text, self.n)


def novelty(texts: Iterable[str], seen: Seen) -> dict[str, float]:
  """Of the skills of an iteration, against those of earlier ones: the share whose normalised text is new (`novel`), and
  the mean share of their n-grams that are new (`novel_ngrams`): a new place in an old sentence makes a text new, but
  few of its n-grams. Does not change `seen`.
  """
  texts = [text for text in texts if text]
  new = [normalised(text) not in seen.texts for text in texts]
  return {"novel": _mean(new), "novel_ngrams": _mean([1 - coverage(text, seen.known, seen.n) for text in texts])}


def measure(
  trajectories: Sequence[Any],
  seen: Seen,
  *,
  tokens: Callable[[str], int] | None = None,
  references: Iterable[str] = (),
  prefix: str = "skill_",
) -> dict[str, float]:
  """All measures of the skills of one iteration's episodes, for its row of metrics. Does not change `seen`.

  Keys after the prefix: parse_rate, length, length_max, distinct, novel, novel_ngrams, and overlap where there are
  references.
  """
  texts = [t.skill for t in trajectories]
  found = {"parse_rate": parse_rate(trajectories), **lengths(texts, tokens), "distinct": float(distinct_count(texts))}
  found |= novelty(texts, seen)
  references = list(references)
  if references:
    found["overlap"] = overlap(texts, references)
  return {prefix + name: value for name, value in found.items()}


# ---- what a skill is worth


def log_prob_gain(*, logprobs, skill_logprobs, mask, won) -> dict[str, float]:
  """The log-probability that the skill adds to the actions of successful episodes:

    gain = sum m w (l_skill - l) / sum m w,   w = 1 in episodes that were won

  and `positive`, the share of those tokens that it makes likelier; both 0 where there is none (`tokens` 0). The skill
  was written from these very actions, so a gain of 0 means that the policy does not read it.

  Args:
    logprobs, skill_logprobs: [B, T], log pi of the sampled tokens, ordinary and skill context.
    mask: [B, T], 1 where a response token counts and has a skill context.
    won: [B], or [B, T] where a row holds tokens of several episodes.

  Raises ValueError for other shapes, or where a counted number is not finite.
  """
  gain, counted = _gain(logprobs, skill_logprobs, mask)
  won = np.asarray(won, bool)
  if won.shape not in (gain.shape, gain.shape[:1]):
    raise ValueError(f"won has shape {list(won.shape)}; needed is {list(gain.shape)} or {list(gain.shape[:1])}")
  found = gain[counted & (won if won.ndim == 2 else won[:, None])]
  return {"gain": _mean(found), "positive": _mean(found > 0), "tokens": float(found.size)}


def gain_by_episode(*, logprobs, skill_logprobs, mask, episode, num_episodes: int) -> np.ndarray:
  """float64[E]: mean of l_skill - l over the counted tokens of each episode, NaN for an episode without any.

  `episode` is int[B] or int[B, T], the episode that a row, or a token, belongs to; where mask is 0 it may be anything.
  Other arguments and errors as in `log_prob_gain`; ValueError also for a counted episode outside [0, num_episodes).
  """
  gain, counted = _gain(logprobs, skill_logprobs, mask)
  episode = np.asarray(episode)
  if episode.shape not in (gain.shape, gain.shape[:1]) or episode.dtype.kind not in "iu":
    raise ValueError(f"episode is {episode.dtype}{list(episode.shape)}; needed are integers {list(gain.shape)} or [B]")
  index = np.broadcast_to(episode if episode.ndim == 2 else episode[:, None], gain.shape)[counted]
  if index.size and not 0 <= index.min() <= index.max() < num_episodes:
    raise ValueError(f"episodes {index.min()} to {index.max()} are not all in [0, {num_episodes})")
  sums = np.bincount(index, gain[counted], minlength=num_episodes)
  counts = np.bincount(index, minlength=num_episodes)
  return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _gain(logprobs, skill_logprobs, mask) -> tuple[np.ndarray, np.ndarray]:
  """l_skill - l, float64[B, T], 0 where it does not count; and where it does, bool[B, T]."""
  ordinary, skill, mask = (np.asarray(each) for each in (logprobs, skill_logprobs, mask))
  if ordinary.ndim != 2 or not ordinary.shape == skill.shape == mask.shape:
    shapes = f"{list(ordinary.shape)}, {list(skill.shape)} and {list(mask.shape)}"
    raise ValueError(f"logprobs, skill_logprobs and mask have shapes {shapes}; needed is one shape [B, T]")
  counted = mask > 0
  gain = np.zeros(ordinary.shape, np.float64)
  gain[counted] = skill[counted].astype(np.float64) - ordinary[counted].astype(np.float64)
  if not np.isfinite(gain).all():
    raise ValueError(f"{(~np.isfinite(gain)).sum()} of {counted.sum()} counted tokens have no finite gain")
  return gain, counted


def _mean(values) -> float:
  return float(np.mean(values)) if len(values) else 0.0
