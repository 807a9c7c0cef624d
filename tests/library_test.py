"""The skill library as JSON and as text."""

import json
import pathlib
import re

import pytest

from seed_jax import library
from seed_jax.library import Library, Mistake, Selection, Skill
from seed_jax.skills import insert_skill

RECORD = {
  "general_skills": [
    {"skill_id": "g1", "title": "Look first", "principle": "Look before you act.", "when_to_apply": "At the start."}
  ],
  "task_specific_skills": {
    "heat": [
      {"skill_id": "h1", "title": "Warm it", "principle": "Use the microwave", "when_to_apply": "It is in your hand."},
      {"skill_id": "h2", "title": "Ünïcode 漢字 🙂", "principle": "先に探す。", "when_to_apply": ""},
    ],
    "cool": [],
  },
  "common_mistakes": [
    {"mistake_id": "m1", "description": "loop", "why_it_happens": "no memory", "how_to_avoid": "remember places"}
  ],
}


def changed(**changes):
  record = json.loads(json.dumps(RECORD))
  return record | changes


def write(tmp_path, value):
  path = tmp_path / "library.json"
  path.write_bytes(value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode())
  return path


def error_of(tmp_path, value) -> str:
  path = write(tmp_path, value)
  with pytest.raises(ValueError) as caught:
    library.load(path)
  text = str(caught.value)
  assert "\n" not in text and text.startswith(str(path)), text
  return text[len(str(path)) :]


# ---- to disk and back


def test_a_library_survives_the_disk(tmp_path):
  found = library.load(write(tmp_path, RECORD))
  assert found.general[0] == Skill("g1", "Look first", "Look before you act.", "At the start.")
  assert found.by_family["heat"][1].title == "Ünïcode 漢字 🙂" and found.by_family["cool"] == ()
  assert found.families == ("heat",) and len(found) == 4
  assert found.texts == ["Look before you act.", "Use the microwave", "先に探す。", "remember places"]
  library.save(tmp_path / "again" / "library.json", found)
  assert library.load(tmp_path / "again" / "library.json") == found
  assert json.loads((tmp_path / "again" / "library.json").read_text("utf-8")) == RECORD


def test_the_example_of_the_documentation_can_be_read(tmp_path):
  page = pathlib.Path(__file__).resolve().parents[1] / "docs" / "library.md"
  example = re.search(r"```json\n(.*?)```", page.read_text("utf-8"), re.S)[1]
  found = library.load(write(tmp_path, example.encode()))
  assert len(found) == 3 and found.mistakes[0].family == "heat"


def test_what_is_known_and_not_shown_is_accepted(tmp_path):
  record = changed(metadata={"source": "hand", "counts": {"heat": 3}})
  record["general_skills"][0]["example"] = "open the fridge"
  record["common_mistakes"][0]["family"] = "heat"
  found = library.load(write(tmp_path, b"\xef\xbb\xbf" + json.dumps(record).encode()))
  assert found.metadata["counts"] == {"heat": 3} and found.mistakes[0].family == "heat"
  library.save(tmp_path / "b.json", found)
  assert library.load(tmp_path / "b.json") == found


def test_texts_become_one_clean_line(tmp_path):
  record = changed()
  record["general_skills"][0]["principle"] = " Look\nfirst,\t then\u202e act\x00. \ud800"
  found = library.load(write(tmp_path, json.dumps(record).encode()))
  assert found.general[0].principle == "Look first, then act."


def test_a_missing_file_is_told_apart(tmp_path):
  with pytest.raises(FileNotFoundError, match="no skill library at .*nowhere"):
    library.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
  ("raw", "told"),
  [
    (b'{\n"general_skills": [],\n"task_specific_skills": {},,\n}', " line 3 column 28: "),
    (b"", " line 1 column 1: Expecting value"),
    (b'{"general_skills": [\n\n{"skill_id": "a"', " line 3 "),
    (b'{"general_skills":\n"\xff"}', " line 2: not UTF-8 text (byte 20)"),
    (b"[" * 100_000, ": brackets are nested too deeply"),
    (b'{"common_mistakes": [], "common_mistakes": []}', ": the key 'common_mistakes' occurs twice"),
    (b"[1, 2]", ": the library is a list; it needs an object with general_skills,"),
    (b"null", ": the library is null; "),
  ],
)
def test_a_file_that_is_no_library_names_the_line(tmp_path, raw, told):
  assert error_of(tmp_path, raw).startswith(told)


def skill(**changes):
  return {"skill_id": "x", "title": "t", "principle": "p", "when_to_apply": "w"} | changes


@pytest.mark.parametrize(
  ("changes", "told"),
  [
    ({"general_skills": {}}, "general_skills is an object; it needs a list"),
    ({"task_specific_skills": []}, "task_specific_skills is a list; it needs an object of one list for each family"),
    ({"task_specific_skills": {"heat": {}}}, "task_specific_skills.heat is an object; it needs a list"),
    ({"task_specific_skills": {" ": []}}, "a family's name in task_specific_skills is empty"),
    ({"task_specific_skills": {"heat": [skill(), 7]}}, "task_specific_skills.heat[1] is a number"),
    ({"general_skills": [skill(principle="")]}, "general_skills[0].principle is empty"),
    ({"general_skills": [skill(principle="\u200b\n")]}, "general_skills[0].principle is empty"),
    ({"general_skills": [skill(title=None)]}, "general_skills[0].title is null; it needs a text"),
    ({"general_skills": [skill(principle="x" * 4001)]}, "general_skills[0].principle has 4,001 characters; at most"),
    ({"general_skills": [skill(principl="typo")]}, "general_skills[0] has the unknown 'principl'; its fields are"),
    ({"general_skills": [{"skill_id": "a"}]}, "general_skills[0] lacks title, principle, when_to_apply; its fields"),
    ({"skills": []}, "the library has the unknown 'skills'; its fields are general_skills,"),
    ({"metadata": "x"}, "metadata is a text; it needs an object"),
    ({"common_mistakes": [{"mistake_id": "a"}]}, "common_mistakes[0] lacks description, why_it_happens, how_to_avoid"),
  ],
)
def test_a_wrong_entry_is_named(tmp_path, changes, told):
  assert error_of(tmp_path, changed(**changes)).startswith(f": {told}")


def test_ids_occur_once(tmp_path):
  found = error_of(tmp_path, changed(task_specific_skills={"heat": [skill(), skill(skill_id="g1")]}))
  assert found == (
    ": the id 'g1' of task_specific_skills.heat[1] is already that of general_skills[0]; give each its own"
  )
  mistake = RECORD["common_mistakes"][0]
  assert "'m1' of common_mistakes[1] is already that of common_mistakes[0]" in error_of(
    tmp_path, changed(common_mistakes=[mistake, mistake])
  )
  with pytest.raises(ValueError, match="already"):
    Library(general=(Skill("a", "t", "p"), Skill("a", "t", "p")))


def test_a_huge_file_is_refused(tmp_path):
  assert "has 8,388,609 bytes" in error_of(tmp_path, b" " * (library.MAX_FILE_BYTES + 1))


# ---- as text

ALL = Selection(
  "Heat",
  (Skill("h", "Warm it", "Use the microwave", "It is in your hand."), Skill("i", "Put", "Put it down!")),
  (Skill("g", "Look first", "Look before you act."),),
  (Mistake("m", "walking in circles", "no memory", "remember places"), Mistake("n", "waiting")),
)


def test_markdown_has_three_parts():
  assert library.markdown(ALL).splitlines() == [
    "### General principles",
    "- **Look first**: Look before you act.",
    "",
    "### Heat skills",
    "- **Warm it**: Use the microwave",
    "  Apply when: It is in your hand.",
    "- **Put**: Put it down!",
    "",
    "### Mistakes to avoid",
    "- Don't: walking in circles",
    "  Instead: remember places",
    "- Don't: waiting",
  ]
  assert library.markdown(Selection(mistakes=ALL.mistakes)).startswith("### Mistakes")
  assert library.markdown(Selection(specific=ALL.specific)).startswith("### Task skills")


def test_compact_is_one_line_of_advice():
  assert library.compact(ALL) == "Use the microwave. Put it down! Look before you act. remember places. waiting."


@pytest.mark.parametrize("render", library.RENDERINGS.values())
def test_nothing_is_the_empty_text(render):
  assert render(Selection("Heat")) == ""


def test_the_family_comes_first_and_mistakes_go_first():
  assert [len(ALL.first(n)) for n in range(7)] == [0, 1, 2, 3, 4, 5, 5]
  assert ALL.first(2) == Selection("Heat", ALL.specific) and ALL.first(3).general and not ALL.first(3).mistakes
  assert ALL.first(4).mistakes == ALL.mistakes[:1] and ALL.first(5) == ALL


def test_renderings_have_names():
  assert library.rendering("compact") is library.compact and library.rendering(len) is len
  with pytest.raises(ValueError, match="'html' is unknown; choose one of markdown, compact"):
    library.rendering("html")


def test_a_text_with_lines_is_inserted_as_it_is():
  text = library.markdown(ALL)
  prompt = "You are at home.\nYour task is to: heat a potato\nYou see a room."
  inserted = insert_skill(prompt, text, block="\n\n{skill}\n", prepare=library.tidy)
  assert inserted == f"You are at home.\nYour task is to: heat a potato\n\n{text}\n\nYou see a room."
  assert insert_skill(prompt, "\n \n", block="{skill}", prepare=library.tidy) == prompt
  assert "- **" not in insert_skill(prompt, text).splitlines()[3], "without it a skill is one line"


def test_tidy_keeps_whole_lines_and_hides_nothing():
  assert library.tidy("\n a\x00b \r\n\n  c\u202ed\n") == " ab\n\n  cd"
  text = "\n".join(["x" * 9] * 5000)
  assert library.tidy(text, 100) == "\n".join(["x" * 9] * 10)
  assert library.tidy("x" * 50 + "\ny", 20) == "x" * 20 and library.tidy("") == ""
  assert re.sub(r"\s", "", library.tidy(library.markdown(ALL))) == re.sub(r"\s", "", library.markdown(ALL))
