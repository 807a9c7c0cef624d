"""SEED (Self-Evolving On-Policy Distillation) in JAX: from a laptop CPU to a TPU pod."""

__version__ = "0.1.0"
