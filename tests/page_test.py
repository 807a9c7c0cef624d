"""Text from outside on a page."""

import math

import pytest

from seed_jax import page


def test_markup_is_escaped():
  assert (
    page.clean("<script>alert('1')</script> & \"") == "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt; &amp; &quot;"
  )


def test_characters_that_deceive_or_break_are_replaced():
  # A control character, a change of direction, an unpaired surrogate (not encodable), a zero-width space.
  assert page.clean("a\x00b\u202ec\ud800d\u200be\r") == "a\ufffdb\ufffdc\ufffdd\ufffde\ufffd"
  assert page.clean("tab\tline\nend é 漢 🙂") == "tab\tline\nend é 漢 🙂"
  page.clean("\ud800\udfff").encode()


def test_length_is_capped_before_escaping():
  text = page.clean("<" * 3_000, 10)
  assert text.startswith("&lt;" * 10 + " <span") and text.count("&lt;") == 10 and "2990 more characters" in text
  assert page.clean("x" * page.TEXT_LIMIT) == "x" * page.TEXT_LIMIT


@pytest.mark.parametrize("value,text", [(None, ""), (3, "3"), (["<"], "[&#x27;&lt;&#x27;]")])
def test_other_kinds_become_text(value, text):
  assert page.clean(value) == text


def test_secrets_are_hidden_wherever_they_stand():
  config = {"analyzer": {"api_key": "sk-1", "model": "m"}, "list": [{"Password": "p"}], "max_tokens": 5, "api_key": ""}
  hidden = page.hide_secrets(config)
  assert hidden["analyzer"] == {"api_key": "(hidden)", "model": "m"}
  assert hidden["list"] == [{"Password": "(hidden)"}] and hidden["max_tokens"] == 5 and hidden["api_key"] == ""
  assert page.hide_secrets({"keys": {"api_keys": ["a", "b"]}}) == {"keys": {"api_keys": ["(hidden)", "(hidden)"]}}


def test_numbers():
  assert page.number(2) == 2.0
  assert [page.number(value) for value in (True, "1", None, math.nan, math.inf, [])] == [None] * 6
  assert (page.percent(0.256), page.percent("x")) == ("25.6 %", "–")
  assert page.span(0.204, 0.31) == "20–31 %"
  assert page.span(-0.02, 0.39, signed=True) == "−2 to +39"
  assert page.span(-0.004, 0.056, signed=True) == "−0.4 to +5.6"


@pytest.mark.parametrize(
  "seconds,text", [(5.4, "5 s"), (89, "89 s"), (412, "7 min"), (7_100, "118 min"), (11_100, "3 h 05 min"), (None, "–")]
)
def test_durations(seconds, text):
  assert page.duration(seconds) == text


def test_durations_that_are_compared_tell_130_from_168_seconds():
  told = [page.exact_duration(seconds) for seconds in (5.4, 89, 130, 168, 7_199.4, 11_100, None)]
  assert told == ["5 s", "89 s", "2 min 10 s", "2 min 48 s", "119 min 59 s", "3 h 05 min", "–"]


def test_plain_is_one_short_printable_line():
  assert page.plain("a\x1b[31m\nb" + "c" * 50) == "a?[31m?b" + "c" * 32


def test_a_picture_is_a_file_of_its_own_with_the_colours_that_it_names():
  drawn = page.picture('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 2 1"><path stroke="var(--s5)"/></svg>')
  assert drawn.startswith('<svg width="740" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 2 1">\n<style>')
  style, rest = drawn.split("</style>")
  assert rest == '<path stroke="var(--s5)"/></svg>' and "--s5: #" in style and "prefers-color-scheme: dark" in style
  assert "h1" not in style
