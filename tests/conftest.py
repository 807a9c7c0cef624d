"""Every test sees eight CPU devices, so that the sharded path is the path under test. Programs that several tests
compile alike are compiled once: the cache lives as long as the process.
"""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax  # noqa: E402

CACHE = tempfile.mkdtemp(prefix="seed_jax_tests_")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
