"""The command line: `python -m seed_jax.main --config=FILE[:METHOD] --workdir=DIR` runs the stages of a config.

Stages that are done are skipped, and one that was interrupted goes on where it stopped: the same command again is
always right. SIGTERM, SIGUSR1 or a maintenance notice stops a run at the next place where nothing is lost, with exit
code 75. `--stages=train,evaluate` runs some of them, `--config.FIELD=VALUE` changes a field of the config. What a user
can get wrong ends in one line on stderr that begins with `error: ` and in a non-zero exit; `--traceback` (or
SEED_JAX_TRACEBACK=1) shows where it was raised.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import traceback
import warnings

from absl import flags, logging

from seed_jax import preemption
from seed_jax.errors import AGAIN, UsageError, failed, one_line, raised_by_us
from seed_jax.fields import at

OPTIONS = ("config", "workdir", "stages", "list", "plain", "resume_from", "topology", "traceback")
CACHES = ("JAX_COMPILATION_CACHE_DIR", "SEED_JAX_CACHE")


def cli(argv: list[str]) -> int:
  """Runs a command line (argv[0] is the program) and returns its exit code.

  0: done; 1: failed; 2: a wrong command line; 75: asked to stop (SIGTERM, SIGUSR1, a maintenance notice), to be run
  again; 76: another host failed or is gone, to be run again; 130: interrupted.
  """
  quiet()
  show = "--traceback" in argv or os.environ.get("SEED_JAX_TRACEBACK", "0") not in ("", "0")
  place = None
  try:
    values = parse(argv)
    place = values.workdir
    if values.help:
      print("\n".join([__doc__, *(f"--{name}: {values[name].help}" for name in OPTIONS)]))
    elif values.list:
      print(listing(values.workdir))
    else:
      work(values)
    return 0
  except (KeyboardInterrupt, Exception) as error:
    if isinstance(error, preemption.Preempted):
      print(f"preempted ({error}): nothing is lost; {AGAIN}", file=sys.stderr, flush=True)
      return preemption.EXIT_CODE
    if show:
      traceback.print_exc()
    return failed(error, place)


def work(values: flags.FlagValues) -> None:
  """The stages of a parsed command line, one after the other."""
  if values.config is None or not values.workdir:
    missing = "--config=FILE" if values.config is None else "--workdir=DIR"
    raise UsageError(
      f"{missing} is missing; example: python -m seed_jax.main --config=configs/quickstart.py --workdir=runs/quickstart"
    )
  from seed_jax import hosts
  from seed_jax import run as run_module
  from seed_jax.metrics import say

  stages = chosen_stages(values.stages, run_module.STAGES, run_module.EXTRA_STAGES)
  hosts.start()
  run_module.set_up_jax(cache_folder())
  # signals are caught until all hosts have come to the end, of a run that was asked to stop too
  with (
    contextlib.ExitStack() as stack,
    preemption.watch(preemption.Notice()) as notice,
    preemption.on_preempted(hosts.finish),
  ):
    options = dict(plain=values.plain, resume_from=values.resume_from, notice=notice)
    if "preflight" in stages:  # for chips that are not here: no mesh, and no stage that needs one
      if stages != ["preflight"] or not values.topology:
        raise UsageError("preflight runs alone and for a slice; example: --stages=preflight --topology=v5e:4x4")
      from seed_jax.preflight import Preflight

      run = Preflight(values.config, values.workdir, topology=values.topology, **options)
    else:
      run = run_module.Run(values.config, values.workdir, **options)
    if not set(stages) <= {"preflight", "report"}:  # which may look on while another process trains
      run.check()
      stack.enter_context(run_module.held(run.workdir))
    hosts.first_then_others("the work directory", lambda: run.open(lambda: check_stages(stages, run)))
    left = run.plan(stages)
    say(run.headline(values.config_path, stages, left))
    for stage in left:
      notice.meet()
      stage_function(stage)(run)
    hosts.finish()


def stage_function(stage: str):
  """`run_<stage>` of `seed_jax.<stage>`; a stage imports what it needs only when it runs."""
  module = "library_stage" if stage == "library" else stage  # library.py is the data
  return getattr(importlib.import_module(f"seed_jax.{module}"), f"run_{stage}")


def check_stages(stages: list[str], run) -> None:
  """Raises ConfigError where one of the stages has more to ask of a config than `run.check`."""
  if "compare" in stages:
    from seed_jax import compare

    compare.plan(run)


# ---------------------------------------------------------------- the command line


def parse(argv: list[str]) -> flags.FlagValues:
  """The flags of a command line; `config` is the loaded ConfigDict with its overrides, or None.

  Raises UsageError or absl's flags.Error.
  """
  from ml_collections import config_flags

  if not flags.FLAGS.is_parsed():
    flags.FLAGS(argv[:1])  # libraries ask absl for their own flags
  path, rest = take_config(argv)
  values = flags.FlagValues()
  define = dict(flag_values=values, module_name=__name__)
  flags.DEFINE_string("workdir", None, "where everything of this run lies; may be gs://", **define)
  flags.DEFINE_list(
    "stages", [], "the stages to run, in this order; default: all but library, compare and preflight", **define
  )
  flags.DEFINE_bool("plain", None, "progress as lines instead of bars", **define)
  flags.DEFINE_bool("list", False, "print the stages and methods, and what is done in --workdir, and stop", **define)
  flags.DEFINE_integer("resume_from", None, "go back to this checkpoint of the stage under way", **define)
  flags.DEFINE_string("topology", None, "the slice that the stage preflight compiles for, as v5e:4x4", **define)
  flags.DEFINE_bool("traceback", False, "show where an error was raised", **define)
  flags.DEFINE_bool("help", False, "show this help", short_name="h", **define)
  flags.DEFINE_string(
    "config_path", path, "what --config says: a config file, with an argument after a colon", **define
  )
  config = None
  if path is not None:
    config = load_config(path)
    check_fields(config, rest)
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=rest)
  elif any(re.match(r"--?(no)?config\.", a) for a in rest):
    raise UsageError("--config=FILE is missing: a field of a config needs the config")
  else:
    flags.DEFINE_string(
      "config", None, "a config file, with an argument after a colon: configs/quickstart.py:grpo", **define
    )
  try:
    left = values(rest)[1:]
  except flags.IllegalFlagValueError as error:
    found = re.match(r"flag --config\.([\w.]+)=(.*?): ", str(error), re.DOTALL)
    if not found:
      raise
    present, given = at(config, found[1]), f"--config.{found[1]}={found[2]}"
    if hasattr(present, "keys"):
      raise UsageError(f"{given}: this is a section; set its fields: {', '.join(present)}") from error
    raise UsageError(f"{given} is no {type(present).__name__}; the field is {present!r} in the config") from error
  if left:
    raise UsageError(f"unexpected argument {left[0]!r}; flags begin with -- and hold their value after =")
  return values


def take_config(argv: list[str]) -> tuple[str | None, list[str]]:
  """The value of --config and the other arguments; the last one counts, as with every flag."""
  path, rest, items = None, [], iter(argv)
  for item in items:
    if re.fullmatch(r"--?config", item):
      path = next(items, None)
      if path is None:
        raise UsageError("--config has no value; example: --config=configs/quickstart.py")
    elif re.match(r"--?config=", item):
      path = item.partition("=")[2]
    else:
      rest.append(item)
  return path, rest


def load_config(path: str):
  """The ConfigDict of FILE or FILE:ARGUMENT, locked. Raises UsageError in one line for whatever goes wrong in it."""
  from ml_collections import ConfigDict

  file, colon, argument = path.partition(":")
  if not pathlib.Path(file).is_file():
    folder = pathlib.Path(file).parent
    raise UsageError(
      f"the config file {file!r} does not exist{near(pathlib.Path(file).name, [p.name for p in folder.glob('*.py')])}"
    )
  spec = importlib.util.spec_from_file_location("seed_jax_config", file)
  if spec is None:
    raise UsageError(f"the config file {file!r} is no Python file")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    config = module.get_config(*([argument] if colon else []))
  except Exception as error:
    if isinstance(error, ValueError) and raised_by_us(error):  # such as an unknown method
      raise UsageError(one_line(error)) from error
    raise UsageError(f"the config {path} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error
  if not isinstance(config, ConfigDict):
    raise UsageError(f"get_config of {file} returned a {type(config).__name__}, not a ConfigDict")
  return config.lock()


def check_fields(config, argv: list[str]) -> None:
  """Raises UsageError for the first --config.FIELD that the config does not have, with what it may have meant."""
  fields = list(_fields(config))
  for item in argv:
    found = re.match(r"--?(?:no)?config\.([^=\s]+)", item)
    if found and found[1] not in fields:
      last = {name: name.rpartition(".")[2] for name in fields}
      same = [name for name in fields if last[name] == found[1].rpartition(".")[2]]
      raise UsageError(f"the config has no field {found[1]!r}{near(found[1], fields, same)}")


def chosen_stages(asked: list[str], default: tuple[str, ...], extra: tuple[str, ...] = ()) -> list[str]:
  """The stages that --stages asks for, those of `default` where it does not. Raises UsageError for an unknown one."""
  known = (*default, *extra)
  for stage in asked:
    if stage not in known:
      raise UsageError(f"the stage {stage!r} is unknown; there are {', '.join(known)}{near(stage, known)}")
  return list(dict.fromkeys(asked)) or list(default)


def listing(workdir: str | None) -> str:
  """The stages, what is done of them in `workdir`, and the methods."""
  from seed_jax import methods, run

  lines = [f"stages, in order (only where asked for: {', '.join(run.EXTRA_STAGES)}):"]
  for stage in (*run.STAGES, *run.EXTRA_STAGES):
    done = workdir and (run.epath.Path(workdir) / f"{stage}.json").exists()
    lines.append(f"  {stage:<10}" + ("  done" if done else "  not done" if workdir else ""))
  lines.append("methods (--config=FILE:METHOD):")
  width = max(map(len, methods.names())) + 2
  return "\n".join(lines + [f"  {name:<{width}}{methods.get(name).source}" for name in methods.names()])


def near(name: str, known, first=()) -> str:
  """'; did you mean a or b?' for the names that resemble `name`, those of `first` before others."""
  found = list(dict.fromkeys([*list(first)[:2], *difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)]))[:3]
  return f"; did you mean {' or '.join(found)}?" if found else ""


def _fields(config, prefix=""):
  for name in config:
    yield prefix + name
    if hasattr(config[name], "keys"):
      yield from _fields(config[name], f"{prefix}{name}.")


# ---------------------------------------------------------------- surroundings


def cache_folder() -> str | None:
  """Where compiled programs are kept from process to process; None, with a warning, where nothing can be written."""
  folder = next(
    (os.environ[name] for name in CACHES if os.environ.get(name)), os.path.expanduser("~/.cache/seed_jax/xla")
  )
  if "://" in folder:
    return folder
  try:
    if folder.startswith("~"):
      raise OSError(0, "there is no home directory")
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      return folder
  except OSError as error:
    print(
      f"warning: compiled programs are not kept ({folder}: {error.strerror}); {CACHES[1]}=FOLDER names another place",
      file=sys.stderr,
    )
    return None


def quiet() -> None:
  """Silences what libraries tell their developers. Effective where it comes before they are loaded."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
  logging.use_absl_handler()
  logging.set_verbosity(logging.ERROR)
  logging.get_absl_handler().addFilter(_is_news)
  if not sys.warnoptions:
    warnings.simplefilter("ignore")


def _is_news(record) -> bool:
  """Not what orbax's threads log about an error: it is raised too, where the checkpoint is waited for."""
  return f"{os.sep}orbax{os.sep}" not in record.pathname


if __name__ == "__main__":
  sys.exit(cli(sys.argv))
