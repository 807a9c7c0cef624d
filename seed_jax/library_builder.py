"""A skill library from episodes whose skills were written: nothing but their texts, outcomes and families is read.

What an analyzer wrote after a success becomes a skill of the family, after a failure a mistake to avoid. A text counts
once however often it was written; the more tasks it was written for, the earlier it stands; a text whose n-grams are
mostly those of earlier ones is left out; what was written in several families, as a whole text or as a clause, becomes
general advice. The same episodes give the same library in whatever order they come.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from seed_jax.library import Library, Mistake, Skill
from seed_jax.skill_quality import coverage, ngrams, normalised
from seed_jax.skills import MAX_SKILL_CHARS, clean

TITLE_WORDS, TITLE_CHARS = 6, 60
CLAUSE_WORDS = 3  # a shorter clause is no advice
_ENDS = re.compile(r"(?<=[,;:.!?])\s+|,?\s+then\s+|[。！？、；]")


@dataclasses.dataclass
class _Written:
  """One skill text of one family, over all episodes for which it was written."""

  family: str
  texts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  outcomes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  tasks: set = dataclasses.field(default_factory=set)  # task ids
  sentences: collections.Counter = dataclasses.field(default_factory=collections.Counter)
  summaries: collections.Counter = dataclasses.field(default_factory=collections.Counter)

  @property
  def text(self) -> str:
    return _commonest(self.texts)

  @property
  def count(self) -> int:
    return sum(self.outcomes.values())

  @property
  def useful(self) -> bool:
    """Whether it was written after successes at least as often as after failures."""
    return self.outcomes["success"] >= self.outcomes["failure"]

  def take(self, other: _Written) -> None:
    """Adds what was written elsewhere; the family stays."""
    self.texts += other.texts
    self.outcomes += other.outcomes
    self.tasks |= other.tasks
    self.sentences += other.sentences
    self.summaries += other.summaries


def build_library(
  trajectories: Iterable[Any],
  *,
  per_family: int = 6,
  general: int = 12,
  mistakes_per_family: int = 5,
  min_families: int = 2,
  min_novelty: float = 0.25,
  rewrite: Callable[[str, str], str] | None = None,
) -> Library:
  """The library of annotated episodes (fields family, task_id, task, outcome, skill, summary).

  Args:
    per_family, general, mistakes_per_family: entries at most.
    min_families: a success text, or a clause of success texts, that was written in so many families is general; a
      failure text becomes a mistake that is common to all.
    min_novelty: share of a text's n-grams that must not occur in the entries before it, of the same list; 0 keeps all.
    rewrite: (skill or summary, task sentence) -> the text to collect instead, "" to leave it out: where skills name the
      things of one room, this is the place to make them say it of any (`abstraction.abstraction`).

  Episodes without a skill, or with neither outcome, say nothing; without any the library is empty. Raises ValueError
  for limits that make no sense.
  """
  if min(per_family, general, mistakes_per_family) < 0 or min_families < 2 or not 0 <= min_novelty <= 1:
    raise ValueError(
      f"a library needs sizes >= 0, min_families >= 2 and min_novelty in [0, 1]; got {per_family}, {general}, "
      f"{mistakes_per_family}, {min_families} and {min_novelty}"
    )
  written, episodes = _collect(trajectories, rewrite)
  families = sorted({family for family, _ in written})
  skills, failures = _by_text(written, True), _by_text(written, False)
  alike = {key: found for key, found in skills.items() if len(found) >= min_families}
  parts = [found for found in _clauses(written, alike).values() if len(found) >= min_families]
  shared = [_merged(found) for found in (*alike.values(), *parts)]
  common = [_merged(found) for found in failures.values() if len(found) >= min_families]
  own = {f: [w[f] for w in skills.values() if f in w and len(w) < min_families] for f in families}
  wrong = {f: [w[f] for w in failures.values() if f in w and len(w) < min_families] for f in families}
  mistakes = [(f, w) for f in ("", *families) for w in _chosen(wrong.get(f, common), mistakes_per_family, min_novelty)]
  return Library(
    general=tuple(
      _skill(f"general_{i:03d}", w, f"the task is of a family such as {w.family}")
      for i, w in enumerate(_chosen(shared, general, min_novelty), 1)
    ),
    by_family={
      family: tuple(
        _skill(f"{family}/{i:03d}", w) for i, w in enumerate(_chosen(own[family], per_family, min_novelty), 1)
      )
      for family in families
    },
    mistakes=tuple(_mistake(f"mistake_{i:03d}", family, w) for i, (family, w) in enumerate(mistakes, 1)),
    metadata={
      "source": "skills of annotated episodes",
      "episodes": episodes,
      "families": {f: {o: n for o, n in sorted(_outcomes(written, f).items())} for f in families},
    },
  )


def _collect(trajectories, rewrite) -> tuple[dict[tuple[str, str], _Written], int]:
  """Everything that was written, by (family, normalised text); and for how many episodes."""
  written: dict[tuple[str, str], _Written] = {}
  episodes = 0
  for t in trajectories:
    text = rewrite(t.skill, t.task) if rewrite and t.skill else t.skill
    text, family = clean(text, MAX_SKILL_CHARS), clean(t.family, 200) or "unknown"
    if not text or t.outcome not in ("success", "failure"):
      continue
    episodes += 1
    entry = written.setdefault((family, normalised(text)), _Written(family))
    entry.texts[text] += 1
    entry.outcomes[t.outcome] += 1
    entry.tasks.add(t.task_id)
    entry.sentences[clean(t.task, 400)] += 1
    entry.summaries[clean(rewrite(t.summary, t.task) if rewrite else t.summary, 400)] += 1
  return written, episodes


def _by_text(written, useful: bool) -> dict[str, dict[str, _Written]]:
  """normalised text -> family -> what was written, of the useful or of the other texts."""
  found: dict[str, dict[str, _Written]] = {}
  for (family, key), entry in written.items():
    if entry.useful == useful:
      found.setdefault(key, {})[family] = entry
  return found


def _clauses(written, but: Iterable[str]) -> dict[str, dict[str, _Written]]:
  """The clauses of useful texts, as in `_by_text`, without those whose text is in `but`."""
  found: dict[str, dict[str, _Written]] = {}
  for (family, _), entry in sorted(written.items()):
    parts = [part.strip(" ,;:.") for part in _ENDS.split(entry.text)] if entry.useful else []
    for part in dict.fromkeys(parts):
      key = normalised(part)
      if len(key.split()) >= CLAUSE_WORDS and key not in but:
        own = found.setdefault(key, {}).setdefault(family, _Written(family))
        own.take(dataclasses.replace(entry, texts=collections.Counter({part: entry.count})))
  return found


def _merged(found: dict[str, _Written]) -> _Written:
  out = _Written(", ".join(sorted(found)))
  for entry in found.values():
    out.take(entry)
  return out


def _chosen(entries: list[_Written], count: int, min_novelty: float) -> list[_Written]:
  """At most `count` of them, the most often written first, each new enough beside those before it."""
  chosen, known = [], set()
  for entry in sorted(entries, key=lambda e: (-len(e.tasks), -e.count, len(e.text), e.text)):
    if len(chosen) == count:
      break
    if not chosen or 1 - coverage(entry.text, known) >= min_novelty:
      chosen.append(entry)
      known |= ngrams(entry.text)
  return chosen


def _outcomes(written, family: str) -> collections.Counter:
  return sum((entry.outcomes for (f, _), entry in written.items() if f == family), collections.Counter())


def _skill(name: str, entry: _Written, occasion: str = "") -> Skill:
  task = _commonest(entry.sentences)
  like = f'the task is like "{task}"' if task else ""
  return Skill(name, _title(entry.text), entry.text, occasion or like)


def _mistake(name: str, family: str, entry: _Written) -> Mistake:
  failed, tasks = entry.outcomes["failure"], len(entry.tasks)
  return Mistake(
    mistake_id=name,
    description=_commonest(entry.summaries) or f"ignoring this advice: {_title(entry.text)}",
    why_it_happens=f"seen in {failed} failed episodes of {tasks} tasks",
    how_to_avoid=entry.text,
    family=family,
  )


def _title(text: str) -> str:
  found = text.split()
  title = clean(" ".join(found[:TITLE_WORDS]).rstrip(" ,;:"), TITLE_CHARS) or found[0][:TITLE_CHARS]
  return title if title == text else f"{title}..."


def _commonest(texts: collections.Counter) -> str:
  """The most frequent text that is not empty, of equal ones the smallest."""
  return min((text for text in texts if text), key=lambda text: (-texts[text], text), default="")
