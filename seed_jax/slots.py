"""The slots of a cache: what the host knows of their tokens, and the arrays on the device, which grow and shrink.

Shapes: S slots, C capacity of a slot. Slots lie in equal blocks over the row shards of the mesh; a prefix can be taken
over within a shard only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import numpy as np

from seed_jax import decode, sharding
from seed_jax.models.config import ModelConfig
from seed_jax.requests import bucket


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

  def begin(self, slot: int, prefix: Sequence[int], *, source: int) -> None:
    """The slot holds this prefix and nothing else. Where it is another slot's, it is copied when the slot's request is
    first read: until then what the slot held before lies there, and nobody may take that over.
    """
    self.content[slot, : len(prefix)] = prefix
    self.length[slot] = len(prefix)
    self.read[slot] = len(prefix) if source == slot else 0

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


class SlotCache:
  """The cache on the device and the table that says what it holds; both always of the same size."""

  def __init__(self, config: ModelConfig, mesh: jax.sharding.Mesh, capacity: int, rooms: Sequence[int] = ()):
    self.config, self.mesh, self.capacity = config, mesh, capacity
    self.rooms = (*sorted(r for r in rooms if r < capacity), capacity)  # tokens that slots may have room for
    self.cache, self.shape = None, (0, 0)  # slots, tokens of each
    self.clear()

  def clear(self) -> None:
    """No slot holds anything, and their number is open until the next `resize`."""
    self.table = SlotTable(0, self.capacity, sharding.num_row_shards(self.mesh))

  def take_empty(self, size: int, room: int | None = None) -> None:
    """So many empty slots, of the smallest room if none is given."""
    self.table = SlotTable(size, self.capacity, self.table.shards)
    shape = size, self.rooms[0] if room is None else room
    if self.shape != shape:
      self.cache = None  # freed before its successor is made
      self.cache, self.shape = decode.init_cache(self.config, *shape), shape

  def resize(self, kept: Sequence[int], size: int) -> dict[int, int]:
    """So many slots, those in `kept` among them: where each of these now is."""
    if not kept:
      self.take_empty(size)
      return {}
    self.table, place = self.table.moved(kept, size)
    index = np.zeros(size, np.int32)
    index[place] = kept
    self.cache = decode.take_slots(self.cache, sharding.put_replicated(index, self.mesh), self.config)
    self.shape = size, self.shape[1]
    return dict(zip(kept, place.tolist(), strict=True))

  def make_room(self, tokens: int) -> None:
    """Slots that hold so many tokens, or the capacity."""
    size, room = self.shape
    if room < min(tokens, self.capacity):
      room = bucket(min(tokens, self.capacity), self.rooms)
      self.cache, self.shape = decode.grow(self.cache, room), (size, room)

  def try_moves(self, sizes: Sequence[int]) -> None:
    """Compiles every way from the present shape to another number of slots or to a larger room."""
    for size in set(sizes) - {self.shape[0]}:
      decode.take_slots(self.cache, sharding.put_replicated(np.zeros(size, np.int32), self.mesh), self.config)
    for room in self.rooms:
      if room > self.shape[1]:
        decode.grow(self.cache, room)
