"""Ratios of sequences and aggregations: 200 random cases against loops, packed rows, micro-batches, masks, meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_references import aggregate, close, per_token

from benchmarks.oracle_cases import case, cases, padded
from seed_jax import losses, sequences

MODES = tuple(sequences.AGGREGATIONS)
LEVELS = {"token": losses.token_ratios, "sequence": losses.sequence_ratios, "own": losses.sequence_token_ratios}


@functools.partial(jax.jit, static_argnames=("aggregation", "level", "dual_clip"))
def value_and_gradient(b, sequence_ids=None, denominators=None, *, aggregation, level="token", dual_clip=None):
  def loss(x):
    return losses.grpo_loss(
      logprobs=x,
      old_logprobs=b["old"],
      ref_logprobs=b["ref"],
      kl_coef=0.3,
      entropy_coef=0.1,
      entropy=-b["ref"],
      advantages=b["advantages"],
      mask=b["mask"],
      dual_clip=dual_clip,
      ratios=LEVELS[level],
      aggregation=aggregation,
      aggregation_length=7.0,
      sequence_ids=sequence_ids,
      denominators=denominators,
    )

  return jax.value_and_grad(loss, has_aux=True)(b["logprobs"])


def arrays(c):
  return {k: c[k] for k in ("logprobs", "old", "ref", "mask", "advantages")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_200_cases_against_loops(mode, level):
  dual = 3.0 if level == "token" else None
  for number, c in enumerate(cases()):
    (loss, metrics), _ = value_and_gradient(arrays(padded(c)), aggregation=mode, level=level, dual_clip=dual)
    surrogates = per_token(c, level, dual=dual)
    # sums cancel: float32's error is one of the size of the terms
    at = dict(case=number, scale=aggregate({k: abs(x) for k, x in surrogates.items()}, mode, 7.0))
    pg = aggregate(surrogates, mode, 7.0)
    gaps = {k: float(c["ref"][k]) - float(c["logprobs"][k]) for k in zip(*np.nonzero(c["mask"]), strict=True)}
    kl = aggregate({k: min(np.exp(d) - d - 1, 10.0) for k, d in gaps.items()}, mode, 7.0)
    entropy = aggregate({k: -float(c["ref"][k]) for k in gaps}, mode, 7.0)
    close(metrics["pg_loss"], pg, **at)
    close(metrics["kl"], kl, **at)
    close(loss, pg + 0.3 * kl - 0.1 * entropy, **at)


def test_gspo_and_gspo_token_have_one_gradient_where_advantages_are_per_sequence():
  for number in range(20):
    b = arrays(padded(case(number)))
    for mode in MODES:
      (one, _), whole = value_and_gradient(b, aggregation=mode, level="sequence")
      (other, _), own = value_and_gradient(b, aggregation=mode, level="own")
      close(one, other)
      np.testing.assert_allclose(whole, own, atol=1e-6)


def test_gspo_by_hand():
  # Log-ratios 0.2 and 0 (the third token is masked): s = exp(0.1), A = 1, high = 0.05: clipped, gradient 0.
  new, old = np.array([[-1.0, -2.0, -1.0]]), np.array([[-1.2, -2.0, 5.0]])
  common = dict(old_logprobs=old, advantages=np.ones(1), mask=np.array([[1, 1, 0]]), ratios=losses.sequence_ratios)
  loss = lambda x, **k: losses.grpo_loss(logprobs=x, **common, **k)[0]  # noqa: E731
  np.testing.assert_allclose(loss(new, clip_high=0.05), -1.05, rtol=1e-6)
  assert not jax.grad(functools.partial(loss, clip_high=0.05))(jnp.asarray(new)).any()
  # Unclipped: d(-s) / d logprob_t = -s / 2 for each of the two.
  slope = jax.grad(functools.partial(loss, clip_high=0.2))(jnp.asarray(new))
  np.testing.assert_allclose(slope, [[-np.exp(0.1) / 2, -np.exp(0.1) / 2, 0]], rtol=1e-6)
  _, metrics = losses.grpo_loss(logprobs=new, **common, clip_high=0.05)
  np.testing.assert_allclose([metrics["ratio_mean"], metrics["clip_high_fraction"]], [np.exp(0.1), 1.0], rtol=1e-6)


def packed(b):
  """Rows i and i + 1 in one row, with gaps of no sequence before, between and behind; advantages per token."""
  rows, tokens = b["mask"].shape
  wide = {k: np.zeros((rows // 2, 2 * tokens + 3), np.float32) for k in b}
  ids = np.full((rows // 2, 2 * tokens + 3), -1)
  spread = b | {"advantages": np.broadcast_to(b["advantages"][:, None], (rows, tokens))}
  for row in range(rows - rows % 2):
    start = 1 + (row % 2) * (tokens + 1)
    for k in b:
      wide[k][row // 2, start : start + tokens] = spread[k][row]
    ids[row // 2, start : start + tokens] = (3, 0)[row % 2]  # ids need no order
  return wide, ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", sorted(LEVELS))
def test_packed_rows_give_what_single_rows_give(mode, level):
  for number in (0, 5, 10):  # all of one shape
    b = arrays(case(number))
    tokens = b["mask"].shape[1]
    wide, ids = packed(b)
    (loss, metrics), gradient = value_and_gradient(b, aggregation=mode, level=level)
    (packed_loss, packed_metrics), packed_gradient = value_and_gradient(wide, ids, aggregation=mode, level=level)
    close(packed_loss, loss)
    for name in metrics:
      close(packed_metrics[name], metrics[name], name=name)
    rows = np.concatenate([packed_gradient[:, 1 : tokens + 1], packed_gradient[:, tokens + 2 : 2 * tokens + 2]])
    np.testing.assert_allclose(rows, np.concatenate([gradient[::2], gradient[1::2]]), atol=1e-6)
    assert losses.token_counts(mask=wide["mask"], sequence_ids=ids)["sequences"] == (b["mask"].sum(1) > 0).sum()


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_micro_batches_add_up(mode):
  b, ids = packed(arrays(case(10)))
  (loss, metrics), gradient = value_and_gradient(b, ids, aggregation=mode, level="sequence")
  parts = [({k: v[i:j] for k, v in b.items()}, ids[i:j]) for i, j in ((0, 1), (1, 4))]
  counts = [losses.token_counts(mask=part["mask"], sequence_ids=i) for part, i in parts]
  total = jax.tree.map(lambda *x: sum(x), *counts)
  shares = [value_and_gradient(part, i, total, aggregation=mode, level="sequence") for part, i in parts]
  close(sum(s[0][0] for s in shares), loss)
  np.testing.assert_allclose(np.concatenate([s[1] for s in shares]), gradient, atol=1e-6)
  summed = functools.reduce(losses.add_metrics, [s[0][1] for s in shares])
  for name in metrics:
    close(summed[name], metrics[name], name=name)


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_masked_positions_never_matter(level):
  b, ids = packed(arrays(case(10)))
  clean = value_and_gradient(b, ids, aggregation="sequence_mean_token_mean", level=level)
  for poison in (np.nan, np.inf, -np.inf):
    bad = {k: v if k == "mask" else np.where(b["mask"] > 0, v, poison).astype(np.float32) for k, v in b.items()}
    dirty = value_and_gradient(bad, ids, aggregation="sequence_mean_token_mean", level=level)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_sharded_rows_give_the_same():
  c = case(0)
  b, ids = arrays(c), np.zeros(c["mask"].shape, int)
  b["advantages"] = np.broadcast_to(b["advantages"][:, None], b["mask"].shape)
  loss = lambda b, i: losses.grpo_loss(  # noqa: E731
    logprobs=b["logprobs"],
    old_logprobs=b["old"],
    advantages=b["advantages"],
    mask=b["mask"],
    ratios=losses.sequence_ratios,
    aggregation="sequence_mean_token_mean",
    sequence_ids=i,
  )[0]
  expected = jax.value_and_grad(loss)(b, ids)
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
  with jax.set_mesh(mesh):
    rows, ids = jax.device_put((b, ids), jax.P("data", None))
    sharded = jax.jit(jax.value_and_grad(loss))(rows, ids)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), sharded, expected)


def test_errors_are_one_clear_line():
  b = dict(logprobs=np.zeros((2, 3)), old_logprobs=np.zeros((2, 3)), advantages=np.ones(2), mask=np.ones((2, 3)))
  with pytest.raises(ValueError, match="aggregation='mean' is unknown; choose one of token_mean, sequence_mean"):
    losses.grpo_loss(**b, aggregation="mean")
  with pytest.raises(ValueError, match=r"needs aggregation_length above 0 \(tokens\), got None"):
    losses.grpo_loss(**b, aggregation="sequence_mean_token_sum_norm")
  with pytest.raises(ValueError, match=r"sequence_ids has shape \(2,\); want that of the mask, \(2, 3\)"):
    losses.grpo_loss(**b, aggregation="sequence_mean_token_mean", sequence_ids=np.zeros(2, int))
  with pytest.raises(ValueError, match="denominators have no sequences"):
    losses.grpo_loss(**b, aggregation="sequence_mean_token_sum", denominators={"tokens": 6.0})
