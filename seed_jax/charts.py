"""Small charts as inline SVG: readable at the width of a phone, in the page's own font, in its light and dark colours.

The drawing is matplotlib's. It draws in placeholder colours, which become the page's CSS variables, so one picture
serves both schemes. Text stays text, and the SVG writer escapes it.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

# Placeholder -> what the page puts there. The placeholders are distinct colours that matplotlib itself never uses.
INK, FAINT = "#010203", "#040506"
SERIES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06")
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", **{color: f"var(--s{i})" for i, color in enumerate(SERIES)}}
_SIZE = (3.7, 2.3)  # Inches at 100 points an inch: a chart is 370 wide, about a phone.

_POINTS = 500  # A longer curve is thinned: more points than this are not seen at this size.

Points = tuple[Sequence[float], Sequence[float | None]]


def _figure(size: tuple[float, float] = _SIZE):
  from matplotlib.figure import Figure  # Not pyplot: no window system is asked for, no global state.

  figure = Figure(figsize=size, dpi=100, layout="constrained")
  axes = figure.add_subplot()
  axes.set_facecolor("none")
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  for side in ("left", "bottom"):
    axes.spines[side].set_color(FAINT)
  axes.tick_params(colors=INK, labelsize=9, length=3, color=FAINT)
  axes.grid(axis="y", color=FAINT, linewidth=0.5, alpha=0.6)
  return figure, axes


def _svg(figure) -> str:
  import matplotlib

  out = io.StringIO()
  # A fixed salt and no date: equal data gives equal bytes.
  with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "seed_jax"}):
    figure.savefig(
      out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None, "Format": None}
    )
  text = out.getvalue()
  text = text[text.index("<svg") :]
  text = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.S)
  text = re.sub(r' (width|height)="[^"]*"', "", text[: text.index(">")]) + text[text.index(">") :]
  text = re.sub(r' xmlns:xlink="[^"]*"', "", text).replace("xlink:href", "href")
  text = re.sub(r'<g id="[^"]*"', "<g", text)  # The same names in every chart of a page.
  text = re.sub(r'font-family: [^;"]*', "font-family: var(--font)", text)
  text = re.sub(r"font: ([^;\"]*?)px [^;\"]*", r"font: \1px var(--font)", text)
  for color, variable in _VARIABLES.items():
    text = text.replace(color, variable)
  return text.strip()


def _label(name: str) -> str:
  """Printable text for matplotlib, which reads a formula between two dollar signs and fails on a lone surrogate."""
  name = "".join(character if character.isprintable() else "?" for character in name[:40])
  return name.replace("$", r"\$")


def _array(values: Sequence[float | None]) -> np.ndarray:
  return np.array([math.nan if value is None else value for value in values], float)


def smooth(values: Sequence[float | None], window: int) -> np.ndarray:
  """The mean of the last `window` values at every point (fewer at the start); None and NaN do not count."""
  values = _array(values)
  known = np.isfinite(values)
  if not known.any():
    return np.full(len(values), math.nan)
  base = values[known][0]  # Sums of differences from it: a constant stays constant to the last bit.
  total = np.cumsum(np.where(known, values - base, 0.0))
  count = np.cumsum(known)
  total[window:] -= total[:-window].copy()
  count[window:] -= count[:-window].copy()
  return base + np.divide(total, count, out=np.full(len(values), math.nan), where=count > 0)


def lines(
  series: Mapping[str, Points], *, unit: str = "", percent: str = "", xlabel: str = "iteration", log: bool = False
) -> str:
  """An SVG of one or more curves: every value faint, and over it the mean of the last tenth of the points so far.

  `series`: name -> (x, y) of equal lengths, at most six, None or NaN where a value is missing. `percent`:
  "full" shows fractions on 0-100 %, "auto" on the range that they take.
  """
  from matplotlib import ticker

  figure, axes = _figure()
  for (name, (x, y)), color in zip(series.items(), SERIES, strict=False):
    x, y = _array(x), _array(y)
    window = max(1, len(y) // 10)
    mean = smooth(y, window)
    thin = slice(None, None, max(1, len(y) // _POINTS))
    if window > 1:
      axes.plot(x[thin], y[thin], color=color, linewidth=0.8, alpha=0.35)
    marker = "o" if len(y) == 1 else None
    axes.plot(x[thin], mean[thin], color=color, linewidth=1.8, label=_label(name), marker=marker, markersize=4)
  if log:
    axes.set_yscale("log")
  else:
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    low, high = axes.get_ylim()
    if high - low < 1e-6 * max(abs(low), abs(high)):
      axes.set_ylim(low - 0.1 * abs(low), high + 0.1 * abs(high))  # A constant: no digits of rounding on the axis.
  if percent == "full":
    axes.set_ylim(-0.02, 1.02)
  if percent:
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0 if percent == "full" else None))
  axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
  axes.set_xlabel(xlabel, fontsize=9, color=INK)
  if unit:
    axes.set_ylabel(unit, fontsize=9, color=INK)
  if len(series) > 1:
    axes.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=2, loc="best")
  return _svg(figure)


def bands(
  series: Mapping[str, tuple[Sequence[float], ...]], *, xlabel: str, marks: Mapping[str, float] | None = None
) -> str:
  """An SVG of success rates with bands: name -> (x, mean, low, high), all of one length; infinite bounds draw no band.

  More than six series take the six colours again with broken lines. `marks`: heights of horizontal lines by name.
  """
  from matplotlib import ticker

  figure, axes = _figure((_SIZE[0], _SIZE[1] + 0.2 * math.ceil(len(series) / 2)))
  for index, (name, columns) in enumerate(series.items()):
    color, style = SERIES[index % len(SERIES)], ("-", "--", ":", "-.")[index // len(SERIES) % 4]
    x, mean, low, high = map(_array, columns)
    known = np.isfinite(low) & np.isfinite(high)
    axes.fill_between(x, np.clip(low, 0, 1), np.clip(high, 0, 1), where=known, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, mean, color=color, linewidth=1.8, linestyle=style, marker="o", markersize=3, label=_label(name))
  for name, value in (marks or {}).items():
    axes.axhline(value, color=INK, linewidth=0.8, linestyle=":", label=_label(name))
  axes.set_ylim(-0.02, 1.02)
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
  axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
  axes.set_xlabel(xlabel, fontsize=9, color=INK)
  figure.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=2, loc="outside upper center")
  return _svg(figure)


def stack(series: Mapping[str, Points], *, unit: str, xlabel: str = "iteration") -> str:
  """An SVG of parts of a whole over the iterations, piled up; the series share their x and are at most six."""
  from matplotlib import ticker

  figure, axes = _figure()
  names = list(series)[: len(SERIES)]
  x = series[names[0]][0]
  values = [np.nan_to_num(_array(series[name][1])) for name in names]
  axes.stackplot(x, values, colors=SERIES[: len(names)], labels=list(map(_label, names)), alpha=0.8)
  axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
  axes.set_xlabel(xlabel, fontsize=9, color=INK)
  axes.set_ylabel(unit, fontsize=9, color=INK)
  top = max(float(np.sum(values, axis=0).max()), 1e-9)
  axes.set_ylim(0, top * (1.12 + 0.11 * math.ceil(len(names) / 3)))  # Room for the legend above the curves.
  axes.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=3, loc="upper left", columnspacing=0.9, handlelength=1.2)
  return _svg(figure)


def rates(rows: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> str:
  """An SVG of success rates with whiskers: row name -> series name -> (rate, low, high)."""
  from matplotlib import ticker

  names = list(rows)
  kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
  figure, axes = _figure((_SIZE[0], 0.75 + 0.42 * len(names)))
  for index, kind in enumerate(kinds):
    known = [(place, *rows[name][kind]) for place, name in enumerate(names) if kind in rows[name]]
    place, rate, low, high = (np.array(column, float) for column in zip(*known, strict=True))
    place = place + 0.3 * ((index + 0.5) / len(kinds) - 0.5) * 2
    whiskers = [np.maximum(rate - low, 0), np.maximum(high - rate, 0)]
    color = SERIES[index % len(SERIES)]
    axes.errorbar(
      rate, place, xerr=whiskers, fmt="o", color=color, ecolor=color, markersize=5, capsize=2, label=_label(kind)
    )
  axes.set_yticks(range(len(names)), list(map(_label, names)), fontsize=9)
  axes.set_ylim(len(names) - 0.4, -0.6)
  axes.set_xlim(-0.02, 1.02)
  axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  axes.grid(axis="x", color=FAINT, linewidth=0.5, alpha=0.6)
  axes.grid(axis="y", visible=False)
  figure.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=len(kinds), loc="outside upper center")
  return _svg(figure)
