"""Values as text for a page or a terminal. What a model, an environment or a file says is cleaned, escaped and cut."""

from __future__ import annotations

import html
import importlib.resources
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from seed_jax import charts

TEXT_LIMIT = 2_000  # Characters of one observation, response or skill.


def clean(text: Any, limit: int = TEXT_LIMIT) -> str:
  """Escaped text of at most `limit` characters; control, direction and unpaired characters are shown as U+FFFD."""
  text = text if isinstance(text, str) else "" if text is None else str(text)
  more = len(text) - limit
  text = "".join(
    character if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs") else "\ufffd"
    for character in text[:limit]
  )
  return html.escape(text) + (f" <span class=soft>… {more} more characters</span>" if more > 0 else "")


def document(title: str, sections: Iterable[str]) -> str:
  """A whole page of sections of HTML: no script, nothing loaded, wide as the screen that shows it."""
  return (
    "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
    '<meta name=viewport content="width=device-width, initial-scale=1">\n'
    "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
    f"<title>{clean(title, 200)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n"
    + "\n".join(section for section in sections if section)
    + "\n</body>\n</html>\n"
  )


def picture(svg: str) -> str:
  """A chart as a file of its own, for a document or a paper: with the page's colours, light and dark, and ground."""
  variables = _style().partition("* {")[0]
  return svg.replace("<svg", '<svg width="740"', 1).replace(
    ">", f">\n<style>\n{variables}svg {{ background: var(--page); }}\n</style>", 1
  )


def _style() -> str:
  return importlib.resources.files("seed_jax").joinpath("report.css").read_text()


def figure(name: str, series: Mapping[str, charts.Points], svg: str) -> str:
  """A chart with its title, and for readers of text the first and last mean of every series."""
  notes = []
  for key, (_, values) in series.items():
    known = [value for value in charts.smooth(values, max(1, len(values) // 10)) if math.isfinite(value)]
    if known:
      notes.append(f"{clean(key, 60)} {known[0]:.3g} → {known[-1]:.3g}")
  return f"<figure><h3>{clean(name, 60)}</h3>{svg}<figcaption>{'; '.join(notes)}</figcaption></figure>"


def hide_secrets(value: Any, name: str = "") -> Any:
  """JSON values with the texts of fields named like a password or an API key taken out."""
  if isinstance(value, Mapping):
    return {key: hide_secrets(item, str(key)) for key, item in value.items()}
  if isinstance(value, list):
    return [hide_secrets(item, name) for item in value]
  if isinstance(value, str) and value and re.search(r"api_?key|secret|password|credential", name, re.IGNORECASE):
    return "(hidden)"
  return value


def number(value: Any) -> float | None:
  """A finite number as a float; None for whatever else a file holds."""
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
    return None
  return float(value)


def percent(value: Any) -> str:
  """A rate such as 0.25 as "25.0 %"; a dash where there is none."""
  value = number(value)
  return "–" if value is None else f"{100 * value:.1f} %"


def span(low: float, high: float, signed: bool = False) -> str:
  """An interval of rates as "20–31 %", or of differences as "+12 to +20", or "−0.4 to +5.6" within 10 points of 0."""
  if not signed:
    return f"{100 * low:.0f}–{100 * high:.0f} %"
  digits = 1 if max(abs(low), abs(high)) < 0.1 else 0
  return f"{100 * low:+.{digits}f} to {100 * high:+.{digits}f}".replace("-", "−")


def duration(seconds: Any) -> str:
  """Seconds as "45 s", "12 min" or "3 h 05 min"."""
  seconds = number(seconds)
  if seconds is None:
    return "–"
  if seconds < 90:
    return f"{seconds:.0f} s"
  minutes = round(seconds / 60)
  return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def exact_duration(seconds: Any) -> str:
  """Seconds as "45 s", "2 min 48 s" or "3 h 05 min", for times that are compared."""
  value = number(seconds)
  if value is None or value < 90 or value >= 7_200:
    return duration(seconds)
  return f"{round(value) // 60} min {round(value) % 60:02d} s"


def plain(text: Any, limit: int = 40) -> str:
  """One line of printable characters, for a terminal or a picture."""
  return "".join(character if character.isprintable() else "?" for character in str(text)[:limit])
