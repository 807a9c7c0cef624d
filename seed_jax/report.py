"""The report of a run: one HTML page that needs nothing else, and a table for the terminal.

The page holds what the files of the work directory say; a stage that has not run yet is named, not an error. It has no
script, loads nothing, and every text in it is escaped and cut to a length: tasks, observations and skills are data.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from seed_jax import charts, intervals, methods, metrics, skill_report
from seed_jax.page import clean, document, duration, figure, hide_secrets, number, percent, plain, span

_TURN_LIMIT = 60
_EXAMPLE_LIMIT = 24
_CONFIG_LIMIT = 100_000
_PACKAGES = (
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "transformers",
  "sentencepiece",
  "gymnasium",
  "numpy",
)

# Title, keys (the part of a metric's name after its last "/" counts too), options. The other metrics come last.
_CURVES = (
  ("Success of training episodes", ("success",), {"percent": "full"}),
  ("Return", ("return",), {}),
  ("Episode length", ("turns",), {"unit": "turns"}),
  ("Skills that parse, turns with OPD", ("parse_rate", "opd_active_ratio", "opd_active"), {"percent": "full"}),
  ("OPD gate", ("gate_mean", "gate_std"), {}),
  ("Skill branch minus ordinary branch", ("gap_mean",), {"unit": "nats a token"}),
  ("Valid actions", ("valid_actions",), {"percent": "full"}),
  ("KL to the reference", ("kl",), {"unit": "nats a token"}),
  ("Entropy", ("entropy",), {"unit": "nats a token"}),
  ("Loss", ("loss", "pg_loss", "opd_loss"), {}),
  ("Clipped tokens", ("clip_low_fraction", "clip_high_fraction", "dual_clip_fraction"), {"percent": "auto"}),
  ("Gradient norm", ("grad_norm",), {}),
  ("Groups without a difference", ("tied_groups",), {"percent": "full"}),
)
_PANEL = ("success", "macro")  # of curve.jsonl


# ---------------------------------------------------------------- the terminal


def text_table(evaluation: Mapping[str, Any]) -> str:
  """The success rates of `evaluate.json` as lines for a terminal: a row a family, before and after training."""
  final, start = intervals.read_panel(evaluation), intervals.read_panel(evaluation.get("start"))
  compare = start.overall is not None
  rows = [("", "before", "after", "95 %", "points") if compare else ("", "success", "95 %")]
  labelled = [(plain(name), rate, start.families.get(name)) for name, rate in final.families.items()]
  labelled += [("all tasks", final.overall, start.overall), ("macro average", final.macro, start.macro)]
  for label, rate, base in labelled:
    if rate is None:
      continue
    row = [label, percent(rate.value), span(rate.low, rate.high)]
    if compare:
      row.insert(1, percent(base.value if base else None))
      row.append(f"{100 * (rate.value - base.value):+.1f}" if base else "–")
    rows.append(tuple(row))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for first, *rest in rows:
    cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
    lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
  if compare and (difference := intervals.gain(final, start)) is not None:
    lines.append(
      f"success {percent(start.overall.value)} -> {percent(final.overall.value)}: {100 * difference[0]:+.1f} points "
      f"(95 %: {span(*difference[1:], signed=True)}), {final.overall.episodes} episodes"
    )
  return "\n".join(lines)


# ---------------------------------------------------------------- the page


def run_report(run) -> dict:
  """Stage `report`: the page, and the table on the terminal. `run` is a `seed_jax.run.Run`."""
  path = build(run.workdir, command=f"python -m seed_jax.main {shlex.join(sys.argv[1:])}")
  evaluation = metrics.read_json(run.workdir / "evaluate.json", default=None)
  if metrics.is_writer():
    if evaluation:
      print(text_table(evaluation))
    print(f"report: {path}", flush=True)
  return run.finish("report", {"path": str(path)})


def build(workdir: epath.PathLike, *, command: str = "", title: str = "") -> epath.Path:
  """Writes `workdir/report.html` from what the stages left there and returns its path.

  Reads config.json, the stages' JSON files, metrics.jsonl and examples.json (a list of episodes: task, family, won,
  split, iteration, skill, summary, parsed, turns of observation, action, valid, response). A file that cannot be read
  is named on the page. `command` is shown as what made the run; `title` stands at the top instead of the folder's name.
  """
  workdir = epath.Path(workdir)
  notices: list[str] = []

  def read(name: str, kind: type):
    try:
      value = metrics.read_json(workdir / name, default=None)
    except (ValueError, OSError) as error:
      notices.append(f"{name} cannot be read: {error}")
      return kind()
    if value is not None and not isinstance(value, kind):
      notices.append(f"{name} does not hold a {kind.__name__}; it is left out")
    return value if isinstance(value, kind) else kind()

  config = read("config.json", dict)
  stages = {name: read(f"{name}.json", dict) for name in ("base", "collect", "annotate", "sft", "train", "evaluate")}
  examples = read("examples.json", list)
  rows = metrics.read_rows(workdir / "metrics.jsonl")
  curve = metrics.read_rows(workdir / "curve.jsonl")
  skills = skill_report.section(workdir / "skills", rows, notices)
  final, start = intervals.read_panel(stages["evaluate"]), intervals.read_panel(stages["evaluate"].get("start"))
  title = title or f"SEED run {workdir.name}"
  sections = [
    _head(title, stages, final, start),
    "".join(f"<p class=notice>{clean(notice)}</p>" for notice in notices),
    _families(final, start),
    _mechanism(stages["evaluate"].get("mechanism")),
    _curves(rows, curve, _panel_title(config.get("method")), skip=skill_report.METRICS if skills else ()),
    skills,
    _examples(examples),
    _facts(stages, config, command),
  ]
  path = workdir / "report.html"
  metrics.write_text(path, document(title, sections))
  return path


def _head(title: str, stages: Mapping[str, Mapping], final: intervals.Panel, start: intervals.Panel) -> str:
  train, cards = stages["train"], []
  if final.overall:
    text, note = percent(final.overall.value), f"{span(*final.overall[1:3])}"
    if start.overall:
      text, note = f"{percent(start.overall.value)} → {text}", f"{span(*start.overall[1:3])} before, {note} after"
    if difference := intervals.gain(final, start):
      note += f"; gain {100 * difference[0]:+.1f} points ({span(*difference[1:], signed=True)})"
    note = f"success on {final.overall.episodes} tasks, skills removed; 95 %: {note}"
    cards.append(f"<div class='card wide'><b>{text}</b><span class=soft>{note}</span></div>")
  mean, deviation = number(train.get("gate_mean")), number(train.get("gate_std"))
  for label, value in (
    ("macro success over families", final.macro and percent(final.macro.value)),
    ("iterations", train.get("iterations")),
    ("training time", duration(train["seconds"]) if "seconds" in train else None),
    ("skills that parse", percent(train["parse_rate"]) if "parse_rate" in train else None),
    ("trajectories with OPD", percent(train["opd_active"]) if "opd_active" in train else None),
    ("OPD gate, mean ± std", None if mean is None or deviation is None else f"{mean:.3f} ± {deviation:.3f}"),
    ("programs compiled", train.get("compilations")),
  ):
    if value is not None:
      cards.append(f"<div class=card><b>{clean(value, 40)}</b><span class=soft>{label}</span></div>")
  missing = [name for name, value in stages.items() if not value]
  todo = f"<p class=notice>Not done yet: {', '.join(missing)}.</p>" if missing else ""
  return f"<h1>{clean(title, 200)}</h1>{todo}<div class=cards>{''.join(cards)}</div>"


def _families(final: intervals.Panel, start: intervals.Panel) -> str:
  """The table by task family and its picture."""
  if not final.families:
    return "<h2>Success by task family</h2><p class=soft>No evaluation yet.</p>"

  def cell(rate: intervals.Rate | None) -> str:
    return f"{percent(rate.value)}<small>{span(*rate[1:3])}</small>" if rate else "–"

  compare = start.overall is not None
  rows = [
    (name, rate, start.families.get(name), intervals.gain(final, start, name)) for name, rate in final.families.items()
  ]
  if final.overall:
    rows.append((None, final.overall, start.overall, intervals.gain(final, start)))
  body, picture = [], {}
  for name, rate, base, difference in rows:
    label = "all tasks" if name is None else name
    picture[plain(label, 24)] = ({"before": base[:3]} if base else {}) | {"after": rate[:3]}
    cells = [cell(base), cell(rate)] if compare else [cell(rate)]
    if compare and difference:
      tone = "good" if difference[1] > 0 else "bad" if difference[2] < 0 else "soft"
      points, between = f"{100 * difference[0]:+.1f}", span(*difference[1:], signed=True)
      cells.append(f"<span class={tone}>{points}</span><small>{between}</small>")
    elif compare:
      cells.append("–")
    columns = "".join(f"<td class=number>{text}</td>" for text in cells)
    kind = " class=total" if name is None else ""
    body.append(f"<tr{kind}><td>{clean(label, 60)}<small>{rate.episodes} episodes</small></td>{columns}</tr>")
  heads = ("before", "after", "points") if compare else ("success",)
  head = "".join(f"<th class=number>{text}</th>" for text in heads)
  return (
    "<h2>Success by task family</h2><p class=soft>A fixed panel of tasks; 95 % intervals below the rates.</p>"
    f"<div class=pair><table><thead><tr><th>family</th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    f"<figure>{charts.rates(picture)}</figure></div>"
  )


def _mechanism(found: Any) -> str:
  """What a skill in context is worth: no skill, the skill of a success on the same task, the skill of another task."""
  found = found if isinstance(found, Mapping) else {}
  body = []
  for name, label in (("none", "no skill"), ("own", "skill of this task"), ("foreign", "skill of another task")):
    if number(found.get(name)) is None:
      continue
    gain = found.get(f"{name}_gain")
    gain = [number(value) for value in gain] if isinstance(gain, list) else []
    points = (
      f"{100 * gain[0]:+.1f}<small>{span(*gain[1:], signed=True)}</small>"
      if len(gain) == 3 and None not in gain
      else ""
    )
    body.append(f"<tr><td>{label}</td><td class=number>{percent(found[name])}</td><td class=number>{points}</td></tr>")
  if not body:
    return ""
  return (
    "<h2>What a skill in context is worth</h2><p class=soft>The policy before training, on "
    f"{clean(found.get('tasks', '?'), 20)} tasks that it had won once.</p><table class=narrow><thead><tr>"
    "<th>context</th><th class=number>success</th><th class=number>points</th></tr></thead>"
    f"<tbody>{''.join(body)}</tbody></table>"
  )


def _panel_title(method: Any) -> str:
  """What the prompts of the panel hold depends on the method; one that was registered elsewhere is not known here."""
  found = methods.METHODS.get(method) if isinstance(method, str) else None
  if found is None:
    return "Success on the panel"
  return "Success on the panel, " + ("library text in the prompts" if found.in_evaluation else "no skill")


def _curves(rows: Sequence[Mapping], curve: Sequence[Mapping], panel_title: str, skip: Sequence[str] = ()) -> str:
  if not rows:
    return "<h2>Learning curves</h2><p class=soft>No training iteration yet.</p>"
  iterations = [row["iteration"] for row in rows]
  keys = list(dict.fromkeys(key for row in rows for key in row if key not in ("iteration", *skip)))
  points = {}
  for key in keys:
    values = [number(row.get(key)) for row in rows]
    if any(value is not None for value in values):
      points[key] = (iterations, values)
  seconds = {key.split("/", 1)[1]: points.pop(key) for key in list(points) if key.startswith("seconds/")}
  figures = []
  if curve:
    panel = {key: ([row["iteration"] for row in curve], [number(row.get(key)) for row in curve]) for key in _PANEL}
    figures.append(figure(panel_title, panel, charts.lines(panel, percent="full")))
  for name, wanted, options in _CURVES:
    chosen = {
      key: points[key] for want in wanted for key in list(points) if key == want or key.rsplit("/", 1)[-1] == want
    }
    if chosen:
      for key in chosen:
        del points[key]
      figures.append(figure(name, chosen, charts.lines(chosen, **options)))
  if seconds:
    # The five longest phases by name, the others together.
    total = {name: sum(value or 0.0 for value in values) for name, (_, values) in seconds.items()}
    names = sorted(seconds, key=lambda name: -total[name])
    chosen = {name: seconds[name] for name in names[:5]}
    if names[5:]:
      chosen["other"] = (iterations, [sum(seconds[name][1][i] or 0.0 for name in names[5:]) for i in range(len(rows))])
    figures.append(figure("Seconds an iteration", {}, charts.stack(chosen, unit="seconds")))
  more = [figure(key, {key: value}, charts.lines({key: value})) for key, value in list(points.items())[:40]]
  rest = f"<details><summary>{len(more)} more curves</summary><div class=charts>{''.join(more)}</div></details>"
  return (
    f"<h2>Learning curves</h2><p class=soft>{len(rows)} iterations. "
    "Faint: every iteration; strong: the mean of the last tenth.</p>"
    f"<div class=charts>{''.join(figures)}</div>{rest if more else ''}"
  )


def _examples(examples: Sequence[Any]) -> str:
  shown = [example for example in examples if isinstance(example, Mapping)][:_EXAMPLE_LIMIT]
  if not shown:
    return ""
  return f"<h2>Example trajectories</h2>{''.join(map(_example, shown))}"


def _example(example: Mapping[str, Any]) -> str:
  turns = example.get("turns")
  turns = [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []
  won = "<b class=good>won</b>" if example.get("won") else "<b class=bad>lost</b>"
  facts = [clean(example[key], 60) for key in ("family", "split") if example.get(key)]
  if number(example.get("iteration")) is not None:
    facts.append(f"iteration {example['iteration']:g}")
  facts.append(f"{len(turns)} turns")
  head = f"{won} {clean(example.get('task'), 200)} <span class=soft>{' · '.join(facts)}</span>"
  parts = [f"<details><summary>{head}</summary><div>"]
  for key, label in (("summary", "What happened"), ("skill", "Skill learned from it")):
    if example.get(key):
      parts.append(f"<div class=skill><span class=soft>{label}</span>\n{clean(example[key])}</div>")
  if example.get("parsed") is False:
    parts.append("<p class=soft>The analysis of this episode did not parse: no skill, no OPD.</p>")
  parts.append("<ol class=turns>")
  for index, turn in enumerate(turns[:_TURN_LIMIT]):
    action, response = turn.get("action"), turn.get("response")
    mark = "" if turn.get("valid", True) else " <span class=bad>not valid</span>"
    parts.append(
      f"<li><div>{clean(turn.get('observation'))}</div><div class=action>{index + 1}. {clean(action)}{mark}</div>"
    )
    if isinstance(response, str) and response.strip() != str(action).strip():
      parts.append(f"<div class=soft>{clean(response)}</div>")
    parts.append("</li>")
  if len(turns) > _TURN_LIMIT:
    parts.append(f"<li class=soft>… {len(turns) - _TURN_LIMIT} more turns</li>")
  return "".join(parts) + "</ol></div></details>"


def _facts(stages: Mapping[str, Mapping], config: Mapping[str, Any], command: str) -> str:
  parts = ["<h2>How it was made</h2>"]
  if command:
    parts.append(f"<pre>{clean(command)}</pre>")
  installed = []
  for name in _PACKAGES:
    try:
      installed.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
      continue
  now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
  machine = f"Python {platform.python_version()} on {platform.machine()}; {', '.join(installed)}"
  parts.append(f"<p class=soft>{clean(machine)}. Page written {now}.</p>")
  times = [f"{name} {duration(value['seconds'])}" for name, value in stages.items() if number(value.get("seconds"))]
  if times:
    parts.append(f"<p class=soft>Time by stage: {', '.join(times)}.</p>")
  for name, value in [("config", config), *stages.items()]:
    if value:
      text = json.dumps(hide_secrets(_without_outcomes(value)), indent=2, ensure_ascii=False)
      parts.append(
        f"<details><summary>{name}.json</summary><div><pre>{clean(text, _CONFIG_LIMIT)}</pre></div></details>"
      )
  return "".join(parts)


def _without_outcomes(value: Any) -> Any:
  """The same without the outcome of every single task, which would fill the page."""
  if isinstance(value, Mapping):
    return {key: _without_outcomes(item) for key, item in value.items() if key != "outcomes"}
  return value
