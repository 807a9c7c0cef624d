"""What went wrong, in one line: for the command lines of the package.

What was written for the user is told as it stands; of everything else the type, and how to see more.
"""

from __future__ import annotations

import errno
import os
import pathlib
import re
import sys
import traceback

from absl import flags

AGAIN = "the same command goes on from where it stopped"
PACKAGES = ("seed_jax", "envs")
FOLDERS = tuple(str(pathlib.Path(__file__).resolve().parent.parent / name) + os.sep for name in PACKAGES)


class UsageError(ValueError):
  """A command line that cannot be run; the message says what to change."""


def failed(error: BaseException, place: str | None = None) -> int:
  """Says in one line what went wrong and returns the exit code; of several processes this one ends here."""
  hosts = sys.modules.get("seed_jax.hosts")  # loaded by `work`, and with it jax
  lost = hosts.lost(error) if hosts else ""
  text = lost or describe(error, place)
  print("error: " + text, file=sys.stderr, flush=True)
  code = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, (UsageError, flags.Error)) else 1
  if hosts:
    hosts.leave(hosts.EXIT_LOST if lost else code, "" if lost else text)
  return hosts.EXIT_LOST if lost else code


def describe(error: BaseException, place: str | None = None, again: str = AGAIN) -> str:
  """What went wrong in one line: the message where it was written for the user, else its type and how to see more.

  place: where the program writes, for a full disk that does not say which file it was.
  """
  text = one_line(error)
  if isinstance(error, KeyboardInterrupt):
    return f"interrupted; {again}"
  full = full_disk(error)
  if full:
    path, reason = full
    return f"{path or place or 'a disk'}: the disk is full ({reason}); {again} once there is room"
  if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
    return f"out of memory; lower config.train.micro_tokens or config.rollout.slots ({text[:200]})"
  if isinstance(error, ImportError):
    asked = "" if "pip" in text or not getattr(error, "name", None) else f"; pip install {error.name.partition('.')[0]}"
    return f"a package is missing: {text}{asked}"
  if isinstance(error, OSError):
    name = f"{error.filename}: " if error.filename else ""
    return f"{name}{error.strerror}; {again} once that is solved" if error.strerror else text
  if isinstance(error, flags.Error):
    return text
  if isinstance(error, (ValueError, RuntimeError, NotImplementedError)) and raised_by_us(error):
    return text
  return f"unexpected {type(error).__name__}: {text[:400]} (add --traceback to see where; {again})"


def full_disk(error: BaseException | None) -> tuple[str | None, str] | None:
  """(path or None, reason) where `error`, or what it came from, is a full disk or quota; libraries tell it in words."""
  while error is not None:
    text = one_line(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
      return error.filename, error.strerror
    found = re.search("No space left on device|Disk quota exceeded", text)
    if found:
      path = re.search(r'local file "([^"]+)"', text)
      return path and path[1], found[0]
    error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
  return None


def one_line(error: BaseException) -> str:
  return " ".join(str(error).split())


def raised_by_us(error: BaseException) -> bool:
  """Whether the error type or the innermost frame is ours: then the message was written for the user."""
  if type(error).__module__.partition(".")[0] in PACKAGES:
    return True
  frames = list(traceback.walk_tb(error.__traceback__))
  return bool(frames) and os.path.realpath(frames[-1][0].f_code.co_filename).startswith(FOLDERS)
