"""The command: which benchmarks run, in which order, and what is left of one that fails."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import os
import platform
import sys
import time
from collections.abc import Sequence

from benchmarks import table
from benchmarks.peers import PEERS
from benchmarks.timing import say

# name -> module with ABOUT and run(options) -> rows, in the order of the table
BENCHMARKS = {
  "roofline": "machine",
  "grpo": "grpo",
  "multi_turn": "multi_turn",
  "iteration": "iteration",
  "packing": "packing",
  "utilisation": "utilisation",
  "train_step": "train_step",
  "decode": "decode",
  "scaling": "scaling",
}


@dataclasses.dataclass(frozen=True)
class Options:
  """What the flags said. `machine` is measured when it is first asked for."""

  quick: bool = False
  repeats: int = 3
  peers: tuple[str, ...] = ()
  start: str = ""

  @functools.cached_property
  def machine(self):
    from benchmarks import machine

    return machine.measure(quick=self.quick)


def main(arguments: Sequence[str]) -> int:
  """Exit code 0: every benchmark of ours ran; 1: one failed, its row says why; 2: the command is wrong."""
  flags = _flags(arguments)
  if isinstance(flags, int):
    return flags
  if flags.markdown:
    return _markdown(flags.markdown)
  if flags.list:
    for name in BENCHMARKS:
      print(f"{name:<12} {load(name).ABOUT}")
    return 0
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  options = Options(flags.quick, flags.repeats, flags.peers, flags.start)
  started = time.monotonic()
  rows, failed = run(flags.only, options)
  about = describe() | {"seconds": round(time.monotonic() - started), "quick": flags.quick, "repeats": flags.repeats}
  print(table.text(rows))
  print(f"{about['date']}, {about['cores']} cores, {about['device']}, jax {about['jax']}, {about['seconds']} s")
  if flags.json:
    with open(flags.json, "w", encoding="utf-8") as file:
      file.write(table.to_json(rows, about))
  return 1 if failed else 0


def load(name: str):
  """The module of a benchmark."""
  return importlib.import_module(f"benchmarks.{BENCHMARKS[name]}")


def run(names: Sequence[str], options: Options) -> tuple[list[table.Row], list[str]]:
  """The rows of the named benchmarks in turn, and the names of those that failed; a failure ends its own alone."""
  rows, failed = [], []
  for i, name in enumerate(names, 1):
    say(f"[{i}/{len(names)}] {name}")
    try:
      for row in load(name).run(options):
        rows.append(row)
        say("  " + "  ".join(part for part in table.cells(row) if part))
    except Exception as error:  # whatever it is, the other benchmarks still have something to say
      failed.append(name)
      rows.append(table.Row(name, note=f"failed: {one_line(error)}"))
      say(f"  failed: {one_line(error)}")
  return rows, failed


def one_line(error: BaseException) -> str:
  """An exception as one short line."""
  line = " ".join(f"{type(error).__name__}: {error}".split())
  return line if len(line) <= 200 else line[:197] + "..."


def describe() -> dict:
  """Where and when the numbers come from."""
  import jax

  return {
    "date": time.strftime("%Y-%m-%d"),
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "device": jax.devices()[0].device_kind,
    "processor": platform.processor() or platform.machine(),
    "python": platform.python_version(),
    "jax": jax.__version__,
  }


# -- helpers --


def _flags(arguments):
  parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.splitlines()[0])
  parser.add_argument("--only", default=",".join(BENCHMARKS), metavar="NAME,...", help="these benchmarks (--list)")
  parser.add_argument("--peers", default="", metavar="tunix,trl", help="beside these, each in a venv under .bench/")
  parser.add_argument("--quick", action="store_true", help="tiny sizes: does everything run? the numbers mean nothing")
  parser.add_argument("--repeats", type=int, default=3, help="paired runs of which the median is taken (default 3)")
  parser.add_argument("--start", default="", metavar="DIR", help="a work directory whose policy `iteration` plays")
  parser.add_argument("--json", default="", metavar="FILE", help="writes the rows there, too")
  parser.add_argument("--markdown", default="", metavar="FILE", help="prints what --json wrote as a table; no run")
  parser.add_argument("--list", action="store_true", help="the names and what each measures")
  try:
    flags = parser.parse_args(arguments)
  except SystemExit as stop:
    return int(stop.code or 0)
  for name, known in (("only", BENCHMARKS), ("peers", PEERS)):
    chosen = tuple(part for part in getattr(flags, name).split(",") if part)
    unknown = [part for part in chosen if part not in known]
    if unknown or (name == "only" and not chosen):
      what = ", ".join(unknown) or "nothing"
      print(f"benchmarks: --{name}={what} is unknown; choose from {', '.join(known)}", file=sys.stderr)
      return 2
    setattr(flags, name, chosen)
  if flags.repeats < 1:
    print(f"benchmarks: --repeats={flags.repeats} must be at least 1", file=sys.stderr)
    return 2
  return flags


def _markdown(path):
  try:
    with open(path, encoding="utf-8") as file:
      rows, about = table.from_json(file.read())
  except (OSError, ValueError) as error:
    print(f"benchmarks: {path}: {one_line(error)}", file=sys.stderr)
    return 2
  print(table.markdown(rows))
  print(
    f"\n{about.get('date')}, {about.get('cores')} cores, {about.get('device')}, jax {about.get('jax')}, "
    f"medians of {about.get('repeats')} paired runs."
  )
  return 0
