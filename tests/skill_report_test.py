"""The skills on the report: which are shown, in what order, and that their texts stay texts."""

import json

import pytest
from report_test import EVIL, Page
from skill_cases import episode

from seed_jax import metrics, report, skill_log, skill_report


def keep(folder, iteration, skills):
  """Writes an iteration of (skill, gain, won), a task each."""
  episodes = [episode(group=i, skill=skill, won=won) for i, (skill, _, won) in enumerate(skills)]
  gains = [float("nan") if gain is None else gain for _, gain, _ in skills]
  skill_log.write(folder, iteration, skill_log.rows_of(episodes, gains))


def shown(folder, rows=()):
  notices = []
  text = skill_report.section(folder, rows, notices)
  return Page(text), text, notices


def test_a_run_that_kept_no_skills_has_no_section(tmp_path):
  notices = []
  assert skill_report.section(tmp_path / "skills", [], notices) == "" and notices == []
  report.build(tmp_path)
  assert "<h2>Skills</h2>" not in (tmp_path / "report.html").read_text()


def test_the_first_the_last_and_even_steps_between():
  assert skill_report.spread([3, 5, 9], 12) == [3, 5, 9]
  assert skill_report.spread(list(range(1, 101)), 12) == [1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100]


def test_an_iteration_is_sorted_by_gain_and_what_is_not_known_comes_last(tmp_path):
  keep(tmp_path, 7, [("middle", 0.1, True), ("", None, False), ("worst", -0.25, False), ("best", 0.5, True)])
  page, _, notices = shown(tmp_path)
  table = page.text[page.text.index("Iteration 7") :]
  # mean of 0.1, -0.25, 0.5 is 0.35 / 3
  assert "4 episodes, 2 won; 3 skills, 3 different; mean gain +0.117" in table and notices == []
  assert "won best heat some potato 3 · heat +0.500" in table
  assert "lost worst heat some potato 2 · heat −0.250" in table and "lost no skill" in table
  places = [table.index(word) for word in ("best", "middle", "worst", "no skill")]
  assert places == sorted(places)


def test_the_best_and_the_worst_of_the_whole_run_each_text_once(tmp_path):
  for iteration in range(1, 31):
    keep(tmp_path, iteration, [(f"skill {iteration}", iteration / 100, True), ("Always the same.", 0.155, True)])
  keep(tmp_path, 31, [("always the SAME", -0.9, False), ("", None, False)])
  page, _, _ = shown(tmp_path)
  high, rest = page.text.split("skills of highest gain")[1].split("The 10 skills of lowest gain")
  low = rest.split("Skills of 12 iterations")[0]
  assert [f"iteration {i} " in high for i in (30, 21, 20)] == [True, True, False] and "Always" not in high
  # lowest: -0.9, then skill 1 to 9
  assert low.count("always the SAME") == 1 and "−0.900" in low and "Always the same." not in low
  assert "skill 9 " in low and "skill 10 " not in low


def test_a_large_iteration_loses_its_middle(tmp_path):
  keep(tmp_path, 1, [(f"number {i}", i / 1000, False) for i in range(100)])
  page, text, _ = shown(tmp_path)
  table = page.text[page.text.index("Iteration 1") :]
  assert "60 of middle gain are left out" in table and table.count("number ") == skill_report.ROWS
  assert "number 99 " in table and "number 0 " in table and "number 50 " not in table
  assert len(text) < 50_000


def test_the_curves_stand_here_and_not_among_the_others(tmp_path):
  rows = [{"iteration": i, "skill_novel": 1 / i, "skill_overlap": 0.0, "skill_parse_rate": 1.0} for i in (1, 2)]
  with metrics.Writer(tmp_path, tensorboard=False) as writer:
    for row in rows:
      writer.write(row["iteration"], {k: v for k, v in row.items() if k != "iteration"})
  report.build(tmp_path)
  without = Page((tmp_path / "report.html").read_text()).text
  assert "skill_novel 1 → 0.5" in without and "New skills" not in without  # no folder: among the others, as any metric
  keep(tmp_path / "skills", 1, [("look first", 0.25, True)])
  report.build(tmp_path)
  text = Page((tmp_path / "report.html").read_text()).text
  assert text.count("skill_novel 1 → 0.5") == 1 and text.index("New skills") > text.index("Skills 1 iterations")
  assert "skill_parse_rate 1 → 1" in text and "skill_overlap" not in text  # nothing to overlap with: not measured


def test_texts_stay_texts_and_are_cut(tmp_path):
  keep(tmp_path, 1, [("look first", 0.25, True)])
  path = tmp_path / "000001.jsonl"
  row = json.loads(path.read_text())
  path.write_text(json.dumps(row | dict(skill=EVIL + "x" * 5_000, task=EVIL, family=EVIL, outcome=EVIL)))
  page, text, _ = shown(tmp_path)
  assert not {"script", "img"} & set(page.tags) and all(not name.startswith("on") for name, _ in page.attributes)
  assert "\u202e" not in text and "more characters" in page.text and "broke off" in page.text


@pytest.mark.parametrize("value", [None, "x", True, [], {}, 3, float("nan"), float("inf")])
def test_values_of_a_wrong_kind_do_no_harm(tmp_path, value):
  keep(tmp_path, 1, [("look first", 0.25, True)])
  path = tmp_path / "000001.jsonl"
  row = json.loads(path.read_text())
  for field in ("task", "family", "outcome", "skill", "gain", "parsed", "member"):
    path.write_text(json.dumps(row | {field: value}))
    shown(tmp_path, [{"iteration": 1, "skill_length": value}])


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path):
  for iteration in (1, 2):
    keep(tmp_path, iteration, [("look first", 0.25, True)])
  (tmp_path / "000001.jsonl").write_text('{"iteration": 1')
  page, _, notices = shown(tmp_path)
  assert (
    "000001.jsonl line 1 is damaged" in notices[0] and "Iteration 2" in page.text and "Iteration 1 " not in page.text
  )
