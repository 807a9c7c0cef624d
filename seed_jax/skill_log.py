"""The skills of every iteration on disk, to be browsed: DIR/000012.jsonl holds those of iteration 12, a row an episode.

One file an iteration: it appears whole or not at all, works in object storage, which cannot append, and an iteration
that a resumed run does again replaces its file. A row has

  iteration, task_id, task, family, group, member, outcome, skill, parsed, gain

where gain is the mean log-probability that the skill adds to the episode's own actions (`skill_quality`), or null.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from seed_jax.metrics import is_writer, write_text
from seed_jax.skills import MAX_SKILL_CHARS, clean

MAX_ROWS = 256  # of an iteration
MAX_TASK_CHARS = 400
_NAME = re.compile(r"(\d{6,})\.jsonl")
_FIELDS = ("iteration", "task_id", "task", "family", "group", "member", "outcome", "skill", "parsed", "gain")


def rows_of(trajectories: Sequence[Any], gains: Sequence[float] | None = None) -> list[dict[str, Any]]:
  """The rows of one iteration's episodes by group and member, with the gain of each where it is known (NaN: not)."""
  gains = [math.nan] * len(trajectories) if gains is None else gains
  rows = [
    {
      "task_id": clean(t.task_id, MAX_TASK_CHARS),
      "task": clean(t.task, MAX_TASK_CHARS),
      "family": clean(t.family, MAX_TASK_CHARS),
      "group": t.group,
      "member": t.member,
      "outcome": t.outcome,
      "skill": clean(t.skill, MAX_SKILL_CHARS),
      "parsed": bool(t.skill),
      "gain": float(gain) if math.isfinite(gain) else None,
    }
    for t, gain in zip(trajectories, gains, strict=True)
  ]
  return sorted(rows, key=lambda row: (row["group"], row["task_id"], row["member"]))


def write(
  directory: epath.PathLike, iteration: int, rows: Sequence[Mapping[str, Any]], *, max_rows: int = MAX_ROWS
) -> list[dict[str, Any]]:
  """Writes the rows of an iteration in place of what was there, and returns those that were kept.

  Of more than `max_rows` those stay that have the lowest members, so that every task keeps some; a row of `rows_of` has
  at most 2,400 characters of text. What is kept does not depend on the order of rows. Where several processes work only
  the first one writes.
  """
  if iteration < 0 or max_rows < 0:
    raise ValueError(f"iteration and max_rows must be at least 0, got {iteration} and {max_rows}")
  place = lambda row: (row["group"], row["task_id"], row["member"])  # noqa: E731
  ordered = sorted(rows, key=lambda row: (row["member"], place(row)))[:max_rows]
  kept = [{"iteration": int(iteration), **row} for row in sorted(ordered, key=place)]
  if is_writer():
    text = "".join(json.dumps({name: row[name] for name in _FIELDS}, allow_nan=False) + "\n" for row in kept)
    write_text(epath.Path(directory) / f"{iteration:06d}.jsonl", text)
  return kept


def iterations(directory: epath.PathLike) -> list[int]:
  """The iterations that have a file, in order; none where there is no directory."""
  place = epath.Path(directory)
  names = (_NAME.fullmatch(item.name) for item in place.iterdir()) if place.exists() else ()
  return sorted(int(found[1]) for found in names if found)


def read(directory: epath.PathLike, iteration: int | None = None) -> list[dict[str, Any]]:
  """The rows of one iteration, or of all in order. ValueError names the file and the first line that is damaged, or the
  iterations there are.
  """
  there = iterations(directory)
  if iteration is not None and iteration not in there:
    span = f"{there[0]} to {there[-1]}" if there else "none"
    raise ValueError(f"{os.fspath(directory)} has no skills of iteration {iteration}; there are {span}")
  rows = []
  for number in there if iteration is None else (iteration,):
    path = epath.Path(directory) / f"{number:06d}.jsonl"
    for count, line in enumerate(path.read_bytes().splitlines(), 1):
      try:
        row = json.loads(line)
        if not isinstance(row, dict) or row.keys() != set(_FIELDS) or row["iteration"] != number:
          raise ValueError(f"no row of iteration {number}")
      except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} line {count} is damaged ({error}); delete the file to go on without it") from None
      rows.append(row)
  return rows


def drop_after(directory: epath.PathLike, iteration: int) -> int:
  """Removes what was written after this iteration, as a run does that resumes there; returns how many files went."""
  late = [number for number in iterations(directory) if number > iteration]
  if is_writer():
    for number in late:
      (epath.Path(directory) / f"{number:06d}.jsonl").unlink()
  return len(late)
