"""How much memory a host needs to read and to write a model: its share and less than one more tensor."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from seed_jax.models import decoder, hf
from seed_jax.models.config import ModelConfig

# Two tensors of 80 MiB in float32 and three layers of 14 MiB of parameters each: 230 MiB.
LARGE = ModelConfig("Qwen2ForCausalLM", 40_960, 512, 3, 8, 2, 64, 2048, qkv_bias=True, tie_embeddings=False)

PROGRAM = """
import json, sys
import jax
from seed_jax import sharding
from seed_jax.models import hf
source, target, data, fsdp, tp = *sys.argv[1:3], *map(int, sys.argv[3:])
jax.config.update("jax_num_cpu_devices", data * fsdp * tp)

def memory(field):
  with open("/proc/self/status") as file:
    return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024

def phase(function):
  with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
  before = memory("VmRSS")
  result = function()
  return result, memory("VmHWM") - before

mesh = sharding.make_mesh(data, fsdp, tp)
jax.block_until_ready(sharding.put_replicated(1.0, mesh))
(config, params), reading = phase(lambda: hf.load_sharded(source, mesh))
share = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
            if shard.replica_id == 0) / 2**20
_, writing = phase(lambda: hf.save(target, config, params, dtype="bfloat16"))
print(json.dumps({"share": share, "reading": reading, "writing": writing}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
  path = tmp_path_factory.mktemp("large") / "model"
  draw = np.random.default_rng(0).standard_normal
  shapes = jax.eval_shape(lambda key: decoder.init(key, LARGE), jax.random.key(0))
  hf.save(path, LARGE, jax.tree.map(lambda leaf: draw(leaf.shape, np.float32), shapes), dtype="bfloat16")
  return path


@pytest.mark.slow
@pytest.mark.skipif(
  not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory is read from Linux's /proc"
)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_reading_takes_the_share_and_writing_a_tensor(large, tmp_path, mesh):
  root = pathlib.Path(hf.__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM, str(large), str(tmp_path / "again"), *map(str, mesh)],
    env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.returncode == 0, done.stderr
  told = json.loads(done.stdout)
  largest = LARGE.vocab_size * LARGE.hidden_size * 4 / 2**20
  assert largest == 80 and told["share"] > 2.5 * largest
  assert told["reading"] < told["share"] + largest, told
  assert told["writing"] < 2 * largest, told
  assert (tmp_path / "again" / hf.SINGLE).read_bytes() == (large / hf.SINGLE).read_bytes()
