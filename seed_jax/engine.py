"""The engine between a host-side loop and the decode programs: continuous batching over slots of a key/value cache.

Requests of any length are submitted at any time; every `step()` gives free slots to waiting requests, reads some of
their tokens, decodes until a part of the slots has finished, and hands those responses out. No request waits for the
longest response of another. A conversation keeps its slot, and the cache in it, from turn to turn; a prompt that begins
like what some slot has read already (the other members of a group, the last window of an episode) takes that prefix
over instead of computing it again. Shapes are bucketed, so the compiled programs are few and known: `programs` names
all of them.
Shapes: S slots, P slots of one prefill call, T new tokens, C capacity of a slot.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

import jax
import numpy as np

from seed_jax import decode, sharding
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
from seed_jax.requests import COORDINATES, Completion, Request, Stats, bucket, geometric
from seed_jax.slots import SlotCache, SlotTable


@dataclasses.dataclass
class _Live:
  """A request in a slot."""

  request: Request
  feed: list[int]  # tokens not read yet
  source: int  # slot whose prefix is taken over with the first read
  left: int  # tokens it may still sample
  temperature: float
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)


class Engine:
  """S slots of `capacity` tokens on `mesh`. `find_stop(ids) -> kept or None` cuts a response at a stop string (see
  text.py).

  prefill_buckets: numbers of tokens T that one call reads of a prompt; longer prompts are read in pieces of the
  largest. prefill_tokens: about so many (padded) tokens are read between two rounds of decoding, which bounds how long
  running responses stand still. refill: decoding pauses when this share of the running responses has finished.
  share_prefix: the shortest prefix worth taking over from another slot (0: never). capacity_buckets: the slots begin
  with room for the smallest number of tokens and grow with their longest conversation: where attention reads whole
  slots (not in the decode kernel) short ones are faster. place: brings the parameters onto `mesh` from where the
  learner has them (see actors.py).
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
    prefill_tokens: int = 2048,
    refill: float = 0.125,
    share_prefix: int = 8,
    capacity_buckets: Sequence[int] = (),
    place: Callable = lambda params: params,
  ):
    self.shards = sharding.num_row_shards(mesh)
    smallest = max(smallest, self.shards)
    self.num_slots = -(-num_slots // self.shards) * self.shards
    self.slot_buckets = geometric(min(smallest, self.num_slots), self.num_slots, 4)
    self.token_buckets = tuple(sorted({min(b, capacity) for b in prefill_buckets or (16, 128)}))
    self.config, self.mesh, self.capacity, self.sampling = config, mesh, capacity, sampling
    self.max_new, self.stop_ids, self.seed, self.find_stop = max_new, tuple(stop_ids), np.int32(seed), find_stop
    self.check_every, self.prefill_tokens = check_every, prefill_tokens
    self.refill, self.share_prefix = refill, share_prefix
    self.params, self._place = None, place
    self.stats = Stats()
    self.slots = SlotCache(config, mesh, capacity, capacity_buckets)
    self.reset()

  # -- conversations --

  def set_params(self, params) -> None:
    """New weights. Every conversation ends: a cache of old weights would be off-policy without anyone noticing."""
    self.params = None  # freed before their successors are made
    params = self._place(params)
    with jax.set_mesh(self.mesh):
      self.params = decoder.for_decode(decode.for_loop(params, self.config))
    self.reset()

  def reset(self) -> None:
    """Ends every conversation and forgets what the slots hold: what follows does not depend on what was before."""
    self._queue: collections.deque[Request] = collections.deque()
    self._filling: dict[int, _Live] = {}  # slot -> request whose tokens are being read
    self._running: dict[int, _Live] = {}  # slot -> request whose response is being sampled
    self._slot_of: dict[Hashable, int] = {}  # conversations that own a slot
    self._pending: dict[Hashable, int] = {}  # conversation -> its last sampled token, not yet in the cache
    self._asked: set[Hashable] = set()  # conversations whose request is not answered yet
    self._open: set[Hashable] = set()  # conversations that began and were not released
    self.slots.clear()

  @property
  def table(self) -> SlotTable:
    """What the slots hold, as the host knows it."""
    return self.slots.table

  @property
  def busy(self) -> bool:
    """Whether a request waits or is being answered."""
    return bool(self._queue or self._filling or self._running)

  @property
  def can_work(self) -> bool:
    """Whether a step would do anything: not if all that waits is waiting for a conversation to give up its slot."""
    full = self.table.size == self.num_slots and len(self._occupied()) == self.num_slots
    return bool(self._filling or self._running or (self._queue and not full))

  def room(self, conversation: Hashable, *, fresh: bool) -> int:
    """Tokens that the next request may bring: the capacity less what the conversation holds already."""
    if fresh or conversation not in self._slot_of:
      return self.capacity
    return self.capacity - int(self.table.length[self._slot_of[conversation]]) - (conversation in self._pending)

  def submit(self, request: Request) -> None:
    """Queues a request. Raises ValueError if it cannot fit its slot, or goes on from a conversation without one."""
    name = request.conversation
    if name in self._asked:
      raise ValueError(f"conversation {name!r} has a request already; take its completion first")
    if len(request.coordinates) > COORDINATES:
      raise ValueError(f"coordinates {request.coordinates} are more than {COORDINATES}")
    if not request.fresh and name not in self._slot_of:
      raise ValueError(f"conversation {name!r} has no cache to continue")
    space = self.room(name, fresh=request.fresh)
    if len(request.tokens) > space:
      raise ValueError(
        f"a context of {self.capacity - space + len(request.tokens)} tokens does not fit a slot of {self.capacity}: "
        "raise the context limit of the config"
      )
    self._open.add(name)
    self._asked.add(name)
    if request.fresh:
      self._slot_of.pop(name, None)
      self._pending.pop(name, None)
      self._queue.append(request)
      return
    slot = self._slot_of[name]
    pending = [self._pending.pop(name)] if name in self._pending else []
    self._enter(slot, request, [*pending, *request.tokens], source=slot)

  def release(self, conversation: Hashable) -> None:
    """The conversation has ended; its slot may be taken by another."""
    self._pending.pop(conversation, None)
    self._slot_of.pop(conversation, None)
    self._open.discard(conversation)
    self._asked.discard(conversation)
    self._queue = collections.deque(r for r in self._queue if r.conversation != conversation)
    for slots in (self._filling, self._running):
      for slot in [s for s, live in slots.items() if live.request.conversation == conversation]:
        del slots[slot]
        self.table.rest(slot)

  def turn(self, requests: Sequence[Request]) -> list[Completion]:
    """One response for each request, in order: submits all and steps until the last has its answer."""
    if len({r.conversation for r in requests}) != len(requests) or len(requests) > self.num_slots:
      raise ValueError(f"{len(requests)} requests for {self.num_slots} slots: each must be a conversation of its own")
    for request in requests:
      self.submit(request)
    done = {}
    while self.busy:
      done |= dict(self.step())
    return [done[r.conversation] for r in requests]

  # -- work --

  def step(self) -> list[tuple[Hashable, Completion]]:
    """One round: slots for waiting requests, some of their tokens read, then decoding until enough have finished.

    Returns (conversation, completion) of those that did, in the order of their slots; [] if there is nothing to do.
    """
    if not self.busy:
      return []
    with jax.set_mesh(self.mesh):
      self._fit_slots()
      out, budget = [], self.prefill_tokens
      self._admit()
      while self._filling and (budget > 0 or not self._running):
        budget -= self._prefill(out)
        self._admit()
      if self._running:
        self._decode(out)
    return out

  def take_stats(self) -> Stats:
    """The counters since the last call."""
    taken, self.stats = self.stats, Stats()
    return taken

  def programs(self) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, run) of every program that this engine will ever call; running one on empty slots compiles it."""
    for size, room in itertools.product(self.slot_buckets, self.slots.rooms):
      shape = f"{size} slots of {room}"
      for T in self.token_buckets:
        for width in prefill_widths(size, T, self.shards, self.prefill_tokens):
          yield f"prefill {width}x{T} in {shape}", lambda a=(size, room, width, T): self._try_prefill(*a)
      yield f"decode {shape}", lambda a=(size, room): self._try_generate(*a)
      yield f"other than {shape}", lambda a=(size, room): self._try_moves(*a)

  # -- slots --

  def _fit_slots(self):
    """As many slots as the open conversations ask for, in buckets."""
    size, kept = bucket(min(max(len(self._open), 1), self.num_slots), self.slot_buckets), sorted(self._occupied())
    if size == self.table.size or len(kept) > size:
      return
    to = self.slots.resize(kept, size)
    self._slot_of = {name: to[slot] for name, slot in self._slot_of.items()}
    self._filling = {to[s]: dataclasses.replace(x, source=to[x.source]) for s, x in self._filling.items()}
    self._running = {to[s]: x for s, x in self._running.items()}

  def _occupied(self):
    sources = {x.source for x in self._filling.values()}
    return set(self._slot_of.values()) | set(self._filling) | set(self._running) | sources

  def _admit(self):
    """Gives free slots to waiting requests, first come first served; one whose prefix is just being read by another
    waits for it.
    """
    free = sorted(set(range(self.table.size)) - self._occupied())
    waiting, self._queue = self._queue, collections.deque()
    for request in waiting:
      if not free:
        self._queue.append(request)
        continue
      source, ready, soon = 0, 0, 0
      if self.share_prefix:
        source, ready, soon = self.table.longest_prefix(request.tokens[:-1], free, self.share_prefix)
      if soon >= ready + max(self.share_prefix, 1):
        self._queue.append(request)
        continue
      slot = source if ready and source in free else self.table.oldest(free, source if ready else None)
      free.remove(slot)
      self.table.begin(slot, request.tokens[:ready], source=source if ready else slot)
      self.stats.tokens_reused += ready
      if request.keep:
        self._slot_of[request.conversation] = slot
      self._enter(slot, request, list(request.tokens[ready:]), source=source if ready else slot)
      if ready and source in free:
        free.remove(source)  # until it has been copied

  def _enter(self, slot, request, feed, source):
    self.table.plan(slot, feed)
    temperature = self.sampling.temperature if request.temperature is None else request.temperature
    self._filling[slot] = _Live(request, feed, source, request.max_new or self.max_new, temperature)

  # -- prefill --

  def _prefill(self, out) -> int:
    """One call: the oldest request and those whose rest is about as long. Returns the padded tokens that were read."""
    largest = self.token_buckets[-1]
    T_of = {s: bucket(min(len(x.feed), largest), self.token_buckets) for s, x in self._filling.items()}
    T = next(iter(T_of.values()))
    picks = [s for s in T_of if T_of[s] == T]
    size, shards = self.table.size, self.shards
    in_place = [s for s in picks if self._filling[s].source == s]
    few, many = prefill_widths(size, T, shards, self.prefill_tokens)
    if many == size and len(in_place) > few:
      width, place = size, {s: s for s in in_place}
    else:
      per_shard = [[s for s in picks if self.table.shard(s) == d] for d in range(shards)]
      width = few if max(map(len, per_shard)) * shards <= few or many == size else many
      each = width // shards
      place = {s: d * each + i for d, some in enumerate(per_shard) for i, s in enumerate(some[:each])}
    slots, source, start, tokens, counts, draw = arrays = self._empty_prefill(size, width, T)
    for s, row in place.items():
      live, base = self._filling[s], self.table.shard(s) * (size // shards)
      piece = live.feed[:T]
      start[row], counts[row], tokens[row, : len(piece)] = self.table.length[s], len(piece), piece
      if slots is not None:
        slots[row], source[row] = s - base, live.source - base
      self._describe(draw, row, live)
    self.slots.make_room(int((start + counts).max()) + 1)
    token, logprob = self._call_prefill(arrays)
    token, logprob = (np.asarray(x) for x in jax.device_get((token, logprob)))
    for s, row in place.items():
      live = self._filling[s]
      live.feed, live.source = live.feed[T:], s
      self.table.advance(s, int(counts[row]))
      self.stats.tokens_prefilled += int(counts[row])
      if not live.feed:
        self._running[s] = self._filling.pop(s)
        self.stats.tokens_sampled += 1
        self._take(s, [token[row]], [logprob[row]], int(self.table.length[s]), out)
    self.stats.tokens_padded += width * T
    return width * T

  def _empty_prefill(self, size, width, T):
    zeros = lambda *more: np.zeros((width, *more), np.int32)  # noqa: E731
    in_place = width == size
    slots = None if in_place else np.full(width, size, np.int32)  # a slot of no shard
    return slots, None if in_place else zeros(), zeros(), zeros(T), zeros(), self._no_draw(width)

  def _call_prefill(self, arrays):
    on_mesh = sharding.put_rows(arrays, self.mesh)
    token, logprob, self.slots.cache = decode.prefill(
      self.params, self.slots.cache, *on_mesh, self.seed, self.config, sampling=self.sampling
    )
    return token, logprob

  # -- decode --

  def _decode(self, out):
    size = self.table.size
    token, left, draw = np.zeros(size, np.int32), np.zeros(size, np.int32), self._no_draw(size)
    for s, live in self._running.items():
      token[s], left[s] = live.tokens[-1], live.left
      self._describe(draw, s, live)
    self.slots.make_room(int(self.table.length[list(self._running)].max()) + self.check_every + 1)
    quorum = max(round(self.refill * len(self._running)), 1)
    sampled = self._call_generate(token, left, draw, quorum)
    tokens, logprobs, count, steps = jax.device_get((sampled.tokens, sampled.logprobs, sampled.count, sampled.steps))
    self.stats.decode_steps += int(steps)
    self.stats.slot_steps += int(steps) * size
    self.stats.decoded += int(count.sum())
    self.stats.tokens_sampled += int(count.sum())
    for s in sorted(self._running):
      n = int(count[s])
      self._take(s, tokens[s, :n], logprobs[s, :n], int(self.table.length[s]) + n, out)

  def _call_generate(self, token, left, draw, quorum):
    length, token, left, draw = sharding.put_rows((self.table.length, token, left, draw), self.mesh)
    options = dict(sampling=self.sampling, max_new=self.check_every, stop_ids=self.stop_ids)
    sampled, self.slots.cache = decode.generate(
      self.params, self.slots.cache, length, token, left, draw, self.seed, np.int32(quorum), self.config, **options
    )
    return sampled

  def _no_draw(self, size):
    return decode.Draw(np.zeros((size, COORDINATES), np.int32), np.zeros(size, np.int32), np.zeros(size, np.float32))

  def _describe(self, draw, row, live):
    given = live.request.coordinates
    draw.coordinates[row, : len(given)] = given
    draw.number[row], draw.temperature[row] = len(live.tokens), live.temperature

  def _take(self, slot, tokens, logprobs, length, out):
    """Adds what was sampled to the slot's response, after which the slot holds `length` tokens, and hands the response
    out if it has ended.
    """
    live = self._running[slot]
    live.tokens.extend(map(int, tokens))
    live.logprobs.extend(map(float, logprobs))
    live.left -= len(tokens)
    stopped = live.tokens[-1] in self.stop_ids
    if self.find_stop and live.request.stop_strings and not stopped:
      kept = self.find_stop(live.tokens)
      if kept is not None:
        stopped = True
        length -= len(live.tokens) - kept  # forget what lies beyond the stop string
        live.tokens, live.logprobs = live.tokens[:kept], live.logprobs[:kept]
    self.table.respond(slot, live.tokens, length)
    if stopped or live.left <= 0 or length >= self.capacity:
      del self._running[slot]
      self.table.rest(slot)
      name = live.request.conversation
      self._asked.discard(name)
      if live.request.keep and self._slot_of.get(name) == slot:
        self._pending[name] = live.tokens[-1]
      answer = Completion(np.asarray(live.tokens, np.int32), np.asarray(live.logprobs, np.float32), stopped)
      out.append((name, answer))

  # -- warm-up: every program once, on slots that nobody has --

  @contextlib.contextmanager
  def _spare(self, size, room):
    if self._open:
      raise ValueError(f"{len(self._open)} conversations are open: warm up before the first or after reset()")
    with jax.set_mesh(self.mesh):
      self.slots.take_empty(size, room)
      yield
    self.reset()

  def _try_prefill(self, size, room, width, T):
    with self._spare(size, room):
      self._call_prefill(self._empty_prefill(size, width, T))

  def _try_generate(self, size, room):
    with self._spare(size, room):
      zeros = np.zeros(size, np.int32)
      self._call_generate(zeros, zeros, self._no_draw(size), 1)

  def _try_moves(self, size, room):
    with self._spare(size, room):
      self.slots.try_moves(self.slot_buckets)


def prefill_widths(size: int, T: int, shards: int, prefill_tokens: int) -> tuple[int, int]:
  """Numbers of slots, of `size`, that one call reads T tokens of: a few, and many, about `prefill_tokens` tokens.

  As many as there are slots means a call on all of them in place, which copies nothing.
  """
  most = max(1 << max(prefill_tokens // T // shards, 1).bit_length() - 1, 4) * shards
  few = min(most // 4, max(size // 2, shards))
  return few, size if most >= size else most
