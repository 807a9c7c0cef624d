"""Weights from orbax to Hugging Face and back by command line: bit for bit, errors in one line."""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import fake_store
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from model_cases import random_params
from tiny_run import tiny

from seed_jax import checkpoint, checkpoint_params, convert, optimizer, sharding, text, update
from seed_jax.checkpoint import Checkpoints
from seed_jax.models import decoder, hf
from seed_jax.models.config import ModelConfig
from seed_jax.run import Run

QWEN2 = ModelConfig("Qwen2ForCausalLM", 512, 32, 3, 4, 2, 8, 48, qkv_bias=True, tie_embeddings=False, eos_id=3)
CORPUS = ["Your task is to heat some potato. You see shelf 1.", "Nothing happens. Look in the fridge first."] * 20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """(a work directory with checkpoints 2 and 3 of training, the parameters of each)."""
  place = tmp_path_factory.mktemp("convert")
  run = Run(tiny(), place / "run", plain=True)
  run.open()
  run.tokenizer = text.train_sentencepiece(CORPUS, str(place / "tokenizer"), vocab_size=512)
  config = dataclasses.replace(QWEN2, eos_id=run.tokenizer.eos_id, pad_id=run.tokenizer.pad_id)
  run.save_policy("base", config, random_params(config))
  chain = optimizer.make_optimizer(optimizer.OptimizerConfig(), 10)
  checkpoints, params = Checkpoints(place / "run" / "checkpoints" / "train"), {}
  for step in (2, 3):
    params[step] = random_params(config, seed=step)
    with jax.set_mesh(sharding.make_mesh(1, 2, 2)):
      state = update.init_state(sharding.put_params(params[step], sharding.make_mesh(1, 2, 2)), chain)
    checkpoints.save(step, state, {})
  checkpoints.finish()
  with Checkpoints(place / "run" / "checkpoints" / "sft") as others:
    others.save(7, (state, sharding.put_replicated(params[2], run.mesh)), {})
  run.save_policy("final", config, params[3])
  return place / "run", params


@pytest.fixture
def converted(tmp_path, capsys):
  """Runs a command line that must succeed in one line; returns the path."""

  def call(source, name, *more, to=None):
    capsys.readouterr()
    to = to or str(tmp_path / name)
    assert convert.cli(["convert", f"--from={source}", f"--to={to}", *more]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 and to in captured.out and not captured.err
    return tmp_path / name

  return call


@pytest.fixture
def fault(capsys):
  """Runs a command line that must fail in one line; returns that line without `error: `."""

  def call(*arguments, code=2):
    assert convert.cli(["convert", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and not captured.out, captured
    return captured.err.removeprefix("error: ").rstrip("\n")

  return call


def files(directory):
  return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir() if path.is_file()}


def equal(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# ---- from a run


def test_the_newest_checkpoint_becomes_what_the_run_itself_would_write(made, converted):
  workdir, _ = made
  assert files(converted(workdir, "hf")) == files(workdir / "policy" / "final")


def test_a_chosen_step_and_another_stage(made, converted):
  workdir, params = made
  equal(hf.load(converted(f"{workdir}:2", "second"))[1], params[2])
  equal(hf.load(converted(f"{workdir}/checkpoints/train:2", "again"))[1], params[2])
  # A checkpoint of more than a state: its first part is the state.
  equal(hf.load(converted(workdir / "checkpoints" / "sft", "pair"))[1], params[3])


def test_a_tokenizer_goes_along(made, converted):
  workdir, _ = made
  ours = text.load_tokenizer(str(converted(workdir, "hf")))
  theirs = text.load_tokenizer(str(workdir / "policy" / "base"))
  assert ours.first("heat some potato") == theirs.first("heat some potato") and ours.stop_ids == theirs.stop_ids


def test_there_and_back_is_equal_bit_for_bit(made, converted):
  workdir, params = made
  first = converted(workdir, "hf")
  orbax = converted(first, "orbax")
  with ocp.StandardCheckpointer() as reader:
    equal(jax.device_get(reader.restore(orbax / "params")), params[3])
  assert files(converted(orbax, "back")) == files(first)
  halves = converted(workdir, "half", "--dtype=bfloat16")
  equal(hf.load(halves, dtype="bfloat16")[1], jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), params[3]))
  assert files(converted(converted(halves, "orbax half"), "half back")) == files(halves)
  wide = checkpoint_params.stored_params(converted(halves, "wide", "--dtype=float32") / "params")
  assert wide["layers"]["q"].dtype == np.float32


def test_transformers_has_the_logits_of_the_checkpoint(made, converted):
  import torch
  from transformers import AutoModelForCausalLM

  workdir, params = made
  model, info = AutoModelForCausalLM.from_pretrained(converted(workdir, "hf"), output_loading_info=True)
  assert not any(info.values()), info
  tokens = np.random.default_rng(0).integers(0, 512, (2, 13))
  with torch.no_grad():
    theirs = model(torch.tensor(tokens)).logits.numpy()
  assert theirs.std() > 0.5
  ours = decoder.logits(params[3], tokens, hf.read_config(workdir / "policy" / "final"))
  np.testing.assert_allclose(np.asarray(ours), theirs, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_a_model_of_transformers_comes_back_as_it_was(name, converted, tmp_path):
  import torch
  import transformers

  sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
  torch.manual_seed(0)
  kind = getattr(transformers, f"{name}Config")(**sizes, num_key_value_heads=2, tie_word_embeddings=name != "Qwen2")
  model = getattr(transformers, f"{name}ForCausalLM")(kind).eval()
  model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
  back = converted(converted(tmp_path / "theirs", "orbax"), "back")
  again = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
  tokens = torch.arange(14)[None] * 5
  with torch.no_grad():
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_store_is_written_and_read(made, converted, tmp_path, monkeypatch):
  workdir, _ = made
  bucket = fake_store.install(tmp_path, monkeypatch)
  assert convert.cli(["convert", f"--from={workdir}", "--to=gs://bucket/policy"]) == 0
  assert files(bucket / "policy") == files(workdir / "policy" / "final")
  assert files(converted(converted("gs://bucket/policy", "orbax"), "back")) == files(bucket / "policy")


def test_paths_may_be_relative(made, converted, tmp_path, monkeypatch):
  """The lines of docs/weights.md, as they stand there."""
  workdir, _ = made
  shutil.copytree(workdir, tmp_path / "runs" / "quickstart")
  monkeypatch.chdir(tmp_path)
  converted("runs/quickstart", "policy_hf", to="policy_hf")
  converted("runs/quickstart/checkpoints/sft", "policy_sft", to="policy_sft")
  converted("policy_hf", "policy_orbax", to="policy_orbax")
  assert files(converted("policy_orbax", "policy_hf_again", to="policy_hf_again")) == files(tmp_path / "policy_hf")


# ---- what is read


def test_only_what_is_asked_for_is_read(made, monkeypatch):
  workdir, params = made
  stored = checkpoint_params.stored_params(workdir / "checkpoints" / "train" / "3")
  read, real = [], ocp.PyTreeCheckpointer.restore

  def restore(self, *arguments, args):
    found = real(self, *arguments, args=args)
    read.append(sum(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found)))
    return found

  monkeypatch.setattr(ocp.PyTreeCheckpointer, "restore", restore)
  assert stored["layers"]["q"].shape == params[3]["layers"]["q"].shape and not read
  for layer in range(3):
    np.testing.assert_array_equal(stored["layers"]["q"][layer], params[3]["layers"]["q"][layer])
  np.testing.assert_array_equal(np.asarray(stored["embed"]), params[3]["embed"])
  assert read == [1, 1]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
  with ocp.StandardCheckpointer() as writer:
    writer.save(tmp_path / "other", {"weights": np.zeros(3)})
  with pytest.raises(ValueError, match="other is a checkpoint without a decoder's parameters"):
    checkpoint_params.stored_params(tmp_path / "other")


# ---- what a user gets wrong


def test_faults_are_one_line(made, fault, tmp_path):
  workdir, _ = made
  assert fault() == f"--from=PATH is missing; example: {convert.EXAMPLE}"
  assert fault(f"--from={workdir}").startswith("--to=PATH is missing")
  assert "unexpected argument 'here'" in fault("here", f"--from={workdir}", "--to=x")
  assert "nowhere does not exist" in fault("--from=nowhere:3", "--to=x")
  assert "float16" in fault(f"--from={workdir}", "--to=x", "--dtype=float16")
  wrong = fault(f"--from={workdir}:5", f"--to={tmp_path / 'x'}", code=1)
  assert wrong.startswith("there is no checkpoint 5 in") and wrong.endswith("there are [2, 3]")
  assert "is neither a work directory nor a model" in fault(f"--from={tmp_path}", f"--to={tmp_path / 'x'}")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "photo").write_text("")
  assert "is not a model directory" in fault(f"--from={workdir}", f"--to={tmp_path / 'full'}", code=1)
  model = workdir / "policy" / "final"
  assert "full is there already" in fault(f"--from={model}", f"--to={tmp_path / 'full'}")
  assert not (tmp_path / "x").exists()


def test_a_step_is_asked_of_a_work_directory_only(made, converted, fault, tmp_path):
  workdir, _ = made
  model = workdir / "policy" / "final"
  for source in (model, converted(model, "orbax")):
    told = fault(f"--from={source}:3", f"--to={tmp_path / 'x'}")
    assert told == f"--from={source}:3: {source} is a model and has no step 3; leave :3 out"
  assert not (tmp_path / "x").exists()


def test_a_run_without_checkpoints_names_its_policies(made, fault, tmp_path):
  workdir, _ = made
  shutil.copytree(workdir, tmp_path / "done", ignore=shutil.ignore_patterns("train"))
  told = fault(f"--from={tmp_path / 'done'}", f"--to={tmp_path / 'x'}")
  assert "there is no checkpoint in" in told and told.endswith("finished policies are in policy/: base, final")


def test_a_damaged_checkpoint_is_not_converted(made, fault, tmp_path):
  workdir, _ = made
  shutil.copytree(workdir, tmp_path / "run")
  (tmp_path / "run" / "checkpoints" / "train" / "3" / "manifest.ocdbt").write_bytes(b"")
  told = fault(f"--from={tmp_path / 'run'}", f"--to={tmp_path / 'x'}", code=1)
  assert "checkpoint 3 in" in told and "is damaged" in told and not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["checkpoint", "orbax"])
def test_a_byte_of_a_large_file_that_changed_is_seen(made, converted, capsys, tmp_path, monkeypatch, kind):
  """Of large files the record has the size only: what is read is compared with the sums of the arrays."""
  workdir, params = made
  monkeypatch.setattr(checkpoint, "SMALL", 0)  # every file is large
  if kind == "checkpoint":
    shutil.copytree(workdir, tmp_path / "source")
    with Checkpoints(tmp_path / "source" / "checkpoints" / "train") as checkpoints:
      with jax.set_mesh(sharding.make_mesh()):
        checkpoints.save(3, update.init_state(params[3], optimizer.make_optimizer(optimizer.OptimizerConfig(), 10)), {})
    source, folder = tmp_path / "source", tmp_path / "source" / "checkpoints" / "train" / "3"
    told = f"checkpoint 3 of train in {source} is damaged (params.", "); choose another step, there are [2, 3]"
  else:
    source = converted(workdir / "policy" / "final", "source")
    folder, told = source / "params", (f"{source} is damaged (", "another program has written the parameters")
  assert files(converted(source, "good")) == files(workdir / "policy" / "final")
  largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
  content = largest.read_bytes()
  refused = 0
  for part in range(1, 6):
    at = part * len(content) // 6
    largest.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    capsys.readouterr()
    if convert.cli(["convert", f"--from={source}", f"--to={tmp_path / 'out'}"]):
      (line,) = capsys.readouterr().err.splitlines()
      assert line.startswith(f"error: {told[0]}") and line.endswith(told[1]) and not list(tmp_path.glob("*out*")), line
      refused += 1
    else:  # nothing that matters
      assert files(tmp_path / "out") == files(tmp_path / "good")
      shutil.rmtree(tmp_path / "out")
  assert refused


def test_parameters_of_another_program_are_taken_as_they_are(made, converted, fault, tmp_path):
  workdir, params = made
  source = converted(workdir / "policy" / "final", "source")
  shutil.rmtree(source / "params")
  with ocp.StandardCheckpointer() as writer:
    writer.save(source / "params", params[2])
  told = fault(f"--from={source}", f"--to={tmp_path / 'x'}", code=1)
  assert told.startswith(f"{source} is damaged (") and f"remove {source / 'params.json'}" in told
  (source / "params.json").unlink()
  equal(hf.load(converted(source, "out"))[1], params[2])
  assert convert.convert(str(source), str(tmp_path / "out")).endswith("source has no params.json with their sums")


def test_a_conversion_on_a_full_disk_leaves_nothing(made, converted, fault, tmp_path, monkeypatch):
  workdir, params = made
  real, threads = ocp.StandardCheckpointer.save, []

  def full(self, path, tree):
    real(self, path, tree)
    self.wait_until_finished()

    def write_on():
      (path / "late").mkdir(parents=True)
      (path / "late" / "file").write_text("x")
      print("Traceback (most recent call last)", file=sys.stderr)

    threads.append(threading.Timer(0.2, write_on))
    threads[0].start()
    raise OSError(28, "No space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(ocp.StandardCheckpointer, "save", full)
    told = fault(f"--from={workdir / 'policy' / 'final'}", f"--to={tmp_path / 'orbax'}", code=1)
  assert told == f"{tmp_path / 'orbax'}: the disk is full (No space left on device); begin again once there is room"
  threads[0].join()
  assert not list(tmp_path.iterdir())
  equal(checkpoint_params.stored_params(converted(workdir / "policy" / "final", "orbax") / "params"), params[3])
  assert [path.name for path in tmp_path.iterdir()] == ["orbax"]


def test_an_interrupted_conversion_says_so(fault, monkeypatch):
  def interrupt(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(convert, "convert", interrupt)
  assert fault("--from=a", "--to=b", code=130) == "interrupted"


@pytest.mark.slow
def test_the_command_itself(made, tmp_path):
  workdir, params = made
  root = pathlib.Path(convert.__file__).parents[1]

  def call(*arguments):
    command = [sys.executable, "-m", "seed_jax.convert", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {"PYTHONPATH": str(root)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)

  done = call("--help")
  assert done.returncode == 0 and "--from=WORKDIR[:STEP] --to=HF_DIR" in done.stdout and "--dtype: " in done.stdout
  done = call(f"--from={workdir}:2", f"--to={tmp_path / 'hf'}")
  assert done.returncode == 0 and not done.stderr, done.stderr
  equal(hf.load(tmp_path / "hf")[1], params[2])
