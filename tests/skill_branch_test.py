"""The skill side of training: who writes, whose text is inserted, what a library says, what is kept and resumed."""

import json
import runpy

import numpy as np
import pytest
from skill_cases import episode
from tiny_config import __file__ as TINY

from seed_jax import library, methods, skill_branch, skill_log, skill_sources, skills
from seed_jax.library import Library, Mistake, Skill
from seed_jax.requests import Stats
from seed_jax.run import Run
from seed_jax.skill_branch import SkillBranch, library_text, shown

OWN = [
  n for n in methods.names() if methods.get(n).skill_source not in ("none", "library", "frozen_analyzer", "external")
]
LIBRARY = [n for n in methods.names() if methods.get(n).skill_source == "library"]


class Words:
  """A tokenizer of whole words, which learns them as it reads."""

  stop_ids = (0,)

  def __init__(self):
    self.words = ["<end>", *"take look open close shut walk".split()]

  @property
  def vocab_size(self):
    return len(self.words)

  def encode(self, text):
    new = dict.fromkeys(text.split())
    self.words += [word for word in new if word not in self.words]
    return [self.words.index(word) for word in text.split()]

  first = encode

  def decode(self, ids):
    return " ".join(self.words[i] for i in ids)


class Engine:
  """Notes which parameters it holds."""

  def __init__(self):
    self.params, self.told = "current", []

  def set_params(self, params):
    self.params = params
    self.told.append(params)

  def take_stats(self):
    self.told.append("stats")
    return Stats(tokens_sampled=70, tokens_prefilled=500, tokens_reused=30, decode_steps=20, slot_steps=90, decoded=66)


def make(folder, method, **changes):
  config = runpy.run_path(TINY)["get_config"](method)
  config.unlock()
  config.update_from_flattened_dict(changes)
  run = Run(config, folder / "w", plain=True)
  run.tokenizer = Words()
  return run


def branch_of(folder, method, *, resume=0, **changes):
  return SkillBranch(make(folder, method, **changes), methods.get(method), "start", resume=resume)


def four(skills_of=("put it down", "heat first", "look at shelves", "")):
  """Two tasks with two episodes each; the first of each was won."""
  places = ((0, 0), (0, 1), (1, 0), (1, 1))
  return [episode(g, m, text, won=m == 0) for (g, m), text in zip(places, skills_of, strict=True)]


def some_library():
  return Library(
    general=(Skill("general_001", "t", "finish one thing"),),
    by_family={"heat": (Skill("heat/001", "t", "open the microwave"), Skill("heat/002", "t", "close the microwave"))},
    mistakes=(Mistake("mistake_001", "walking about", how_to_avoid="walk straight"),),
  )


def with_library(folder, found=None):
  (folder / "w").mkdir(exist_ok=True)
  library.save(folder / "w" / "library.json", found or some_library())


# ---- who writes


def analysed(trajectories, text):
  for i, t in enumerate(trajectories):
    t.analysis = skills.format_analysis(skills.Analysis("what happened", f"{text} {i}"))


@pytest.mark.parametrize("name", OWN)
def test_the_policy_writes_while_it_plays_and_its_answers_are_parsed(tmp_path, name):
  branch, engine = branch_of(tmp_path, name), Engine()
  assert branch.reading.max_new == 40 and branch.shown == ""
  played = four()
  analysed(played, "go")
  played[1].analysis, played[3].error = "no json", "broke off"
  log = branch.write(played, engine, 0)
  assert [t.skill for t in played[:3]] == ["go 0", "", "go 2"] and not engine.told  # nobody reads them again
  assert log == {"analyzed": 3, "parsed": 2, "parse_rate": pytest.approx(2 / 3)}


def test_a_frozen_analyzer_is_the_policy_that_training_began_from(tmp_path, monkeypatch):
  branch, engine, asked = branch_of(tmp_path, "seed_frozen_analyzer"), Engine(), []

  def analyze(engine, trajectories, *, iteration):
    asked.append((engine.params, len(trajectories), iteration))
    return {"parse_rate": 1.0}

  monkeypatch.setattr(branch.run, "analyze", analyze)
  assert branch.reading is None  # the policy that plays writes nothing
  read = {"tokens_sampled": 70, "tokens_prefilled": 500, "tokens_reused": 30, "decode_steps": 20}
  assert branch.write(four(), engine, 7) == {"parse_rate": 1.0} | read  # skills are tokens that training samples
  assert asked == [("start", 4, 7)] and engine.told == ["start", "stats"]


@pytest.mark.parametrize("name", ["opid", "seed_external_analyzer"])
def test_an_external_analyzer_reads_what_was_played_to_its_end(tmp_path, monkeypatch, name):
  asked = []

  class Analyzer:
    patience = 0.0

    def analyze(self, trajectories, *, between):
      between()
      asked.extend(trajectories)
      return ['{"episode_summary": "s", "episode_skill": "heat it"}', None]

  monkeypatch.setattr(skill_branch, "make_analyzer", lambda run: Analyzer())
  branch, engine = branch_of(tmp_path, name), Engine()
  played = [episode(0, 0), episode(0, 1, error="broke off"), episode(1, 0, turns=0), episode(1, 1)]
  log = branch.write(played, engine, 0)
  assert branch.reading is None and not engine.told and asked == [played[0], played[3]]
  assert [t.skill for t in played] == ["heat it", "", "", ""] and log["parse_rate"] == 0.5


@pytest.mark.parametrize("name", ["grpo", "seed_without_opd", *LIBRARY])
def test_nobody_writes_where_no_skill_of_an_episode_is_needed(tmp_path, name):
  with_library(tmp_path)
  branch, engine, played = branch_of(tmp_path, name), Engine(), four()
  assert branch.reading is None and not branch.keeps
  assert branch.write(played, engine, 0) == {} and not engine.told and played == four()


# ---- whose text


def inserted(branch, played, iteration=0):
  """What stands in the skill context of every episode, and the metrics."""
  prompts, log = branch.prompts(played, iteration)
  found = []
  for t in played:
    ids = prompts(t, 0)
    if ids is None:
      found.append("")
      continue
    text = branch.run.tokenizer.decode(ids)
    assert text.startswith("Your task is to: tidy up Skill: [") and text.endswith("]")
    found.append(text.removeprefix("Your task is to: tidy up Skill: [")[:-1])
  return found, log


EXPECTED = {
  "seed": ["put it down", "heat first", "look at shelves", ""],
  "seed_frozen_analyzer": ["put it down", "heat first", "look at shelves", ""],
  "opid": ["put it down", "heat first", "look at shelves", ""],
  "seed_external_analyzer": ["put it down", "heat first", "look at shelves", ""],
  "seed_skill_of_group": ["heat first", "put it down", "", ""],
  "seed_success_only": ["put it down", "", "look at shelves", ""],
  "seed_failure_only": ["", "heat first", "", ""],
  "sdar": ["open the microwave. close the microwave. finish one thing. walk straight."] * 4,
  "grpo": [""] * 4,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_text_in_the_skill_context(tmp_path, name):
  with_library(tmp_path)
  found, log = inserted(branch_of(tmp_path, name), four())
  assert found == EXPECTED[name]
  same = {"seed_skill_of_group": 0.0, "sdar": 0.0}.get(name, 1.0)
  assert log == ({} if name == "grpo" else {"skill_same_as_own": same})


def test_a_skill_of_another_task_never_is_of_this_one(tmp_path):
  branch, drawn = branch_of(tmp_path, "seed_skill_of_other_task"), set()
  for iteration in range(20):
    found, log = inserted(branch, four(), iteration)
    assert found[:2] == ["look at shelves"] * 2 and found[3] == "" and log == {"skill_same_as_own": 0.0}
    drawn.add(found[2])
    assert inserted(branch_of(tmp_path, "seed_skill_of_other_task"), four(), iteration)[0] == found  # in any process
  assert drawn == {"put it down", "heat first"}


def test_random_text_has_the_length_of_the_own_skill_and_nothing_of_it(tmp_path):
  branch = branch_of(tmp_path, "seed_random_text")
  found, log = inserted(branch, four())
  assert [len(text.split()) for text in found] == [3, 2, 3, 0] and log == {"skill_same_as_own": 0.0}
  known = skill_sources.vocabulary(Words())
  assert all(word in known for text in found for word in text.split()) and len(set(found)) == 4
  assert inserted(branch, four(), 1)[0] != found == inserted(branch_of(tmp_path, "seed_random_text"), four())[0]


# ---- libraries


def test_library_text_is_shown_in_the_prompts_of_rollouts_where_the_method_says_so(tmp_path):
  with_library(tmp_path)
  for name in methods.names():
    text = branch_of(tmp_path, name).shown
    assert callable(text) == (name in ("skill_grpo", "skill_grpo_star")), name
  text = branch_of(tmp_path, "skill_grpo").shown
  assert text(episode(family="heat")).startswith("open the microwave. close")
  assert text(episode(family="cool")) == "finish one thing. walk straight."
  assert shown(make(tmp_path, "seed"), False) == ""


@pytest.mark.parametrize("count", range(1, 11))
def test_a_library_text_keeps_within_its_tokens(tmp_path, count):
  """The least important entries go first: mistakes, general skills, then the family's own, each as a whole."""
  with_library(tmp_path)
  run = make(tmp_path, "sdar", **{"library.max_tokens": count})
  text = library_text(run)("heat some potato", "heat")
  parts = ["open the microwave.", "close the microwave.", "finish one thing.", "walk straight."]
  fitting = [n for n in range(5) if len(" ".join(parts[:n]).split()) <= count]
  assert text == " ".join(parts[: fitting[-1]])


@pytest.mark.parametrize("retrieval", ["family", "keyword", "embedding"])
def test_every_retrieval_finds_the_familys_text_and_asks_once_a_task(tmp_path, monkeypatch, retrieval):
  with_library(tmp_path)
  run = make(tmp_path, "sdar", **{"library.retrieval": retrieval, "library.max_mistakes": 0})
  real, asked = getattr(skill_branch.retrieval, f"by_{retrieval}"), []

  def counted(*args, **options):
    retrieve = real(*args, **options)
    return lambda *a, **k: asked.append(a) or retrieve(*a, **k)

  monkeypatch.setattr(skill_branch.retrieval, f"by_{retrieval}", counted)
  text = library_text(run)
  for _ in range(3):
    assert "open the microwave." in text("heat some potato and put it in the microwave", "heat")
  assert len(asked) == 1


@pytest.mark.parametrize(
  ("by", "why"), [("family", "the benchmark gives"), ("keyword", "config.library.rules='alfworld' give")]
)
def test_a_family_without_a_skill_is_warned_of_once(tmp_path, capsys, by, why):
  with_library(tmp_path)
  text = library_text(make(tmp_path, "sdar", **{"library.retrieval": by}))
  capsys.readouterr()
  text("heat some potato and put it in shelf", "heat")
  assert "warning" not in capsys.readouterr().err
  for number in range(3):
    assert text(f"clean some plate {number}", "clean") == "finish one thing. walk straight."
  (line,) = capsys.readouterr().err.splitlines()
  assert f"no skill of the family 'clean' that {why} a task; it has heat." in line


def test_a_library_of_ones_own_is_read_from_its_path(tmp_path):
  with_library(tmp_path)
  library.save(tmp_path / "mine.json", Library(general=(Skill("general_001", "t", "think twice"),)))
  run = make(tmp_path, "sdar", **{"library.path": str(tmp_path / "mine.json")})
  assert library_text(run)("heat some potato", "heat") == "think twice."


def test_a_missing_library_is_built_once_from_the_annotated_episodes(tmp_path, monkeypatch):
  run = make(tmp_path, "skill_grpo")
  run.workdir.mkdir()
  loaded = []
  annotated = [episode(0, 0, "open the microwave"), episode(1, 0, "walk about", won=False)]
  monkeypatch.setattr("seed_jax.library_stage.load_annotated", lambda run: loaded.append(run) or annotated)
  for _ in range(2):
    text = SkillBranch(run, methods.get("skill_grpo"), "start").shown(annotated[0])
    assert text.startswith("open the microwave.") and len(loaded) == 1
  assert library.load(run.workdir / "library.json").families == ("heat",)


# ---- what is kept


def tokens_of(played, gains):
  """Two tokens an episode with a skill, each moved by its gain; one more that does not count."""
  rows = [(i, gain) for i, (t, gain) in enumerate(zip(played, gains, strict=True)) if t.skill for _ in range(2)]
  index = np.asarray([[i for i, _ in rows] + [0]], np.int32)
  gain = np.asarray([[g for _, g in rows] + [100.0]], np.float32)
  mask = np.ones_like(gain)
  mask[0, -1] = 0
  return dict(logprobs=np.full_like(gain, -2.0), skill_logprobs=gain - 2.0, mask=mask, episode=index)


def test_skills_are_written_with_what_each_is_worth(tmp_path):
  branch = branch_of(tmp_path, "seed")
  played = four()
  log = branch.keep(played, tokens_of(played, [0.5, -1.0, 0.25, 0.0]), 3)
  assert branch.keeps and skill_log.iterations(tmp_path / "w" / "skills") == [3]
  rows = [json.loads(line) for line in (tmp_path / "w" / "skills" / "000003.jsonl").read_text().splitlines()]
  assert [(r["group"], r["member"], r["skill"], r["outcome"], r["gain"]) for r in rows] == [
    (0, 0, "put it down", "success", 0.5),
    (0, 1, "heat first", "failure", -1.0),
    (1, 0, "look at shelves", "success", 0.25),
    (1, 1, "", "failure", None),
  ]
  assert log["skill_gain_on_success"] == pytest.approx((0.5 + 0.25) / 2)  # of the two that were won
  assert log["skill_gain_positive"] == 1.0 and log["skill_novel"] == log["skill_novel_ngrams"] == 1.0
  assert "skill_overlap" not in log  # there is no library that it could be measured against
  assert log["skill_parse_rate"] == 0.75 and log["skill_distinct"] == 3
  assert log["skill_length"] == pytest.approx(8 / 3) and log["skill_length_max"] == 3  # in tokens
  again = branch.keep(played, tokens_of(played, [0.0] * 4), 4)
  assert again["skill_novel"] == again["skill_novel_ngrams"] == 0.0 and again["skill_gain_on_success"] == 0.0


def test_skills_are_measured_against_the_runs_library(tmp_path):
  """The share of 3-grams that it advises, too: of one skill both, of the others none."""
  played, gains = four(("open the microwave now", "heat first", "look at shelves", "")), [0.0] * 4
  with_library(tmp_path)  # "open the microwave", "close the microwave", "finish one thing", "walk straight"
  log = branch_of(tmp_path, "seed").keep(played, tokens_of(played, gains), 1)
  assert log["skill_overlap"] == pytest.approx((1 / 2 + 0 + 0) / 3)  # "open the microwave" of two 3-grams
  library.save(tmp_path / "mine.json", Library(general=(Skill("general_001", "t", "heat first"),)))
  own = branch_of(tmp_path, "seed", **{"library.path": str(tmp_path / "mine.json")})
  assert own.keep(played, tokens_of(played, gains), 2)["skill_overlap"] == pytest.approx(1 / 3)


def test_keep_skills_says_how_many_and_zero_is_none(tmp_path):
  branch = branch_of(tmp_path, "seed", **{"train.keep_skills": 2})
  branch.keep(four(), tokens_of(four(), [0.0] * 4), 1)
  assert [row["member"] for row in skill_log.read(tmp_path / "w" / "skills")] == [0, 0]  # one of each task
  assert not branch_of(tmp_path, "seed", **{"train.keep_skills": 0}).keeps
  assert skill_log.iterations(tmp_path / "w" / "skills") == [1]  # and what is there stays


def test_an_iteration_without_an_episode_is_kept_too(tmp_path):
  nothing = dict(logprobs=np.zeros((1, 0)), skill_logprobs=np.zeros((1, 0)), mask=np.zeros((1, 0)))
  log = branch_of(tmp_path, "seed").keep([], nothing | {"episode": np.zeros((1, 0), np.int32)}, 1)
  assert skill_log.read(tmp_path / "w" / "skills", 1) == [] and set(log.values()) == {0.0}


def test_a_resumed_run_drops_later_skills_and_finds_the_same_novelty(tmp_path):
  """Novelty is against the skills that were kept, which a resumed run can read: the fourth one never is."""
  texts = [(f"go {i} there", "go 0 there", f"look {i // 2} at it", "walk on") for i in range(4)]

  def run_from(first, folder):
    branch = branch_of(folder, "seed", resume=first, **{"train.keep_skills": 3})
    logs = []
    for i in range(first, 4):
      played = four(texts[i])
      logs.append(branch.keep(played, tokens_of(played, [0.1, 0.2, 0.3, 0.4]), i + 1))
    return logs

  (tmp_path / "whole").mkdir()
  whole = run_from(0, tmp_path / "whole")
  run_from(0, tmp_path)
  assert run_from(2, tmp_path) == whole[2:]
  assert 0 < whole[3]["skill_novel"] < 1  # a figure that what was seen decides
  files = [{p.name: p.read_bytes() for p in (f / "w" / "skills").iterdir()} for f in (tmp_path, tmp_path / "whole")]
  assert files[0] == files[1] and len(files[0]) == 4
  branch_of(tmp_path, "seed", resume=2)
  assert skill_log.iterations(tmp_path / "w" / "skills") == [1, 2]  # before anything is played
