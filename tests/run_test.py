import json
import runpy

import fake_store
import pytest

from seed_jax import methods
from seed_jax import run as run_module
from seed_jax.batching import RowShape
from seed_jax.metrics import read_json, write_json
from seed_jax.run import STAGES, ConfigError, Run, process_seed, resolve_model
from seed_jax.trajectory import Trajectory, Turn

TINY = runpy.run_path(str(run_module.epath.Path(__file__).parent / "tiny_config.py"))["get_config"]


def make(tmp_path, name="w", method="seed", change=None, **options):
  config = TINY(method)
  if change:
    change(config)
  return Run(config, tmp_path / name, **options)


def setter(path, value):
  def change(config):
    *sections, last = path.split(".")
    for section in sections:
      config = config[section]
    config[last] = value

  return change


def flat(config, prefix=""):
  """{dotted path: value} of a config."""
  out = {}
  for name, value in config.items():
    out |= flat(value, f"{prefix}{name}.") if hasattr(value, "keys") else {prefix + name: value}
  return out


def finished_start(tmp_path, name="first", **options):
  """A work directory whose starting stages are done."""
  first = make(tmp_path, name, **options)
  first.open()
  for policy in ("base", "sft"):
    folder = first.workdir / "policy" / policy
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(policy.encode())
  for stage in run_module.START_STAGES:
    first.finish(stage, {"of": stage})
  return first


# ---- the work directory


def test_opening_writes_the_config_and_opening_again_accepts_it(tmp_path):
  make(tmp_path).open()
  written = read_json(tmp_path / "w" / "config.json")
  assert written["train"]["row_lengths"] == [320] and written["method"] == "seed"
  make(tmp_path).open()
  assert read_json(tmp_path / "w" / "config.json") == written


def test_a_folder_where_something_was_done_belongs_to_its_config(tmp_path):
  first = make(tmp_path)
  first.open()
  first.finish("base", {})
  other = make(tmp_path, change=setter("train.loss.opd_beta", 2.0))
  with pytest.raises(ConfigError, match=r"belongs to another config \(train.loss.opd_beta: 5.0 there, 2.0 here\)"):
    other.open()
  with pytest.raises(ConfigError, match=r"method: seed there, grpo here"):
    make(tmp_path, method="grpo").open()
  many = [f"{section}.{name}" for section, name in (("base", "epochs"), ("sft", "epochs"), ("train", "iterations"))]

  def change(config):
    for path in [*many, "seed", "evaluate.seed"]:
      setter(path, 77)(config)

  with pytest.raises(ConfigError, match=r"base.epochs: 1 there, 77 here; evaluate.seed: 0 .*; \.\.\.\)"):
    make(tmp_path, change=change).open()


def test_a_folder_where_nothing_was_done_takes_the_corrected_config(tmp_path):
  make(tmp_path, change=setter("seed", 5)).open()
  make(tmp_path).open()
  assert read_json(tmp_path / "w" / "config.json")["seed"] == 0


def test_a_field_that_one_config_lacks_is_a_difference(tmp_path):
  first = make(tmp_path)
  first.open()
  first.finish("base", {})
  written = read_json(tmp_path / "w" / "config.json")
  del written["train"]["per_step"]
  write_json(tmp_path / "w" / "config.json", written)
  with pytest.raises(ConfigError, match="train.per_step: None there, False here"):
    make(tmp_path).open()


def test_a_config_file_that_is_no_json_is_named(tmp_path):
  (tmp_path / "w").mkdir()
  (tmp_path / "w" / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config.json is not a JSON file"):
    make(tmp_path).open()


@pytest.mark.parametrize(
  "path, value, told",
  [
    ("method", "sede", "method 'sede' is unknown; choose one of seed, grpo"),
    ("model.path", "/nope", "config.model.path=/nope does not exist"),
    ("rollout.mode", "windows", "config.rollout.mode='windows' is unknown; choose one of window, transcript"),
    ("analysis.ask", "letter", "config.analysis.ask='letter' is unknown; choose one of message, turn"),
    ("library.retrieval", "magic", "config.library.retrieval='magic' is unknown; choose one of family, keyword"),
    ("library.render", "pdf", "library rendering 'pdf' is unknown"),
    ("train.max_generations", 0, "config.train.max_generations=0 must be 1 or more"),
    ("profile.iterations", (-1, 2), r"config.profile.iterations=\(-1, 2\): -1 is no iteration; they count from 0"),
    ("profile.iterations", (1, "a"), r"config.profile.iterations=\(1, 'a'\): 'a' is no iteration"),
    ("annotate.analyzer", "external", "needs config.annotate.external"),
    ("train.optimizer.rule", "adem", "optimizer rule 'adem' is unknown"),
    ("sft.optimizer.schedule", "stairs", "schedule 'stairs' is unknown"),
  ],
)
def test_what_cannot_be_run_is_refused_before_a_file_is_written(tmp_path, path, value, told):
  with pytest.raises(ValueError, match=told):
    make(tmp_path, change=setter(path, value)).open()
  assert not (tmp_path / "w").exists()


def test_a_turn_needs_a_conversation_to_go_on_from(tmp_path):
  def change(config):
    config.rollout.mode, config.analysis.ask = "window", "turn"

  with pytest.raises(ConfigError, match="config.analysis.ask='turn' goes on from a conversation"):
    make(tmp_path, change=change).open()


def test_stages_are_marked_and_planned(tmp_path):
  run = make(tmp_path)
  run.open()
  assert run.done("base") is None
  assert run.finish("base", {"x": 1}) == {"x": 1} and run.done("base") == {"x": 1}
  assert run.plan(STAGES) == list(STAGES[1:])
  assert run.plan(["collect", "annotate"]) == ["collect", "annotate"] and run.plan(["base"]) == []
  with pytest.raises(ConfigError, match=r"stage annotate needs stage collect.*--stages=collect,annotate"):
    run.plan(["annotate", "collect"])  # the order that is asked for is the order that is run
  run.finish("report", {})
  assert run.plan(["report"]) == ["report"]
  for start_from, needed in (("", "sft"), ("base", "base")):
    assert make(tmp_path, change=setter("train.start_from", start_from)).needed("train") == (needed,)
  assert make(tmp_path, method="grpo").needed("train") == ("base",)


def test_a_library_that_is_there_is_kept(tmp_path):
  run = make(tmp_path)
  run.open()
  run.finish("annotate", {})
  assert run.plan(["library"]) == ["library"]
  write_json(run.workdir / "library.json", {"by": "hand"})
  assert run.plan(["library"]) == []


def test_only_the_stage_under_way_goes_back(tmp_path):
  run = make(tmp_path, resume_from=12)
  assert [run.resume_step("sft"), run.resume_step("train")] == [12, None]
  assert make(tmp_path).resume_step("train") is None


# ---- what a method's own recipe changes


@pytest.mark.parametrize("name", methods.names())
def test_a_config_of_a_method_has_its_settings_and_no_others(name):
  plain, own = TINY("seed"), TINY(name)
  changed = {path: value for path, value in flat(own).items() if value != flat(plain)[path]}
  assert changed.pop("method", "seed") == name
  assert changed == {path: value for path, value in methods.settings(name).items() if value != flat(plain)[path]}
  assert flat(own).keys() == flat(plain).keys()  # a setting of a field that is not there would be no setting


def test_settings_of_a_method_come_before_what_the_command_line_says():
  from seed_jax import main

  path = f"{run_module.epath.Path(__file__).parent / 'tiny_config.py'}:dapo"
  config = main.parse(["main", f"--config={path}", "--config.train.loss.clip_high=0.5"]).config
  assert config.train.loss.clip_high == 0.5 and config.train.max_generations == 10 and config.train.loss.kl_coef == 0


def test_the_row_without_sft_starts_from_the_base_policy_though_there_is_another(tmp_path):
  run = make(tmp_path, method="seed_without_sft")
  assert run.config.train.start_from == "base" and run.needed("train") == ("base",)
  assert make(tmp_path, method="seed_without_opd").config.train.start_from == ""


# ---- starting from another run


def test_a_start_is_taken_over_whole(tmp_path):
  first = finished_start(tmp_path)
  second = make(tmp_path, "second", method="grpo", change=setter("start", str(tmp_path / "first")))
  second.open()
  for stage in run_module.START_STAGES:
    assert second.done(stage) == {"of": stage, "start": str(tmp_path / "first")}
  for policy in ("base", "sft"):
    assert (second.policy_path(policy) / "model.safetensors").read_bytes() == policy.encode()
  assert second.plan(STAGES) == ["train", "evaluate", "report"]
  first.workdir.rmtree()
  second.open()  # what was taken over is enough to go on


def test_a_start_that_was_killed_while_it_was_copied_is_copied_again(tmp_path):
  finished_start(tmp_path)
  second = make(tmp_path, "second", change=setter("start", str(tmp_path / "first")))
  (tmp_path / "second" / "policy" / "base").mkdir(parents=True)
  (tmp_path / "second" / "policy" / "base" / "model.safetensors").write_bytes(b"ba")
  second.open()
  assert (second.policy_path("base") / "model.safetensors").read_bytes() == b"base"
  assert sorted(p.name for p in (tmp_path / "second" / "policy").iterdir()) == ["base", "sft"]


def test_a_start_of_another_seed_or_model_is_refused(tmp_path):
  finished_start(tmp_path, change=setter("seed", 4))
  with pytest.raises(ConfigError, match=r"started from another config \(seed: 4 there, 0 here\)"):
    make(tmp_path, "second", change=setter("start", str(tmp_path / "first"))).open()
  make(tmp_path, "unfinished").open()
  with pytest.raises(ConfigError, match="unfinished is no work directory with a finished sft stage"):
    make(tmp_path, "third", change=setter("start", str(tmp_path / "unfinished"))).open()


def test_a_start_is_taken_over_from_a_store_and_into_one(tmp_path, monkeypatch):
  bucket = fake_store.install(tmp_path, monkeypatch)
  finished_start(tmp_path)
  config = TINY("seed")
  config.start = str(tmp_path / "first")
  (bucket / "second" / "policy" / "sft").mkdir(parents=True)
  (bucket / "second" / "policy" / "sft" / "model.safetensors").write_bytes(b"s")  # a copy that was broken off
  Run(config, "gs://bucket/second").open()
  config.start = "gs://bucket/second"
  third = Run(config, tmp_path / "third")
  third.open()
  for place in (bucket / "second", tmp_path / "third"):
    assert (place / "policy" / "sft" / "model.safetensors").read_bytes() == b"sft"
    assert sorted(p.name for p in (place / "policy" / "base").iterdir()) == ["config.json", "model.safetensors"]
  assert third.plan(STAGES) == ["train", "evaluate", "report"]


def test_a_start_from_before_newer_fields_is_taken_over_where_they_change_nothing(tmp_path):
  place = finished_start(tmp_path).workdir / "config.json"
  written = read_json(place)
  for section, name in (("model", "preset"), ("model", "remat"), ("analysis", "ask")):
    del written[section][name]
  del written["base"]["optimizer"]["moment_dtype"]
  write_json(place, written)
  begin = lambda name, change: make(tmp_path, name, change=change).open()  # noqa: E731
  start = setter("start", str(tmp_path / "first"))
  begin("same", start)
  for field, value, told in (
    ("model.remat", "full", "model.remat: none there, full here"),
    ("base.optimizer.moment_dtype", "bfloat16", "base.optimizer.moment_dtype: float32 there, bfloat16 here"),
    ("model.shape.hidden_size", 96, "model.shape.hidden_size: 64 there, 96 here"),
  ):
    with pytest.raises(ConfigError) as raised:
      begin(field, lambda config, f=field, v=value: (start(config), setter(f, v)(config)))
    assert str(raised.value) == f"config.start={tmp_path / 'first'} started from another config ({told})"
  del written["model"]["scan_layers"]  # as old as the model
  write_json(place, written)
  with pytest.raises(ConfigError, match="model.scan_layers: None there, False here"):
    begin("unknown", start)


def test_a_run_goes_on_in_a_folder_from_before_newer_fields(tmp_path):
  first = make(tmp_path)
  first.open()
  first.finish("base", {})
  written = read_json(tmp_path / "w" / "config.json")
  del written["actor_mesh"], written["train"]["theory_every"]
  write_json(tmp_path / "w" / "config.json", written)
  make(tmp_path).open()
  with pytest.raises(ConfigError, match="train.theory_every: 0 there, 3 here"):
    make(tmp_path, change=setter("train.theory_every", 3)).open()


# ---- how an analysis is asked for


def test_asking_in_a_turn_goes_on_from_the_very_ids_of_the_episode(tmp_path):
  run = make(tmp_path, change=setter("analysis.ask", "turn"))
  turn = lambda prompt, response: Turn("o", (), "p", prompt, response, [0.0] * len(response), "r", "a", True, 0.0)  # noqa: E731
  ids = [7, 8], [9, 2], [10], [11, 12]  # 2 ends a turn: the first response has ended, the second was cut off
  episode = Trajectory("t", "f", "s", "transcript", 0, 0, [turn(*ids[:2]), turn(*ids[2:])], True, 1.0, False)
  told = []

  class Tokenizer:
    stop_ids = (2,)

    def following(self, user, *, ended):
      told.append((user, ended))
      return [20, 21]

  run.tokenizer = Tokenizer()
  assert run.analysis_prompt(episode) == [7, 8, 9, 2, 10, 11, 12, 20, 21]
  assert all(type(i) is int for i in run.analysis_prompt(episode))
  episode.turns.pop()
  episode.won = False
  assert run.analysis_prompt(episode)[:4] == [7, 8, 9, 2]
  assert told[0] == ("Write the skill.\nIt was a success.", False)
  assert told[-1] == ("Write the skill.\nIt was a failure.", True)


# ---- models, panel, rows


def test_model_paths(tmp_path):
  assert resolve_model(str(tmp_path)) == str(tmp_path)
  assert resolve_model("gs://bucket/model") == "gs://bucket/model"
  assert resolve_model("package:seed_jax/models/hf.py").endswith("seed_jax/models/hf.py")
  with pytest.raises(ConfigError, match="seed_jax carries no nothing.gguf"):
    resolve_model("package:seed_jax/nothing.gguf")
  with pytest.raises(ConfigError, match="package no_such_package is not installed"):
    resolve_model("package:no_such_package/x")
  with pytest.raises(ConfigError, match="does not exist"):
    resolve_model(str(tmp_path / "nope"))


def test_a_pretrained_base_lies_where_the_config_says(tmp_path):
  run = make(tmp_path, change=setter("model.path", str(tmp_path)))
  assert run.policy_path("base") == tmp_path and run.policy_path("sft") == tmp_path / "w" / "policy" / "sft"
  assert make(tmp_path).policy_path("base") == tmp_path / "w" / "policy" / "base"


def test_the_panel_is_fixed(tmp_path):
  run = make(tmp_path)
  ids = [task.id for task in run.panel()]
  assert len(ids) == 12 and ids == sorted(set(ids)) and read_json(tmp_path / "w" / "panel.json")["tasks"] == ids
  assert [task.id for task in make(tmp_path).panel()] == ids
  assert [task.id for task in make(tmp_path, "other", change=setter("seed", 9)).panel()] == ids  # not the run's seed
  with pytest.raises(ConfigError, match="the evaluation panel of .* was 12 tasks"):
    make(tmp_path, change=setter("evaluate.seed", 1)).panel()


@pytest.mark.parametrize(
  "mesh, micro_tokens, rows",
  [((1, 1, 1), 1_280, 4), ((1, 1, 1), 10, 1), ((2, 2, 1), 1_280, 4), ((2, 2, 1), 10, 4), ((1, 4, 2), 4_000, 12)],
)
def test_rows_fill_the_micro_batch_and_divide_over_the_mesh(tmp_path, mesh, micro_tokens, rows):
  def change(config):
    config.mesh.data, config.mesh.fsdp, config.mesh.tp = mesh
    config.train.micro_tokens = micro_tokens

  run = make(tmp_path, change=change)
  (shape,) = run.row_shapes(run.config.train)
  assert shape == RowShape(320, 240, rows, 320)  # 0.75 of 320 are responses


def test_room_for_skills_makes_the_skill_rows_longer(tmp_path):
  def change(config):
    config.train.skill_room = 0.125

  run = make(tmp_path, change=change)
  (shape,) = run.row_shapes(run.config.train)
  assert shape.room == (320, 360, 240)


def test_seeds_differ_by_purpose_and_stay():
  assert process_seed(0, "collect") == process_seed(0, "collect")
  assert len({process_seed(s, p) for s in range(20) for p in ("collect", "base corpus", "train tasks")}) == 60
  assert all(0 <= process_seed(s, "x") < 2**31 for s in range(50))


def test_the_headline_says_what_will_run(tmp_path):
  line = make(tmp_path).headline("c.py:seed", ["base", "train"], ["train"])
  assert line.startswith(f"c.py:seed (seed) in {tmp_path}/w; 8 cpu devices, jax ") and line.endswith(
    "base (done), train"
  )
  assert "\n" not in line and json.dumps(line)
