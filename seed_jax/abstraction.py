"""Advice for any room from advice about one: the things that a text names become their parts in the task.

Things of a room have numbered names ("potato 1", "cabinet 3"); a kind is such a name without its number. Nothing else
is known of the benchmark, and no model is asked. Texts without numbered names stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

OBJECT, OTHER, TARGET, PLACE = "it", "the other", "the target", "a place"
NOUNS = {OBJECT: "object", TARGET: "target"}  # of a part behind an article: "some potato" is "some object"
_WORD, _NAME = re.compile(r"[^\W\d_]+"), re.compile(r"\b([^\W\d_]+) (\d+)\b")
_BARE = re.compile(r"\b[^\W\d_]+\b(?! \d)")
_ARTICLE = re.compile(r"\b(?:an?|the|some|any|this|that|other|another|one|two|every|each)(?: [^\W\d_]+)? $", re.I)
_TOOL = re.compile(r"\b(?:with|using|use) $", re.I)
# What is true of one room alone: where a thing is not, and the names that follow such a one in a list.
_OF_ONE_ROOM = re.compile(rf"\bnot (?:in|on|at|to|from|under|inside) {_NAME.pattern}|^{_NAME.pattern}\W*$", re.I)


def abstraction(trajectories: Iterable[Any], *, keep: float = 0.8) -> Callable[[str, str], str]:
  """rewrite(text, task), as `library_builder.build_library` takes it, for the texts of these annotated episodes.

  Of the kinds that a task sentence names, the first is "it" (of a second number "the other") and the others are "the
  target"; a name that it does not hold is "a place", unless it is a tool ("with microwave 1"), which keeps its kind. So
  does one that the skills of successes name in at least the share `keep` of a family's tasks. The task sentence at the
  beginning ("to TASK:") is left out, and so are clauses that say of a place by its name that something
  is not there. "" where nothing is left.
  """
  trajectories = list(trajectories)
  kinds = {kind for t in trajectories for text in (t.skill, t.summary) for kind in _kinds(text)}
  family_of = {t.task: t.family for t in sorted(trajectories, key=lambda t: (t.task, t.family))}
  named: dict[str, dict[str, set[str]]] = {}  # family -> task -> kinds
  for t in trajectories:
    if t.outcome == "success" and _kinds(t.skill):
      named.setdefault(t.family, {}).setdefault(t.task, set()).update(_kinds(t.skill))
  own = {family: _usual(list(tasks.values()), keep) for family, tasks in named.items()}

  def rewrite(text: str, task: str) -> str:
    spoken = list(dict.fromkeys(word for word in _WORD.findall(task.casefold()) if word in kinds))
    return _rewritten(_without(text, task), spoken, own.get(family_of.get(task, ""), set()))

  return rewrite


def _kinds(text: str) -> set[str]:
  return {kind.casefold() for kind, _ in _NAME.findall(text)}


def _usual(tasks: Sequence[set[str]], keep: float) -> set[str]:
  """The kinds that are named in that share of the tasks; one task alone does not tell what is usual."""
  every = set().union(*tasks) if len(tasks) > 1 else set()
  return {kind for kind in every if sum(kind in kinds for kinds in tasks) >= keep * len(tasks)}


def _without(text: str, task: str) -> str:
  sentence = re.escape(task.strip().rstrip("."))
  return re.sub(rf"^(?:to|for) {sentence}\.?\s*[:,]\s*", "", text, flags=re.I) if sentence else text


def _rewritten(text: str, spoken: Sequence[str], own: set[str]) -> str:
  """`spoken`: the kinds of the task in its order; `own`: those of its family."""
  first: dict[str, str] = {}  # the object's kind -> the number that was named first

  def part(kind: str) -> str:
    return OBJECT if kind == spoken[0] else TARGET

  def numbered(match: re.Match) -> str:
    kind, number = match[1].casefold(), match[2]
    if kind in own or (kind not in spoken and _TOOL.search(match.string[: match.start()])):
      return f"the {match[1]}"
    if kind not in spoken:
      return PLACE
    other = part(kind) == OBJECT and first.setdefault(kind, number) != number
    return OTHER if other else part(kind)

  def bare(match: re.Match) -> str:
    kind = match[0].casefold()
    if kind in own or kind not in spoken:
      return match[0]
    return NOUNS[part(kind)] if _ARTICLE.search(match.string[: match.start()]) else part(kind)

  clauses = [clause for clause in re.split(r"(?<=,) ", text) if not _OF_ONE_ROOM.search(clause)]
  # bare names first: the parts that numbered ones become are no names
  return re.sub(r",$", ".", _NAME.sub(numbered, _BARE.sub(bare, " ".join(clauses))))
