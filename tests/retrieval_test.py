"""Which skills a task gets."""

import pathlib
import sys
import tomllib
import types

import numpy as np
import pytest

from envs import household_rooms
from seed_jax import retrieval
from seed_jax.library import Library, Mistake, Skill, markdown, tidy
from seed_jax.retrieval import RULES, by_embedding, by_family, by_keyword
from seed_jax.skills import insert_skill
from seed_jax.text import truncate_prompt


def skills(prefix, count, text="{}"):
  return tuple(Skill(f"{prefix}{i}", f"title {prefix}{i}", text.format(f"{prefix}{i}")) for i in range(count))


LIBRARY = Library(
  general=(*skills("g", 8), *skills("dyn_", 2)),
  by_family={"heat": skills("h", 9), "cool": skills("c", 1)},
  mistakes=tuple(Mistake(f"m{i}", "d", "", f"m{i}", family="cool" if i == 6 else "") for i in range(7)),
)


def compact(retriever, family, task="a task", **options):
  return retriever(task, family, **options).replace(".", "").split()


# ---- by family


def test_dynamic_skills_first_then_static_ones_up_to_top_k():
  heat = [f"h{i}" for i in range(9)]
  general = ["dyn_0", "dyn_1", "g0", "g1", "g2", "g3"]
  mistakes = [f"m{i}" for i in range(5)]
  assert compact(by_family(LIBRARY, render="compact"), "heat") == heat + general + mistakes
  assert compact(by_family(LIBRARY, top_k=1, max_mistakes=0, render="compact"), "heat") == heat + general[:2]
  assert compact(by_family(LIBRARY, top_k=0, max_mistakes=0, render="compact"), "none") == ["dyn_0", "dyn_1"]


def test_mistakes_of_another_family_are_not_shown_and_own_ones_come_first():
  found = compact(by_family(LIBRARY, top_k=0, render="compact"), "cool")
  assert found == ["c0", "dyn_0", "dyn_1", "m6", "m0", "m1", "m2", "m3"]
  assert "m6" not in compact(by_family(LIBRARY, max_mistakes=99, render="compact"), "heat")


def test_an_unknown_family_gets_general_skills_and_an_empty_library_nothing():
  assert compact(by_family(LIBRARY, max_mistakes=0, render="compact"), "sing")[0] == "dyn_0"
  assert by_family(Library())("a task", "heat") == "" == by_family(Library())("a task", "heat", fits=lambda text: False)


def test_markdown_is_the_default_and_names_the_family():
  assert "### heat skills" in by_family(LIBRARY)("a task", "heat")
  assert by_family(LIBRARY, render=lambda selection: str(len(selection)))("t", "cool") == "12"


@pytest.mark.parametrize("limit", range(0, 900, 60))
@pytest.mark.parametrize("render", ["markdown", "compact"])
def test_a_text_that_is_too_long_loses_whole_entries(limit, render):
  retrieve = by_family(LIBRARY, render=render)
  whole, text = retrieve("t", "heat"), retrieve("t", "heat", fits=lambda text: len(text) <= limit)
  assert len(text) <= limit
  assert all(line in whole.splitlines() for line in text.splitlines()) or render == "compact"
  if text and len(text) < len(whole):
    assert "h0" in text and "m4" not in text, "what matters least goes first"
  if limit >= len(whole):
    assert text == whole
  found = compact(by_family(LIBRARY, render="compact"), "heat", fits=lambda text: len(text.split()) <= 10)
  assert len(found) == 10 and found[9] == "dyn_0", "as many entries as fit"


class Letters:
  """A tokenizer of letters."""

  def first(self, text):
    return list(text)


@pytest.mark.parametrize("limit", [80, 120, 200, 400, 2000])
@pytest.mark.parametrize("render", ["markdown", "compact"])
def test_with_fits_a_prompt_keeps_its_task_line_and_the_text_whole(limit, render):
  prompt = "You are at home.\nYour task is to: heat a potato\nYou see shelf 1."

  def inserted(text):
    return insert_skill(prompt, text, block="\n\n{skill}\n", prepare=tidy)

  text = by_family(LIBRARY, render=render)("heat a potato", "heat", fits=lambda text: len(inserted(text)) <= limit)
  assert truncate_prompt(Letters(), inserted(text), limit) == inserted(text)
  assert "\nYour task is to: heat a potato\n" in inserted(text) and text in inserted(text)
  assert bool(text) == (limit > 80 or render == "compact")


def test_nothing_fits():
  assert by_family(LIBRARY)("t", "heat", fits=lambda text: False) == ""


def test_negative_counts_are_refused():
  with pytest.raises(ValueError, match="at least 0, got -1 and 5"):
    by_family(LIBRARY, top_k=-1)
  with pytest.raises(ValueError, match="'html' is unknown"):
    by_embedding(LIBRARY, None, render="html")


# ---- by key words


@pytest.mark.parametrize(
  ("rules", "task", "family"),
  [
    ("alfworld", "look at bowl under the desklamp", "look_at_obj_in_light"),
    ("alfworld", "Put a CLEAN spatula in drawer", "clean"),
    ("alfworld", "put a hot, heated egg in fridge", "heat"),
    ("alfworld", "cool some tomato and put it in microwave", "cool"),
    ("alfworld", "examine the alarmclock with the desklamp", "examine"),
    ("alfworld", "find two books and put them on the bed", "examine"),
    ("alfworld", "put some vase in safe", "pick_and_place"),
    ("alfworld", "put the wheat on the shelf", "pick_and_place"),
    ("alfworld", "", "pick_and_place"),
    ("household", "look at some pillow under desklamp", "look"),
    ("household", "examine the alarmclock with the desklamp.", "look"),
    ("household", "find two books and put them on the bed", "pick2"),
    ("household", "put a hot egg in fridge", "heat"),
    ("household", "put a cool tomato in microwave", "cool"),
    ("household", "put a clean spatula in drawer", "clean"),
    ("household", "put some vase in safe", "pick"),
    ("household", "", "pick"),
    ("webshop", "i need a long sleeve shirt, price lower than 30 dollars", "apparel"),
    ("webshop", "find me women's T-Shirts", "apparel"),
    ("webshop", "running shoes with rubber sole", "footwear"),
    ("webshop", "a usb cable for my laptop", "electronics"),
    ("webshop", "silver earrings", "accessories"),
    ("webshop", "blackout curtains", "home_decor"),
    ("webshop", "sulfate free shampoo", "beauty_health"),
    ("webshop", "gluten free snack", "other"),
    ("webshop", "漢字のお茶", "other"),
  ],
)
def test_classes_of_task_sentences(rules, task, family):
  assert RULES[rules](task) == family


def test_the_sentence_decides_whatever_the_family():
  library = Library(by_family={"heat": skills("h", 1), "clean": skills("c", 1)})
  retrieve = by_keyword(library, "alfworld", render="compact")
  assert retrieve("clean a pan and heat it", "heat") == "c0." and retrieve("heat a pan", "clean") == "h0."
  assert by_keyword(library, lambda task: "heat", render="compact")("clean", "") == "h0."
  assert retrieve("heat a pan", "", fits=lambda text: False) == ""
  with pytest.raises(ValueError, match="'sokoban' are unknown; choose one of alfworld, household, webshop"):
    by_keyword(library, "sokoban")


SKILLRL = ("pick_and_place", "look_at_obj_in_light", "clean", "heat", "cool", "examine")
# What SkillRL's classes, which know no pick2, say of them.
IN_SKILLRL = dict(zip(household_rooms.FAMILIES, (*SKILLRL[:5], "pick_and_place"), strict=True))
ALFWORLD_SENTENCES = {  # of its six task types
  "pick": "put some mug on desk",
  "look": "examine the book with the desklamp",
  "clean": "put a clean mug in cabinet",
  "heat": "put a hot potato in fridge",
  "cool": "put a cool mug in cabinet",
  "pick2": "find two book and put them in bed",
}


@pytest.mark.parametrize("rules", ["alfworld", "household"])
def test_every_family_of_the_household_gets_its_own_skills(rules):
  families = household_rooms.FAMILIES
  built = Library(general=skills("g", 1), by_family={f: skills(f"{f}_", 1) for f in families})
  unmet = []
  retrieve = by_keyword(built, rules, render="compact", unmet=unmet.append)
  tasks = [(f, household_rooms.goal_sentence(f, "potato", "desklamp")) for f in families]
  for family, task in [*tasks, *ALFWORLD_SENTENCES.items()]:
    assert compact(retrieve, family, task) == [f"{family}_0", "g0"], task
  theirs = Library(general=skills("g", 1), by_family={f: skills(f"{f}_", 1) for f in SKILLRL})
  retrieve = by_keyword(theirs, rules, render="compact", unmet=unmet.append)
  for family, task in tasks:
    assert compact(retrieve, family, task) == [f"{IN_SKILLRL[family]}_0", "g0"], task
  assert unmet == []
  lost = Library(mistakes=(Mistake("m0", "d", "", "m0", family="pick2"), Mistake("m1", "d", "", "m1", family="heat")))
  assert compact(by_keyword(lost, rules, render="compact"), "pick2", "put two mug in shelf") == ["m0"]


def test_a_family_that_meets_no_skill_is_told_of():
  unmet = []
  by_family(LIBRARY, unmet=unmet.append)("t", "heat")
  by_family(Library(), unmet=unmet.append)("t", "sing")
  by_family(Library(general=skills("g", 1)), unmet=unmet.append)("t", "sing")  # for all families, as it was made
  assert unmet == []
  by_family(LIBRARY, unmet=unmet.append)("t", "sing")
  by_keyword(LIBRARY, "alfworld", unmet=unmet.append)("put a potato in fridge", "heat")
  by_keyword(LIBRARY, lambda task: "dance", unmet=unmet.append)("t", "heat")
  assert unmet == ["sing", "pick_and_place", "dance"]


# ---- by embedding

WORDS = ("potato", "fridge", "lamp", "egg")


class Embedder:
  """Counts of a few words: as small and repeatable as an embedding can be."""

  def __init__(self):
    self.calls = []

  def __call__(self, texts):
    self.calls.append(list(texts))
    return [[float(text.lower().count(word)) for word in WORDS] for text in texts]


COOKING = Library(
  general=(
    Skill("g0", "none", "nothing of it"),
    Skill("g1", "a", "the lamp"),
    Skill("g2", "Potato", "and a potato", "near an egg"),
  ),
  by_family={
    "heat": (Skill("h0", "a", "potato potato"), Skill("h1", "a", "fridge")),
    "look": (Skill("l0", "a", "lamp"), Skill("l1", "a", "lamp lamp lamp"), Skill("l2", "a", "lamp fridge")),
  },
  mistakes=(Mistake("m0", "d", "", "m0"), Mistake("m1", "d", "", "m1", family="heat")),
)


def test_the_nearest_skills_of_any_family_by_cosine():
  embed = Embedder()
  retrieve = by_embedding(COOKING, embed, top_k=1, specific_top_k=2, max_mistakes=1, render="compact")
  # "lamp" and "lamp lamp lamp" have cosine 1 with the task, and the earlier one stands first.
  assert retrieve("where is the lamp", "heat") == "lamp. lamp lamp lamp. the lamp. m1."
  assert retrieve("a potato", "") == "potato potato. fridge. and a potato. m0.", "ties at 0 keep the document's order"
  assert [len(call) for call in embed.calls] == [3, 5, 1, 1]
  assert embed.calls[0][2] == "Potato. and a potato. near an egg"
  retrieve("a potato", "heat")
  assert len(embed.calls) == 4, "a task is embedded once"


def test_embedding_defaults_and_limits():
  retrieve = by_embedding(COOKING, Embedder(), top_k=2)
  assert retrieve("lamp", "").startswith("### General principles\n- **a**: the lamp\n- **none**: nothing of it\n")
  assert "### Related skills\n- **a**: lamp\n- **a**: lamp lamp lamp\n" in retrieve("lamp", "")
  assert "lamp lamp lamp" not in retrieve("lamp", "", fits=lambda text: len(text) < 40)
  assert by_embedding(Library(), Embedder())("lamp", "") == ""
  assert by_embedding(COOKING, Embedder(), top_k=0, max_mistakes=0)("lamp", "") == ""


@pytest.mark.parametrize(
  ("vectors", "told"),
  [
    (np.zeros((3,)), r"\[3\] for 3 texts"),
    (np.zeros((2, 4)), r"\[2, 4\] for 3"),
    (np.full((3, 4), np.nan), r"\[3, 4\] for 3"),
  ],
)
def test_an_embedder_that_gives_something_else_is_refused(vectors, told):
  with pytest.raises(ValueError, match=told):
    by_embedding(COOKING, lambda texts: vectors)


def test_shared_words_are_near_without_a_model():
  retrieve = by_embedding(
    COOKING, retrieval.word_embedder(), top_k=0, specific_top_k=1, max_mistakes=0, render="compact"
  )
  assert retrieve("Bring me the POTATO", "") == "potato potato." and retrieve("fridge, a", "") == "fridge."
  embed = retrieval.word_embedder(8)
  assert embed(["a b a", "A, b!", "", "\ud800 漢字"]).shape == (4, 8)
  np.testing.assert_array_equal(embed(["a b a"])[0], embed(["a"])[0] * 2 + embed(["b"])[0])
  assert not embed([""]).any() and retrieve("\ud800", "")


def test_the_sentence_model_is_imported_only_when_asked_for(monkeypatch):
  assert "sentence_transformers" not in sys.modules
  extras = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
  assert [line.partition(">")[0] for line in extras["optional-dependencies"]["embeddings"]] == ["sentence-transformers"]
  monkeypatch.setitem(sys.modules, "sentence_transformers", None)
  with pytest.raises(ValueError, match="pip install 'seed_jax.embeddings.'"):
    retrieval.sentence_embedder("some/model")

  class SentenceTransformer:
    def __init__(self, model, **options):
      assert (model, options) == ("some/model", {"device": "cpu"})

    def encode(self, texts, show_progress_bar):
      assert not show_progress_bar
      return np.asarray(Embedder()(texts), np.float64)

  fake = types.ModuleType("sentence_transformers")
  fake.SentenceTransformer = SentenceTransformer
  monkeypatch.setitem(sys.modules, "sentence_transformers", fake)
  embed = retrieval.sentence_embedder("some/model", device="cpu")
  assert embed(("lamp", "egg")).dtype == np.float32
  assert by_embedding(COOKING, embed, render=markdown)("egg", "") == by_embedding(COOKING, Embedder())("egg", "")
