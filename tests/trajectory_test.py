"""Episodes as data: exact on disk, ordered, all or nothing."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from seed_jax import records
from seed_jax.trajectory import (
  Group,
  Trajectory,
  Turn,
  append_jsonl,
  from_json,
  group_trajectories,
  load_jsonl,
  load_trajectories,
  save_trajectories,
  to_json,
)

settings.register_profile("trajectory", derandomize=True, max_examples=25, deadline=None, database=None)
PROFILE = settings.get_profile("trajectory")


def turn(number: int = 0, **changes) -> Turn:
  fields = dict(
    observation=f"You see shelf {number}.",
    admissible=[f"go to shelf {i}" for i in range(number)],
    prompt="Your task is to: tidy up",
    prompt_ids=range(number + 1),
    response_ids=[5] * number + [2],
    logprobs=[-0.1 * (i + 1) for i in range(number + 1)],
    response="go to shelf 1",
    action="go to shelf 1",
    valid=number % 2 == 0,
    reward=0.1 * number,
  )
  return Turn(**fields | changes)


def episode(count: int = 3, group: int = 0, member: int = 0, **changes) -> Trajectory:
  fields = dict(
    task_id=f"household/train/{group}",
    family="heat",
    task="tidy up",
    mode="window",
    turns=[turn(i) for i in range(count)],
    won=True,
    episode_return=10.1,
    truncated=False,
  )
  return Trajectory(group=group, member=member, **fields | changes)


# ---- the values


def test_turn_holds_typed_arrays():
  one = turn(2)
  assert one.prompt_ids.dtype == one.response_ids.dtype == np.int32 and one.logprobs.dtype == np.float32
  assert one.admissible == ("go to shelf 0", "go to shelf 1")
  assert turn(prompt_ids=[], response_ids=[], logprobs=[]).response_ids.dtype == np.int32


@pytest.mark.parametrize("ids", [[1.5], [-1], [2**31], [[1]], 3, ["a"]])
def test_turn_refuses_what_is_no_token_id(ids):
  with pytest.raises(ValueError, match="prompt_ids must be a vector of token ids"):
    turn(prompt_ids=ids)


def test_turn_needs_one_logprob_for_every_sampled_token():
  with pytest.raises(ValueError, match=r"\[3\] and response_ids \[2\]"):
    turn(response_ids=[1, 2], logprobs=[0.0, 0.0, 0.0])


def test_trajectory_sums_up_its_turns():
  one = episode(3)  # R = 1, 2, 3 and P = 1, 2, 3; turns 0 and 2 are valid
  assert (one.length, one.response_tokens, one.prompt_tokens) == (3, 6, 6)
  assert one.valid_ratio == pytest.approx(2 / 3) and episode(0).valid_ratio == 0
  assert one.steps[1] == ("You see shelf 1.", "go to shelf 1", False)
  assert episode(1, turns=[turn(response="<think>x</think>go", action="go")]).action_steps == [
    ("You see shelf 0.", "go", True)
  ]


def test_outcome():
  assert episode().outcome == "success"
  assert episode(won=False).outcome == "failure"
  assert episode(won=False, error="the engine broke").outcome == "unknown"


def test_unknown_mode_is_refused():
  with pytest.raises(ValueError, match="'chat' is unknown; choose one of window, transcript"):
    episode(mode="chat")


def test_equality_sees_every_field_and_every_array():
  assert episode() == episode() and turn() == turn() and turn() != episode() and turn() != 3
  for field, value in [
    ("task_id", "x"),
    ("group", 1),
    ("won", False),
    ("skill", "s"),
    ("episode_return", 0.0),
    ("turns", []),
  ]:
    assert (
      episode() != episode(**{field: value})
      if field != "group"
      else episode() != episode(group=1, task_id="household/train/0")
    )
  for field, value in [
    ("prompt_ids", [9]),
    ("response_ids", [9]),
    ("logprobs", [-9.0]),
    ("reward", 1.0),
    ("admissible", ["a"]),
  ]:
    assert turn() != turn(**{field: value}), field
  assert turn(logprobs=[np.nan]) == turn(logprobs=[np.nan])


def test_groups_are_sorted_and_checked():
  members = [
    episode(group=1, member=1, episode_return=1.0),
    episode(group=0),
    episode(group=1, member=0, episode_return=2.0),
  ]
  groups = group_trajectories(members)
  assert [(g.id, g.task_id, g.returns.tolist()) for g in groups] == [
    (0, "household/train/0", [pytest.approx(10.1)]),
    (1, "household/train/1", [2.0, 1.0]),
  ]
  assert groups[1].returns.dtype == np.float32
  with pytest.raises(ValueError, match="group 1 mixes 2 tasks"):
    group_trajectories([*members, episode(group=1, member=5, task_id="other")])
  with pytest.raises(ValueError, match=r"group 0 has members \[3, 3\]"):
    Group(0, [episode(member=3), episode(member=3)])


# ---- to disk and back

ODD = "é漢🥔 \x00\r\n\u2028<|im_end|> \ud83d"  # the last one is half of a surrogate pair


def mixed() -> list[Trajectory]:
  odd = turn(2, observation=ODD, admissible=["", ODD], prompt=ODD, response=ODD, action=ODD, reward=-1e-300)
  exact = turn(
    prompt_ids=np.array([0, 2**31 - 1]), response_ids=[1, 2, 3, 4], logprobs=np.float32([-1e-42, -0.0, -np.pi, -3e38])
  )
  empty = turn(prompt_ids=[], response_ids=[], logprobs=[], admissible=[])
  return [
    episode(7, member=2**40),
    episode(0, won=False, error="the engine broke"),
    episode(
      turns=[odd, empty, exact, odd], mode="transcript", task=ODD, skill=ODD, summary=ODD, analysis=ODD, truncated=True
    ),
    episode(1, group=-1, episode_return=0.1 + 0.2),
    *[episode(i % 4, group=i) for i in range(40)],
  ]


def test_dataset_gives_everything_back_in_order(tmp_path):
  save_trajectories(tmp_path / "set", mixed())
  loaded = load_trajectories(tmp_path / "set")
  assert loaded == mixed()
  assert {a.dtype for t in loaded for u in t.turns for a in (u.prompt_ids, u.response_ids)} == {np.dtype(np.int32)}
  assert np.signbit(loaded[2].turns[2].logprobs[1]), "the sign of zero is kept too"


def test_dataset_is_a_tfds_dataset_without_tensorflow(tmp_path):
  save_trajectories(tmp_path / "set", mixed())
  program = (
    "import sys, tensorflow_datasets as tfds\n"
    f"rows = tfds.builder_from_directory({str(tmp_path / 'set')!r}).as_data_source('train')\n"
    "print(len(rows), rows[2]['mode'].decode(), rows[2]['response_ids'].tolist(), 'tensorflow' in sys.modules)"
  )
  out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
  assert out == "44 transcript [5, 5, 2, 1, 2, 3, 4, 5, 5, 2] False\n"
  assert any("array_record" in file.name for file in (tmp_path / "set").iterdir())


def test_an_empty_list_is_a_dataset(tmp_path):
  save_trajectories(tmp_path / "set", [])
  assert load_trajectories(tmp_path / "set") == []


def test_more_than_one_shard_keeps_the_order(tmp_path, monkeypatch):
  import tensorflow_datasets as tfds

  writer = tfds.core.SequentialWriter
  monkeypatch.setattr(
    tfds.core, "SequentialWriter", lambda info, max_examples_per_shard, **k: writer(info, max_examples_per_shard=3, **k)
  )
  save_trajectories(tmp_path / "set", mixed())
  assert len(list((tmp_path / "set").glob("*array_record*"))) == 15
  assert load_trajectories(tmp_path / "set") == mixed()


def test_loading_starts_no_device_and_loads_no_model_code():
  program = (
    "import sys, seed_jax.trajectory, seed_jax.skills, seed_jax.analyzers\n"
    "print([m for m in ('jax', 'transformers', 'tensorflow', 'tensorflow_datasets', 'httpx') if m in sys.modules])"
  )
  assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_saving_replaces_what_was_there_and_leaves_nothing_beside(tmp_path):
  save_trajectories(tmp_path / "set", mixed())
  save_trajectories(str(tmp_path / "set"), [episode(1)])
  assert load_trajectories(str(tmp_path / "set")) == [episode(1)]
  assert os.listdir(tmp_path) == ["set"]


def test_a_failing_save_keeps_the_old_set(tmp_path):
  save_trajectories(tmp_path / "set", [episode(1)])
  with pytest.raises(Exception, match="skill holds a int"):
    save_trajectories(tmp_path / "set", [episode(2), episode(2, skill=7)])
  assert load_trajectories(tmp_path / "set") == [episode(1)]
  save_trajectories(tmp_path / "set", [episode(2)])
  assert load_trajectories(tmp_path / "set") == [episode(2)] and os.listdir(tmp_path) == ["set"]


class Killed(BaseException):
  pass


@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stop_at_any_move_leaves_the_old_set_or_the_new_one(tmp_path, call, when):
  old, new = [episode(1)], [episode(2), episode(3)]
  save_trajectories(tmp_path / "set", old)
  kind, calls = type(epath.Path("/")), []

  def deadly(original):
    def operation(*args, **kwargs):
      calls.append(original.__name__)
      if len(calls) == call and when == "before":
        raise Killed
      result = original(*args, **kwargs)
      if len(calls) == call:
        raise Killed
      return result

    return operation

  with pytest.MonkeyPatch.context() as patch:
    for name in ("rename", "rmtree", "mkdir"):
      patch.setattr(kind, name, deadly(getattr(kind, name)))
    try:
      save_trajectories(tmp_path / "set", new)
    except Killed:
      pass
    else:
      assert calls == ["mkdir", "rename", "rename", "rmtree"] and call > len(calls)
  moved = call > 2 or (call, when) == (2, "after")  # the old set has made room
  assert load_trajectories(tmp_path / "set") == (new if moved else old)
  with pytest.raises(Exception, match="skill holds a int"):
    save_trajectories(tmp_path / "set", [episode(1, skill=7)])
  assert load_trajectories(tmp_path / "set") == (new if moved else old), "a failing save after that loses nothing"
  save_trajectories(tmp_path / "set", mixed())
  assert load_trajectories(tmp_path / "set") == mixed()
  assert os.listdir(tmp_path) == ["set"]


def test_a_kill_while_writing_keeps_the_old_set(tmp_path):
  save_trajectories(tmp_path / "set", [episode(1)])
  program = f"""
import os, signal
from seed_jax.trajectory import load_trajectories, save_trajectories
def stream():
  yield from load_trajectories({str(tmp_path / "set")!r}) * 100
  os.kill(os.getpid(), signal.SIGKILL)
save_trajectories({str(tmp_path / "set")!r}, stream())
"""
  assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
  assert load_trajectories(tmp_path / "set") == [episode(1)]


# ---- damage


def test_a_missing_dataset_is_one_clear_line(tmp_path):
  with pytest.raises(ValueError, match="set holds no complete set of records; run the stage that writes it"):
    load_trajectories(tmp_path / "set")


def damages():
  yield "half", lambda data: data[: len(data) // 2]
  yield "empty", lambda data: b""
  yield "flip", lambda data: data[:90] + bytes([data[90] ^ 255]) + data[91:]
  yield "gone", lambda data: None


@pytest.mark.parametrize("damage", [d for _, d in damages()], ids=[name for name, _ in damages()])
@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "records-train.array_record-00000"])
def test_damage_is_one_clear_line(tmp_path, name, damage):
  save_trajectories(tmp_path / "set", mixed())
  file = tmp_path / "set" / name
  data = damage(file.read_bytes())
  file.unlink() if data is None else file.write_bytes(data)
  with pytest.raises(ValueError, match="set (are damaged|holds no complete)|in .*set are damaged") as caught:
    load_trajectories(tmp_path / "set")
  assert "\n" not in str(caught.value) and str(tmp_path / "set") in str(caught.value)


def test_a_flipped_bit_in_the_middle_of_the_data_is_seen(tmp_path):
  save_trajectories(tmp_path / "set", mixed())
  (file,) = (tmp_path / "set").glob("*array_record*")
  data = bytearray(file.read_bytes())
  text = [i for i in range(len(data)) if data[i]]
  data[text[len(text) // 2]] ^= 1
  file.write_bytes(data)
  with pytest.raises(ValueError, match="damaged"):
    load_trajectories(tmp_path / "set")


def test_a_dataset_with_other_fields_is_refused_before_it_is_opened(tmp_path):
  records.write_dataset(tmp_path / "set", {"a": "text"}, [{"a": "x"}])
  with pytest.raises(ValueError, match="fields are not those of this version"):
    load_trajectories(tmp_path / "set")


def test_counts_that_do_not_fit_are_named(tmp_path):
  from seed_jax import trajectory

  row = trajectory._record(episode(2)) | {"prompt_ids_count": [1, 1]}
  records.write_dataset(tmp_path / "set", trajectory._SCHEMA, [row])
  with pytest.raises(ValueError, match="prompt_ids of household/train/0: 3 values do not fill 2 turns"):
    load_trajectories(tmp_path / "set")


# ---- JSON lines


def test_json_gives_everything_back_in_one_ascii_line():
  for one in mixed():
    line = to_json(one)
    assert "\n" not in line and line.isascii()
    assert from_json(line) == one


TEXT = st.text(st.characters(codec=None))


@settings(PROFILE)
@given(
  texts=st.lists(TEXT, min_size=5, max_size=5),
  logprobs=st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32), max_size=5),
  reward=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_episode_survives_both_forms(tmp_path_factory, texts, logprobs, reward):
  one = turn(
    observation=texts[0],
    prompt=texts[1],
    admissible=texts,
    response_ids=range(len(logprobs)),
    logprobs=logprobs,
    reward=reward,
  )
  whole = episode(turns=[one, turn(), one], task=texts[2], skill=texts[3], analysis=texts[4], episode_return=reward)
  assert from_json(to_json(whole)) == whole
  directory = tmp_path_factory.mktemp("any") / "set"
  save_trajectories(directory, [whole, episode()])
  assert load_trajectories(directory) == [whole, episode()]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_json_refuses_numbers_that_are_not_finite(value):
  with pytest.raises(ValueError, match="household/train/0 member 0 holds a reward or logprob that is not finite"):
    to_json(episode(turns=[turn(logprobs=[value])]))


def broken_lines():
  good = json.loads(to_json(episode(1)))
  yield "not JSON"
  yield "[]"
  yield "7"
  yield "[" * 100_000
  yield json.dumps({k: v for k, v in good.items() if k != "turns"})
  yield json.dumps(good | {"more": 1})
  yield json.dumps(good | {"skill": 3})
  yield json.dumps(good | {"turns": [3]})
  yield json.dumps(good | {"turns": [good["turns"][0] | {"prompt_ids": ["a"]}]})
  yield json.dumps(good | {"turns": [good["turns"][0] | {"prompt_ids": [2**70]}]})


@pytest.mark.parametrize("line", list(broken_lines()), ids=range(10))
def test_what_is_no_trajectory_is_one_clear_line(line):
  with pytest.raises(ValueError, match="not a trajectory") as caught:
    from_json(line)
  assert len(str(caught.value)) < 400


def test_object_storage_gets_the_description_last(tmp_path, monkeypatch):
  monkeypatch.setattr(records, "_remote", lambda path: True)  # then nothing is moved and nothing is read in place
  copied, copy = [], type(epath.Path("/")).copy
  monkeypatch.setattr(
    type(epath.Path("/")),
    "copy",
    lambda self, dst, **k: (copied.append(os.path.basename(dst)), copy(self, dst, **k))[1],
  )
  save_trajectories(tmp_path / "set", [episode(1)])
  save_trajectories(tmp_path / "set", mixed())
  assert len(copied) == 6 and copied[2] == copied[5] == "dataset_info.json"
  assert load_trajectories(tmp_path / "set") == mixed()


def test_jsonl_grows_and_drops_what_a_kill_left_unfinished(tmp_path):
  path = tmp_path / "episodes.jsonl"
  append_jsonl(path, [episode(1)])
  append_jsonl(path, [episode(2), episode(3)])
  assert load_jsonl(path) == [episode(1), episode(2), episode(3)]
  whole = path.read_bytes()
  path.write_bytes(whole[:-5])
  assert load_jsonl(path) == [episode(1), episode(2)]
  append_jsonl(path, [episode(4)])
  assert load_jsonl(path) == [episode(1), episode(2), episode(4)]
  with open(path, "ab") as file:
    file.write(b"unfinished" * 20_000)
  append_jsonl(path, [])
  assert load_jsonl(path) == [episode(1), episode(2), episode(4)]
  path.write_bytes(b"unfinished" * 20_000)
  assert load_jsonl(path) == []
  append_jsonl(path, [episode(0)])
  assert load_jsonl(path) == [episode(0)]


def test_jsonl_names_a_damaged_line(tmp_path):
  path = tmp_path / "episodes.jsonl"
  append_jsonl(path, [episode(1)])
  with open(path, "a") as file:
    file.write('{"half": \n')
  append_jsonl(path, [episode(1)])
  with pytest.raises(ValueError, match="episodes.jsonl line 2 is damaged"):
    load_jsonl(path)
