"""The named decoders: their sizes are those of the published weights, and other weights are refused."""

import dataclasses
import math

import jax
import pytest

from seed_jax.models import decoder, presets
from seed_jax.models.config import from_hf, to_hf


@pytest.mark.parametrize(
  "name, parameters",
  [  # of the published checkpoints
    ("qwen2_5_0_5b", 494_032_768),
    ("qwen2_5_3b", 3_085_938_688),
    ("qwen2_5_7b", 7_615_616_512),
    ("qwen3_1_7b", 1_720_574_976),
  ],
)
def test_a_preset_has_the_size_of_the_published_weights(name, parameters):
  assert presets.get(name).num_parameters == parameters


@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_count_is_that_of_the_tree_and_the_config_survives_hugging_faces(name):
  config = presets.get(name)
  shapes = jax.eval_shape(lambda key: decoder.init(key, config), jax.random.key(0))
  assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == config.num_parameters
  assert from_hf(to_hf(config)) == dataclasses.replace(config, num_valid_tokens=None)


def test_an_unknown_name_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match=r"model preset 'qwen9' is unknown; choose one of qwen2_5_0_5b, "):
    presets.get("qwen9")


def test_other_weights_are_refused_and_a_runs_own_choices_are_not():
  config = presets.get("qwen2_5_3b")
  presets.check("qwen2_5_3b", dataclasses.replace(config, dtype="bfloat16", remat="full", num_valid_tokens=7))
  with pytest.raises(ValueError, match=r"not qwen2_5_3b \(num_layers: 36 in the preset, 28 there\)"):
    presets.check("qwen2_5_3b", dataclasses.replace(config, num_layers=28))
