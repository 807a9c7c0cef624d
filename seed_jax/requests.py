"""What goes into the engine and comes out of it, and what it counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

COORDINATES = 5  # integers that name a request within its run


@dataclasses.dataclass(frozen=True)
class Request:
  """The next tokens of a conversation, to be answered. Its `coordinates` (at most 5 integers) say where in the run it
  stands: they seed its samples.
  """

  conversation: Hashable
  tokens: Sequence[int]
  coordinates: tuple[int, ...]
  fresh: bool = True  # the conversation begins (anew); False: it goes on from the cache of its last turn
  keep: bool = True  # its cache is needed after the response; False: the slot is free for others
  max_new: int | None = None  # None: the engine's
  temperature: float | None = None  # None: the engine's
  stop_strings: bool = True  # whether the engine's find_stop applies


@dataclasses.dataclass(frozen=True)
class Completion:
  """Sampled token ids [n] (with the stop token, if one was sampled), their log-probabilities [n], and why sampling
  ended.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  stopped: bool  # by a stop token or stop string; False: the token limit or a full slot


@dataclasses.dataclass
class Stats:
  """What the engine has done since `Engine.take_stats`."""

  tokens_sampled: int = 0
  tokens_prefilled: int = 0  # computed
  tokens_padded: int = 0  # computed, with the padding of the calls
  tokens_reused: int = 0  # taken over from a cache instead of computed
  decode_steps: int = 0
  slot_steps: int = 0  # decode steps times slots of the program
  decoded: int = 0  # tokens sampled by decode steps (the first of a response comes from its prefill)

  @property
  def utilisation(self) -> float:
    """Share of the decoded slots that held a request: the others were padding."""
    return self.decoded / self.slot_steps if self.slot_steps else 1.0


def bucket(size: int, buckets: Sequence[int]) -> int:
  """The smallest bucket that holds `size`; ValueError with the numbers if none does."""
  for b in sorted(buckets):
    if size <= b:
      return b
  raise ValueError(f"{size} does not fit the largest bucket {max(buckets)}")


def geometric(smallest: int, largest: int, factor: int = 2) -> tuple[int, ...]:
  """smallest, factor * smallest, ... and `largest` itself."""
  sizes = []
  while smallest < largest:
    sizes.append(smallest)
    smallest *= factor
  return (*sizes, largest)
