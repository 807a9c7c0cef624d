"""What `preflight` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def text(result: dict) -> str:
  """The tables and the last lines, from preflight.json."""
  parts = [*([memory(result), ""] if result["programs"] else []), phases(result), ""]
  dollars = result["cost_per_iteration"]
  cost = f"; {dollars:.2f} dollars" if dollars is not None else ""
  parts.append(
    f"predicted iteration: {result['predicted_seconds']:.0f} s ({result['predicted_seconds_without_overlap']:.0f} s "
    f"where nothing overlaps){cost};\n{result['dominates']} takes longest; update at {result['mfu']:.0%} MFU"
  )
  verdict = {True: "fits", False: "DOES NOT FIT", None: "nothing was compiled"}[result["fits"]]
  needed = f"; {result['chips_needed']} chips are needed by the estimate" if result["chips_needed"] else ""
  parts.append(f"{result['topology']}, {result['chips']} chips: {verdict}{needed}")
  if "advice" in result:
    parts.append(result["advice"]["text"])
  if result["scaling"]:
    price = dollars * 3600 / result["predicted_seconds"] / result["chips"] if dollars is not None else 0.0
    parts += [
      "",
      "predicted seconds of an iteration with as many episodes a chip, MFU of its update:",
      scaling(result["scaling"], price, result["work"]["episodes"]),
    ]
  return "\n".join(parts)


def memory(result: dict) -> str:
  """GiB of a chip by program: its own peak, and with what else lies there all the time."""
  head = ("program", "GiB", "with the rest", "limit", "", "compiled")
  rows = [
    (
      name,
      f"{p['peak_gib']:.2f}",
      f"{p['with_rest_gib']:.2f}",
      f"{p['limit_gib']:.2f}",
      "" if p["fits"] else "too much",
      "before" if p["known"] else f"{p['compile_seconds']:.0f} s",
    )
    for name, p in result["programs"].items()
  ]
  held = ", ".join(f"{name} {size:.2f}" for name, size in result["held_gib"].items() if size)
  return "\n".join([table(head, rows), f"held all the time, GiB: {held}", "", collectives(result)])


def collectives(result: dict) -> str:
  """How many of each run in a program, of a loop in one pass, and the GiB that they bring to a chip."""
  ops = list(dict.fromkeys(op for p in result["programs"].values() for op in p["collectives"]))
  rows = [
    (name, f"{p['received_gib']:.2f}", *(str(p["collectives"].get(op, 0)) for op in ops))
    for name, p in result["programs"].items()
  ]
  return table(("collectives", "GiB received", *ops), rows)


def phases(result: dict) -> str:
  """Predicted seconds by phase, and the terms they come from."""
  head = ("predicted", "seconds", "compute", "memory", "transfer", "latency", "dominates", "MFU")
  rows = [
    (name, *(f"{p[k]:.2f}" for k in ("seconds", "compute", "memory", "transfer", "latency")), p["dominates"])
    + (f"{p['mfu']:.0%}" if p["mfu"] else "",)
    for name, p in result["phases"].items()
  ]
  return table(head, rows)


def scaling(rows: Iterable[dict], price: float, episodes: int) -> str:
  """The predictions for other slices, in Markdown; the last column is for `episodes` whatever the slice."""
  head = ("slice", "chips", "episodes", "seconds", "longest phase (term)", "MFU", "chip h")
  head += ("$",) * bool(price) + (f"s, {episodes} episodes",)
  lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
  for r in rows:
    cells = (r["topology"], r["chips"], r["episodes"], f"{r['seconds']:.0f}", r["dominates"], f"{r['update_mfu']:.0%}")
    cells += (f"{r['chip_hours']:.2f}",) + (f"{r['chip_hours'] * price:.2f}",) * bool(price)
    lines.append("| " + " | ".join(map(str, (*cells, f"{r['strong_seconds']:.0f}"))) + " |")
  return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Columns of text, numbers to the right."""
  widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
  number = [bool(rows) and all(str(row[i]).replace(".", "").isdigit() for row in rows) for i in range(len(head))]
  align = lambda row: "  ".join(  # noqa: E731
    str(cell).rjust(w) if n else str(cell).ljust(w) for cell, w, n in zip(row, widths, number, strict=True)
  ).rstrip()
  return "\n".join([align(head), *(align(row) for row in rows)])
