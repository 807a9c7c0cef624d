"""Children: a driver in the environment of its peer, and this package's own code in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import venv
from collections.abc import Sequence

from benchmarks.peers import ORACLES, PEERS
from benchmarks.timing import say

ROOT = pathlib.Path(__file__).resolve().parents[1]
VENVS = ROOT / ".bench"
INSTALLED = PEERS | ORACLES

# What would make one side of a comparison faster than the other, or either faster than a first start is.
UNSET = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", "XLA_FLAGS", "PYTHONPATH", "JAX_NUM_CPU_DEVICES")


class PeerError(RuntimeError):
  """A peer that cannot be installed or did not run to its end; one line says why."""


def python_of(peer: str) -> str:
  """The interpreter of a peer's virtual environment, which is made, with what INSTALLED says, where there is none.

  Raises PeerError where pip fails. "ours" is the interpreter that runs this.
  """
  if peer == "ours":
    return sys.executable
  folder = VENVS / peer
  python, done = folder / "bin" / "python", folder / "installed.txt"
  wanted = "\n".join(INSTALLED[peer]) + "\n"
  if done.exists() and done.read_text(encoding="utf-8") == wanted:
    return str(python)
  say(f"  making {folder} ({', '.join(INSTALLED[peer])}): a few minutes, once")
  try:
    venv.create(folder, with_pip=True, clear=False)
    command = [str(python), "-m", "pip", "install", "--quiet", *INSTALLED[peer]]
    made = subprocess.run(command, capture_output=True, text=True, timeout=3600)
  except (OSError, subprocess.SubprocessError) as error:
    raise PeerError(f"{peer}: no virtual environment in {folder.name}: {error}") from None
  if made.returncode:
    raise PeerError(f"{peer}: pip could not install {', '.join(INSTALLED[peer])}: {_last_line(made.stderr)}")
  done.write_text(wanted, encoding="utf-8")
  return str(python)


def drive(peer: str, module: str, *arguments: str, timeout: float = 1800.0) -> dict:
  """Runs `python -m benchmarks.peers.MODULE ARGUMENTS` in the peer's environment: the line of JSON that it printed.

  `wall`, seconds of the whole process, is added. Raises PeerError.
  """
  return child([python_of(peer), "-m", f"benchmarks.peers.{module}", *arguments], name=peer, timeout=timeout)


def child(command: Sequence[str], *, name: str, timeout: float = 1800.0) -> dict:
  """Runs a command that prints one line of JSON at its end; adds `wall`. Raises PeerError."""
  started = time.time()
  done = call(command, name=name, timeout=timeout)
  wall = time.time() - started
  lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
  try:
    return json.loads(lines[-1]) | {"wall": wall}
  except (IndexError, ValueError):
    raise PeerError(f"{name}: printed no result: {_last_line(done.stdout or done.stderr)}") from None


def call(command: Sequence[str], *, name: str, timeout: float = 1800.0) -> subprocess.CompletedProcess:
  """Runs a command from the root of the repository, without UNSET and knowing when it was started.

  Raises PeerError, with the last line that it said, where it fails or does not end.
  """
  environment = {k: v for k, v in os.environ.items() if k not in UNSET}
  environment |= {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"), "TF_CPP_MIN_LOG_LEVEL": "2"}
  environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
  environment["BENCHMARK_STARTED"] = repr(time.time())
  try:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
  except subprocess.TimeoutExpired:
    raise PeerError(f"{name}: no end after {timeout:.0f} s") from None
  except OSError as error:
    raise PeerError(f"{name}: {error}") from None
  if done.returncode:
    raise PeerError(f"{name}: exit code {done.returncode}: {_last_line(done.stderr)}")
  return done


def _last_line(text: str) -> str:
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  return lines[-1][:160] if lines else "no message"
