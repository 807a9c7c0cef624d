"""`python -m benchmarks.oracles`: our losses and advantages beside the functions of TRL, verl, tunix and rlax.

Each library answers the same random cases (oracle_cases.py) in an environment of its own under .bench/; one line a
function: the largest difference, relative where a value is above 1, and on how many cases. Exit code 1: a function
differs by more than TOLERANCE, or a library did not answer.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle_cases, process
from benchmarks.peers import oracle
from benchmarks.timing import say
from seed_jax import advantages, losses

LIBRARIES = ("trl", "verl", "tunix", "rlax")
TOLERANCE = 1e-6


def main(arguments: Sequence[str]) -> int:
  """Exit code 0: all agree; 1: not all; 2: the command is wrong."""
  parser = argparse.ArgumentParser("python -m benchmarks.oracles", description=__doc__.splitlines()[0])
  parser.add_argument("--peers", default=",".join(LIBRARIES), metavar="NAME,...", help="these libraries")
  parser.add_argument("--cases", type=int, default=oracle_cases.COUNT, help=f"default {oracle_cases.COUNT}")
  try:
    flags = parser.parse_args(arguments)
  except SystemExit as stop:
    return int(stop.code or 0)
  unknown = [name for name in flags.peers.split(",") if name not in LIBRARIES]
  if unknown or flags.cases < 1:
    print(f"oracles: --peers={flags.peers} --cases={flags.cases}: choose from {', '.join(LIBRARIES)}", file=sys.stderr)
    return 2
  failed = 0
  print(f"{'library':<8}{'function':<36}{'largest difference':>20}{'cases':>7}")
  for peer in flags.peers.split(","):
    try:
      rows = compare(answers_of(peer, flags.cases), flags.cases)
    except process.PeerError as error:
      say(f"oracles: {error}")
      failed += 1
      continue
    for name, (difference, count) in rows.items():
      good = count > 0 and difference <= TOLERANCE
      failed += not good
      print(f"{peer:<8}{name:<36}{difference:>20.1e}{count:>7}  {'pass' if good else 'FAIL'}")
  return 1 if failed else 0


def answers_of(peer: str, cases: int) -> dict[str, np.ndarray]:
  """{"function#case": array} by the library. Raises PeerError."""
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "answers.npz")
    process.drive(peer, f"oracle_{peer}", f"--out={path}", f"--cases={cases}")
    with np.load(path) as file:
      return dict(file)


def compare(theirs: dict[str, np.ndarray], cases: int) -> dict[str, tuple[float, int]]:
  """{function: (largest difference, cases)}; a case that the library has no finite answer to is left out.

  A difference is relative where their value is above 1.
  """
  rows = {}
  for name in dict.fromkeys(key.split("#")[0] for key in theirs):
    worst, count = 0.0, 0
    for number in range(cases):
      right = theirs[f"{name}#{number}"]
      if not np.isfinite(right).all():
        continue
      got = ours(name, number)
      if got.shape != right.shape:
        raise ValueError(f"{name}, case {number}: ours has shape {got.shape}, theirs {right.shape}")
      worst = max(worst, float(np.max(np.abs(got - right) / np.maximum(1.0, np.abs(right)), initial=0.0)))
      count += 1
    rows[name] = worst, count
  return rows


# -- ours --


def ours(name: str, number: int) -> np.ndarray:
  """Our answer to a case, in the form of oracle.py."""
  case = oracle_cases.case(number)
  kind, _, what = name.partition(" ")
  rows, tokens = case["mask"].shape
  big = oracle_cases.padded(case)
  if kind == "loss":
    arrays = {k: big[k] for k in ("logprobs", "old", "ref", "mask", "advantages")}
    value, gradient = _loss(arrays, jnp.float32(tokens), what)
    return np.concatenate([[value], np.ravel(np.asarray(gradient)[:rows, :tokens])]).astype(np.float64)
  if kind == "KL":
    return np.asarray(losses.kl_penalty(logprobs=case["logprobs"], ref_logprobs=case["ref"], estimator=what))
  if kind == "entropy":
    return np.asarray(losses.token_entropy(oracle_cases.logits(number)))
  return np.asarray(_advantages(big, what))[:rows]


@functools.partial(jax.jit, static_argnames="what")
def _loss(arrays, length, what):
  aggregation = what.split(" ")[0]
  sequence = {"GSPO": losses.sequence_ratios, "GSPO-token": losses.sequence_token_ratios}
  changes = dict(aggregation=aggregation)
  if aggregation in sequence:
    changes = dict(aggregation="sequence_mean_token_mean", ratios=sequence[aggregation], dual_clip=None)
  if what.endswith("without dual clip"):
    changes["dual_clip"] = None
  kl_coef = oracle.KL_COEFFICIENT if what.endswith("+ KL") else 0.0

  def loss(logprobs):
    return losses.grpo_loss(
      logprobs=logprobs,
      old_logprobs=arrays["old"],
      ref_logprobs=arrays["ref"],
      advantages=arrays["advantages"],
      mask=arrays["mask"],
      kl_coef=kl_coef,
      aggregation_length=length,
      **changes,
    )[0]

  return jax.value_and_grad(loss)(arrays["logprobs"])


def _advantages(case, what):
  groups = dict(group_ids=case["groups"], num_groups=12)
  if what == "RLOO":
    return advantages.rloo_advantages(case["rewards"], **groups)
  if not what.startswith("REINFORCE++"):
    return advantages.group_advantages(case["rewards"], **groups, normalize=what)
  values, weights = case["rewards"], case["mask"].sum(1)  # verl whitens over tokens
  if what.endswith("baseline"):  # but its group means take each sample once
    values = np.asarray(advantages.group_advantages(values, **groups, normalize="mean"))
  centred = np.asarray(advantages.batch_advantages(values, **groups, weights=weights, normalize="mean"), np.float64)
  deviation = np.sqrt((weights * centred**2).sum() / max(weights.sum() - 1, 1))
  ours = np.asarray(advantages.batch_advantages(values, **groups, weights=weights), np.float64)
  return ours * (deviation + 1e-6) / np.sqrt(deviation**2 + 1e-8)  # verl adds 1e-8 to the variance


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
