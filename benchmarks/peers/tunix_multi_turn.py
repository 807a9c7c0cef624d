"""Games of echoes in google-tunix's agentic mode: its orchestrator and trajectory engine over its plain sampler."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time

from tunix.rl.agentic import utils
from tunix.rl.agentic.agents import model_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.agentic.pipeline import rollout_orchestrator

from benchmarks.peers import shared, tunix_policy


class Game(base_environment.BaseTaskEnv):
  """`shared.Echo` under tunix's calls."""

  def _initial_observation(self):
    self.echo = shared.Echo(self.task["number"])
    return self.echo.reset()

  def _step_impl(self, action):
    observation, reward, over = self.echo.step(action)
    return base_environment.EnvStepResult(observation=observation, reward=reward, done=over, info={})


def render(messages) -> str:
  """The conversation as text: what `echo.Echoes` and the byte tokens make of it on our side."""
  return "".join(
    shared.user_turn(m["content"]) if m["role"] == "user" else m["content"] for m in messages if m["role"] != "system"
  )


def main() -> None:
  flags = shared.flags(environments=shared.ENVIRONMENTS)
  sampled: list[int] = []

  def play(cluster) -> float:
    """Seconds of all games, as many at a time as there are environments."""

    def answer(messages, env=None, max_generation_steps=None):
      # the limit of tunix is what an episode has left; ours, and so this one, is that of a turn
      out = cluster.generate(prompts=[render(messages)], max_generation_steps=shared.NEW_TOKENS)
      sampled.append(len(out.tokens[0]))
      return out

    orchestrator = rollout_orchestrator.RolloutOrchestrator(
      rollout_sync_lock=utils.RolloutSyncLock(),
      engine_kwargs={"model_call": answer},
      max_concurrency=flags.environments,
    )
    pairs = [
      (
        model_agent.ModelAgent(system_prompt=""),
        Game({"number": i}, max_steps=shared.TURNS, group_id=i, pair_index=i),
      )
      for i in range(flags.environments)
    ]

    async def collect():
      loop = asyncio.get_running_loop()
      loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(flags.environments + 1))
      producer = asyncio.create_task(
        orchestrator.run_producers_from_stream(pairs, group_size=1, collect_mode="Trajectory")
      )
      await asyncio.sleep(0)
      done = 0
      async for batch in orchestrator.yield_batches(1):
        done += len(batch)
      await producer
      return done

    began = time.perf_counter()
    done = asyncio.run(collect())
    assert done == flags.environments, done
    return time.perf_counter() - began

  seconds, tokens, first = [], [], None
  with tunix_policy.one_device_mesh() as mesh:
    # prompts grow by powers of two from 64 to 512 tokens: tunix pads to those, so its early turns stay short
    cluster = tunix_policy.cluster(
      flags.size, mesh, prompt_length=64, cache=512 + shared.NEW_TOKENS, steps=1, reference=False
    )
    for _ in range(flags.steps + 1):
      before = sum(sampled)
      seconds.append(play(cluster))
      tokens.append(sum(sampled) - before)
      first = shared.since_start() if first is None else first
  shared.report(step=seconds[1:], tokens=tokens[1:], first_update=first)


if __name__ == "__main__":
  main()
