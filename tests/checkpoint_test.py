import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import checkpoint, sharding
from seed_jax.checkpoint import CheckpointError, Checkpoints, same
from seed_jax.preemption import Preempted


def state(scale=1.0):
  return {
    "a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) * scale,
    "count": jnp.int32(7),
    "half": jnp.ones(3, jnp.bfloat16) * scale,
  }


def save(checkpoints, *arguments, **more):
  checkpoints.save(*arguments, **more)
  checkpoints.finish()


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
  save(checkpoints, 3, state(0.1), record)
  step, found, told = checkpoints.restore(state())
  assert step == 3 and same(found, state(0.1)) and not same(found, state())
  assert told == {"curve": [{"loss": 1 / 3}], "odd": None, "small": 5e-324}  # JSON has no NaN
  assert [found[name].dtype for name in sorted(found)] == [jnp.float32, jnp.int32, jnp.bfloat16]


def test_arrays_take_the_sharding_of_the_target(tmp_path):
  mesh = sharding.make_mesh(data=1, fsdp=4, tp=2)
  checkpoints = Checkpoints(tmp_path)
  value = np.arange(32, dtype=np.float32).reshape(8, 4)
  save(checkpoints, 1, {"x": jax.device_put(value, jax.NamedSharding(sharding.make_mesh(), jax.P()))}, {})
  wanted = jax.NamedSharding(mesh, jax.P("fsdp", "tp"))
  _, found, _ = checkpoints.restore({"x": jax.device_put(np.zeros_like(value), wanted)})
  assert found["x"].sharding == wanted
  np.testing.assert_array_equal(np.asarray(found["x"]), value)


def test_the_newest_stay_and_what_a_killed_save_left_goes(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step in (1, 2):
    save(checkpoints, step, state(step), {})
  (tmp_path / "3.orbax-checkpoint-tmp").mkdir()  # killed while the arrays were written
  (tmp_path / "3.orbax-checkpoint-tmp" / "part").write_text("x")
  (tmp_path / "4").mkdir()  # killed between the arrays and the record
  (tmp_path / ".4.json.77.tmp").write_text("{")  # killed while the record was written
  assert checkpoints.steps() == [1, 2] and checkpoints.restore(state())[0] == 2
  save(checkpoints, 3, state(3), {})
  assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "2.json", "3", "3.json"]
  save(checkpoints, 3, state(30), {"again": True})  # a step may be written again
  step, found, record = checkpoints.restore(state())
  assert (step, record) == (3, {"again": True}) and same(found, state(30))


def test_a_step_without_its_record_or_its_arrays_is_absent(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  for step in (1, 2):
    save(checkpoints, step, state(step), {})
  (tmp_path / "2.json").unlink()
  assert checkpoints.restore(state())[0] == 1
  (tmp_path / "5.json").write_text("{}")
  assert checkpoints.steps() == [1]


def test_a_flipped_bit_in_any_file_is_seen_and_the_good_step_offered(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  save(checkpoints, 4, state(4), {"seconds": 1.5})
  save(checkpoints, 8, state(8), {"seconds": 2.5})
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


def test_large_files_are_not_hashed_and_no_wrong_array_comes_back(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint, "SMALL", 0)
  checkpoints = Checkpoints(tmp_path)
  save(checkpoints, 8, state(8), {})
  assert all("sha256" not in entry for entry in json.loads((tmp_path / "8.json").read_text())["files"].values())
  refused = 0
  for path in [name for name in files_of(tmp_path / "8") if os.path.getsize(name)]:
    before = open(path, "rb").read()
    for at in range(0, len(before), max(len(before) // 6, 1)):
      flip_a_bit(path, at)
      try:
        _, found, _ = checkpoints.restore(state())
        assert same(found, state(8)), path  # nothing that matters
      except CheckpointError as error:
        refused += 1
        assert "checkpoint 8 in " in str(error)
      open(path, "wb").write(before)
  assert refused > 10
  name = files_of(tmp_path / "8")[0]
  open(name, "ab").write(b"x")
  with pytest.raises(CheckpointError, match="1 of .* files differ"):
    checkpoints.restore(state())


def test_sums_see_every_change_and_no_sharding(tmp_path):
  value = np.arange(64, dtype=np.float32).reshape(8, 8)
  total = lambda x: int(checkpoint.array_sums([x])[0])  # noqa: E731
  one = total(jnp.asarray(value))
  bits = value.reshape(-1).view(np.uint32).astype(object)
  assert one == sum(int(b) * (2 * i + 1) for i, b in enumerate(bits)) % 2**32
  mesh = sharding.make_mesh(data=2, fsdp=2, tp=2)
  for spec in (jax.P(), jax.P("fsdp", "tp"), jax.P(("data", "fsdp"), None)):
    assert total(jax.device_put(value, jax.NamedSharding(mesh, spec))) == one
  assert total(jnp.asarray(value.T.copy())) != one
  for kind in (jnp.bool_, jnp.int8, jnp.bfloat16, jnp.int32):
    array = jnp.ones((5,), kind)
    assert total(array) != total(array.at[3].set(jnp.zeros((), kind)))
  assert total(jnp.float32(0.0)) != total(jnp.float32(-0.0))


def test_a_state_may_be_given_away_while_it_is_written(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
  tree = {"x": jnp.zeros((512, 512)), "n": jnp.int32(0)}
  for number in range(1, 4):
    tree = step(tree)
    checkpoints.save(number, tree, {"number": number})
    tree = step(step(tree))
  _, found, record = checkpoints.restore(tree)
  assert record == {"number": 3} and float(found["x"].max()) == float(found["x"].min()) == 7.0


def test_what_goes_wrong_while_it_is_written_is_told_at_the_next_call(tmp_path, monkeypatch):
  checkpoints = Checkpoints(tmp_path)
  save(checkpoints, 1, state(), {})
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint, "write_json", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    checkpoints.save(2, state(2), {})
    with pytest.raises(OSError, match="the disk is full"):
      checkpoints.finish()
    with pytest.raises(KeyError), checkpoints:  # the first error is the one that is told
      checkpoints.save(3, state(3), {})
      raise KeyError
    with pytest.raises(OSError, match="the disk is full"), checkpoints:  # nobody may believe that nothing is lost
      checkpoints.save(3, state(3), {})
      raise Preempted
  assert checkpoints.restore(state())[0] == 1
  with checkpoints:
    checkpoints.save(2, state(2), {})
  assert checkpoints.steps() == [1, 2]


def test_the_best_stay_beside_the_newest(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=1, keep_best=2)
  for step, metric in enumerate([0.5, None, 0.9, 0.5, float("nan"), 0.2], 1):
    save(checkpoints, step, state(step), {}, metric=metric)
  assert checkpoints.steps() == [1, 3, 6] and checkpoints.best() == [(0.9, 3), (0.5, 1), (0.2, 6)]
  assert same(checkpoints.restore(state(), 3)[1], state(3))
  checkpoints.drop_after(1)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "1.json"]


def test_a_metric_that_is_known_later_counts_as_one_that_was_known(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=1, keep_best=1)
  checkpoints.save(3, state(3), {"a": 1})
  checkpoints.weigh(3, None)
  assert checkpoints.best() == []
  checkpoints.weigh(4, 0.5)  # there is no such step
  checkpoints.weigh(3, np.float32(0.5))
  checkpoints.weigh(3, 0.9)  # it has one
  assert checkpoints.best() == [(0.5, 3)]
  for step, metric in ((5, 0.25), (6, None)):
    save(checkpoints, step, state(step), {}, metric=metric)
  assert checkpoints.steps() == [3, 6]
  step, found, record = checkpoints.restore(state(), 3)
  assert same(found, state(3)) and record == {"a": 1}


def test_a_number_of_the_record_that_changed_is_seen(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  save(checkpoints, 8, state(), {"seconds": 2.5})
  note = json.loads((tmp_path / "8.json").read_text())
  note["record"]["seconds"] = 2.75
  (tmp_path / "8.json").write_text(json.dumps(note))
  with pytest.raises(CheckpointError, match="record differs from its sum.*no other one is good"):
    checkpoints.restore(state())


@pytest.mark.parametrize("fault", ["lost", "extra", "empty note", "list note"])
def test_other_damage_is_named(tmp_path, fault):
  checkpoints = Checkpoints(tmp_path)
  save(checkpoints, 1, state(), {})
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
  save(checkpoints, 1, state(), {})
  with pytest.raises(CheckpointError, match="checkpoint 1 ") as raised:
    checkpoints.restore({"something": jnp.zeros(3)})
  assert "\n" not in str(raised.value)


def test_going_back_removes_what_is_newer(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=3)
  for step in (1, 2, 3):
    save(checkpoints, step, state(step), {})
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
  save(checkpoints, 1, state(), {})
  assert checkpoints.restore(state())[0] == 1 and (tmp_path / "runs" / "here" / "1.json").exists()
