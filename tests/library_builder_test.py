"""A library from annotated episodes."""

import random
import types

import pytest
from ml_collections import FrozenConfigDict
from skill_cases import episode

from seed_jax import library, library_stage
from seed_jax.abstraction import abstraction
from seed_jax.library_builder import build_library
from seed_jax.run import ConfigError
from seed_jax.trajectory import save_trajectories

EPISODES = [
  # written for two tasks, in two spellings of which one is the more frequent
  episode(0, 0, "Heat it with microwave 1, then move it to shelf 2."),
  episode(0, 1, "Heat it with microwave 1, then move it to shelf 2."),
  episode(1, 0, "heat it with microwave 1 then move it to shelf 2"),
  # nearly the same as the one above, written once: not new enough
  episode(1, 1, "Heat it with microwave 1, then move it to shelf 3."),
  episode(2, 0, "Take the potato from cabinet 4."),
  # a failure, one that broke off, one without a skill
  episode(2, 1, "do not wander", won=False, summary="the potato was never found"),
  episode(2, 2, "never to be seen", won=False, error="crash"),
  episode(2, 3, ""),
  # two families say it: general
  episode(3, 0, "Look before you act.", family="cool"),
  episode(0, 2, "look before you act", family="heat"),
  # two families fail at it: common to all
  episode(3, 1, "stop opening the fridge again", family="cool", won=False),
  episode(0, 3, "stop opening the fridge again", family="heat", won=False),
]


def test_what_becomes_of_each_text():
  built = build_library(EPISODES)
  assert [s.principle for s in built.general] == ["Look before you act."]
  assert built.general[0].skill_id == "general_001"
  heat = built.by_family["heat"]
  assert [s.principle for s in heat] == [
    "Heat it with microwave 1, then move it to shelf 2.",
    "Take the potato from cabinet 4.",
  ]
  assert heat[0].skill_id == "heat/001" and heat[0].title == "Heat it with microwave 1, then..."
  assert heat[0].when_to_apply == 'the task is like "heat some potato 0"', "the task it was most often written for"
  assert built.by_family["cool"] == ()
  common, own = built.mistakes
  assert (common.mistake_id, common.family, common.how_to_avoid) == ("mistake_001", "", "stop opening the fridge again")
  assert common.description == "ignoring this advice: stop opening the fridge again"
  assert common.why_it_happens == "seen in 2 failed episodes of 2 tasks"
  assert (own.family, own.how_to_avoid, own.description) == ("heat", "do not wander", "the potato was never found")
  assert built.metadata["episodes"] == 10
  assert built.metadata["families"] == {"cool": {"failure": 1, "success": 1}, "heat": {"failure": 2, "success": 6}}


def test_the_order_of_episodes_changes_nothing(tmp_path):
  episodes = [*EPISODES, *(episode(4, m, f"dust room{m}") for m in range(5))]  # as long and as frequent as each other
  built = build_library(episodes)
  for seed in range(10):
    mixed = list(episodes)
    random.Random(seed).shuffle(mixed)
    assert build_library(mixed) == built
    library.save(tmp_path / f"{seed}.json", build_library(mixed))
  assert len({(tmp_path / f"{seed}.json").read_bytes() for seed in range(10)}) == 1
  assert library.load(tmp_path / "0.json") == built


def test_novelty_is_a_choice():
  assert len(build_library(EPISODES, min_novelty=0.0).by_family["heat"]) == 3
  assert len(build_library(EPISODES, min_novelty=1.0).by_family["heat"]) == 2, "nothing in common with the first"


def test_a_text_is_what_its_outcomes_say_most():
  texts = [episode(i, 0, "go on", won=i < 2) for i in range(3)]
  assert build_library(texts).by_family["heat"][0].principle == "go on" and not build_library(texts).mistakes
  texts += [episode(3, 0, "go on", won=False)]
  assert not build_library(texts).mistakes, "two of each"
  texts += [episode(i, 1, "go on", won=False) for i in range(2)]
  built = build_library(texts)
  assert built.by_family["heat"] == () and built.mistakes[0].why_it_happens == "seen in 4 failed episodes of 4 tasks"


def test_sizes_are_limits():
  texts = [episode(i, m, f"word{i} thing{i} place{i} act{m}", won=m == 0) for i in range(20) for m in range(2)]
  built = build_library(texts, per_family=3, mistakes_per_family=2)
  assert len(built.by_family["heat"]) == 3 and len(built.mistakes) == 2
  assert len(build_library(texts, per_family=0, mistakes_per_family=0, general=0)) == 0
  both = [episode(i, m, f"word{i} thing{i} place{i}", family="ab"[m]) for i in range(20) for m in range(2)]
  assert len(build_library(both, general=4).general) == 4
  assert len(build_library(both, general=4, min_families=3).by_family["a"]) == 6


def test_the_more_tasks_the_earlier():
  texts = [episode(0, m, "often written") for m in range(5)] + [episode(g, 0, "for two tasks") for g in (1, 2)]
  found = build_library(texts).by_family["heat"]
  assert [s.principle for s in found] == ["for two tasks", "often written"]


def test_texts_may_be_rewritten_first():
  built = build_library(EPISODES, rewrite=lambda text, task: text.replace("1", "any") if "potato 0" in task else "")
  found = [s.principle for s in built.by_family["heat"]]
  assert found == ["Heat it with microwave any, then move it to shelf 2.", "look before you act"]
  assert built.metadata["episodes"] == 4 and not built.general


def test_a_clause_that_recurs_over_families_is_general_advice():
  texts = [
    episode(0, 0, "Open the drawer first, then heat it; move it to the target."),
    episode(1, 0, "open the drawer first. Cool it, move it to the target", family="cool"),
    episode(2, 0, "move it to the target!", family="pick"),
    episode(3, 0, "do not wander about, open the window", family="look"),
    *(episode(4, m, "do not wander about, open the window", family="pick", won=False) for m in range(2)),
  ]
  built = build_library(texts)
  assert [s.principle for s in built.general] == ["move it to the target", "Open the drawer first"]  # of 3 and 2 tasks
  assert built.general[0].when_to_apply == "the task is of a family such as cool, heat, pick"
  assert [s.principle for s in built.by_family["heat"]] == [texts[0].skill], "the text as a whole stays its family's"
  assert [s.principle for s in build_library(texts, min_families=3).general] == ["move it to the target"]
  for seed in range(5):
    random.Random(seed).shuffle(texts)
    assert build_library(texts) == built


def test_odd_inputs(tmp_path):
  assert len(build_library([])) == 0 == len(build_library([episode(), episode(member=1)]))
  odd = [
    episode(0, 0, "先に探す。それから温める。" * 400, family="暖める", task=""),
    episode(1, 0, "🙂🙃\n\x00", family=""),
    episode(2, 0, ", ; : , ; : , ; abc", family="general"),
    episode(3, 0, "x" * 5000, family="heat", task_id="a\nb", task='a "quoted"\ntask'),
    episode(4, 0, " \n ", family="heat"),
    episode(5, 0, "\ud800 lone", family="general_001"),
  ]
  built = build_library(odd)
  assert all(len(s.title) <= 63 and len(s.principle) <= 1200 for found in built.by_family.values() for s in found)
  assert set(built.by_family) == {"暖める", "unknown", "general", "heat", "general_001"}
  assert built.by_family["heat"][0].when_to_apply == 'the task is like "a "quoted" task"'
  library.save(tmp_path / "odd.json", built)
  assert library.load(tmp_path / "odd.json") == built


@pytest.mark.parametrize("options", [{"per_family": -1}, {"min_families": 1}, {"min_novelty": 1.5}])
def test_limits_that_make_no_sense_are_refused(options):
  with pytest.raises(ValueError, match="min_families >= 2"):
    build_library([], **options)


# ---- the stage


def run_in(tmp_path, episodes, options=None):
  save_trajectories(tmp_path / "trajectories" / "annotated", episodes)
  return types.SimpleNamespace(workdir=tmp_path, config=FrozenConfigDict({"library": {"build": options or {}}}))


def test_the_stage_leaves_a_library(tmp_path, capsys):
  run = run_in(tmp_path, EPISODES)
  record = library_stage.run_library(run)
  expected = build_library(EPISODES, rewrite=abstraction(EPISODES))
  assert library_stage.load_library(run) == expected == library.from_record(record)
  assert expected.by_family["heat"][0].principle == "Heat it with the microwave, then move it to a place."
  assert "1 general skills, 2 of families, 2 mistakes" in capsys.readouterr().err
  library_stage.run_library(run_in(tmp_path, EPISODES, {"per_family": 1}))
  assert len(library_stage.load_library(run).by_family["heat"]) == 1


def test_the_stage_needs_skills(tmp_path):
  with pytest.raises(ConfigError, match="no annotated episode of .* has a skill"):
    library_stage.run_library(run_in(tmp_path, [episode()]))
  assert not (tmp_path / "library.json").exists()
