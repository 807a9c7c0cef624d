"""The decode kernels in interpret mode: attention over a slot's live positions, no other block read or written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seed_jax import attention, sharding
from seed_jax.attention import LayerCache
from seed_jax.flash_decode import block_read, flash_decode, sources, write_token

CAPACITY, BLOCK = 80, 16
# idle first, one token, a block's last position, one more, full, idle between, all but one, idle last
LENGTHS = np.asarray([0, 1, 16, 17, 80, 0, 0, 79, 48, 0], np.int32)
HEADS = {"3B": (16, 2, 128), "7B": (28, 4, 128), "1.7B": (16, 8, 128), "0.5B": (14, 2, 64), "one group": (2, 2, 64)}


def case(heads, kv_heads, size, dtype=np.float32, lead=(), capacity=CAPACITY):
  rng = np.random.default_rng(heads * size)
  q = rng.normal(size=(len(LENGTHS), heads, size))
  k, v = rng.normal(size=(2, *lead, len(LENGTHS), kv_heads, capacity, size))
  return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


def plain(q, k, v, lengths=LENGTHS):
  """The definition by `attend` in float32; an idle slot gives zeros."""
  mask = np.arange(k.shape[2]) < lengths[:, None, None]
  with jax.set_mesh(sharding.make_mesh()):
    out = jax.jit(attention.attend)(*(x.astype(jnp.float32) for x in (q[:, None], k, v)), mask)
  return np.where(lengths[:, None, None] > 0, out[:, 0], 0)


@pytest.mark.parametrize("name", HEADS)
def test_it_is_attention_over_the_live_positions(name):
  q, k, v = case(*HEADS[name])
  out = flash_decode(q, k, v, LENGTHS, block=BLOCK, interpret=True)
  np.testing.assert_allclose(out, plain(q, k, v), atol=2e-6)
  assert np.abs(out).max() > 1


@pytest.mark.parametrize("name", ["3B", "0.5B"])
def test_bfloat16_sums_in_float32(name):
  q, k, v = case(*HEADS[name], dtype=jnp.bfloat16)
  out = flash_decode(q, k, v, LENGTHS, block=BLOCK, interpret=True)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(np.float32), plain(q, k, v), atol=2e-2)


@pytest.mark.parametrize("block", [7, 32, None])
def test_blocks_need_not_divide_the_capacity(block):
  q, k, v = case(4, 2, 64)
  out = flash_decode(q, k, v, LENGTHS, block=block, interpret=True)
  np.testing.assert_allclose(out, plain(q, k, v), atol=2e-6)


def test_one_layer_of_a_cache_of_all_layers():
  q, k, v = case(4, 2, 128, lead=(3,))
  for layer in range(3):
    out = flash_decode(q, k, v, LENGTHS, jnp.int32(layer), block=BLOCK, interpret=True)
    np.testing.assert_allclose(out, plain(q, k[layer], v[layer]), atol=2e-6)


@pytest.mark.parametrize("size", [64, 128])
def test_what_lies_behind_the_length_does_not_matter(size):
  q, k, v = case(4, 2, size)
  behind = (np.arange(CAPACITY) >= LENGTHS[:, None])[:, None, :, None]
  out = flash_decode(q, *(jnp.where(behind, jnp.nan, x) for x in (k, v)), LENGTHS, block=BLOCK, interpret=True)
  np.testing.assert_array_equal(out, flash_decode(q, k, v, LENGTHS, block=BLOCK, interpret=True))


@pytest.mark.parametrize("first_idle", [False, True])
def test_live_blocks_are_read_once_and_dead_ones_never(first_idle):
  lengths = LENGTHS[0 if first_idle else 1 :]
  source, last = map(np.asarray, sources(jnp.asarray(lengths), BLOCK))
  steps = -(-lengths.max() // BLOCK)
  read = [tuple(map(int, block_read(s, j, lengths, source, last))) for s in range(len(lengths)) for j in range(steps)]
  fetched = [at for i, at in enumerate(read) if i == 0 or at != read[i - 1]]  # the pipeline's rule
  live = [(s, j) for s, n in enumerate(lengths) for j in range(-(-int(n) // BLOCK))]
  assert fetched == [(0, 0)] * first_idle + live  # the pipeline starts somewhere, also before the first live slot


def test_no_live_slot_at_all_gives_zeros():
  q, k, v = case(4, 2, 64)
  out = flash_decode(q, k, v, np.zeros_like(LENGTHS), block=BLOCK, interpret=True)
  np.testing.assert_array_equal(out, np.zeros_like(out))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_token_writes_one_position_of_every_live_slot(size, dtype):
  _, k, v = case(4, 2, size, dtype, lead=(3,), capacity=256)
  new = jnp.asarray(np.random.default_rng(1).normal(size=(2, len(LENGTHS), 2, size)), dtype)
  positions = np.asarray([0, 255, 256, 127, 128, 7, 8, 300, 15, 16])
  out = write_token(k, v, *new, positions, jnp.int32(1), interpret=True)
  for cache, rows, written in zip((k, v), new, out, strict=True):
    expected = np.array(cache)
    for slot, at in enumerate(positions):
      if at < 256:
        expected[1, slot, :, at] = rows[slot]
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2), (1, 2, 1)])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_shard_of_a_mesh_runs_its_own_slots_and_heads(shape, stacked):
  """The kernels together are what XLA computes for `extend_slots`, in the cache and in the result."""
  q, k, v = case(8, 4, 64, lead=(2,) if stacked else (), capacity=128)
  mesh = sharding.make_mesh(*shape)
  place = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, sharding.spec(*axes)))  # noqa: E731
  lead = ("layers",) if stacked else ()
  cache = LayerCache(*(place(x, *lead, "rows", "heads", "tokens", "head_size") for x in (k, v)))
  new = np.random.default_rng(2).normal(size=(2, len(LENGTHS), 1, 4, 64)).astype(np.float32)
  tokens = [place(x, "rows", "tokens", "heads", "head_size") for x in (q[:, None], *new)]
  positions = np.where(LENGTHS > 0, LENGTHS - 1, 128)[:, None]  # idle slots stand at the capacity
  arguments = (*tokens, cache, place(positions, "rows", "tokens"), jnp.int32(1) if stacked else None)
  with jax.set_mesh(mesh):
    out, cache = jax.jit(lambda *a: attention.flash_slots(*a, interpret=True))(*arguments)
    expected, expected_cache = jax.jit(attention.extend_slots)(*arguments)
  assert jax.typeof(out).sharding.spec == sharding.spec("rows", "tokens", "heads", "head_size")
  jax.tree.map(np.testing.assert_array_equal, cache, expected_cache)
  np.testing.assert_allclose(out[:, 0], np.where(LENGTHS[:, None, None] > 0, expected[:, 0], 0), atol=2e-6)
