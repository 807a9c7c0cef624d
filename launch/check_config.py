"""Loads a config as the program would, without devices, and says in one line what the program would refuse on a slice.

  python launch/check_config.py CHIPS VARIABLE,VARIABLE,... ARGUMENT...

CHIPS: of the slice (0: unknown); VARIABLE: what the program will find in its environment; ARGUMENT: the program's own.
Exit codes: 0 nothing found; 2 refused, with `error: ...` on stdout; 3 cannot be told here (a package is missing).
"""

import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


def refusal(values, chips: int, variables: list[str]) -> str:
  """What is wrong with a parsed command line (`seed_jax.main.parse`), or nothing."""
  from seed_jax.workdir import EXTRA_STAGES, STAGES

  c, stages = values.config, values.stages or STAGES
  for stage in stages:
    if stage not in (*STAGES, *EXTRA_STAGES):
      return f"the stage {stage!r} is unknown; there are {', '.join((*STAGES, *EXTRA_STAGES))}"
  own = not c.start  # the first stages are not those of another run
  if "base" in stages and own and c.model.preset and not c.model.path:
    return (
      f"config.model.path is empty: the preset {c.model.preset} gives sizes and no weights; "
      "add --config.model.path=gs://BUCKET/FOLDER (a Hugging Face directory)"
    )
  path = c.model.path
  if path and "://" not in path and not path.startswith(("/", "package:")):
    return (
      f"config.model.path={path} is a folder of this machine; weights are not sent: copy them to gs://BUCKET/FOLDER"
    )
  shape = (c.mesh.data, c.mesh.fsdp, c.mesh.tp)
  need = shape[0] * shape[1] * shape[2]
  if chips and need > chips:
    return f"mesh {'x'.join(map(str, shape))} (data, fsdp, tp) needs {need} chips; the slice has {chips}"
  if "annotate" in stages and own and c.annotate.analyzer == "external":
    external = c.annotate.external
    if not external.base_url or not external.model:
      fields = "--config.annotate.external.base_url=https://HOST/v1 --config.annotate.external.model=NAME"
      return f"the stage annotate asks an analyzer, and the config names none; add {fields}"
    key = external.get("api_key_env")
    if key and key not in variables:
      return f"the analyzer's key is taken from {key}; add --secret={key} (or --config.annotate.external.api_key_env=)"
  if c.benchmark.name == "alfworld" and not c.benchmark.options.get("data") and "ALFWORLD_DATA" not in variables:
    from envs.alfworld import OFFICIAL

    asked = {c[name].split for name in ("collect", "train", "evaluate") if name in stages and c[name].get("split")}
    if asked & set(OFFICIAL):
      return (
        "the official ALFWorld games are files; add --data=ALFWORLD_DATA=gs://BUCKET/FOLDER (the one with json_2.1.1)"
      )
  return ""


def main(argv: list[str]) -> int:
  try:
    from absl import flags

    from seed_jax import main as program

    program.quiet()
    values = program.parse(["seed_jax", *argv[3:]])
    said = refusal(values, int(argv[1]), argv[2].split(","))
  except ImportError:
    return 3
  except (program.UsageError, flags.Error) as error:
    if isinstance(error.__cause__, ImportError):
      return 3
    said = program.one_line(error)
  if said:
    print("error: " + said)
  return 2 if said else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
