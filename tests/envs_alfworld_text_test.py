"""What an ALFWorld policy reads and writes: prompts, action parser, scripted analyzer. No engine is needed."""

import pytest

from envs.alfworld import ALFWorld

TASK = "heat some potato and put it in sinkbasin"
HISTORY = [("You arrive at fridge 1. The fridge 1 is closed.", "open fridge 1"), ("You open the fridge 1.", "look")]


@pytest.mark.parametrize("plain", [False, True])
def test_prompts(plain):
  benchmark = ALFWorld(plain=plain)
  first = benchmark.first_prompt(TASK, "You are in a room.", ("go to fridge 1", "look"))
  later = benchmark.window_prompt(TASK, HISTORY, 7, "You are\n\nfacing the fridge 1.", ("close fridge 1",))
  assert first == benchmark.window_prompt(TASK, [], 0, "You are in a room.", ("go to fridge 1", "look"))
  for prompt in (first, later):
    assert [TASK in line for line in prompt.splitlines() if "Your task is to:" in line] == [True]
    assert "<action>" in prompt and ("<think>" in prompt) != plain
  assert "go to fridge 1" in first and "open fridge 1" in later and "You are facing the fridge 1." in later
  turn = benchmark.turn_prompt("You open the fridge 1.", ("close fridge 1",))
  assert "Your task is to:" not in turn and "close fridge 1" in turn and len(turn) < len(first)
  if not plain:
    assert "Observation 6: " in later and "Action 7: 'look'" in later and "step 8" in later
    assert "'close fridge 1'" in later.splitlines()


@pytest.mark.parametrize(
  "response,action,valid,plain_valid",
  [
    ("<think>hm</think><action>Go to  Fridge 1 </action>", "go to fridge 1", True, True),
    ("<ACTION>look</ACTION> <think>late</think> <action>no</action>", "look", True, True),
    ("<action>look</action>", "look", False, True),
    ("<think>open</think> <action>look", "hink>open</think> <action>look", False, False),
    ("I would go to the fridge and open it now", "to the fridge and open it now", False, False),
    ("</action><think></think><action>look</action>", "look", True, True),
    ("<think>去</think><action>look</action>", "look", False, False),
    ("", "", False, False),
    ("<think></think><action>" + "x" * 500 + "</action>", "x" * 100, True, True),
  ],
)
def test_parse(response, action, valid, plain_valid):
  assert ALFWorld().parse(response) == (action, valid)
  assert ALFWorld(plain=True).parse(response) == (action, plain_valid)


def episode(*pairs):
  return [(observation, action, True) for observation, action in pairs]


def test_analyze_a_success():
  steps = episode(
    ("You are in a room.", "go to desk 1"),
    ("You arrive at desk 1.", "take pen 1 from desk 1"),
    ("You pick up the pen 1 from the desk 1.", "move pen 1 to desk 1"),
    ("You move the pen 1 to the desk 1.", "go to fridge 1"),
    ("You arrive at fridge 1.", "open fridge 1"),
    ("You open the fridge 1.", "take potato 2 from fridge 1"),
    ("You pick up the potato 2 from the fridge 1.", "heat potato 2 with microwave 1"),
    ("Nothing happens.", "go to microwave 1"),
    ("You arrive at microwave 1.", "heat potato 2 with microwave 1"),
    ("You heat the potato 2 using the microwave 1.", "go to sinkbasin 1"),
    ("You arrive at sinkbasin 1.", "move potato 2 to sinkbasin 1"),
  )
  found = ALFWorld().analyze(TASK, steps, won=True)
  assert set(found) == {"episode_summary", "episode_skill"}
  wanted = "take potato 2 from fridge 1, then heat potato 2 with microwave 1, then move potato 2 to sinkbasin 1."
  assert found["episode_skill"] == f"To {TASK}: {wanted}"


@pytest.mark.parametrize(
  "task,actions,told",
  [
    (TASK, ["go to desk 1", "go to shelf 1"], "not found in desk 1, shelf 1"),
    (TASK, ["look", "inventory"], "go to the places in turn"),
    (TASK, ["take potato 1 from desk 1", "go to sinkbasin 1", "look"], "heat it with the microwave 1 before"),
    ("examine the pen with the desklamp", ["take pen 1 from desk 1", "go to bed 1"], "use the desklamp"),
    ("put a pen in drawer", ["take pen 1 from desk 1", "go to bed 1"], "go straight to the target"),
  ],
)
def test_analyze_a_failure(task, actions, told):
  steps = episode(*(("You see things.", action) for action in actions))
  found = ALFWorld().analyze(task, steps, won=False)
  assert told in found["episode_skill"] and found["episode_summary"].startswith(f"Failed after {len(actions)} steps")


def test_analyze_idle_and_empty_episodes():
  steps = episode(*(("Nothing happens.", "fly") for _ in range(4)))
  assert "listed ones" in ALFWorld().analyze(TASK, steps, won=False)["episode_skill"]
  assert ALFWorld().analyze(TASK, [], won=False) is None


def test_a_plain_response_reads_back_as_its_action_and_only_plain_prompts_have_demonstrations():
  plain = ALFWorld(plain=True)
  assert plain.parse(plain.response("move mug 1 to shelf 2")) == ("move mug 1 to shelf 2", True)
  with pytest.raises(ValueError, match="plain=True"):
    list(ALFWorld().demonstrations(1, 0))
