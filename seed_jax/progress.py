"""Progress on the terminal: a bar where a person watches, lines where a log is written. Process 0 speaks for all."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


def is_writer() -> bool:
  """True on the one process that writes files and prints. Starts no device."""
  from seed_jax import hosts  # Here and not above: it loads jax, and reading a metrics file must not.

  return hosts.index() == 0


def say(text: str) -> None:
  """One line to the terminal from process 0, above a progress bar that may be running."""
  if is_writer():
    import tqdm

    tqdm.tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


class Progress:
  """A bar with rate and time left on a terminal, else one such line every `every` seconds. Process 0 only."""

  def __init__(self, iterable, total, initial, desc, unit, plain, every, file: TextIO | None):
    self._iterable, self._file = iterable, file or sys.stderr
    self._plain = not self._file.isatty() if plain is None else plain
    self._silent = not is_writer()
    self._every, self._desc, self._unit = every, desc, unit
    self._start = self._shown = time.monotonic()
    self.n, self.total, self.initial = initial, total, initial
    self._last, self._postfix, self._bar = None, "", None
    if not self._plain and not self._silent:
      import tqdm

      self._bar = tqdm.tqdm(
        total=total, initial=initial, desc=desc, unit=unit, file=self._file, dynamic_ncols=True, smoothing=0.1
      )

  def update(self, count: int = 1, **values: Any) -> None:
    """`count` more units are done; `values` (numbers or texts) stand at the end of the line."""
    self.n += count
    if values:
      self._postfix = ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
      )
    if self._bar is not None:
      self._bar.set_postfix_str(self._postfix, refresh=False)
      self._bar.update(count)
    elif time.monotonic() - self._shown >= self._every:
      self._show()

  def close(self) -> None:
    """Shows the final state. Closing twice is harmless."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None
      self._last = self.n
    elif self.n != self._last:
      self._show()

  def _show(self) -> None:
    self._shown, self._last = time.monotonic(), self.n
    if self._silent:
      return
    import tqdm

    text = tqdm.tqdm.format_meter(
      self.n, self.total, self._shown - self._start, prefix=self._desc, unit=self._unit, initial=self.initial,
      bar_format="{l_bar}{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]" if self.total else None,
    )  # fmt: skip
    print(text + (f" {self._postfix}" if self._postfix else ""), file=self._file, flush=True)

  def __iter__(self) -> Iterator:
    try:
      for item in self._iterable:
        yield item
        self.update()
    finally:
      self.close()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *unused) -> None:
    self.close()


def progress(
  iterable: Iterable | int | None = None,
  *,
  total: int | None = None,
  initial: int = 0,
  desc: str = "",
  unit: str = "it",
  plain: bool | None = None,
  every: float = 10.0,
  file: TextIO | None = None,
) -> Progress:
  """A `Progress` over an iterable (a number counts as `range`), or one to be driven by `update`.

  `initial` units were done before, in a run that is resumed. `plain=None` asks the terminal and the variable
  SEED_JAX_PLAIN; True means lines instead of a bar.
  """
  if isinstance(iterable, int):
    iterable = range(initial, iterable)
    total = iterable.stop if total is None else total
  if total is None and hasattr(iterable, "__len__"):
    total = len(iterable) + initial
  if plain is None and os.environ.get("SEED_JAX_PLAIN"):
    plain = True
  return Progress(iterable, total, initial, desc, unit, plain, every, file)
