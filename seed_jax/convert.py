"""Weights between orbax and Hugging Face: `python -m seed_jax.convert --from=SOURCE --to=DIR [--dtype=bfloat16]`.

--from=WORKDIR[:STEP] --to=HF_DIR: the policy of a checkpoint of training (the newest by default) as a directory that
`transformers` loads, with its tokenizer. WORKDIR/checkpoints/sft[:STEP] names another stage.
--from=HF_DIR --to=ORBAX_DIR: the parameters of a Hugging Face directory or GGUF file in `ORBAX_DIR/params`, which
`orbax.checkpoint.StandardCheckpointer().restore` reads, their sums in `params.json`, and all else in `ORBAX_DIR/model`.
--from=ORBAX_DIR --to=HF_DIR: and back. Every array of a checkpoint and of an ORBAX_DIR is compared with its sum.

Each path may be gs://. Weights keep their dtype unless --dtype says otherwise: there and back they are equal bit for
bit. It runs on a CPU. Memory: of a checkpoint, its largest array and a tensor; of a Hugging Face directory, the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
import re
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from absl import flags

from seed_jax.errors import UsageError, describe
from seed_jax.main import quiet

if TYPE_CHECKING:
  from seed_jax.models.config import ModelConfig

OPTIONS = ("from", "to", "dtype", "traceback")
DTYPES = ("float32", "bfloat16")
AGAIN = "begin again"
EXAMPLE = "python -m seed_jax.convert --from=runs/quickstart --to=policy_hf"
PATIENCE = 60.0  # seconds that a failed conversion waits for the threads that still write
TEXTS = (".json", ".txt", ".model", ".jinja")  # of a tokenizer


def cli(argv: list[str]) -> int:
  """Runs a command line (argv[0] is the program); exit codes and errors are those of `seed_jax.main`."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a conversion computes nothing; a TPU may be at work elsewhere
  quiet()
  target = None
  try:
    values = parse(argv)
    target = values["to"].value
    if values.help:
      print("\n".join([__doc__, *(f"--{name}: {values[name].help}" for name in OPTIONS)]))
    else:
      print(convert(values["from"].value, values["to"].value, values.dtype))
    return 0
  except (KeyboardInterrupt, Exception) as error:
    if "--traceback" in argv:
      traceback.print_exc()
    interrupted = isinstance(error, KeyboardInterrupt)
    print("error: " + ("interrupted" if interrupted else describe(error, target, AGAIN)), file=sys.stderr, flush=True)
    return 130 if interrupted else 2 if isinstance(error, (UsageError, flags.Error)) else 1


def parse(argv: list[str]) -> flags.FlagValues:
  """The flags of a command line. Raises UsageError or absl's flags.Error."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS(argv[:1])  # libraries ask absl for their own flags
  values = flags.FlagValues()
  define = dict(flag_values=values, module_name=__name__)
  flags.DEFINE_string("from", None, "a work directory, a Hugging Face directory, a GGUF file or an ORBAX_DIR", **define)
  flags.DEFINE_string("to", None, "the directory to make", **define)
  flags.DEFINE_enum("dtype", None, DTYPES, "of the weights that are written; default: as they are", **define)
  flags.DEFINE_bool("traceback", False, "show where an error was raised", **define)
  flags.DEFINE_bool("help", False, "show this help", short_name="h", **define)
  left = values(argv)[1:]
  if left:
    raise UsageError(f"unexpected argument {left[0]!r}; flags begin with -- and hold their value after =")
  for name in ("from", "to"):
    if not values.help and not values[name].value:
      raise UsageError(f"--{name}=PATH is missing; example: {EXAMPLE}")
  return values


def convert(source: str, target: str, dtype: str | None = None) -> str:
  """Writes `target` from `source`, see the module; returns what was written, in one line.

  Raises UsageError for a source or a target that is none, CheckpointError for a damaged checkpoint, and what
  `hf.load_sharded` raises.
  """
  from etils import epath

  from seed_jax.checkpoint import CheckpointError
  from seed_jax.models import hf

  place, step = split_step(source)
  path = epath.Path(place)
  if not path.exists():
    raise UsageError(f"--from={source}: {place} does not exist")
  stored = ((path / "config.json").exists() or path.is_file()) and not (path / "checkpoints").exists()
  if step is not None and (stored or _is_exported(path)):
    raise UsageError(f"--from={source}: {place} is a model and has no step {step}; leave :{step} out")
  if stored:
    return _to_orbax(path, epath.Path(target), dtype)
  try:
    found = _exported(path) if _is_exported(path) else _checkpoint(path, step)
  except FileNotFoundError as error:
    raise UsageError(f"--from={source}: {error}") from error
  try:
    hf.save(target, found.config, found.params, tokenizer=found.tokenizer, dtype=dtype)
  except CheckpointError as error:  # of an array that is not what it was
    raise CheckpointError(f"{found.name} is damaged ({error}); {found.advice}") from error
  return f"{target}: the parameters of {found.name} for transformers{found.remark}"


def split_step(source: str) -> tuple[str, int | None]:
  """PATH[:STEP] as (path, step)."""
  found = re.fullmatch(r"(.*[^:/]):(\d+)", source)
  return (found[1], int(found[2])) if found else (source, None)


@dataclasses.dataclass(frozen=True)
class Source:
  """Parameters (anything with shape and dtype that numpy reads) and what is needed to describe them."""

  name: str
  config: ModelConfig
  params: dict
  tokenizer: Any
  advice: str  # where they are damaged
  remark: str = ""


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
  """The tokenizer of a Hugging Face directory as its files, byte for byte; what `hf.save` asks of a tokenizer."""

  directory: Any
  stop_ids: tuple[int, ...]

  def save(self, directory) -> None:
    for file in self.directory.iterdir():
      described = file.name in ("config.json", "generation_config.json") or file.name.endswith(".index.json")
      if file.is_file() and file.suffix in TEXTS and not described:
        pathlib.Path(directory, file.name).write_bytes(file.read_bytes())


def tokenizer_files(directory) -> TokenizerFiles:
  """The tokenizer of a directory; it stops where its generation_config.json says, or else its config.json."""
  from seed_jax.metrics import read_json

  stops = None
  for name in ("generation_config.json", "config.json"):
    if stops is None:
      stops = read_json(directory / name, {}).get("eos_token_id")
  return TokenizerFiles(directory, tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,))


def _to_orbax(path, target, dtype: str | None) -> str:
  import orbax.checkpoint as ocp
  from etils import epath

  from seed_jax import checkpoint, sharding, text
  from seed_jax.models import hf, hf_files

  if target.exists() and any(target.iterdir()):
    raise UsageError(f"--to={target} is there already; choose another directory or remove it")
  gguf = hf.find_gguf(path)
  config, params = hf.load_sharded(path, sharding.make_mesh(), dtype=dtype)
  tokenizer = text.load_tokenizer(str(path)) if gguf else tokenizer_files(path)
  target = target if "://" in str(target) else target.absolute()  # orbax refuses a relative path
  fresh = target
  try:
    with hf_files.replacing(target) as place:  # in a store the target itself
      fresh = epath.Path(place)
      (fresh / "model").mkdir(parents=True)
      hf.save_description(fresh / "model", config, params["embed"].dtype, tokenizer=tokenizer)
      with ocp.StandardCheckpointer() as writer:
        writer.save(fresh / "params", params)
      checkpoint.seal(fresh, "params", params)
  except BaseException:
    with contextlib.redirect_stderr(io.StringIO()):  # where those threads say that nobody waits for them
      _remove(fresh)
    raise
  return f"{target}: the parameters of {path} in params, and model"


def _remove(place) -> None:
  """Removes what a failed conversion wrote, until it stays away: orbax's threads write on for a while, and the process
  is at work as long as they are.
  """
  quiet, end = 0, time.monotonic() + PATIENCE
  while quiet < 4 and time.monotonic() < end:
    busy, found = time.process_time(), place.exists()
    if found:
      with contextlib.suppress(OSError):  # a file that has just come or gone
        place.rmtree()
    time.sleep(0.1)
    quiet = 0 if found or time.process_time() - busy > 0.01 else quiet + 1


def _is_exported(path) -> bool:
  return (path / "params").is_dir() and (path / "model" / "config.json").exists()


def _exported(path) -> Source:
  """What `_to_orbax` wrote."""
  from seed_jax import checkpoint, checkpoint_params
  from seed_jax.models import hf

  advice = f"make it again, or remove {path / 'params.json'} if another program has written the parameters"
  try:
    sums = checkpoint.sealed(path, "params")
  except checkpoint.CheckpointError as error:
    raise checkpoint.CheckpointError(f"{path} is damaged ({error}); {advice}") from error
  remark = "" if sums is not None else f"; not checked, {path} has no params.json with their sums"
  params = checkpoint_params.stored_params(path / "params", sums)
  return Source(str(path), hf.read_config(path / "model"), params, tokenizer_files(path / "model"), advice, remark)


def _checkpoint(path, step: int | None) -> Source:
  """A checkpoint of a work directory."""
  from ml_collections import ConfigDict

  from seed_jax import checkpoint, checkpoint_params, text
  from seed_jax.metrics import read_json
  from seed_jax.models import hf
  from seed_jax.workdir import Workdir

  workdir, stage = (path.parent.parent, path.name) if path.parent.name == "checkpoints" else (path, "train")
  if not (workdir / "config.json").exists():
    raise FileNotFoundError(f"{path} is neither a work directory nor a model nor an ORBAX_DIR")
  checkpoints = checkpoint.Checkpoints(workdir / "checkpoints" / stage)
  steps = checkpoints.steps()
  if not steps:
    others = [folder.name for folder in (workdir / "policy").glob("*")] if (workdir / "policy").exists() else []
    hint = f"; finished policies are in policy/: {', '.join(sorted(others))}" if others else ""
    raise FileNotFoundError(f"there is no checkpoint in {checkpoints.directory}{hint}")
  step = steps[-1] if step is None else step
  sums = checkpoint.check(checkpoints, step)
  run = Workdir(ConfigDict(read_json(workdir / "config.json")), workdir)
  base = run.policy_path("base")
  tokenizer = text.load_tokenizer(str(base), **run.config.model.tokenizer_options.to_dict())
  params = checkpoint_params.stored_params(checkpoints.directory / str(step), sums)
  name = f"checkpoint {step} of {stage} in {workdir}"
  return Source(name, hf.read_config(base), params, tokenizer, f"choose another step, there are {steps}")


if __name__ == "__main__":
  sys.exit(cli(sys.argv))
