"""The page of a comparison: tables and learning curves in one HTML file that needs nothing else, fit for a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from seed_jax import charts, metrics
from seed_jax.compare_results import between, tables
from seed_jax.page import clean, document, percent, picture

_AXES = (  # of the curves: a key of a summary's curve, what stands below the axis
  ("iteration", "iteration"),
  ("episodes", "training episodes"),
  ("seconds", "training seconds"),
)


def build(workdir: epath.PathLike, results: Mapping[str, Any]) -> epath.Path:
  """Writes `workdir/compare.html` from the results of the stage `compare` and returns its path; with it
  `compare.svg`, the curves over training episodes.
  """
  workdir = epath.Path(workdir)
  arms, baseline = results["arms"], results["baseline"]
  title = f"Comparison {workdir.name}"
  sections = [f"<h1>{clean(title, 200)}</h1>", _cards(arms), *(f"<p>{clean(text)}</p>" for text in results["about"])]
  if arms:
    sections += [
      _curves(arms, baseline),
      *(_table(name, rows) for name, rows in tables(arms, baseline)),
      _details(arms),
    ]
  else:
    sections.append("<p class=notice>No arm is finished yet.</p>")
  path = workdir / "compare.html"
  metrics.write_text(path, document(title, sections))
  if arms:
    metrics.write_text(workdir / "compare.svg", picture(_curve(arms, baseline, "episodes", "training episodes")))
  return path


def _cards(arms: Mapping[str, Mapping[str, Any]]) -> str:
  cards = []
  for name, s in arms.items():
    count = len(s["seeds"])
    note = f"{clean(name, 60)}; {between(s['final'])}" + (f", {count} seeds" if count > 1 else "")
    final = (s.get("against") or {}).get("final")
    if final:
      tone = "good" if final["low"] > 0 else "bad" if final["high"] < 0 else "soft"
      note += f"; <span class={tone}>{100 * final['difference']:+.1f} points</span>"
    cards.append(f"<div class=card><b>{percent(s['final']['mean'])}</b><span class=soft>{note}</span></div>")
  return f"<div class=cards>{''.join(cards)}</div>"


def _curves(arms: Mapping[str, Mapping[str, Any]], baseline: str) -> str:
  figures = []
  for key, label in _AXES:
    figures.append(f"<figure><h3>Success by {label}</h3>{_curve(arms, baseline, key, label)}</figure>")
  finals = {name: {"after the last iteration": _whiskers(s["final"])} for name, s in arms.items()}
  figures.append(f"<figure><h3>Final success</h3>{charts.rates(finals)}</figure>")
  note = "Means over seeds; bands and whiskers are 95 % intervals over seeds."
  if max(len(s["seeds"]) for s in arms.values()) == 1:
    note = "One seed: there are no intervals."
  return f"<h2>Learning curves</h2><p class=soft>{note}</p><div class=charts>{''.join(figures)}</div>"


def _curve(arms: Mapping[str, Mapping[str, Any]], baseline: str, key: str, label: str) -> str:
  series = {name: [s["curve"][column] for column in (key, "mean", "low", "high")] for name, s in arms.items()}
  marks = {f"{baseline}, final": arms[baseline]["final"]["mean"]} if baseline in arms and key != "iteration" else None
  return charts.bands(series, xlabel=label, marks=marks)


def _table(title: str, rows: Sequence[Sequence[str]]) -> str:
  """A table that scrolls sideways where the screen is narrow."""
  head, *body = rows
  kinds = ["", *[" class=number"] * (len(head) - 1)]
  lines = ["".join(f"<th{kind}>{clean(cell, 60)}</th>" for kind, cell in zip(kinds, head, strict=True))]
  lines += ["".join(f"<td{k}>{clean(cell, 60)}</td>" for k, cell in zip(kinds, row, strict=True)) for row in body]
  return (
    f"<h2>{clean(title, 120)}</h2><div class=scroll><table><thead><tr>{lines[0]}</tr></thead>"
    f"<tbody>{''.join(f'<tr>{line}</tr>' for line in lines[1:])}</tbody></table></div>"
  )


def _details(arms: Mapping[str, Mapping[str, Any]]) -> str:
  """What each arm is, and its figures seed by seed."""
  parts = []
  for name, s in arms.items():
    seeds = ", ".join(
      f"seed {seed} {percent(value)}" for seed, value in zip(s["seeds"], s["final"]["by_seed"], strict=True)
    )
    text = f"method {s['method']}" + "".join(f"; {override}" for override in s["overrides"])
    parts.append(
      f"<details><summary>{clean(name, 60)}</summary><div><p>{clean(text)}</p><p>{clean(seeds)}</p></div></details>"
    )
  return f"<h2>Arms</h2>{''.join(parts)}"


def _whiskers(stat: Mapping[str, Any]) -> tuple[float, float, float]:
  """(mean, low, high) within [0, 1]; without an interval the mean alone."""
  if "one seed" == between(stat):
    return stat["mean"], stat["mean"], stat["mean"]
  return stat["mean"], max(stat["low"], 0.0), min(stat["high"], 1.0)
