"""Summaries, tables and the page of a comparison, from curves whose figures are known."""

import html.parser
import json
import math
import re

import numpy as np
import pytest

from seed_jax import compare_page, compare_results
from seed_jax.metrics import plain_value


def curve(heights, *, iterations=(0, 10, 20), outcomes=None, speed=1.0, played=64):
  """Rows with success `heights`; `played` episodes and 5 `speed` seconds an iteration."""
  rows = []
  for iteration, success in zip(iterations, heights, strict=True):
    row = dict(iteration=iteration, success=success, macro=success - 0.05, episodes=played * iteration)
    row |= dict(environment_steps=640 * iteration, tokens_sampled=1_000 * iteration, tokens_trained=900 * iteration)
    row |= dict(seconds=5.0 * speed * iteration, outcomes=outcomes or {"a": success, "b": success})
    rows.append(row)
  return rows


@pytest.fixture
def arms():
  return {
    "seed": {0: curve([0.2, 0.6, 0.8], speed=2.0), 1: curve([0.3, 0.5, 0.7], speed=2.0)},
    "grpo": {0: curve([0.2, 0.4, 0.5]), 1: curve([0.3, 0.4, 0.5])},
  }


def test_a_summary_by_hand(arms):
  found = compare_results.summarize_arms(arms, "grpo")["seed"]
  assert found["seeds"] == [0, 1]
  final = found["final"]
  assert final["by_seed"] == [0.8, 0.7] and final["mean"] == pytest.approx(0.75)
  # two values 0.1 apart: s / sqrt(2) = 0.05, t of one degree of freedom 12.706205
  assert (final["low"], final["high"]) == pytest.approx((0.75 - 0.6353102, 0.75 + 0.6353102))
  assert found["macro"]["mean"] == pytest.approx(0.70) and found["start"]["mean"] == pytest.approx(0.25)
  # (0.2 + 0.6) / 2 and (0.6 + 0.8) / 2 give 0.55; (0.3 + 0.5) / 2 and (0.5 + 0.7) / 2 give 0.5
  assert found["area"]["by_seed"] == pytest.approx([0.55, 0.5])
  # 20 % of 20 iterations is 4: 0.2 + 0.4 * 0.4 = 0.36 and 0.3 + 0.4 * 0.2 = 0.38
  fractions = {name: f["mean"] for name, f in found["fractions"].items()}
  assert fractions == pytest.approx({"20 %": 0.37, "40 %": 0.49, "60 %": 0.59, "80 %": 0.67, "100 %": 0.75})
  assert found["episodes"] == {"mean": 1_280.0, "by_seed": [1_280.0] * 2} and found["seconds"]["mean"] == 200.0
  assert found["curve"]["iteration"] == [0, 10, 20] and found["curve"]["mean"] == pytest.approx([0.25, 0.55, 0.75])


def test_the_last_iteration_counts_and_not_the_best():
  peak = {"seed": {0: curve([0.2, 0.9, 0.3])}, "grpo": {0: curve([0.2, 0.2, 0.4])}}
  found = compare_results.summarize_arms(peak, "grpo")
  assert found["seed"]["final"]["mean"] == 0.3 and found["seed"]["against"]["final"]["difference"] == pytest.approx(
    -0.1
  )


def test_differences_are_paired_by_seed(arms):
  a = compare_results.summarize_arms(arms, "grpo")["seed"]["against"]
  # differences 0.3 and 0.2: mean 0.25, standard error 0.05, t = 5, p of one degree of freedom 1 - 2 atan(5) / pi
  assert (a["final"]["difference"], a["final"]["t"]) == pytest.approx((0.25, 5.0))
  assert a["final"]["p"] == pytest.approx(1 - 2 * math.atan(5) / math.pi)
  assert a["final"]["bootstrap"] == pytest.approx([0.2, 0.3])  # tasks are alike here: one seed twice, or both
  assert a["area"]["difference"] == pytest.approx(0.525 - (0.375 + 0.4) / 2)
  # a seed that the baseline has not finished does not count
  arms["seed"][2] = curve([0.0, 0.0, 0.0])
  found = compare_results.summarize_arms(arms, "grpo")["seed"]
  assert found["seeds"] == [0, 1, 2] and found["against"]["seeds"] == [0, 1]
  assert found["against"]["final"]["difference"] == pytest.approx(0.25)


def test_what_it_takes_to_reach_the_baseline(arms):
  found = compare_results.summarize_arms(arms, "grpo")
  a = found["seed"]["against"]
  # the mean curve 0.25, 0.55, 0.75 is at 0.5 after 10 * 0.25 / 0.3 = 8.33 iterations of 64 episodes and 10 seconds
  assert a["threshold"] == 0.5 and a["reached"] == 2
  assert (a["episodes_to"], a["seconds_to"]) == pytest.approx((64 * 25 / 3, 10 * 25 / 3))
  assert found["grpo"]["against"]["episodes_to"] == 1_280 and "final" not in found["grpo"]["against"]
  low = {"seed": {0: curve([0.2, 0.3, 0.4]), 1: curve([0.3, 0.4, 0.5])}, "grpo": arms["grpo"]}
  a = compare_results.summarize_arms(low, "grpo")["seed"]["against"]
  assert a["episodes_to"] is None and a["seconds_to"] is None and a["reached"] == 1
  text = compare_results.markdown(compare_results.summarize_arms(low, "grpo"), "grpo", [])
  assert "| seed | not reached | not reached | 1 of 2 |" in text


def test_the_curve_over_episodes_ends_where_every_arm_has_been(arms):
  """dapo has the curve of seed over iterations and plays twice the episodes: 1,280 of them after ten iterations."""
  arms["dapo"] = {s: curve([r["success"] for r in rows], played=128) for s, rows in arms["seed"].items()}
  arms["vanilla"] = {0: curve([0.2, 0.2, 0.2], played=0)}  # trains on nothing, and has no say
  found = compare_results.summarize_arms(arms, "grpo")
  dapo, seed = found["dapo"], found["seed"]
  assert dapo["area"] == seed["area"] and dapo["fractions"] == seed["fractions"]  # over iterations, as ever
  assert {s["by_episodes"]["budget"] for s in found.values()} == {1_280}
  # (0.2 + 0.6) / 2 and (0.3 + 0.5) / 2: the first half of its iterations
  assert dapo["by_episodes"]["area"]["by_seed"] == pytest.approx([0.4, 0.4])
  assert seed["by_episodes"]["area"]["by_seed"] == pytest.approx([0.55, 0.5])
  heights = {name: h["by_seed"] for name, h in dapo["by_episodes"]["heights"].items()}
  assert heights["40 %"] == pytest.approx([0.36, 0.38]) and heights["100 %"] == pytest.approx([0.6, 0.5])
  assert dapo["against"]["area_episodes"]["difference"] == pytest.approx(0.4 - (0.375 + 0.4) / 2)
  assert found["vanilla"]["by_episodes"]["area"]["mean"] == pytest.approx(0.2)
  text = compare_results.markdown(found, "grpo", [])
  assert re.search(r"\| dapo \| [\d,]+ \| .* \| 2 of 2 \| 2,560 \| 12,800 \|", text)  # what it really played


def test_every_measure_is_corrected_for_the_number_of_arms(arms):
  arms["other"] = {0: curve([0.2, 0.5, 0.9]), 1: curve([0.3, 0.6, 0.6])}
  found = compare_results.summarize_arms(arms, "grpo")
  for measure in ("final", "macro", "area", "area_episodes"):
    tests = sorted((found[name]["against"][measure] for name in ("seed", "other")), key=lambda test: test["p"])
    assert tests[0]["p_holm"] == pytest.approx(min(2 * tests[0]["p"], 1.0))
    assert tests[1]["p_holm"] == pytest.approx(max(tests[1]["p"], tests[0]["p_holm"]))


def test_tasks_that_broke_off_are_left_out_of_the_bootstrap(arms):
  arms["grpo"][1][-1]["outcomes"] = {"b": 0.5}
  bootstrap = compare_results.summarize_arms(arms, "grpo")["seed"]["against"]["final"]["bootstrap"]
  assert bootstrap == pytest.approx([0.2, 0.3])
  arms["grpo"][1][-1]["outcomes"] = {}
  found = compare_results.summarize_arms(arms, "grpo")
  assert "bootstrap" not in found["seed"]["against"]["final"] and compare_results.markdown(found, "grpo", [])


def test_tables_for_people(arms):
  found = compare_results.summarize_arms(arms, "grpo")
  text = compare_results.markdown(found, "grpo", ["About it."])
  assert text.startswith(
    "# Comparison\n\nAbout it.\n\n## Success on the panel after the last iteration\n\n| arm | seeds |"
  )
  assert "| seed | 2 | 75.0 % | 11–100 % | 70.0 % | 52.5 % | 25.0 % |" in text
  assert "| seed | +25.0 | −39 to +89 | +20 to +30 | 5.00 | 0.126 | 0.126 | +25.0 |" in text
  # area 55 and 50 % against 37.5 and 40 %: differences 17.5 and 10 points, mean 13.75, standard error 3.75, t = 3.67
  area = r"\+13\.[78] \| −34 to \+61 \| 0\.17 \| 0\.17"
  assert re.search(rf"\| seed \| {area} \| {area} \|", text)  # over iterations and over episodes: as many here
  assert "| arm | over iterations | 95 % over seeds | over 1,280 episodes | 95 % over seeds |" in text
  assert "| seed | 52.5 % | 21–84 % | 52.5 % | 21–84 % |" in text
  assert "| seed | 533 | 83 s | 2 of 2 | 1,280 | 12,800 | 20,000 | 18,000 | 3 min 20 s |" in text
  assert "| arm | 256 | 512 | 768 | 1,024 | 1,280 |" in text and "| seed | 37.0 % | 49.0 % | 59.0 % |" in text
  lines = compare_results.text_table(found, "grpo").splitlines()
  assert lines[0] == "Success on the panel after the last iteration" and lines[2].startswith("seed")
  assert [line for line in lines if line.startswith(("Area", "Difference"))] == [
    "Difference to grpo, in pairs by seed",
    "Area under the curve: the mean success during training",
    "Difference in area to grpo, in pairs by seed",
  ]
  assert compare_results.text_table({}, "grpo") == "" and compare_results.tables({}, "grpo") == []
  assert json.loads(json.dumps(plain_value(found), allow_nan=False))


def test_one_seed_has_no_interval(arms):
  found = compare_results.summarize_arms({name: {0: curves[0]} for name, curves in arms.items()}, "grpo")
  text = compare_results.markdown(found, "grpo", [])
  assert "| seed | 1 | 80.0 % | one seed |" in text and "| seed | +30.0 | one seed | one seed | – | – | – |" in text
  assert "bootstrap" not in found["seed"]["against"]["final"]  # one seed says nothing about others


def test_the_page_of_one_seed_claims_no_interval(tmp_path, arms):
  def page(found):
    for summary in found.values():
      summary |= {"method": "seed", "overrides": []}
    return compare_page.build(tmp_path, {"arms": found, "baseline": "grpo", "about": []}).read_text()

  text = page(compare_results.summarize_arms({name: {0: curves[0]} for name, curves in arms.items()}, "grpo"))
  assert "One seed: there are no intervals." in text and "95 % intervals over seeds" not in text
  assert "one seed<" in text and "1 seeds" not in text
  text = page(compare_results.summarize_arms(arms, "grpo"))
  assert "bands and whiskers are 95 % intervals over seeds" in text and "2 seeds" in text


class Page(html.parser.HTMLParser):
  """What a page loads, and whether its tags close."""

  def __init__(self, text):
    super().__init__()
    self.open, self.loaded, self.tags = [], [], set()
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.loaded += [value for name, value in attrs if name in ("src", "href") and not str(value).startswith("#")]
    if tag not in ("meta", "br"):
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.add(tag)

  def handle_endtag(self, tag):
    while self.open and self.open.pop() != tag:
      pass


def test_the_page_needs_nothing_else(tmp_path, arms):
  arms["seed <b>beta</b>=$1"] = arms["seed"]
  found = compare_results.summarize_arms(arms, "grpo")
  for summary in found.values():
    summary |= {"method": "seed", "overrides": ["train.loss.opd_beta=1"]}
  path = compare_page.build(tmp_path, {"arms": found, "baseline": "grpo", "about": ["About <it>."]})
  text = path.read_text()
  page = Page(text)
  assert not page.loaded and not page.open and not page.tags & {"script", "link", "img", "iframe", "b>beta"}
  assert "default-src 'none'" in text and "width=device-width" in text and text.count("<svg") == 4
  assert "About &lt;it&gt;." in text and "<b>beta" not in text and "75.0 %" in text and "class=scroll" in text
  empty = compare_page.build(tmp_path, {"arms": {}, "baseline": "grpo", "about": []}).read_text()
  assert "No arm is finished yet" in empty


def test_many_arms_fit_one_chart(tmp_path, arms):
  many = {f"arm {i}": arms["seed"] for i in range(14)} | {"grpo": arms["grpo"]}
  found = compare_results.summarize_arms(many, "grpo")
  assert all(np.isfinite(s["final"]["mean"]) for s in found.values())
  for summary in found.values():
    summary |= {"method": "seed", "overrides": []}
  text = compare_page.build(tmp_path, {"arms": found, "baseline": "grpo", "about": []}).read_text()
  assert "arm 13" in text
