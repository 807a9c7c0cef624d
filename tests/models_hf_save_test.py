"""Saving a model: it appears whole or not at all, replaces nothing but a model, and several processes write one."""

import dataclasses
import pathlib

import fake_store
import jax
import numpy as np
import pytest
from hosts_job import job
from model_cases import random_params

from seed_jax.models import hf
from seed_jax.models.config import ModelConfig

TIED = ModelConfig("LlamaForCausalLM", 37, 24, 2, 4, 2, 6, 20, rope_theta=500.0, rms_norm_eps=1e-5, eos_id=3)


@pytest.fixture
def saved(tmp_path):
  params = random_params(TIED)
  hf.save(tmp_path / "model", TIED, params)
  return tmp_path / "model", params


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  return fake_store.install(tmp_path, monkeypatch)


def test_parameters_of_another_shape_are_not_saved(tmp_path):
  params = random_params(TIED)
  with pytest.raises(ValueError, match=r"missing .*layers.q_bias.* unknown none"):
    hf.save(tmp_path / "model", dataclasses.replace(TIED, architecture="Qwen2ForCausalLM", qkv_bias=True), params)
  with pytest.raises(ValueError, match=r"embed has shape \(37, 24\), this LlamaForCausalLM has \(38, 24\)"):
    hf.save(tmp_path / "model", dataclasses.replace(TIED, vocab_size=38), params)
  assert not list(tmp_path.iterdir())


def test_a_save_replaces_a_model_and_nothing_else(saved, tmp_path):
  directory, _ = saved
  (directory / "stale").write_text("")
  params = random_params(TIED, seed=1)
  hf.save(directory, TIED, params)
  assert not (directory / "stale").exists()
  np.testing.assert_array_equal(hf.load(directory)[1]["embed"], params["embed"])
  (tmp_path / "empty").mkdir()
  hf.save(tmp_path / "empty", TIED, params)
  (tmp_path / "photos").mkdir()
  (tmp_path / "photos" / "one.jpg").write_text("x")
  for wrong in ("photos", "photos/one.jpg"):
    with pytest.raises(ValueError, match="exists and is not a model directory"):
      hf.save(tmp_path / wrong, TIED, params)
  assert (tmp_path / "photos" / "one.jpg").read_text() == "x"


def test_a_failed_save_leaves_the_old_model(saved, tmp_path):
  directory, params = saved

  class Broken:
    stop_ids = (1,)

    def save(self, directory):
      raise OSError("disk full")

  with pytest.raises(OSError, match="disk full"):
    hf.save(directory, TIED, random_params(TIED, seed=1), tokenizer=Broken())
  np.testing.assert_array_equal(hf.load(directory)[1]["embed"], params["embed"])
  assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_rename_brings_the_old_model_back(saved, tmp_path, monkeypatch):
  directory, params = saved
  real = pathlib.Path.rename

  def rename(self, target):
    if ".new-" in self.name:
      raise OSError("read-only file system")
    return real(self, target)

  monkeypatch.setattr(pathlib.Path, "rename", rename)
  with pytest.raises(OSError, match="read-only"):
    hf.save(directory, TIED, random_params(TIED, seed=1))
  np.testing.assert_array_equal(hf.load(directory)[1]["embed"], params["embed"])
  assert [path.name for path in tmp_path.iterdir()] == ["model"]


PROCESS = """
import sys
from seed_jax import hosts, sharding
from seed_jax.models import hf, hf_files
source, target = sys.argv[1:]
hosts.start()
leave = hf_files.Safetensors.__exit__
def leaving(source, *error):
  print("bytes read", source.bytes_read)
  leave(source, *error)
hf_files.Safetensors.__exit__ = leaving
config, placed = hf.load_sharded(source, sharding.make_mesh(1, 4, 1))
assert not placed["layers"]["q"].is_fully_addressable
hf.save(target, config, placed, max_shard_bytes=5000)
hosts.finish()
"""


@pytest.mark.slow
def test_two_processes_read_each_byte_once_and_write_one_model(tmp_path):
  params = random_params(TIED)
  hf.save(tmp_path / "model", TIED, params)
  ended = job(PROCESS, [tmp_path / "model", tmp_path / "theirs"], count=2, devices=2, cache=tmp_path / "cache")
  assert [code for code, *_ in ended] == [0, 0], ended
  told = [told for _, told, *_ in ended]
  read = [int(line.split()[-1]) for lines in told for line in lines.splitlines() if "bytes read" in line]
  # 37 rows of the embedding are ten for each of four devices but seven for the last.
  assert sum(read) == sum(leaf.nbytes for leaf in jax.tree.leaves(params)) and read[0] - read[1] == 3 * 24 * 4
  jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "theirs")[1], params)
  assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["model", "theirs"]


def test_a_store_is_written_and_read_in_place(bucket):
  params = random_params(TIED, seed=2)
  hf.save("gs://bucket/policy/final", TIED, params, max_shard_bytes=5000)
  hf.save("gs://bucket/policy/final", TIED, params)  # the second time it is there already
  written = ["config.json", "generation_config.json", "model.safetensors"]
  assert sorted(file.name for file in (bucket / "policy" / "final").iterdir()) == written
  jax.tree.map(np.testing.assert_array_equal, hf.load("gs://bucket/policy/final")[1], params)
  jax.tree.map(np.testing.assert_array_equal, hf.load(bucket / "policy" / "final")[1], params)
  with pytest.raises(FileNotFoundError, match="no such model: gs://bucket/policy/first"):
    hf.load("gs://bucket/policy/first")


def test_a_failed_save_to_a_store_leaves_no_model(bucket):
  params = random_params(TIED)
  hf.save("gs://bucket/model", TIED, params)

  class Broken:
    stop_ids = (1,)

    def save(self, directory):
      raise OSError("quota")

  with pytest.raises(OSError, match="quota"):
    hf.save("gs://bucket/model", TIED, params, tokenizer=Broken())
  with pytest.raises(FileNotFoundError, match="gs://bucket/model has no config.json"):
    hf.load("gs://bucket/model")
  (bucket / "photos").mkdir()
  (bucket / "photos" / "one.jpg").write_text("x")
  with pytest.raises(ValueError, match="gs://bucket/photos exists and is not a model directory"):
    hf.save("gs://bucket/photos", TIED, params)


def test_a_tokenizer_goes_to_a_store(bucket):
  class Files:
    stop_ids = (5, 7)

    def save(self, directory):
      (directory / "tokenizer.json").write_text("{}")

  hf.save("gs://bucket/model", TIED, random_params(TIED), tokenizer=Files())
  assert (bucket / "model" / "tokenizer.json").read_text() == "{}"
  with hf.local_copy("gs://bucket/model") as local:
    assert sorted(file.name for file in local.iterdir()) == ["config.json", "generation_config.json", "tokenizer.json"]
