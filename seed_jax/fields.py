"""Fields of a config by their dotted names."""

from __future__ import annotations

from typing import Any


def at(config, path: str) -> Any:
  """The value of a dotted field. Raises KeyError where there is none."""
  for name in path.split("."):
    config = config[name]
  return config
