"""Every public function and class of the modules that others build on says what it computes."""

import importlib
import inspect

import pytest

MODULES = (
  *("losses", "loss_terms", "token_losses", "relatives", "sequences", "advantages", "step_advantages", "replay"),
  *("methods", "ops", "attention", "sharding", "score", "update", "batching"),
)


def public(module):
  for name, value in vars(module).items():
    if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__:
      yield name, value


@pytest.mark.parametrize("name", MODULES)
def test_public_names_have_a_docstring(name):
  module = importlib.import_module(f"seed_jax.{name}")
  found = dict(public(module))
  assert found, "nothing public was found"
  missing = []
  for title, value in found.items():
    if not value.__doc__ or len(value.__doc__.split()) < 4 or value.__doc__.startswith(f"{title}("):
      missing.append(title)
    if inspect.isclass(value):
      methods = [m for m in vars(value).values() if inspect.isfunction(m) and m.__module__ == module.__name__]
      missing += [
        m.__qualname__ for m in methods if not m.__name__.startswith("_") and m.__name__ != "replace" and not m.__doc__
      ]
  assert not missing, f"without a docstring in seed_jax.{name}: {', '.join(missing)}"


@pytest.mark.parametrize("name", MODULES)
def test_modules_with_arrays_open_with_a_legend_of_shapes(name):
  module = importlib.import_module(f"seed_jax.{name}")
  if name in ("methods", "sharding"):  # names and meshes, no arrays of their own
    assert module.__doc__
  else:
    assert "Shapes:" in module.__doc__
