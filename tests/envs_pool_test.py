"""The environment pool: the same results with and without workers, and a run that outlives what environments do."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from envs.pool import Pool

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))  # the pool hands sys.path to its workers, which import the module below by name
import fake_envs  # noqa: E402

ROOT = HERE.parent


def collect(pool, count):
  results = {}
  while len(results) < count:
    finished = pool.ready(timeout=60)
    assert finished, "the pool waited 60 s for nothing"
    results.update(finished)
  return results


def start(pool, payload=None):
  for slot in range(pool.num_envs):
    pool.reset(slot, payload or {"start": slot})
  return collect(pool, pool.num_envs)


def play(num_workers):
  with Pool(fake_envs.Fake, 5, num_workers) as pool:
    log = [start(pool)]
    for turn in range(4):
      for slot in reversed(range(5)):
        pool.step(slot, "raise" if (turn, slot) == (1, 3) else str(turn + slot))
      log.append(collect(pool, 5))
      if turn == 1:
        pool.reset(3, {"start": 7})
        log.append(collect(pool, 1))
  return [dict(sorted(results.items())) for results in log]


def test_workers_change_nothing():
  local = play(0)
  assert local[2][3].error == "ValueError: no such number"
  assert (local[2][4].observation, local[2][4].reward, local[2][4].terminated) == ("total 13", 1.0, True)
  assert play(2) == local
  assert play(9) == local  # more workers than slots


def test_results_of_one_call_come_by_slot():
  with Pool(fake_envs.Fake, 4, 0) as pool:
    for slot in (2, 0, 3):
      pool.reset(slot, {})
    assert [slot for slot, _ in pool.ready()] == [0, 2, 3]
    assert pool.ready() == [] and pool.ready(timeout=0.0) == []


def test_a_slow_slot_does_not_hold_up_another_worker():
  with Pool(fake_envs.Fake, 2, 2) as pool:
    start(pool)
    pool.step(0, "sleep 0.6")
    pool.step(1, "1")
    first = pool.ready(timeout=60)
    assert [slot for slot, _ in first] == [1]
    began = time.monotonic()
    assert pool.ready(timeout=0.05) == [] and time.monotonic() - began < 0.5
    assert [slot for slot, _ in pool.ready(timeout=60)] == [0]


def test_environments_are_reused_and_workers_stay_light():
  with Pool(fake_envs.Fake, 4, 2) as pool:
    for _ in range(3):
      start(pool)
    for slot in range(4):
      pool.step(slot, "about")
    infos = [result.info for result in collect(pool, 4).values()]
    assert [info["made"] for info in infos] == [2, 2, 2, 2]  # one environment a slot, whatever the number of episodes
    assert len({info["pid"] for info in infos}) == 2 and os.getpid() not in {info["pid"] for info in infos}
    assert not any(info["jax"] for info in infos) and "jax" in sys.modules


@pytest.mark.parametrize("action,error", [("raise", "ValueError: no such number"), ("exit", "SystemExit: 4")])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_is_a_result(num_workers, action, error):
  with Pool(fake_envs.Fake, 2, num_workers) as pool:
    start(pool)
    pool.step(0, action)
    pool.step(1, "1")
    results = collect(pool, 2)
    assert results[0].error == error and results[0].truncated and not results[0].info["won"]
    assert results[1].observation == "total 2" and not results[1].error
    pool.reset(0, {"do": action})
    assert collect(pool, 1)[0].error == error
    pool.reset(0, {"start": 3})
    assert collect(pool, 1)[0].observation == "start 3" and pool.restarts == 0


def test_an_answer_that_cannot_be_sent_is_an_error():
  with Pool(fake_envs.Fake, 1, 1) as pool:
    start(pool)
    pool.step(0, "lambda")
    assert collect(pool, 1)[0].error == "TypeError: a function cannot be sent between the pool and its workers"
    pool.step(0, "1")
    assert collect(pool, 1)[0].observation == "total 1"


@pytest.mark.parametrize("how", ["killed", "crashed", "hung"])
def test_a_lost_worker_costs_its_own_episodes_only(how):
  limit = 1.0 if how == "hung" else 60.0
  with Pool(fake_envs.Fake, 6, 2, step_timeout=limit) as pool:
    start(pool)  # slots 0, 2, 4 and 1, 3, 5 share a worker each
    if how == "killed":
      pool.step(0, "about")
      victim = collect(pool, 1)[0].info["pid"]
      pool.step(0, "sleep 30")
      time.sleep(0.2)
      os.kill(victim, signal.SIGKILL)
    else:
      pool.step(0, "crash" if how == "crashed" else "hang")
    pool.step(2, "1")  # waits behind slot 0
    pool.step(1, "1")
    results = collect(pool, 3)
    told = {"killed": "signal 9", "crashed": "exit code 3", "hung": "step took longer than 1 s"}[how]
    assert told in results[0].error and results[0].truncated
    assert results[2].error and results[1].observation == "total 2"
    pool.step(4, "1")  # was in an episode of the lost process, without a request
    pool.reset(0, {"start": 5})
    results = collect(pool, 2)
    assert "episode of this slot is lost" in results[4].error and results[0].observation == "start 5"
    for slot in (2, 4):
      pool.reset(slot, {"start": slot})
    collect(pool, 2)
    for slot in range(6):
      pool.step(slot, "2")
    results = collect(pool, 6)
    assert {slot: result.observation for slot, result in results.items()} == {
      0: "total 7", 1: "total 4", 2: "total 4", 3: "total 5", 4: "total 6", 5: "total 7",
    }  # fmt: skip
    assert pool.restarts == 1


def test_resets_that_wait_are_played_by_the_new_worker():
  with Pool(fake_envs.Fake, 3, 1, reset_timeout=1.0) as pool:
    pool.reset(0, {"do": "hang"})
    pool.reset(1, {"start": 1})
    pool.reset(2, {"do": "crash"})
    results = collect(pool, 3)
    assert "reset took longer than 1 s" in results[0].error
    assert results[1].observation == "start 1" and not results[1].error
    assert "exit code 3" in results[2].error
    # an idle worker that dies is replaced when it is next needed; a reset survives that, an episode does not
    start(pool)
    os.kill(pool._workers[0].process.pid, signal.SIGKILL)
    pool._workers[0].process.wait()
    pool.reset(0, {"start": 4})
    pool.step(1, "1")
    results = collect(pool, 2)
    assert results[0].observation == "start 4" and results[1].error


def test_a_pool_that_cannot_start_says_so(monkeypatch):
  with pytest.raises(OSError, match="data folder is missing"), Pool(fake_envs.broken, 1, 0) as pool:
    pool.reset(0, {})
  with Pool(fake_envs.broken, 2, 1) as pool, pytest.raises(RuntimeError, match="OSError: the data folder is missing"):
    pool.reset(0, {})
    pool.ready(timeout=60)
  with Pool("no such benchmark", 1, 1) as pool, pytest.raises(RuntimeError, match="unknown benchmark"):
    pool.reset(0, {})
    pool.ready(timeout=60)
  monkeypatch.setattr("envs.pool._BOOTSTRAP", "import os; os._exit(9)")
  with (
    Pool(fake_envs.Fake, 1, 1) as pool,
    pytest.raises(RuntimeError, match="3 times in a row.*exit code 9"),
  ):
    pool.reset(0, {})
    collect(pool, 1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_an_environment_shows_arrives_as_it_was(num_workers):
  with Pool(fake_envs.Benchmark(5, (1, "x")), 1, num_workers) as pool:
    assert start(pool)[0].observation == "start 5"
    pool.step(0, "show")
    result = collect(pool, 1)[0]
    assert result.observation.dtype == np.float32 and result.observation.tolist() == [[1, 1], [1, 1]]
    assert result.info["array"].dtype == np.uint8 and result.info["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert result.info["nested"] == {"list": [1, (2, "é")]} and result.info["number"] == 0.5
    assert result.info["fields"] == (1, "x")
    result.info["array"][0, 0] = 9  # a copy of one's own


def test_what_cannot_reach_a_worker_is_refused():
  with pytest.raises(TypeError, match="workers cannot import"):
    Pool(lambda: fake_envs.Fake(), 1, 1)
  with Pool(fake_envs.Fake, 1, 1) as pool:
    with pytest.raises(TypeError, match="a set cannot be sent"):
      pool.reset(0, {"start": {1}})
    assert start(pool)[0].observation == "start 0"


def test_misuse_raises():
  with pytest.raises(ValueError, match="num_envs=0"):
    Pool(fake_envs.Fake, 0)
  with pytest.raises(ValueError, match="positive seconds"):
    Pool(fake_envs.Fake, 1, step_timeout=0)
  pool = Pool(fake_envs.Fake, 2)
  pool.reset(0, {})
  with pytest.raises(ValueError, match="slot 0 has a request"):
    pool.step(0, "1")
  with pytest.raises(ValueError, match=r"slot 2 is outside 0\.\.1"):
    pool.reset(2, {})
  pool.close()
  pool.close()
  with pytest.raises(ValueError, match="closed"):
    pool.ready()


def test_close_ends_the_workers():
  pool = Pool(fake_envs.Fake, 4, 2)
  start(pool)
  pool.step(0, "hang")  # one worker is busy and must be killed, the other leaves by itself
  time.sleep(0.2)
  processes = [worker.process for worker in pool._workers]
  pool.close()
  assert [process.returncode for process in processes] == [-signal.SIGKILL, 0]


SCRIPT = """
import sys, time
sys.path[:0] = [{root!r}, {here!r}]
MARK = 1  # a worker that loads this script would have it
print("loaded")
from envs.pool import Pool
import fake_envs
pool = Pool(fake_envs.Fake, 2, 2)
pool.reset(0, {{}}); pool.reset(1, {{}})
seen = 0
while seen < 2: seen += len(pool.ready())
pool.step(0, "about")
info = pool.ready()[0][1].info
print(info["pid"], info["main"])
sys.stdout.flush()
{end}
"""


def run_script(end, **options):
  text = textwrap.dedent(SCRIPT).format(root=str(ROOT), here=str(HERE), end=end)
  return subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, timeout=120, **options)


def gone(pid, seconds=15.0):
  until = time.monotonic() + seconds
  while time.monotonic() < until:
    try:
      with open(f"/proc/{pid}/stat") as file:
        if file.read().rsplit(")", 1)[1].split()[0] == "Z":
          return True  # ended; only the reaping is left, which is init's
    except FileNotFoundError:
      return True
    time.sleep(0.1)
  return False


def test_an_exit_without_close_is_clean_and_quiet(tmp_path):
  (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT).format(root=str(ROOT), here=str(HERE), end=""))
  done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120)
  loaded, about = done.stdout.splitlines()
  pid, has_main = about.split()
  assert (done.returncode, done.stderr, loaded, has_main) == (0, "", "loaded", "False")
  assert gone(int(pid))


def test_workers_leave_when_their_parent_is_killed():
  done = run_script('pool.step(0, "hang"); import os, signal; os.kill(os.getpid(), signal.SIGKILL)')
  assert done.returncode == -signal.SIGKILL
  assert gone(int(done.stdout.splitlines()[1].split()[0]))
