"""Stage `library`: a static skill library from the annotated episodes, for methods whose skills come from one.

It is the control of SEED's on-policy skills (paper, table 2, row without on-policy skills) that needs no other model.
"""

from __future__ import annotations

from seed_jax import library
from seed_jax.abstraction import abstraction
from seed_jax.annotate import load_annotated
from seed_jax.library_builder import build_library
from seed_jax.metrics import say
from seed_jax.run import ConfigError, Run

FILE = "library.json"  # by its name also the mark that the stage is done: a library that is put there is kept


def run_library(run: Run) -> dict:
  """Builds DIR/library.json from trajectories/annotated, with the options config.library.build; what their skills name
  of single rooms is abstracted.
  """
  episodes = load_annotated(run)
  built = build_library(episodes, rewrite=abstraction(episodes), **run.config.library.build.to_dict())
  if not len(built):
    raise ConfigError(f"no annotated episode of {run.workdir} has a skill and an outcome; there is nothing to collect")
  library.save(run.workdir / FILE, built)
  skills = sum(map(len, built.by_family.values()))
  say(f"library: {len(built.general)} general skills, {skills} of families, {len(built.mistakes)} mistakes")
  return library.to_record(built)


def load_library(run: Run) -> library.Library:
  """The library of a run's work directory."""
  return library.load(run.workdir / FILE)
