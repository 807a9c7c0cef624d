"""What the host knows of the slots of a cache: their tokens, how many are read, and who begins like a new prompt.

Shapes: S slots, C capacity of a slot. Slots lie in equal blocks over the row shards of the mesh; a prefix can be taken
over within a shard only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


class SlotTable:
  """S slots of C tokens over `shards` row shards; the device's cache follows it, never the other way round."""

  def __init__(self, size: int, capacity: int, shards: int):
    self.size, self.capacity, self.shards = size, capacity, shards
    self.content = np.zeros((size, capacity), np.int32)  # tokens that are read, or will be once the request is
    self.length = np.zeros(size, np.int32)  # tokens in the cache
    self.read = np.zeros(size, np.int32)  # of them, those that no stop string takes back
    self.planned = np.zeros(size, np.int32)  # what `read` will be once the slot's request is read
    self.used = np.zeros(size, np.int64)  # when a request last entered
    self.clock = 0

  def shard(self, slot: int) -> int:
    """The row shard that holds a slot."""
    return slot * self.shards // self.size

  def begin(self, slot: int, prefix: Sequence[int]) -> None:
    """The slot holds this prefix and nothing else."""
    self.content[slot, : len(prefix)] = prefix
    self.length[slot] = self.read[slot] = len(prefix)

  def plan(self, slot: int, tokens: Sequence[int]) -> None:
    """These tokens will be read behind what the slot holds."""
    at = int(self.length[slot])
    self.content[slot, at : at + len(tokens)] = tokens
    self.planned[slot] = at + len(tokens)
    self.clock += 1
    self.used[slot] = self.clock

  def advance(self, slot: int, count: int) -> None:
    """So many of the planned tokens have been read."""
    self.length[slot] += count
    self.read[slot] = self.length[slot]

  def respond(self, slot: int, response: Sequence[int], length: int) -> None:
    """The slot holds `length` tokens, those behind the prompt from the response so far."""
    self.length[slot] = length
    self.content[slot, self.read[slot] : length] = response[: length - self.read[slot]]

  def rest(self, slot: int) -> None:
    """The slot's request has ended: nothing more will be read."""
    self.planned[slot] = self.read[slot]

  def longest_prefix(self, prompt: Sequence[int], free: Collection[int], shortest: int) -> tuple[int, int, int]:
    """(slot, tokens of the prompt that it has read, tokens that some slot will have read once its request is).

    Only slots of shards with a free slot count: a prefix is copied within its shard. Fewer tokens than `shortest` count
    as none.
    """
    if not len(prompt) or not self.size:
      return 0, 0, 0
    differs = self.content[:, : len(prompt)] != np.asarray(prompt)
    same = np.where(differs.any(axis=1), differs.argmax(axis=1), len(prompt))
    near = np.isin(np.arange(self.size) * self.shards // self.size, [self.shard(s) for s in free])
    same = np.where(near, same, 0)
    ready = np.minimum(same, self.read)
    ready = np.where(ready >= shortest, ready, 0)
    elsewhere = ~np.isin(np.arange(self.size), list(free))  # of equal prefixes the one that needs no copy
    slot = int(np.lexsort((elsewhere, -ready))[0])
    return slot, int(ready[slot]), int(np.minimum(same, self.planned).max())

  def oldest(self, free: Collection[int], like: int | None) -> int:
    """The free slot, in the shard of slot `like` if that is given, whose tokens were asked for longest ago; of equal
    ones the shards get theirs in turn.
    """
    near = [s for s in free if like is None or self.shard(s) == self.shard(like)]
    return min(near, key=lambda s: (self.used[s], s % (self.size // self.shards), s))

  def moved(self, kept: Sequence[int], size: int) -> tuple[SlotTable, np.ndarray]:
    """A table of another size with the kept slots dealt to the shards in turn, and their new numbers."""
    new = SlotTable(size, self.capacity, self.shards)
    each = size // self.shards
    place = np.asarray([(i % self.shards) * each + i // self.shards for i in range(len(kept))], np.int32)
    for name in ("content", "length", "read", "planned", "used"):
      getattr(new, name)[place] = getattr(self, name)[list(kept)]
    new.clock = self.clock
    return new, place
