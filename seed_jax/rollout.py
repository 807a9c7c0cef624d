"""The environment loop: an environment pool on one side, the engine on the other, trajectories out.

All running episodes take one turn together; an episode that ends gives its slot to the next one at once. What is
sampled depends on (seed, iteration, task, member, turn, token) alone, never on slots or on the order in which
environments answer.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

from envs.pool import Pool
from envs.protocol import Benchmark, Task
from seed_jax.engine import Completion, Engine, Request
from seed_jax.skills import insert_skill
from seed_jax.text import Tokenizer, truncate_prompt
from seed_jax.trajectory import Trajectory, Turn

ACT, ANALYZE = 0, 1  # purposes, the last coordinate of a sampling key


@dataclasses.dataclass(frozen=True)
class Episode:
  """What to play: a task, the place in its group, and a skill that is shown to the policy ("" for the ordinary
  context).
  """

  task: Task
  group: int
  member: int = 0
  skill: str = ""


@dataclasses.dataclass(frozen=True)
class Setting:
  """How to play."""

  mode: str = "transcript"  # or "window"
  history: int = 5  # pairs shown in window mode
  max_steps: int = 20
  max_prompt: int = 2048  # tokens of a prompt; longer ones lose their oldest history, never the task line
  skill_block: str | Callable[[str], str] | None = None  # how an inserted skill looks; None is skills.py's own


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
      prompt = insert_skill(prompt, skill, **block)
    return self.tokenizer.first(truncate_prompt(self.tokenizer, prompt, self.setting.max_prompt))

  def skill_tokens(self, trajectory: Trajectory, step: int) -> list[int] | None:
    """The prompt of a finished trajectory's turn with its own skill inserted; None where it has none."""
    return self.tokens(trajectory.turns[step].prompt, step, trajectory.skill) if trajectory.skill else None


def play(
  engine: Engine,
  pool: Pool,
  prompter: Prompter,
  episodes: Sequence[Episode],
  *,
  iteration: int = 0,
  on_episode: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
  """Plays every episode once with the engine's parameters; trajectories in the order of `episodes`.

  An environment that fails ends its own episode, with `error` set; the others go on.
  """
  done: dict[int, Trajectory] = {}
  waiting = list(range(len(episodes)))[::-1]
  running: dict[int, int] = {}  # slot -> episode
  free = list(range(min(engine.num_slots, pool.num_envs)))[::-1]
  current: dict[int, Trajectory] = {}
  next_observation: dict[int, tuple[str, tuple[str, ...]]] = {}

  def finish(slot, **changes):
    trajectory = current.pop(slot)
    for name, value in changes.items():
      setattr(trajectory, name, value)
    done[running.pop(slot)] = trajectory
    engine.release(slot)
    free.append(slot)
    if on_episode:
      on_episode(trajectory)

  while waiting or running:
    while waiting and free:
      slot, number = free.pop(), waiting.pop()
      e = episodes[number]
      running[slot] = number
      current[slot] = Trajectory(
        e.task.id,
        e.task.family,
        "",
        prompter.setting.mode,
        e.group,
        e.member,
        [],
        won=False,
        episode_return=0.0,
        truncated=False,
      )
      next_observation.pop(slot, None)
      pool.reset(slot, dict(e.task.payload))
    for slot, result in _gather(pool):
      if result.error:
        finish(slot, error=result.error)
        continue
      trajectory = current[slot]
      trajectory.task = result.info.get("task", trajectory.task)
      if trajectory.turns:
        turn = trajectory.turns[-1]
        turn.reward = float(result.reward)
        turn.valid = turn.valid and bool(result.info.get("valid", True))
        trajectory.episode_return += float(result.reward)
      trajectory.won = bool(result.info.get("won", False))
      out_of_steps = trajectory.length >= prompter.setting.max_steps
      if result.terminated or (result.truncated and trajectory.turns) or out_of_steps:
        finish(slot, truncated=not result.terminated)
      else:
        next_observation[slot] = (result.observation, tuple(result.info.get("admissible", ())))
    if running:
      _turn(engine, pool, prompter, episodes, running, current, next_observation, iteration, finish)
  return [done[i] for i in range(len(episodes))]


def _turn(engine, pool, prompter, episodes, running, current, next_observation, iteration, finish):
  requests, prompts = [], []
  for slot in sorted(running):
    trajectory, episode = current[slot], episodes[running[slot]]
    step = trajectory.length
    prompt = prompter.text(trajectory, *next_observation[slot])
    ended = not step or int(trajectory.turns[-1].response_ids[-1]) in prompter.tokenizer.stop_ids
    ids = prompter.tokens(prompt, step, episode.skill, ended=ended)
    if engine.room(slot, fresh=_fresh(prompter, step)) < len(ids) + 1:
      finish(slot, truncated=True)  # the conversation has outgrown its slot: it ends here, unsuccessful
      continue
    coordinates = (iteration, task_number(episode.task.id), episode.member, step, ACT)
    requests.append(Request(slot, ids, coordinates, fresh=_fresh(prompter, step)))
    prompts.append((prompt, ids))
  for request, (prompt, ids), completion in zip(requests, prompts, engine.turn(requests), strict=True):
    trajectory = current[request.slot]
    response = prompter.tokenizer.decode(completion.tokens)
    action, valid = prompter.benchmark.parse(response)
    observation, admissible = next_observation[request.slot]
    trajectory.turns.append(
      Turn(observation, admissible, prompt, ids, completion.tokens, completion.logprobs, response, action, valid, 0.0)
    )
    pool.step(request.slot, action)


def _gather(pool):
  """Every pending result, by slot, so that a slow environment changes nothing but the time."""
  results = []
  while some := pool.ready():
    results += some
  return sorted(results, key=lambda item: item[0])


def _fresh(prompter, step):
  return step == 0 or prompter.setting.mode == "window"


def task_number(task_id: str) -> int:
  """A 31-bit number of a task's name, for sampling keys (the same on every machine)."""
  return zlib.crc32(task_id.encode()) & 0x7FFFFFFF


def complete(
  engine: Engine, prompts: Sequence[Sequence[int]], coordinates: Sequence[tuple[int, ...]]
) -> list[Completion | None]:
  """One response for each single-turn prompt, as many at a time as there are slots; None where the prompt is too long
  for a slot.

  Longest prompts first, so that a batch wastes little padding.
  """
  out: list[Completion | None] = [None] * len(prompts)
  order = sorted((i for i in range(len(prompts)) if len(prompts[i]) < engine.capacity), key=lambda i: -len(prompts[i]))
  for start in range(0, len(order), engine.num_slots):
    some = order[start : start + engine.num_slots]
    requests = [Request(slot, prompts[i], coordinates[i]) for slot, i in enumerate(some)]
    for i, completion in zip(some, engine.turn(requests), strict=True):
      out[i] = completion
    for request in requests:
      engine.release(request.slot)
  return out
