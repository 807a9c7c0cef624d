"""Episodes that had ended when a run was stopped in the middle of a rollout: how they are kept, and found again.

A line of JSON an episode: {"round": the number of the play that it belongs to, "policy": who played, "read": tokens
sampled for its analysis, null where there is none yet, "trajectory": the episode}. An episode is known by its round,
policy, task, group and member; one that broke off is not kept but played again. Samples are keyed by (seed, iteration,
task, member, turn, token), so the episodes that were under way come out as they would have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

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

FOLDER = "unfinished"  # of a work directory: stages other than `train`, whose checkpoints hold their episodes


class Unfinished:
  """The episodes that have ended, of the rounds that have not been used up."""

  def __init__(self, files: Mapping[str, bytes] | None = None):
    """`files` are those of `to_files`, of all processes. Raises ValueError for a line that is no episode."""
    self._rounds: dict[int, tuple[str, Finished]] = {}
    self._found: dict[tuple, tuple[Trajectory, int | None]] = {}
    self._tokens = 0
    for line in b"".join((files or {}).values()).splitlines():
      row = json.loads(line)
      t = trajectory.from_json(row["trajectory"])
      self._found[row["round"], row["policy"], t.task_id, t.group, t.member] = t, row["read"]

  def round(self, number: int, episodes: Sequence[Episode], policy: str = "") -> Finished:
    """What a `play` of these episodes is to be given: those of them that had ended before, to which it adds."""
    _, out = self._rounds.setdefault(number, (policy, Finished()))
    for place, e in enumerate(episodes):
      found, read = self._found.pop((number, policy, e.task.id, e.group, e.member), (None, None))
      if found is not None:
        out.trajectories[place] = found
        self._tokens += found.response_tokens + (read or 0)
        if read is not None:
          out.read[place] = read
    return out

  def take_tokens(self) -> int:
    """Tokens that another process sampled for the episodes of `round`, since the last call."""
    taken, self._tokens = self._tokens, 0
    return taken

  def drop_before(self, number: int) -> None:
    """Rounds with smaller numbers are used up."""
    self._rounds = {n: entry for n, entry in self._rounds.items() if n >= number}
    self._found = {key: entry for key, entry in self._found.items() if key[0] >= number}

  def count(self) -> int:
    """Episodes that `to_files` keeps."""
    return len(self._kept())

  def to_files(self) -> dict[str, bytes]:
    """The episodes of this process, as one file by name: also those that were read and that no `round` has asked for
    yet, for a run may be stopped again before it does.
    """
    lines = [
      json.dumps({"round": number, "policy": policy, "read": read, "trajectory": trajectory.to_json(t)}) + "\n"
      for number, policy, t, read in self._kept()
    ]
    return {f"episodes-{hosts.index()}.jsonl": "".join(lines).encode()}

  def _kept(self) -> list[tuple[int, str, Trajectory, int | None]]:
    """(round, policy, episode, tokens of its analysis) of all that is kept."""
    waiting = [(number, policy, t, read) for (number, policy, *_), (t, read) in self._found.items()]
    return waiting + [
      (number, policy, t, finished.read.get(place))
      for number, (policy, finished) in sorted(self._rounds.items())
      for place, t in sorted(finished.trajectories.items())
      if not t.error
    ]


class Plays:
  """The plays of a stage that trains nothing. Where the run is asked to stop, the episodes that have ended go into
  DIR/unfinished/<stage>, and the same plays go on with them.
  """

  def __init__(self, run: Run, stage: str):
    self.run, self.stage, self._place = run, stage, run.workdir / FOLDER / stage
    there = self._place.iterdir() if self._place.exists() else ()
    self._unfinished = Unfinished({f.name: f.read_bytes() for f in there})

  def __call__(
    self, number: int, engine: Engine, pool: Pool, episodes: Sequence[Episode], params, **options
  ) -> list[Trajectory]:
    """`run.play`, the play `number` of the stage, by a policy `params`, which the engine has."""
    # the episodes depend on the policy, and the policy's folder may be another one by now
    sums = [int(x) for x in jax.device_get(array_sums(params))]
    policy = hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16]
    finished = self._unfinished.round(number, episodes, policy)
    for t in finished.trajectories.values():
      options.get("on_episode", lambda _: None)(t)
    try:
      with self.run.notice.apart():
        return self.run.play(engine, pool, episodes, finished=finished, **options)
    except Preempted:
      self._place.mkdir(parents=True, exist_ok=True)
      for file, data in self._unfinished.to_files().items():
        (self._place / file).write_bytes(data)
      say(f"{self.stage}: stopped, {self._unfinished.count()} finished episodes are kept")
      raise

  def used(self, number: int) -> None:
    """What the plays up to this one gave is kept elsewhere."""
    self._unfinished.drop_before(number + 1)

  def done(self) -> None:
    """The stage is over, and its files go."""
    if is_writer() and self._place.exists():
      self._place.rmtree()
