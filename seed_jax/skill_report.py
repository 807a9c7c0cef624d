"""The skills of a run on its report: how they change, those of some iterations, those that are worth most and least.

What a skill is worth, its gain, is the mean log-probability that it adds to the actions of the episode that it was
written about, in nats a token (`skill_quality`). Every text is escaped and cut, and so is every list: the section stays
below a megabyte or two whatever the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from seed_jax import charts, skill_log, skill_quality
from seed_jax.page import clean, figure, number

ITERATIONS = 12  # that are shown, the first and the last among them
ROWS = 40  # of an iteration's table
EXTREMES = 10  # skills of the highest gain, and as many of the lowest
_SKILL_CHARS, _TASK_CHARS = 600, 160

# Title, metrics, options of `charts.lines`.
_CURVES = (
  ("Skills that parse", ("skill_parse_rate",), {"percent": "full"}),
  ("Length of skills", ("skill_length", "skill_length_max"), {"unit": "tokens"}),
  ("Different skills of an iteration", ("skill_distinct",), {}),
  ("New skills, new n-grams", ("skill_novel", "skill_novel_ngrams"), {"percent": "full"}),
  ("n-grams that the library has", ("skill_overlap",), {"percent": "full"}),
  ("Gain on the actions of successes", ("skill_gain_on_success",), {"unit": "nats a token"}),
  ("Tokens of successes made likelier", ("skill_gain_positive",), {"percent": "full"}),
)
METRICS = tuple(key for _, keys, _ in _CURVES for key in keys)
_MARKS = {"success": "<span class=good>won</span>", "failure": "<span class=bad>lost</span>"}


def section(directory: epath.PathLike, rows: Sequence[Mapping[str, Any]], notices: list[str]) -> str:
  """The section of a page, "" where the run kept no skills.

  `directory` is the run's folder of skills (`skill_log`), `rows` its metrics, whose METRICS become curves. A file that
  cannot be read is left out, and a line about it is added to `notices`.
  """
  there = skill_log.iterations(directory)
  shown, tables, extremes = set(spread(there, ITERATIONS)), [], _Extremes(EXTREMES)
  for iteration in there:
    try:
      found = skill_log.read(directory, iteration)
    except (ValueError, OSError) as error:
      notices.append(f"{os.path.basename(os.fspath(directory))}: {error}")
      continue
    extremes.add(found)
    if iteration in shown:
      tables.append(_iteration(iteration, found))
  if not there:
    return ""
  return (
    f"<h2>Skills</h2><p class=soft>{len(there)} iterations. Gain: the log-probability that a skill adds to the actions "
    "of its own episode, in nats a token; below 0 it makes them less likely.</p>"
    f"<div class=charts>{''.join(_figures(rows))}</div>{_ends(extremes)}"
    f"<h3>Skills of {len(tables)} iterations, by gain</h3>{''.join(tables)}"
  )


def spread(there: Sequence[int], count: int) -> list[int]:
  """`count` entries at even distances, the first and the last among them; all of them where there are no more."""
  if len(there) <= count:
    return list(there)
  return [there[round(i * (len(there) - 1) / (count - 1))] for i in range(count)]


class _Extremes:
  """The different skills of highest and lowest gain among all that were added; of equal texts one in each list."""

  def __init__(self, count: int):
    self._count, self.high, self.low = count, [], []

  def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
    rows = [row for row in rows if row["skill"] and number(row["gain"]) is not None]
    self.high = self._best([*self.high, *rows], key=lambda row: -row["gain"])
    self.low = self._best([*self.low, *rows], key=lambda row: row["gain"])

  def _best(self, rows, key):
    kept: dict[str, Mapping[str, Any]] = {}
    for row in sorted(rows, key=key):  # stable: of equal gains the earlier iteration
      kept.setdefault(skill_quality.normalised(str(row["skill"])), row)
      if len(kept) == self._count:
        break
    return list(kept.values())


def _figures(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
  iterations = [row["iteration"] for row in rows]
  for name, keys, options in _CURVES:
    series = {key: [number(row.get(key)) for row in rows] for key in keys}
    if name.endswith("library has") and not any(series["skill_overlap"]):
      continue  # no library to compare with
    series = {key: (iterations, values) for key, values in series.items() if any(v is not None for v in values)}
    if series:
      yield figure(name, series, charts.lines(series, **options))


def _ends(extremes: _Extremes) -> str:
  if not extremes.high:
    return ""
  parts = []
  for name, rows in (("highest", extremes.high), ("lowest", extremes.low)):
    parts.append(f"<h3>The {len(rows)} skills of {name} gain</h3>")
    parts.append(_table(rows, lambda row: f"iteration {row['iteration']}"))
  return "".join(parts)


def _iteration(iteration: int, rows: Sequence[Mapping[str, Any]]) -> str:
  texts = [str(row["skill"]) for row in rows if row["skill"]]
  gains = [row["gain"] for row in rows if number(row["gain"]) is not None]
  won = sum(row["outcome"] == "success" for row in rows)
  facts = f"{len(rows)} episodes, {won} won; {len(texts)} skills, {skill_quality.distinct_count(texts)} different"
  if gains:
    facts += f"; mean gain {_signed(sum(gains) / len(gains))}"
  # Not known: last. Of too many the middle ones are left out.
  ordered = sorted(rows, key=lambda row: (number(row["gain"]) is None, -(number(row["gain"]) or 0.0)))
  left_out = len(ordered) - ROWS
  if left_out > 0:
    ordered = ordered[: ROWS - ROWS // 2] + ordered[-(ROWS // 2) :]
    facts += f"; {left_out} of middle gain are left out"
  body = _table(ordered, lambda row: clean(row["family"], 40))
  return (
    f"<details><summary><b>Iteration {iteration}</b> <span class=soft>{facts}</span></summary>"
    f"<div>{body}</div></details>"
  )


def _table(rows: Sequence[Mapping[str, Any]], note) -> str:
  """Outcome, skill over its task, and gain; three columns, so that it reads on a phone."""
  body = "".join(
    f"<tr><td>{_MARKS.get(str(row['outcome']), 'broke off')}</td>"
    f"<td>{clean(row['skill'], _SKILL_CHARS) or '<span class=soft>no skill</span>'}"
    f"<div class=soft>{clean(row['task'], _TASK_CHARS)} · {note(row)}</div></td>"
    f"<td class=number>{_signed(row['gain'])}</td></tr>"
    for row in rows
  )
  return (
    "<table class=skills><thead><tr><th>episode</th><th>skill, and its task</th><th class=number>gain</th></tr></thead>"
    f"<tbody>{body}</tbody></table>"
  )


def _signed(value: Any) -> str:
  value = number(value)
  return "–" if value is None else f"{value:+.3f}".replace("-", "−")
