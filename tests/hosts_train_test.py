"""Training in several processes: the same tasks, samples, losses and parameters as in one, and on from a checkpoint."""

import json
import signal

import numpy as np
import pytest
from hosts_job import error_of, job
from safetensors.numpy import load_file
from tiny_run import started

# The command line of a tiny run. Only the first two of the four tasks of an iteration get skills, so that the last
# hosts have none; `slow` is a host that takes its time; `killed` one that dies with its second checkpoint.
PROGRAM = """
import os, signal, sys, time
from seed_jax import checkpoint, hosts, main
from seed_jax.run import Run
slow, killed, *arguments = sys.argv[1:]
parse, play, save, saved = Run.parse, Run.play, checkpoint.Checkpoints.save, []

def parse_some(self, trajectories):
  log = parse(self, trajectories)
  for t in trajectories:
    t.skill = f"take {t.group} {t.member}" if t.group < 2 else ""
  return log

def play_slowly(self, *args, **options):
  time.sleep(3.0 * (hosts.index() == int(slow)))
  return play(self, *args, **options)

def save_and_die(self, *args, **options):
  save(self, *args, **options)
  saved.append(1)
  if len(saved) == 2 and hosts.index() == int(killed):
    self.finish()  # the second checkpoint is there
    os.kill(os.getpid(), signal.SIGKILL)

Run.parse, Run.play, checkpoint.Checkpoints.save = parse_some, play_slowly, save_and_die
sys.exit(main.cli(["main", *arguments]))
"""
NOBODY = -1


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """A work directory that others start from, and beside it a config file and a cache of programs."""
  workdir = started(tmp_path_factory.mktemp("hosts") / "start", "seed")
  (workdir.parent / "config.py").write_text("from tiny_run import tiny as get_config\n")
  return workdir


def train(start, name, count, devices, *, slow=NOBODY, killed=NOBODY, stages="train", **changes):
  shape = dict(data=count, fsdp=devices) if count > 1 else {}
  fields = {f"mesh.{axis}": size for axis, size in shape.items()} | {"train.iterations": 3} | changes
  arguments = [
    f"--config={start.parent}/config.py",
    f"--workdir={start.parent / name}",
    "--plain",
    f"--stages={stages}",
  ]
  if stages == "train":
    fields["start"] = start
  arguments += [f"--config.{field}={value}" for field, value in fields.items()]
  options = dict(count=count, devices=devices, cache=start.parent / "cache", timeout=1200, SEED_JAX_LOST_SECONDS="15")
  return job(PROGRAM, [slow, killed, *arguments], **options)


def rows(start, name):
  return [json.loads(line) for line in (start.parent / name / "metrics.jsonl").read_text().splitlines()]


def weights(start, name):
  return load_file(start.parent / name / "policy" / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def one(start):
  """Trained in one process on one device."""
  ended = train(start, "one", 1, 1)
  assert ended[0][0] == 0, ended
  return rows(start, "one"), weights(start, "one")


def check_same(start, name, one):
  want_rows, want = one
  got_rows, got = rows(start, name), weights(start, name)
  assert len(got_rows) == len(want_rows) == 3 and any(row["opd_active_ratio"] > 0 for row in want_rows)
  exact = ("success", "episodes", "environment_steps", "tokens_sampled", "tokens_trained", "parse_rate", "turns")
  for a, b in zip(want_rows, got_rows, strict=True):
    assert [a[n] for n in exact] == [b[n] for n in exact]
    for metric in ("loss", "opd_loss", "grad_norm", "kl", "gate_mean", "opd_active_ratio", "skill_gain_on_success"):
      np.testing.assert_allclose(b[metric], a[metric], rtol=1e-5, atol=1e-5, err_msg=metric)
  for key, value in want.items():
    np.testing.assert_allclose(got[key], value, rtol=0, atol=1e-5, err_msg=key)
  before = load_file(start / "policy" / "sft" / "model.safetensors")
  assert max(np.abs(want[key] - before[key]).max() for key in want) > 1e-4  # else there was nothing to compare
  skills = [(start.parent / n / "skills" / "000001.jsonl").read_text() for n in ("one", name)]
  few = [[{**json.loads(line), "gain": 0} for line in text.splitlines()] for text in skills]
  assert few[0] == few[1]


@pytest.mark.slow
def test_two_hosts_train_as_one_process_does(start, one):
  """The second host has no skill in its share."""
  ended = train(start, "two", 2, 4)
  assert [code for code, *_ in ended] == [0, 0], ended
  check_same(start, "two", one)
  assert [row["compilations"] for row in rows(start, "two")][2:] == [0]  # before that the first checkpoint compiles


@pytest.mark.slow
def test_a_killed_host_ends_the_job_and_the_same_command_resumes(start, one):
  ended = train(start, "killed", 2, 4, killed=1)
  assert [code for code, *_ in ended] == [76, -signal.SIGKILL], ended
  assert "host 1 (" in error_of(ended[0][2]) and ended[0][3] - ended[1][3] < 60
  ended = train(start, "killed", 2, 4)
  assert [code for code, *_ in ended] == [0, 0], ended
  assert "train: resumed at iteration 2 of 3" in ended[0][2]
  check_same(start, "killed", one)


@pytest.mark.slow
def test_every_stage_gives_what_it_gives_in_one_process(start):
  changes = {"train.iterations": 1, "collect.tasks": 4, "collect.samples": 2, "sft.epochs": 1}
  changes |= {"evaluate.tasks": 4, "evaluate.mechanism_tasks": 2, "rollout.slots": 16}
  for name, count in (("stages-1", 1), ("stages-2", 2)):
    mesh = {"mesh.data": 1, "mesh.fsdp": count}
    ended = train(start, name, count, 1, stages="", **changes, **mesh)
    assert [code for code, *_ in ended] == [0] * count, ended
  for policy in ("base", "sft", "final"):
    a, b = (load_file(start.parent / n / "policy" / policy / "model.safetensors") for n in ("stages-1", "stages-2"))
    for key, value in a.items():
      np.testing.assert_allclose(b[key], value, rtol=0, atol=1e-5, err_msg=f"{policy} {key}")
  for stage in ("collect", "annotate", "evaluate"):
    a, b = (json.loads((start.parent / n / f"{stage}.json").read_text()) for n in ("stages-1", "stages-2"))
    differ = {key for key in a if a[key] != b[key]} - {"seconds", "checkpoint", "start"}
    assert not differ, stage


@pytest.mark.slow
def test_what_needs_one_host_is_refused_on_all_of_them(start):
  ended = train(start, "ahead", 2, 4, **{"train.async_level": 1})
  assert [code for code, *_ in ended] == [1, 76] or [code for code, *_ in ended] == [1, 1], ended
  assert "async_level=1 works on one host only" in error_of(ended[0][2])
  assert not (start.parent / "ahead").exists()


@pytest.mark.slow
def test_four_hosts_of_which_one_is_slow_train_as_one_process_does(start, one):
  ended = train(start, "four", 4, 2, slow=1)
  assert [code for code, *_ in ended] == [0] * 4, ended
  check_same(start, "four", one)
  assert min(row["seconds/wait"] for row in rows(start, "four")) > 1.0  # process 0 waited for the slow one
  assert "seconds/wait" not in one[0][0]
