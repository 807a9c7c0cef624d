"""The notice and the places at which it is heeded; preempted_runs_test.py has whole runs."""

import http.server
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from seed_jax import preemption
from seed_jax.preemption import Notice, Preempted


def wait_for(condition, seconds=20.0):
  until = time.monotonic() + seconds
  while not condition() and time.monotonic() < until:
    time.sleep(0.01)
  assert condition()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_sets_a_flag_and_nothing_else(number):
  before = signal.getsignal(number)
  with preemption.watch(Notice(), server="127.0.0.1:9") as notice:
    notice.check()
    os.kill(os.getpid(), number)
    wait_for(lambda: notice.reason)
    assert notice.reason == signal.Signals(number).name
    os.kill(os.getpid(), signal.SIGUSR1)  # the first reason stays
    with pytest.raises(Preempted, match=f"^{notice.reason}$"):
      notice.check()
  assert signal.getsignal(number) is before


class Metadata(http.server.BaseHTTPRequestHandler):
  """What the metadata server of a machine says."""

  said: dict
  asked: list

  def do_GET(self):
    name = self.path.removeprefix("/computeMetadata/v1/instance/")
    self.asked.append((name, self.headers["Metadata-Flavor"]))
    self.send_response(200 if self.said[name] else 503)
    self.end_headers()
    self.wfile.write(self.said[name].encode())

  def log_message(self, *_):
    pass


@pytest.fixture
def metadata():
  handler = type("Handler", (Metadata,), dict(said={"maintenance-event": "NONE", "preempted": "FALSE"}, asked=[]))
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


@pytest.mark.parametrize(
  "name, word",
  [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("maintenance-event", "x"), ("preempted", "TRUE")],
)
def test_the_metadata_server_is_asked_until_it_announces_something(metadata, name, word):
  handler, server = metadata
  with preemption.watch(Notice(), server=server, every=0.01) as notice:
    wait_for(lambda: len(handler.asked) > 6)
    assert not notice.reason and set(handler.asked) == {(n, "Google") for n in preemption.QUIET}
    handler.said["maintenance-event"] = ""  # for once no answer
    wait_for(lambda: len(handler.asked) > 12)
    assert not notice.reason
    handler.said["maintenance-event"] = "NONE"
    handler.said[name] = word
    wait_for(lambda: notice.reason)
  assert notice.reason == f"{name}: {word}"


def test_where_there_is_no_metadata_server_nobody_asks_twice(monkeypatch):
  calls = []
  monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")

  class Opener:
    def open(self, request, timeout):
      calls.append(request.full_url)
      raise OSError

  monkeypatch.setattr(preemption.urllib.request, "build_opener", lambda *_: Opener())
  before = threading.active_count()
  with preemption.watch(Notice(), every=0.01) as notice:
    wait_for(lambda: calls)
    time.sleep(0.1)
    assert threading.active_count() == before + 1  # the one that asks the other processes
  assert calls == ["http://127.0.0.1:9/computeMetadata/v1/instance/maintenance-event"] and not notice.reason


def test_outside_the_main_thread_signals_stay_as_they_are():
  before, errors = signal.getsignal(signal.SIGTERM), []

  def watch():
    try:
      with preemption.watch(Notice(), server="127.0.0.1:9"):
        assert signal.getsignal(signal.SIGTERM) is before
    except BaseException as error:
      errors.append(error)

  thread = threading.Thread(target=watch)
  thread.start()
  thread.join()
  assert not errors


def test_processes_stop_together_at_the_next_meeting():
  """Two processes as two threads: the flag of one stops both, wherever the other one is."""
  barrier, flags = threading.Barrier(2), [False, False]

  def any_of(number, flag):
    flags[number] = flag
    barrier.wait(20)
    found = any(flags)
    barrier.wait(20)
    return found

  notices = [Notice(lambda flag, n=n: any_of(n, flag)) for n in range(2)]
  steps, ended = [[], []], [None, None]

  def run(number):
    try:
      for round_ in range(5):
        with notices[number].apart():
          for step in range(3 + number):  # their own pace
            notices[number].check()
            steps[number].append((round_, step))
            if (number, round_, step) == (1, 2, 1):
              notices[number].give("SIGTERM")
    except Preempted as error:
      ended[number] = str(error)

  threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert ended == ["another process was asked to stop", "SIGTERM"]
  assert steps[0][-1] == (2, 2) and steps[1][-1] == (2, 1)  # the other one ended what it does apart, and no more


def test_what_is_to_be_kept_is_kept_only_where_the_run_is_asked_to_stop():
  kept = []
  with pytest.raises(Preempted), preemption.on_preempted(lambda: kept.append(1)):
    notice = Notice()
    notice.give("a test")
    with notice.apart():
      notice.check()
    kept.append("went on")
  with pytest.raises(ValueError), preemption.on_preempted(lambda: kept.append(2)):
    raise ValueError
  with preemption.on_preempted(lambda: kept.append(3)), Notice().apart():
    pass
  assert kept == [1]


# Process 1 gets the signal while process 0 is in the middle of work of its own; then both write a checkpoint together.
PROCESS = """
import os, signal, sys, time
import jax, numpy as np
from seed_jax import hosts, preemption
from seed_jax.checkpoint import Checkpoints
address, number, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
job = dict(SEED_JAX_COORDINATOR=address, SEED_JAX_NUM_PROCESSES="2", SEED_JAX_PROCESS_ID=str(number))
hosts.start(job)
sharding = jax.NamedSharding(jax.make_mesh((4,), ("data",)), jax.P("data"))
value = np.arange(32, dtype=np.float32)
state = {"x": jax.make_array_from_callback((32,), sharding, lambda index: value[index])}
checkpoints, steps = Checkpoints(folder), []

def stop():
  checkpoints.save(7, state, {"steps": 7})
  checkpoints.finish()
  hosts.meet("the record")  # which process 0 writes

with preemption.watch(preemption.Notice(), server="127.0.0.1:9", every=0.05) as notice:
  try:
    with preemption.on_preempted(stop):
      notice.meet()
      with notice.apart():
        if number == 1:
          os.kill(os.getpid(), signal.SIGTERM)
        while True:
          notice.check()
          time.sleep(0.01)
  except preemption.Preempted as error:
    step, found, record = checkpoints.restore(state)
    assert (step, record) == (7, {"steps": 7})
    for shard in found["x"].addressable_shards:
      np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])
    print("stopped", error, flush=True)
"""


@pytest.mark.slow
def test_two_processes_stop_for_the_signal_of_one_and_write_one_checkpoint(tmp_path):
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
  root = pathlib.Path(__file__).parent.parent
  running = [
    subprocess.Popen(
      [sys.executable, "-c", PROCESS, address, str(number), str(tmp_path / "c")],
      cwd=root,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for number in range(2)
  ]
  try:
    told = [process.communicate(timeout=120) for process in running]
  finally:
    for process in running:
      process.kill()
  assert [process.returncode for process in running] == [0, 0], told
  assert [out.splitlines()[-1] for out, _ in told] == ["stopped SIGTERM", "stopped SIGTERM"]
