"""The update: gradients of a loss over packed micro-batches, summed under global denominators, then one optimizer step.

Shapes: M micro-batches, B rows, R response tokens of a row.

A mini-batch is a list of `Batch`es, one per row length; each compiled program handles one row length, whatever the
number of its micro-batches. Denominators are sums over the whole mini-batch (all row lengths, all hosts) and are known
before the first gradient, so that the objective does not depend on how samples were packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import optax

from seed_jax import losses
from seed_jax.methods import Method
from seed_jax.models.config import ModelConfig
from seed_jax.score import Context, response_logprobs


@flax.struct.dataclass
class TrainState:
  """Everything that an optimizer step changes."""

  step: jax.Array  # [] int32, optimizer steps taken
  params: dict
  opt_state: optax.OptState


@flax.struct.dataclass
class Batch:
  """Packed rows of one row length with what the loss needs per response token; `count` micro-batches of the M are
  filled.
  """

  ordinary: Context
  skill: Context | None  # None where the method scores no skill context
  targets: jax.Array  # [M, B, R] int32
  mask: jax.Array  # [M, B, R] float32, 1 on sampled tokens
  skill_mask: jax.Array  # [M, B, R] float32, 1 where the trajectory has a parsed skill
  advantages: jax.Array  # [M, B, R] float32
  sampler_logprobs: jax.Array  # [M, B, R] float32, as the engine reported them
  count: jax.Array  # [] int32
  old_logprobs: jax.Array | None = None  # [M, B, R] float32 of the policy that sampled, scored
  skill_logprobs: jax.Array | None = None
  ref_logprobs: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Coefficients of the objective; see `losses.seed_loss`."""

  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float | None = 3.0
  kl_coef: float = 0.01
  kl_estimator: str = "k3"
  entropy_coef: float = 0.0
  opd_coef: float = 0.01
  opd_beta: float = 5.0
  temperature: float = 1.0  # of the rollout: log-probabilities are those of the distribution that was sampled


# A loss takes (logprobs [B, R], entropy [B, R], micro-batch, denominators) and returns (scalar share, shares of
# metrics).
Loss = Callable[[jax.Array, jax.Array, Batch, dict], tuple[jax.Array, dict]]


@dataclasses.dataclass(frozen=True)
class MethodLoss:
  """The loss of a named method: GRPO with or without an auxiliary term."""

  method: Method
  config: LossConfig

  def __call__(self, logprobs, entropy, batch, denominators):
    c = self.config
    skill = {}
    if self.method.needs_skills:
      skill = {
        "skill_logprobs": batch.skill_logprobs,
        "skill_mask": batch.skill_mask,
        "opd_coef": c.opd_coef,
        "opd_beta": c.opd_beta,
      }
    return self.method.loss(
      logprobs=logprobs,
      old_logprobs=batch.old_logprobs,
      advantages=batch.advantages,
      mask=batch.mask,
      ref_logprobs=batch.ref_logprobs,
      entropy=entropy,
      kl_coef=c.kl_coef,
      entropy_coef=c.entropy_coef,
      clip_low=c.clip_low,
      clip_high=c.clip_high,
      dual_clip=c.dual_clip,
      kl_estimator=c.kl_estimator,
      denominators=denominators,
      **skill,
    )


def sft_loss(logprobs, entropy, batch, denominators):
  """Stage 1: mean negative log-likelihood of the masked tokens (paper, the SFT loss; nats per token)."""
  del entropy
  share = jnp.sum(jnp.where(batch.mask > 0, losses.nll(logprobs=logprobs) * batch.mask, 0.0)) / jnp.maximum(
    denominators["tokens"], 1.0
  )
  return share, {"loss": jax.lax.stop_gradient(share)}


def init_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
  """A fresh state on the mesh of the parameters; moments carry their parameter's sharding.

  The parameters are copied: the update donates its state, and what the caller holds must not be deleted under their
  hands.
  """
  step = jnp.zeros((), jnp.int32, out_sharding=jax.sharding.PartitionSpec())
  return TrainState(step, jax.tree.map(jnp.copy, params), jax.jit(optimizer.init)(params))


def make_update(config: ModelConfig, loss: Loss, optimizer: optax.GradientTransformation, *, temperature: float = 1.0):
  """The update step: update(state, [Batch, ...]) -> (state, metrics), state donated. Compiled once a row length."""

  @jax.jit(donate_argnums=(1, 2))
  def accumulate(params, grads, metrics, batch: Batch, denominators):
    def share(params, micro):
      logprobs, entropy = response_logprobs(params, micro.ordinary, micro.targets, config, temperature=temperature)
      return loss(logprobs, entropy, micro, denominators)

    def body(i, carry):
      grads, metrics = carry
      micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) if x.ndim else x, batch)
      (_, new_metrics), new_grads = jax.value_and_grad(share, has_aux=True)(params, micro)
      return jax.tree.map(jnp.add, grads, new_grads), jax.tree.map(jnp.add, metrics, new_metrics)

    with jax.named_scope("update"):
      return jax.lax.fori_loop(0, batch.count, body, (grads, metrics))

  @jax.jit(donate_argnums=0)
  def apply(state: TrainState, grads, metrics):
    norm = optax.global_norm(grads)
    finite = jnp.isfinite(norm)
    # optax knows no explicit axes; its results keep the specs of what they replace
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (grads, state.opt_state))
    updates, opt_state = jax.sharding.auto_axes(optimizer.update, out_sharding=specs)(
      grads, state.opt_state, state.params
    )
    new = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
    # A step with NaN gradients is skipped as a whole: moments that once held a NaN never recover.
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state.replace(step=state.step + 1))
    return new, losses.finish_metrics(metrics) | {"grad_norm": norm, "skipped": 1.0 - finite.astype(jnp.float32)}

  @jax.jit
  def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)

  names: list[str] = []  # of the loss's metrics; known after the first trace

  def metric_names(params, batch, denominators):
    def probe(params, batch):
      micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
      logprobs, entropy = response_logprobs(params, micro.ordinary, micro.targets, config, temperature=temperature)
      return loss(logprobs, entropy, micro, denominators)[1]

    return tuple(jax.eval_shape(probe, params, batch))

  @jax.jit
  def zero_metrics():
    return {name: jnp.zeros((), jnp.float32) for name in names}

  def update(state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, dict]:
    denominators = total_counts([(b.mask, b.skill_mask) for b in batches])
    if not names:
      names.extend(metric_names(state.params, batches[0], denominators))
    grads = zeros(state.params)
    metrics = zero_metrics()
    for batch in batches:
      grads, metrics = accumulate(state.params, grads, metrics, batch, denominators)
    return apply(state, grads, metrics)

  return update


@jax.jit
def total_counts(masks) -> dict[str, jax.Array]:
  """Denominators of a mini-batch: sums over all its row lengths (and, the arrays being global, over all hosts)."""
  counts = [losses.token_counts(mask=mask, skill_mask=skill_mask) for mask, skill_mask in masks]
  return {name: sum(count[name] for count in counts) for name in counts[0]}
