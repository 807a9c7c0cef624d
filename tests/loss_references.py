"""Independent right values: plain float64 loops over rows and tokens, written from the formulas."""

import numpy as np


def tokens_of(case, row):
  return [t for t in range(case["mask"].shape[1]) if case["mask"][row, t] > 0]


def surrogate(r, a, low=0.2, high=0.2, dual=None):
  r, a = float(r), float(a)
  value = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
  return min(value, -a * dual) if dual is not None and a < 0 else value


def log_ratio(case, row, t):
  return float(case["logprobs"][row, t]) - float(case["old"][row, t])


def per_token(case, level="token", **clip):
  """{(row, t): loss of the token}."""
  out = {}
  for row in range(len(case["mask"])):
    kept = tokens_of(case, row)
    for t in kept:
      logs = [log_ratio(case, row, u) for u in (kept if level == "sequence" else [t])]
      out[row, t] = surrogate(np.exp(sum(logs) / len(logs)), case["advantages"][row], **clip)
  return out


def aggregate(values, mode, length=None):
  """Tokens' values {(row, t): x} under an aggregation, with each row one sequence."""
  rows = {}
  for (row, _), x in values.items():
    rows.setdefault(row, []).append(x)
  if not rows:
    return 0.0
  if mode == "token_mean":
    return sum(map(sum, rows.values())) / sum(map(len, rows.values()))
  each = [sum(x) / {"mean": len(x), "sum": 1, "norm": length}[mode.rsplit("_", 1)[1]] for x in rows.values()]
  return sum(each) / len(each)


def by_group(case, function):
  """[B]: `function(rewards of the group, index within)` for each sample, in float64; a group of one gives 0."""
  out = np.zeros(len(case["rewards"]))
  for group in range(case["num_groups"]):
    members = np.flatnonzero(case["groups"] == group)
    rewards = case["rewards"][members].astype(np.float64)
    for k, i in enumerate(members):
      out[i] = function(rewards, k) if len(members) > 1 else 0.0
  return out


def close(ours, right, tolerance=1e-6, scale=1.0, **context):
  """Equal within `tolerance`, relative where the right value, or `scale`, is above 1."""
  ours, right = np.asarray(ours, np.float64), np.asarray(right, np.float64)
  worst = np.max(np.abs(ours - right) / np.maximum(max(1.0, scale), np.abs(right)), initial=0.0)
  assert worst <= tolerance, f"off by {worst:.2e}: {ours} against {right} ({context})"
