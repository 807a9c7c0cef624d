import gzip

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from seed_jax import profiling
from seed_jax.metrics import Timer
from seed_jax.profiling import Profiler, timed_play


def traces(folder):
  return sorted(folder.rglob("*.xplane.pb"))


@jax.jit
def program(x):
  with jax.named_scope("a_scope"):
    return jnp.sin(x) @ x


def iterations(folder, chosen, count=4):
  timer = Timer()
  with Profiler(folder, chosen) as profiler:
    for number in range(count):
      profiler.begin(number)
      timed_play(timer, lambda *, on_episode: on_episode(None))
      for phase in ("analysis", "batch", "score", "update"):
        with timer(phase):
          program(jnp.ones((8, 8))).block_until_ready()
  return timer.take()


def test_a_trace_holds_the_phases_of_the_chosen_iterations_by_name(tmp_path):
  seconds = iterations(tmp_path, (1, 2))
  assert sorted(seconds) == [f"seconds/{name}" for name in ("analysis", "batch", "rollout", "score", "update")]
  (path,) = traces(tmp_path)  # neighbours are in one trace
  found = {}
  for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      for event in line.events:
        name = event.name.partition("#")[0]
        found.setdefault(name, []).append(dict(event.stats))
  for name in ("rollout", "analysis", "batch", "score", "update"):
    assert len(found[name]) == 2, (name, sorted(found)[:50])
  assert [step["step_num"] for step in found["iteration"]] == [1, 2]
  assert b"a_scope" in path.read_bytes()  # where operations come from
  (viewer,) = tmp_path.rglob("*.trace.json.gz")  # what docs/profiling.md tells to open
  assert b"rollout" in gzip.decompress(viewer.read_bytes())


def test_iterations_apart_have_traces_apart_and_none_has_none(tmp_path, monkeypatch):
  opened, closed = [], []
  monkeypatch.setattr(jax.profiler, "start_trace", opened.append)
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: closed.append(len(opened)))
  iterations(tmp_path, ())
  assert not opened and not closed
  iterations(tmp_path, (0, 2, 3, 9))
  assert len(opened) == 2 and closed == [1, 2]
  with pytest.raises(KeyError), Profiler(tmp_path, (0,)) as profiler:
    profiler.begin(0)
    raise KeyError
  assert closed == [1, 2, 3]


def test_traces_are_copied_to_object_storage(tmp_path):
  source = epath.Path(tmp_path / "local" / "plugins" / "profile")
  source.mkdir(parents=True)
  (source / "host.xplane.pb").write_bytes(b"x")
  profiling._copy(epath.Path(tmp_path / "local"), epath.Path(tmp_path / "there"))
  assert (tmp_path / "there" / "plugins" / "profile" / "host.xplane.pb").read_bytes() == b"x"
