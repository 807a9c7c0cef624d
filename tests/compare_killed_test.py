"""A comparison, the real thing and small: killed in the middle, the same command goes on."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from seed_jax.metrics import read_json

ROOT = pathlib.Path(__file__).parent.parent
TINY = ROOT / "tests" / "tiny_config.py"

KILLER = """
import os, signal, sys
from seed_jax import curve, main
real = curve.Curve.point
def point(self, iteration, *rest):
  real(self, iteration, *rest)
  if iteration == 1 and self._run.config.method == "grpo":
    os.kill(os.getpid(), signal.SIGKILL)
curve.Curve.point = point
sys.exit(main.cli(["main", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_comparison_that_was_killed_goes_on_and_ends_in_the_same_curves(tmp_path):
  def start(workdir, *program):
    arguments = [f"--config={TINY}", f"--workdir={workdir}", "--plain", "--stages=compare"]
    arguments += ["--config.compare.seeds=(3,)", "--config.compare.every=1", "--config.train.panel.tasks=6"]
    arguments += ["--config.train.iterations=2", "--config.base.episodes=100"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.run(
      [sys.executable, *program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

  died = start(tmp_path / "broken", "-c", KILLER)
  assert died.returncode == -signal.SIGKILL, died.stderr
  assert "seed 3, seed:" in died.stderr and not (tmp_path / "broken/compare/seed3/grpo/train.json").exists()
  for name in ("broken", "whole"):
    done = start(tmp_path / name, "-m", "seed_jax.main")
    assert done.returncode == 0, done.stderr
  results = [read_json(tmp_path / name / "compare.json") for name in ("broken", "whole")]
  for arm in ("seed", "grpo"):
    one, other = (
      [json.loads(line) for line in (tmp_path / n / "compare/seed3" / arm / "curve.jsonl").read_text().splitlines()]
      for n in ("broken", "whole")
    )
    drop = lambda rows: [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]  # noqa: E731
    assert drop(one) == drop(other) and [row["iteration"] for row in one] == [0, 1, 2]
    assert results[0]["arms"][arm]["final"] == results[1]["arms"][arm]["final"]
    starts = (tmp_path / "whole/compare/seed3" / name / "policy/sft/model.safetensors" for name in (arm, "start"))
    assert len({path.read_bytes() for path in starts}) == 1
