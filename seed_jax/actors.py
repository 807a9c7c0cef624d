"""The actor mesh: where the policy plays. In a job of several hosts each of them plays on its own devices.

The learner's mesh spans all hosts. After each update a jitted program casts the parameters where they lie (`cast`), and
`jax.device_put` brings them to where `copies` wants them: one full copy on every host, over its own devices. No jitted
program of ours could: the learner's mesh follows the wires, so its devices stand in another order than the hosts', and
a program has one order. `device_put` runs a program for each array, an identity in which devices exchange their shards.
A host's shards of that copy then become arrays of its own mesh as they are. So hosts play without lock-step: no program
of a rollout crosses them.
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


def actor_shape(
  learner: Mapping[str, int], num_hosts: int, shape: Mapping[str, int] | None = None
) -> dict[str, int] | None:
  """Sizes of the mesh (data, fsdp, tp) on which a host plays; None: it plays on the learner's, which is one host's, and
  with the learner's own arrays.

  learner: sizes of its mesh over the devices of all `num_hosts`. shape: as config.actor_mesh has them. One host plays
  on the learner's mesh unless `data` or `tp` is given. Where a size is 0 or not given, `tp` is as much of the learner's
  as divides the devices of a host, `fsdp` likewise of the others, and `data` (replicas) what is left. Raises ValueError
  where the sizes are not those of a host.
  """
  shape = dict(shape or {})
  if num_hosts == 1 and not (shape.get("data") or shape.get("tp")):
    return None
  local = math.prod(learner.values()) // num_hosts
  tp = shape.get("tp") or math.gcd(learner["tp"], local)
  fsdp = shape.get("fsdp") or math.gcd(learner["fsdp"], max(local // tp, 1))
  data = shape.get("data") or local // tp // fsdp
  if data * fsdp * tp != local:
    raise ValueError(
      f"config.actor_mesh: data={data}, fsdp={fsdp}, tp={tp} is not a mesh of the {local} devices of a host; "
      "choose sizes whose product that is"
    )
  return dict(data=data, fsdp=fsdp, tp=tp)


def actor_mesh(learner: Mesh, shape: Mapping[str, int] | None = None, *, num_hosts: int | None = None) -> Mesh:
  """The mesh of this host's devices, of `actor_shape`, or the learner's itself.

  num_hosts: of the learner's mesh, where its devices are not this job's but a compiler's; this host is then the first.
  Raises ValueError where the learner's mesh has not all devices of all hosts, or the sizes are not those of a host.
  """
  by_host = _by_host(learner, jax.process_count() if num_hosts is None else num_hosts)
  sizes = actor_shape(learner.shape, len(by_host), shape)
  if sizes is None:
    return learner
  devices = np.asarray(by_host[jax.process_index()]).reshape(*sizes.values())
  return Mesh(devices, sharding.AXES, axis_types=(AxisType.Explicit,) * 3)


def to_actor(learner: Mesh, actor: Mesh, dtype: str = "float32") -> Callable:
  """place(params): the learner's parameters on the actor mesh, those that layers compute with in `dtype` (which is what
  the layers would make of them). All hosts call it at the same time.
  """
  if actor is learner:
    return lambda params: params

  def place(params):
    hosts.meet("the parameters of the next episodes")
    with jax.set_mesh(learner):
      params = cast(params, dtype)
    places = copies(params, learner, actor)
    placed = jax.device_put(params, places)
    return jax.tree.map(lambda x, there: local(x, NamedSharding(actor, there.spec)), placed, places)

  return place


@jax.jit(static_argnames="dtype")
def cast(params: dict, dtype: str) -> dict:
  """Parameters as layers compute with them, where they lie: all but the last norm, which is not of a layer."""
  return {
    name: leaf if name == "final_norm" else jax.tree.map(lambda x: x.astype(dtype), leaf)
    for name, leaf in params.items()
  }


def copies(params: dict, learner: Mesh, actor: Mesh) -> dict:
  """Where one copy of the parameters (arrays or their shapes) lies on every host: shardings over all devices of the
  learner as (host, data, fsdp, tp), each host's as its actor mesh has them.
  """
  devices = np.asarray(_by_host(learner)).reshape(-1, *actor.devices.shape)
  everywhere = Mesh(devices, ("host", *sharding.AXES), axis_types=(AxisType.Auto,) * 4)
  return jax.tree.map(lambda spec: NamedSharding(everywhere, spec), sharding.param_specs(params, actor))


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


def _by_host(mesh: Mesh, num_hosts: int | None = None) -> list[list[jax.Device]]:
  """The devices of every process, sorted. Raises ValueError where they are not equally many, or of another number of
  hosts than that.
  """
  found: dict[int, list] = {}
  for device in sorted(mesh.devices.flat, key=lambda d: (d.process_index, d.id)):
    found.setdefault(device.process_index, []).append(device)
  num_hosts = len(found) if num_hosts is None else num_hosts
  if len(found) != num_hosts or len({len(devices) for devices in found.values()}) != 1:
    told = ", ".join(f"host {host} {len(devices)}" for host, devices in found.items())
    raise ValueError(
      f"a learner mesh must hold all hosts with equally many devices of each ({told} of {num_hosts} hosts): "
      f"choose sizes whose product is {jax.device_count()}"
    )
  return list(found.values())
