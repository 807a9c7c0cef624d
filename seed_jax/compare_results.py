"""What a comparison found: the arms' learning curves as one summary, and as tables.

An arm's figure is its last iteration, and the area under its curve; no step is chosen by the panel. Methods that leave
groups out play more episodes an iteration, so that there is a curve over the episodes really played as well: up to the
number that every arm has played. Arms are compared in pairs, seed by seed: those of a seed begin from one checkpoint.
Shapes: S seeds, K tasks of the panel, P points of a curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from seed_jax.across_seeds import area, cut, first_reach, height, holm, paired_t, seeds_and_tasks, t_interval
from seed_jax.page import exact_duration, number, percent, plain, span

FRACTIONS = (0.2, 0.4, 0.6, 0.8, 1.0)
MEASURES = ("final", "macro", "area", "area_episodes")  # that are tested against the baseline
USED = ("episodes", "environment_steps", "tokens_sampled", "tokens_trained", "seconds")

Curves = Mapping[int, Sequence[Mapping[str, Any]]]  # seed -> the rows of its curve.jsonl


def summarize_arms(arms: Mapping[str, Curves], baseline: str) -> dict[str, dict[str, Any]]:
  """arm -> its summary, from the curves of its finished seeds; arms without one are left out.

  A summary has seeds; start, final, macro, area and fractions ("20 %" of the iterations, ...) as {mean, low, high,
  by_seed} with t-intervals over seeds; by_episodes: budget, the training episodes that every arm that trains has
  played with every seed, the area up to there, and heights at "20 %" of it, ...; what training used as {mean, by_seed};
  curve (P points: iteration, episodes, seconds, mean, low, high); and `against` the baseline, see `against`.
  """
  played = [rows[-1]["episodes"] for curves in arms.values() for rows in curves.values()]
  budget = min((count for count in played if count), default=0)
  found = {name: _summary(curves, budget) for name, curves in arms.items() if curves}
  for name, summary in found.items():
    if baseline in found:
      summary["against"] = against(arms[name], arms[baseline], budget=budget, same=name == baseline)
  for measure in MEASURES:
    tested = [s["against"][measure] for s in found.values() if measure in (s.get("against") or {})]
    for test, corrected in zip(tested, holm([test["p"] for test in tested]), strict=True):
      test["p_holm"] = corrected
  return found


def against(arm: Curves, base: Curves, *, budget: float, same: bool = False) -> dict[str, Any] | None:
  """An arm beside the baseline over the seeds that both have finished; None where there is no such seed.

  MEASURES: {difference, low, high, t, p} of the paired t-test, and from `summarize_arms` p_holm, corrected for the
  number of arms within the measure; final has, of two seeds or more, `bootstrap` as well, [low, high] over seeds x
  tasks. area_episodes is the area up to `budget` episodes.
  threshold: the baseline's mean final success; episodes_to and seconds_to: what the arm had used when its mean curve
  first reached it, null where it did not; reached: seeds whose own curve reached the baseline's final success with that
  seed. The baseline itself has no differences.
  """
  seeds = sorted(arm.keys() & base.keys())
  if not seeds:
    return None
  ours, theirs = (_summary({s: curves[s] for s in seeds}, budget) for curves in (arm, base))
  threshold = theirs["final"]["mean"]
  curve = ours["curve"]
  finals = theirs["final"]["by_seed"]
  out = {
    "seeds": seeds,
    "threshold": threshold,
    "episodes_to": first_reach(curve["episodes"], curve["mean"], threshold),
    "seconds_to": first_reach(curve["seconds"], curve["mean"], threshold),
    "reached": sum(
      first_reach(_column(arm[s], "episodes"), _column(arm[s], "success"), final) is not None
      for s, final in zip(seeds, finals, strict=True)
    ),
  }
  if same:
    return out
  for summary in (ours, theirs):
    summary["area_episodes"] = summary["by_episodes"]["area"]
  for name in MEASURES:
    out[name] = paired_t(ours[name]["by_seed"], theirs[name]["by_seed"])._asdict()
  tables = [[curves[s][-1]["outcomes"] for s in seeds] for curves in (arm, base)]
  tasks = sorted(set.intersection(*(set(outcomes) for table in tables for outcomes in table)))  # all but errors
  if tasks and len(seeds) > 1:  # one seed says nothing about others
    after, before = (np.array([[outcomes[t] for t in tasks] for outcomes in table], float) for table in tables)
    out["final"]["bootstrap"] = list(seeds_and_tasks(after, before)[1:])
  return out


def _summary(curves: Curves, budget: float) -> dict[str, Any]:
  seeds = sorted(curves)
  rows = [curves[s] for s in seeds]
  points = sorted(set.intersection(*({r["iteration"] for r in own} for own in rows)))
  table = {
    name: np.array([[r[name] for r in own if r["iteration"] in points] for own in rows], float)
    for name in ("success", "macro", *USED)
  }
  success = table["success"]  # [S, P]
  up_to = [cut(*curve, budget) for curve in zip(table["episodes"], success, strict=True)]
  bands = [t_interval(column) for column in success.T]
  return {
    "seeds": seeds,
    "start": _stat(success[:, 0]),
    "final": _stat(success[:, -1]),
    "macro": _stat(table["macro"][:, -1]),
    "area": _stat([area(points, y) for y in success]),
    "fractions": {f"{100 * f:.0f} %": _stat([height(points, y, f) for y in success]) for f in FRACTIONS},
    "by_episodes": {
      "budget": budget,
      "area": _stat([area(x, y) for x, y in up_to]),
      "heights": {f"{100 * f:.0f} %": _stat([height(x, y, f) for x, y in up_to]) for f in FRACTIONS},
    },
    **{name: {"mean": float(table[name][:, -1].mean()), "by_seed": table[name][:, -1].tolist()} for name in USED},
    "curve": {
      "iteration": points,
      "episodes": table["episodes"].mean(axis=0).tolist(),
      "seconds": table["seconds"].mean(axis=0).tolist(),
      **{name: list(values) for name, values in zip(("mean", "low", "high"), zip(*bands, strict=True), strict=True)},
    },
  }


def _stat(values) -> dict[str, Any]:
  mean, low, high = t_interval(values)
  return {"mean": mean, "low": low, "high": high, "by_seed": [float(v) for v in values]}


def _column(rows, name):
  return [r[name] for r in rows]


# ---------------------------------------------------------------- tables


def tables(arms: Mapping[str, Mapping[str, Any]], baseline: str) -> list[tuple[str, list[list[str]]]]:
  """(title, rows of cells; the first row is the head) of everything that a summary says in numbers."""
  if not arms:
    return []
  budget = next(iter(arms.values()))["by_episodes"]["budget"]
  success = [["arm", "seeds", "final success", "95 % over seeds", "macro", "area under the curve", "before"]]
  areas = [["arm", "over iterations", "95 % over seeds", f"over {budget:,.0f} episodes", "95 % over seeds"]]
  paired = [["arm", "points", "95 % (t)", "95 % (seeds x tasks)", "t", "p", "p (Holm)", "macro, points"]]
  wider = [
    ["arm"] + [f"{text}{over}" for over in ("", ", episodes") for text in ("points", "95 % (t)", "p", "p (Holm)")]
  ]
  effort = [["arm", "episodes to it", "time to it", "seeds that reach it", "episodes", "environment steps"]]
  effort[0] += ["tokens sampled", "tokens trained", "training time"]
  parts = [["arm", *(f"{budget * f:,.0f}" for f in FRACTIONS)]]
  for name, s in arms.items():
    label, a, by_episodes = plain(name), s.get("against"), s["by_episodes"]
    success.append(
      [label, str(len(s["seeds"])), percent(s["final"]["mean"]), between(s["final"]), percent(s["macro"]["mean"])]
      + [percent(s["area"]["mean"]), percent(s["start"]["mean"])]
    )
    two = (s["area"], by_episodes["area"])
    areas.append([label] + [cell for stat in two for cell in (percent(stat["mean"]), between(stat))])
    parts.append([label] + [percent(f["mean"]) for f in by_episodes["heights"].values()])
    goal = ["–"] * 3
    if a:
      reached = a["episodes_to"] is not None
      goal = [f"{a['episodes_to']:,.0f}", exact_duration(a["seconds_to"])] if reached else ["not reached"] * 2
      goal.append(f"{a['reached']} of {len(a['seeds'])}")
    used = [f"{s[key]['mean']:,.0f}" for key in USED if key != "seconds"]
    effort.append([label, *goal, *used, exact_duration(s["seconds"]["mean"])])
    if a and "final" in a:
      boot = a["final"].get("bootstrap")
      points, interval, p, corrected = _test(a["final"])
      paired.append(
        [label, points, interval]
        + [span(*boot, signed=True) if boot else "one seed" if len(a["seeds"]) == 1 else "–"]
        + [_number(a["final"]["t"], ".2f"), p, corrected, _points(a["macro"]["difference"])]
      )
      wider.append([label, *_test(a["area"]), *_test(a["area_episodes"])])
  out = [("Success on the panel after the last iteration", success)]
  if len(paired) > 1:
    out.append((f"Difference to {plain(baseline)}, in pairs by seed", paired))
  out.append(("Area under the curve: the mean success during training", areas))
  if len(wider) > 1:
    out.append((f"Difference in area to {plain(baseline)}, in pairs by seed", wider))
  out.append((f"What it takes to reach the final success of {plain(baseline)}, and what training used", effort))
  out.append(("Success after so many training episodes", parts))
  return out


def _test(found: Mapping[str, Any]) -> list[str]:
  """Points, interval, p and corrected p of a paired difference."""
  p = [_number(found.get(name), ".3g") for name in ("p", "p_holm")]
  return [_points(found["difference"]), between(found, signed=True), *p]


def markdown(arms: Mapping[str, Mapping[str, Any]], baseline: str, about: Sequence[str]) -> str:
  """The tables as Markdown, with `about` as paragraphs before them."""
  lines = ["# Comparison", ""]
  for paragraph in about:
    lines += [paragraph, ""]
  for title, (head, *rows) in tables(arms, baseline):
    lines += [f"## {title}", "", _row(head), _row(["---"] + ["---:"] * (len(head) - 1)), *map(_row, rows), ""]
  return "\n".join(lines)


def text_table(arms: Mapping[str, Mapping[str, Any]], baseline: str) -> str:
  """The tables of success, area and differences for a terminal."""
  lines = []
  for title, rows in tables(arms, baseline):
    if title.startswith(("Success on the panel", "Area", "Difference")):
      widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
      lines.append(title)
      for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
  return "\n".join(lines)


def between(found: Mapping[str, Any], signed: bool = False) -> str:
  """The interval of a mean or a difference as text; one seed has none."""
  if number(found["low"]) is None or number(found["high"]) is None:
    return "one seed"
  if signed:
    return span(found["low"], found["high"], signed=True)
  return span(max(found["low"], 0.0), min(found["high"], 1.0))


def _row(cells: Sequence[str]) -> str:
  return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _points(value: float) -> str:
  return f"{round(100 * value, 1) + 0.0:+.1f}".replace("-", "−")  # no minus before a zero


def _number(value: float | None, form: str) -> str:
  return "–" if number(value) is None else format(value, form).replace("-", "−")
