"""The supervised loop: it learns, two runs are bit-equal, a broken-off run goes on to the same parameters."""

import math

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from seed_jax import batching, sharding, supervised
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
from seed_jax.run import Run

CONFIG = ModelConfig("Qwen3ForCausalLM", 24, 32, 1, 2, 1, 16, 48, qk_norm=True)
SECTION = ConfigDict(
  dict(
    epochs=2,
    batch_tokens=60,
    row_lengths=(24,),
    micro_tokens=192,  # every batch is one micro-batch: one compiled shape
    response_fraction=1.0,
    log_every=3,
    save_every=4,
    optimizer=dict(learning_rate=1e-2, schedule="cosine", warmup=0.1),
  )
)


def run(workdir):
  config = ConfigDict(dict(seed=0, mesh=dict(data=1, fsdp=1, tp=1), checkpoint=dict(keep=2)))
  return Run(config, workdir, plain=True)


def samples(count, seed=0):
  """Sequences that count upwards from a random start: everything after the start can be learned."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(count):
    start, length = rng.integers(1, 10), rng.integers(5, 14)
    made.append(batching.text_sample([start], range(start + 1, start + length)))
  return made


def fit(workdir):
  made = run(workdir)
  params = sharding.put_params(decoder.init(jax.random.key(1), CONFIG), made.mesh)
  params, curve = supervised.fit(made, "base", SECTION, CONFIG, params, samples(30), samples(6, seed=9))
  return jax.device_get(params), curve


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
  return fit(tmp_path_factory.mktemp("plain"))


def same(one, other):
  return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_the_loss_falls_and_the_curve_says_where(plain):
  _, curve = plain
  updates = 2 * math.ceil(30 / round(60 / np.mean([s.length for s in samples(30)])))
  assert [p["update"] for p in curve] == [*range(3, updates, 3), updates]
  assert curve[-1]["loss"] < 0.6 * curve[0]["loss"] and curve[0]["loss"] == pytest.approx(math.log(24), rel=0.25)
  assert curve[-1]["validation"] < 0.6 * math.log(24)


def test_two_runs_are_bit_equal(plain, tmp_path):
  params, curve = fit(tmp_path)
  assert same(params, plain[0]) and curve == plain[1]


def test_a_run_that_broke_off_ends_with_the_same_bits(plain, tmp_path, monkeypatch):
  to_batches, calls = batching.to_batches, []

  def dies(*args, **options):
    calls.append(0)
    if len(calls) == 6:
      raise KeyboardInterrupt
    return to_batches(*args, **options)

  monkeypatch.setattr(batching, "to_batches", dies)
  with pytest.raises(KeyboardInterrupt):
    fit(tmp_path)
  monkeypatch.setattr(batching, "to_batches", to_batches)
  assert (tmp_path / "checkpoints" / "base" / "4.json").exists()
  params, curve = fit(tmp_path)
  assert same(params, plain[0])
  assert [p["update"] for p in curve] == [p["update"] for p in plain[1]]
  assert [p["loss"] for p in curve] == pytest.approx([p["loss"] for p in plain[1]], rel=1e-6)


def test_a_stage_that_is_stopped_after_its_last_update_repeats_none(tmp_path, monkeypatch, plain):
  """With updates of two epochs that `save_every` does not divide."""
  fit(tmp_path)
  monkeypatch.setattr(batching, "to_batches", lambda *_, **__: pytest.fail("an update is repeated"))
  params, curve = fit(tmp_path)
  assert same(params, plain[0]) and curve == plain[1] and curve[-1]["update"] % SECTION.save_every


def test_validation_loss_is_the_mean_over_response_tokens(tmp_path):
  made = run(tmp_path)
  params = sharding.put_params(decoder.init(jax.random.key(2), CONFIG), made.mesh)
  some = [batching.text_sample([1, 2, 3], [4, 5]), batching.text_sample([7], [8, 9, 10, 11])]
  got = supervised.evaluate_loss(made, CONFIG, params, some, made.row_shapes(SECTION))
  total = 0.0
  for s in some:
    logits = np.asarray(decoder.logits(params, s.tokens[None], CONFIG))[0, s.index]
    total -= float(np.asarray(jax.nn.log_softmax(logits))[np.arange(len(s.index)), s.targets].sum())
  assert got == pytest.approx(total / 6, abs=1e-5)


def test_an_epoch_uses_every_sample_once_in_batches_of_one_size():
  some = samples(30)
  parts = supervised._shuffled(some, 60, seed=4)
  assert sorted(id(s) for part in parts for s in part) == sorted(map(id, some))
  assert len({len(part) for part in parts[:-1]}) == 1 and len(parts) == len(supervised._split(some, range(30), 60))
  order = [id(s) for part in parts for s in part]
  assert order != [id(s) for part in supervised._shuffled(some, 60, seed=5) for s in part]
  assert [len(p) for p in supervised._shuffled(some[:3], 1, seed=4)] == [1, 1, 1]  # never an empty batch
