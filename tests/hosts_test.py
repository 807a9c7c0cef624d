"""Jobs of two processes: what passes between them, and what becomes of them when one is late, elsewhere or gone."""

import json
import signal
import types

import jax
import pytest
from hosts_job import error_of, job

from seed_jax import hosts

MEETINGS = """
import json, time
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from seed_jax import actors, hosts, sharding
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
hosts.start()
me, out = hosts.index(), {}
hosts.PART = 1000
noise = [np.random.default_rng(host).bytes(3500 * host) for host in range(2)]  # nothing from host 0, four parts from 1
out["exchange"] = hosts.exchange("noise", noise[me]) == noise
out["gather"] = hosts.gather("numbers", {"host": me})
calls = []
out["first"] = hosts.from_first("a value", lambda: calls.append(me) or [1, None])
order = []
hosts.first_then_others("in turn", lambda: order.append(me))
out["calls"] = len(calls)
out["totals"] = hosts.totals("counters", {"tokens": 10 + me})
out["share"] = [list(hosts.share(range(n))) for n in (0, 1, 5, 8)]
out["largest"] = [hosts.largest_share(n) for n in (0, 1, 5, 8)]
waited = hosts.take_waited()
out["waited"] = 0 < waited and hosts.take_waited() == 0

config = ModelConfig("Qwen3ForCausalLM", 64, 32, 2, 4, 2, 8, 48, qk_norm=True)
params = jax.device_get(decoder.init(jax.random.key(0), config))
same = lambda a, b: all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))
mesh = sharding.make_mesh(2, 2, 1)
actors.connect(mesh)
learner = sharding.put_params(params, mesh)
plain = {"a": np.arange(24, dtype=np.float32).reshape(8, 3), "b": np.arange(8, dtype=np.int32)}
rows = sharding.put_rows(plain, mesh)
out["rows"] = [x.is_fully_addressable for x in jax.tree.leaves(rows)]
out["fetch"] = same(hosts.fetch([params, learner, rows]), [params, params, plain])

order = np.asarray(jax.devices())[[2, 0, 3, 1]].reshape(2, 2, 1)
turned = Mesh(order, sharding.AXES, axis_types=(AxisType.Explicit,) * 3)
for name, mesh in (("plain", mesh), ("turned", turned)):  # as jax orders the devices of a torus
  actor = actors.actor_mesh(mesh)
  learner = sharding.put_params(params, mesh)
  placed = actors.to_actor(mesh, actor)(learner)
  place = NamedSharding(actor, sharding.param_specs(params)["layers"]["q"])
  out[name] = [dict(actor.shape), same(jax.device_get(placed), params), placed["layers"]["q"].sharding == place]
replicas = actors.actor_mesh(mesh, dict(data=2, fsdp=1, tp=1))
half = actors.to_actor(mesh, replicas, "bfloat16")(learner)
out["half"] = [str(half[name].dtype) for name in ("embed", "final_norm")] + [str(half["layers"]["q"].dtype)]
out["replicas"] = same(jax.device_get(actors.to_actor(mesh, replicas)(learner)), params)
try:
  actors.actor_mesh(mesh, dict(data=4, fsdp=1, tp=1))
except ValueError as error:
  out["refused"] = str(error)
try:
  actors.actor_mesh(sharding.make_mesh(3, 1, 1))
except ValueError as error:
  out["uneven"] = str(error)
hosts.advance()
while not all(hosts._job.watch.moved):  # each hears of it with a heartbeat
  time.sleep(0.1)
hosts.finish()
print(json.dumps(out))
"""

# What the processes do, one line for each; `meet` and `sum` are places that the other one may never reach.
TROUBLE = """
import os, signal, sys, tempfile, time
import numpy as np, jax
from model_cases import random_params
from seed_jax import actors, hosts, main, sharding
from seed_jax.models import hf
from seed_jax.models.config import ModelConfig
acts = sys.argv[1:]
try:
  hosts.start()
  mesh = sharding.make_mesh(2, 1, 1)
  actors.connect(mesh)
  for act in acts[hosts.index()].split():
    name, _, value = act.partition(":")
    if name == "meet":
      hosts.meet(value)
    elif name == "sum":
      with jax.set_mesh(mesh):
        float(jax.jit(lambda x: x.sum() + 1)(sharding.put_rows(np.ones(2), mesh)))
    elif name == "save":
      tiny = ModelConfig("LlamaForCausalLM", 8, 4, 1, 2, 1, 2, 4, rope_theta=500.0, rms_norm_eps=1e-5, eos_id=3)
      hf.save(tempfile.mkdtemp(), tiny, random_params(tiny))
    elif name == "sleep":
      time.sleep(float(value))
    elif name == "die":
      os.kill(os.getpid(), signal.SIGKILL)
    elif name == "raise":
      raise ValueError("the disk is full")
  hosts.finish()
except Exception as error:
  sys.exit(main.failed(error))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("hosts")


@pytest.mark.slow
def test_what_two_hosts_tell_each_other_and_where_parameters_and_rows_come_to_lie(cache):
  ended = job(MEETINGS, count=2, devices=2, cache=cache)
  assert [code for code, *_ in ended] == [0, 0], ended
  found = [json.loads(told.splitlines()[-1]) for _, told, *_ in ended]
  for me, out in enumerate(found):
    assert out["exchange"] and out["waited"] and out["fetch"] and out["replicas"]
    assert out["gather"] == [{"host": 0}, {"host": 1}] and out["first"] == [1, None] and out["calls"] == 1 - me
    assert out["totals"] == {"tokens": 21} and out["rows"] == [False, False]
    assert out["half"] == ["bfloat16", "float32", "bfloat16"]
    assert out["plain"] == out["turned"] == [{"data": 1, "fsdp": 2, "tp": 1}, True, True]
    assert out["refused"].startswith("config.actor_mesh: data=4, fsdp=1, tp=1 is not a mesh of the 2 devices of a host")
    assert "host 0 2, host 1 1 of 2 hosts" in out["uneven"] and out["uneven"].endswith("whose product is 4")
    assert out["largest"] == [0, 1, 3, 4]
  for number, whole in enumerate((0, 1, 5, 8)):
    assert found[0]["share"][number] + found[1]["share"][number] == list(range(whole))
  assert [len(out["share"][2]) for out in found] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
  "acts, codes, errors",
  [
    # one does not come in time: the other names it and goes, which ends the job
    (("meet:here", "sleep:9 meet:here"), (76, 76), ("host 1 (", "did not reach 'here' within 5 s of host 0 (")),
    (("save", "sleep:9 save"), (76, 76), ("host 1 (", "did not reach 'the model in /", "within 5 s of host 0 (")),
    (("meet:here", "meet:there"), (76, 76), ("'here'", "'there'", "different commands")),
    # one fails: the other says why
    (("meet:here", "raise"), (76, 1), ("host 1 (", "failed: ", "the disk is full")),
    (("sum", "sleep:2 raise"), (76, 1), ("host 1 (", "failed: ", "the disk is full")),
    # one is killed, while the other waits at a meeting, or in a program of all hosts
    (("meet:here", "die"), (76, -signal.SIGKILL), ("host 1 (", "gave no heartbeat for 4 s", "same command")),
    (("sum", "sleep:2 die"), (76, -signal.SIGKILL), ("host 1 (", "gave no heartbeat for 4 s", "same command")),
    (("die", "meet:here"), (-signal.SIGKILL, 76), ("host 0 (", "is gone", "same command")),
    (("sleep:2 die", "sum"), (-signal.SIGKILL, 76), ("host 0 (", "same command")),
  ],
)
def test_the_others_stop_with_one_line_that_names_the_host(cache, acts, codes, errors):
  limits = dict(SEED_JAX_WAIT_SECONDS="5", SEED_JAX_LOST_SECONDS="4")
  ended = job(TROUBLE, acts, count=2, devices=1, cache=cache, **limits)
  assert tuple(code for code, *_ in ended) == codes, ended
  line = " / ".join(error_of(told) for code, _, told, _ in ended if code == 76)
  assert all(error in line for error in errors), line
  assert max(seconds for *_, seconds in ended) < 60


def waited(monkeypatch, *, patience=0.0, moved=lambda now: 0.0):
  """Seconds that process 1 waits for process 0, which never comes, and what it says then; the limit is 100 s. `moved`
  is when process 0 last told of progress.
  """
  now = [1000.0]

  class Client:
    def key_value_set_bytes(self, key, value): ...

    def key_value_try_get_bytes(self, key):
      if key.split("/")[-2] == "0":
        raise jax.errors.JaxRuntimeError("NOT_FOUND")
      return b"x"

    def blocking_key_value_get_bytes(self, key, milliseconds):
      now[0] += milliseconds / 1000
      watch.moved[0] = moved(now[0])
      raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

  watch = types.SimpleNamespace(lost="", moved=[0.0, 0.0], name=lambda host: f"host {host}")
  monkeypatch.setattr(hosts, "_job", hosts._Job(Client(), 1, 2, 100.0, watch))
  monkeypatch.setattr(hosts, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
  with pytest.raises(hosts.HostError) as raised:
    hosts.from_first("the annotations", None, patience=patience)
  return now[0] - 1000.0, str(raised.value)


def test_a_wait_ends_after_the_limit_counted_from_the_last_sign_of_progress(monkeypatch):
  seconds, told = waited(monkeypatch)
  assert seconds == 100.5 and told.startswith("host 0 did not reach 'the annotations' within 100 s of host 1 (")
  seconds, told = waited(monkeypatch, moved=lambda now: min(now, 1700.0) - 5.0)  # gets on for 695 s
  assert seconds == 795.5 and "within 100 s of its last sign of progress (" in told
  assert waited(monkeypatch, moved=lambda now: 900.0)[0] == 100.5  # that was before
  seconds, told = waited(monkeypatch, patience=300.0)  # an endpoint that may take so long
  assert seconds == 300.5 and "within 300 s of host 1" in told


@pytest.mark.parametrize(
  "given, place",
  [
    ({}, None),
    ({"SEED_JAX_NUM_PROCESSES": "1", "SEED_JAX_COORDINATOR": "nonsense"}, None),
    (
      {"SEED_JAX_COORDINATOR": "a:1", "SEED_JAX_NUM_PROCESSES": "2", "SEED_JAX_PROCESS_ID": "1"},
      dict(coordinator_address="a:1", num_processes=2, process_id=1, cluster_detection_method="deactivate"),
    ),
  ],
)
def test_the_environment_says_who_is_there(monkeypatch, given, place):
  monkeypatch.setattr(hosts, "_TPU", ())
  assert hosts._place(given) == place


def test_a_tpu_says_it_itself_unless_other_devices_are_asked_for(monkeypatch, tmp_path):
  monkeypatch.setattr(hosts, "_TPU", (str(tmp_path),))
  monkeypatch.setattr(hosts.importlib.util, "find_spec", lambda name: name)
  assert hosts._place({}) == {} == hosts._place({"JAX_PLATFORMS": "tpu,cpu"})
  assert hosts._place({"JAX_PLATFORMS": "cpu"}) is None is hosts._place({"SEED_JAX_NUM_PROCESSES": "1"})


@pytest.mark.parametrize("number, process", [("2", ""), ("two", "0"), ("2", "2"), ("", "0")])
def test_half_an_environment_is_refused_with_what_it_says(number, process):
  given = {"SEED_JAX_COORDINATOR": "a:1", "SEED_JAX_NUM_PROCESSES": number, "SEED_JAX_PROCESS_ID": process}
  with pytest.raises(
    ValueError, match=f"SEED_JAX_NUM_PROCESSES='{number}', SEED_JAX_PROCESS_ID='{process}': want HOST"
  ):
    hosts.start(given)


def test_one_process_passes_through():
  assert (hosts.count(), hosts.index(), hosts.several(), hosts.take_waited()) == (1, 0, False, 0.0)
  assert list(hosts.share(range(3))) == [0, 1, 2] and hosts.largest_share(3) == 3
  assert hosts.exchange("x", b"y") == [b"y"] and hosts.gather("x", {"a": 1}) == [{"a": 1}]
  assert hosts.from_first("x", lambda: 7) == 7 and hosts.totals("x", {"a": 2}) == {"a": 2}
  calls = []
  hosts.first_then_others("x", lambda: calls.append(0))
  hosts.finish()
  hosts.leave(1)  # ends nothing
  assert calls == [0] and hosts.lost(hosts.HostError("x")) == ""
