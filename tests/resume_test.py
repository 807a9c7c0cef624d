"""A run that is killed at any moment goes on with the same command and ends in the same bits as one that was not."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
TIMES = ("seconds", "compilations")  # what a row may differ in

# Runs the command line, and dies without a word at the `count`-th call of a function: before it, after it, or, for a
# function that writes a folder, with half of its files there.
KILLER = """
import importlib, os, signal, sys
module, name, count, when = sys.argv[1:5]
owner = importlib.import_module(module)
*path, last = name.split(".")
for part in path:
  owner = getattr(owner, part)
real, calls = getattr(owner, last), [0]

def die():
  os.kill(os.getpid(), signal.SIGKILL)

def wrapped(*args, **kwargs):
  calls[0] += 1
  if calls[0] == int(count) and when == "before":
    die()
  result = real(*args, **kwargs)
  if calls[0] == int(count):
    die()
  return result

setattr(owner, last, wrapped)
from seed_jax import main
sys.exit(main.cli(["main", *sys.argv[5:]]))
"""

KILLS = {  # what the run is doing when it dies; the module and function whose n-th call it does not survive
  "a checkpoint of the starting policy was written": ("seed_jax.checkpoint", "Checkpoints.save", 2, "after"),
  "the starting policy's weights were written": ("safetensors.numpy", "save_file", 1, "after"),
  "the starting policy is there, its stage not marked": ("seed_jax.run", "Run.finish", 1, "before"),
  "the first part of the episodes was written": ("seed_jax.collect", "save_trajectories", 1, "after"),
  "annotations are written": ("seed_jax.annotate", "save_trajectories", 1, "before"),
  "supervised training, between two checkpoints": ("seed_jax.supervised", "batching.to_batches", 10, "before"),
  "the SFT policy takes its place": ("seed_jax.models.hf", "_write_weights", 1, "after"),
  "training, right after a checkpoint": ("seed_jax.checkpoint", "Checkpoints.save", 2, "after"),
  "a checkpoint of the training has its arrays, not its record": ("seed_jax.checkpoint", "_sums", 2, "before"),
  "a row was written, its checkpoint was not": ("seed_jax.metrics", "Writer.write", 1, "after"),
  "the final policy is there, its stage not marked": ("seed_jax.run", "Run.finish", 1, "before"),
  "evaluation": ("seed_jax.evaluate", "play", 2, "before"),
}


def command(workdir):
  return [f"--config={ROOT}/tests/tiny_config.py", f"--workdir={workdir}", "--plain"]


def start(arguments, cache, program=("-m", "seed_jax.main")):
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache), "SEED_JAX_TRACEBACK": "1"}
  return subprocess.run(
    [sys.executable, *program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
  )


def rows(workdir):
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in lines]


def weights(workdir, name):
  return (workdir / "policy" / name / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_in_the_same_bits(tmp_path):
  cache, whole, broken = tmp_path / "cache", tmp_path / "whole", tmp_path / "broken"
  done = start(command(whole), cache)
  assert done.returncode == 0, done.stderr

  for what, kill in KILLS.items():
    died = start([*map(str, kill), *command(broken)], cache, ("-c", KILLER))
    assert died.returncode == -signal.SIGKILL, f"{what}: {died.returncode}\n{died.stderr}"
    print(what, died.stderr.splitlines()[1:])
  ended = start(command(broken), cache)
  assert ended.returncode == 0, ended.stderr

  for name in ("base", "sft", "final"):
    assert weights(broken, name) == weights(whole, name), name
  assert weights(whole, "final") != weights(whole, "sft") != weights(whole, "base")  # else equal bits would say nothing
  assert [row["iteration"] for row in rows(whole)] == [1, 2, 3, 4]
  assert rows(broken) == rows(whole)
  assert any(row["opd_active_ratio"] > 0 for row in rows(whole))
  for stage in ("base", "collect", "annotate", "sft", "train", "evaluate"):
    one, other = (json.loads((w / f"{stage}.json").read_text()) for w in (whole, broken))
    assert {**one, "seconds": 0, "compilations": 0} == {**other, "seconds": 0, "compilations": 0} or stage == "evaluate", stage
  assert sorted(p.name for p in (broken / "policy").iterdir()) == ["base", "final", "sft"]  # nothing half-made is left
  assert sorted(p.name for p in (broken / "checkpoints" / "train").iterdir()) == ["2", "2.json", "3", "3.json"]
