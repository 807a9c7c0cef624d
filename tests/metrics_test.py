"""JSON files, metric rows that survive a kill, timers and the compile counter."""

import json
import math
import os
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import metrics


def rows(directory, name="metrics"):
  return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


class TestJson:
  def test_round_trip_of_every_kind_of_value(self, tmp_path):
    path = tmp_path / "deep" / "train.json"
    value = {
      "a": np.float32(0.5),
      "b": jnp.arange(3),
      "c": (1, "two", None, True),
      "d": {"e": math.nan, 3: math.inf},
      "f": tmp_path,
    }
    metrics.write_json(path, value)
    read = metrics.read_json(path)
    assert read == {
      "a": 0.5,
      "b": [0, 1, 2],
      "c": [1, "two", None, True],
      "d": {"e": None, "3": None},
      "f": str(tmp_path),
    }
    assert os.listdir(path.parent) == ["train.json"]  # No temporary file is left.

  def test_a_failing_write_keeps_the_old_file(self, tmp_path):
    path = tmp_path / "x.json"
    metrics.write_json(path, {"old": 1})

    class Unwritable:
      def __str__(self):
        raise RuntimeError("no text")

    with pytest.raises(RuntimeError, match="no text"):
      metrics.write_json(path, {"new": Unwritable()})
    assert metrics.read_json(path) == {"old": 1}

  def test_missing_and_broken_files(self, tmp_path):
    assert metrics.read_json(tmp_path / "none.json", default=None) is None
    with pytest.raises(FileNotFoundError):
      metrics.read_json(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"a": ')
    with pytest.raises(ValueError, match=r"torn\.json is not a JSON file.*run its stage again"):
      metrics.read_json(tmp_path / "torn.json", default=None)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes\.json is not a JSON file"):
      metrics.read_json(tmp_path / "bytes.json")

  def test_half_a_character_survives(self, tmp_path):
    metrics.write_json(tmp_path / "x.json", {"text": "é\ud800"})
    assert metrics.read_json(tmp_path / "x.json") == {"text": "é\ud800"}
    for _ in range(2):  # Opening again must neither fail nor change it.
      with metrics.Writer(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"text": "é\ud800"})
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == [{"iteration": 1, "text": "é\ud800"}]


class TestWriter:
  def test_rows_are_on_disk_when_write_returns(self, tmp_path):
    writer = metrics.Writer(tmp_path, tensorboard=False)
    writer.write(1, {"loss": jnp.float32(0.25), "note": "x", "counts": np.array([1, 2])})
    assert rows(tmp_path) == [{"iteration": 1, "loss": 0.25, "note": "x", "counts": [1, 2]}]
    writer.close()
    writer.close()
    writer.write(2, {"loss": 1.0})  # After closing nothing is written, and nothing raised.
    assert len(rows(tmp_path)) == 1

  def test_numbers_that_are_not_finite_are_named(self, tmp_path, capsys):
    with metrics.Writer(tmp_path, tensorboard=False) as writer:
      writer.write(7, {"good": 1.0, "bad": math.nan, "worse": jnp.float32(-jnp.inf)})
    assert rows(tmp_path) == [{"iteration": 7, "good": 1.0, "bad": None, "worse": None, "nonfinite": ["bad", "worse"]}]
    assert "bad, worse not finite at iteration 7" in capsys.readouterr().err

  def test_a_torn_last_line_is_mended(self, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "a": 1}\n{"iteration": 2, "a"')
    with metrics.Writer(tmp_path, tensorboard=False) as writer:
      writer.write(2, {"a": 2})
    assert rows(tmp_path) == [{"iteration": 1, "a": 1}, {"iteration": 2, "a": 2}]

  def test_a_whole_last_line_without_its_newline_is_kept(self, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "a": 1}')
    with metrics.Writer(tmp_path, tensorboard=False) as writer:
      writer.write(2, {"a": 2})
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2]

  def test_resume_drops_the_rows_after_the_checkpoint(self, tmp_path):
    with metrics.Writer(tmp_path, tensorboard=False) as writer:
      for iteration in range(1, 6):
        writer.write(iteration, {"run": 1})
    with metrics.Writer(tmp_path, resume=3, tensorboard=False) as writer:
      assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3]
      writer.write(4, {"run": 2})
    assert [(row["iteration"], row["run"]) for row in rows(tmp_path)] == [(1, 1), (2, 1), (3, 1), (4, 2)]

  def test_a_killed_process_leaves_rows_that_the_next_one_continues(self, tmp_path):
    code = (
      "import sys, os, signal; from seed_jax import metrics\n"
      "writer = metrics.Writer(sys.argv[1], tensorboard=False)\n"
      "for i in range(1, 4): writer.write(i, {'x': i})\n"
      "writer._file.write('{\"iteration\": 4'); writer._file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    with metrics.Writer(tmp_path, resume=2, tensorboard=False) as writer:
      writer.write(3, {"x": 30})
    assert [(row["iteration"], row["x"]) for row in rows(tmp_path)] == [(1, 1), (2, 2), (3, 30)]

  def test_other_names_and_keys(self, tmp_path):
    with metrics.Writer(tmp_path, name="sft", key="step", tensorboard=False) as writer:
      writer.write(10, {"nll": 2.0})
    assert rows(tmp_path, "sft") == [{"step": 10, "nll": 2.0}]
    assert metrics.read_rows(tmp_path / "sft.jsonl", key="step") == [{"step": 10, "nll": 2.0}]

  def test_tensorboard_files_are_written(self, tmp_path):
    with metrics.Writer(tmp_path) as writer:
      writer.write(1, {"loss": 1.0, "text": "not a number"})
    (events,) = (tmp_path / "tensorboard" / "metrics").iterdir()
    assert b"loss" in events.read_bytes() and b"not a number" not in events.read_bytes()

  def test_a_missing_viewer_does_not_stop_a_run(self, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with metrics.Writer(tmp_path, wandb="project") as writer:
      writer.write(1, {"a": 1.0})
    assert len(rows(tmp_path)) == 1
    error = capsys.readouterr().err
    assert "no TensorBoard files" in error and "no Weights & Biases run" in error

  def test_other_processes_write_nothing(self, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "is_writer", lambda: False)
    with metrics.Writer(tmp_path / "run") as writer:
      writer.write(1, {"a": 1.0})
    assert not (tmp_path / "run").exists()

  def test_an_object_store_gets_whole_files(self, tmp_path, monkeypatch):
    writer = metrics.Writer(tmp_path, tensorboard=False)
    writer._file.close()
    writer._file = None  # As on a path that cannot be appended to.
    writer.write(1, {"a": 1})
    assert rows(tmp_path) == []
    writer._written -= 31
    writer.write(2, {"a": 2})
    assert len(rows(tmp_path)) == 2
    writer.write(3, {"a": 3})
    writer.close()
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3]


def test_read_rows_takes_the_later_of_two_and_leaves_out_noise(tmp_path):
  path = tmp_path / "m.jsonl"
  path.write_bytes(
    b'{"iteration": 2, "a": 1}\n[]\nnoise\n\xff\n{"iteration": 1}\n{"iteration": 2, "a": 2}\n{"iteration": "x"}\n'
  )
  assert metrics.read_rows(path) == [{"iteration": 1}, {"iteration": 2, "a": 2}]
  assert metrics.read_rows(tmp_path / "none.jsonl") == []


def episode(family, won, **changes):
  turn = types.SimpleNamespace(observation="a room", action="look", response="look\ud800", valid=True)
  fields = {"task": "find it", "turns": [turn], "error": "", "skill": "", "summary": "", "analysis": ""} | changes
  return types.SimpleNamespace(family=family, won=won, **fields)


class TestExamples:
  def test_both_outcomes_and_many_families(self, tmp_path):
    episodes = [episode("heat", True), episode("heat", True), episode("heat", False), episode("cool", True)]
    episodes += [episode("pick", True, error="broke"), episode("pick", True, turns=[])]
    metrics.keep_examples(tmp_path, episodes, split="train", iteration=3, count=4)
    kept = metrics.read_json(tmp_path / "examples.json")
    assert [(item["family"], item["won"]) for item in kept] == [("heat", True), ("cool", True), ("heat", False)]
    assert kept[0]["turns"] == [{"observation": "a room", "action": "look", "response": "look\ud800", "valid": True}]

  def test_the_same_again_replaces_and_another_adds(self, tmp_path):
    for split, iteration in (("train", 3), ("unseen", None), ("train", 3), ("train", 4)):
      metrics.keep_examples(tmp_path, [episode("heat", True)], split=split, iteration=iteration)
    kept = metrics.read_json(tmp_path / "examples.json")
    assert [(item["split"], item["iteration"]) for item in kept] == [("unseen", None), ("train", 3), ("train", 4)]

  def test_what_the_analysis_gave(self, tmp_path):
    episodes = [
      episode("a", True, analysis="{", skill=""),
      episode("b", True, analysis="{}", skill="s"),
      episode("c", True),
    ]
    metrics.keep_examples(tmp_path, episodes, split="train")
    assert [item["parsed"] for item in metrics.read_json(tmp_path / "examples.json")] == [False, True, None]


def test_timer_sums_a_phase_and_starts_again():
  timer = metrics.Timer()
  for _ in range(2):
    with timer("play"):
      time.sleep(0.02)
  with pytest.raises(RuntimeError), timer("update"):
    raise RuntimeError
  taken = timer.take()
  assert set(taken) == {"seconds/play", "seconds/update"}
  assert 0.04 <= taken["seconds/play"] < 1.0
  assert timer.take() == {}


def test_compile_counter_sees_new_shapes_only():
  function = jax.jit(lambda x: x * 3 - 1)
  arrays = [jnp.zeros(n) for n in (5, 6)]
  with metrics.CompileCounter() as counter:
    function(arrays[0])
    assert counter.take() == 1
    function(arrays[0])
    assert counter.take() == 0
    function(arrays[1])
    assert counter.take() == 1 and counter.count == 2
    assert counter.seconds > 0 and sum(counter.names.values()) == 2
  jax.jit(lambda x: x + 7)(arrays[0])
  assert counter.count == 2
  counter.close()


def test_importing_starts_no_device_and_no_model_library():
  heavy = {"transformers", "jax", "torch", "matplotlib", "tqdm"}
  code = f"import sys, seed_jax.metrics, seed_jax.intervals; print(*(set(sys.modules) & {heavy}))"
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
