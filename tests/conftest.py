"""Every test sees eight CPU devices, so that the sharded path is the path under test."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
