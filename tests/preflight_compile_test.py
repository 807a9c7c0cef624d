"""The stage as a user runs it, on slices that are not here: what fits, what must not, and what is advised."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from tpu_compiler import COMPILER, MARKS

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = MARKS


@pytest.fixture
def preflight(tmp_path):
  """preflight(argument, topology, programs, options ...) -> (exit code, preflight.json, last line of stderr)."""

  def run(argument, topology, programs, *options):
    path = f"{ROOT}{os.pathsep}{COMPILER}"
    environment = os.environ | {"PYTHONPATH": path, "SEED_JAX_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "seed_jax.main", f"--config={ROOT}/configs/alfworld.py:{argument}", *options]
    command += [f"--workdir={tmp_path / 'w'}", "--stages=preflight", f"--topology={topology}"]
    command += [f"--config.preflight.programs={programs}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    path = tmp_path / "w" / "preflight.json"
    assert path.exists(), done.stderr[-3000:]
    return done.returncode, json.loads(path.read_text()), done.stderr.splitlines()[-1]

  return run


def test_3b_fits_sixteen_v5e_chips_and_an_iteration_is_predicted_under_four_minutes(preflight):
  code, told, _ = preflight("qwen2_5_3b,v5e:4x4", "v5e:4x4", "score,update,decode,cast,place")
  assert code == 0 and told["fits"] and told["limit_gib"] == 15.75
  assert told["programs"].keys() == {"score", "update", "decode", "cast", "place"}
  for program in told["programs"].values():
    assert 0 < program["peak_gib"] < program["with_rest_gib"] <= 15.75
  assert told["predicted_seconds"] < 240 and told["mfu"] >= 0.45
  update = told["programs"]["update"]
  assert update["peak_gib"] < 7 and update["collectives"]["all-gather"] >= 36 * 7 * 2  # seven matrices, twice
  # all weights in bfloat16, received once: nothing is gathered in float32
  assert 4.5 < told["programs"]["score"]["received_gib"] < 6
  assert told["programs"]["decode"]["received_gib"] < 0.01
  assert not told["programs"]["cast"]["collectives"]
  # the gate of all layers, whole, from fifteen chips: as `roofline.copy_phases` counts it
  assert told["programs"]["place"]["received_gib"] == pytest.approx(2 * 36 * 2048 * 11_008 / 2**30 * 15 / 16)


@pytest.mark.parametrize("topology, programs", [("v5p:4x4x4", "update,decode"), ("v6e:4x4", "update")])
def test_7b_fits(preflight, topology, programs):
  """Its head is no embedding: the compiler takes another way through the gradients than for 3B."""
  code, told, _ = preflight(f"qwen2_5_7b,{topology}", topology, programs)
  assert code == 0 and told["fits"]
  assert told["programs"]["update"]["with_rest_gib"] < 0.9 * told["limit_gib"] and told["mfu"] >= 0.45


def test_7b_does_not_fit_four_v5e_chips(preflight):
  smaller = ("--config.mesh.fsdp=4", "--config.mesh.tp=1", "--config.train.micro_tokens=10240")
  code, told, line = preflight("qwen2_5_7b,v5e:8x8", "v5e:2x2", "update,optimizer", *smaller)
  assert code == 1 and not told["fits"]
  assert told["programs"]["update"]["peak_gib"] > 15.75 and not told["advice"]["options"]
  assert line.startswith("error: the config does not fit v5e:2x2: of 0 other choices")
  assert "is the smallest slice for it" in line


def test_3b_does_not_fit_without_remat(preflight):
  options = ("--config.model.remat=none", "--config.preflight.tries=0")
  code, told, _ = preflight("qwen2_5_3b,v5e:4x4", "v5e:4x4", "update", *options)
  assert code == 1 and not told["fits"] and told["programs"]["update"]["peak_gib"] > 15.75


def test_what_is_advised_fits(preflight):
  """A small model with far too many rows a micro-batch: some must go."""
  sizes = ("--config.model.preset=qwen2_5_test", "--config.actor_mesh.tp=2", "--config.actor_mesh.data=2")
  sizes += ("--config.mesh.fsdp=4", "--config.mesh.tp=1", "--config.rollout.slots=8")
  many = ("--config.train.row_lengths=(512,)", "--config.train.micro_tokens=2097152")
  many += ("--config.model.remat=none", "--config.preflight.tries=2")
  code, told, line = preflight("qwen2_5_3b,v5e:4x4", "v5e:2x2", "update", *sizes, *many)
  assert code == 1 and "it fits with --config." in line
  again = told["advice"]["options"]
  left = [o for o in (*sizes, *many) if o.partition("=")[0] not in {a.partition("=")[0] for a in again}]
  code, told, _ = preflight("qwen2_5_3b,v5e:4x4", "v5e:2x2", "update", *left, *again)
  assert code == 0 and told["programs"]["update"]["known"]  # the search has compiled it
