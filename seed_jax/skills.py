"""Hindsight skills: the question to the analyzer, its answer, and the place of a skill in a prompt (SEED, section 3).

A finished episode is turned into one user message (`analysis_prompt`); the analyzer answers with a JSON object of two
texts (`parse_analysis`); the skill is put into the prompts of the same episode, after the line that states the task
(`insert_skill`), and that is the skill context under which the sampled actions are scored again. The summary is never
inserted. Everything an analyzer writes is data: parsed by hand, never evaluated, capped, without control characters.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

SUMMARY_KEY, SKILL_KEY = "episode_summary", "episode_skill"
MAX_SKILL_CHARS, MAX_SUMMARY_CHARS = 1200, 2000
MAX_ANSWER_CHARS = 40_000  # of an analyzer's answer that the parser looks at; 4,096 tokens are about 16,000 characters
MAX_LITERAL_CHARS = 8_000
MAX_OBJECTS, MAX_SCANNED_CHARS = 500, 300_000  # bounds on the work of one answer, which may be nothing but open braces


@dataclasses.dataclass(frozen=True)
class Analysis:
  """What an analyzer says about one episode; `skill` is never empty."""

  summary: str
  skill: str


class Episode(Protocol):
  """The part of a trajectory that an analyzer reads."""

  task: str
  outcome: str  # "success" | "failure" | "unknown"
  steps: Sequence[tuple[str, str, bool]]  # (observation, full response, valid)


# ---- the question


@dataclasses.dataclass(frozen=True)
class AnalysisTemplate:
  """How an episode is laid out as a question.

  `text` holds {instruction}, {task}, {outcome} and {trajectory}; `step` holds {index} (from 0), {observation},
  {response}, {valid} and is used for every step; `instructions` has one text for each outcome; longer observations and
  responses lose their middle beyond `max_chars`.
  """

  text: str
  step: str
  instructions: Mapping[str, str]
  gap: str = "(steps {first} to {last} left out)\n"
  max_chars: int = 6000


FULL = AnalysisTemplate(
  text="""You review one finished episode of an agent and write down what helps it to act better. Reply with JSON only.

Fields:
- "episode_summary": what the agent did and how it ended, in one or two sentences.
- "episode_skill": {instruction}

Rules:
- Steps are numbered from 0.
- The skill is short, at most three sentences, and speaks to the agent about to act: advice, not a report of the past.
- The skill uses nothing that the episode below does not show.
- The object has these two keys and no other; both values are strings.

Shape of the reply:
{"episode_summary": "<text>", "episode_skill": "<text>"}

Task: {task}
Outcome: {outcome}

Episode:
{trajectory}""",
  step="[Step {index}]\nObservation: {observation}\nResponse: {response}\nValid action: {valid}\n",
  instructions={
    "success": (
      "the workflow that made this episode succeed, so that it can be followed again: the rule behind the decisive "
      "choice, and the order of the actions that mattered."
    ),
    "failure": (
      "a rule that avoids this failure next time: the mistake at its root, and the signs by which the agent notices "
      "that it is about to make it."
    ),
    "unknown": (
      "the most useful lesson of this episode: a workflow worth following where it went well, or a rule that avoids "
      "its mistake where it did not."
    ),
  },
)

# For small vocabularies and short contexts: the same content, the question in a few words.
COMPACT = AnalysisTemplate(
  text="""Task: {task}
{trajectory}Outcome: {outcome}
{instruction}""",
  step="{observation}\n> {response}\n",
  instructions={
    "success": "Write JSON: what worked.",
    "failure": "Write JSON: what to avoid.",
    "unknown": "Write JSON: what to learn.",
  },
  max_chars=2000,
)

TEMPLATES = {"full": FULL, "compact": COMPACT}


def analysis_prompt(
  trajectory: Episode, template: AnalysisTemplate | str | None = None, *, fits: Callable[[str], bool] | None = None
) -> str:
  """The single user message that asks for the analysis of one episode.

  Args:
    trajectory: task, outcome and steps of a finished episode.
    template: a template or its name in TEMPLATES; FULL where None.
    fits: tells whether a message is short enough for the analyzer. As long as it is not, steps are left out from the
      middle, then texts are cut shorter: the question, the start and the end stay, whereas cutting tokens on the left
      would remove the question.

  Raises ValueError for an unknown template or outcome, or where not even two steps of a few words fit.
  """
  template = _template(template, trajectory)
  steps = [
    _fill(
      template.step,
      index=str(index),
      observation=_shorten(observation, template.max_chars),
      response=_shorten(response, template.max_chars),
      valid="true" if valid else "false",
    )
    for index, (observation, response, valid) in enumerate(trajectory.steps)
  ]

  def message(kept: int) -> str:  # kept >= 2, or all steps
    head, tail = (kept + 1) // 2, kept // 2
    lines = steps
    if kept < len(steps):
      gap = _fill(template.gap, first=str(head), last=str(len(steps) - tail - 1))
      lines = [*steps[:head], gap, *steps[len(steps) - tail :]]
    return _request(template, trajectory, "".join(lines))

  text = message(len(steps))
  if fits is None or fits(text):
    return text
  low, high = 1, len(steps)  # `low` steps fit or are too few, `high` do not fit
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(message(middle)) else (low, middle)
  if low >= 2:
    return message(low)
  if template.max_chars > 64:
    return analysis_prompt(trajectory, dataclasses.replace(template, max_chars=template.max_chars // 4), fits=fits)
  size = len(message(min(2, len(steps))))
  raise ValueError(
    f"an analysis does not fit the analyzer even with two short steps ({size} characters); give it more context"
  )


def analysis_question(trajectory: Episode, template: AnalysisTemplate | str | None = None) -> str:
  """The same request without the steps, for an analyzer that played the episode itself in this very conversation."""
  return _request(_template(template, trajectory), trajectory, "The conversation above.\n")


def _template(template: AnalysisTemplate | str | None, trajectory: Episode) -> AnalysisTemplate:
  if template is None or isinstance(template, str):
    name = template or "full"
    if name not in TEMPLATES:
      raise ValueError(f"analysis template {name!r} is unknown; choose one of {', '.join(TEMPLATES)}")
    template = TEMPLATES[name]
  if trajectory.outcome not in template.instructions:
    raise ValueError(f"outcome {trajectory.outcome!r} is unknown; choose one of {', '.join(template.instructions)}")
  return template


def _request(template: AnalysisTemplate, trajectory: Episode, steps: str) -> str:
  return _fill(
    template.text,
    instruction=template.instructions[trajectory.outcome],
    task=trajectory.task,
    outcome=trajectory.outcome,
    trajectory=steps,
  )


# ---- the answer


def parse_analysis(text: Any, *, min_words: int = 1) -> Analysis | None:
  """Reads the first usable object {"episode_summary", "episode_skill"} of an answer; None where there is none.

  Prose and code fences around the object, an enclosing object, trailing commas, raw newlines in strings and
  single-quoted Python literals are forgiven. The skill must be a string with a letter or digit and at least `min_words`
  words; a missing summary is "". What follows the last `</think>` is looked at first. Never raises.
  """
  if not isinstance(text, str):
    return None
  answer = text.rpartition("</think>")[2]
  for part in (answer, text) if len(answer) < len(text) else (text,):
    for value in _objects(part[:MAX_ANSWER_CHARS]):
      analysis = _analysis(value, min_words)
      if analysis:
        return analysis
  return None


def format_analysis(analysis: Analysis) -> str:
  """The JSON text of an analysis: the target that supervised fine-tuning teaches; `parse_analysis` gives it back."""
  return json.dumps({SUMMARY_KEY: analysis.summary, SKILL_KEY: analysis.skill}, ensure_ascii=False)


def attach_analyses(trajectories: Sequence[Any], texts: Sequence[str | None], *, min_words: int = 1) -> int:
  """Sets `analysis`, `summary` and `skill` of every trajectory from the raw answers; returns how many parsed."""
  parsed = 0
  for trajectory, text in zip(trajectories, texts, strict=True):
    analysis = parse_analysis(text, min_words=min_words)
    trajectory.analysis = text or ""
    trajectory.summary, trajectory.skill = (analysis.summary, analysis.skill) if analysis else ("", "")
    parsed += analysis is not None
  return parsed


def _analysis(value: Any, min_words: int) -> Analysis | None:
  skill, summary = value.get(SKILL_KEY), value.get(SUMMARY_KEY)
  if not isinstance(skill, str):
    return None
  skill = clean(skill, MAX_SKILL_CHARS)
  # A skeleton that is merely repeated ("<text>", "...") is not a skill.
  if re.fullmatch(r"<[^<>]*>", skill) or not any(c.isalnum() for c in skill) or len(skill.split()) < min_words:
    return None
  return Analysis(clean(summary, MAX_SUMMARY_CHARS) if isinstance(summary, str) else "", skill)


def _objects(text: str):
  """Yields every dict that holds the skill key, outer ones and earlier ones first."""
  end_of_keys = text.rfind(SKILL_KEY)
  start, scanned = text.find("{"), 0
  for _ in range(MAX_OBJECTS):
    if not 0 <= start < end_of_keys:
      return
    try:
      value = json.JSONDecoder(strict=False).raw_decode(text, start)[0]
    except (ValueError, RecursionError):
      span, end = _balanced(text, start) if scanned < MAX_SCANNED_CHARS else ("", start)
      scanned += end - start
      value = _repaired(span) if SKILL_KEY in span else None
    if isinstance(value, dict) and SKILL_KEY in value:
      yield value
    start = text.find("{", start + 1)


def _repaired(span: str) -> Any:
  """Reads an object that is almost JSON; None where that fails."""
  # Strings are matched first and kept, so that a comma inside one is never touched.
  repaired = re.sub(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|,(?=\s*[}\]])""", lambda m: m[1] or "", span, flags=re.S)
  try:
    return json.loads(repaired, strict=False)
  except (ValueError, RecursionError):
    return _literal(repaired)


def _balanced(text: str, start: int) -> tuple[str, int]:
  """The text from the brace at `start` to the one that closes it, blind to strings ("" if none does); and its end."""
  depth, quote = 0, ""
  for match in re.compile(r"[{}\"']|\\.", re.S).finditer(text, start):
    mark = match[0]
    if quote:
      quote = "" if mark == quote else quote
    elif mark in "\"'":
      quote = mark
    elif mark in "{}":
      depth += 1 if mark == "{" else -1
      if depth == 0:
        return text[start : match.end()], match.end()
  return "", len(text)


def _literal(text: str) -> Any:
  """A Python literal of strings, words, numbers and shallow brackets; None for anything else."""
  if len(text) > MAX_LITERAL_CHARS:
    return None
  # Only what is left outside of strings decides; deep nesting and operator chains can exhaust the parser's stack.
  outside = re.sub(r"""\"(?:\\.|[^"\\])*\"|'(?:\\.|[^'\\])*'""", "", text, flags=re.S)
  if not re.fullmatch(r"[\s\w{}\[\]:,.]*", outside) or outside.count("{") + outside.count("[") > 20:
    return None
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # an unknown escape in a string is a warning to Python and nothing to us
      return ast.literal_eval(text)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return None


# ---- the place in the prompt

ANCHORS = ("Your task is to:", "Your current task is:", "Your task is:", "Your question:", "Your goal is")
TAIL = "Now it's your turn"
DEFAULT_BLOCK = "\n\n**Episode-Level Skill**\nUse this advice from experience when it applies:\n[{skill}]\n"

Block = str | Callable[[str], str]  # text with {skill}, or a function of the skill


def insert_skill(
  prompt: str,
  skill: str,
  *,
  block: Block = DEFAULT_BLOCK,
  anchors: Sequence[str] = ANCHORS,
  prepare: Callable[[str], str] | None = None,
) -> str:
  """Puts a skill into the text of a user message, before the chat template: H(h, s) of the paper.

  The block follows the first line that holds the first anchor found; where no anchor occurs it precedes the last line
  that starts with "Now it's your turn"; where that is missing too it ends the message. The block starts a line of its
  own; more newlines are its own business, and the prompt around it is unchanged. An empty skill returns the prompt
  itself. In `transcript` mode only the first message states the task and takes the skill (`skill_prompts`). Raises
  ValueError for a block without {skill}. `prepare` makes a text safe to insert: by default one line of at most
  MAX_SKILL_CHARS; `library.tidy` keeps the lines of a longer one.
  """
  skill = prepare(skill) if prepare else clean(skill, MAX_SKILL_CHARS)
  if not skill:
    return prompt
  if callable(block):
    text = block(skill)
  elif "{skill}" in block:
    text = block.replace("{skill}", skill)
  else:
    raise ValueError(f"the skill block {block!r} has no {{skill}}")
  if not text.startswith("\n"):
    text = "\n" + text
  for anchor in anchors:
    at = prompt.find(anchor)
    if at >= 0:
      end = prompt.find("\n", at)
      return prompt + text if end < 0 else prompt[:end] + text + prompt[end:]
  if prompt.startswith(TAIL) and f"\n{TAIL}" not in prompt:
    return text.lstrip("\n") + "\n" + prompt
  end = prompt.rfind(f"\n{TAIL}")
  return prompt + text if end < 0 else prompt[:end] + text + prompt[end:]


def skill_prompts(trajectory: Any, *, block: Block = DEFAULT_BLOCK, anchors: Sequence[str] = ANCHORS) -> list[str]:
  """The user messages in the skill context: all of them change in `window` mode, the first one in `transcript`."""
  prompts = [turn.prompt for turn in trajectory.turns]
  count = 1 if trajectory.mode == "transcript" else len(prompts)
  return [insert_skill(p, trajectory.skill, block=block, anchors=anchors) for p in prompts[:count]] + prompts[count:]


def clean(text: str, limit: int) -> str:
  """One line of printable text of at most `limit` characters, cut at a word; format and control characters go."""
  # Joiners shape emoji and Indic words; other format characters (direction overrides, soft hyphens) only hide text.
  hidden = ("Cc", "Cf", "Cs")
  kept = (c if c in "\u200c\u200d" or unicodedata.category(c) not in hidden else " " * c.isspace() for c in text)
  line = " ".join("".join(kept).split())
  if len(line) <= limit:
    return line
  words = line[: limit + 1].rpartition(" ")[0]
  return words or line[:limit]


def _fill(template: str, **values: str) -> str:
  """Fills {name} fields in one pass, so that a value holding braces or another field's name stays as it is."""
  return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), template)


def _shorten(text: str, limit: int) -> str:
  if len(text) <= limit:
    return text
  half = (limit - 5) // 2
  return f"{text[:half]} ... {text[len(text) - half :]}"
