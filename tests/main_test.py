import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import urllib.error

import absl.logging
import pytest

from envs import household
from seed_jax import analyzers, main, methods, run, trajectory, workdir
from seed_jax.checkpoint import CheckpointError

ROOT = pathlib.Path(__file__).parent.parent
TINY = str(ROOT / "tests" / "tiny_config.py")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
  monkeypatch.setenv("SEED_JAX_CACHE", str(tmp_path / "cache"))
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  monkeypatch.delenv("SEED_JAX_TRACEBACK", raising=False)
  monkeypatch.setattr(run, "set_up_jax", lambda folder: None)  # the cache is this process's, not the test's


@pytest.fixture
def fault(capsys):
  """Runs a command line that must fail in one line; returns that line without `error: `."""

  def call(*arguments, code=2):
    found = main.cli(["main", *arguments])
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert found == code and len(lines) == 1 and "Traceback" not in captured.err + captured.out, captured
    assert captured.err.splitlines()[-1] == lines[0]
    return lines[0].removeprefix("error: ")

  return call


def stage(monkeypatch, action):
  """Every stage becomes `action(run)`, so that a test sees main and not the training."""
  monkeypatch.setattr(main, "stage_function", lambda name: action)


def raiser(error):
  def action(_):
    raise error

  return action


def config(tmp_path, *more):
  return [f"--config={TINY}", f"--workdir={tmp_path / 'w'}", *more]


def turn():
  return trajectory.Turn("you see a cup", ("take cup",), "act", [1], [2], [-0.5], "take cup", "take cup", True, 1.0)


# ---- the command line


def test_config_and_workdir_must_be_named(fault, tmp_path):
  assert fault(f"--workdir={tmp_path}").startswith("--config=FILE is missing; example: ")
  assert fault(f"--config={TINY}").startswith("--workdir=DIR is missing; example: ")
  assert fault("--config").startswith("--config has no value")
  assert "needs the config" in fault("--config.seed=1")


def test_a_config_that_cannot_be_loaded(fault, tmp_path):
  (tmp_path / "tiny_config.py").write_text("")
  assert fault(f"--config={tmp_path}/tiny_confg.py") == (
    f"the config file '{tmp_path}/tiny_confg.py' does not exist; did you mean tiny_config.py?"
  )
  for text, told in [
    ("def get_config(: pass", "SyntaxError"),
    ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    ("x = 1", "get_config"),
    ("def get_config(): raise ValueError('first\\nsecond')", "ValueError: first second"),
    ("def get_config(): return 3", "returned a int, not a ConfigDict"),
  ]:
    (tmp_path / "c.py").write_text(text)
    assert told in fault(f"--config={tmp_path}/c.py", f"--workdir={tmp_path}/w")
  assert not (tmp_path / "w").exists()


def test_an_unknown_method_is_refused_before_anything_is_written(fault, tmp_path):
  told = fault(f"--config={TINY}:sede", f"--workdir={tmp_path}/w")
  assert told == f"method 'sede' is unknown; choose one of {', '.join(methods.names())}"
  assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
  "argument, told",
  [
    ("--config.nonsense=1", "the config has no field 'nonsense'"),
    ("--config.train.nonsense=1", "the config has no field 'train.nonsense'"),
    ("--config.sead=1", "the config has no field 'sead'; did you mean seed?"),
    ("--config.train.iteration=3", "the config has no field 'train.iteration'; did you mean train.iterations"),
    ("--config.iterations=3", "the config has no field 'iterations'; did you mean profile.iterations or train.iter"),
    ("--noconfig.train.per_stop", "the config has no field 'train.per_stop'; did you mean train.per_step"),
    ("--config.train.iterations=abc", "--config.train.iterations=abc is no int; the field is 4 in the config"),
    ("--config.seed=1.5", "--config.seed=1.5 is no int; the field is 0 in the config"),
    ("--config.train.loss=3", "--config.train.loss=3: this is a section; set its fields: "),
    ("--config.train.iterations", "Missing value for flag --config.train.iterations"),
    ("--nonsense=1", "Unknown command line flag 'nonsense'"),
    ("--resume_from=x", "flag --resume_from=x: "),
    ("stray", "unexpected argument 'stray'"),
    (
      "--stages=base,trian",
      "the stage 'trian' is unknown; there are base, collect, annotate, sft, train, evaluate, report",
    ),
    ("--stages=preflight,train", "preflight runs alone and for a slice"),
  ],
)
def test_a_wrong_argument_is_named(fault, tmp_path, argument, told):
  assert fault(*config(tmp_path, "--topology=v4-8", argument)).startswith(told)
  assert not (tmp_path / "w").exists()


def test_overrides_reach_the_config_in_any_order(monkeypatch, tmp_path):
  seen = []
  stage(monkeypatch, lambda run: seen.append(run.config))
  arguments = [
    "--config.train.loss.opd_beta=2.5",
    *config(tmp_path),
    "--config.seed",
    "7",
    "--config.train.row_lengths=(64,128)",
  ]
  assert main.cli(["main", *arguments, "--stages=base", "--config.train.per_step", f"--config={TINY}:grpo"]) == 0
  assert (seen[0].seed, seen[0].train.loss.opd_beta, seen[0].method) == (7, 2.5, "grpo")
  assert tuple(seen[0].train.row_lengths) == (64, 128) and seen[0].train.per_step is True


def test_help_and_list_answer_without_a_config(capsys, tmp_path):
  (tmp_path / "base.json").write_text("{}")
  assert main.cli(["main", "--help"]) == 0
  assert all(f"--{name}: " in capsys.readouterr().out for name in ("config",))
  assert main.cli(["main", "--list", f"--workdir={tmp_path}"]) == 0
  out = capsys.readouterr().out
  assert (
    "base        done" in out
    and "collect     not done" in out
    and all(f"\n  {name} " in out for name in methods.names())
  )


# ---- stages


def test_stages_run_in_order_skip_what_is_done_and_say_so(monkeypatch, capsys, tmp_path):
  ran = []
  monkeypatch.setattr(main, "stage_function", lambda name: lambda run: (ran.append(name), run.finish(name, {})))
  assert main.cli(["main", *config(tmp_path, "--stages=base,collect")]) == 0
  assert ran == ["base", "collect"]
  assert main.cli(["main", *config(tmp_path)]) == 0
  assert ran == ["base", "collect", "annotate", "sft", "train", "evaluate", "report"]
  head = capsys.readouterr().err.splitlines()[-1]
  assert head.startswith(f"{TINY} (seed) in {tmp_path}/w; 8 cpu devices, jax ")
  assert head.endswith("stages: base (done), collect (done), annotate, sft, train, evaluate, report")
  del ran[:]
  assert main.cli(["main", *config(tmp_path)]) == 0
  assert ran == ["report"]  # cheap, and what it shows may have changed


@pytest.mark.parametrize(
  "stages, told",
  [
    ("collect", "stage collect needs stage base, which is not done in "),
    ("base,annotate", "stage annotate needs stage collect"),
    ("sft", "stage sft needs stage annotate"),
    ("train", "stage train needs stage sft"),
    ("evaluate", "stage evaluate needs stage train"),
  ],
)
def test_a_stage_without_its_predecessor_names_it(monkeypatch, fault, tmp_path, stages, told):
  stage(monkeypatch, raiser(AssertionError("nothing may run")))
  assert fault(*config(tmp_path, f"--stages={stages}"), code=1).startswith(told)


def test_a_method_without_sft_needs_the_base_policy_only(monkeypatch, fault, tmp_path):
  stage(monkeypatch, lambda run: None)
  told = fault(f"--config={TINY}:grpo", f"--workdir={tmp_path}/w", "--stages=train", code=1)
  assert told.startswith("stage train needs stage base")
  assert main.cli(["main", f"--config={TINY}:grpo", f"--workdir={tmp_path}/w", "--stages=base,train"]) == 0


def test_a_workdir_of_another_config_lists_the_fields(monkeypatch, fault, tmp_path):
  stage(monkeypatch, lambda run: run.finish("base", {}))
  assert main.cli(["main", *config(tmp_path, "--stages=base")]) == 0
  told = fault(*config(tmp_path, "--config.seed=3", "--config.train.iterations=9"), code=1)
  fields = "(seed: 0 there, 3 here; train.iterations: 4 there, 9 here)"
  assert told == f"{tmp_path}/w belongs to another config {fields}; choose another --workdir"


# ---- what stages raise


def test_a_missing_model_folder(fault, tmp_path):
  assert fault(*config(tmp_path, "--config.model.path=/nope"), code=1) == "config.model.path=/nope does not exist"
  assert fault(*config(tmp_path, "--config.model.path=package:no_such_package/x.gguf"), code=1).endswith(
    "no_such_package is not installed"
  )
  assert not (tmp_path / "w").exists()


def test_a_model_of_an_unsupported_architecture(fault, tmp_path):
  (tmp_path / "m").mkdir()
  (tmp_path / "m" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
  told = fault(*config(tmp_path, f"--config.model.path={tmp_path}/m"), code=1)
  assert "architecture GPT2LMHeadModel is not supported; supported: " in told


def test_a_damaged_checkpoint_offers_the_last_good_one(monkeypatch, fault, tmp_path):
  stage(monkeypatch, raiser(CheckpointError("checkpoint 8 is damaged; the last good one is 4: add --resume_from=4")))
  assert fault(*config(tmp_path), code=1).endswith("add --resume_from=4")
  seen = []
  stage(monkeypatch, lambda run: seen.append((run.resume_step("base"), run.resume_step("sft"))))
  assert main.cli(["main", *config(tmp_path, "--resume_from=4", "--stages=base")]) == 0
  assert seen == [(4, None)]  # the stage under way, not those that only begin


def test_an_analyzer_that_is_down(monkeypatch, fault, tmp_path):
  def ask(_):
    episode = trajectory.Trajectory(
      "t", "pick", "pick a cup", "transcript", 0, 0, [turn()], won=True, episode_return=1.0, truncated=False
    )
    analyzers.ExternalAnalyzer(base_url="http://127.0.0.1:9/v1", model="m", max_attempts=1).analyze([episode] * 3)

  stage(monkeypatch, ask)
  told = fault(*config(tmp_path), code=1)
  assert told.startswith("analyzer http://127.0.0.1:9/v1") and "unexpected" not in told


@pytest.mark.parametrize(
  "error, told",
  [
    (
      ModuleNotFoundError("No module named 'alfworld'", name="alfworld"),
      "a package is missing: No module named 'alfworld'; pip install alfworld",
    ),
    (
      ImportError("this needs the engine: pip install seed_jax[alfworld]"),
      "a package is missing: this needs the engine: pip install seed_jax[alfworld]",
    ),
    (
      OSError(28, "No space left on device", "/data/x"),
      "/data/x: the disk is full (No space left on device); the same command goes on from where it stopped once there",
    ),
    (OSError(122, "Disk quota exceeded", "/data/x"), "/data/x: the disk is full (Disk quota exceeded); the same"),
    (
      ValueError(
        'RESOURCE_EXHAUSTED: Error writing "x/0.0" in OCDBT database at local file "/data/1/ocdbt.process_0/": Failed '
        "writing: \"/data/1/d/3d\": Failed to write 9 bytes to file 4: No space left on device [os_error_code='28']"
      ),
      "/data/1/ocdbt.process_0/: the disk is full (No space left on device); the same command goes on",
    ),
    (PermissionError(13, "Permission denied", "/data/x"), "/data/x: Permission denied; "),
    (FileNotFoundError("no such model: /m"), "no such model: /m"),
    (MemoryError(), "out of memory; lower config.train.micro_tokens"),
    (RuntimeError("RESOURCE_EXHAUSTED: 3 GB"), "out of memory; lower config.train.micro_tokens"),
    (ZeroDivisionError("division by zero"), "unexpected ZeroDivisionError: division by zero (add --traceback"),
    (urllib.error.URLError("a\nb"), "<urlopen error a b>"),
  ],
)
def test_errors_of_a_stage_are_one_line(monkeypatch, fault, tmp_path, error, told):
  stage(monkeypatch, raiser(error))
  assert fault(*config(tmp_path), code=1).startswith(told)


def test_a_full_disk_without_a_path_is_that_of_the_work_directory(monkeypatch, fault, tmp_path):
  stage(monkeypatch, raiser(OSError(28, "No space left on device")))
  told = f"{tmp_path / 'w'}: the disk is full (No space left on device); "
  assert fault(*config(tmp_path), code=1).startswith(told)

  def closing(_):
    try:
      raise OSError(28, "No space left on device")
    finally:
      raise RuntimeError("the file is closed")

  stage(monkeypatch, closing)
  assert fault(*config(tmp_path), code=1).startswith(told)


def test_what_threads_of_the_checkpoint_library_log_is_not_told_twice():
  main.quiet()
  main.quiet()
  handler = absl.logging.get_absl_handler()
  record = logging.LogRecord("absl", logging.ERROR, "/x/orbax/checkpoint/future.py", 1, "Traceback", (), None)
  assert not handler.filter(record)
  record.pathname = "/x/jax/other.py"
  assert handler.filter(record)


def test_a_value_error_is_ours_or_unexpected(monkeypatch, fault, tmp_path):
  stage(monkeypatch, lambda run: household.Household().tasks("nowhere", 3, 0))
  assert not fault(*config(tmp_path), code=1).startswith("unexpected")
  stage(monkeypatch, lambda run: json.loads("{"))
  assert fault(*config(tmp_path), code=1).startswith("unexpected JSONDecodeError: ")


def test_ctrl_c_is_one_line_and_130(monkeypatch, fault, tmp_path):
  stage(monkeypatch, raiser(KeyboardInterrupt()))
  assert fault(*config(tmp_path), code=130) == "interrupted; the same command goes on from where it stopped"


@pytest.mark.parametrize("asked", ["flag", "environment"])
def test_a_traceback_only_where_asked_for(monkeypatch, capsys, tmp_path, asked):
  stage(monkeypatch, raiser(ZeroDivisionError("x")))
  if asked == "environment":
    monkeypatch.setenv("SEED_JAX_TRACEBACK", "1")
  assert main.cli(["main", *config(tmp_path, *(["--traceback"] if asked == "flag" else []))]) == 1
  err = capsys.readouterr().err
  assert "Traceback (most recent call last)" in err and err.splitlines()[-1].startswith(
    "error: unexpected ZeroDivisionError"
  )


# ---- surroundings


def test_compiled_programs_lie_where_the_environment_says(monkeypatch, capsys, tmp_path):
  assert main.cache_folder() == str(tmp_path / "cache")
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
  assert main.cache_folder() == str(tmp_path / "jax") and (tmp_path / "jax").is_dir()
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
  assert main.cache_folder() == "gs://bucket/cache"
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  monkeypatch.delenv("SEED_JAX_CACHE")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  assert main.cache_folder() == str(tmp_path / "home" / ".cache" / "seed_jax" / "xla")
  assert capsys.readouterr().err == ""
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("HOME", str(tmp_path / "file"))  # no folder can be made in it
  assert main.cache_folder() is None
  assert capsys.readouterr().err.startswith("warning: compiled programs are not kept (")


def test_the_program_itself_says_one_line_and_exits_with_the_code(tmp_path):
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-m", "seed_jax.main", *config(tmp_path, "--config.nonsense=1")]
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr == "error: the config has no field 'nonsense'\n"


def test_a_run_that_is_asked_to_stop_exits_with_75_and_says_how_to_go_on(monkeypatch, tmp_path, capsys):
  stages = []

  def ask(run):
    stages.append(run)
    os.kill(os.getpid(), signal.SIGTERM)  # heeded before the next stage at the latest

  stage(monkeypatch, ask)
  before = signal.getsignal(signal.SIGTERM)
  assert main.cli(["main", *config(tmp_path)]) == 75 and len(stages) == 1
  told = capsys.readouterr().err.splitlines()
  assert told[-1] == f"preempted (SIGTERM): nothing is lost; {main.AGAIN}" and not any("error" in t for t in told)
  assert signal.getsignal(signal.SIGTERM) is before


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("process 7 on there", file=file, flush=True)
print("ready", flush=True)
time.sleep(600)
"""


def test_two_processes_do_not_share_a_work_directory(monkeypatch, tmp_path, fault, capsys):
  stages = []
  stage(monkeypatch, stages.append)
  (tmp_path / "w").mkdir()
  command = [sys.executable, "-c", HOLDER, str(tmp_path / "w" / workdir.LOCK)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
    try:
      assert other.stdout.readline() == "ready\n"
      told = fault(*config(tmp_path, "--stages=base"), code=1)
      place = f"{tmp_path}/w is in use by process 7 on there; "
      assert told == place + "stop that one or wait for it, or choose another --workdir" and not stages
      assert not (tmp_path / "w" / "config.json").exists()
      assert main.cli(["main", *config(tmp_path, "--stages=report")]) == 0  # looks on
    finally:
      other.kill()  # and its lock is gone
  for _ in range(2):  # of one process after the other
    assert main.cli(["main", *config(tmp_path, "--stages=base")]) == 0
  assert len(stages) == 3
  assert f"process {os.getpid()} on " in (tmp_path / "w" / workdir.LOCK).read_text()


def test_a_work_directory_in_object_storage_has_no_lock(tmp_path):
  with workdir.held("gs://bucket/w"), workdir.held("gs://bucket/w"):
    pass
  with workdir.held(tmp_path / "w"), pytest.raises(workdir.ConfigError, match="is in use by process"):
    with workdir.held(tmp_path / "w"):
      pass


def test_what_is_profiled_may_change_within_a_work_directory(monkeypatch, tmp_path, fault):
  stage(monkeypatch, lambda run: run.finish("base", {}))
  assert main.cli(["main", *config(tmp_path), "--stages=base"]) == 0
  assert main.cli(["main", *config(tmp_path), "--stages=base", "--config.profile.iterations=(3,4)"]) == 0
  assert "belongs to another config" in fault(*config(tmp_path), "--config.checkpoint.keep=3", code=1)
