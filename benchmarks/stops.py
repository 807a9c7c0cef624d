"""`python -m benchmarks.stops --start=runs/quickstart`: seconds from SIGTERM to the exit with code 75, by moment.

Trains the quickstart for a few iterations from a finished start. The same command runs again and again in one work
directory and gets the signal at each moment in turn; it then runs to its end, and so does one that nobody disturbs:
both must end with the same parameters. Exit code 1: they do not, a process ended otherwise, or one took too long.
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
MOMENTS = ("panel", "rollout", "score", "update")  # in the order in which a run passes them
CONFIG = "configs/quickstart.py"
SHORT = ("train.iterations=2", "train.panel.every=2", "train.panel.split=valid")

# The command line, which gets the signal at a moment and writes down when: in a panel or a rollout when 20 episodes of
# it have ended, in the scoring and in the update as they begin.
PROGRAM = """
import os, signal, sys, time
from seed_jax import curve, learn, main, rollout, update
moment, told, *arguments = sys.argv[1:]

def stop():
  if not os.path.exists(told):
    with open(told, "w") as file:
      file.write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGTERM)

def before(owner, name):
  real = getattr(owner, name)
  def wrapped(*args, **options):
    stop()
    return real(*args, **options)
  setattr(owner, name, wrapped)

finish = rollout._Player._finish

def finished(self, *args, **options):
  finish(self, *args, **options)
  if moment == ("panel" if self.iteration >= curve.KEYS else "rollout") and len(self.done) >= 20:
    stop()

rollout._Player._finish = finished
if moment == "score":
  before(learn, "score_all")
if moment == "update":
  before(update.Update, "pieces")
sys.exit(main.cli(["main", *arguments]))
"""


def main(arguments: Sequence[str]) -> int:
  parser = argparse.ArgumentParser("python -m benchmarks.stops", description=__doc__.splitlines()[0])
  parser.add_argument("--start", required=True, help="work directory of a run of the config with a finished sft stage")
  parser.add_argument("--config", default=CONFIG, help=f"default {CONFIG}")
  parser.add_argument(
    "--set", action="append", default=[], metavar="FIELD=VALUE", help="of the config; may be repeated"
  )
  parser.add_argument("--moments", default=",".join(MOMENTS), help="of these, in this order")
  flags = parser.parse_args(arguments)
  fields = [f"--config.{field}" for field in (*SHORT, *flags.set, f"start={pathlib.Path(flags.start).absolute()}")]
  with tempfile.TemporaryDirectory() as folder:
    command = [f"--config={flags.config}", "--stages=train", "--plain", *fields]
    stopped, whole = f"{folder}/stopped", f"{folder}/whole"
    print(f"{'moment':<10}{'seconds':>9}")
    good = True
    for moment in flags.moments.split(","):
      seconds = run([*command, f"--workdir={stopped}"], moment, f"{folder}/{moment}")
      good &= seconds <= LIMIT
      print(f"{moment:<10}{seconds:>9.1f}", flush=True)
    for workdir in (stopped, whole):
      run([*command, f"--workdir={workdir}"])
    weights = [pathlib.Path(w, "policy/final/model.safetensors").read_bytes() for w in (stopped, whole)]
  same = weights[0] == weights[1]
  print(f"the parameters at the end are {'those' if same else 'NOT those'} of a run that nobody disturbed")
  return 0 if good and same else 1


def run(command: Sequence[str], moment: str = "never", told: str = os.devnull) -> float:
  """Seconds from the signal to the end of a process; RuntimeError where it ended in another way than it should."""
  say(f"stops: {moment}")
  done = subprocess.run([sys.executable, "-c", PROGRAM, moment, told, *command], capture_output=True, text=True)
  ended = time.time()
  if done.returncode != (0 if moment == "never" else 75):
    raise RuntimeError(f"{moment}: exit code {done.returncode}\n{done.stderr[-3000:]}")
  for line in done.stderr.splitlines():
    if "stopped" in line or "resumed" in line or "preempted" in line:
      say(f"stops: {line}")
  return 0.0 if moment == "never" else ended - float(pathlib.Path(told).read_text())


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
