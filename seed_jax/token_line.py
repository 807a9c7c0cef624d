"""The sampled tokens of some batches in one line, and back to their places: for what looks at all tokens at once.

Shapes: M micro-batches, B rows, R response tokens of a row, as in every batch; n tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def gather(arrays: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> np.ndarray:
  """The values of arrays [M, B, R] where the bool[M, B, R] of `places` is true, end to end: [n]."""
  parts = [np.asarray(a)[place] for a, place in zip(arrays, places, strict=True)]
  return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def scatter(line: np.ndarray, places: Sequence[np.ndarray]) -> list[np.ndarray]:
  """What `gather` took up, back in arrays [M, B, R] with 0 elsewhere; of a longer line the first n values."""
  out, at = [], 0
  for place in places:
    count = int(place.sum())
    out.append(np.zeros(place.shape, line.dtype))
    out[-1][place] = line[at : at + count]
    at += count
  return out


def filled(line: np.ndarray, size: int, dtype=np.float32) -> np.ndarray:
  """[1, size]: the line and then 0, one shape for what is compiled. Raises ValueError where n > size."""
  if len(line) > size:
    raise ValueError(f"{len(line)} sampled tokens, but there is room for {size}")
  return np.pad(line.astype(dtype), (0, size - len(line)))[None]
