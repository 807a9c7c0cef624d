"""The environment loop: token in, token out; slots that change nothing; what ends an episode; where a skill appears."""

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

import envs
from envs.pool import Pool
from envs.protocol import Task
from seed_jax import decode, sharding, text
from seed_jax.engine import Engine
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig
from seed_jax.requests import Completion
from seed_jax.rollout import (
  ACT,
  ANALYZE,
  Episode,
  Finished,
  Prompter,
  Reading,
  Setting,
  analyze_episodes,
  play,
  task_number,
)

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fake_envs  # noqa: E402

HOUSEHOLD = envs.benchmark("household")


class Adding:
  """The benchmark of `fake_envs.Fake`: add up to ten."""

  def first_prompt(self, task, observation, admissible=()):
    return f"Your task is to: {task}.\n{observation}"

  def turn_prompt(self, observation, admissible=()):
    return observation

  def window_prompt(self, task, history, step, observation, admissible):
    past = [f"{before} > {action}" for before, action in history]
    return "\n".join([f"Your task is to: {task}.", *past, observation])

  def parse(self, response):
    return response.strip(), response.strip().isdigit()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  lines = ["start 0 total 1 2 3 4 5 6 7 8 9", "Your task is to: add.", "crash raise Skill go on"]
  for task in HOUSEHOLD.tasks("train", 12):
    env = HOUSEHOLD.make()
    observation, info = env.reset(options={"task": task.payload})
    lines += [observation, *info["admissible"], env.step(info["admissible"][0])[0], "Nothing happens."]
  folder = tmp_path_factory.mktemp("tokenizer")
  return text.train_sentencepiece(lines * 3, str(folder), vocab_size=260, byte_fallback=False)


class ScriptedEngine:
  """Answers with the text that `script(coordinates)` gives, one request a step and slot, and keeps what it was fed."""

  def __init__(self, tokenizer, script, *, num_slots=8, capacity=10_000, ends=True):
    self.tokenizer, self.script, self.num_slots, self.capacity, self.ends = tokenizer, script, num_slots, capacity, ends
    self.requests, self.fed, self.conversations, self.queue = [], {}, {}, []

  def reset(self):
    self.fed, self.queue = {}, []

  @property
  def busy(self):
    return bool(self.queue)

  @property
  def can_work(self):
    return any(not r.fresh for r in self.queue) or bool(self.queue and len(self.fed) < self.num_slots)

  def room(self, name, *, fresh):
    return self.capacity - (0 if fresh else len(self.fed[name]))

  def submit(self, request):
    self.queue.append(request)

  def release(self, name):
    self.fed.pop(name, None)

  def step(self):
    waiting, self.queue, out = self.queue, [], []
    for request in waiting:
      if request.conversation in self.fed or len(self.fed) < self.num_slots:
        out.append((request.conversation, self._answer(request)))
      else:
        self.queue.append(request)
    return out

  def _answer(self, request):
    self.requests.append(request)
    answer = self.tokenizer.encode(self.script(request.coordinates)) + [self.tokenizer.eos_id] * self.ends
    before = [] if request.fresh else self.fed[request.conversation]
    fed = [*before, *request.tokens, *answer]
    if request.keep:
      self.fed[request.conversation] = fed
    self.conversations.setdefault(request.coordinates[:3], []).append(fed)
    return Completion(np.asarray(answer, np.int32), np.full(len(answer), -0.25, np.float32), self.ends)


def numbers(count):
  return [Episode(Task(f"add/{i}", "add", "train", {"start": i % 3}), i // 2, i % 2) for i in range(count)]


def scripted(
  tokenizer, script, episodes, *, setting=None, slots=8, envs_count=None, workers=0, play_options=None, **options
):
  engine = ScriptedEngine(tokenizer, script, num_slots=slots, **options)
  prompter = Prompter(Adding(), tokenizer, setting or Setting(max_steps=6))
  with Pool(fake_envs.Fake, envs_count or slots, workers) as pool:
    return play(engine, pool, prompter, episodes, iteration=4, **play_options or {}), engine


def by_episode(coordinates):
  """A script that differs between episodes: the member's number and the turn decide."""
  _, task, member, turn, _ = coordinates
  return str(1 + (task + member + turn) % 4)


def flat(trajectory):
  return [int(i) for t in trajectory.turns for part in (t.prompt_ids, t.response_ids) for i in part]


def test_a_transcript_holds_exactly_what_the_engine_was_fed_and_gave(tokenizer):
  episodes = numbers(3)
  out, engine = scripted(tokenizer, by_episode, episodes)
  for trajectory, episode in zip(out, episodes, strict=True):
    key = (4, task_number(episode.task.id), episode.member)
    assert flat(trajectory) == engine.conversations[key][-1]
    assert trajectory.turns[0].prompt == f"Your task is to: add.\nstart {episode.task.payload['start']}"
    assert trajectory.turns[0].prompt_ids.tolist() == tokenizer.first(trajectory.turns[0].prompt)
    for turn in trajectory.turns[1:]:
      assert turn.prompt.startswith("total ") and turn.prompt_ids.tolist() == tokenizer.following(turn.prompt)
    assert all(turn.logprobs.tolist() == [-0.25] * len(turn.response_ids) for turn in trajectory.turns)
    assert (trajectory.group, trajectory.member) == (episode.group, episode.member)
  turns = [(r.coordinates, r.fresh) for r in engine.requests if r.coordinates[1] == task_number("add/0")]
  assert turns == [((4, task_number("add/0"), 0, i, ACT), i == 0) for i in range(len(turns))]


def test_a_win_ends_the_episode_with_its_reward(tokenizer):
  (won, lost), _ = scripted(tokenizer, lambda c: "5" if c[2] == 0 else "1", numbers(2), setting=Setting(max_steps=3))
  assert won.won and not won.truncated and won.episode_return == 1.0 and [t.reward for t in won.turns] == [0.0, 1.0]
  assert won.task == "add" and won.family == "add" and won.task_id == "add/0"
  assert [t.action for t in won.turns] == ["5", "5"] and all(t.valid for t in won.turns)
  assert won.turns[1].observation == "total 5" and won.turns[1].admissible == ("1", "2")
  assert not lost.won and lost.truncated and lost.length == 3 and lost.episode_return == 0.0


@pytest.mark.parametrize("slots, pool", [(1, 1), (2, 2), (3, 5), (8, 3)])
def test_more_episodes_than_slots_give_the_same_episodes_in_order(tokenizer, slots, pool):
  expected, _ = scripted(tokenizer, by_episode, numbers(7))
  out, engine = scripted(tokenizer, by_episode, numbers(7), slots=slots, envs_count=pool)
  assert [t.task_id for t in out] == [f"add/{i}" for i in range(7)] and out == expected
  assert max(r.conversation[1] for r in engine.requests) < pool
  assert not engine.fed  # every slot was given back


def test_the_first_turns_run_together_and_a_free_slot_is_refilled_at_once(tokenizer):
  script = lambda c: "9" if c[2] == 0 else "1"  # noqa: E731 - even episodes win early
  _, engine = scripted(tokenizer, script, numbers(4), slots=2, setting=Setting(max_steps=4))
  names = {task_number(f"add/{i}"): i for i in range(4)}
  order = [(names[r.coordinates[1]], r.coordinates[3]) for r in engine.requests]
  assert order[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]
  assert (2, 0) in order[4:6]  # episode 0 has won after two turns; episode 2 takes its slot while 1 goes on


def test_window_mode_asks_anew_every_turn_with_the_last_pairs(tokenizer):
  setting = Setting(mode="window", history=2, max_steps=4)
  (out,), engine = scripted(tokenizer, lambda c: "2", numbers(1), setting=setting)
  assert [(r.fresh, r.keep) for r in engine.requests] == [(True, False)] * 4
  for turn, request in zip(out.turns, engine.requests, strict=True):
    assert turn.prompt_ids.tolist() == list(request.tokens) == tokenizer.first(turn.prompt)
  task = "Your task is to: add."
  assert out.turns[1].prompt == f"{task}\nstart 0 > 2\ntotal 2"
  assert out.turns[3].prompt == f"{task}\ntotal 2 > 2\ntotal 4 > 2\ntotal 6"  # the oldest pair has left the window
  none = Setting(mode="window", history=0, max_steps=2)
  (out,), _ = scripted(tokenizer, lambda c: "2", numbers(1), setting=none)
  assert out.turns[1].prompt == f"{task}\ntotal 2"


def test_an_environment_that_fails_ends_its_own_episode_alone(tokenizer):
  episodes = numbers(3) + [Episode(Task("bad", "add", "train", {"do": "raise"}), 9)]
  script = lambda c: "raise" if c[1] == task_number("add/1") and c[3] == 1 else "5"  # noqa: E731
  out, engine = scripted(tokenizer, script, episodes, slots=2)
  assert [t.won for t in out] == [True, False, True, False]
  assert "no such number" in out[1].error and out[1].length == 2 and out[1].outcome == "unknown"
  assert "no such number" in out[3].error and out[3].length == 0
  assert not out[0].error and not out[2].error and not engine.fed


def test_a_transcript_that_outgrows_its_slot_ends_there(tokenizer):
  long, _ = scripted(tokenizer, lambda c: "1", numbers(1))
  (whole,) = long
  up_to = len([i for t in whole.turns[:3] for i in (*t.prompt_ids, *t.response_ids)])
  fits = up_to + len(whole.turns[3].prompt_ids)  # the fourth prompt, without room for one token of an answer
  (out,), engine = scripted(tokenizer, lambda c: "1", numbers(1), capacity=fits)
  assert out.length == 3 and out.truncated and not out.won and not out.error and not engine.fed
  assert out.turns == whole.turns[:3]
  (out,), _ = scripted(tokenizer, lambda c: "1", numbers(1), capacity=fits + 1)
  assert out.length == 4


def test_a_response_that_was_cut_off_is_closed_before_the_next_message(tokenizer):
  (out,), _ = scripted(tokenizer, lambda c: "2", numbers(1), ends=False, setting=Setting(max_steps=3))
  for turn in out.turns[1:]:
    assert turn.prompt_ids.tolist() == [tokenizer.eos_id, *tokenizer.first(turn.prompt)]


@pytest.mark.parametrize("mode", ["transcript", "window"])
def test_a_skill_is_shown_after_the_task_line_of_messages_that_state_it(tokenizer, mode):
  episodes = [dataclasses.replace(e, skill="go on" if e.member else "") for e in numbers(2)]
  block = lambda skill: f"Skill: [{skill}]"  # noqa: E731
  setting = Setting(mode=mode, max_steps=3, skill_block=block)
  (plain, shown), engine = scripted(tokenizer, lambda c: "1", episodes, setting=setting)
  assert "Skill" not in "".join(
    t.prompt for t in plain.turns + shown.turns
  )  # prompts are kept as the benchmark made them
  for step, turn in enumerate(shown.turns):
    if step == 0 or mode == "window":
      lines = turn.prompt.split("\n")
      assert turn.prompt_ids.tolist() == tokenizer.first("\n".join([lines[0], "Skill: [go on]", *lines[1:]]))
    else:
      assert turn.prompt_ids.tolist() == tokenizer.following(turn.prompt)
  prompter = Prompter(Adding(), tokenizer, setting)
  plain.skill = "go on"  # now known in hindsight: the skill context of each turn that states the task
  assert prompter.skill_tokens(plain, 0)[1:3] == tokenizer.first(plain.turns[0].prompt)[1:3]
  assert tokenizer.decode(prompter.skill_tokens(plain, 0)) == "Your task is to: add.\nSkill: [go on]\nstart 0"
  plain.skill = ""
  assert prompter.skill_tokens(plain, 0) is None


@pytest.mark.parametrize("mode", ["transcript", "window"])
def test_a_skill_may_be_a_function_of_the_task(tokenizer, mode):
  """As a library is asked: task and family are known before the first prompt; the same text as one written out."""
  asked = []

  def skill(trajectory):
    asked.append((trajectory.task_id, trajectory.task, trajectory.family, trajectory.length))
    return "go on" if trajectory.task_id == "add/1" else ""

  setting = Setting(mode=mode, max_steps=3)
  by_function = [dataclasses.replace(e, skill=skill) for e in numbers(3)]
  written_out = [dataclasses.replace(e, skill="go on" if e.task.id == "add/1" else "") for e in numbers(3)]
  out, _ = scripted(tokenizer, lambda c: "1", by_function, setting=setting)
  expected, _ = scripted(tokenizer, lambda c: "1", written_out, setting=setting)
  assert out == expected and [t.skill for t in out] == [""] * 3  # what is shown is no hindsight skill
  assert out[1].turns[0].prompt_ids.tolist() != tokenizer.first(out[1].turns[0].prompt)
  assert {(f"add/{i}", "add", "add", 0) for i in range(3)} <= set(asked)
  assert Episode(Task("a", "add", "train", {}), 0).text(out[0]) == ""


def test_episodes_are_handed_on_as_they_end(tokenizer):
  ended = []
  engine = ScriptedEngine(tokenizer, lambda c: "9" if c[1] == task_number("add/1") else "1", num_slots=3)
  with Pool(fake_envs.Fake, 3, 0) as pool:
    prompter = Prompter(Adding(), tokenizer, Setting(max_steps=5))
    play(engine, pool, prompter, numbers(3), on_episode=lambda t: ended.append((t.task_id, t.length)))
  assert ended == [("add/1", 1), ("add/0", 5), ("add/2", 5)]


# ---- the real engine on the real environment


@pytest.fixture(scope="module")
def policy(tokenizer):
  vocab = -(-tokenizer.vocab_size // 8) * 8
  config = ModelConfig(
    "Qwen3ForCausalLM", vocab, 32, 1, 2, 1, 16, 64, qk_norm=True, num_valid_tokens=tokenizer.vocab_size
  )
  params = decoder.init(jax.random.key(5), config)
  return config, jax.tree.map(lambda x: x * 2 if x.ndim > 2 else x, params)


def household(tokenizer, policy, episodes, *, mode, slots=4):
  config, params = policy
  mesh = sharding.make_mesh()
  engine = Engine(
    config,
    mesh,
    num_slots=slots,
    capacity=256,
    max_new=5,
    sampling=decode.Sampling(0.9),
    stop_ids=tokenizer.stop_ids,
    seed=3,
    smallest=4,
    prefill_buckets=(16,),
  )
  engine.set_params(sharding.put_params(params, mesh))
  setting = Setting(mode=mode, history=1, max_steps=3, max_prompt=120, skill_block=HOUSEHOLD.skill_block)
  with Pool(HOUSEHOLD, slots, 0) as pool:
    return play(engine, pool, Prompter(HOUSEHOLD, tokenizer, setting), episodes, iteration=1)


@pytest.mark.parametrize("mode", ["transcript", "window"])
def test_sampled_logprobs_are_those_of_the_kept_ids(tokenizer, policy, mode):
  """Token in, token out: scoring the ids of a trajectory gives the log-probabilities that its sampler reported."""
  config, params = policy
  tasks = HOUSEHOLD.tasks("train", 3)
  out = household(tokenizer, policy, [Episode(task, i) for i, task in enumerate(tasks)], mode=mode)
  for trajectory in out:
    assert trajectory.length == 3
    context = []
    for turn in trajectory.turns:
      context = [*(context if mode == "transcript" else []), *turn.prompt_ids, *turn.response_ids]
      padded = np.zeros((1, 192), np.int32)
      padded[0, : len(context)] = context
      logits = np.asarray(decoder.logits(params, padded, config))[0]
      at = np.arange(len(context) - len(turn.response_ids), len(context)) - 1
      expected = np.asarray(jax.nn.log_softmax(logits[at] / 0.9))[np.arange(len(at)), turn.response_ids]
      np.testing.assert_allclose(turn.logprobs, expected, atol=2e-5)
      assert turn.response == tokenizer.decode(turn.response_ids) and turn.action == HOUSEHOLD.parse(turn.response)[0]
      assert not turn.valid  # an untrained policy babbles


def test_the_number_of_slots_changes_no_token(tokenizer, policy):
  episodes = [
    Episode(task, i // 2, i % 2) for i, task in enumerate(t for t in HOUSEHOLD.tasks("train", 3) for _ in "ab")
  ]
  few, many = (household(tokenizer, policy, episodes, mode="transcript", slots=slots) for slots in (4, 8))
  for a, b in zip(few, many, strict=True):
    assert [t.response_ids.tolist() for t in a.turns] == [t.response_ids.tolist() for t in b.turns]
    for one, two in zip(a.turns, b.turns, strict=True):
      np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
  assert few[0].turns[0].response_ids.tolist() != few[1].turns[0].response_ids.tolist()  # two members, two samples


# ---- analyses


def test_an_episode_is_analysed_as_soon_as_it_has_ended(tokenizer):
  script = lambda c: "go on" if c[4] == ANALYZE else "9" if c[1] == task_number("add/1") else "1"  # noqa: E731
  reading = Reading(lambda t: tokenizer.first(f"total {t.length}"), max_new=7)
  out, engine = scripted(tokenizer, script, numbers(3), setting=Setting(max_steps=4), play_options={"reading": reading})
  assert [t.analysis for t in out] == ["go on"] * 3
  asked = [(r.coordinates[1] == task_number("add/1"), r.coordinates[3:]) for r in engine.requests]
  early = asked.index((True, (0, ANALYZE)))
  assert asked.index((False, (2, ACT))) > early  # the others were still being played
  request = engine.requests[early]
  assert request.fresh and not request.keep and (request.max_new, request.temperature) == (7, 0.0)
  assert list(request.tokens) == tokenizer.first("total 1") and not request.stop_strings


def test_no_analysis_of_what_broke_off_or_does_not_fit(tokenizer):
  episodes = [*numbers(1), Episode(Task("bad", "add", "train", {"do": "raise"}), 9)]
  reading = Reading(lambda t: [3] * 10_000, max_new=7)
  out, engine = scripted(tokenizer, lambda c: "9", episodes, play_options={"reading": reading})
  assert [t.analysis for t in out] == ["", ""] and all(r.coordinates[4] == ACT for r in engine.requests)


def test_analyze_episodes_reads_what_was_played_before(tokenizer):
  episodes, _ = scripted(tokenizer, lambda c: "9", numbers(4))
  script = lambda c: str(c[2] + 3)  # noqa: E731
  engine = ScriptedEngine(tokenizer, script, num_slots=2, capacity=6)
  lengths = iter((2, 6, 5, 1))
  analyze_episodes(engine, tokenizer, episodes, Reading(lambda t: [3] * next(lengths), 4), iteration=7)
  assert [t.analysis for t in episodes] == ["3", "", "3", "4"]  # the second request leaves no room for an answer
  assert {r.coordinates[0] for r in engine.requests} == {7} and not engine.busy
  analyze_episodes(engine, tokenizer, [], Reading(len, 4), iteration=0)


# ---- when answers are taken


@pytest.mark.parametrize("answer_after", [0, 1, 3])
def test_a_run_does_not_depend_on_how_fast_environments_answer(tokenizer, answer_after):
  def order(workers):
    out, engine = scripted(
      tokenizer, by_episode, numbers(6), slots=3, workers=workers, play_options={"answer_after": answer_after}
    )
    return [t.turns for t in out], [(r.coordinates, list(r.tokens)) for r in engine.requests]

  assert order(0) == order(2)  # the order in which the engine is asked, too


@pytest.mark.parametrize("workers, slots", [(0, 3), (2, 3), (2, 1)])
def test_answers_as_they_come_give_the_same_episodes(tokenizer, workers, slots):
  expected, _ = scripted(tokenizer, by_episode, numbers(6))
  out, _ = scripted(
    tokenizer, by_episode, numbers(6), slots=slots, envs_count=4, workers=workers, play_options={"answer_after": -1}
  )
  assert out == expected


@pytest.mark.parametrize("answer_after", [-1, 0])
def test_idle_time_is_offered_to_others(tokenizer, answer_after):
  calls = []

  def on_idle():
    calls.append(1)
    return len(calls) < 4  # then there is nothing left to do, and the loop waits

  out, _ = scripted(
    tokenizer, by_episode, numbers(2), workers=1, play_options={"answer_after": answer_after, "on_idle": on_idle}
  )
  assert out == scripted(tokenizer, by_episode, numbers(2))[0] and len(calls) >= 4


# ---- stopped and gone on with


class Stop(Exception):
  pass


@pytest.mark.parametrize("after", range(2, 12, 3))
@pytest.mark.parametrize("mode", ["transcript", "window"])
def test_a_play_that_was_stopped_goes_on_with_what_has_ended(tokenizer, after, mode):
  setting, reading = Setting(mode=mode, max_steps=4), Reading(lambda t: [3] * (t.length + 5), 4)
  script = lambda c: f"said {c[1] % 97}" if c[4] else by_episode(c)  # noqa: E731
  options = dict(slots=3, setting=setting)
  whole, engine = scripted(tokenizer, script, numbers(7), play_options=dict(reading=reading), **options)
  finished, steps = Finished(), []

  def between():
    steps.append(1)
    if len(steps) == after:
      raise Stop

  asked = dict(reading=reading, finished=finished, between=between)
  with pytest.raises(Stop):
    scripted(tokenizer, script, numbers(7), play_options=asked, **options)
  before, read = dict(finished.trajectories), dict(finished.read)
  assert all(t == whole[n] or n not in read for n, t in before.items())
  out, again = scripted(tokenizer, script, numbers(7), play_options=asked, **options)
  assert out == whole and [finished.trajectories[n] for n in range(7)] == out
  assert all(out[n] is t for n, t in before.items())
  played = {r.coordinates[1] for r in again.requests if r.coordinates[4] == ACT}
  assert played == {task_number(f"add/{n}") for n in range(7) if n not in before}
  asked_to_read = [r.conversation[1] for r in again.requests if r.coordinates[4] != ACT]
  assert sorted(asked_to_read) == [n for n in range(7) if n not in read]  # nothing is read twice
  assert finished.read == {n: len(tokenizer.encode(t.analysis)) + 1 for n, t in enumerate(whole)}
