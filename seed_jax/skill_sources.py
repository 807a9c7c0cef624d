"""Whose skill stands in the skill context: one function for each control of the hindsight effect.

A source reads the finished episodes of an iteration and gives one text an episode, "" for none: an episode without a
text gets no distillation. Sources compare only if they distil on the same episodes, so all but `library` and
`group_contrast` give a text only to an episode that has a skill of its own; what differs is the text, not the mask.
Every choice is drawn from (seed, iteration, task, member) alone, so it is the same in whatever order the episodes come.

Who wrote the skills is another matter: with the method's frozen analyzer (the policy that training started from) or an
external one (another model), `trajectory.skill` holds what that analyzer wrote, and the source is `own`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from seed_jax.retrieval import Retriever
from seed_jax.skills import MAX_SKILL_CHARS
from seed_jax.trajectory import Trajectory

TRIES = 64  # words that are tried where a random text is a few tokens short


@dataclasses.dataclass(frozen=True)
class Context:
  """What sources draw from.

  seed, iteration: of the run; they fix every draw.
  retrieve: of `library`, see `retrieval`.
  fits: whether a library text is short enough for its prompt.
  words: of `random_text`, such as `vocabulary(tokenizer)`; their order does not matter.
  tokens: number of tokens of a text, by default its words.
  """

  seed: int = 0
  iteration: int = 0
  retrieve: Retriever | None = None
  fits: Callable[[str], bool] | None = None
  words: Sequence[str] = ()
  tokens: Callable[[str], int] = lambda text: len(text.split())


Source = Callable[[Sequence[Trajectory], Context], list[str]]


def own(trajectories: Sequence[Trajectory], context: Context) -> list[str]:
  """SEED: the skill that was written about the episode itself."""
  del context
  return [t.skill for t in trajectories]


def group(trajectories: Sequence[Trajectory], context: Context) -> list[str]:
  """The skill of another episode of the same group, drawn evenly: same task and room, other actions. "" where no other
  member has one.
  """
  return _of_another(trajectories, context, "group", lambda one, other: one.group == other.group)


def other_task(trajectories: Sequence[Trajectory], context: Context) -> list[str]:
  """The skill of an episode of another task, drawn evenly over the iteration's episodes: skill-shaped text that knows
  nothing of this task. "" where there is no other task.
  """
  return _of_another(trajectories, context, "other_task", lambda one, other: one.task_id != other.task_id)


def success_only(trajectories: Sequence[Trajectory], context: Context) -> list[str]:
  """The episode's own skill where it was won."""
  del context
  return [t.skill if t.outcome == "success" else "" for t in trajectories]


def failure_only(trajectories: Sequence[Trajectory], context: Context) -> list[str]:
  """The episode's own skill where it was lost (not where it broke off)."""
  del context
  return [t.skill if t.outcome == "failure" else "" for t in trajectories]


def group_contrast(trajectories: Sequence[Trajectory], context: Context) -> list[str]:
  """GRSD: one text a group, "do: S avoid: F", S the skill of one of its successes and F that of one of its failures,
  each drawn evenly. Every episode of the group that was played to its end gets it; "" where the group has not both.

  Our reconstruction: SEED's skill of a failure says what that attempt should have done, so `avoid` reads best with an
  analyzer that is asked for the mistake.
  """
  texts: dict[tuple[str, int], str] = {}
  for place in {(t.task_id, t.group) for t in trajectories}:
    members = sorted((t for t in trajectories if (t.task_id, t.group) == place and t.skill), key=_place)
    sides = [[t for t in members if t.outcome == outcome] for outcome in ("success", "failure")]
    if all(sides):
      draw = random.Random(repr((context.seed, context.iteration, *place, "group_contrast")))
      do, avoid = (side[draw.randrange(len(side))].skill[: MAX_SKILL_CHARS // 2 - 10] for side in sides)
      texts[place] = f"do: {do} avoid: {avoid}"
  return [texts.get((t.task_id, t.group), "") if t.turns and not t.error else "" for t in trajectories]


def library(trajectories: Sequence[Trajectory], context: Context) -> list[str]:
  """What a static library says about the task, whatever happened in the episode; it needs no analysis, so every episode
  that was played to its end gets it. ValueError without `context.retrieve`.
  """
  if context.retrieve is None:
    raise ValueError("the skill source library needs a library to retrieve from (context.retrieve)")
  found: dict[tuple[str, str], str] = {}
  for t in trajectories:
    if t.turns and not t.error and (t.task, t.family) not in found:
      found[t.task, t.family] = context.retrieve(t.task, t.family, fits=context.fits)
  return [found[t.task, t.family] if t.turns and not t.error else "" for t in trajectories]


def random_text(trajectories: Sequence[Trajectory], context: Context) -> list[str]:
  """Random words with as many tokens as the episode's own skill: what a longer prompt alone does.

  Equal where the words allow it (one of them has one token), else as near below as was found; never more characters
  than an inserted skill keeps. ValueError without words.
  """
  words = sorted({word for word in context.words if word.strip()})
  if not words:
    raise ValueError("the skill source random_text needs words to draw from (context.words)")
  return [
    _random_words(words, context.tokens, context.tokens(t.skill), _draw(context, t, "random_text")) if t.skill else ""
    for t in trajectories
  ]


SOURCES: dict[str, Source] = {
  "own": own,
  "group": group,
  "other_task": other_task,
  "success_only": success_only,
  "failure_only": failure_only,
  "library": library,
  "random_text": random_text,
  "group_contrast": group_contrast,
}


def get(name: str) -> Source:
  """The source of that name; ValueError lists the names there are."""
  if name not in SOURCES:
    raise ValueError(f"skill source {name!r} is unknown; choose one of {', '.join(SOURCES)}")
  return SOURCES[name]


def skill_tokens(
  prompter: Any, trajectories: Sequence[Trajectory], texts: Sequence[str]
) -> Callable[[Trajectory, int], Sequence[int] | None]:
  """`batching.episode_samples`' function of (trajectory, turn) for the texts of a source: the prompt ids of that turn
  with the trajectory's text inserted by `prompter` (a `rollout.Prompter`), None where its text is "".
  """
  by_id = {id(t): text for t, text in zip(trajectories, texts, strict=True)}

  def tokens(trajectory: Trajectory, step: int) -> Sequence[int] | None:
    text = by_id[id(trajectory)]
    return prompter.tokens(trajectory.turns[step].prompt, step, text) if text else None

  return tokens


def vocabulary(tokenizer: Any) -> tuple[str, ...]:
  """The words of a tokenizer's vocabulary: what single ids decode to, letters only, sorted, each once.

  Where no id is a word (a vocabulary of bytes) these are single letters; ValueError where there are not even those.
  """
  pieces = {tokenizer.decode([number]).strip() for number in range(tokenizer.vocab_size)}
  words = tuple(sorted(piece for piece in pieces if piece.isalpha()))
  if not words:
    raise ValueError(f"none of the tokenizer's {tokenizer.vocab_size} ids is a word or a letter")
  return tuple(word for word in words if len(word) > 1) or words


# ---- draws


def _of_another(trajectories, context: Context, purpose: str, allowed) -> list[str]:
  # In an order of their own, so that a draw does not depend on the order of the episodes.
  ordered = sorted((t for t in trajectories if t.skill), key=_place)
  for one, next_one in zip(ordered, ordered[1:], strict=False):
    if _place(one) == _place(next_one):
      raise ValueError(f"two episodes are member {one.member} of group {one.group}, task {one.task_id!r}; number them")
  texts = []
  for t in trajectories:
    others = [other.skill for other in ordered if other is not t and allowed(t, other)] if t.skill else []
    texts.append(others[_draw(context, t, purpose).randrange(len(others))] if others else "")
  return texts


def _place(trajectory: Trajectory) -> tuple[str, int, int]:
  return trajectory.task_id, trajectory.group, trajectory.member


def _draw(context: Context, trajectory: Trajectory, purpose: str) -> random.Random:
  return random.Random(repr((context.seed, context.iteration, trajectory.task_id, trajectory.member, purpose)))


def _random_words(words: list[str], tokens, length: int, draw: random.Random) -> str:
  def short(text: str) -> bool:
    return tokens(text) <= length and len(text) <= MAX_SKILL_CHARS

  # A word has at least one token as a rule, so `length` of them are enough; the longest prefix that fits is found by
  # bisection, and then single words fill what is left.
  drawn = [words[draw.randrange(len(words))] for _ in range(length)]
  low, high = 0, len(drawn) + 1
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if short(" ".join(drawn[:middle])) else (low, middle)
  kept = drawn[:low]
  for _ in range(TRIES):
    if tokens(" ".join(kept)) >= length:
      break
    longer = [*kept, words[draw.randrange(len(words))]]
    kept = longer if short(" ".join(longer)) else kept
  return " ".join(kept)
