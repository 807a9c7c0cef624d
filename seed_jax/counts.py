"""Operations, weights and kept bytes of a decoder, counted by hand from its sizes.

Shapes: D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary, L layers.
"""

from __future__ import annotations

from seed_jax.models.config import SAVED, ModelConfig

# Products of the attention kernel's backward pass, in forward passes of two (scores, mix): one kernel makes the scores,
# their slopes and dq, the other the scores, the slopes, dv and dk. A single one would need five (2.5).
ATTENTION_BACKWARD = 3.5


def layer_params(m: ModelConfig) -> int:
  """Weights of the matrices of all layers: q, k, v, o, gate, up, down."""
  attention = m.hidden_size * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
  return m.num_layers * (attention + 3 * m.hidden_size * m.intermediate_size)


def head_params(m: ModelConfig) -> int:
  """Weights of the output matrix, V D."""
  return m.vocab_size * m.hidden_size


def num_params(m: ModelConfig) -> int:
  """All weights: matrices, embeddings (once where they are tied), norms, biases."""
  small = 2 * m.hidden_size
  small += (m.num_heads + 2 * m.num_kv_heads) * m.head_dim if m.qkv_bias else 0
  small += 2 * m.head_dim if m.qk_norm else 0
  tables = 1 if m.tie_embeddings else 2
  return layer_params(m) + tables * head_params(m) + m.num_layers * small + m.hidden_size


def attention_flops(m: ModelConfig, keys: float) -> float:
  """Of one query token over `keys` keys, in all layers: 2 N H a key for the scores, as many for the mix."""
  return 4.0 * m.num_layers * m.num_heads * m.head_dim * keys


def forward_flops(m: ModelConfig, *, tokens: float, keys: float, logits: float) -> float:
  """A forward pass over `tokens` tokens, each seeing `keys` keys on average, with logits at `logits` positions."""
  return tokens * (2.0 * layer_params(m) + attention_flops(m, keys)) + 2.0 * logits * head_params(m)


def computed_again(m: ModelConfig) -> tuple[int, bool]:
  """What the backward pass computes a second time by ModelConfig.remat: weights of the products, and whether attention.

  Of a layer only what something in its backward pass reads: the result of "down" is added to what becomes the input of
  the next layer, which is kept, so that of 3 D F weights of an MLP at most 2 D F count here.
  """
  if m.remat == "none":
    return 0, False
  D, F, H = m.hidden_size, m.intermediate_size, m.head_dim
  weights = {"qkv": D * H * (m.num_heads + 2 * m.num_kv_heads), "attention_sum": D * H * m.num_heads}
  weights |= {"gate": D * F, "up": D * F}
  again = sum(size for name, size in weights.items() if name not in SAVED[m.remat])
  return m.num_layers * again, "attention_out" not in SAVED[m.remat]


def training_flops(
  m: ModelConfig, *, tokens: float, keys: float, logits: float, backward: float = ATTENTION_BACKWARD
) -> float:
  """A forward and a backward pass as they are computed, with what remat computes again.

  Products with weights: once forward, twice backward (gradients of inputs and of weights), and again as
  `computed_again` says. Attention likewise, with `backward` for twice. Logits are made chunk by chunk in both passes,
  whatever remat says (`ops.token_logprobs`): four products.
  """
  weights, attention = computed_again(m)
  layers = 2.0 * (3 * layer_params(m) + weights) + attention_flops(m, keys) * (1 + backward + attention)
  return tokens * layers + 4 * 2.0 * logits * head_params(m)


def kv_bytes(m: ModelConfig, size: int = 2) -> int:
  """Keys and values of one token in all layers."""
  return 2 * m.num_layers * m.num_kv_heads * m.head_dim * size


def kept_bytes(m: ModelConfig, tokens: float, tp: int = 1) -> float:
  """What a training step keeps for its backward pass of `tokens` tokens, on one chip of `tp`; bfloat16.

  Heads and F lie over `tp`; the layers' inputs and the sums behind attention do not. Of "none", where the compiler
  keeps what it likes, a rough number.
  """
  D, F, H = m.hidden_size, m.intermediate_size, m.head_dim
  N, K = m.num_heads, m.num_kv_heads
  if m.remat == "none":
    whole, split = 8 * D, H * (5 * N + 4 * K) + 4 * F
  else:
    sizes = {"qkv": H * (N + 2 * max(K, tp)), "attention_out": H * N, "gate": F, "up": F}
    whole = D * (1 + ("attention_sum" in SAVED[m.remat]))
    split = sum(sizes.get(name, 0) for name in SAVED[m.remat])
  return 2.0 * tokens * m.num_layers * (whole + split / tp)
