"""A lowered program through the TPU compiler: memory of a chip, collectives, and a stamp: nothing is compiled twice."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import math
import re
import time

import jax
from etils import epath

from seed_jax.metrics import read_json, write_json

GIB = 2**30
OPS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
LINE = re.compile(r"= (?P<shape>.*?) (?P<op>" + "|".join(OPS) + r")(?:-start)?\(")
FORMAT = "3"  # of a stamp; another one where this file reads a compiler's answer differently
CALLS = re.compile(r"(body|condition|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of a program. Bytes of one chip; `needed` where it refuses it for want of memory."""

  name: str
  peak: int  # of all that lives at once, arguments among it
  arguments: int
  needed: int = 0
  counts: dict[str, int] = dataclasses.field(default_factory=dict)  # collective -> how many run
  received: float = 0.0  # bytes that they bring to a chip
  seconds: float = 0.0  # of the compiler
  again: bool = False  # known from an earlier run


def compile_program(
  name: str,
  lowered: jax.stages.Lowered,
  *,
  target: str,
  layers: int = 1,
  loops: int = 0,
  stamps: epath.Path | None = None,
) -> Compiled:
  """Compiles, or finds what the same text gave before with the same versions for the same target, a slice's name, in
  DIR/<hash>.json of `stamps`.

  Collectives are those of one call, or, with `loops` = 1, of one pass of its outermost loop (a micro-batch, a sampled
  token); what lies in a loop within counts `layers` times. Raises what the compiler raises, but for want of memory.
  """
  parts = [FORMAT, *versions(), target, str(layers), str(loops), lowered.as_text()]
  key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
  path = None if stamps is None else epath.Path(stamps) / f"{key}.json"
  if path is not None and path.exists() and (known := _known(path)):
    return known
  started = time.monotonic()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    needed = memory_needed(str(error))
    if not needed:
      raise
    found = Compiled(name, needed, 0, needed=needed, seconds=time.monotonic() - started)
  else:
    memory = compiled.memory_analysis()
    counts, received = collectives(compiled.as_text(), layers=layers, loops=loops)
    spent = time.monotonic() - started
    found = Compiled(
      name,
      memory.peak_memory_in_bytes,
      memory.argument_size_in_bytes,
      counts=counts,
      received=received,
      seconds=spent,
    )
  if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(found))
  return found


def _known(path: epath.Path) -> Compiled | None:
  """What a stamp says; None where it is not whole: its program is compiled again, and the stamp written anew."""
  try:
    found = Compiled(**read_json(path))
  except (ValueError, TypeError):  # no JSON; not an object of these fields
    return None
  kinds = {"name": str, "counts": dict, "again": bool, "received": (int, float), "seconds": (int, float)}
  whole = all(isinstance(value, kinds.get(name, int)) for name, value in vars(found).items())
  whole = whole and all(isinstance(count, int) for count in found.counts.values())
  return dataclasses.replace(found, again=True) if whole and found.peak > 0 else None


def versions() -> list[str]:
  """What a stamp depends on besides the program."""
  return [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "libtpu")]


def memory_needed(message: str) -> int:
  """Bytes that a program would take, from the compiler's refusal; 0 where it says something else."""
  if "RESOURCE_EXHAUSTED" not in message:
    return 0
  found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM|Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message)
  number, unit = [x for x in found.groups() if x] if found else ("0.001", "K")
  return int(float(number) * 1024 ** ("KMGT".index(unit) + 1))


def collectives(text: str, *, layers: int = 1, loops: int = 0) -> tuple[dict[str, int], float]:
  """Of optimised HLO: how many of each collective run, and the bytes that a chip receives by them.

  Copies of one operation, its start and its end in fusions of their own, share a channel and count once. Elsewhere a
  channel says nothing: all collectives of a `shard_map` have the same.
  """
  depth, fused = _depths(text), set(re.findall(r" fusion\(.*calls=%([\w.\-]+)", text))
  counts: dict[str, int] = {}
  received, seen = 0.0, set()
  for where, line in _lines(text):
    found = LINE.search(line)
    if not found:
      continue
    op = found["op"]
    channel = re.search(r"channel_id=(\d+)", line)
    summed = re.search(r"to_apply=%([\w.\-]+)", line)
    name = (op, channel and channel[1], found["shape"].partition("{")[0], summed and summed[1])
    if where in fused and name in seen:
      continue
    seen.add(name)
    times = layers if depth.get(where, 0) > loops else 1
    scatter = "all-reduce-scatter" in where  # how the compiler writes a reduce-scatter
    kind = "reduce-scatter" if scatter else op
    counts[kind] = counts.get(kind, 0) + times
    received += times * _received(kind, scatter, _result_bytes(line, op, found["shape"]), _group(line))
  return counts, received


def _received(op, whole, size, n):
  """Bytes that one chip of n receives for a result of `size` bytes; `whole`: the size is that before the scatter."""
  if op == "all-reduce":
    return 2 * size * (n - 1) / n
  if op == "reduce-scatter" and not whole:
    return size * (n - 1)
  return size if op == "collective-permute" else size * (n - 1) / n


def _result_bytes(line: str, op: str, shape: str) -> float:
  """Of what a collective gives. The start of one that runs beside others names operands and results."""
  size = _bytes(shape)
  if f" {op}-start(" not in line or op not in ("all-gather", "collective-permute"):
    return size
  n = _group(line) if op == "all-gather" else 1
  return size * n / (n + 1)


def _bytes(shape: str) -> int:
  arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shape)
  return sum(SIZES.get(kind, 4) * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in arrays)


def _group(line: str) -> int:
  """Chips that one collective joins."""
  if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
  if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
    return listed[1].count(",") + 1
  if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
    return int(counted[1])
  return 2


def _lines(text: str):
  """(computation, line) of every instruction."""
  where = ""
  for line in text.splitlines():
    if found := re.match(r"(?:ENTRY )?%([\w.\-]+) .*\{$", line):
      where = found[1]
    elif line.startswith("  "):
      yield where, line


def _depths(text: str) -> dict[str, int]:
  """Computation -> how many loops it lies in."""
  inside: dict[str, list[tuple[str, int]]] = {}
  for where, line in _lines(text):
    for kind, name in CALLS.findall(line):
      inside.setdefault(where, []).append((name, kind == "body"))
  entry = re.search(r"^ENTRY %([\w.\-]+)", text, re.MULTILINE)
  depth, left = {}, [(entry[1] if entry else "", 0)]
  while left:
    name, deep = left.pop()
    if depth.get(name, -1) < deep:
      depth[name] = deep
      left += [(inner, deep + loop) for inner, loop in inside.get(name, [])]
  return depth
