"""One decoder for Qwen2/2.5, Qwen3 and Llama (SmolLM2): plain functions over a dictionary of arrays.

Shapes: B rows, T tokens, D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary, L
layers, R response tokens.
The parameter tree is written down in `init`. Parameters are stored under `sharding.param_specs`; each layer gathers its
own over `fsdp`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec as P

from seed_jax import attention, ops, sharding
from seed_jax.models.config import SAVED, ModelConfig

ROWS = sharding.ROWS[0]
# By ModelConfig.remat; without a cache only. A layer's values bear the names of `config.SAVED` where they are made.
POLICIES = {remat: jax.checkpoint_policies.save_only_these_names(*names) for remat, names in SAVED.items()}


def init(key: jax.Array, config: ModelConfig) -> dict:
  """Random float32 parameters: truncated normals of deviation 1/sqrt(fan in); residual outputs less by 1/sqrt(2L)."""
  c = config
  L, D, N, K, H, F, V = (
    c.num_layers,
    c.hidden_size,
    c.num_heads,
    c.num_kv_heads,
    c.head_dim,
    c.intermediate_size,
    c.vocab_size,
  )
  keys = iter(jax.random.split(key, 16))

  def normal(shape, fan_in, scale=1.0):
    return jax.random.truncated_normal(next(keys), -3.0, 3.0, shape, jnp.float32) * (scale * fan_in**-0.5)

  residual = (2 * L) ** -0.5
  layers = {
    "attn_norm": jnp.ones((L, D)),
    "q": normal((L, D, N, H), D),
    "k": normal((L, D, K, H), D),
    "v": normal((L, D, K, H), D),
    "o": normal((L, N, H, D), N * H, residual),
    "mlp_norm": jnp.ones((L, D)),
    "gate": normal((L, D, F), D),
    "up": normal((L, D, F), D),
    "down": normal((L, F, D), F, residual),
  }
  if c.qkv_bias:
    layers |= {"q_bias": jnp.zeros((L, N, H)), "k_bias": jnp.zeros((L, K, H)), "v_bias": jnp.zeros((L, K, H))}
  if c.qk_norm:
    layers |= {"q_norm": jnp.ones((L, H)), "k_norm": jnp.ones((L, H))}
  params = {"embed": normal((V, D), D), "layers": layers, "final_norm": jnp.ones((D,))}
  if not c.tie_embeddings:
    params["head"] = normal((D, V), D)
  return params


def forward(
  params: dict,
  tokens: jax.Array,
  positions: jax.Array,
  segment_ids: jax.Array | None,
  config: ModelConfig,
  *,
  cache=None,
):
  """Final hidden states of tokens [B, T] at positions [B, T].

  Without a cache: rows of packed samples, segment_ids [B, T] (0 is padding) -> [B, T, D].
  With a cache (see `init_cache`): tokens continue the slots, position p is stored at index p; positions at or above
  the capacity mark padding -> ([B, T, D], new cache).
  """
  B, T = tokens.shape
  assert positions.shape == (B, T), (tokens.shape, positions.shape)
  x = _embed(params, tokens, config)
  angles = ops.rope_angles(positions, config.head_dim, config.rope_theta)
  layers = params["layers"]
  names = layers[0] if isinstance(layers, tuple) else layers
  specs = jax.tree.map(
    lambda s: P(*s[1:]), sharding.param_specs({"layers": names})["layers"], is_leaf=lambda s: isinstance(s, P)
  )

  def layer(x, weights, cache, index=None):
    # Matrices are cast as they are gathered and vectors here, in the scorer and the update as in an actor's cast copy.
    weights = {name: w if "fsdp" in tuple(specs[name]) else w.astype(x.dtype) for name, w in weights.items()}
    with jax.named_scope("attention"):
      normed = ops.rms_norm(x, weights["attn_norm"], config.rms_norm_eps)
      out, cache = _attention(normed, weights, specs, angles, positions, segment_ids, cache, index, config)
      x = checkpoint_name(x + out, "attention_sum")
    with jax.named_scope("mlp"):
      x = x + _mlp(ops.rms_norm(x, weights["mlp_norm"], config.rms_norm_eps), weights, specs)
    return x, cache

  if cache is None and config.remat != "none":
    # in a scan, nothing could be merged with the first pass anyway
    layer = jax.checkpoint(layer, policy=POLICIES[config.remat], prevent_cse=not config.scan_layers)
  if config.scan_layers:
    # the cache is carried and written in place; as an input and output of the scan it would be copied at every call
    step = lambda carry, xs: (layer(*carry[:1], xs[0], carry[1], xs[1]), None)  # noqa: E731
    (x, cache), _ = jax.lax.scan(step, (x, cache), (layers, jnp.arange(config.num_layers)))
  else:
    caches = [None] * config.num_layers if cache is None else list(cache)
    for i, weights in enumerate(unstack(params, config)["layers"]):
      x, caches[i] = layer(x, weights, caches[i])
    cache = None if cache is None else tuple(caches)
  x = ops.rms_norm(x, params["final_norm"], config.rms_norm_eps)
  return x if cache is None else (x, cache)


def init_cache(config: ModelConfig, num_slots: int, capacity: int) -> attention.LayerCache | tuple:
  """An empty cache of S slots x C positions on the mesh in force: slots over the data axes, key/value heads over `tp`
  (K is then `sharding.held_kv_heads`).

  With `scan_layers` one `LayerCache` of arrays [L, S, K, C, H], otherwise a tuple of L of arrays [S, K, C, H]: a loop
  over layers carries the one, and writes into it, without a copy; unrolled code does so with the other.
  """
  shape = (num_slots, _held_heads(config), capacity, config.head_dim)
  stack, lead = ((config.num_layers,), (None,)) if config.scan_layers else ((), ())
  spec = P(*lead, ROWS, "tp", None, None)
  empty = lambda: jnp.zeros(stack + shape, config.dtype, out_sharding=spec)  # noqa: E731
  caches = tuple(attention.LayerCache(empty(), empty()) for _ in range(1 if stack else config.num_layers))
  return caches[0] if stack else caches


def cache_slot_axis(config: ModelConfig) -> int:
  """The axis of the cache's arrays that counts slots."""
  return 1 if config.scan_layers else 0


def cache_capacity(cache) -> int:
  """C, positions of a slot, of what `init_cache` made."""
  return jax.tree.leaves(cache)[0].shape[-2]


def unstack(params: dict, config: ModelConfig) -> dict:
  """The parameters with `layers` as a tuple of L trees, for `forward` without `scan_layers`.

  A slice of a stacked array that is taken inside a loop is copied at every step; a decode loop takes them before.
  """
  layers = params["layers"]
  if config.scan_layers or isinstance(layers, tuple):
    return params
  return params | {"layers": tuple(jax.tree.map(lambda w, i=i: w[i], layers) for i in range(config.num_layers))}


def for_decode(params: dict) -> dict:
  """The same parameters as a decode loop reads them: on a TPU, q, k and v lie in memory with their heads outside D.

  A product of few rows with [D, N, H] reads it so. Of parameters that lie otherwise, each call of the loop first makes
  such a copy, of all layers: 5 % of the weights. Done once for a policy it is free: the arrays stay as they are named.
  """
  layers = params["layers"]
  if sharding.platform() != "tpu" or isinstance(layers, tuple):  # unrolled layers are for CPUs
    return params
  moved = {name: jax.device_put(layers[name], heads_outside(layers[name].sharding)) for name in ("q", "k", "v")}
  return params | {"layers": layers | moved}


def heads_outside(spec: jax.sharding.Sharding) -> Format:
  """Where [L, D, heads, H] lies in memory as [L, heads, D, H]."""
  return Format(Layout(major_to_minor=(0, 2, 1, 3)), spec)


def stored_head(params: dict) -> jax.Array:
  """The output matrix [D, V] as it lies: D over `fsdp`, its vocabulary over `tp`."""
  return params["head"] if "head" in params else params["embed"].T


def head(params: dict, dtype: jnp.dtype | None = None) -> jax.Array:
  """The output matrix [D, V] in `dtype` (None: its own), gathered over `fsdp`, its vocabulary over `tp`."""
  matrix = stored_head(params)
  return jax.sharding.reshard(matrix if dtype is None else matrix.astype(dtype), P(None, "tp"))


def logits_at(params: dict, hidden: jax.Array, config: ModelConfig) -> jax.Array:
  """float32 logits [..., V] of hidden states [..., D]; rows of a padded vocabulary at -inf."""
  x = jnp.einsum("...d,dv->...v", hidden, head(params, hidden.dtype), preferred_element_type=jnp.float32)
  return ops.mask_padded_vocab(x, config.num_valid_tokens)


def logits(params: dict, tokens: jax.Array, config: ModelConfig) -> jax.Array:
  """[B, T, V] float32 logits of plain, right-padded causal input; for parity checks and small inputs."""
  with sharding.ensure_mesh():
    return _logits(params, jnp.asarray(tokens), config)


@jax.jit(static_argnames="config")
def _logits(params, tokens, config):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return logits_at(params, forward(params, tokens, positions, jnp.ones_like(tokens), config), config)


def gather_positions(hidden: jax.Array, index: jax.Array) -> jax.Array:
  """hidden [B, T, D] at columns index [B, R] -> [B, R, D]; each row picks from itself."""
  pick = jax.vmap(lambda h, i: h[i])
  return jax.sharding.auto_axes(pick, out_sharding=P(ROWS, None, None))(hidden, index)


def _embed(params, tokens, config):
  """Each device looks up, of the tokens of its whole `fsdp` group, the part of the vocabulary and of D that it stores;
  then each gets the rest of D for its own rows. So no device ever holds the table or its gradient whole, and what is
  exchanged is no more than [B, T, D], which is summed over `tp`.
  """
  mesh = jax.sharding.get_abstract_mesh()

  def local(table, tokens):
    if mesh.shape["fsdp"] > 1:
      tokens = jax.lax.all_gather(tokens, "fsdp", axis=0, tiled=True)
    row = tokens - jax.lax.axis_index("tp") * table.shape[0]
    found = table.at[row].get(mode="fill", fill_value=0, wrap_negative_indices=False).astype(config.dtype)
    if mesh.shape["fsdp"] > 1:
      found = jax.lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=2, tiled=True)
    return jax.lax.psum(found, "tp")

  rows, table = P(ROWS, None), sharding.spec("vocab", "model")
  embed = jax.shard_map(local, in_specs=(table, rows), out_specs=P(ROWS, None, None))
  return embed(jax.sharding.reshard(params["embed"], table), jax.sharding.reshard(tokens, rows))


def _held_heads(config):
  return sharding.held_kv_heads(config.num_kv_heads, jax.sharding.get_abstract_mesh().shape["tp"])


def _attention(x, w, specs, angles, positions, segment_ids, cache, layer, config):
  q = checkpoint_name(ops.product("btd,dnh->btnh", x, w["q"], specs["q"]), "qkv")
  k, v = (_keys_or_values(x, w, name, specs, config) for name in ("k", "v"))
  if config.qkv_bias:
    q = q + w["q_bias"]
  if config.qk_norm:
    q = ops.rms_norm(q, w["q_norm"], config.rms_norm_eps)
    k = ops.rms_norm(k, w["k_norm"], config.rms_norm_eps)
  q, k = ops.apply_rope(q, *angles), ops.apply_rope(k, *angles)
  if cache is None:
    out = attention.attend_packed(q, k, v, positions, segment_ids)
  else:
    out, cache = attention.extend_slots(q, k, v, cache, positions, layer)
  return ops.product("btnh,nhd->btd", out, w["o"], specs["o"], P(ROWS, None, None)), cache


def _keys_or_values(x, w, name, specs, config):
  """[B, T, K, H] of the heads that `tp` holds (`sharding.held_kv_heads`), each device's own on it.

  Where these are copies, the weights are repeated and not what they compute, so that no device computes a head that it
  does not read. Nothing moves; a weight's gradient is the sum over the devices that share its head.
  """
  weight, bias = w[name], w.get(f"{name}_bias")
  copies = _held_heads(config) // config.num_kv_heads
  if copies == 1:
    out = ops.product("btd,dkh->btkh", x, weight, specs[name])
  else:
    whole = jax.sharding.reshard(weight.astype(x.dtype), sharding.gathered(specs[name]))
    out = jnp.einsum("btd,dkh->btkh", x, _repeated(whole, copies))
    bias = None if bias is None else _repeated(bias, copies)
  out = checkpoint_name(out, "qkv")
  return out if bias is None else out + bias


def _repeated(w, copies):
  """[..., K, H], whole on every device -> [..., K * copies, H] over `tp`."""
  many = jnp.broadcast_to(w[..., None, :], (*w.shape[:-1], copies, w.shape[-1]))
  return jax.sharding.reshard(many.reshape(*w.shape[:-2], -1, w.shape[-1]), P(*[None] * (w.ndim - 2), "tp", None))


def _mlp(x, w, specs):
  """silu(x gate) * (x up) down, over [B * T, D].

  With B and T apart, the weights' gradients contract over two axes, for which XLA on a CPU turns [B, T, F] around in
  memory, three times a layer: a third of the time of a layer's backward pass.
  """
  B, T, D = x.shape
  x = jax.lax.reshape(x, (B * T, D), out_sharding=P(ROWS, None))
  gate, up = (checkpoint_name(ops.product("md,df->mf", x, w[name], specs[name]), name) for name in ("gate", "up"))
  out = ops.product("mf,fd->md", jax.nn.silu(gate) * up, w["down"], specs["down"], P(ROWS, None))
  return jax.lax.reshape(out, (B, T, D), out_sharding=P(ROWS, None, None))
