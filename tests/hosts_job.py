"""Jobs of several processes on this machine, for tests: each is a host with CPU devices of its own."""

import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent


def free_port() -> int:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


def environment(*, devices: int, cache, **more) -> dict[str, str]:
  """Of a process with so many CPU devices."""
  inherited = {name: value for name, value in os.environ.items() if not name.startswith("SEED_JAX_")}
  ours = dict(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices), JAX_COMPILATION_CACHE_DIR=str(cache))
  return inherited | ours | dict(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}") | more


def job(program, arguments=(), *, count: int, devices: int, cache, timeout: float = 300.0, **more):
  """Runs `python -c program arguments` as `count` processes; [(exit code, stdout, stderr, seconds)] of each."""
  if count > 1:
    more |= dict(SEED_JAX_COORDINATOR=f"127.0.0.1:{free_port()}", SEED_JAX_NUM_PROCESSES=str(count))
  began, processes = time.monotonic(), []
  for number in range(count):
    place = more | (dict(SEED_JAX_PROCESS_ID=str(number)) if count > 1 else {})
    processes.append(
      subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        env=environment(devices=devices, cache=cache, **place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  out = []
  try:
    for process in processes:
      told = process.communicate(timeout=max(began + timeout - time.monotonic(), 1.0))
      out.append((process.returncode, *told, time.monotonic() - began))
  finally:
    for process in processes:
      if process.poll() is None:
        process.kill()
        process.communicate()
  return out


def error_of(told: str) -> str:
  """The one line that a failed process ends with."""
  lines = [line for line in told.splitlines() if line.startswith("error: ")]
  assert len(lines) == 1 and told.splitlines()[-1] == lines[0], told[-2000:]
  return lines[0].removeprefix("error: ")
