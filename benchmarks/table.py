"""Rows of the table, and the three forms in which they leave: aligned text, JSON, markdown."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Sequence

COLUMNS = ("name", "ours", "peer", "unit", "ratio", "goal", "limit")


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table.

  peer: the same quantity of whom or what `name` compares with (another system, or our own other way); None for none.
  ratio: how many times better ours is, the median over paired runs; above 1 is better whatever the unit.
  limit: ours as a share, 0 to 1, of what this machine allows (its matmul rate or its memory bandwidth, whichever
    binds).
  goal: what the ratio, the limit or the value should reach.
  """

  name: str
  ours: float | None = None
  peer: float | None = None
  ratio: float | None = None
  limit: float | None = None
  unit: str = ""
  goal: str = ""
  note: str = ""


def number(value: float | None) -> str:
  """Three digits that fit eight columns: 0.0713, 4.21, 63.0, 1,240, 15.7k, 2.41M; nothing for None or NaN."""
  if value is None or not math.isfinite(value):
    return ""
  size = abs(value)
  for least, divisor, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
    if size >= least:
      return f"{value / divisor:.3g}{suffix}" if size / divisor < 1000 else f"{value / divisor:,.0f}{suffix}"
  if size >= 1000 or value == int(value):
    return f"{value:,.0f}"
  return f"{value:.4f}" if size < 0.1 else f"{value:.3g}"


def cells(row: Row) -> tuple[str, ...]:
  """The texts of a row, one for each of COLUMNS."""
  ratio = "" if row.ratio is None else f"{row.ratio:.2f}x" if row.ratio < 10 else f"{row.ratio:.1f}x"
  limit = "" if row.limit is None else f"{100 * row.limit:.0f} %"
  return row.name, number(row.ours), number(row.peer), row.unit, ratio, row.goal, limit


def text(rows: Sequence[Row], width: int = 80) -> str:
  """The table as aligned plain text at most `width` columns wide; notes stand below it under their numbers."""
  notes = list(dict.fromkeys(row.note for row in rows if row.note))
  lines = []
  for row in rows:
    name, *rest = cells(row)
    lines.append((name + (f" [{notes.index(row.note) + 1}]" if row.note else ""), *rest))
  table = [COLUMNS, *lines]
  widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
  widths[0] = max(min(widths[0], width - sum(widths[1:]) - 2 * (len(COLUMNS) - 1)), 12)
  out = []
  for line in table:
    first, *more = textwrap.wrap(line[0], widths[0]) or [""]
    shown = [first.ljust(widths[0])]
    shown += [
      c.ljust(w) if i == 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line[1:], widths[1:], strict=True), 1)
    ]
    out.append("  ".join(shown).rstrip())
    out += ["  " + part for part in more]
    if line is COLUMNS:
      out.append("  ".join("-" * w for w in widths))
  for i, note in enumerate(notes, 1):
    out += textwrap.wrap(f"[{i}] {note}", width, subsequent_indent="    ")
  return "\n".join(out)


def markdown(rows: Sequence[Row]) -> str:
  """The table for a document; the note is its last column."""
  escape = lambda t: t.replace("|", "\\|")  # noqa: E731
  lines = ["| " + " | ".join((*COLUMNS, "note")) + " |", "|---|---:|---:|---|---:|---:|---:|---|"]
  lines += ["| " + " | ".join(map(escape, (*cells(row), row.note))) + " |" for row in rows]
  return "\n".join(lines)


def to_json(rows: Sequence[Row], about: dict) -> str:
  """{"about": ..., "rows": [...]}: every row with all its fields; what is not finite is null."""
  finite = lambda v: None if isinstance(v, float) and not math.isfinite(v) else v  # noqa: E731
  records = [{k: finite(v) for k, v in dataclasses.asdict(row).items()} for row in rows]
  return json.dumps({"about": about, "rows": records}, indent=1, allow_nan=False) + "\n"


def from_json(content: str) -> tuple[list[Row], dict]:
  """The inverse of `to_json`; raises ValueError on anything else."""
  try:
    record = json.loads(content)
    return [Row(**row) for row in record["rows"]], record["about"]
  except (ValueError, TypeError, KeyError) as error:
    raise ValueError(f"not a benchmark result: {error}") from None
