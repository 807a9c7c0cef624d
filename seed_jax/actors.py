"""The actor mesh: where the policy plays. In a job of several hosts each of them plays on its own devices.

The learner's mesh spans all hosts. After each update the parameters are re-sharded by a jitted identity, so that every
host holds one full copy over its own devices; its shards of that copy then become arrays of the host's own mesh as they
are. So hosts play without lock-step: no program of a rollout crosses them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from seed_jax import hosts, sharding


def actor_mesh(learner: Mesh, shape: Mapping[str, int] | None = None) -> Mesh:
  """The mesh on which this host plays: of its own devices, or the learner's itself where that is all of one host's.

  shape: sizes of (data, fsdp, tp), as config.actor_mesh has them. Without one, or where it says 0, `tp` is as much of
  the learner's as divides the devices of a host, `fsdp` likewise of the others, and `data` (replicas) what is left.
  Raises ValueError where the sizes are not those of a host.
  """
  shape = dict(shape or {})
  if not spans_hosts(learner) and not (shape.get("data") or shape.get("tp")):
    return learner
  local = _by_host(learner)[jax.process_index()]
  tp = shape.get("tp") or math.gcd(learner.shape["tp"], len(local))
  fsdp = shape.get("fsdp") or math.gcd(learner.shape["fsdp"], max(len(local) // tp, 1))
  data = shape.get("data") or len(local) // tp // fsdp
  if data * fsdp * tp != len(local):
    raise ValueError(
      f"config.actor_mesh: data={data}, fsdp={fsdp}, tp={tp} is not a mesh of the {len(local)} devices of a host; "
      "choose sizes whose product that is"
    )
  devices = np.asarray(local).reshape(data, fsdp, tp)
  return Mesh(devices, sharding.AXES, axis_types=(AxisType.Explicit,) * 3)


def to_actor(learner: Mesh, actor: Mesh, dtype: str = "float32") -> Callable:
  """place(params): the learner's parameters on the actor mesh, those that layers compute with in `dtype` (which is what
  the layers would make of them). All hosts call it at the same time.
  """
  if actor is learner:
    return lambda params: params
  everywhere = view(learner, actor)

  @jax.jit
  def cast(params):
    return {
      name: leaf if name == "final_norm" else jax.tree.map(lambda x: x.astype(dtype), leaf)
      for name, leaf in params.items()
    }

  def place(params):
    hosts.meet("the parameters of the next episodes")
    with jax.set_mesh(learner):
      params = cast(params)
    with jax.set_mesh(actor):
      specs = sharding.param_specs(params)
    placed = jax.device_put(params, jax.tree.map(lambda s: NamedSharding(everywhere, s), specs))
    return jax.tree.map(lambda x, s: local(x, NamedSharding(actor, s)), placed, specs)

  return place


def view(learner: Mesh, actor: Mesh) -> Mesh:
  """All devices of the learner as (host, data, fsdp, tp), each host's as its actor mesh has them."""
  devices = np.asarray(_by_host(learner)).reshape(-1, *actor.devices.shape)
  return Mesh(devices, ("host", *sharding.AXES), axis_types=(AxisType.Auto,) * 4)


def local(x: jax.Array, place: NamedSharding) -> jax.Array:
  """The shards that lie on this host, as an array of its own mesh."""
  shards = {shard.device: shard.data for shard in x.addressable_shards}
  return jax.make_array_from_single_device_arrays(x.shape, place, [shards[d] for d in place.mesh.devices.flat])


def connect(mesh: Mesh) -> None:
  """Opens the channels between the devices along every choice of mesh axes, now that all hosts stand at one place.

  On a CPU (gloo) the first program that needs a channel fails on a host that waits for the others for 30 s, which a
  compilation may take; later ones wait as long as it takes. Elsewhere there is nothing to do.
  """
  if not spans_hosts(mesh) or mesh.devices.flat[0].platform != "cpu":
    return
  hosts.meet("the channels between the devices")
  total = jax.jit(jnp.sum)
  long = [axis for axis in sharding.AXES if mesh.shape[axis] > 1]
  for axes in itertools.chain.from_iterable(itertools.combinations(long, n) for n in range(1, len(long) + 1)):
    ones = np.ones(math.prod(mesh.shape[axis] for axis in axes), np.float32)
    with jax.set_mesh(mesh):
      jax.block_until_ready(total(sharding.put(ones, NamedSharding(mesh, P(axes)))))


def spans_hosts(mesh: Mesh) -> bool:
  """Whether the devices of the mesh are of more than one process."""
  return len({device.process_index for device in mesh.devices.flat}) > 1


def _by_host(mesh: Mesh) -> list[list[jax.Device]]:
  """The devices of every process, sorted. Raises ValueError where they are not equally many."""
  found: dict[int, list] = {}
  for device in sorted(mesh.devices.flat, key=lambda d: (d.process_index, d.id)):
    found.setdefault(device.process_index, []).append(device)
  if len(found) != jax.process_count() or len({len(devices) for devices in found.values()}) != 1:
    told = ", ".join(f"host {host} {len(devices)}" for host, devices in found.items())
    raise ValueError(
      f"a learner mesh must hold all hosts with equally many devices of each ({told} of {jax.process_count()} hosts): "
      f"choose sizes whose product is {jax.device_count()}"
    )
  return list(found.values())
