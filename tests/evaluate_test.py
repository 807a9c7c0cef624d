"""The stage `evaluate`: which episodes are played with which text, and what is reported of them."""

import contextlib

import pytest
from skill_cases import episode
from tiny_config import get_config

from seed_jax import evaluate, library, methods
from seed_jax.curve import Curve
from seed_jax.library import Library, Skill
from seed_jax.metrics import read_json
from seed_jax.run import Run
from seed_jax.skill_branch import shown

WITH_TEXT = ("skill_prompt", "skill_grpo_star")


class Engine:
  def __init__(self):
    self.params = None

  def set_params(self, params):
    self.params = params

  def take_stats(self):
    return {}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
  """make(method) gives a run without a policy: its episodes are noted, the first of every two is won."""
  library.save(tmp_path / "library.json", Library(general=(Skill("general_001", "t", "look around"),)))

  def make(method, **changes):
    config = get_config(method)
    config.update_from_flattened_dict({"library.path": str(tmp_path / "library.json")} | changes)
    run = Run(config, tmp_path / method, plain=True)
    run.tokenizer = type("Tokenizer", (), {"encode": staticmethod(str.split)})
    run.played = []

    def play(engine, pool, episodes, **options):
      run.played.append((engine.params, list(episodes)))
      out = []
      for i, e in enumerate(episodes):
        fields = dict(task_id=e.task.id, family=e.task.family, error="died" if i == 3 else "")
        out.append(episode(e.group, e.member, won=i % 2 == 0, **fields))
      for t in out:
        options.get("on_episode", lambda t: None)(t)
      return out

    for name, value in {
      "load_policy": lambda name: ("model", name),
      "engine": lambda model, **options: Engine(),
      "pool": lambda count: contextlib.nullcontext(),
      "play": play,
    }.items():
      monkeypatch.setattr(run, name, value)
    return run

  return make


@pytest.mark.parametrize("method", methods.names())
def test_prompts_of_the_panel_hold_library_text_only_where_the_method_says_so(stand_in, method):
  run = stand_in(method)
  evaluate.evaluate_policy(run, "final")
  ((params, episodes),) = run.played
  texts = {e.text(episode()) for e in episodes}
  assert params == "final" and len(episodes) == 12
  assert texts == ({"look around."} if method in WITH_TEXT else {""})


@pytest.mark.parametrize("method", ["seed", "skill_grpo", *WITH_TEXT])
def test_so_do_those_of_the_learning_curve(stand_in, method):
  run = stand_in(method, **{"train.panel.every": 2, "train.panel.split": "valid", "train.panel.tasks": 4})
  curve = Curve(run, [], skill=shown(run, methods.get(method).in_evaluation))
  curve.point(0, engine := Engine(), None, "params")
  ((params, episodes),) = run.played
  assert params == engine.params == "params" and len(episodes) == 4
  assert {e.text(episode()) for e in episodes} == ({"look around."} if method in WITH_TEXT else {""})


def test_the_policy_that_training_began_from_is_played_beside_the_final_one(stand_in):
  run = stand_in("seed_without_sft", **{"evaluate.mechanism_tasks": 0, "evaluate.samples": 2})
  for name in ("base", "final"):
    (run.workdir / "policy" / name).mkdir(parents=True)
  run.finish("train", {"start_from": "base"})
  values = evaluate.run_evaluate(run)
  assert [params for params, _ in run.played] == ["base", "final"] and values == read_json(
    run.workdir / "evaluate.json"
  )
  assert [(e.group, e.member) for e in run.played[0][1]][:3] == [(0, 0), (0, 1), (1, 0)]
  assert values["errors"] == 1 and values["episodes"] == 23  # the one that broke off counts nowhere else
  assert values["success"] == pytest.approx(12 / 23) == values["start"]["success"]
  assert values["checkpoint"].endswith("policy/final") and values["start"]["checkpoint"].endswith("policy/base")
