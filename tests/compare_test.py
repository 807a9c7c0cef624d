"""The stage `compare`: what it refuses, what it runs and in which order, and what it says."""

import json
import pathlib
import shutil
import xml.etree.ElementTree

import pytest
from tiny_config import get_config

from seed_jax import compare, main, methods, run
from seed_jax.metrics import read_json, write_text
from seed_jax.run import START_STAGES, ConfigError, Run

ROOT = pathlib.Path(__file__).parent.parent
TINY = ROOT / "tests" / "tiny_config.py"
TASKS = [f"household/valid/{family}/0000-{i:06d}" for i, family in enumerate(("pick", "heat"))]


class Killed(BaseException):
  pass


def make(tmp_path, **changes):
  config = get_config()
  config.train.panel.update(dict(split="valid", tasks=2))
  config.compare.update(dict(methods=("seed", "grpo"), seeds=(0, 1), every=2) | changes)
  return Run(config, tmp_path / "w", plain=True)


@pytest.fixture
def stages(monkeypatch):
  """Stages that only note what they ran on; training wins more with seed than with grpo, with every iteration."""
  ran = []

  def start_stage(name):
    def stage(own):
      ran.append((own.workdir.parent.name, own.workdir.name, name))
      (own.policy_path("sft")).mkdir(parents=True, exist_ok=True)
      own.finish(name, {"of": own.config.seed})

    return stage

  def train(own):
    ran.append((own.workdir.parent.name, own.workdir.name, "train"))
    lift = 0.25 if own.config.method == "seed" else 0.125
    rows = []
    for iteration in range(0, own.config.train.iterations + 1, own.config.train.panel.every):
      rate = 0.1 + lift * iteration / 4 + 0.05 * own.config.seed
      row = dict(iteration=iteration, success=rate, macro=rate / 2, episodes=16 * iteration, seconds=3.0 * iteration)
      row |= dict(environment_steps=iteration, tokens_sampled=2 * iteration, tokens_trained=3 * iteration)
      rows.append(row | {"outcomes": dict.fromkeys(TASKS, rate)})
    write_text(own.workdir / "curve.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    own.finish("train", {})

  for name in START_STAGES:
    monkeypatch.setattr(f"seed_jax.{name}.run_{name}", start_stage(name))
  monkeypatch.setattr("seed_jax.train.run_train", train)
  monkeypatch.setattr("jax.clear_caches", lambda: None)  # other tests keep what they have compiled
  return ran


# ---- what is refused


@pytest.mark.parametrize(
  "changes, told",
  [
    (dict(methods=("seed", "gpro")), r"arm 'gpro': method 'gpro' is unknown; choose one of seed, grpo"),
    (dict(methods=()), r"config.compare names no arm; methods: seed, grpo"),
    (dict(seeds=()), r"config.compare.seeds=\(\): name at least one seed"),
    (dict(seeds=(0, 1, 0)), r"config.compare.seeds=\(0, 1, 0\): name at least one seed, each once"),
    (dict(seeds=("a", "b")), r"config.compare.seeds=\('a', 'b'\): name at least one seed, each once, all whole"),
    (dict(seeds=(0, 1.5)), r"all whole numbers; example: \(0, 1, 2\)"),
    (dict(methods=("grpo", "grsd"), vary="train.rescore=minibatch"), r"arm 'grsd rescore=minibatch': .*no meaning"),
    (dict(vary="train.loss.kl_estimator=k3,k9"), r"arm 'seed kl_estimator=k9': config.train.loss: estimator='k9'"),
    (dict(every=0), r"config.compare.every=0 and config.train.panel.every=0: a comparison needs a learning curve"),
    (dict(baseline="ppo"), r"config.compare.baseline='ppo' is no arm; there are seed, grpo"),
    (dict(vary="train.loss.opd_bata=0,1"), r"override 'train.loss.opd_bata=0': the config has no field"),
    (dict(vary="train.loss.opd_beta"), r"config.compare.vary='train.loss.opd_beta' is not FIELD=VALUE,VALUE"),
    (dict(vary="train.loss.opd_beta=high,low"), r"override 'train.loss.opd_beta=high': the field holds 5.0"),
    (dict(vary="train.loss.clip=1"), r"has no field 'train.loss.clip'"),
    (dict(vary="train.loss=1"), r"this is a section; its fields are .*opd_beta"),
    (dict(vary="sft.epochs=1,2"), r"override 'sft.epochs=1': all arms of a seed share sft.epochs"),
    (dict(vary="train.panel.tasks=1,2"), r"all arms of a seed share train.panel.tasks"),
    (dict(vary="train.optimizer.rule=adamw,adem"), r"arm 'seed rule=adem': optimizer rule 'adem' is unknown"),
    (dict(vary="train.split=train,unseen"), r"override 'train.split=train': all arms of a seed share train.split"),
    (dict(vary="train.iterations=4,0"), r"arm 'seed iterations=0': config.train.iterations=0 must be 1 or more"),
    (dict(arms=(("a", "seed"),)), r"config.compare.arms: \('a', 'seed'\) is not \(name, method"),
    (dict(arms=(("a", "sead", ()),)), r"arm 'a': method 'sead' is unknown"),
    (dict(arms=(("Seed", "seed", ()),)), r"the arms Seed, seed need folders of their own"),
    (dict(arms=(("start", "seed", ()),)), r"the arms start need folders of their own"),
  ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path, stages, changes, told):
  own = make(tmp_path, **changes)
  with pytest.raises(ConfigError, match=told) as raised:
    compare.run_compare(own)
  assert "\n" not in str(raised.value)
  assert not stages and not (tmp_path / "w").exists()


def test_a_panel_of_training_tasks_and_a_foreign_start_are_refused(tmp_path, stages, monkeypatch):
  monkeypatch.setattr("seed_jax.compare.process_seed", lambda seed, purpose: 0)  # training plays the panel's seed
  changed = get_config()
  changed.train.panel.update(dict(split="train", tasks=2))
  changed.compare.update(dict(seeds=(0,), every=2))
  with pytest.raises(ConfigError, match="2 of its 2 tasks of the split 'train' are tasks of training"):
    compare.run_compare(Run(changed, tmp_path / "w"))
  changed.start = str(tmp_path)
  with pytest.raises(ConfigError, match="config.start must be empty"):
    compare.run_compare(Run(changed, tmp_path / "w"))
  assert not stages


@pytest.mark.parametrize(
  "argument, told",
  [
    ("--config.compare.methods=('seed','gpro')", "arm 'gpro': method 'gpro' is unknown"),
    ("--config.compare.vary=train.loss.opd_bata=0,1", "arm 'seed opd_bata=0': override 'train.loss.opd_bata=0': "),
    ("--config.compare.seeds=()", "config.compare.seeds=(): name at least one seed"),
  ],
)
def test_the_command_line_says_so_in_one_line(capsys, monkeypatch, tmp_path, stages, argument, told):
  monkeypatch.setattr(run, "set_up_jax", lambda folder: None)
  arguments = [f"--config={TINY}", f"--workdir={tmp_path}/w", "--stages=compare", argument]
  assert main.cli(["main", *arguments]) == 1
  lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
  assert len(lines) == 1 and lines[0].startswith(f"error: {told}") and not stages


def test_a_refused_command_leaves_the_work_directory_as_it_was(capsys, monkeypatch, tmp_path, stages):
  monkeypatch.setattr(run, "set_up_jax", lambda folder: None)
  other = Run(get_config(), tmp_path / "other")
  other.open()
  for stage in START_STAGES:
    other.finish(stage, {})
  arguments = ["main", f"--config={TINY}", f"--workdir={tmp_path}/w", "--stages=compare", "--config.compare.every=2"]
  arguments += ["--config.train.panel.split=valid", "--config.train.panel.tasks=2", "--config.compare.seeds=(0,)"]
  for more in (f"--config.start={tmp_path}/other", "--config.compare.baseline=ppo"):
    assert main.cli([*arguments, more]) == 1
    assert {path.name for path in (tmp_path / "w").rglob("*")} <= {".lock"}  # nothing that says what is to be run
  assert "error: config.start must be empty" in capsys.readouterr().err
  assert main.cli(arguments) == 0 and [stage for *_, stage in stages] == [*START_STAGES, "train", "train"]
  assert main.cli([*arguments, "--config.train.loss.opd_beta=1", "--config.compare.baseline=ppo"]) == 1
  assert "belongs to another config (train.loss.opd_beta: 5.0 there, 1.0 here)" in capsys.readouterr().err


# ---- which arms there are


def test_arms_are_methods_times_values_and_those_that_are_written_out():
  config = get_config()
  config.compare.update(dict(methods=("seed", "grpo"), vary="train.loss.opd_beta=0,5.5"))
  config.compare.arms = (("hard gate", "seed", ("train.loss.opd_beta=50", "train.normalize=mean")),)
  arms = compare.read_arms(config)
  assert [arm.name for arm in arms] == [
    "seed opd_beta=0",
    "seed opd_beta=5.5",
    "grpo opd_beta=0",
    "grpo opd_beta=5.5",
    "hard gate",
  ]
  assert arms[0].folder == "seed-opd_beta=0" and arms[-1].overrides == (
    "train.loss.opd_beta=50",
    "train.normalize=mean",
  )
  for text, values in (
    ("train.row_lengths=(320,),(384,)", [(320,), (384,)]),
    ("train.normalize=mean_std, mean", ["mean_std", "mean"]),
    ("train.loss.tis_cap=2", [2]),
  ):
    assert compare._swept(text) == (text.partition("=")[0], values)


def test_an_arm_changes_its_own_copy_of_the_config(tmp_path):
  own = make(tmp_path, arms=(("x", "seed", ("train.loss.tis_cap=2", "train.loss.opd_beta=1")),), methods=("grpo",))
  arms, seeds = compare.plan(own)
  assert seeds == [0, 1] and [arm.name for arm in arms] == ["grpo", "x"]
  x, grpo = (compare.arm_run(own, arm, 1) for arm in arms[::-1])
  assert (x.config.train.loss.tis_cap, x.config.train.loss.opd_beta, x.config.seed) == (2.0, 1.0, 1)
  assert (grpo.config.train.loss.tis_cap, grpo.config.train.loss.opd_beta, grpo.config.method) == (None, 5.0, "grpo")
  assert own.config.train.loss.tis_cap is None and own.config.seed == 0 and own.config.train.panel.every == 0
  assert x.config.train.panel.every == 2 and x.config.start == str(tmp_path / "w" / "compare" / "seed1" / "start")
  assert "compare" not in x.config and x.workdir == tmp_path / "w" / "compare" / "seed1" / "x"
  assert compare.start_run(own, 1).config.train.panel.every == 0


def test_every_arm_has_the_settings_of_its_own_method_and_its_overrides_come_after(tmp_path):
  own = make(tmp_path, methods=methods.names(), arms=(("dapo 0.4", "dapo", ("train.loss.clip_high=0.4",)),))
  for arm in compare.read_arms(own.config):
    config = compare.arm_run(own, arm, 0).config
    wanted = methods.settings(arm.method) | ({"train.loss.clip_high": 0.4} if arm.overrides else {})
    plain = compare.arm_run(own, compare.Arm("x", "seed"), 0).config
    for path in {p for name in methods.names() for p in methods.settings(name)}:
      assert main.at(config, path) == wanted.get(path, main.at(plain, path)), (arm.name, path)
  assert own.config.train.loss.clip_high == 0.2  # the arms have copies


def test_a_comparison_does_not_begin_from_a_method_with_settings(tmp_path, stages):
  config = get_config("dapo")
  config.compare.update(dict(methods=("dapo", "grpo"), seeds=(0,), every=2))
  with pytest.raises(ConfigError, match="the config is that of dapo, whose own settings the other arms would get too"):
    compare.run_compare(Run(config, tmp_path / "w"))
  assert not stages


def test_the_baseline_is_grpo_or_the_first_arm_unless_named():
  config = get_config()
  arms = [compare.Arm("seed", "seed"), compare.Arm("grpo", "grpo")]
  assert compare.baseline(config, arms) == "grpo" and compare.baseline(config, arms[:1]) == "seed"
  config.compare.baseline = "seed"
  assert compare.baseline(config, arms) == "seed"


# ---- what is run


def test_every_seed_has_one_start_and_its_arms_follow_in_turn(tmp_path, stages, capsys):
  own = make(tmp_path)
  own.open()
  results = compare.run_compare(own)
  expected = []
  for seed in ("seed0", "seed1"):
    expected += [(seed, "start", stage) for stage in START_STAGES] + [(seed, arm, "train") for arm in ("seed", "grpo")]
  assert stages == expected
  for arm in ("seed", "grpo"):
    for seed in (0, 1):
      folder = tmp_path / "w" / "compare" / f"seed{seed}"
      assert read_json(folder / arm / "sft.json") == {"of": seed, "start": str(folder / "start")}
  # seed: 0.1 + 0.25 = 0.35 and 0.40; grpo: 0.225 and 0.275; a difference of 0.125 with both seeds.
  assert results["baseline"] == "grpo" and results["arms"]["seed"]["final"]["mean"] == pytest.approx(0.375)
  assert results["arms"]["seed"]["against"]["final"]["difference"] == pytest.approx(0.125)
  assert read_json(tmp_path / "w" / "compare.json")["arms"]["grpo"]["final"]["by_seed"] == pytest.approx([0.225, 0.275])
  told = capsys.readouterr()
  assert "compare: seed 1, grpo: 15.0% -> 27.5% in 64 episodes, 12 s (4 of 4)" in told.err
  assert told.out.splitlines()[-1] == f"comparison: {tmp_path}/w/compare.html"
  assert "| seed | 2 | 37.5 % |" in (tmp_path / "w" / "compare.md").read_text()


def test_what_is_said_about_the_arms_holds_for_these_arms(tmp_path, stages):
  def about(**changes):
    own = make(tmp_path, **changes)
    return compare.about(own, *compare.plan(own), 0)

  first, panel, intervals = about()
  assert first.startswith("2 arms with 2 seeds (0, 1), 0 of 4 runs are finished. All arms of a seed begin from one SFT")
  assert (
    "base policy" not in first
    and "history and sampling as the config says." in first
    and "temperature 0.4, no skill in any prompt, every 2 iterations" in panel
  )
  assert "t over seeds" in intervals
  from_base = ("grpo_from_base", "grpo", ("train.start_from=base",))
  first, panel, intervals = about(
    methods=("grpo", "seed_without_sft", "skill_prompt", "skill_grpo_star", "skill_grpo"), arms=(from_base,), seeds=(0,)
  )
  assert "SFT checkpoint, but for seed_without_sft, grpo_from_base: from the base policy" in first
  assert "no skill in any prompt, but for skill_prompt, skill_grpo_star: text of the skill library, every" in panel
  arms = (("long", "seed", ("rollout.max_steps=50", "rollout.history=1")), ("half", "seed", ("train.iterations=2",)))
  first = about(methods=("seed", "dapo"), arms=arms)[0]
  assert "as the config says, but for dapo: train.max_generations=10; long: rollout.history=1, rollout.max_" in first
  assert "rollout.max_steps=50; half: train.iterations=2." in first and "Iterations (4), tasks" in first
  assert "t over seeds" not in intervals and "one seed has no interval" in intervals


def test_finished_arms_are_skipped_and_more_may_be_asked_for(tmp_path, stages, monkeypatch):
  own = make(tmp_path, seeds=(0,))
  own.open()
  real = compare.write_results
  monkeypatch.setattr(compare, "write_results", lambda *a: (_ for _ in ()).throw(Killed()))  # after the first arm
  with pytest.raises(Killed):
    compare.run_compare(own)
  assert stages[-1] == ("seed0", "seed", "train") and len(stages) == 5
  monkeypatch.setattr(compare, "write_results", real)
  del stages[:]
  compare.run_compare(own)
  assert stages == [("seed0", "grpo", "train")]
  del stages[:]
  more = make(tmp_path, seeds=(0, 1), methods=("seed", "grpo", "seed_without_opd"))
  more.open()  # the same work directory: only what is compared has grown
  results = compare.run_compare(more)
  assert [name for _, name, stage in stages if stage == "train"] == [
    "seed_without_opd",
    "seed",
    "grpo",
    "seed_without_opd",
  ]
  assert [s["seeds"] for s in results["arms"].values()] == [[0, 1]] * 3
  other = get_config()
  other.compare.update(more.config.compare.to_dict())
  other.train.loss.opd_beta = 1.0
  with pytest.raises(ConfigError, match="belongs to another config"):
    Run(other, tmp_path / "w").open()


def test_results_are_published_under_the_config_that_they_are_of(tmp_path, stages):
  kl = lambda value: dict(methods=("grpo",), seeds=(0,), arms=(("grpo2", "grpo", (f"train.loss.kl_coef={value}",)),))  # noqa: E731
  own = make(tmp_path, **kl(0.01))
  own.open()
  compare.run_compare(own)
  files = ("compare.json", "compare.md", "compare.html", "compare.svg")
  before = [(tmp_path / "w" / name).read_bytes() for name in files]
  del stages[:]
  edited = make(tmp_path, **(kl(0.5) | dict(methods=("seed", "grpo"))))  # an arm that is finished means something else
  edited.open()
  told = r"grpo2 belongs to another config \(train.loss.kl_coef: 0.01 there, 0.5 here\); .* give the arm another name"
  with pytest.raises(ConfigError, match=told):
    compare.run_compare(edited)
  assert not stages and [(tmp_path / "w" / name).read_bytes() for name in files] == before
  arms = compare.read_arms(edited.config)
  results = compare.write_results(edited, arms, [0])  # whoever calls it
  assert list(results["arms"]) == ["grpo"]
  renamed = make(tmp_path, methods=("grpo",), seeds=(0,), arms=(("grpo3", "grpo", ("train.loss.kl_coef=0.5",)),))
  assert list(compare.run_compare(renamed)["arms"]) == ["grpo", "grpo3"]


def test_a_comparison_that_was_moved_goes_on_where_it_lies_now(tmp_path, stages):
  own = make(tmp_path)
  own.open()
  results = compare.run_compare(own)
  (tmp_path / "w").rename(tmp_path / "moved")
  del stages[:]
  moved = Run(own.config, tmp_path / "moved")
  moved.open()
  assert compare.run_compare(moved)["arms"] == results["arms"] and not stages


def test_results_of_unfinished_comparisons_name_what_is_there(tmp_path, stages):
  own = make(tmp_path)
  own.open()
  arms, seeds = compare.plan(own)
  assert compare.write_results(own, arms, seeds)["arms"] == {}
  compare.run_compare(own)
  shutil.rmtree(tmp_path / "w" / "compare" / "seed1" / "grpo")
  results = compare.write_results(own, arms, seeds)
  assert results["arms"]["grpo"]["seeds"] == [0] and results["arms"]["seed"]["against"]["seeds"] == [0]
  assert "3 of 4 runs are finished" in (tmp_path / "w" / "compare.md").read_text()
  assert "one seed" in (tmp_path / "w" / "compare.html").read_text()
  drawn = xml.etree.ElementTree.fromstring((tmp_path / "w" / "compare.svg").read_text())
  assert drawn.tag == "{http://www.w3.org/2000/svg}svg" and "var(--s0)" in (tmp_path / "w" / "compare.svg").read_text()
