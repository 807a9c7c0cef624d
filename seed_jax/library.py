"""A static skill library: general principles, skills by task family and mistakes to avoid, as JSON and as prompt text.

The JSON has SkillRL's fields (SkillRL, arXiv:2602.08234), so that a library made for it can be read here:

  {"general_skills": [SKILL, ...], "task_specific_skills": {FAMILY: [SKILL, ...]}, "common_mistakes": [MISTAKE, ...]}
  SKILL    skill_id, title, principle, when_to_apply
  MISTAKE  mistake_id, description, why_it_happens, how_to_avoid; family (ours, optional: the only family it is about)

`metadata` at the top and `example` in a skill may be there and are not read into a prompt. How one of the texts below
is chosen for a task is in `retrieval`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from seed_jax.metrics import write_json
from seed_jax.skills import clean

MAX_FILE_BYTES = 8 << 20
MAX_TEXT_CHARS = 4000  # of one field
GENERAL, SPECIFIC, MISTAKES, METADATA = "general_skills", "task_specific_skills", "common_mistakes", "metadata"


@dataclasses.dataclass(frozen=True)
class Skill:
  """One piece of advice; every text is one line."""

  skill_id: str
  title: str
  principle: str
  when_to_apply: str = ""


@dataclasses.dataclass(frozen=True)
class Mistake:
  """One mistake and the way around it; `family` names the only family it is about, "" where it is common to all."""

  mistake_id: str
  description: str
  why_it_happens: str = ""
  how_to_avoid: str = ""
  family: str = ""


@dataclasses.dataclass(frozen=True)
class Library:
  """Skills in document order. Raises ValueError where two skills, or two mistakes, have one id."""

  general: tuple[Skill, ...] = ()
  by_family: Mapping[str, tuple[Skill, ...]] = dataclasses.field(default_factory=dict)
  mistakes: tuple[Mistake, ...] = ()
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    object.__setattr__(self, "general", tuple(self.general))
    object.__setattr__(self, "by_family", {family: tuple(found) for family, found in self.by_family.items()})
    object.__setattr__(self, "mistakes", tuple(self.mistakes))
    places = [(f"{GENERAL}[{i}]", s.skill_id) for i, s in enumerate(self.general)]
    for family, found in self.by_family.items():
      places += [(f"{SPECIFIC}.{family}[{i}]", s.skill_id) for i, s in enumerate(found)]
    for named in (places, [(f"{MISTAKES}[{i}]", m.mistake_id) for i, m in enumerate(self.mistakes)]):
      first: dict[str, str] = {}
      for place, name in named:
        if name in first:
          raise ValueError(f"the id {name!r} of {place} is already that of {first[name]}; give each its own")
        first[name] = place

  def __len__(self):
    return len(self.general) + sum(map(len, self.by_family.values())) + len(self.mistakes)

  @property
  def families(self) -> tuple[str, ...]:
    """The families that have skills of their own, in document order."""
    return tuple(family for family, found in self.by_family.items() if found)

  @property
  def texts(self) -> list[str]:
    """What the library advises, one text an entry: principles, and how to avoid each mistake."""
    found = [skill.principle for skill in self.general]
    found += [skill.principle for family in self.by_family.values() for skill in family]
    return found + [mistake.how_to_avoid or mistake.description for mistake in self.mistakes]


# ---- to disk and back


def load(path: str | os.PathLike) -> Library:
  """Reads a library; local or in object storage.

  Raises FileNotFoundError, or ValueError in one line with the file and the place: the line of a syntax error, else the
  entry (`task_specific_skills.heat[2]`) and its field. Unknown, missing, empty and repeated names are all errors: a
  misspelt field would otherwise be a skill that is silently never shown.
  """
  place = epath.Path(path)
  if not place.exists():
    raise FileNotFoundError(f"no skill library at {path}")
  raw = place.read_bytes()
  if len(raw) > MAX_FILE_BYTES:
    raise ValueError(f"{path} has {len(raw):,} bytes; a skill library has at most {MAX_FILE_BYTES:,}")
  try:
    record = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_once)
  except UnicodeDecodeError as error:
    line = raw.count(b"\n", 0, error.start) + 1
    raise ValueError(f"{path} line {line}: not UTF-8 text (byte {error.start})") from None
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} line {error.lineno} column {error.colno}: {error.msg}") from None
  except RecursionError:
    raise ValueError(f"{path}: brackets are nested too deeply for a skill library") from None
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
  try:
    return from_record(record)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None


def save(path: str | os.PathLike, library: Library) -> None:
  """Writes a library, whole or not at all; `load` gives it back."""
  write_json(path, to_record(library))


def from_record(record: Any) -> Library:
  """The library of a parsed JSON value; ValueError names the entry and the field that is wrong."""
  _keys(record, "the library", required=(GENERAL, SPECIFIC, MISTAKES), optional=(METADATA,))
  specific, metadata = record[SPECIFIC], record.get(METADATA, {})
  if not isinstance(specific, dict):
    raise ValueError(f"{SPECIFIC} is {_kind(specific)}; it needs an object of one list for each family")
  if not isinstance(metadata, dict):
    raise ValueError(f"{METADATA} is {_kind(metadata)}; it needs an object")
  for family in specific:
    _text(family, f"a family's name in {SPECIFIC}", required=True)
  return Library(
    general=_entries(record[GENERAL], GENERAL, _skill),
    by_family={family: _entries(found, f"{SPECIFIC}.{family}", _skill) for family, found in specific.items()},
    mistakes=_entries(record[MISTAKES], MISTAKES, _mistake),
    metadata=metadata,
  )


def to_record(library: Library) -> dict[str, Any]:
  """The JSON value of a library."""
  mistakes = [dataclasses.asdict(mistake) for mistake in library.mistakes]
  for mistake in mistakes:
    if not mistake["family"]:
      del mistake["family"]
  return {
    GENERAL: [dataclasses.asdict(skill) for skill in library.general],
    SPECIFIC: {family: [dataclasses.asdict(s) for s in found] for family, found in library.by_family.items()},
    MISTAKES: mistakes,
    **({METADATA: dict(library.metadata)} if library.metadata else {}),
  }


# ---- as text


@dataclasses.dataclass(frozen=True)
class Selection:
  """What of a library is shown for one task; `heading` names the family in the text."""

  heading: str = ""
  specific: tuple[Skill, ...] = ()
  general: tuple[Skill, ...] = ()
  mistakes: tuple[Mistake, ...] = ()

  def __len__(self):
    return len(self.specific) + len(self.general) + len(self.mistakes)

  def first(self, count: int) -> Selection:
    """The `count` entries that matter most: the family's own skills, then general ones, then mistakes."""
    general = max(count - len(self.specific), 0)
    mistakes = max(general - len(self.general), 0)
    return Selection(self.heading, self.specific[:count], self.general[:general], self.mistakes[:mistakes])


Rendering = Callable[[Selection], str]


def markdown(selection: Selection) -> str:
  """SkillRL's structure: bullets of general principles, of the family's skills with their occasion, of mistakes."""
  parts = []
  if selection.general:
    parts.append(["### General principles", *(f"- **{s.title}**: {s.principle}" for s in selection.general)])
  if selection.specific:
    lines = [f"### {selection.heading or 'Task'} skills"]
    for s in selection.specific:
      lines += [f"- **{s.title}**: {s.principle}"] + [f"  Apply when: {s.when_to_apply}"] * bool(s.when_to_apply)
    parts.append(lines)
  if selection.mistakes:
    lines = ["### Mistakes to avoid"]
    for m in selection.mistakes:
      lines += [f"- Don't: {m.description}"] + [f"  Instead: {m.how_to_avoid}"] * bool(m.how_to_avoid)
    parts.append(lines)
  return "\n\n".join("\n".join(lines) for lines in parts)


def compact(selection: Selection) -> str:
  """One line of nothing but advice, for small vocabularies and short contexts: no headings, titles or marks."""
  texts = [s.principle for s in (*selection.specific, *selection.general)]
  texts += [m.how_to_avoid or m.description for m in selection.mistakes]
  return " ".join(text if text[-1:] in ".!?。！？" else f"{text}." for text in texts if text)


RENDERINGS: dict[str, Rendering] = {"markdown": markdown, "compact": compact}


def rendering(name: str | Rendering) -> Rendering:
  """The rendering of that name, or the function itself; ValueError lists the names there are."""
  if callable(name):
    return name
  if name not in RENDERINGS:
    raise ValueError(f"library rendering {name!r} is unknown; choose one of {', '.join(RENDERINGS)}")
  return RENDERINGS[name]


def tidy(text: str, limit: int = 20_000) -> str:
  """The text line by line without control and hidden characters, at most `limit` characters, whole lines only: what
  `skills.insert_skill(..., prepare=tidy)` needs for a text that has lines (a skill is one line).
  """
  lines, size = [], 0
  for line in text.splitlines():
    body = clean(line, limit)
    indent = line[: len(line) - len(line.lstrip(" "))] if body else ""
    size += len(indent) + len(body) + 1
    if size > limit + 1:
      break
    lines.append(indent + body)
  return "\n".join(lines).strip("\n")


# ---- checks


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  found: dict[str, Any] = {}
  for key, value in pairs:
    if key in found:  # JSON itself would keep the last one and lose the other's skills
      raise ValueError(f"the key {key!r} occurs twice in one object")
    found[key] = value
  return found


def _entries(values: Any, place: str, read: Callable[[Any, str], Any]) -> tuple:
  if not isinstance(values, list):
    raise ValueError(f"{place} is {_kind(values)}; it needs a list")
  return tuple(read(value, f"{place}[{i}]") for i, value in enumerate(values))


def _skill(value: Any, place: str) -> Skill:
  required = ("skill_id", "title", "principle", "when_to_apply")
  _keys(value, place, required=required, optional=("example",))
  return Skill(**{name: _text(value[name], f"{place}.{name}", name != "when_to_apply") for name in required})


def _mistake(value: Any, place: str) -> Mistake:
  required = ("mistake_id", "description", "why_it_happens", "how_to_avoid")
  _keys(value, place, required=required, optional=("family",))
  texts = {name: _text(value[name], f"{place}.{name}", name != "why_it_happens") for name in required}
  return Mistake(**texts, family=_text(value.get("family", ""), f"{place}.family", required=False))


def _keys(value: Any, place: str, *, required: Sequence[str], optional: Sequence[str]) -> None:
  if not isinstance(value, dict):
    raise ValueError(f"{place} is {_kind(value)}; it needs an object with {', '.join(required)}")
  missing = [name for name in required if name not in value]
  unknown = [name for name in value if name not in (*required, *optional)]
  if missing or unknown:
    told = [f"lacks {', '.join(missing)}"] * bool(missing)
    told += [f"has the unknown {', '.join(map(repr, unknown[:4]))}"] * bool(unknown)
    raise ValueError(f"{place} {' and '.join(told)}; its fields are {', '.join((*required, *optional))}")


def _text(value: Any, place: str, required: bool) -> str:
  if not isinstance(value, str):
    raise ValueError(f"{place} is {_kind(value)}; it needs a text")
  if len(value) > MAX_TEXT_CHARS:
    raise ValueError(f"{place} has {len(value):,} characters; at most {MAX_TEXT_CHARS:,} are allowed")
  text = clean(value, MAX_TEXT_CHARS)
  if required and not text:
    raise ValueError(f"{place} is empty")
  return text


def _kind(value: Any) -> str:
  names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
  return names.get(type(value), "a number")
