"""Slices of TPUs by name."""

import importlib.util
import re

import pytest

from configs import tpu
from seed_jax import topologies


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
  assert slice_.host().chips == slice_.host_chips == chips // hosts


@pytest.mark.parametrize("name", ["v5e-8", "v5litepod-16", "v9:2x2", "v5e:3x3", "v5p:4x4", "", "v5e"])
def test_an_unknown_topology_is_refused_with_the_known_ones(name):
  with pytest.raises(ValueError, match=re.escape(f"the topology {name!r} is unknown; there are v4:")):
    topologies.parse(name)


def test_the_shipped_configs_name_these_slices_and_this_memory():
  for name, chip in tpu.CHIPS.items():
    assert set(chip.slices) <= set(topologies.CHIPS[name].shapes)
    assert chip.memory == topologies.CHIPS[name].hbm / topologies.GIB


def test_without_the_compiler_the_message_says_what_to_install(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(RuntimeError, match=re.escape("pip install 'seed_jax[preflight]'")):
    topologies.compile_only()
