"""Imports only ever point up one list, and what must stay out stays out."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# From the ground up to the programs: a module imports modules of EARLIER lines only. A new module gets its line here.
ORDER = """
  ground: advantages token_losses step_advantages replay relatives sequences loss_terms losses method methods
  ground: liveness hosts sharding actors ops flash_decode attention
  models: models.config models.presets models.decoder models.vision models.hf_names models.gguf_file
  models: models.hf_files models.hf_shards models.hf
  models: topologies counts roofline
  inference: decode requests slots engine score
  records: progress metrics preemption profiling intervals across_seeds records
  learning: optimizer update checkpoint checkpoint_params
  agent: text_template text_sentencepiece text skills analyzers trajectory library skill_quality retrieval skill_log
  agent: abstraction library_builder skill_sources credit batching token_line learn rollout rollout_metrics
  measures: propositions instruments
  programs: fields workdir train_config
  programs: run unfinished reward_model regrade replay_buffer supervised curve base collect annotate
  programs: library_stage skill_branch sft train mechanism evaluate
  programs: charts page skill_report report compare_results compare_page compare
  programs: preflight_programs preflight_compile preflight_plans preflight_table preflight errors main convert
"""
LAYER = {
  module: line.split(":")[0].strip() for line in ORDER.strip().splitlines() for module in line.split(":")[1].split()
}
RANK = {module: rank for rank, module in enumerate(LAYER)}

GROUND_PACKAGES = {"jax", "numpy", "seed_jax"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "flax.nnx"}


def sources(*folders):
  return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path):
  """seed_jax/models/hf.py -> models.hf; a package's __init__ -> the package's name."""
  parts = path.relative_to(ROOT).with_suffix("").parts[1:]
  return ".".join(part for part in parts if part != "__init__")


def imports(path):
  """Full dotted names of all that a file imports, inside functions too; `from a import b` gives a.b."""
  package = path.relative_to(ROOT).parent.parts
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      above = package[: len(package) - node.level + 1] if node.level else ()
      base = ".".join((*above, *([node.module] if node.module else [])))
      yield from (f"{base}.{alias.name}" for alias in node.names)


def ours(name):
  """The seed_jax module that a dotted name refers to (names within a module drop away), or None."""
  parts = name.split(".")
  if parts[0] != "seed_jax":
    return None
  for end in range(len(parts), 1, -1):
    path = ROOT.joinpath(*parts[:end])
    if path.with_suffix(".py").exists() or path.is_dir():
      return ".".join(parts[1:end])
  return ""


def test_every_module_has_a_line():
  packages = {"", "models"}
  unknown = {module_name(path) for path in sources("seed_jax")} - RANK.keys() - packages
  assert not unknown, f"no line in ORDER for {sorted(unknown)}: put each where its imports allow"


@pytest.mark.parametrize("path", sources("seed_jax"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_up(path):
  module = module_name(path)
  for name in imports(path):
    target = ours(name)
    if not target:
      continue
    assert path.name != "__init__.py", (
      f"the package file of {module or 'seed_jax'!r} imports {name}, so one import loads all"
    )
    assert RANK.get(target, -1) < RANK.get(module, len(RANK)), (
      f"{module} imports {name}, which stands below it in ORDER"
    )


def test_ground_modules_import_jax_and_numpy_only():
  for path in sources("seed_jax"):
    if LAYER.get(module_name(path)) == "ground":
      tops = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"__future__"}
      assert tops <= GROUND_PACKAGES, f"{path.name} imports {sorted(tops - GROUND_PACKAGES)}"


def test_environments_do_not_know_the_trainer():
  for path in sources("envs"):
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & {"seed_jax", "jax", "flax", "optax"}, f"{path.relative_to(ROOT)} imports {sorted(tops)}"


def test_environments_are_known_to_the_agent_and_the_programs_only():
  for path in sources("seed_jax"):
    if LAYER.get(module_name(path)) not in ("agent", "programs"):
      assert "envs" not in {name.split(".")[0] for name in imports(path)}, f"{module_name(path)} imports envs"


def test_the_agent_side_compiles_nothing():
  for path in sources("seed_jax"):
    if LAYER.get(module_name(path)) == "agent":
      calls = [
        n
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(n, ast.Attribute) and n.attr == "jit"
      ]
      assert not calls, f"{path.name}:{calls[0].lineno} uses jit on the host side" if calls else ""


@pytest.mark.parametrize(
  "path", sources("seed_jax", "envs", "configs", "benchmarks"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_nnx_no_pickle_no_eval(path):
  for name in imports(path):
    bad = [module for module in FORBIDDEN_MODULES if name == module or name.startswith(module + ".")]
    assert not bad, f"{path.name} imports {name}"
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Call):
      called = node.func.id if isinstance(node.func, ast.Name) else ""
      assert called not in ("eval", "exec", "compile", "__import__"), f"{path.name}:{node.lineno} calls {called}"
      for keyword in node.keywords:
        allowed = keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True)
        assert not allowed, f"{path.name}:{node.lineno} allows pickle"


@pytest.mark.parametrize("module", ["seed_jax", "seed_jax.losses", "seed_jax.advantages", "seed_jax.methods"])
def test_importing_the_ground_starts_no_backend_and_loads_little(module):
  # A platform that does not exist: whatever touches a device while importing fails, and the last line proves that it
  # would.
  program = f"""
import sys
import {module}
heavy = {{"transformers", "flax", "optax", "orbax", "torch", "gymnasium", "tensorflow_datasets", "sentencepiece"}}
assert not heavy & set(sys.modules), sorted(heavy & set(sys.modules))
import jax
try:
  jax.devices()
except RuntimeError:
  print("light")
"""
  environment = os.environ | {"JAX_PLATFORMS": "no_such_platform", "PYTHONPATH": str(ROOT)}
  done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == "light"
