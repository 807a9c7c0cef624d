"""Programs compiled for TPUs that are not here; run by tpu_compile_test.py in a process of its own, which prints JSON.

Shapes: S slots, C capacity, N query heads, K key/value heads, H head size, L layers, T tokens of a row.
"""

import dataclasses
import json
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # another test may be compiling too
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from seed_jax import decode, flash_decode, sharding  # noqa: E402
from seed_jax.models import decoder, presets  # noqa: E402

MODELS = presets.PRESETS


def mesh_of(topology, data=1, fsdp=1, tp=1):
  bounds = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith("1x1") else {}
  devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **bounds).devices
  return sharding.make_mesh(data, fsdp, tp, devices=devices)


def struct(mesh, shape, dtype, *axes):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def placed(mesh, shapes, dtype):
  specs = sharding.param_specs(shapes, mesh)
  return jax.tree.map(lambda x, spec: struct(mesh, x.shape, dtype, *spec), shapes, specs)


def report(what, lowered, **more):
  start = time.time()
  compiled = lowered.compile()
  memory, text = compiled.memory_analysis(), compiled.as_text()
  numbers = {
    "program": what,
    "seconds": round(time.time() - start, 1),
    "temp": memory.temp_size_in_bytes,
    "arguments": memory.argument_size_in_bytes,
    "peak": memory.peak_memory_in_bytes,
    "kernels": text.count('custom_call_target="tpu_custom_call"'),
    "scatters": text.count(" scatter("),
  }
  print(json.dumps(numbers | more), flush=True)


def kernels(topology):
  """Both decode kernels with the heads of every model, in both dtypes, over a cache of several layers."""
  mesh = mesh_of(topology)
  S, C, L = 32, 2048, 2
  for name, c in MODELS.items():
    for dtype in (jnp.bfloat16, jnp.float32):
      N, K, H = c.num_heads, c.num_kv_heads, c.head_dim
      cache = struct(mesh, (L, S, K, C, H), dtype)
      token = struct(mesh, (S, K, H), dtype)
      lengths, layer = struct(mesh, (S,), jnp.int32), struct(mesh, (), jnp.int32)
      more = {"cache": 2 * cache.size * cache.dtype.itemsize, "model": name, "dtype": dtype.__name__}
      with jax.set_mesh(mesh):
        read = jax.jit(flash_decode.flash_decode).lower(struct(mesh, (S, N, H), dtype), cache, cache, lengths, layer)
        write = jax.jit(flash_decode.write_token, donate_argnums=(0, 1)).lower(
          cache, cache, token, token, lengths, layer
        )
      report("flash_decode", read, **more)
      report("write_token", write, **more)


def generate(topology, model, layers, data, tp, slots=32, capacity=2048):
  """The decode loop as the engine runs it: bfloat16, scanned layers, the cache donated."""
  mesh = mesh_of(topology, data=int(data), tp=int(tp))
  config, params = policy(mesh, model, layers)
  S = slots * int(data)
  rows = sharding.ROWS
  with jax.set_mesh(mesh):
    cache = jax.eval_shape(lambda: decoder.init_cache(config, S, capacity))
    slot = lambda dtype, *more: struct(mesh, (S, *more), dtype, *rows)  # noqa: E731
    number = struct(mesh, (), jnp.int32)
    draw = decode.Draw(slot(jnp.int32, 5), slot(jnp.int32), slot(jnp.float32))
    lowered = decode.generate.lower(
      params,
      jax.tree.map(lambda x: struct(mesh, x.shape, x.dtype, *x.sharding.spec), cache),
      *[slot(jnp.int32)] * 3,
      draw,
      *[number] * 2,
      config,
      sampling=decode.Sampling(),
      max_new=256,
      stop_ids=(1,),
    )
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) // int(data) // int(tp)
  report("generate", lowered, cache=size)


def prefill(topology, model, layers, data, tp, slots=64, capacity=2048, rows=8, T=512):
  """A piece of a prompt for some slots; their part of the cache is taken out and put back."""
  mesh = mesh_of(topology, data=int(data), tp=int(tp))
  config, params = policy(mesh, model, layers)
  S, R = slots * int(data), rows * int(data)
  with jax.set_mesh(mesh):
    cache = jax.eval_shape(lambda: decoder.init_cache(config, S, capacity))
    row = lambda dtype, *more: struct(mesh, (R, *more), dtype, *sharding.ROWS)  # noqa: E731
    lowered = decode.prefill.lower(
      params,
      jax.tree.map(lambda x: struct(mesh, x.shape, x.dtype, *x.sharding.spec), cache),
      *[row(jnp.int32)] * 3,
      row(jnp.int32, T),
      row(jnp.int32),
      decode.Draw(row(jnp.int32, 5), row(jnp.int32), row(jnp.float32)),
      struct(mesh, (), jnp.int32),
      config,
      sampling=decode.Sampling(),
    )
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) // int(data) // int(tp)
  report("prefill", lowered, cache=size)


def policy(mesh, model, layers):
  """The configuration and the parameters of a bfloat16 policy with scanned layers, as a decode loop has them."""
  config = dataclasses.replace(MODELS[model], num_layers=int(layers), dtype="bfloat16", scan_layers=True)
  params = placed(mesh, jax.eval_shape(lambda key: decoder.init(key, config), jax.random.key(0)), jnp.bfloat16)
  for name in ("q", "k", "v"):
    leaf = params["layers"][name]
    params["layers"][name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=decoder.heads_outside(leaf.sharding))
  return config, params


def train(topology, remat, T=1024):
  """The gradient through packed rows, one to a device, parameters sharded over all of them."""
  config = dataclasses.replace(MODELS["qwen2_5_test"], dtype="bfloat16", scan_layers=True, remat=remat)
  mesh = mesh_of(topology, fsdp=16)
  params = placed(mesh, jax.eval_shape(lambda key: decoder.init(key, config), jax.random.key(0)), jnp.float32)
  row = struct(mesh, (16, T), jnp.int32, *sharding.ROWS)

  def loss(params, tokens, positions, segment_ids):
    hidden = decoder.forward(params, tokens, positions, segment_ids, config)
    return jnp.mean(hidden.astype(jnp.float32) ** 2)

  with jax.set_mesh(mesh):
    report("train", jax.jit(jax.grad(loss)).lower(params, row, row, row), remat=remat)


if __name__ == "__main__":
  {"kernels": kernels, "generate": generate, "prefill": prefill, "train": train}[sys.argv[1]](*sys.argv[2:])
