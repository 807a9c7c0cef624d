"""A run that is killed or asked to stop at any moment goes on with the same command and ends in the same bits as one
that was not.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# what a row may differ in: time, and what the engine did for episodes that a later process found
TIMES = ("seconds", "compilations", "tokens_prefilled", "tokens_reused", "decode_steps", "slot_utilisation")

# Runs the command line, and gets a signal at the `count`-th call of a function, before it or after it.
KILLER = """
import importlib, os, signal, sys
module, name, count, when, number = sys.argv[1:6]
owner = importlib.import_module(module)
*path, last = name.split(".")
for part in path:
  owner = getattr(owner, part)
real, calls = getattr(owner, last), [0]

def die():
  os.kill(os.getpid(), signal.Signals[number])

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
sys.exit(main.cli(["main", *sys.argv[6:]]))
"""

KILLS = {  # what the run is doing when it dies: the module and function whose n-th call it does not survive
  "a checkpoint of the starting policy was written": ("seed_jax.checkpoint", "Checkpoints._complete", 2, "after"),
  "the starting policy is there, its stage not marked": ("seed_jax.run", "Run.finish", 1, "before"),
  "the first part of the episodes was written": ("seed_jax.collect", "save_trajectories", 1, "after"),
  "supervised training, between two checkpoints": ("seed_jax.supervised", "batching.to_batches", 10, "before"),
  "the files of the SFT policy are half written": ("seed_jax.models.hf", "_write_weights", 1, "after"),
  "training, right after a checkpoint": ("seed_jax.checkpoint", "Checkpoints._complete", 2, "after"),
  "a row was written, and its checkpoint but for the record": (
    "seed_jax.checkpoint",
    "Checkpoints._describe",
    1,
    "before",
  ),
  "the final policy is there, its stage not marked": ("seed_jax.run", "Run.finish", 1, "before"),
}


# What the run is doing when it is asked to stop.
STOPS = {
  "supervised training of the starting policy": ("seed_jax.supervised", "batching.to_batches", 10, "before"),
  "collecting, some episodes have ended": ("seed_jax.rollout", "_Player._finish", 20, "after"),
  "supervised training on skills": ("seed_jax.supervised", "batching.to_batches", 5, "before"),
  "training, all episodes have ended": ("seed_jax.run", "Run.parse", 2, "before"),
}


def command(workdir):
  return [f"--config={ROOT}/tests/tiny_config.py", f"--workdir={workdir}", "--plain"]


def start(arguments, cache, program=("-m", "seed_jax.main")):
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache), "SEED_JAX_TRACEBACK": ""}
  return subprocess.run(
    [sys.executable, *program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
  )


def rows(workdir):
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in lines]


def weights(workdir, name):
  return (workdir / "policy" / name / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The work directory of a run that nobody disturbed, and the cache of compiled programs beside it."""
  workdir = tmp_path_factory.mktemp("resume") / "whole"
  done = start(command(workdir), workdir.parent / "cache")
  assert done.returncode == 0, done.stderr
  return workdir


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_in_the_same_bits(whole):
  cache, broken = whole.parent / "cache", whole.parent / "broken"
  for what, kill in KILLS.items():
    died = start([*map(str, kill), "SIGKILL", *command(broken)], cache, ("-c", KILLER))
    assert died.returncode == -signal.SIGKILL, f"{what}: {died.returncode}\n{died.stderr}"
  ended = start(command(broken), cache)
  assert ended.returncode == 0, ended.stderr
  assert "train: resumed at iteration 3 of 4" in ended.stderr  # the last death lost what came after that checkpoint

  for name in ("base", "sft", "final"):
    assert weights(broken, name) == weights(whole, name), name
  assert weights(whole, "final") != weights(whole, "sft") != weights(whole, "base")  # else equal bits would say nothing
  assert [row["iteration"] for row in rows(whole)] == [1, 2, 3, 4]
  compiled = [json.loads(line)["compilations"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
  assert compiled == [0] * 4  # all of it before the first iteration
  assert rows(broken) == rows(whole)
  assert any(row["opd_active_ratio"] > 0 for row in rows(whole))
  for stage in ("base", "collect", "annotate", "sft", "train"):
    one, other = (json.loads((w / f"{stage}.json").read_text()) for w in (whole, broken))
    assert {**one, "seconds": 0, "compilations": 0} == {**other, "seconds": 0, "compilations": 0}, stage
  # nothing half-made is left
  assert sorted(p.name for p in (broken / "policy").iterdir()) == ["base", "final", "sft"]
  assert sorted(p.name for p in (broken / "checkpoints" / "train").iterdir()) == ["2", "2.json", "3", "3.json"]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_good_one_it_offers_works(whole):
  cache, workdir = whole.parent / "cache", whole.parent / "damaged"
  shutil.copytree(whole, workdir)
  (workdir / "base.json").unlink()  # as if the stage had been killed near its end
  largest = max(
    (p for p in (workdir / "checkpoints/base/21").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
  )
  data = bytearray(largest.read_bytes())
  data[len(data) // 2] ^= 1
  largest.write_bytes(data)
  refused = start([*command(workdir), "--stages=base"], cache)
  assert refused.returncode == 1
  (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
  assert "checkpoint 21 in " in line and line.endswith("the last good one is 20: add --resume_from=20")
  assert "Traceback" not in refused.stderr
  went_on = start([*command(workdir), "--stages=base", "--resume_from=20"], cache)
  assert went_on.returncode == 0 and "base: resumed at update 20 of 21" in went_on.stderr, went_on.stderr
  assert weights(workdir, "base") == weights(whole, "base")


@pytest.mark.slow
def test_a_run_a_step_ahead_resumes_with_the_policy_that_was_to_sample(whole):
  """async_level=1: the episodes after a checkpoint are those of the policy before the update, after a restart too."""
  cache, folder = whole.parent / "cache", whole.parent
  options = [
    "--stages=train",
    f"--config.start={whole}",
    "--config.train.async_level=1",
    "--config.train.loss.tis_cap=2",
  ]
  undisturbed, broken = folder / "ahead", folder / "ahead-broken"
  done = start([*command(undisturbed), *options], cache)
  assert done.returncode == 0, done.stderr
  kill = ("seed_jax.checkpoint", "Checkpoints._complete", "2", "after", "SIGKILL")
  assert start([*kill, *command(broken), *options], cache, ("-c", KILLER)).returncode == -signal.SIGKILL
  ended = start([*command(broken), *options], cache)
  assert ended.returncode == 0 and "train: resumed at iteration 2 of 4" in ended.stderr, ended.stderr
  assert weights(broken, "final") == weights(undisturbed, "final") != weights(whole, "final")
  assert rows(broken) == rows(undisturbed)
  first, *later = rows(undisturbed)
  assert (
    first["mismatch_mean"] < 1e-4 < min(row["mismatch_mean"] for row in later)
  )  # on-policy once, then a step behind


@pytest.mark.slow
def test_a_run_asked_to_stop_again_and_again_ends_in_the_same_bits(whole):
  """By a signal, as a scheduler does it; preempted_runs_test.py has the places where training stops."""
  cache, stopped = whole.parent / "cache", whole.parent / "stopped"
  for what, stop in STOPS.items():
    asked = start([*map(str, stop), "SIGTERM", *command(stopped)], cache, ("-c", KILLER))
    assert asked.returncode == 75, f"{what}: {asked.returncode}\n{asked.stderr}"
    assert asked.stderr.splitlines()[-1].startswith("preempted (SIGTERM): nothing is lost"), asked.stderr
  assert (stopped / "unfinished" / "train" / "0-0.gz").exists()
  ended = start([*command(stopped), "--stages=train"], cache)
  assert ended.returncode == 0, ended.stderr
  for name in ("base", "sft", "final"):
    assert weights(stopped, name) == weights(whole, name), name
  for stage in ("base", "collect", "annotate", "sft", "train"):
    one, other = (json.loads((w / f"{stage}.json").read_text()) for w in (whole, stopped))
    assert {**one, "seconds": 0, "compilations": 0} == {**other, "seconds": 0, "compilations": 0}, stage
  assert not (stopped / "unfinished").exists()
