"""The shape of a decoder, as a frozen and hashable value (a static argument of every jitted program)."""

from __future__ import annotations

import dataclasses

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
# What the backward pass of training finds stored of a layer besides its input, by ModelConfig.remat, under the names
# that `decoder` and `attention` give it: the products q, k and v before bias, norm and rotation; what attention makes
# of them, with its log totals; the sum of the layer's input and the attention block; the MLP's first two products.
# Its last is in no list: only the next layer's input, which is stored, depends on it, so it is never computed again.
SAVED = {
  "full": (),
  "attention_out": ("attention_out",),
  "attention": ("qkv", "attention_out", "attention_sum"),
  "attention_gate": ("qkv", "attention_out", "attention_sum", "gate"),
  "dots_no_batch": ("qkv", "attention_sum", "gate", "up"),
  "dots": ("qkv", "attention_out", "attention_sum", "gate", "up"),
}
REMAT = ("none", *SAVED)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Sizes and switches of one decoder; the names follow the letters of the shape legend.

  D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary, L layers.
  """

  architecture: str
  vocab_size: int  # V, rows of the embedding table (may exceed the tokenizer's)
  hidden_size: int  # D
  num_layers: int  # L
  num_heads: int  # N
  num_kv_heads: int  # K
  head_dim: int  # H
  intermediate_size: int  # F
  rope_theta: float = 10_000.0
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = True
  qkv_bias: bool = False  # Qwen2
  qk_norm: bool = False  # Qwen3
  max_positions: int = 32_768
  bos_id: int | None = None
  eos_id: int | None = None
  pad_id: int | None = None
  num_valid_tokens: int | None = None  # the tokenizer's, where the embedding table is padded beyond it
  dtype: str = "float32"  # of the matmuls; norms, softmax and logits stay float32
  scan_layers: bool = False  # lax.scan over layers (accelerators) or an unrolled loop (CPU: 2.4-3x faster decode)
  # What the backward pass of training finds stored of a layer, and what it computes again, see SAVED. From most memory
  # to least: "none" (all is stored), "dots" (results of matmuls), "dots_no_batch" (of those with weights),
  # "attention_gate" (of them all but one of the MLP's), "attention" (but both: a fifth of the memory of "dots"),
  # "attention_out" (the result of attention alone), "full" (the layer's input alone).
  remat: str = "none"

  def __post_init__(self):
    if self.architecture not in ARCHITECTURES:
      raise ValueError(f"architecture {self.architecture!r} is not supported; choose one of {', '.join(ARCHITECTURES)}")
    if self.remat not in REMAT:
      raise ValueError(f"remat {self.remat!r} is not a policy; choose one of {', '.join(REMAT)}")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
    if self.head_dim % 2:
      raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs")

  @property
  def num_groups(self) -> int:
    """G = N / K, query heads that share one key/value head."""
    return self.num_heads // self.num_kv_heads

  @property
  def num_parameters(self) -> int:
    """Numbers in the tree that `decoder.init` makes; a tied head counts once."""
    D, N, K, H, F = self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim, self.intermediate_size
    matrices = 2 * D * H * (N + K) + 3 * D * F
    vectors = 2 * D + self.qkv_bias * H * (N + 2 * K) + self.qk_norm * 2 * H
    return self.num_layers * (matrices + vectors) + D + self.vocab_size * D * (1 if self.tie_embeddings else 2)


def from_hf(hf: dict) -> ModelConfig:
  """Reads a Hugging Face `config.json`; raises ValueError where the decoder would compute something else."""
  names = hf.get("architectures") or [f"model_type={hf.get('model_type')}"]
  name = names[0]
  if name not in ARCHITECTURES:
    raise ValueError(f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}")
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  rope_type = rope.get("rope_type", rope.get("type", "default"))
  if rope_type != "default":
    raise ValueError(f"rope type {rope_type!r} of {name} is not supported; only the default rotation is")
  if hf.get("hidden_act", "silu") != "silu":
    raise ValueError(f"hidden_act {hf['hidden_act']!r} of {name} is not supported; only silu is")
  if hf.get("use_sliding_window") or hf.get("mlp_bias"):
    raise ValueError(f"{name} with a sliding window or MLP biases is not supported")
  if name == "LlamaForCausalLM" and hf.get("attention_bias"):
    raise ValueError("LlamaForCausalLM with attention_bias is not supported (its output projection has a bias too)")
  if name == "Qwen3ForCausalLM" and hf.get("attention_bias"):
    raise ValueError("Qwen3ForCausalLM with attention_bias is not supported")
  heads = hf["num_attention_heads"]
  eos = hf.get("eos_token_id")
  # A Qwen3 configuration without the field means 128, whatever D and N are.
  head_dim = hf.get("head_dim") or (128 if name == "Qwen3ForCausalLM" else hf["hidden_size"] // heads)
  return ModelConfig(
    architecture=name,
    vocab_size=hf["vocab_size"],
    hidden_size=hf["hidden_size"],
    num_layers=hf["num_hidden_layers"],
    num_heads=heads,
    num_kv_heads=hf.get("num_key_value_heads") or heads,
    head_dim=head_dim,
    intermediate_size=hf["intermediate_size"],
    rope_theta=float(hf.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
    rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
    tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
    qkv_bias=name == "Qwen2ForCausalLM",
    qk_norm=name == "Qwen3ForCausalLM",
    max_positions=hf.get("max_position_embeddings", 32_768),
    bos_id=hf.get("bos_token_id"),
    eos_id=eos[0] if isinstance(eos, list) else eos,
    pad_id=hf.get("pad_token_id"),
  )


def to_hf(config: ModelConfig) -> dict:
  """The `config.json` that `transformers` loads; the inverse of `from_hf`."""
  return {
    "architectures": [config.architecture],
    "model_type": {"Qwen2": "qwen2", "Qwen3": "qwen3", "Llama": "llama"}[
      config.architecture.removesuffix("ForCausalLM")
    ],
    "vocab_size": config.vocab_size,
    "hidden_size": config.hidden_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "intermediate_size": config.intermediate_size,
    "rope_theta": config.rope_theta,
    "rms_norm_eps": config.rms_norm_eps,
    "tie_word_embeddings": config.tie_embeddings,
    "max_position_embeddings": config.max_positions,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": config.bos_id,
    "eos_token_id": config.eos_id,
    "pad_token_id": config.pad_id,
    "torch_dtype": "float32",
  }
