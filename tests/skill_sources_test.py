"""Whose skill stands in the skill context."""

import collections
import random

import pytest
from skill_cases import episode

from seed_jax import skill_sources
from seed_jax.library import Library, Skill
from seed_jax.retrieval import by_family
from seed_jax.skill_sources import SOURCES, Context

WORDS = ("cup", "fridge", "go", "looking", "two words")
LIBRARY = Library((Skill("g", "t", "look first"),), {"heat": (Skill("h", "t", "warm it"),)})
CONTEXT = Context(seed=1, iteration=2, retrieve=by_family(LIBRARY, render="compact"), words=WORDS)


def batch(groups=4, members=4):
  """Every episode has a skill of its own, but member 1 of the groups; even members won."""
  return [
    episode(g, m, "" if m == 1 else f"skill {g} {m}", won=m % 2 == 0, family="heat" if g else "cool")
    for g in range(groups)
    for m in range(members)
  ]


def by_place(trajectories, texts):
  return {(t.group, t.member): text for t, text in zip(trajectories, texts, strict=True)}


def texts(name, trajectories, context=CONTEXT):
  return by_place(trajectories, SOURCES[name](trajectories, context))


# ---- what they all have in common


@pytest.mark.parametrize("name", SOURCES)
def test_the_order_of_episodes_changes_nothing(name):
  trajectories = batch()
  found = texts(name, trajectories)
  assert any(found.values()) and all(isinstance(text, str) for text in found.values())
  for seed in range(5):
    mixed = list(trajectories)
    random.Random(seed).shuffle(mixed)
    words = random.Random(seed).sample(WORDS, len(WORDS))
    context = Context(seed=1, iteration=2, retrieve=CONTEXT.retrieve, words=words)
    assert texts(name, mixed, context) == found


@pytest.mark.parametrize("name", SOURCES)
def test_no_episodes_and_no_skills(name):
  assert SOURCES[name]([], CONTEXT) == []
  expected = "warm it. look first." if name == "library" else ""
  assert SOURCES[name]([episode(g, m) for g in (1, 2) for m in (0, 1)], CONTEXT) == [expected] * 4


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in ("library", "group_contrast")])
def test_an_episode_without_a_skill_of_its_own_gets_none(name):
  assert not any(text for (_, member), text in texts(name, batch()).items() if member == 1)


@pytest.mark.parametrize("name", ["group", "other_task", "random_text", "group_contrast"])
def test_draws_change_with_seed_and_iteration(name):
  trajectories = batch(6, 6)
  found = [
    texts(name, trajectories, Context(seed=seed, iteration=iteration, words=WORDS)) for seed, iteration in NUMBERS
  ]
  assert found[0] == found[1] and found[0] != found[2] and found[0] != found[3] and found[2] != found[3]


NUMBERS = ((0, 0), (0, 0), (0, 1), (1, 0))


def test_a_source_has_a_name():
  assert skill_sources.get("group") is skill_sources.group
  with pytest.raises(ValueError, match="'foreign' is unknown; choose one of own, group, other_task, success_only"):
    skill_sources.get("foreign")


# ---- one by one


def test_own_and_by_outcome():
  found = batch(2, 3)
  assert texts("own", found)[1, 2] == "skill 1 2"
  assert {place for place, text in texts("success_only", found).items() if text} == {(0, 0), (0, 2), (1, 0), (1, 2)}
  found = [episode(0, 0, "a"), episode(0, 1, "b", won=False), episode(0, 2, "c", won=False, error="broke")]
  assert SOURCES["success_only"](found, CONTEXT) == ["a", "", ""]
  assert SOURCES["failure_only"](found, CONTEXT) == ["", "b", ""]


def test_group_is_another_member_of_the_same_group():
  for (group, member), text in texts("group", batch()).items():
    if member != 1:
      assert text in {f"skill {group} {m}" for m in (0, 2, 3) if m != member}


def test_group_draws_evenly():
  counts = collections.Counter()
  for iteration in range(300):
    counts[texts("group", batch(1), Context(iteration=iteration))[0, 0]] += 1
  assert set(counts) == {"skill 0 2", "skill 0 3"} and all(100 < count < 200 for count in counts.values())


def test_a_group_without_another_skill_gives_none():
  found = [episode(0, 0, "alone"), episode(1, 0, "a"), episode(1, 1)]
  assert SOURCES["group"](found, CONTEXT) == ["", "", ""]


def test_other_task_is_never_the_same_task():
  for (group, member), text in texts("other_task", batch()).items():
    if member != 1:
      assert text and not text.startswith(f"skill {group} ")
  twice = [episode(0, 0, "a", task_id="one"), episode(1, 0, "b", task_id="one")]
  assert SOURCES["other_task"](twice, CONTEXT) == ["", ""], "two groups of one task"
  assert SOURCES["group"](twice, CONTEXT) == ["", ""]
  assert SOURCES["other_task"]([episode(0, 0, "a"), episode(0, 1, "b")], CONTEXT) == ["", ""]


@pytest.mark.parametrize("name", ["group", "other_task"])
def test_episodes_that_cannot_be_told_apart_are_refused(name):
  with pytest.raises(ValueError, match="two episodes are member 1 of group 0, task 'task 0'"):
    SOURCES[name]([episode(0, 1, "a"), episode(0, 1, "b"), episode(1, 0, "c")], CONTEXT)


def test_a_contrast_is_one_text_of_a_success_and_a_failure_for_the_whole_group():
  found = texts("group_contrast", [*batch(1, 6), episode(0, 6, "broke", won=False, error="died")])
  assert found.pop((0, 6)) == ""  # no evidence: neither a side of the text nor one that gets it
  (text,) = set(found.values())  # member 1 has no skill of its own and gets it, too
  assert text in {f"do: skill 0 {a} avoid: skill 0 {b}" for a in (0, 2, 4) for b in (3, 5)}
  seen = {texts("group_contrast", batch(1, 6), Context(iteration=i))[0, 0] for i in range(100)}
  assert len(seen) == 6


def test_a_group_that_only_won_or_only_lost_has_no_contrast():
  for won in (True, False):
    assert SOURCES["group_contrast"]([episode(0, m, f"s{m}", won=won) for m in range(4)], CONTEXT) == [""] * 4
  one_side = [episode(0, 0, "a", won=True), episode(0, 1, "", won=False)]  # the only failure has no skill
  assert SOURCES["group_contrast"](one_side, CONTEXT) == ["", ""]
  long = [episode(0, 0, "a" * 5_000, won=True), episode(0, 1, "b" * 5_000, won=False)]
  text = SOURCES["group_contrast"](long, CONTEXT)[0]
  assert 1_000 < len(text) <= skill_sources.MAX_SKILL_CHARS and text.count("b") > 500  # the second half is not cut off


def test_library_asks_for_the_task_whatever_the_episode_says():
  found = [episode(0, 0, family="cool"), episode(1, 0, "mine"), episode(1, 1, error="broke"), episode(1, 2, turns=0)]
  assert SOURCES["library"](found, CONTEXT) == ["look first.", "warm it. look first.", "", ""]
  asked = []

  def retrieve(task, family, *, fits):
    asked.append((task, family, fits("word")))
    return task

  context = Context(retrieve=retrieve, fits=lambda text: text == "word")
  assert SOURCES["library"](batch(2, 3), context)[0] == "heat some potato 0"
  assert asked == [("heat some potato 0", "cool", True), ("heat some potato 1", "heat", True)], "each task once"
  with pytest.raises(ValueError, match="needs a library to retrieve from"):
    SOURCES["library"](found, Context())


# ---- random text


@pytest.mark.parametrize("length", [1, 2, 3, 17, 150])
def test_random_text_has_as_many_tokens(length):
  found = SOURCES["random_text"]([episode(0, 0, "word " * length)], CONTEXT)[0]
  assert len(found.split()) == length and set(found.split()) <= {"cup", "fridge", "go", "looking", "two", "words"}


def test_every_member_has_random_text_of_its_own():
  found = SOURCES["random_text"]([episode(g, m, "a b c d e f g h") for g in range(2) for m in range(4)], CONTEXT)
  assert len(set(found)) == 8


def test_random_text_counts_tokens_not_words():
  by_letter = Context(words=WORDS, tokens=len)
  for length in range(2, 60):
    text = SOURCES["random_text"]([episode(0, 0, "x" * length)], by_letter)[0]
    assert length - 3 <= len(text) <= length, "words of 2 letters and a space fill all but 3"
  assert SOURCES["random_text"]([episode(0, 0, "x")], by_letter) == [""], "no word is so short"
  assert SOURCES["random_text"]([episode(0, 0, "x")], Context(words=WORDS, tokens=lambda text: 0)) == [""]


def test_random_text_of_a_huge_skill_is_bounded_and_quick():
  calls = []
  context = Context(words=WORDS, tokens=lambda text: calls.append(1) or len(text.split()))
  text = SOURCES["random_text"]([episode(0, 0, "a " * 100_000)], context)[0]
  assert 1150 < len(text) <= 1200 and len(calls) < 250


def test_random_text_needs_words():
  with pytest.raises(ValueError, match="needs words to draw from"):
    SOURCES["random_text"]([episode(0, 0, "a")], Context(words=("", " ")))


class Tokenizer:
  def __init__(self, *pieces):
    self.pieces, self.vocab_size = pieces, len(pieces)

  def decode(self, ids):
    return "".join(self.pieces[i] for i in ids)


def test_the_words_of_a_vocabulary():
  found = skill_sources.vocabulary(Tokenizer("", " cup", "cup", "x", "a1", ".", "漢字", "two words", "Go", "\ufffd"))
  assert found == ("Go", "cup", "漢字")
  assert skill_sources.vocabulary(Tokenizer("b", "a", "!")) == ("a", "b")
  with pytest.raises(ValueError, match="none of the tokenizer's 2 ids"):
    skill_sources.vocabulary(Tokenizer("1", "!"))


# ---- into the skill context


def test_the_text_of_a_source_goes_into_the_prompt():
  class Prompter:
    def tokens(self, prompt, step, skill):
      return [prompt, step, skill]

  found = [episode(0, 0, "own", turns=2), episode(0, 1, "own")]
  tokens = skill_sources.skill_tokens(Prompter(), found, ["of another", ""])
  assert tokens(found[0], 1) == ["Your task is to: tidy up", 1, "of another"]
  assert tokens(found[1], 0) is None and found[0].skill == "own", "the episode keeps its own skill"
  with pytest.raises(ValueError):
    skill_sources.skill_tokens(Prompter(), found, ["too few"])
