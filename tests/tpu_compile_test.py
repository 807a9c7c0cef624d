"""What only a TPU runs is compiled here for TPUs that are not: the compiler refuses what does not fit."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from tpu_compiler import COMPILER, MARKS

HERE = pathlib.Path(__file__).parent
pytestmark = MARKS


def compiled(*arguments):
  """The reports of tpu_programs.py: the compiler aborts the whole process on some errors, so it gets one."""
  environment = os.environ | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{COMPILER}", "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, HERE / "tpu_programs.py", *map(str, arguments)], env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_decode_kernels_compile_and_copy_no_cache(topology):
  reports = compiled("kernels", topology)
  assert len(reports) == 20
  for report in reports:
    assert report["kernels"] == 1 and report["temp"] < 0.05 * report["cache"], report


@pytest.mark.parametrize(
  "topology, model, layers, data, tp",
  [
    ("v5e:2x2", "qwen2_5_3b", 36, 4, 1),
    ("v5e:2x2", "qwen2_5_3b", 4, 2, 2),
    ("v5p:2x2x1", "qwen2_5_7b", 28, 1, 4),
    ("v6e:2x2", "qwen3_1_7b", 4, 4, 1),
    ("v5e:2x2", "qwen2_5_0_5b", 4, 4, 1),
  ],
)
def test_the_decode_loop_needs_no_memory_besides_the_cache(topology, model, layers, data, tp):
  (report,) = compiled("generate", topology, model, layers, data, tp)
  assert report["kernels"] == 2 and report["scatters"] == 0, report
  assert report["temp"] < 0.05 * report["cache"], report


def test_two_heads_over_four_chips_need_the_logits_besides_the_cache():
  (report,) = compiled("generate", "v5e:2x2", "qwen2_5_3b", 4, 1, 4)
  assert report["kernels"] == 2 and report["scatters"] == 0, report
  assert report["temp"] < 0.05 * report["cache"] + 32 * 151_936 * 4, report


def test_reading_a_prompt_copies_the_part_of_the_cache_that_it_touches():
  """8 of 64 slots, 1/8 of the cache; their scores are held for one slot at a time."""
  (report,) = compiled("prefill", "v5e:2x2", "qwen2_5_3b", 36, 4, 1)
  assert report["scatters"] == 0, report
  assert report["peak"] - report["arguments"] < 0.16 * report["cache"], report


def test_training_takes_the_splash_kernel_and_each_policy_stores_less():
  reports = [compiled("train", "v5e:4x4", remat)[0] for remat in ("full", "attention_out", "dots_no_batch", "none")]
  peaks = [report["peak"] for report in reports]
  assert peaks == sorted(peaks), reports
  # forward, and one kernel each for dq and for dk and dv; only where its result is not kept does the forward run again
  assert [report["kernels"] for report in reports] == [4, 3, 4, 3], reports
