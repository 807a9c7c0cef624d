"""The environment loop: an environment pool on one side, the engine on the other, trajectories out.

Every episode goes its own pace: an environment that has answered gets its next turn while others still decode, an
episode that ends gives its place to the next one and is analysed at once. What is sampled depends on (seed, iteration,
task, member, turn, token) alone, never on slots or on the order in which environments answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence

from envs.pool import Pool, Result
from envs.protocol import Benchmark, Task
from seed_jax import hosts
from seed_jax.engine import Engine, Request
from seed_jax.skills import insert_skill
from seed_jax.text import Tokenizer, truncate_prompt
from seed_jax.trajectory import Trajectory, Turn, from_json, to_json

ACT, ANALYZE = 0, 1  # purposes, the last coordinate of a sampling key


@dataclasses.dataclass(frozen=True)
class Episode:
  """What to play: a task, the place in its group, and a skill that is shown to the policy ("" for the ordinary
  context), or a function of the trajectory, whose `task` and `family` are known when its first prompt is made.
  """

  task: Task
  group: int
  member: int = 0
  skill: str | Callable[[Trajectory], str] = ""

  def text(self, trajectory: Trajectory) -> str:
    """The skill that is shown."""
    return self.skill(trajectory) if callable(self.skill) else self.skill


@dataclasses.dataclass(frozen=True)
class Setting:
  """How to play."""

  mode: str = "transcript"  # or "window"
  history: int = 5  # pairs shown in window mode
  max_steps: int = 20
  max_prompt: int = 2048  # tokens of a prompt; longer ones lose their oldest history, never the task line
  skill_block: str | Callable[[str], str] | None = None  # how an inserted skill looks; None is skills.py's own
  prepare: Callable[[str], str] | None = None  # of a skill's text; None makes one line of it


class Prompter:
  """The prompts of one benchmark in one mode, as text and as tokens, with and without a skill."""

  def __init__(self, benchmark: Benchmark, tokenizer: Tokenizer, setting: Setting):
    self.benchmark, self.tokenizer, self.setting = benchmark, tokenizer, setting

  def text(self, trajectory: Trajectory, observation: str, admissible: Sequence[str]) -> str:
    """The user message of the next turn."""
    b, s, step = self.benchmark, self.setting, trajectory.length
    if s.mode == "window":
      past = [(t.observation, t.action) for t in trajectory.turns[-s.history :]] if s.history else []
      return b.window_prompt(trajectory.task, past, step, observation, admissible)
    return b.turn_prompt(observation, admissible) if step else b.first_prompt(trajectory.task, observation, admissible)

  def tokens(self, prompt: str, step: int, skill: str = "", *, ended: bool = True) -> list[int]:
    """Token ids of a user message; a skill goes in after the task line of a message that states it. `ended`: whether
    the response before it sampled its end of turn (a transcript must close the turn otherwise).
    """
    if step and self.setting.mode == "transcript":
      return self.tokenizer.following(prompt, ended=ended)
    if skill:
      block = {} if self.setting.skill_block is None else {"block": self.setting.skill_block}
      prompt = insert_skill(prompt, skill, prepare=self.setting.prepare, **block)
    return self.tokenizer.first(truncate_prompt(self.tokenizer, prompt, self.setting.max_prompt))

  def skill_tokens(self, trajectory: Trajectory, step: int) -> list[int] | None:
    """The prompt of a finished trajectory's turn with its own skill inserted; None where it has none."""
    return self.tokens(trajectory.turns[step].prompt, step, trajectory.skill) if trajectory.skill else None


@dataclasses.dataclass
class _Running:
  """One episode under way in an environment of the pool."""

  number: int  # in the list of episodes
  episode: Episode
  trajectory: Trajectory
  observation: str = ""
  admissible: tuple[str, ...] = ()
  prompt: str = ""
  ids: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Reading:
  """How finished episodes are read by the policy itself, while others are still played.

  prompt(trajectory) gives the request's token ids; its answer, decoded, becomes `trajectory.analysis`.
  """

  prompt: Callable[[Trajectory], Sequence[int]]
  max_new: int
  temperature: float = 0.0


@dataclasses.dataclass
class Finished:
  """The episodes of a `play` that have ended, by their place in the list: what a run that is stopped keeps."""

  trajectories: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
  read: dict[int, int] = dataclasses.field(default_factory=dict)  # tokens sampled for the analysis, where it is there

  @contextlib.contextmanager
  def part(self, places: range) -> Iterator[Finished]:
    """Those of a range of places, counted from its start. What is added to them is here when the context ends."""
    ours = (self.trajectories, self.read)
    part = Finished(*({place - places.start: d[place] for place in places if place in d} for d in ours))
    try:
      yield part
    finally:
      for mine, theirs in zip(ours, (part.trajectories, part.read), strict=True):
        mine.update({places.start + place: value for place, value in theirs.items()})


def play(
  engine: Engine,
  pool: Pool,
  prompter: Prompter,
  episodes: Sequence[Episode],
  *,
  iteration: int = 0,
  reading: Reading | None = None,
  temperature: float | None = None,
  answer_after: int = 0,
  on_episode: Callable[[Trajectory], None] | None = None,
  on_idle: Callable[[], bool] | None = None,
  between: Callable[[], None] | None = None,
  finished: Finished | None = None,
) -> list[Trajectory]:
  """Plays every episode once with the engine's parameters; trajectories in the order of `episodes`.

  An episode whose environment has answered gets its next turn while others still decode, and one that has ended is
  analysed at once (`reading`), in the slots that the last long episodes leave idle. An environment that fails ends its
  own episode, with `error` set; the others go on. `temperature` of the actions: the engine's by default.

  answer_after: an environment's answer is taken that many engine steps after its action, and waited for then: 0 waits
  at once, 1 lets environments work while the engine does. Either way the batches do not depend on how fast they are,
  and a run repeats bit for bit. -1 takes answers as they come: no waiting, the same samples but for the last rounding.
  on_idle is called while the engine has nothing to do but environments are at work; it returns whether it did some
  work of its own.
  between is called before every engine step and may raise. `finished` takes up every episode as it ends, and those that
  it holds at the start are not played again, only read where they have not been: so a play that `between` stopped goes
  on. Samples stay what they are; their log-probabilities may differ in the last rounding, for the batches are others.
  """
  options = (iteration, reading, temperature, answer_after, on_episode, on_idle, between, finished or Finished())
  return _Player(engine, pool, prompter, episodes, *options).play()


def of_all_hosts(mine: list[Trajectory]) -> list[Trajectory]:
  """The episodes of all hosts, each of which gives those of its share, in the order of the list that was shared.

  Every host has all of them afterwards, so that advantages, filters, packing and mini-batches are those of one process.
  That is little: an iteration of 128 ALFWorld episodes is some 10 MB of compressed text and ids.
  """
  if not hosts.several():
    return mine
  found = hosts.exchange("the end of its episodes", "\n".join(map(to_json, mine)).encode())
  others = [mine if host == hosts.index() else map(from_json, text.splitlines()) for host, text in enumerate(found)]
  return [trajectory for part in others for trajectory in part]


class _Player:
  """The state of one `play`."""

  def __init__(
    self,
    engine,
    pool,
    prompter,
    episodes,
    iteration,
    reading,
    temperature,
    answer_after,
    on_episode,
    on_idle,
    between,
    finished,
  ):
    self.engine, self.pool, self.prompter, self.episodes = engine, pool, prompter, episodes
    self.iteration, self.reading, self.answer_after = iteration, reading, answer_after
    self.temperature = temperature
    self.on_episode, self.on_idle, self.between = on_episode, on_idle, between
    self.finished, self.done = finished, finished.trajectories
    self.waiting = [number for number in range(len(episodes)) if number not in self.done][::-1]
    self.free = list(range(pool.num_envs))[::-1]
    self.running: dict[int, _Running] = {}  # environment -> episode
    self.due: dict[int, int] = {}  # environment at work -> engine step before which its answer is taken
    self.arrived: dict[int, Result] = {}
    self.clock = 0  # engine steps
    engine.reset()
    for number in sorted(self.done.keys() - finished.read.keys()):
      self._read(number)

  def play(self) -> list[Trajectory]:
    while self.waiting or self.running or self.engine.busy:
      if self.between:
        self.between()
      self._start_episodes()
      for environment, result in self._answers():
        self._answered(environment, result)
      for conversation, completion in self.engine.step():
        kind, number = conversation
        (self._responded if kind == ACT else self._analysed)(number, completion)
      self.clock += 1
    return [self.done[i] for i in range(len(self.episodes))]

  def _start_episodes(self):
    while self.waiting and self.free:
      environment, number = self.free.pop(), self.waiting.pop()
      e = self.episodes[number]
      blank = Trajectory(
        e.task.id,
        e.task.family,
        "",
        self.prompter.setting.mode,
        e.group,
        e.member,
        [],
        won=False,
        episode_return=0.0,
        truncated=False,
      )
      self.running[environment] = _Running(number, e, blank)
      self.pool.reset(environment, dict(e.task.payload))
      self.due[environment] = self.clock + max(self.answer_after, 0)

  def _answers(self):
    """Answers of environments that are to be acted on now, by environment."""
    if self.answer_after < 0:
      block = bool(self.due) and not self.engine.can_work and not self._idle_work()
      self.arrived.update(self.pool.ready(None if block else 0.0) if self.due else ())
      chosen = list(self.arrived)
    else:
      if not self.engine.can_work and self.due:
        self.clock = max(self.clock, min(self.due.values()))
      chosen = [e for e, step in self.due.items() if step <= self.clock]
      while any(e not in self.arrived for e in chosen):
        self.arrived.update(self.pool.ready(0.0 if self._idle_work() else None))
    for environment in chosen:
      del self.due[environment]
    return sorted((e, self.arrived.pop(e)) for e in chosen)

  def _idle_work(self):
    return self.on_idle is not None and self.on_idle()

  def _answered(self, environment, result):
    """An environment has answered: the episode ends, or its next turn is asked for."""
    run = self.running[environment]
    trajectory = run.trajectory
    if result.error:
      self._finish(environment, error=result.error)
      return
    trajectory.task = result.info.get("task", trajectory.task)
    if trajectory.turns:
      turn = trajectory.turns[-1]
      turn.reward = float(result.reward)
      turn.valid = turn.valid and bool(result.info.get("valid", True))
      trajectory.episode_return += float(result.reward)
    trajectory.won = bool(result.info.get("won", False))
    out_of_steps = trajectory.length >= self.prompter.setting.max_steps
    if result.terminated or (result.truncated and trajectory.turns) or out_of_steps:
      self._finish(environment, truncated=not result.terminated)
      return
    run.observation, run.admissible = result.observation, tuple(result.info.get("admissible", ()))
    step, transcript = trajectory.length, self.prompter.setting.mode == "transcript"
    run.prompt = self.prompter.text(trajectory, run.observation, run.admissible)
    ended = not step or int(trajectory.turns[-1].response_ids[-1]) in self.prompter.tokenizer.stop_ids
    run.ids = self.prompter.tokens(run.prompt, step, run.episode.text(run.trajectory), ended=ended)
    name, fresh = (ACT, environment), not step or not transcript
    if self.engine.room(name, fresh=fresh) < len(run.ids) + 1:
      self._finish(environment, truncated=True)  # the conversation has outgrown its slot: it ends here, unsuccessful
      return
    coordinates = (self.iteration, task_number(run.episode.task.id), run.episode.member, step, ACT)
    self.engine.submit(Request(name, run.ids, coordinates, fresh=fresh, keep=transcript, temperature=self.temperature))

  def _responded(self, environment, completion):
    """The policy has acted: the environment takes its step."""
    run = self.running[environment]
    response = self.prompter.tokenizer.decode(completion.tokens)
    action, valid = self.prompter.benchmark.parse(response)
    run.trajectory.turns.append(
      Turn(
        run.observation,
        run.admissible,
        run.prompt,
        run.ids,
        completion.tokens,
        completion.logprobs,
        response,
        action,
        valid,
        0.0,
      )
    )
    self.pool.step(environment, action)
    self.due[environment] = self.clock + 1 + max(self.answer_after, 0)

  def _finish(self, environment, **changes):
    run = self.running.pop(environment)
    for name, value in changes.items():
      setattr(run.trajectory, name, value)
    self.done[run.number] = run.trajectory
    self.engine.release((ACT, environment))
    self.free.append(environment)
    if self.on_episode:
      self.on_episode(run.trajectory)
    self._read(run.number)

  def _read(self, number):
    """Asks for the analysis of an episode that has ended."""
    trajectory = self.done[number]
    if self.reading and trajectory.turns and not trajectory.error:
      prompt = self.reading.prompt(trajectory)
      if len(prompt) < self.engine.capacity:
        self.engine.submit(_reading_request(number, trajectory, prompt, self.iteration, self.reading))

  def _analysed(self, number, completion):
    self.engine.release((ANALYZE, number))
    self.done[number].analysis = self.prompter.tokenizer.decode(completion.tokens)
    self.finished.read[number] = len(completion.tokens)


def analyze_episodes(
  engine: Engine,
  tokenizer: Tokenizer,
  trajectories: Sequence[Trajectory],
  reading: Reading,
  *,
  iteration: int,
  between: Callable[[], None] | None = None,
) -> None:
  """Analyses of episodes that were played before: sets `analysis` of each, "" where its request does not fit. `between`
  is called before every engine step and may raise.
  """
  engine.reset()
  for number, trajectory in enumerate(trajectories):
    trajectory.analysis = ""
    prompt = reading.prompt(trajectory)
    if len(prompt) < engine.capacity:
      engine.submit(_reading_request(number, trajectory, prompt, iteration, reading))
  while engine.busy:
    if between:
      between()
    for (_, number), completion in engine.step():
      engine.release((ANALYZE, number))
      trajectories[number].analysis = tokenizer.decode(completion.tokens)


def _reading_request(number, trajectory, prompt, iteration, reading) -> Request:
  """The request that makes the policy read a finished episode."""
  coordinates = (iteration, task_number(trajectory.task_id), trajectory.member, 0, ANALYZE)
  return Request(
    (ANALYZE, number),
    prompt,
    coordinates,
    keep=False,
    max_new=reading.max_new,
    temperature=reading.temperature,
    stop_strings=False,
  )


def task_number(task_id: str) -> int:
  """A 31-bit number of a task's name, for sampling keys (the same on every machine)."""
  return zlib.crc32(task_id.encode()) & 0x7FFFFFFF
