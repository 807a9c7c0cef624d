"""What the oracles' drivers have in common: the cases, and the file that their answers go to. Plain numpy.

An answer is an array; a loss answers [value, *gradient in the log-probabilities]. Where a library's definition differs
from the one that is compared (docs/definitions.md), its driver converts, in the line that says so. NaN: no answer.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from benchmarks import oracle_cases

CLIP, DUAL_CLIP, KL_COEFFICIENT = 0.2, 3.0, 0.04


def main(answers) -> None:
  """Writes `answers(case, logits) -> {name: array}` of every case to --out and prints how many."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--out", required=True)
  parser.add_argument("--cases", type=int, default=oracle_cases.COUNT)
  flags = parser.parse_args()
  arrays = {}
  for number in range(flags.cases):
    for name, value in answers(oracle_cases.case(number), oracle_cases.logits(number)).items():
      arrays[f"{name}#{number}"] = np.asarray(value, np.float64)
  np.savez(flags.out, **arrays)
  print(json.dumps({"answers": len(arrays)}))


def sequences(case) -> int:
  """Rows with a token; at least 1."""
  return max(int((case["mask"].sum(1) > 0).sum()), 1)
