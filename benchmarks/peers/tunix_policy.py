"""A random Qwen2 in google-tunix and the cluster around it, as both tunix drivers use them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster
from tunix.rl.rollout import base_rollout

from benchmarks.peers import shared

nnx = qwen2.nnx  # tunix keeps its parameters in it; this package does not, and its tests see to that


class Bytes:
  """The tokenizer's side of `shared.encode`, under the names that tunix calls."""

  def encode(self, text, **unused):
    return shared.encode(text)

  def decode(self, ids, **unused):
    return shared.decode(ids)

  def bos_id(self):
    return shared.BOS

  def eos_id(self):
    return shared.EOS

  def pad_id(self):
    return shared.PAD


def policy(size: str, seed: int = 0):
  """A Qwen2 whose matrices are normal with DEVIATION; vectors are 1."""
  s = shared.SIZES[size]
  config = qwen2.ModelConfig(
    num_layers=s["layers"],
    vocab_size=shared.VOCABULARY,
    embed_dim=s["hidden"],
    hidden_dim=s["feed_forward"],
    num_heads=s["heads"],
    head_dim=s["hidden"] // s["heads"],
    num_kv_heads=s["kv_heads"],
    rope_theta=1_000_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
  )
  # the shapes alone, so that no initialiser is compiled: a user loads a checkpoint here
  graph, values = nnx.split(nnx.eval_shape(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(seed))))
  rng = np.random.default_rng(seed)

  def draw(leaf):
    array = np.ones(leaf.shape) if leaf.ndim < 2 else rng.normal(scale=shared.DEVIATION, size=leaf.shape)
    return jnp.asarray(array, leaf.dtype)

  return nnx.merge(graph, jax.tree.map(draw, values))


def cluster(size: str, mesh, *, prompt_length: int, cache: int, steps: int, reference: bool = True):
  """Actor, rollout and, with `reference`, a frozen copy on one mesh, with the plain ("vanilla") sampler."""
  roles = [rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT] + [rl_cluster.Role.REFERENCE] * reference
  rollout = base_rollout.RolloutConfig(
    max_tokens_to_generate=shared.NEW_TOKENS,
    max_prompt_length=prompt_length,
    kv_cache_size=cache,
    temperature=1.0,
    top_p=1.0,
    top_k=None,
  )
  training = rl_cluster.RLTrainingConfig(
    actor_optimizer=optax.adamw(shared.LEARNING_RATE),
    eval_every_n_steps=1_000_000,
    max_steps=steps,
    mini_batch_size=shared.PROMPTS,
    train_micro_batch_size=shared.PROMPTS,
  )
  config = rl_cluster.ClusterConfig(
    role_to_mesh={role: mesh for role in roles},
    rollout_engine="vanilla",
    offload_to_cpu=False,
    training_config=training,
    rollout_config=rollout,
  )
  models = {"actor": policy(size)} | ({"reference": policy(size)} if reference else {})
  return rl_cluster.RLCluster(tokenizer=Bytes(), cluster_config=config, **models)


def one_device_mesh():
  """What a user of one CPU has."""
  return jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def params(model):
  """The tree of all parameters."""
  return nnx.state(model, nnx.Param)


def num_params(model) -> int:
  """All parameters."""
  return sum(leaf.size for leaf in jax.tree.leaves(params(model)))
