"""Which skills of a library a task gets: by its family, by key words of its sentence, or by embeddings.

All three are made with a library and give one function, `retrieve(task, family, *, fits=None) -> text`. `fits` tells
whether a text is short enough for the prompt that it goes into; as long as it is not, whole entries are left out, the
mistakes first and the family's own skills last. So the task line of the prompt is never what a length limit cuts.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from seed_jax.library import Library, Mistake, Rendering, Selection, Skill, rendering
from seed_jax.skill_quality import words

DYNAMIC = "dyn_"  # ids of skills that were added while a run went on: they come before the static ones


class Retriever(Protocol):
  """The text of a library for one task; "" where it has nothing for it, or nothing that fits."""

  def __call__(self, task: str, family: str, *, fits: Callable[[str], bool] | None = None) -> str: ...


def by_family(
  library: Library,
  *,
  top_k: int = 6,
  max_mistakes: int = 5,
  render: str | Rendering = "markdown",
  unmet: Callable[[str], None] = lambda family: None,
) -> Retriever:
  """SkillRL's template mode with a known family: the first `top_k` general skills in document order (all `dyn_` ones,
  then static ones up to top_k), all skills of the family, and at most `max_mistakes` mistakes, its own before those
  that are common to all families. A family without skills gets the general ones; `unmet(family)` is told so at every
  such call, where the library has skills of other families.
  """
  render = _checked(top_k, max_mistakes, render)

  def retrieve(task: str, family: str, *, fits: Callable[[str], bool] | None = None) -> str:
    del task
    if library.families and family not in library.families:
      unmet(family)
    mistakes = _mistakes(library, family, max_mistakes)
    selection = Selection(family, library.by_family.get(family, ()), general_skills(library, top_k), mistakes)
    return largest(selection, render, fits)

  return retrieve


@dataclasses.dataclass(frozen=True)
class KeywordRules:
  """Classes of task sentences, the first that holds counts. A class holds if all words of one of its sets occur, each
  at the start of a word ("shirt" in "shirts", but "ring" not in "earring"), whatever the case.
  """

  classes: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
  default: str

  def __call__(self, task: str) -> str:
    """The class of a task sentence."""
    task = task.casefold()
    for name, sets in self.classes:
      if any(all(re.search(rf"\b{re.escape(word)}", task) for word in together) for together in sets):
        return name
    return self.default


def _any(text: str) -> tuple[tuple[str, ...], ...]:
  return tuple((word,) for word in text.split())


# SkillRL's classes in its order. Its words are matched anywhere in the sentence, ours at the start of a word.
ALFWORLD_RULES = KeywordRules(
  (
    ("look_at_obj_in_light", (("look", "under"),)),
    ("clean", (("clean",),)),
    ("heat", (("heat",),)),
    ("cool", (("cool",),)),
    ("examine", (("examine",), ("find",))),
  ),
  default="pick_and_place",
)
WEBSHOP_RULES = KeywordRules(
  (
    ("apparel", _any("shirt t-shirt blouse dress skirt jacket coat hoodie sweater pant jeans cloth")),
    ("footwear", _any("shoe boot sneaker sandal slipper heel footwear")),
    ("electronics", _any("laptop computer tablet phone charger cable headphone speaker camera monitor electronic")),
    ("accessories", _any("necklace bracelet earring ring watch jewelry purse wallet bag")),
    ("home_decor", _any("furniture sofa lamp curtain pillow bedding rug candle vase decor")),
    ("beauty_health", _any("shampoo conditioner lotion cream moisturizer serum makeup beauty vitamin supplement")),
  ),
  default="other",
)
# The six families of `envs`, as libraries that are built here name them, from ALFWorld's and the household's sentences.
HOUSEHOLD_RULES = KeywordRules(
  (
    ("look", (("look", "under"), ("look", "with"), ("examine",))),
    ("pick2", (("two",),)),
    ("clean", (("clean",),)),
    ("heat", _any("heat hot")),
    ("cool", _any("cool cold")),
  ),
  default="pick",
)
RULES = {"alfworld": ALFWORLD_RULES, "household": HOUSEHOLD_RULES, "webshop": WEBSHOP_RULES}
# The same sentences by other names: tried where the library has no skill of the first name.
OTHER_NAMES = {"alfworld": "household", "household": "alfworld"}


def by_keyword(library: Library, rules: str | Callable[[str], str], **options: Any) -> Retriever:
  """`by_family` with the family that the task sentence says by `rules`: a name in RULES, or a function of the sentence.
  The family that it is called with is not looked at. ValueError for an unknown name.

  "alfworld" are SkillRL's names, "household" those of `envs`; where the library has no skill by the one name of a task,
  and then no mistake, it is looked for by the other, so either finds its way in a library of either.
  """
  named = [rules]
  if isinstance(rules, str):
    if rules not in RULES:
      raise ValueError(f"keyword rules {rules!r} are unknown; choose one of {', '.join(RULES)}")
    named = [RULES[name] for name in (rules, OTHER_NAMES.get(rules)) if name]
  inner, having = by_family(library, **options), (library.families, {mistake.family for mistake in library.mistakes})

  def retrieve(task: str, family: str, *, fits: Callable[[str], bool] | None = None) -> str:
    del family
    says = [name(task) for name in named]
    known = (name for families in having for name in says if name in families)
    return inner(task, next(known, says[0]), fits=fits)

  return retrieve


Embedder = Callable[[Sequence[str]], Any]  # n texts -> an array [n, E]


def by_embedding(
  library: Library,
  embed: Embedder,
  *,
  top_k: int = 6,
  specific_top_k: int | None = None,
  max_mistakes: int = 5,
  render: str | Rendering = "markdown",
  heading: str = "Related",
) -> Retriever:
  """SkillRL's embedding mode: the `top_k` general skills and the `specific_top_k` (default: top_k) skills of any family
  whose title, principle and occasion are nearest to the task sentence.

  sim(task, skill) = <e(task), e(skill)> / (|e(task)| |e(skill)|), 0 where a vector is zero; of equal ones the earlier
  in the document comes first. The library is embedded once, here, each task once. Raises ValueError where `embed`
  gives other shapes than [n, E], or numbers that are not finite.
  """
  render = _checked(top_k, max_mistakes, render)
  specific = [skill for found in library.by_family.values() for skill in found]
  sizes = (top_k, top_k if specific_top_k is None else specific_top_k)
  general_vectors, specific_vectors = (_embedded(embed, list(map(_text, s))) for s in (library.general, specific))

  @functools.lru_cache(maxsize=4096)  # all members of a group ask about one task
  def ranked(task: str) -> tuple[tuple[Skill, ...], tuple[Skill, ...]]:
    query = _embedded(embed, [task])[0]
    return (
      _nearest(library.general, general_vectors, query, sizes[0]),
      _nearest(specific, specific_vectors, query, sizes[1]),
    )

  def retrieve(task: str, family: str, *, fits: Callable[[str], bool] | None = None) -> str:
    general, near = ranked(task)
    return largest(Selection(heading, near, general, _mistakes(library, family, max_mistakes)), render, fits)

  return retrieve


def word_embedder(size: int = 4096) -> Embedder:
  """Counts of words, hashed into `size` places: no model, no download, and near is what shares words. Where sentences
  are short and their words are few, as in the household, that is what an embedding needs to know.
  """

  def embed(texts: Sequence[str]) -> np.ndarray:
    vectors = np.zeros((len(texts), size), np.float32)
    for row, text in enumerate(texts):
      for word in words(text):
        vectors[row, zlib.crc32(word.encode("utf-8", "replace")) % size] += 1
    return vectors

  return embed


def sentence_embedder(model: str, **options: Any) -> Embedder:
  """Embeddings of a sentence-transformers model, a path or a name such as Qwen/Qwen3-Embedding-0.6B (SkillRL's).

  The package is imported here only; ValueError says how to get it. `options` go to its constructor.
  """
  try:
    from sentence_transformers import SentenceTransformer
  except ImportError:
    raise ValueError(
      "retrieval by embedding needs the package sentence-transformers: pip install 'seed_jax[embeddings]'"
    ) from None
  encoder = SentenceTransformer(model, **options)
  return lambda texts: np.asarray(encoder.encode(list(texts), show_progress_bar=False), np.float32)


# ---- parts


def general_skills(library: Library, top_k: int) -> tuple[Skill, ...]:
  """All dynamic general skills, then static ones in document order until there are `top_k`."""
  dynamic = tuple(skill for skill in library.general if skill.skill_id.startswith(DYNAMIC))
  static = tuple(skill for skill in library.general if not skill.skill_id.startswith(DYNAMIC))
  return dynamic + static[: max(top_k - len(dynamic), 0)]


def largest(selection: Selection, render: Rendering, fits: Callable[[str], bool] | None) -> str:
  """The text of as many entries as fit, those that matter most first; "" where not even one does."""
  text = render(selection)
  if fits is None or not text or fits(text):
    return text
  low, high, best = 0, len(selection), ""
  while high - low > 1:
    middle = (low + high) // 2
    text = render(selection.first(middle))
    low, high, best = (middle, high, text) if fits(text) else (low, middle, best)
  return best


def _checked(top_k: int, max_mistakes: int, render: str | Rendering) -> Rendering:
  if top_k < 0 or max_mistakes < 0:
    raise ValueError(f"top_k and max_mistakes count entries: at least 0, got {top_k} and {max_mistakes}")
  return rendering(render)


def _mistakes(library: Library, family: str, count: int) -> tuple[Mistake, ...]:
  own = [mistake for mistake in library.mistakes if mistake.family and mistake.family == family]
  return tuple((own + [mistake for mistake in library.mistakes if not mistake.family])[:count])


def _text(skill: Skill) -> str:
  return ". ".join(text for text in (skill.title, skill.principle, skill.when_to_apply) if text)


def _embedded(embed: Embedder, texts: list[str]) -> np.ndarray:
  """Unit vectors [n, E] of n texts; a zero vector stays zero."""
  if not texts:
    return np.zeros((0, 0), np.float32)
  vectors = np.asarray(embed(texts), np.float32)
  if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
    shape = list(vectors.shape)
    raise ValueError(f"the embedder gave {shape} for {len(texts)} texts; needed are finite numbers [{len(texts)}, E]")
  norms = np.linalg.norm(vectors, axis=1, keepdims=True)
  return vectors / np.where(norms > 0, norms, 1)


def _nearest(skills: Sequence[Skill], vectors: np.ndarray, query: np.ndarray, count: int) -> tuple[Skill, ...]:
  if not skills or not count:
    return ()
  order = np.argsort(-(vectors @ query), kind="stable")
  return tuple(skills[i] for i in order[:count])
