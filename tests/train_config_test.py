"""What cannot be trained is refused before a file is written, by a run and by a comparison alike."""

import dataclasses

import pytest
from tiny_config import get_config

from seed_jax import compare, methods, train_config
from seed_jax.run import ConfigError, Run

REFUSED = [
  ("seed", "train.loss.kl_estimator", "k9", r"config.train.loss: estimator='k9' is unknown; choose one of k1, k2, k3"),
  ("grpo", "train.loss.aggregation", "foo", r"config.train.loss: aggregation='foo' is unknown; choose one of token_"),
  ("grpo", "train.loss.aggregation", "sequence_mean_token_sum_norm", r"config.train.loss: .*needs aggregation_length"),
  ("seed", "train.loss.dual_clip", 0.5, r"config.train.loss: dual_clip=0.5 must be above 1"),
  ("seed", "train.loss.tis_cap", 0.0, r"config.train.loss: tis_cap=0.0 must be above 0"),
  ("seed", "train.loss.clip_high", -0.1, r"config.train.loss.clip_high=-0.1 must be 0 or more"),
  ("seed", "train.normalize", "foo", r"config.train: normalize='foo' is unknown; choose one of mean_std, mean"),
  ("gigpo", "train.normalize", "foo", r"config.train: normalize='foo' is unknown"),
  ("grsd", "train.rescore", "minibatch", r"config.train: method 'grsd' weighs all turns of an iteration at once"),
  ("seed", "train.rescore", "never", r"config.train: rescore='never' is unknown"),
  ("seed", "train.group_size", 0, r"config.train.group_size=0 must be 1 or more"),
  ("seed", "train.iterations", 0, r"config.train.iterations=0 must be 1 or more"),
  ("seed", "train.iterations", -3, r"config.train.iterations=-3 must be 1 or more"),
  ("seed", "train.tasks_per_iteration", 5000, r"config.train.tasks_per_iteration=5000 but config.train.num_tasks=16"),
  ("seed", "train.minibatches", 0, r"config.train.minibatches=0 must be 1 or more"),
  ("seed", "train.async_level", 2, r"config.train.async_level=2 is unknown"),
  ("seed", "train.start_from", "final", r"config.train.start_from='final' is unknown; choose base or sft"),
  ("seed", "train.row_lengths", (), r"config.train.row_lengths=\(\)"),
  ("seed", "train.gamma", 1.5, r"config.train.gamma=1.5 must be within \[0, 1\]"),
  ("seed", "rollout.temperature", 0.0, r"config.rollout.temperature=0.0 must be above 0"),
]


def changed(method, path, value):
  config = get_config(method)
  config.train.panel.update(dict(split="valid", tasks=2))
  config.compare.update(dict(methods=(), seeds=(0,), every=2))
  with config.unlocked():
    config.update_from_flattened_dict({path: value})
  return config


@pytest.mark.parametrize("method, path, value, told", REFUSED)
def test_a_run_refuses_it_before_a_file_is_written(tmp_path, method, path, value, told):
  with pytest.raises(ConfigError, match=told) as raised:
    Run(changed(method, path, value), tmp_path / "w").open()
  assert not (tmp_path / "w").exists() and "\n" not in str(raised.value)


@pytest.mark.parametrize("method, path, value, told", REFUSED)
def test_a_comparison_refuses_it_of_every_arm_and_names_the_arm(tmp_path, method, path, value, told):
  config = changed("seed", "seed", 0)
  config.compare.arms = (("good", "seed", ()), ("bad one", method, (f"{path}={value}",)))
  with pytest.raises(ConfigError, match=f"arm 'bad one': {told}"):
    compare.plan(Run(config, tmp_path / "w"))


@pytest.mark.parametrize("name", methods.names())
def test_every_method_of_the_table_may_be_trained_with_its_own_settings(name):
  train_config.check_train(get_config(name))


def test_panels_of_nothing_are_refused(tmp_path):
  for name in ("tasks", "samples"):
    with pytest.raises(ConfigError, match=f"config.train.panel.{name}=0 must be 1 or more"):
      Run(changed("seed", f"train.panel.{name}", 0), tmp_path / "w").open()


def test_a_loss_of_ones_own_is_tried_too():
  def broken(*, logprobs, skill_logprobs, old_logprobs, beta):
    raise ValueError("no such thing")

  method = dataclasses.replace(methods.get("seed"), name="broken_loss", auxiliary=broken)
  methods.register(method)
  try:
    with pytest.raises(ConfigError, match="config.train.loss: no such thing"):
      train_config.check_train(changed("seed", "method", "broken_loss"))
  finally:
    del methods.METHODS["broken_loss"]


def test_a_split_that_gives_too_few_tasks_is_named():
  with pytest.raises(ConfigError, match="config.train.tasks_per_iteration=4 but the split 'train' gave 3 tasks"):
    train_config.check_tasks(get_config(), [None] * 3)
  train_config.check_tasks(get_config(), [None] * 4)
