"""The decoders that the shipped configs name, so that a run can be planned and compiled where no weights are.

Shape legend: D model, N query heads, K key/value heads, H head size, F feed-forward, V vocabulary, L layers.

Sizes are those of the `config.json` that comes with the weights; `num_valid_tokens` is the size of their tokenizer. A
checkpoint still says what it is: where weights are read, `check` compares.
"""

from __future__ import annotations

import dataclasses

from seed_jax.models.config import ModelConfig

_QWEN2_5 = dict(
  architecture="Qwen2ForCausalLM",
  head_dim=128,
  rope_theta=1e6,
  qkv_bias=True,
  bos_id=151_643,
  eos_id=151_645,
  num_valid_tokens=151_665,
)
_QWEN3 = dict(
  architecture="Qwen3ForCausalLM",
  head_dim=128,
  rope_theta=1e6,
  qk_norm=True,
  max_positions=40_960,
  bos_id=151_643,
  eos_id=151_645,
  num_valid_tokens=151_669,
)


def _of(family: dict, V: int, D: int, L: int, N: int, K: int, F: int, **more) -> ModelConfig:
  sizes = dict(vocab_size=V, hidden_size=D, num_layers=L, num_heads=N, num_kv_heads=K, intermediate_size=F)
  return ModelConfig(**(family | sizes | more))


PRESETS: dict[str, ModelConfig] = {
  "qwen2_5_0_5b": _of(_QWEN2_5, 151_936, 896, 24, 14, 2, 4_864, head_dim=64),
  "qwen2_5_3b": _of(_QWEN2_5, 151_936, 2_048, 36, 16, 2, 11_008),
  "qwen2_5_7b": _of(_QWEN2_5, 152_064, 3_584, 28, 28, 4, 18_944, tie_embeddings=False),
  "qwen3_1_7b": _of(_QWEN3, 151_936, 2_048, 28, 16, 8, 6_144),
  # heads of 128 as the large ones have, and little else: what tests compile for a TPU
  "qwen2_5_test": _of(
    _QWEN2_5, 4_096, 512, 4, 4, 2, 1_536, rope_theta=1e4, bos_id=None, eos_id=None, num_valid_tokens=None
  ),
}
# What changes no array and no number of a forward pass, or is a run's own choice: two configs may differ in it.
_FREE = ("bos_id", "eos_id", "pad_id", "num_valid_tokens", "max_positions", "dtype", "scan_layers", "remat")


def get(name: str) -> ModelConfig:
  """The preset of that name; ValueError with the known names for another."""
  if name not in PRESETS:
    raise ValueError(f"model preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
  return PRESETS[name]


def check(name: str, found: ModelConfig) -> None:
  """Raises ValueError, with the numbers, where a checkpoint's decoder is not the preset's."""
  ours, theirs = dataclasses.asdict(get(name)), dataclasses.asdict(found)
  differences = [
    f"{k}: {v} in the preset, {theirs[k]} there" for k, v in ours.items() if k not in _FREE and v != theirs[k]
  ]
  if differences:
    raise ValueError(f"the weights are not {name} ({'; '.join(differences)}); name another preset")
