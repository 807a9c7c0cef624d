"""What a comparison found: the arms' learning curves as one summary, and as tables.

An arm's figure is its last iteration, and the area under its curve; no step is chosen by the panel. Arms are compared
in pairs, seed by seed: the arms of a seed begin from one checkpoint and play the same tasks.
Shapes: S seeds, K tasks of the panel, P points of a curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from seed_jax.across_seeds import area, first_reach, height, holm, paired_t, seeds_and_tasks, t_interval
from seed_jax.page import duration, number, percent, plain, span

FRACTIONS = (0.2, 0.4, 0.6, 0.8, 1.0)
USED = ("episodes", "environment_steps", "tokens_sampled", "tokens_trained", "seconds")

Curves = Mapping[int, Sequence[Mapping[str, Any]]]  # seed -> the rows of its curve.jsonl


def summarize_arms(arms: Mapping[str, Curves], baseline: str) -> dict[str, dict[str, Any]]:
  """arm -> its summary, from the curves of its finished seeds; arms without one are left out.

  A summary has seeds; start, final, macro, area and fractions ("20 %" of the iterations' tasks, ...) as {mean, low,
  high, by_seed} with t-intervals over seeds; what training used as {mean, by_seed}; curve (P points: iteration,
  episodes, seconds, mean, low, high); and `against` the baseline, see `against`.
  """
  found = {name: _summary(curves) for name, curves in arms.items() if curves}
  for name, summary in found.items():
    if baseline in found:
      summary["against"] = against(arms[name], arms[baseline], same=name == baseline)
  tested = [s["against"]["final"] for s in found.values() if "final" in (s.get("against") or {})]
  for final, corrected in zip(tested, holm([final["p"] for final in tested]), strict=True):
    final["p_holm"] = corrected
  return found


def against(arm: Curves, base: Curves, *, same: bool = False) -> dict[str, Any] | None:
  """An arm beside the baseline over the seeds that both have finished; None where there is no such seed.

  final, macro, area: {difference, low, high, t, p} of the paired t-test; final has, of two seeds or more, `bootstrap`
  as well, [low, high] over seeds x tasks, and from `summarize_arms` p_holm, corrected for the number of arms.
  threshold: the baseline's mean final success; episodes_to and seconds_to: what the arm had used when its mean curve
  first reached it, null where it did not; reached: seeds whose own curve reached the baseline's final success with that
  seed. The baseline itself has no differences.
  """
  seeds = sorted(arm.keys() & base.keys())
  if not seeds:
    return None
  ours, theirs = _summary({s: arm[s] for s in seeds}), _summary({s: base[s] for s in seeds})
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
  for name in ("final", "macro", "area"):
    out[name] = paired_t(ours[name]["by_seed"], theirs[name]["by_seed"])._asdict()
  tables = [[curves[s][-1]["outcomes"] for s in seeds] for curves in (arm, base)]
  tasks = sorted(set.intersection(*(set(outcomes) for table in tables for outcomes in table)))  # all but errors
  if tasks and len(seeds) > 1:  # one seed says nothing about others
    after, before = (np.array([[outcomes[t] for t in tasks] for outcomes in table], float) for table in tables)
    out["final"]["bootstrap"] = list(seeds_and_tasks(after, before)[1:])
  return out


def _summary(curves: Curves) -> dict[str, Any]:
  seeds = sorted(curves)
  rows = [curves[s] for s in seeds]
  points = sorted(set.intersection(*({r["iteration"] for r in own} for own in rows)))
  table = {
    name: np.array([[r[name] for r in own if r["iteration"] in points] for own in rows], float)
    for name in ("success", "macro", *USED)
  }
  success = table["success"]  # [S, P]
  bands = [t_interval(column) for column in success.T]
  return {
    "seeds": seeds,
    "start": _stat(success[:, 0]),
    "final": _stat(success[:, -1]),
    "macro": _stat(table["macro"][:, -1]),
    "area": _stat([area(points, y) for y in success]),
    "fractions": {f"{100 * f:.0f} %": _stat([height(points, y, f) for y in success]) for f in FRACTIONS},
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
  success = [["arm", "seeds", "final success", "95 % over seeds", "macro", "area under the curve", "before"]]
  paired = [["arm", "points", "95 % (t)", "95 % (seeds x tasks)", "t", "p", "p (Holm)", "macro, points"]]
  paired[0] += ["area, points"]
  effort = [["arm", "episodes to it", "time to it", "seeds that reach it", "environment steps", "tokens sampled"]]
  effort[0] += ["tokens trained", "training time"]
  parts = [["arm", *arms[next(iter(arms))]["fractions"]]]
  for name, s in arms.items():
    label, a = plain(name), s.get("against")
    success.append(
      [label, str(len(s["seeds"])), percent(s["final"]["mean"]), between(s["final"]), percent(s["macro"]["mean"])]
      + [percent(s["area"]["mean"]), percent(s["start"]["mean"])]
    )
    parts.append([label] + [percent(f["mean"]) for f in s["fractions"].values()])
    goal = ["–"] * 3
    if a:
      reached = a["episodes_to"] is not None
      goal = [f"{a['episodes_to']:,.0f}", duration(a["seconds_to"])] if reached else ["not reached"] * 2
      goal.append(f"{a['reached']} of {len(a['seeds'])}")
    used = [f"{s[key]['mean']:,.0f}" for key in ("environment_steps", "tokens_sampled", "tokens_trained")]
    effort.append([label, *goal, *used, duration(s["seconds"]["mean"])])
    if a and "final" in a:
      final = a["final"]
      boot = final.get("bootstrap")
      paired.append(
        [label, _points(final["difference"]), between(final, signed=True)]
        + [span(*boot, signed=True) if boot else "one seed" if len(a["seeds"]) == 1 else "–"]
        + [_number(final["t"], ".2f"), _number(final["p"], ".3g"), _number(final.get("p_holm"), ".3g")]
        + [_points(a["macro"]["difference"]), _points(a["area"]["difference"])]
      )
  out = [("Success on the panel after the last iteration", success)]
  if len(paired) > 1:
    out.append((f"Difference to {plain(baseline)}, in pairs by seed", paired))
  out.append((f"What it takes to reach the final success of {plain(baseline)}, and what training used", effort))
  out.append(("Success after a part of the training tasks", parts))
  return out


def markdown(arms: Mapping[str, Mapping[str, Any]], baseline: str, about: Sequence[str]) -> str:
  """The tables as Markdown, with `about` as paragraphs before them."""
  lines = ["# Comparison", ""]
  for paragraph in about:
    lines += [paragraph, ""]
  for title, (head, *rows) in tables(arms, baseline):
    lines += [f"## {title}", "", _row(head), _row(["---"] + ["---:"] * (len(head) - 1)), *map(_row, rows), ""]
  return "\n".join(lines)


def text_table(arms: Mapping[str, Mapping[str, Any]], baseline: str) -> str:
  """The tables' success and difference for a terminal."""
  lines = []
  for title, rows in tables(arms, baseline)[:2]:
    if "Success" in title or "Difference" in title:
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
