"""`python -m seed_jax.main --config=FILE[:ARG] --workdir=DIR [--stages=a,b]`: runs the stages of a config; done ones
are skipped, half-done ones resumed.
"""

from __future__ import annotations

import os

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "a config file, with an argument after a colon: configs/quickstart.py:grpo"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "where everything of this run lies; may be gs://")
_STAGES = flags.DEFINE_list("stages", [], "the stages to run, in this order; default: all")
_PLAIN = flags.DEFINE_bool("plain", None, "progress as lines instead of bars")
_LIST = flags.DEFINE_bool("list", False, "print the stages and methods, and what is done in --workdir, and stop")
_RESUME_FROM = flags.DEFINE_integer("resume_from", None, "go back to this checkpoint of the stage under way")


def main(argv):
  del argv
  from seed_jax.run import STAGES, Run, set_up_jax

  set_up_jax(os.environ.get("JAX_COMPILATION_CACHE_DIR") or os.path.expanduser("~/.cache/seed_jax/xla"))
  run = Run(_CONFIG.value, _WORKDIR.value, plain=_PLAIN.value, resume_from=_RESUME_FROM.value)
  run.open()
  for stage in _STAGES.value or STAGES:
    if run.done(stage) is None:
      stage_function(stage)(run)


def stage_function(stage):
  import importlib

  module = importlib.import_module(f"seed_jax.{stage}")
  return getattr(module, f"run_{stage}")


if __name__ == "__main__":
  logging.set_verbosity(logging.WARNING)
  app.run(main)
