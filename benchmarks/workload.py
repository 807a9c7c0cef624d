"""Random policies, samples and counts of work that the benchmarks of this package share.

Shapes: D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary, L layers.
"""

from __future__ import annotations

import jax
import numpy as np

from benchmarks.peers import shared
from seed_jax import batching, learn, methods, optimizer, sharding, update
from seed_jax.models import decoder
from seed_jax.models.config import ModelConfig

# `twenty`: about 20 million parameters, the size of which the shares of the machine's limits are asked
SIZES = shared.SIZES | {
  "quickstart": dict(layers=3, hidden=128, feed_forward=384, heads=2, kv_heads=1),
  "twenty": dict(layers=6, hidden=512, feed_forward=1536, heads=8, kv_heads=2),
}


def model(size: str, **changes) -> ModelConfig:
  """A Qwen2 of that size, float32, tied embeddings."""
  s = SIZES[size]
  shape = dict(
    architecture="Qwen2ForCausalLM",
    vocab_size=2048 if size == "twenty" else shared.VOCABULARY,
    hidden_size=s["hidden"],
    num_layers=s["layers"],
    num_heads=s["heads"],
    num_kv_heads=s["kv_heads"],
    head_dim=s["hidden"] // s["heads"],
    intermediate_size=s["feed_forward"],
    rope_theta=1_000_000.0,
    qkv_bias=True,
  )
  return ModelConfig(**(shape | changes))


def params(config: ModelConfig, mesh, seed: int = 0):
  """Random parameters on the mesh: matrices normal with DEVIATION, norms 1, biases 0.

  Drawn by numpy, so that no initialiser is compiled: a user loads a checkpoint here.
  """
  shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), config))
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = path[-1].key
    if "norm" in name or "bias" in name:
      return np.full(leaf.shape, "norm" in name, np.float32)
    return rng.normal(scale=shared.DEVIATION, size=leaf.shape).astype(np.float32)

  return sharding.put_params(jax.tree_util.tree_map_with_path(draw, shapes), mesh)


def num_params(values) -> int:
  """All parameters."""
  return sum(leaf.size for leaf in jax.tree.leaves(values))


def trainer(config: ModelConfig, mesh, *, method: str = "grpo", kl_coef: float = 0.0, learning_rate: float = 1e-3):
  """(state, step, scoring): a fresh policy, the update step of a named method, and what `learn` needs to know of it."""
  named = methods.get(method)
  loss = update.LossConfig(kl_coef=kl_coef)
  chain = optimizer.make_optimizer(optimizer.OptimizerConfig(learning_rate=learning_rate), 1_000)
  step = update.make_update(config, update.MethodLoss(named, loss), chain)
  with jax.set_mesh(mesh):
    state = update.init_state(params(config, mesh), chain)
  return state, step, learn.Scoring(config, named, loss)


def matmul_flops(config: ModelConfig) -> float:
  """Operations of one token through the matrices of all layers: 2 a parameter. The head counts apart."""
  c = config
  attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
  return 2.0 * c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def attention_flops(config: ModelConfig, keys: float) -> float:
  """Operations of one query token that sees `keys` keys: 2 N H a key for the scores and as many for the mix."""
  return 4.0 * config.num_layers * config.num_heads * config.head_dim * keys


def head_flops(config: ModelConfig) -> float:
  """Operations of the logits of one position."""
  return 2.0 * config.hidden_size * config.vocab_size


def forward_flops(config: ModelConfig, samples) -> float:
  """What one forward pass over the ordinary contexts needs: no padding, causal attention, logits at responses only."""
  total = 0.0
  for s in samples:
    n = len(s.tokens)
    total += n * (matmul_flops(config) + attention_flops(config, (n + 1) / 2)) + len(s.targets) * head_flops(config)
  return total


def decode_bytes(config: ModelConfig, slots: int, context: float) -> float:
  """What one decode step must read: every matrix once, and each slot's keys and values; float32."""
  c = config
  matrices = (matmul_flops(c) + head_flops(c)) / 2
  return 4.0 * (matrices + slots * context * 2 * c.num_layers * c.num_kv_heads * c.head_dim)


def decode_flops(config: ModelConfig, slots: int, context: float) -> float:
  """Operations of one decode step."""
  return slots * (matmul_flops(config) + head_flops(config) + attention_flops(config, context))


def random_samples(config: ModelConfig, lengths, responses, *, seed: int = 0, skill: int = 0) -> list[batching.Sample]:
  """Samples with these numbers of tokens and of sampled tokens at their ends; `skill` > 0: a skill context that is so
  many tokens longer.
  """
  rng = np.random.default_rng(seed)
  draw = lambda n: rng.integers(0, min(config.vocab_size, 256), n).astype(np.int32)  # noqa: E731
  out = []
  for n, r in zip(lengths, responses, strict=True):
    prompt, targets = draw(n - r + 1), draw(r)
    tokens = np.concatenate([prompt, targets])[:-1]
    index = np.arange(len(prompt) - 1, len(tokens), dtype=np.int32)
    inserted = {}
    if skill:
      longer = np.concatenate([prompt[:1], draw(skill), prompt[1:], targets])[:-1]
      inserted = dict(skill_tokens=longer, skill_index=index + skill)
    noise = rng.normal(size=(2, r)).astype(np.float32)
    out.append(batching.Sample(tokens, index, targets, noise[0], -np.abs(noise[1]) - 5.0, **inserted))
  return out
