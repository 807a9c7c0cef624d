"""Charts: well-formed SVG that carries the page's colours and no name of its own."""

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from seed_jax import charts


def parsed(svg):
  """The SVG as a tree; fails where it is not well-formed XML."""
  root = ElementTree.fromstring(svg)
  assert root.tag == "{http://www.w3.org/2000/svg}svg"
  return root


def texts(svg):
  return [node.text for node in parsed(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_lines_carry_variables_and_scale_to_the_page():
  svg = charts.lines({"gate_mean": ([1, 2, 3], [0.1, None, math.nan]), "gate_std": ([1, 2, 3], [0.5, 0.6, 0.7])})
  root = parsed(svg)
  assert "viewBox" in root.attrib and "width" not in root.attrib and "height" not in root.attrib
  assert {"var(--ink)", "var(--faint)", "var(--s0)", "var(--s1)"} <= set(re.findall(r"var\(--\w+\)", svg))
  assert not re.search(r"#0[0-9a-f]0", svg.replace('href="#', ""))  # No placeholder is left.
  assert {"gate_mean", "gate_std", "iteration"} <= set(texts(svg))
  assert "DejaVu" not in svg and "<style" not in svg and "<metadata" not in svg


def test_equal_data_gives_equal_bytes():
  series = {"success": (range(30), np.linspace(0, 1, 30))}
  assert charts.lines(series, percent="full") == charts.lines(series, percent="full")


def test_full_percent_shows_the_whole_range_and_auto_does_not():
  series = {"clip": ([1, 2], [0.01, 0.02])}
  assert "100%" in texts(charts.lines(series, percent="full"))
  auto = texts(charts.lines(series, percent="auto"))
  assert "100%" not in auto and any(text.endswith("%") for text in auto)


def test_names_are_text_never_formulas_or_tags():
  name = r"a$\frac{1}{0}$ <b>&"
  assert name in texts(charts.lines({name: ([1], [1]), "other": ([1], [2])}))
  assert name in texts(charts.stack({name: ([1, 2], [1, 2])}, unit="seconds"))
  assert name in texts(charts.rates({name: {"after": (0.5, 0.4, 0.6)}}))


@pytest.mark.parametrize("value", [0.0, 1e-4, -3.0, 1e9])
def test_a_constant_curve_has_a_plain_axis(value):
  shown = texts(charts.lines({"x": (range(80), [value] * 80)}))
  assert not any("e" in text and any(c.isdigit() for c in text) and "+" in text for text in shown)


@pytest.mark.parametrize("values", [[None], [None, None, None], [1.0]])
def test_curves_with_next_to_nothing(values):
  parsed(charts.lines({"x": (range(len(values)), values)}))


def test_long_curves_are_thinned():
  noise = np.random.default_rng(0).normal(size=50_000)
  short = charts.lines({"x": (range(1_000), noise[:1_000])})
  long = charts.lines({"x": (range(50_000), noise)})
  assert len(long) < 2 * len(short)


def test_stack_holds_six_series():
  svg = charts.stack({f"phase{i}": ([1, 2], [i, None]) for i in range(9)}, unit="seconds")
  assert "phase5" in texts(svg) and "phase6" not in texts(svg)


def test_rates_tolerate_a_row_without_one_of_the_series():
  svg = charts.rates(
    {"heat": {"before": (0.2, 0.1, 0.3), "after": (0.5, 0.4, 0.6)}, "cool": {"after": (1.0, 0.9, 1.0)}}
  )
  assert {"heat", "cool", "before", "after", "100%"} <= set(texts(svg))


def test_smooth_by_hand():
  # Windows of two: [1], [1, 3], [3], [7] (the gap does not count), and a gap of the window's length is a gap.
  assert charts.smooth([1, 3, None, 7], 2) == pytest.approx([1, 2, 3, 7])
  assert np.isnan(charts.smooth([1, None, None], 2)[2])
  assert np.isnan(charts.smooth([None, math.inf], 1)).all()
  assert (charts.smooth([1e-4] * 100, 10) == 1e-4).all()


def test_bands_name_their_series_and_leave_out_what_is_infinite():
  x, nothing = [0, 10, 20], [math.inf] * 3
  series = {f"arm {i}": (x, [0.1 * i / 2] * 3, [0.0] * 3, [0.6] * 3) for i in range(8)}
  series["one $eed"] = (x, [0.2] * 3, [-math.inf] * 3, nothing)
  svg = charts.bands(series, xlabel="iteration", marks={"grpo, final": 0.5})
  assert {*series, "grpo, final", "iteration", "100%"} - {"one $eed"} <= set(texts(svg))
  assert {f"var(--s{i})" for i in range(6)} <= set(re.findall(r"var\(--\w+\)", svg)) and "inf" not in svg
  assert svg.count("stroke-dasharray") > 2  # the seventh series has the first colour and a broken line
