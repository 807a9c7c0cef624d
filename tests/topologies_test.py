"""Slices of TPUs by name."""

import importlib.util
import pathlib
import re
import subprocess

import pytest

from seed_jax import topologies

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / "launch" / "tpu_lib.sh"


@pytest.mark.parametrize(
  "name, chips, hosts, links",
  [
    ("v5e:1x1", 1, 1, 0),
    ("v5e:2x4", 8, 1, 2),
    ("v5e:4x4", 16, 4, 2),  # no ring: a chip in a corner has two neighbours
    ("v5e:8x16", 128, 32, 3),
    ("v6e:16x16", 256, 64, 4),
    ("v5p:2x2x2", 8, 2, 3),
    ("v5p:4x4x4", 64, 16, 6),
    ("v4:8x8x8", 512, 128, 6),
  ],
)
def test_a_slice_has_so_many_chips_hosts_and_links(name, chips, hosts, links):
  slice_ = topologies.parse(name)
  assert (slice_.name, slice_.chips, slice_.hosts, slice_.links) == (name, chips, hosts, links)
  assert slice_.host_chips == chips // hosts


@pytest.mark.parametrize("name", ["v5e-8", "v5litepod-16", "v9:2x2", "v5e:3x3", "v5p:4x4", "", "v5e"])
def test_an_unknown_topology_is_refused_with_the_known_ones(name):
  with pytest.raises(ValueError, match=re.escape(f"the topology {name!r} is unknown; there are v4:")):
    topologies.parse(name)


def told_by_the_launcher(*commands):
  """Lines that the functions of launch/tpu_lib.sh print."""
  script = "\n".join(["DRY=", f'. "{LAUNCH}"', *commands])
  return subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout.splitlines()


def test_the_launcher_has_the_same_slices_hosts_and_chips():
  """Google counts v4 and v5p in cores, two a chip, and calls v5e v5litepod."""
  type_of = {"v4": ("v4", 2), "v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}
  assert type_of.keys() == topologies.CHIPS.keys()
  slices = [topologies.parse(f"{chip.name}:{shape}") for chip in topologies.CHIPS.values() for shape in chip.shapes]
  told = told_by_the_launcher(*(f'slice {s.name}; echo "$TYPE $CHIPS $WORKERS"' for s in slices))
  want = []
  for s in slices:
    prefix, cores = type_of[s.chip.name]
    want.append(f"{prefix}-{s.chips * cores} {s.chips} {s.hosts}")
  assert told == want
  for chip in topologies.CHIPS.values():  # and no others
    (line,) = told_by_the_launcher('usage_error() { echo "$*"; exit 2; }', f"slice {chip.name}:3x3")
    assert line.endswith(f"{chip.name} comes as {' '.join(chip.shapes)}")


def test_without_the_compiler_the_message_says_what_to_install(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(RuntimeError, match=re.escape("pip install 'seed_jax[preflight]'")):
    topologies.compile_only()
