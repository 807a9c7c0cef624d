"""The echo game for our environment loop: `peers.shared.Echo` as a benchmark, and its byte tokens as a tokenizer.

Both only rename: what is said and how it becomes tokens is in `peers.shared`, where the peers' drivers find it too.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.peers import shared
from envs.pool import Pool
from envs.protocol import Task
from seed_jax import decode, engine, rollout


class Game:
  """`shared.Echo` under gymnasium's calls; `turns` ends a game sooner or later than the peers' does."""

  def __init__(self):
    self.echo, self.turns, self.task = shared.Echo(0), shared.TURNS, ""

  def reset(self, *, seed=None, options=None):
    task = options["task"]
    self.echo, self.turns = shared.Echo(task["number"]), task["turns"]
    self.task = self.echo.reset()
    return self.task, {"task": self.task, "admissible": (), "won": False}

  def step(self, action):
    observation, reward, _ = self.echo.step(action)
    over = self.echo.turn >= self.turns
    return observation, reward, over, False, {"task": self.task, "admissible": (), "won": over}

  def close(self):
    pass


@dataclasses.dataclass(frozen=True)
class Echoes:
  """The benchmark. A window is laid out as the paper's: task, number of the step, the last pairs, the observation."""

  name: str = "echo"
  max_steps: int = 10_000

  def make(self) -> Game:
    return Game()

  def first_prompt(self, task, observation, admissible):
    return shared.user_turn(observation)

  def turn_prompt(self, observation, admissible):
    return shared.user_turn(observation)

  def window_prompt(self, task, history, step, observation, admissible):
    shown = lambda seen: "" if seen == task else seen  # noqa: E731
    past = "".join(shared.user_turn(shown(seen)) + said for seen, said in history)
    return f"\nU:{task} Step {step}." + past + shared.user_turn(shown(observation))

  def parse(self, response):
    return response, True


class Bytes:
  """`shared.encode` and `shared.decode` as a tokenizer without a chat template."""

  vocab_size, eos_id, pad_id, stop_ids = shared.VOCABULARY, shared.EOS, shared.PAD, (shared.EOS,)

  def encode(self, text):
    return shared.encode(text)

  def decode(self, ids):
    return shared.decode(ids)

  def first(self, user):
    return shared.encode(user)

  def following(self, user, *, ended=True):
    return shared.encode(user)


def episodes(turns) -> list[rollout.Episode]:
  """One game for each number of turns."""
  return [
    rollout.Episode(Task(f"echo/{i:05d}", "echo", "train", {"number": i, "turns": int(n)}), i)
    for i, n in enumerate(turns)
  ]


HISTORY = 5  # pairs in a window, as in the paper's ALFWorld prompts


def player(config, mesh, params, *, slots, environments, capacity, mode="transcript", **options):
  """(engine, play): `play(episodes, iteration, ...)` plays them and returns their trajectories."""
  sampler = engine.Engine(
    config,
    mesh,
    num_slots=slots,
    capacity=capacity,
    sampling=decode.Sampling(),
    stop_ids=(shared.EOS,),
    seed=0,
    **(dict(max_new=shared.NEW_TOKENS) | options),
  )
  sampler.set_params(params)
  setting = rollout.Setting(mode=mode, history=HISTORY, max_steps=10_000, max_prompt=capacity)
  prompter = rollout.Prompter(Echoes(), Bytes(), setting)
  pool = Pool(Echoes(), environments)

  def play(games, iteration=0, **watching):
    return rollout.play(sampler, pool, prompter, games, iteration=iteration, **watching)

  return sampler, play


def varied_turns(count: int, *, least: int, times: int, seed: int = 0) -> np.ndarray:
  """Numbers of turns between `least` and times * least, evenly spread, in random order."""
  return np.random.default_rng(seed).permutation(np.linspace(least, times * least, count).round().astype(int))
