"""The update: gradients of a loss over packed micro-batches, summed under global denominators, then one optimizer step.

Shapes: M micro-batches, B rows, R response tokens of a row.

A mini-batch is a list of `Batch`es, one per row length; each compiled program handles one row length, whatever the
number of its micro-batches. Denominators are sums over the whole mini-batch (all row lengths, all hosts) and are known
before the first gradient, so that the objective does not depend on how samples were packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence

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
  filled, and the first `skill_count` of them hold a sample with a skill.
  """

  ordinary: Context
  skill: Context | None  # None where the method scores no skill context
  targets: jax.Array  # [M, B, R] int32
  mask: jax.Array  # [M, B, R] float32, 1 on sampled tokens
  skill_mask: jax.Array  # [M, B, R] float32, 1 where the trajectory has a parsed skill
  advantages: jax.Array  # [M, B, R] float32
  sampler_logprobs: jax.Array  # [M, B, R] float32, as the engine reported them
  count: jax.Array  # [] int32
  skill_count: jax.Array  # [] int32
  old_logprobs: jax.Array | None = None  # [M, B, R] float32 of the policy at the start of the iteration's updates
  # [] bool: the policy is still that one, so `old_logprobs` hold nothing and the update's own are taken. A value and no
  # structure, so that the first mini-batch and the others share a program.
  own_old: jax.Array | None = None
  skill_logprobs: jax.Array | None = None
  ref_logprobs: jax.Array | None = None
  transform_coef: jax.Array | None = None  # [] float32, where it changes over the run; None: LossConfig's


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Coefficients of the objective; see `losses.seed_loss` and, of aggregations, `losses.token_weights`.

  transform_coef, transform_decay: the strength of the method's transform of advantages, and over how many iterations it
    falls to 0 (0: it stays). The loop hands the current one in, as `Batch.transform_coef` (`relatives.linear_decay`).
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float | None = 3.0
  tis_cap: float | None = None
  kl_coef: float = 0.01
  kl_estimator: str = "k3"
  entropy_coef: float = 0.0
  opd_coef: float = 0.01
  opd_beta: float = 5.0
  aggregation: str = "token_mean"
  aggregation_length: float | None = None  # tokens; of sequence_mean_token_sum_norm
  transform_coef: float = 0.0
  transform_decay: int = 0
  temperature: float = 1.0  # of the rollout: log-probabilities are those of the distribution that was sampled


# A loss takes (logprobs [B, R], entropy [B, R], micro-batch, denominators) and returns (scalar share, shares of
# metrics).
Loss = Callable[[jax.Array, jax.Array, Batch, dict], tuple[jax.Array, dict]]


@dataclasses.dataclass(frozen=True)
class MethodLoss:
  """The loss of a named method: GRPO with or without an auxiliary term or a transform of its advantages."""

  method: Method
  config: LossConfig

  def __call__(self, logprobs, entropy, batch, denominators):
    c = self.config
    old = batch.old_logprobs
    if batch.own_old is not None:
      old = jnp.where(batch.own_old, jax.lax.stop_gradient(logprobs), old)
    skill = {}
    if self.method.needs_skills:
      skill = {
        "skill_logprobs": batch.skill_logprobs,
        "skill_mask": batch.skill_mask,
        "opd_coef": c.opd_coef,
        "opd_beta": c.opd_beta,
        "transform_coef": c.transform_coef if batch.transform_coef is None else batch.transform_coef,
      }
    return self.method.loss(
      logprobs=logprobs,
      old_logprobs=old,
      advantages=batch.advantages,
      mask=batch.mask,
      ref_logprobs=batch.ref_logprobs,
      sampler_logprobs=batch.sampler_logprobs,
      entropy=entropy,
      kl_coef=c.kl_coef,
      entropy_coef=c.entropy_coef,
      clip_low=c.clip_low,
      clip_high=c.clip_high,
      dual_clip=c.dual_clip,
      tis_cap=c.tis_cap,
      kl_estimator=c.kl_estimator,
      aggregation=c.aggregation,
      aggregation_length=c.aggregation_length,
      sequence_ids=sequence_ids(batch.ordinary),
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


class Update:
  """The update step: update(state, [Batch, ...]) -> (state, metrics), state donated. Compiled once a row shape."""

  def __init__(
    self, config: ModelConfig, loss: Loss, optimizer: optax.GradientTransformation, *, temperature: float = 1.0
  ):
    def share(params, micro, denominators):
      logprobs, entropy = response_logprobs(params, micro.ordinary, micro.targets, config, temperature=temperature)
      return loss(logprobs, entropy, micro, denominators)

    def accumulate(params, grads, metrics, batch: Batch, denominators):
      def body(i, carry):
        grads, metrics = carry
        micro = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) if x.ndim else x, batch)
        (_, new_metrics), new_grads = jax.value_and_grad(share, has_aux=True)(params, micro, denominators)
        return jax.tree.map(jnp.add, grads, new_grads), losses.add_metrics(metrics, new_metrics)

      with jax.named_scope("update"):
        return jax.lax.fori_loop(0, batch.count, body, (grads, metrics))

    @jax.named_scope("optimizer")
    def apply(state: TrainState, grads, metrics):
      norm = optax.global_norm(grads)
      finite = jnp.isfinite(norm)

      def step(params, opt_state):
        # optax knows no explicit axes; its results keep the specs of what they replace
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (grads, opt_state))
        optimizer_update = jax.sharding.auto_axes(optimizer.update, out_sharding=specs)
        updates, opt_state = optimizer_update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

      # A step with NaN gradients is skipped as a whole: moments that once held a NaN never recover. A choice between
      # programs: one between arrays would read and write the old state along with the new one.
      skip = lambda params, opt_state: (params, opt_state)  # noqa: E731
      new = TrainState(state.step + 1, *jax.lax.cond(finite, step, skip, state.params, state.opt_state))
      return new, losses.finish_metrics(metrics) | {"grad_norm": norm, "skipped": 1.0 - finite.astype(jnp.float32)}

    def zeros(params, batch, denominators):
      first = lambda batch: jax.tree.map(lambda x: x[0] if x.ndim else x, batch)  # noqa: E731
      _, metrics = jax.eval_shape(lambda p, b, d: share(p, first(b), d), params, batch, denominators)
      return jax.tree.map(jnp.zeros_like, params), {name: jnp.zeros((), jnp.float32) for name in metrics}

    self._accumulate = jax.jit(accumulate, donate_argnums=(1, 2))
    self._apply = jax.jit(apply, donate_argnums=0)
    self._zeros = jax.jit(zeros)
    self._no_metrics = jax.jit(lambda metrics: jax.tree.map(jnp.zeros_like, metrics))

  def __call__(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, dict]:
    return Pieces(self.pieces(state, batches)).finish()

  def pieces(
    self, state: TrainState, batches: Sequence[Batch], replayed: Sequence[Batch] = ()
  ) -> Generator[None, None, tuple[TrainState, dict]]:
    """The same, a program at a time: stops behind each batch, so that other work finds a place between them.

    `replayed` batches add the gradient of their own loss, under denominators of their own; they enter no metric.
    """
    denominators = total_counts(batches)
    grads, metrics = self._zeros(state.params, batches[0], denominators)
    if replayed:
      own, unused = total_counts(replayed), self._no_metrics(metrics)
      for batch in replayed:
        grads, unused = self._accumulate(state.params, grads, unused, batch, own)
        yield
    for batch in batches:
      grads, metrics = self._accumulate(state.params, grads, metrics, batch, denominators)
      yield
    return self._apply(state, grads, metrics)

  def compile(self, state: TrainState, batch: Batch) -> None:
    """Compiles all that an update with batches like this one calls, and runs nothing: the state stays as it is."""
    denominators = total_counts([batch])
    grads, metrics = self._zeros(state.params, batch, denominators)
    self._no_metrics(metrics)
    for lowered in self._lower(state, batch, denominators, grads, metrics).values():
      lowered.compile()  # found again only by arrays that lie where these do: shapes would not do

  def lower(self, state: TrainState, batch: Batch) -> dict[str, jax.stages.Lowered]:
    """The two large programs of an update, by name, not compiled; shapes will do for state and batch."""
    denominators = jax.eval_shape(lambda batch: total_counts([batch]), batch)
    grads, metrics = jax.eval_shape(self._zeros, state.params, batch, denominators)
    return self._lower(state, batch, denominators, grads, metrics)

  def _lower(self, state, batch, denominators, grads, metrics):
    return {
      "gradients": self._accumulate.lower(state.params, grads, metrics, batch, denominators),
      "optimizer": self._apply.lower(state, grads, metrics),
    }


class Pieces:
  """The work of a generator, done a piece at a time while something else waits, and then to its end."""

  def __init__(self, pieces: Generator):
    self._pieces, self._result = pieces, None

  def advance(self) -> bool:
    """Does a piece; whether there may be another."""
    if self._result is None:
      try:
        next(self._pieces)
      except StopIteration as end:
        self._result = (end.value,)
    return self._result is None

  def finish(self):
    """What the generator returns."""
    while self.advance():
      pass
    return self._result[0]


def make_update(
  config: ModelConfig, loss: Loss, optimizer: optax.GradientTransformation, *, temperature: float = 1.0
) -> Update:
  """The update step of a loss and an optimizer."""
  return Update(config, loss, optimizer, temperature=temperature)


def sequence_ids(context: Context) -> jax.Array:
  """Which sequence of its row a response token is of, [..., B, R] int32 from 0; a sequence is a sample."""
  pick = lambda segments, index: segments[index] - 1  # noqa: E731
  for _ in context.index.shape[:-1]:
    pick = jax.vmap(pick)
  return pick(context.segment_ids, context.index)


def total_counts(batches: Sequence[Batch]) -> dict[str, jax.Array]:
  """Denominators of a mini-batch: sums over all its row shapes (and, the arrays being global, over all hosts)."""
  counts = _no_counts()
  for batch in batches:
    counts = _add_counts(counts, batch.mask, batch.skill_mask, batch.ordinary)
  return counts


@jax.jit
def _no_counts():
  return losses.token_counts(mask=jnp.zeros((1, 1)))


@jax.jit
def _add_counts(counts, mask, skill_mask, ordinary):
  counted = losses.token_counts(mask=mask, skill_mask=skill_mask, sequence_ids=sequence_ids(ordinary))
  return jax.tree.map(jnp.add, counts, counted)
