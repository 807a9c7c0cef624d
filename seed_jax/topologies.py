"""Chips and slices of Cloud TPU: what they can do, and their devices as targets for a compiler that has none of them.

A slice is named as the compiler names it: `v5e:4x4`, `v5p:4x4x4`. Numbers are those of Google's pages on each chip
(docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}); `hbm` is what the compiler grants a program, which is less.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os

import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip. `efficiency` is the share of `flops` that products in published training runs reach, recomputation
  counted: MaxText's pages report 55-65 % model FLOPs on v4, v5e and v5p and 45-50 % on v6e, of which up to 4/3 were
  computed.
  """

  name: str
  flops: float  # bfloat16 operations a second
  hbm: float  # bytes that a program may take
  bandwidth: float  # bytes a second between the chip and its memory
  link: float  # bytes a second over one link to a neighbour, one way
  shapes: tuple[str, ...]  # of slices
  efficiency: float


FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
CHIPS = {
  chip.name: chip
  for chip in (
    Chip("v4", 275e12, 30.75 * GIB, 1228e9, 50e9, CUBES, 0.75),
    Chip("v5e", 197e12, 15.75 * GIB, 819e9, 50e9, FLAT, 0.75),
    Chip("v5p", 459e12, 95.73 * GIB, 2765e9, 100e9, CUBES, 0.75),
    Chip("v6e", 918e12, 31.24 * GIB, 1638e9, 100e9, FLAT, 0.60),
  )
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """A slice: chips in a grid, a host for every four of them."""

  chip: Chip
  shape: tuple[int, ...]

  @property
  def name(self) -> str:
    return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

  @property
  def chips(self) -> int:
    return math.prod(self.shape)

  @property
  def host_chips(self) -> int:
    """Chips of one host: four, but all of them where one machine holds eight (v5e and v6e, 2x4)."""
    return self.chips if len(self.shape) == 2 and self.chips <= 8 else min(self.chips, 4)

  @property
  def hosts(self) -> int:
    return self.chips // self.host_chips

  @property
  def links(self) -> int:
    """Links of the chip that has fewest: two a dimension where it is closed to a ring, else one.

    v5e and v6e close a dimension of 16; v4 and v5p close all where each is a multiple of 4.
    """
    closed = (lambda n: n == 16) if len(self.shape) == 2 else (lambda n: all(m % 4 == 0 for m in self.shape))
    return sum(2 if closed(n) else 1 for n in self.shape if n > 1)


def parse(name: str) -> Slice:
  """The slice of that name; ValueError lists the known ones."""
  chip, _, shape = name.partition(":")
  if chip not in CHIPS or shape not in CHIPS[chip].shapes:
    known = "; ".join(f"{c.name}:{{{','.join(c.shapes)}}}" for c in CHIPS.values())
    raise ValueError(f"the topology {name!r} is unknown; there are {known}")
  return Slice(CHIPS[chip], tuple(map(int, shape.split("x"))))


def compile_only(*, needed: bool = True) -> None:
  """Makes this process one that compiles for TPUs and runs on the CPU. Call it before anything asks for a device.

  Raises RuntimeError where the compiler is needed and not installed.
  """
  if needed and importlib.util.find_spec("libtpu") is None:
    raise RuntimeError("the TPU compiler is not installed: pip install 'seed_jax[preflight]'")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # two processes may compile at the same time
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")  # nobody is asked who else belongs to a slice
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")  # of this machine; any slice may still be asked for
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  jax.config.update("jax_platforms", "cpu")


def devices(slice_: Slice) -> list[jax.Device]:
  """The chips of a slice as compile-only devices, those of a host next to each other."""
  from jax.experimental import topologies

  options = {}
  if slice_.host_chips != 4:  # one chip or eight; by itself the compiler takes four for a host
    options["chips_per_host_bounds"] = (*slice_.shape, 1)
  if slice_.chip.name == "v4":
    options["chip_config_name"] = "megacore"  # both cores of a chip are one device
  found = topologies.get_topology_desc(platform="tpu", topology_name=slice_.name, **options).devices
  return sorted(found, key=lambda d: (d.process_index, d.id))
