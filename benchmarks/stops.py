"""`python -m benchmarks.stops --start=runs/quickstart`: seconds from SIGTERM to the exit with code 75, by moment.

Trains the quickstart for two iterations from a finished start. The same command runs again and again in one work
directory, and gets the signal at each moment in turn, at the last one SIGKILL a moment later; then it runs to its end.
So does one that nobody disturbs: both must have played the same episodes, none of them twice, and must end with the
same parameters. Exit code 1: they do not, or a stop took more than 30 s.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.timing import say

LIMIT = 30.0  # seconds, the notice of a spot machine
MOMENTS = ("panel", "rollout", "score", "update", "killed")  # in the order in which a run passes them
CODES = {"never": 0, "killed": -9}  # else 75
CONFIG = "configs/quickstart.py"
SHORT = ("train.iterations=2", "train.panel.every=2", "train.panel.split=valid")

# The command line, which gets the signal at a moment and writes down when: in a panel or a rollout when 20 episodes of
# it have ended, in the scoring and in the update as they begin. `killed` gets SIGKILL at the second mini-batch.
PROGRAM = """
import os, signal, sys, time
from seed_jax import curve, learn, main, rollout, update
moment, told, played, *arguments = sys.argv[1:]
finish, batches = rollout._Player._finish, []

def stop():
  if not os.path.exists(told):
    with open(told, "w") as file:
      file.write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGTERM)

def before(owner, name):
  real = getattr(owner, name)
  def wrapped(*args, **options):
    batches.append(1)
    if moment == "killed" and len(batches) == 2:
      os.kill(os.getpid(), signal.SIGKILL)
    stop()
    return real(*args, **options)
  setattr(owner, name, wrapped)

def finished(self, environment, **changes):
  t = self.running[environment].trajectory
  finish(self, environment, **changes)
  with open(played, "a") as file:
    print(self.iteration, t.task_id, t.member, file=file)
  if moment == ("panel" if self.iteration >= curve.KEYS else "rollout") and len(self.done) >= 20:
    stop()

rollout._Player._finish = finished
if moment == "score":
  before(learn, "score_all")
if moment in ("update", "killed"):
  before(update.Update, "pieces")
sys.exit(main.cli(["main", *arguments]))
"""


def main(arguments: Sequence[str]) -> int:
  """Prints a row a moment; see the module for the exit code."""
  parser = argparse.ArgumentParser("python -m benchmarks.stops", description=__doc__.splitlines()[0])
  parser.add_argument("--start", required=True, help="work directory of a run of the config with a finished sft stage")
  parser.add_argument("--config", default=CONFIG, help=f"default {CONFIG}")
  parser.add_argument(
    "--set", action="append", default=[], metavar="FIELD=VALUE", help="of the config; may be repeated"
  )
  parser.add_argument("--moments", default=",".join(MOMENTS), help=f"some of {','.join(MOMENTS)}, in this order")
  flags = parser.parse_args(arguments)
  fields = [f"--config.{field}" for field in (*SHORT, *flags.set, f"start={pathlib.Path(flags.start).absolute()}")]
  command = [f"--config={flags.config}", "--stages=train", "--plain", *fields]
  print(f"{'moment':<10}{'seconds':>9}", flush=True)
  with tempfile.TemporaryDirectory() as folder:
    places, slow = [pathlib.Path(folder, name) for name in ("stopped", "whole")], 0
    for moment in flags.moments.split(","):
      seconds = run(command, places[0], moment)
      slow += seconds > LIMIT
      print(f"{moment:<10}{seconds:>9.1f}" + "  (SIGKILL)" * (moment == "killed"), flush=True)
    for place in places:
      run(command, place)
    episodes = [place.with_suffix(".played").read_text().splitlines() for place in places]
    weights = [(place / "policy/final/model.safetensors").read_bytes() for place in places]
  same = weights[0] == weights[1] and sorted(episodes[0]) == sorted(episodes[1])
  twice = len(episodes[0]) - len(set(episodes[0]))
  say(
    f"stops: {len(episodes[0])} and {len(episodes[1])} episodes, {twice} twice; parameters and episodes equal: {same}"
  )
  return 1 if slow or twice or not same else 0


def run(command: Sequence[str], place: pathlib.Path, moment: str = "never") -> float:
  """Seconds from the signal to the end of a process. Raises RuntimeError where it ended in another way."""
  told, played = place.with_suffix(f".{moment}"), place.with_suffix(".played")
  process = [sys.executable, "-c", PROGRAM, moment, str(told), str(played), *command, f"--workdir={place}"]
  began = time.time()
  done = subprocess.run(process, capture_output=True, text=True, env=os.environ | {"SEED_JAX_TRACEBACK": "1"})
  ended = time.time()
  say(f"stops: {moment}, {ended - began:.0f} s in all")
  if done.returncode != CODES.get(moment, 75):
    raise RuntimeError(f"{moment}: exit code {done.returncode}\n{done.stderr[-3000:]}")
  for line in done.stderr.splitlines():
    if any(word in line for word in ("stopped", "resumed", "preempted", "warning")):
      say(f"stops:   {line}")
  return 0.0 if moment == "never" else ended - float(told.read_text())


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
