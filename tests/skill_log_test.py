"""The skills of every iteration on disk."""

import json
import math
import random

import pytest
from skill_cases import episode

from seed_jax import skill_log
from seed_jax.skill_quality import Seen, novelty


def rows(groups=2, members=2, text="go {}", **changes):
  trajectories = [episode(g, m, text.format(g), **changes) for g in range(groups) for m in range(members)]
  return skill_log.rows_of(trajectories)


def test_a_row_an_episode():
  trajectories = [episode(1, 0, "", won=False, family="cool"), episode(0, 1, "Ünïcode 漢字 🙂\nnext")]
  found = skill_log.rows_of(trajectories, [math.nan, 0.5])
  assert [row["group"] for row in found] == [0, 1], "sorted"
  assert found[0] == {
    "task_id": "task 0",
    "task": "heat some potato 0",
    "family": "heat",
    "group": 0,
    "member": 1,
    "outcome": "success",
    "skill": "Ünïcode 漢字 🙂 next",
    "parsed": True,
    "gain": 0.5,
  }
  assert found[1]["outcome"] == "failure" and not found[1]["parsed"] and found[1]["gain"] is None
  assert skill_log.rows_of([episode(error="broke", won=False)])[0]["outcome"] == "unknown"
  assert skill_log.rows_of([]) == []
  with pytest.raises(ValueError):
    skill_log.rows_of(trajectories, [1.0])


def test_written_rows_are_read_again(tmp_path):
  assert skill_log.iterations(tmp_path / "skills") == [] == skill_log.read(tmp_path / "skills")
  kept = [skill_log.write(tmp_path / "skills", i, rows(text=f"漢字 {i} {{}}")) for i in (2, 11, 1)]
  assert skill_log.iterations(tmp_path / "skills") == [1, 2, 11]
  for i in (10**6, 10**6 - 1):
    skill_log.write(tmp_path / "long", i, [])
  assert skill_log.iterations(tmp_path / "long") == [10**6 - 1, 10**6]
  assert skill_log.read(tmp_path / "skills", 2) == kept[0] and kept[0][0]["iteration"] == 2
  assert skill_log.read(tmp_path / "skills") == kept[2] + kept[0] + kept[1]
  skill_log.write(tmp_path / "skills", 3, [])
  assert skill_log.read(tmp_path / "skills", 3) == []
  with pytest.raises(ValueError, match="no skills of iteration 7; there are 1 to 11"):
    skill_log.read(tmp_path / "skills", 7)
  with pytest.raises(ValueError, match="there are none"):
    skill_log.read(tmp_path / "other", 7)


def test_a_resumed_run_drops_what_came_later_and_writes_it_again(tmp_path):
  for i in range(5):
    skill_log.write(tmp_path, i, rows(text=f"old {i} {{}}"))
  (tmp_path / ".000009.jsonl.1.tmp").write_text("half a file of a killed process")
  (tmp_path / "notes.txt").write_text("mine")
  assert skill_log.drop_after(tmp_path, 2) == 2 and skill_log.drop_after(tmp_path, 2) == 0
  assert skill_log.iterations(tmp_path) == [0, 1, 2] and (tmp_path / "notes.txt").exists()
  skill_log.write(tmp_path, 2, rows(text="new {}"))
  assert {row["skill"] for row in skill_log.read(tmp_path, 2)} == {"new 0", "new 1"}
  assert skill_log.drop_after(tmp_path / "nowhere", 0) == 0


def test_novelty_goes_on_after_a_resume_as_if_nothing_had_happened(tmp_path):
  live = Seen()
  for i in range(3):
    live.add(row["skill"] for row in skill_log.write(tmp_path, i, rows(text=f"look {i} at {{}}"), max_rows=3))
  again = Seen()
  again.add(row["skill"] for row in skill_log.read(tmp_path))
  assert again == live and novelty(["look 1 at 1", "look 9"], again) == novelty(["look 1 at 1", "look 9"], live)


def test_an_iteration_is_bounded_and_every_task_keeps_some(tmp_path):
  found = rows(groups=5, members=8)
  kept = skill_log.write(tmp_path, 0, found, max_rows=12)
  assert len(kept) == 12 and {row["group"] for row in kept} == set(range(5))
  assert [(row["group"], row["member"]) for row in kept] == sorted((row["group"], row["member"]) for row in kept)
  random.Random(0).shuffle(found)
  assert skill_log.write(tmp_path, 0, found, max_rows=12) == kept
  huge = skill_log.rows_of([episode(skill="x " * 10**6, task="y" * 10**6, task_id="z" * 10**6, family="f" * 10**5)])
  skill_log.write(tmp_path, 1, huge)
  assert (tmp_path / "000001.jsonl").stat().st_size < 3000
  assert skill_log.write(tmp_path, 2, found, max_rows=0) == []


def test_wrong_numbers_are_refused(tmp_path):
  with pytest.raises(ValueError, match="at least 0, got -1 and 256"):
    skill_log.write(tmp_path, -1, [])
  row = rows(1, 1)[0] | {"gain": math.inf}
  with pytest.raises(ValueError):
    skill_log.write(tmp_path, 0, [row])
  assert skill_log.iterations(tmp_path) == []


@pytest.mark.parametrize("line", ['{"iteration": 1', "7", "{}", "[" * 100_000])
def test_a_damaged_line_is_named(tmp_path, line):
  skill_log.write(tmp_path, 1, rows(1, 1))
  with open(tmp_path / "000001.jsonl", "a") as file:
    file.write(line + "\n")
  with pytest.raises(ValueError, match=r"000001.jsonl line 2 is damaged \(.*\); delete the file") as caught:
    skill_log.read(tmp_path)
  assert "\n" not in str(caught.value)


def test_rows_of_another_iteration_are_damage(tmp_path):
  skill_log.write(tmp_path, 1, rows(1, 1))
  row = json.loads((tmp_path / "000001.jsonl").read_text())
  (tmp_path / "000002.jsonl").write_text(json.dumps(row) + "\n")
  with pytest.raises(ValueError, match="000002.jsonl line 1 is damaged"):
    skill_log.read(tmp_path)


def test_other_processes_write_nothing(tmp_path, monkeypatch):
  kept = skill_log.write(tmp_path, 1, rows())
  monkeypatch.setattr(skill_log, "is_writer", lambda: False)
  assert skill_log.write(tmp_path, 2, rows())[0] == kept[0] | {"iteration": 2}
  assert skill_log.drop_after(tmp_path, 0) == 1 and skill_log.iterations(tmp_path) == [1]
