"""docs/methods.md says what the table of methods holds, and its code runs as it stands there."""

import pathlib
import re

import jax
import numpy as np
import pytest
from loss_cases import random_batch

from seed_jax import compare, main, methods, relatives
from seed_jax.run import Run

TEXT = (pathlib.Path(__file__).parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in re.split(r"^### ", TEXT, flags=re.M)[1:]}
BLOCKS = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, flags=re.M | re.S)
RESULTS = TEXT.partition("\n## Toy results\n")[2]


def written(value):
  return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def test_every_method_has_a_section_and_a_row_of_results():
  assert set(SECTIONS) == set(methods.names())
  assert re.findall(r"^\| (\w+) \|", RESULTS, flags=re.M)[1:] == list(SECTIONS)  # after the header
  assert "ranks nothing" in " ".join(RESULTS.split())  # one seed


@pytest.mark.parametrize("name", methods.names())
def test_a_section_has_the_source_the_command_and_the_settings_of_its_method(name):
  section, source = SECTIONS[name].partition("\n## ")[0], methods.get(name).source
  assert f"Run: `bash launch/local_run.sh --config=configs/quickstart.py:{name}`\n" in section
  assert "\nSource: " in section
  for number in re.findall(r"arXiv:[\d.]+\d", source):
    assert number in section, number
  assert ("Source: our control." in section) == source.startswith("[R] control")
  told = dict(re.findall(r"`(train\.[\w.]+) = ([^`]+)`", section))
  if name == "seed":
    del told["train.rescore"]  # a choice that it explains
  assert told == {path: written(value) for path, value in methods.settings(name).items()}


def test_the_fields_it_explains_are_in_the_config():
  config = main.load_config(str(pathlib.Path(__file__).parent.parent / "configs" / "quickstart.py"))
  table = TEXT.partition("\n## Fields of a config\n")[2].partition("\n## ")[0]
  rows = re.findall(r"^\| (`.*?`) \|", table, flags=re.M)
  assert len(rows) == 9
  for row in rows:
    first, *others = re.findall(r"`([\w.]+)`", row)
    for name in (first, *(o if "." in o else f"{first.rpartition('.')[0]}.{o}" for o in others)):
      main.at(config, name)  # KeyError


# ---- the code


@pytest.fixture
def loaded(monkeypatch, tmp_path):
  """load(name) writes that block to a file of its own and gives its config, as the command line would."""
  monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
  blocks = dict(BLOCKS)
  assert len(blocks) == len(BLOCKS) == TEXT.count("```python") == 2

  def load(name, argument=""):
    (tmp_path / name).write_text(blocks[name])
    return main.load_config(str(tmp_path / name) + argument)

  return load


def test_a_loss_of_ones_own(loaded, tmp_path):
  assert loaded("my_loss.py").method == "likelier_only"
  mine, common = methods.get("likelier_only"), random_batch()
  loss = lambda x: mine.loss(**common | dict(logprobs=x), kl_coef=0.0, opd_coef=1.0)  # noqa: E731
  (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(common["logprobs"])
  rest = jax.grad(lambda x: methods.get("grpo").loss(**common | dict(logprobs=x), kl_coef=0.0)[0])(common["logprobs"])
  gap = common["skill_logprobs"] - common["logprobs"]
  active = common["mask"] * common["skill_mask"][:, None]
  np.testing.assert_allclose(metrics["opd_loss"], (active * np.maximum(gap, 0)).sum() / active.sum(), rtol=1e-5)
  # max(skill - policy, 0): -1 where the skill makes the token likelier, a mean over the tokens with a skill
  np.testing.assert_allclose(gradient - rest, -active * (gap > 0) / active.sum(), atol=1e-6)
  assert np.isfinite(value)


def test_a_file_that_is_loaded_again_replaces_its_method(loaded):
  loaded("my_loss.py")
  first = methods.get("likelier_only")
  loaded("my_loss.py")
  assert methods.get("likelier_only") is not first and methods.names().count("likelier_only") == 1


def test_a_transform_of_ones_own(loaded):
  config = loaded("my_transform.py")
  assert config.method == "sharpened" and config.train.loss.transform_coef == 0.5
  common = random_batch()
  for name in ("advantages", "skill_mask"):  # as the training loop has them
    common[name] = np.repeat(common[name][:, None], common["mask"].shape[1], axis=1)
  _, metrics = methods.get("sharpened").loss(**common, transform_coef=0.5)
  tanh = np.tanh(common["skill_logprobs"] - common["old_logprobs"]) * common["skill_mask"]
  advantages = common["advantages"] * (1 + 0.5 * tanh)
  _, expected = methods.get("grpo").loss(**common | dict(advantages=advantages))
  np.testing.assert_allclose(metrics["pg_loss"], expected["pg_loss"], rtol=1e-5)
  _, plain = methods.get("grpo").loss(**common)
  assert metrics["pg_loss"] != plain["pg_loss"] and metrics["opd_loss"] == 0
  assert relatives.linear_decay(3, start=config.train.loss.transform_coef, iterations=0) == 0.5


def test_a_comparison_with_it_begins_from_a_method_without_settings(loaded, tmp_path):
  config = loaded("my_loss.py", ":seed").unlock()
  config.compare.update(dict(methods=("likelier_only", "grpo"), seeds=(0,)))
  arms, _ = compare.plan(Run(config, tmp_path / "w"))
  assert [arm.name for arm in arms] == ["likelier_only", "grpo"]
