"""Episodes that have ended and are still needed: kept in the work directory, found again by the run that goes on.

DIR/unfinished/<stage>/<play>-<host>.gz holds what a host knows of one play, a rollout or a panel. Its first line is
{"policy": who played, "read": for each episode the tokens sampled for its analysis, null where there is none yet}, and
each further one an episode (`trajectory.to_json`). gzip's own sum tells a file that is damaged; it counts as absent.

An episode is known by its play, policy, task, group and member, the policy by the bits of its parameters: a run that
goes on with other parameters plays anew. One that broke off is not kept. Samples are keyed by (seed, iteration, task,
member, turn, token), so the episodes that were under way come out as they would have.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import threading
import zlib
from collections.abc import Sequence

import jax

from envs.pool import Pool
from seed_jax import hosts, trajectory
from seed_jax.checkpoint import array_sums
from seed_jax.engine import Engine
from seed_jax.metrics import is_writer, say
from seed_jax.preemption import Preempted
from seed_jax.rollout import Episode, Finished
from seed_jax.run import Run
from seed_jax.trajectory import Trajectory

FOLDER = "unfinished"  # of a work directory
_NAME = re.compile(r"\.?(\d+)-\d+\.gz")  # with a dot in front: half written


class Plays:
  """The plays of a stage, by their numbers. Whatever ends this process, once a play is over (and `wait` has returned)
  its episodes are there for the next one; where a play is cut short by a notice or an error, those that have ended by
  then.
  """

  def __init__(self, run: Run, stage: str):
    self.run, self.stage, self._place = run, stage, run.workdir / FOLDER / stage
    self._there = sorted(f.name for f in self._place.iterdir()) if self._place.exists() else []
    self._writing: threading.Thread | None = None
    self._tokens = 0

  def __call__(
    self, number: int, engine: Engine, pool: Pool, episodes: Sequence[Episode], params, **options
  ) -> list[Trajectory]:
    """`run.play`, the play `number` of the stage, by a policy `params`, which the engine has. All hosts call it."""
    policy = policy_of(params)
    finished = self._found(number, policy, episodes)
    before = len(finished.trajectories), len(finished.read)
    for t in finished.trajectories.values():
      options.get("on_episode", lambda _: None)(t)
    try:
      played = self.run.play(engine, pool, episodes, finished=finished, **options)
    except BaseException as error:  # a notice above all; but also where another host is gone
      self.wait()
      self._write(number, policy, finished)
      if not isinstance(error, Preempted):
        raise
      own = " of this host" if hosts.several() else ""
      say(f"{self.stage}: stopped, {len(finished.trajectories)} finished episodes{own} are kept")
      raise
    self.wait()
    if before != (len(finished.trajectories), len(finished.read)):
      # an analysis that comes later from somebody else may or may not get into the file: it will be asked for again
      self._writing = threading.Thread(target=self._write, args=(number, policy, finished), daemon=hosts.several())
      self._writing.start()
    return played

  def wait(self) -> None:
    """Returns when the last play is on disk."""
    if self._writing is not None:
      self._writing.join()
      self._writing = None

  def take_tokens(self) -> int:
    """Tokens that another process sampled for episodes that were found, since the last call."""
    taken, self._tokens = self._tokens, 0
    return taken

  def drop_before(self, number: int) -> None:
    """Plays with smaller numbers are used up."""
    self.wait()
    if is_writer() and self._place.exists():
      for item in self._place.iterdir():
        found = _NAME.match(item.name)
        if found and int(found[1]) < number:
          item.unlink(missing_ok=True)

  def done(self) -> None:
    """The stage is over, and its files go. All hosts call it."""
    self.wait()
    hosts.meet(f"the end of the plays of {self.stage}")
    if is_writer() and self._place.exists():
      self._place.rmtree()
      with contextlib.suppress(OSError, ValueError):  # another stage is not over: epath has an error of its own
        self._place.parent.rmdir()

  # ---- files

  def _found(self, number: int, policy: str, episodes: Sequence[Episode]) -> Finished:
    """Those of these episodes that ended in a process before this one."""
    places = {(e.task.id, e.group, e.member): place for place, e in enumerate(episodes)}
    out = Finished()
    for name in self._there:
      if name.startswith(f"{number}-") and _NAME.fullmatch(name):
        for read, t in self._read(name, policy):
          place = places.get((t.task_id, t.group, t.member))
          if place is not None and place not in out.read:  # of two files one may have its analysis
            out.trajectories[place] = t
            if read is not None:
              out.read[place] = read
    self._tokens += sum(t.response_tokens for t in out.trajectories.values()) + sum(out.read.values())
    return out

  def _read(self, name: str, policy: str) -> list[tuple[int | None, Trajectory]]:
    """(tokens of its analysis, episode) of all that are in a file of this policy."""
    try:
      head, *lines = gzip.decompress((self._place / name).read_bytes()).decode().split("\n")
      head = json.loads(head)
      if head["policy"] != policy:
        return []
      return list(zip(head["read"], map(trajectory.from_json, lines), strict=True))
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
      say(f"warning: {self._place / name} cannot be read ({error}); its episodes are played again")
      return []

  def _write(self, number: int, policy: str, finished: Finished) -> None:
    """One file, there as a whole or not at all. Without it the run goes on: it only spares the next one work."""
    kept = [(finished.read.get(place), t) for place, t in sorted(finished.trajectories.items()) if not t.error]
    path = self._place / f"{number}-{hosts.index()}.gz"
    if not kept:
      return
    try:
      head = json.dumps({"policy": policy, "read": [read for read, _ in kept]})
      data = gzip.compress("\n".join([head, *(trajectory.to_json(t) for _, t in kept)]).encode(), 1, mtime=0)
      self._place.mkdir(parents=True, exist_ok=True)
      if "://" in str(path):  # an object appears as a whole
        path.write_bytes(data)
      else:
        half = self._place / f".{path.name}"
        half.write_bytes(data)
        half.replace(path)
    except Exception as error:  # storage has many types for it
      say(
        f"warning: {path} was not written ({type(error).__name__}: {error}); a run that is stopped now plays it again"
      )


def policy_of(params) -> str:
  """A digest of the bits of a policy, however it is sharded."""
  sums = [int(x) for x in jax.device_get(array_sums(params))]
  return hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]
