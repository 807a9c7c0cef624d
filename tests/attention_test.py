"""Attention against loops in numpy, masks by hand, and a cache that drops what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import attention, sharding
from seed_jax.attention import LayerCache


def naive(q, k, v, mask):
  """One head, one query at a time: q [B, T, N, H], k and v [B, K, S, H], mask [B, T, S]."""
  B, T, N, H = q.shape
  out = np.zeros(q.shape)
  for b in range(B):
    for t in range(T):
      for n in range(N):
        head = n // (N // k.shape[1])  # neighbouring query heads share a key/value head
        seen = np.flatnonzero(mask[b, t])
        scores = k[b, head, seen] @ q[b, t, n] / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ v[b, head, seen] / weights.sum()
  return out


def attend(*arrays, mesh=None):
  with jax.set_mesh(mesh or sharding.make_mesh()):
    return np.asarray(jax.jit(attention.attend)(*map(jnp.asarray, arrays)))


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_attend_is_softmax_attention_with_grouped_queries(heads, kv_heads):
  rng = np.random.default_rng(0)
  q = rng.normal(size=(2, 3, heads, 8)).astype(np.float32)
  k, v = rng.normal(size=(2, 2, kv_heads, 5, 8)).astype(np.float32)
  mask = rng.random((2, 3, 5)) < 0.6
  mask[..., 0] = True
  np.testing.assert_allclose(attend(q, k, v, mask), naive(q, k, v, mask), atol=1e-5)


def test_what_the_mask_hides_does_not_matter():
  rng = np.random.default_rng(1)
  q, (k, v) = rng.normal(size=(1, 2, 2, 4)), rng.normal(size=(2, 1, 1, 4, 4))
  mask = np.asarray([[[1, 0, 1, 0], [1, 1, 1, 0]]], bool)
  hidden_k, hidden_v = k.copy(), v.copy()
  hidden_k[:, :, 3], hidden_v[:, :, 3] = 50.0, -1e6
  np.testing.assert_array_equal(attend(q, k, v, mask), attend(q, hidden_k, hidden_v, mask))


def test_a_row_that_sees_nothing_is_finite_and_so_is_its_gradient():
  q, k = jnp.ones((1, 2, 2, 4)), jnp.ones((1, 1, 3, 4))
  mask = jnp.zeros((1, 2, 3), bool).at[0, 0, 0].set(True)
  with jax.set_mesh(sharding.make_mesh()):
    out, gradients = jax.jit(jax.value_and_grad(lambda q, k: attention.attend(q, k, k, mask).sum(), argnums=(0, 1)))(
      q, k
    )
  assert np.isfinite(out) and all(np.isfinite(g).all() for g in gradients)


def test_bfloat16_scores_stay_float32():
  # H = 4, so q / 2 is all ones; the scores are 100 and 100.25, which are one number in bfloat16
  q = jnp.full((1, 1, 1, 4), 2.0, jnp.bfloat16)
  k = jnp.asarray([[64, 32, 4, 0], [64, 32, 4, 0.25]], jnp.bfloat16).reshape(1, 1, 2, 4)
  v = jnp.asarray([[0] * 4, [1] * 4], jnp.bfloat16).reshape(1, 1, 2, 4)
  out = attend(q, k, v, np.ones((1, 1, 2), bool))
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(np.float32), 1 / (1 + np.exp(-0.25)), atol=4e-3)


def test_packed_mask_by_hand():
  positions = jnp.asarray([[0, 1, 0, 1, 0]])
  segments = jnp.asarray([[1, 1, 2, 2, 0]])
  expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
  np.testing.assert_array_equal(attention.packed_mask(positions, segments)[0], np.asarray(expected, bool))


def test_cache_mask_by_hand():
  np.testing.assert_array_equal(
    attention.cache_mask(jnp.asarray([[0, 2], [1, 9]]), 4),
    np.asarray([[[1, 0, 0, 0], [1, 1, 1, 0]], [[1, 1, 0, 0], [1, 1, 1, 1]]], bool),
  )


def test_append_writes_at_positions_and_drops_what_is_out_of_range():
  cache = LayerCache(jnp.zeros((2, 1, 3, 2)), jnp.full((2, 1, 3, 2), 7.0))
  new = jnp.arange(1.0, 9.0).reshape(2, 2, 1, 2)  # row 0: (1, 2), (3, 4); row 1: (5, 6), (7, 8)
  with jax.set_mesh(sharding.make_mesh()):
    out = jax.jit(attention.append)(cache, new, -new, jnp.asarray([[1, 2], [0, 3]]))
  np.testing.assert_array_equal(out.k[0, 0], [[0, 0], [1, 2], [3, 4]])
  np.testing.assert_array_equal(out.k[1, 0], [[5, 6], [0, 0], [0, 0]])  # position 3 is beyond the capacity
  np.testing.assert_array_equal(out.v[1, 0], [[-5, -6], [7, 7], [7, 7]])


def test_attention_on_a_mesh_is_attention_on_one_device():
  rng = np.random.default_rng(2)
  q, (k, v) = rng.normal(size=(4, 3, 4, 8)), rng.normal(size=(2, 4, 2, 3, 8))
  mask = np.tril(np.ones((4, 3, 3), bool))
  mesh = sharding.make_mesh(2, 2, 2)
  place = lambda x, *axes: jax.device_put(x, jax.sharding.NamedSharding(mesh, sharding.spec(*axes)))  # noqa: E731
  with jax.set_mesh(mesh):
    out = jax.jit(attention.attend)(
      place(q, "rows", "tokens", "heads", "head_size"),
      place(k, "rows", "heads", "tokens", "head_size"),
      place(v, "rows", "heads", "tokens", "head_size"),
      place(mask, "rows", "tokens", "tokens"),
    )
  assert jax.typeof(out).sharding.spec == sharding.spec("rows", "tokens", "heads", "head_size")
  np.testing.assert_allclose(out, naive(q, k, v, mask), atol=1e-5)


def packed_rows(T):
  """positions and segment_ids [2, T]: samples across the edges of pieces, one of a single token, padding at the end."""
  positions, segments = np.zeros((2, 2, T), np.int32)
  for row, shares in enumerate([(0.4, 0.25, 0, 0.27), (1,)]):
    at = 0
    for i, share in enumerate(shares):
      n = max(int(share * T), 1)
      segments[row, at : at + n], positions[row, at : at + n] = i + 1, np.arange(n)
      at += n
  return positions, segments


def splash(q, k, v, positions, segment_ids):
  return attention.splash_packed(q, k, v, segment_ids, interpret=True)


@pytest.mark.parametrize(
  "function, T, shape, heads, size",
  [
    (splash, 256, (1, 1, 1), (4, 2), 64),
    (splash, 256, (1, 2, 2), (8, 4), 128),
    (attention.flash_packed, 256, (1, 2, 2), (8, 4), 64),
    (attention.flash_packed, 300, (1, 1, 1), (6, 2), 16),
    (attention.flash_packed, 1200, (1, 1, 1), (2, 1), 8),
    (attention.flash_packed, 9, (2, 1, 1), (2, 2), 4),
  ],
)
def test_packed_attention_is_attention_under_its_mask_forward_and_backward(function, T, shape, heads, size):
  rng = np.random.default_rng(3)
  N, K = heads
  positions, segments = packed_rows(T)
  q, out_gradient = rng.normal(size=(2, 2, T, N, size)).astype(np.float32)
  k, v = rng.normal(size=(2, 2, T, K, size)).astype(np.float32)
  out_gradient *= (segments > 0)[..., None, None]  # what stands at padding means nothing and is never used
  mesh = sharding.make_mesh(*shape)
  place = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, sharding.spec(*axes)))  # noqa: E731

  def plain(q, k, v, positions, segment_ids):
    return attention.attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), attention.packed_mask(positions, segment_ids))

  with jax.set_mesh(mesh):
    rows = [place(x, "rows", "tokens") for x in (positions, segments)]
    qkv = [place(x, "rows", "tokens", "heads", "head_size") for x in (q, k, v)]
    out_gradient = place(out_gradient, "rows", "tokens", "heads", "head_size")
    results = []
    for f in (plain, function):
      out, backward = jax.vjp(jax.jit(lambda *qkv, f=f: f(*qkv, *rows)), *qkv)
      results.append((np.where(segments[..., None, None] > 0, out, 0), *jax.jit(backward)(out_gradient)))
  for expected, got in zip(*results, strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_scores_of_packed_rows_stay_float32():
  # as for one query: 100 and 100.25 are one number in bfloat16
  q = jnp.full((1, 2, 1, 4), 2.0, jnp.bfloat16)
  k = jnp.asarray([[64, 32, 4, 0], [64, 32, 4, 0.25]], jnp.bfloat16).reshape(1, 2, 1, 4)
  v = jnp.asarray([[0] * 4, [1] * 4], jnp.bfloat16).reshape(1, 2, 1, 4)
  with jax.set_mesh(sharding.make_mesh()):
    out = jax.jit(attention.flash_packed)(q, k, v, jnp.asarray([[0, 1]]), jnp.ones((1, 2), int))
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out[0, 1, 0].astype(np.float32), 1 / (1 + np.exp(-0.25)), atol=4e-3)


@pytest.mark.parametrize("shape, stacked", [((1, 1, 1), False), ((2, 1, 2), True)])
def test_a_piece_read_slot_by_slot_is_the_piece_read_at_once(shape, stacked):
  rng = np.random.default_rng(5)
  S, T, C, N, K, H = 4, 6, 16, 4, 2, 8
  lead = ("layers",) if stacked else ()
  begin, count = np.asarray([0, 10, 12, 3]), np.asarray([4, 6, 4, 0])  # short, full, up to the edge, idle
  column = np.arange(T)
  positions = np.where(column < count[:, None], begin[:, None] + column, C)
  mesh = sharding.make_mesh(*shape)
  place = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, sharding.spec(*axes)))  # noqa: E731
  arrays = rng.normal(size=(2, *([3] if stacked else []), S, K, C, H)).astype(np.float32)
  cache = LayerCache(*(place(x, *lead, "rows", "heads", "tokens", "head_size") for x in arrays))
  tokens = [rng.normal(size=(S, T, heads, H)).astype(np.float32) for heads in (N, K, K)]
  tokens = [place(x, "rows", "tokens", "heads", "head_size") for x in tokens]
  arguments = (*tokens, cache, place(positions, "rows", "tokens"), jnp.int32(1) if stacked else None)
  with jax.set_mesh(mesh):
    out, cache = jax.jit(attention.prefill_slots)(*arguments)
    expected, expected_cache = jax.jit(attention.extend_slots)(*arguments)
  jax.tree.map(np.testing.assert_array_equal, cache, expected_cache)
  live = positions < C
  np.testing.assert_allclose(np.asarray(out)[live], np.asarray(expected)[live], atol=1e-5)


def test_slots_are_taken_and_put_on_a_tpu_as_elsewhere(monkeypatch):
  x, new = np.random.default_rng(6).normal(size=(2, 2, 4, 3)).astype(np.float32)
  taken, put = [], []
  for platform in ("cpu", "tpu"):
    monkeypatch.setattr(sharding, "platform", lambda platform=platform: platform)
    taken.append(attention.take_slots(x, jnp.asarray([3, 0, 3]), 1))
    put.append(attention.put_slots(jnp.asarray(x), jnp.asarray([2, 4, 0, 7]), new, 1))
  np.testing.assert_array_equal(*taken)
  np.testing.assert_array_equal(*put)
  np.testing.assert_array_equal(put[1], np.stack([new[:, 2], x[:, 1], new[:, 0], x[:, 3]], axis=1))
