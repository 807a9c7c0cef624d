import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import sharding
from seed_jax.checkpoint import CheckpointError, Checkpoints, same


def state(scale=1.0):
  return {
    "a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) * scale,
    "count": jnp.int32(7),
    "half": jnp.ones(3, jnp.bfloat16) * scale,
  }


def files_of(folder):
  return sorted(os.path.join(base, name) for base, _, names in os.walk(folder) for name in names)


def flip_a_bit(path, at=None):
  data = bytearray(open(path, "rb").read())
  data[len(data) // 2 if at is None else at] ^= 1
  open(path, "wb").write(data)


def test_a_checkpoint_comes_back_bit_for_bit_with_its_record(tmp_path):
  checkpoints = Checkpoints(tmp_path / "c")
  assert checkpoints.restore(state()) is None
  record = {"curve": [{"loss": 1 / 3}], "odd": float("nan"), "small": 5e-324}
  checkpoints.save(3, state(0.1), record)
  step, found, told = checkpoints.restore(state())
  assert step == 3 and same(found, state(0.1)) and not same(found, state())
  assert told == {"curve": [{"loss": 1 / 3}], "odd": None, "small": 5e-324}  # JSON has no NaN
  assert [found[name].dtype for name in sorted(found)] == [jnp.float32, jnp.int32, jnp.bfloat16]


def test_arrays_take_the_sharding_of_the_target(tmp_path):
  mesh = sharding.make_mesh(data=1, fsdp=4, tp=2)
  checkpoints = Checkpoints(tmp_path)
  value = np.arange(32, dtype=np.float32).reshape(8, 4)
  checkpoints.save(1, {"x": jax.device_put(value, jax.NamedSharding(sharding.make_mesh(), jax.P()))}, {})
  wanted = jax.NamedSharding(mesh, jax.P("fsdp", "tp"))
  _, found, _ = checkpoints.restore({"x": jax.device_put(np.zeros_like(value), wanted)})
  assert found["x"].sharding == wanted
  np.testing.assert_array_equal(np.asarray(found["x"]), value)


def test_the_newest_stay_and_what_a_killed_save_left_goes(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step in (1, 2):
    checkpoints.save(step, state(step), {})
  (tmp_path / "3.orbax-checkpoint-tmp").mkdir()  # killed while the arrays were written
  (tmp_path / "3.orbax-checkpoint-tmp" / "part").write_text("x")
  (tmp_path / "4").mkdir()  # killed between the arrays and the record
  (tmp_path / ".4.json.77.tmp").write_text("{")  # killed while the record was written
  assert checkpoints.steps() == [1, 2] and checkpoints.restore(state())[0] == 2
  checkpoints.save(3, state(3), {})
  assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "2.json", "3", "3.json"]
  checkpoints.save(3, state(30), {"again": True})  # a step may be written again
  step, found, record = checkpoints.restore(state())
  assert (step, record) == (3, {"again": True}) and same(found, state(30))


def test_a_step_without_its_record_or_its_arrays_is_absent(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  for step in (1, 2):
    checkpoints.save(step, state(step), {})
  (tmp_path / "2.json").unlink()
  assert checkpoints.restore(state())[0] == 1
  (tmp_path / "5.json").write_text("{}")
  assert checkpoints.steps() == [1]


def test_a_flipped_bit_in_any_file_is_seen_and_the_good_step_offered(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(4, state(4), {"seconds": 1.5})
  checkpoints.save(8, state(8), {"seconds": 2.5})
  files = [*files_of(tmp_path / "8"), str(tmp_path / "8.json")]
  assert len(files) > 5
  for path in [name for name in files if os.path.getsize(name)]:
    before = open(path, "rb").read()
    flip_a_bit(path)
    with pytest.raises(
      CheckpointError, match=r"checkpoint 8 in .* is damaged \(.*last good one is 4: add --resume_from=4"
    ):
      checkpoints.restore(state())
    step, found, record = checkpoints.restore(state(), 4)  # and what is offered works
    assert step == 4 and same(found, state(4)) and record == {"seconds": 1.5}
    open(path, "wb").write(before)
  assert checkpoints.restore(state())[0] == 8


def test_a_number_of_the_record_that_changed_is_seen(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(8, state(), {"seconds": 2.5})
  note = json.loads((tmp_path / "8.json").read_text())
  note["record"]["seconds"] = 2.75
  (tmp_path / "8.json").write_text(json.dumps(note))
  with pytest.raises(CheckpointError, match="record differs from its sum.*no other one is good"):
    checkpoints.restore(state())


@pytest.mark.parametrize("fault", ["lost", "extra", "empty note", "list note"])
def test_other_damage_is_named(tmp_path, fault):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state(), {})
  if fault == "lost":
    os.unlink(files_of(tmp_path / "1")[0])
  elif fault == "extra":
    (tmp_path / "1" / "stranger").write_text("x")
  else:
    (tmp_path / "1.json").write_text("" if fault == "empty note" else "[]")
  with pytest.raises(CheckpointError, match="damaged") as raised:
    checkpoints.restore(state())
  assert "\n" not in str(raised.value)


def test_a_state_of_another_shape_is_an_error_in_one_line(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state(), {})
  with pytest.raises(CheckpointError, match="checkpoint 1 ") as raised:
    checkpoints.restore({"something": jnp.zeros(3)})
  assert "\n" not in str(raised.value)


def test_going_back_removes_what_is_newer(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=3)
  for step in (1, 2, 3):
    checkpoints.save(step, state(step), {})
  checkpoints.drop_after(1)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "1.json"]
  with pytest.raises(CheckpointError, match=r"no checkpoint 3 .*there are \[1\]"):
    checkpoints.restore(state(), 3)


def test_nothing_to_keep_is_refused(tmp_path):
  with pytest.raises(ValueError, match="keep=0"):
    Checkpoints(tmp_path, keep=0)


def test_same_compares_bits():
  assert same({"x": jnp.array([jnp.nan])}, {"x": jnp.array([jnp.nan])})
  assert not same({"x": jnp.array([1.0])}, {"x": jnp.array([1.0000001])})
  assert not same([jnp.zeros(2)], [jnp.zeros(2), jnp.zeros(2)])


def test_a_relative_work_directory_is_taken_from_where_the_program_stands(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  checkpoints = Checkpoints("runs/here")
  checkpoints.save(1, state(), {})
  assert checkpoints.restore(state())[0] == 1 and (tmp_path / "runs" / "here" / "1.json").exists()
