"""What skills are like and what they are worth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skill_cases import episode

from seed_jax import skill_quality as quality
from seed_jax.skill_quality import Seen

settings.register_profile("skill_quality", derandomize=True, max_examples=100, deadline=None, database=None)
PROFILE = settings.get_profile("skill_quality")


# ---- texts


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("Take  potato-1, from\nShelf 2!", "take potato 1 from shelf 2"),
    ("ＴＡＫＥ ﬁve", "take five"),
    ("STRASSE straße", "strasse strasse"),
    ("先に探す take", "先 に 探 す take"),
    ("взять чашку", "взять чашку"),
    ("a_b", "a b"),
    ("🙂 🙃", "🙂 🙃"),
    ("...", "..."),
    ("", ""),
  ],
)
def test_normalised_text_is_words_alone(text, words):
  assert quality.normalised(text) == words


def test_ngrams_by_hand():
  assert quality.ngrams("a b c d") == {("a", "b", "c"), ("b", "c", "d")}
  assert quality.ngrams("A, b") == {("a", "b")} and quality.ngrams("") == set()
  assert quality.ngrams("a a a a") == {("a", "a", "a")}
  assert quality.coverage("a b c d", {("a", "b", "c")}) == 0.5 and quality.coverage("", set()) == 0


def test_counts_and_lengths():
  texts = ["", "Go on.", "go on", "take a cup"]
  assert quality.distinct_count(texts) == 2
  assert quality.lengths(texts) == {"length": pytest.approx(7 / 3), "length_max": 3}
  assert quality.lengths(texts, tokens=len)["length_max"] == 10
  assert quality.lengths([]) == {"length": 0, "length_max": 0}


def test_overlap_by_hand():
  # of "a b c d" one of two 3-grams is in the references, of "x y" none, and "" is no skill: (1/2 + 0) / 2
  assert quality.overlap(["a b c d", "x y", ""], ["a b c", "q"]) == 0.25
  assert quality.overlap([], ["a"]) == 0 == quality.overlap(["a b"], [])


def test_parse_rate_counts_what_could_be_read():
  found = [episode(skill="x"), episode(member=1), episode(member=2, error="broke"), episode(member=3, turns=0)]
  assert quality.parse_rate(found) == 0.5 and quality.parse_rate([]) == 0


def test_agreement():
  assert quality.agreement(["Go on.", "a", "", "b"], ["go on", "b", "a", ""]) == 0.5
  assert quality.agreement([], []) == 0
  with pytest.raises(ValueError):
    quality.agreement(["a"], [])


# ---- novelty


def test_novelty_by_text_and_by_ngrams():
  seen = Seen()
  assert quality.novelty(["a b c d", ""], seen) == {"novel": 1, "novel_ngrams": 1}
  seen.add(["A b, c d", ""])
  # the first is known; the second is new with 3-grams (a b c) known, (b c e) new: (0 + 1/2) / 2
  assert quality.novelty(["a b c d", "a b c e"], seen) == {"novel": 0.5, "novel_ngrams": 0.25}
  assert quality.novelty(["", ""], seen) == {"novel": 0, "novel_ngrams": 0}
  assert len(seen.texts) == 1, "measuring adds nothing"


@PROFILE
@given(st.lists(st.text(max_size=20), max_size=6), st.lists(st.text(max_size=20), max_size=6))
def test_novelty_is_a_share_whatever_the_order(texts, earlier):
  one, other = Seen(), Seen()
  one.add(earlier)
  for text in reversed(earlier):
    other.add([text])
  assert one == other
  found = quality.novelty(texts, one)
  assert all(0 <= value <= 1 for value in found.values())
  one.add(texts)
  assert quality.novelty(texts, one)["novel"] == 0


def test_measure_has_one_value_for_each_name():
  trajectories = [episode(skill="go to shelf 1"), episode(member=1, skill="Go to shelf 1."), episode(member=2)]
  found = quality.measure(trajectories, Seen(), references=["go to shelf 2"])
  assert found == {
    "skill_parse_rate": pytest.approx(2 / 3),
    "skill_length": 4,
    "skill_length_max": 4,
    "skill_distinct": 1,
    "skill_novel": 1,
    "skill_novel_ngrams": 1,
    "skill_overlap": 0.5,
  }
  assert set(quality.measure([], Seen()).values()) == {0.0}


def test_a_huge_text_is_measured_in_time():
  text = " ".join(map(str, range(200_000)))
  assert quality.novelty([text], Seen())["novel"] == 1 and len(quality.ngrams("x" * 10**6)) == 1


# ---- what a skill is worth

LOGPROBS = np.array([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
SKILL = np.array([[-0.5, -3.0, np.nan], [0.0, 0.0, 0.0]])
MASK = np.array([[1, 1, 0], [1, 0, 1]])


def gain(**changes):
  fields = dict(logprobs=LOGPROBS, skill_logprobs=SKILL, mask=MASK, won=[True, False])
  return quality.log_prob_gain(**fields | changes)


def test_gain_by_hand():
  # the first row was won: (0.5 - 1) / 2, one of two tokens is likelier; the NaN stands where the mask is 0
  assert gain() == {"gain": -0.25, "positive": 0.5, "tokens": 2}
  assert gain(won=[True, True])["gain"] == pytest.approx((0.5 - 1 + 1 + 1) / 4)
  assert gain(won=[[True, False, True], [False, False, True]])["gain"] == pytest.approx((0.5 + 1) / 2)
  assert gain(won=[False, False]) == gain(mask=0 * MASK) == {"gain": 0, "positive": 0, "tokens": 0}
  empty = np.zeros((0, 3))
  assert gain(logprobs=empty, skill_logprobs=empty, mask=empty, won=np.zeros(0))["tokens"] == 0


def test_gain_of_each_episode():
  arrays = dict(logprobs=LOGPROBS, skill_logprobs=SKILL, mask=MASK)
  np.testing.assert_allclose(quality.gain_by_episode(**arrays, episode=[2, 0], num_episodes=3), [1, np.nan, -0.25])
  packed = np.array([[1, 0, -7], [0, 99, 0]])  # rows of several episodes; what does not count may be anything
  np.testing.assert_allclose(quality.gain_by_episode(**arrays, episode=packed, num_episodes=2), [1 / 3, 0.5])
  assert np.isnan(quality.gain_by_episode(**arrays | {"mask": 0 * MASK}, episode=[0, 1], num_episodes=2)).all()


def test_arrays_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 2\] and \[2, 3\]"):
    gain(skill_logprobs=SKILL[:, :2])
  with pytest.raises(ValueError, match=r"won has shape \[3\]; needed is \[2, 3\] or \[2\]"):
    gain(won=[True, False, True])
  with pytest.raises(ValueError, match="1 of 6 counted tokens have no finite gain"):
    gain(mask=MASK * 0 + 1)
  arrays = dict(logprobs=LOGPROBS, skill_logprobs=SKILL, mask=MASK)
  with pytest.raises(ValueError, match=r"episodes 0 to 5 are not all in \[0, 2\)"):
    quality.gain_by_episode(**arrays, episode=[0, 5], num_episodes=2)
  with pytest.raises(ValueError, match="float64"):
    quality.gain_by_episode(**arrays, episode=[0.0, 1.0], num_episodes=2)
