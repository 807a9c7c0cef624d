"""A job of two hosts of which one is asked to stop in an update and is gone before its end: no task is played again."""

import json
import signal

import numpy as np
import pytest
from hosts_job import error_of, job
from safetensors.numpy import load_file
from tiny_run import started

# The command line, which writes down the episodes that end. Process `killed` gets SIGTERM at the first mini-batch of
# the second iteration and SIGKILL at the next one.
PROGRAM = """
import os, signal, sys
from seed_jax import hosts, main, rollout, update
played, killed, *arguments = sys.argv[1:]
pieces, finish, calls = update.Update.pieces, rollout._Player._finish, []

def pieces_and_die(self, *args, **options):
  calls.append(1)
  if hosts.index() == int(killed) and len(calls) in (3, 4):
    os.kill(os.getpid(), signal.SIGTERM if len(calls) == 3 else signal.SIGKILL)
  return pieces(self, *args, **options)

def finish_and_tell(self, environment, **changes):
  t = self.running[environment].trajectory
  finish(self, environment, **changes)
  with open(f"{played}-{hosts.index()}", "a") as file:
    print(self.iteration, t.task_id, t.member, file=file)

update.Update.pieces, rollout._Player._finish = pieces_and_die, finish_and_tell
sys.exit(main.cli(["main", *arguments]))
"""


def train(start, name, count, killed=-1):
  """Two iterations, without a checkpoint in between; [(exit code, stdout, stderr, seconds)] of each process."""
  (start.parent / "config.py").write_text("from tiny_run import tiny as get_config\n")
  arguments = [f"--config={start.parent}/config.py", f"--workdir={start.parent / name}", "--plain", "--stages=train"]
  fields = {"start": start, "train.iterations": 2, "checkpoint.every": 9, "mesh.data": count}
  arguments += [f"--config.{field}={value}" for field, value in fields.items()]
  options = dict(count=count, devices=1, cache=start.parent / "cache", timeout=1200, SEED_JAX_LOST_SECONDS="15")
  return job(PROGRAM, [start.parent / f"{name}.played", killed, *arguments], **options)


def played(start, name):
  return sorted(line for path in start.parent.glob(f"{name}.played-*") for line in path.read_text().splitlines())


@pytest.mark.slow
def test_a_host_that_is_gone_in_an_update_costs_no_episode(tmp_path):
  start = started(tmp_path / "start", "seed")
  ended = train(start, "one", 1)
  assert ended[0][0] == 0, ended
  ended = train(start, "two", 2, killed=1)
  assert [code for code, *_ in ended] == [76, -signal.SIGKILL], ended
  assert "host 1 (" in error_of(ended[0][2])
  names = sorted(path.name for path in (start.parent / "two" / "unfinished" / "train").iterdir())
  assert names == ["0-0.gz", "0-1.gz", "1-0.gz", "1-1.gz"] and len(played(start, "two")) == 2 * 16
  ended = train(start, "two", 2)
  assert [code for code, *_ in ended] == [0, 0], ended
  assert played(start, "two") == played(start, "one")  # each once
  assert not (start.parent / "two" / "unfinished").exists()
  rows = [[json.loads(line) for line in (start.parent / n / "metrics.jsonl").open()] for n in ("one", "two")]
  for a, b in zip(*rows, strict=True):
    assert [a[n] for n in ("success", "tokens_sampled", "turns")] == [
      b[n] for n in ("success", "tokens_sampled", "turns")
    ]
  one, two = (load_file(start.parent / n / "policy" / "final" / "model.safetensors") for n in ("one", "two"))
  for key, value in one.items():
    np.testing.assert_allclose(two[key], value, rtol=0, atol=1e-5, err_msg=key)
