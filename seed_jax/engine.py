"""The engine between a host-side loop and the decode programs: slots keep a conversation's cache from turn to turn.

A turn is: new tokens of some conversations in, one response each out. All requests of a call advance together; a slot
whose episode has ended takes the next episode at the following call. Shapes are bucketed, so the number of compiled
programs is small and known.
Shapes: S slots, T new tokens, N sampled tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from seed_jax import decode, sharding
from seed_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Request:
  """New tokens for one slot. `fresh` empties the slot first; `coordinates` say where in the run this request stands
  (they seed its samples).
  """

  slot: int
  tokens: Sequence[int]
  coordinates: tuple[int, ...]
  fresh: bool = True


@dataclasses.dataclass(frozen=True)
class Completion:
  """Sampled token ids [n] (with the stop token, if one was sampled), their log-probabilities [n], and why sampling
  ended.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  stopped: bool  # by a stop token or stop string; False: the token limit or a full slot


def bucket(size: int, buckets: Sequence[int]) -> int:
  """The smallest bucket that holds `size`; ValueError with the numbers if none does."""
  for b in sorted(buckets):
    if size <= b:
      return b
  raise ValueError(f"{size} does not fit the largest bucket {max(buckets)}")


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
  """smallest, 2 * smallest, ... and `largest` itself."""
  sizes = []
  while smallest < largest:
    sizes.append(smallest)
    smallest *= 2
  return (*sizes, largest)


class Engine:
  """S slots of `capacity` tokens on `mesh`. `find_stop(ids) -> kept or None` cuts a response at a stop string (see
  text.py).
  """

  def __init__(
    self,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    *,
    num_slots: int,
    capacity: int,
    max_new: int,
    sampling: decode.Sampling,
    stop_ids: tuple[int, ...],
    seed: int,
    find_stop: Callable[[Sequence[int]], int | None] | None = None,
    check_every: int = 16,
    smallest: int = 16,
    prefill_buckets: Sequence[int] = (),
  ):
    rows = sharding.num_row_shards(mesh)
    smallest = max(smallest, rows)
    self.num_slots = -(-num_slots // rows) * rows
    self.slot_buckets = powers_of_two(min(smallest, self.num_slots), self.num_slots)
    self.token_buckets = (
      tuple(b for b in prefill_buckets if b < capacity) + (capacity,)
      if prefill_buckets
      else powers_of_two(min(16, capacity), capacity)
    )
    self.config, self.mesh, self.capacity, self.sampling = config, mesh, capacity, sampling
    self.max_new, self.stop_ids, self.seed, self.find_stop = max_new, tuple(stop_ids), seed, find_stop
    self.chunk = min(check_every, max_new) if find_stop else max_new
    self.params = None
    self._slots = None
    self._row_of: dict[int, int] = {}  # slot -> row of the device arrays
    self._length = np.zeros(0, np.int32)  # of each row, the truth about the cache; the device's copy is overwritten
    self._pending: dict[int, int] = {}  # slot -> its last sampled token, not yet in the cache
    self.tokens_sampled = self.tokens_prefilled = 0

  def set_params(self, params) -> None:
    """New weights. Every conversation ends: a cache of old weights would be off-policy without anyone noticing."""
    self.params = params
    self._row_of.clear()
    self._pending.clear()

  def turn(self, requests: Sequence[Request]) -> list[Completion]:
    """One response for each request, in order. Raises ValueError if a request cannot fit its slot with one token to
    spare.
    """
    if not requests:
      return []
    if len({r.slot for r in requests}) != len(requests) or len(requests) > self.num_slots:
      raise ValueError(f"{len(requests)} requests for {self.num_slots} slots: each must name a slot of its own")
    with jax.set_mesh(self.mesh):
      return self._turn(requests)

  def room(self, slot: int, *, fresh: bool) -> int:
    """Tokens that the slot's next request may bring: its capacity less what its conversation holds already."""
    if fresh or slot not in self._row_of:
      return self.capacity
    return self.capacity - int(self._length[self._row_of[slot]]) - (slot in self._pending)

  def release(self, slot: int) -> None:
    """The conversation of this slot has ended; its row may be taken away."""
    self._pending.pop(slot, None)
    self._row_of.pop(slot, None)

  # -- helpers --

  def _turn(self, requests):
    self._arrange(requests)
    rows = [self._row_of[r.slot] for r in requests]
    feed = []
    for request, row in zip(requests, rows, strict=True):
      if request.fresh:
        self._length[row] = 0
        self._pending.pop(request.slot, None)
      pending = [self._pending.pop(request.slot)] if request.slot in self._pending else []
      feed.append(pending + list(request.tokens))
      if self._length[row] + len(feed[-1]) > self.capacity:
        raise ValueError(
          f"a context of {self._length[row] + len(feed[-1])} tokens does not fit a slot of {self.capacity}: "
          "raise the context limit of the config"
        )
    keys = self._keys(requests, rows)
    samples = [[] for _ in requests]
    logprobs = [[] for _ in requests]
    stopped = [False] * len(requests)
    live = list(range(len(requests)))
    produced = 0
    while live:
      sampled = self._chunk([rows[i] for i in live], [feed[i] for i in live], keys, produced)
      produced += self.chunk
      still = []
      for i, tokens, lps in zip(live, *sampled, strict=True):
        samples[i].extend(tokens)
        logprobs[i].extend(lps)
        stopped[i] = tokens[-1] in self.stop_ids
        kept = self.find_stop(samples[i]) if self.find_stop and not stopped[i] else None
        stopped[i] |= kept is not None
        kept = len(samples[i]) if kept is None else kept
        if kept > self.max_new:
          kept, stopped[i] = self.max_new, False
        self._length[rows[i]] -= len(samples[i]) - kept  # forget what lies beyond the stop string or the limit
        samples[i], logprobs[i] = samples[i][:kept], logprobs[i][:kept]
        if stopped[i] or len(samples[i]) >= self.max_new or self._length[rows[i]] >= self.capacity:
          self._pending[requests[i].slot] = int(samples[i][-1])
        else:
          feed[i] = [int(tokens[-1])]
          still.append(i)
      live = still
    return [
      Completion(np.asarray(s, np.int32), np.asarray(p, np.float32), stop)
      for s, p, stop in zip(samples, logprobs, stopped, strict=True)
    ]

  def _chunk(self, rows, feed, keys, offset):
    """Feeds tokens and samples one chunk for these rows; returns their (tokens, logprobs) and moves the lengths on."""
    S = len(self._length)
    T = bucket(max(map(len, feed)), self.token_buckets)
    tokens, counts, active = np.zeros((S, T), np.int32), np.zeros(S, np.int32), np.zeros(S, bool)
    for row, ids in zip(rows, feed, strict=True):
      tokens[row, : len(ids)], counts[row], active[row] = ids, len(ids), True
    put = lambda x: sharding.put_rows(x, self.mesh)  # noqa: E731
    slots = self._slots.replace(length=put(self._length))
    logits, slots = decode.extend(self.params, slots, put(tokens), put(counts), self.config)
    sampled, self._slots = decode.generate(
      self.params,
      slots,
      logits,
      keys,
      np.int32(offset),
      put(active),
      self.config,
      sampling=self.sampling,
      max_new=self.chunk,
      stop_ids=self.stop_ids,
    )
    out, lps, count = (np.asarray(x) for x in jax.device_get((sampled.tokens, sampled.logprobs, sampled.count)))
    self._length[rows] += counts[rows] + count[rows] - 1
    self.tokens_prefilled += int(counts.sum())
    self.tokens_sampled += int(count[rows].sum())
    return [out[r, : count[r]] for r in rows], [lps[r, : count[r]] for r in rows]

  def _keys(self, requests, rows):
    width = len(requests[0].coordinates)
    coordinates = np.zeros((len(self._length), width), np.int32)
    for request, row in zip(requests, rows, strict=True):
      coordinates[row] = request.coordinates
    return decode.request_keys(np.int32(self.seed), sharding.put_rows(coordinates, self.mesh), width=width)

  def _arrange(self, requests):
    """Gives every request a row, and moves to a smaller or larger set of rows where the number of live conversations
    asks for it.
    """
    live = {r.slot for r in requests} | set(self._row_of)
    size = bucket(len(live), self.slot_buckets)
    # With no conversation alive the bucket's own size: results must not depend on what was played before.
    if (
      self._slots is None
      or size > len(self._length)
      or size <= len(self._length) // 2
      or (not self._row_of and size != len(self._length))
    ):
      self._resize(size)
    free = sorted(set(range(len(self._length))) - set(self._row_of.values()))
    for request in requests:
      if request.slot not in self._row_of:
        if not request.fresh:
          raise ValueError(f"slot {request.slot} has no conversation to continue")
        self._row_of[request.slot] = free.pop(0)

  def _resize(self, size):
    old_slots, old_length, old_rows = self._slots, self._length, dict(self._row_of)
    kept = sorted(old_rows, key=old_rows.get)
    if old_slots is None or not kept:
      self._slots = decode.init_slots(self.config, size, self.capacity)
      self._length = np.zeros(size, np.int32)
      return
    index = np.zeros(size, np.int32)
    index[: len(kept)] = [old_rows[s] for s in kept]
    self._slots = decode.take_slots(old_slots, sharding.put_replicated(index, self.mesh))
    self._length = old_length[index].copy()
    self._row_of = {slot: row for row, slot in enumerate(kept)}
