"""The named methods: a method = context source x auxiliary loss x policy gradient x advantage x starting point."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from seed_jax import losses

CONTEXTS = {
  "none": "no skill anywhere",
  "own_hindsight": "the policy's own skill of the same trajectory, for the re-scoring only",
  "external_hindsight": "another model's skill of the same trajectory, for the re-scoring only",
  "library_teacher": "a fixed library, for the re-scoring only",
  "library_rollout": "a fixed library, in the prompts of the rollouts",
}


@dataclasses.dataclass(frozen=True)
class Method:
  """One training method. Frozen and hashable: a static argument of the update step.

  name: what `--config=FILE:NAME` and the tables call it.
  context: a key of CONTEXTS: where the privileged text comes from.
  auxiliary: per-token loss (*, logprobs, skill_logprobs, beta) added to the RL loss, or None. What needs no skill
    scores none.
  policy_gradient: False leaves the RL term out (the KL to the reference stays).
  advantage: (returns, group_ids, *, num_groups, normalize, eps, weights) -> advantages.
  needs_sft: the method's own recipe starts from the Stage-1 checkpoint; a config may start any method from it.
  source: where it is defined; says so where it is our reconstruction.
  """

  name: str
  context: str
  auxiliary: Callable | None
  policy_gradient: bool
  advantage: Callable
  needs_sft: bool
  source: str

  def __post_init__(self):
    if self.context not in CONTEXTS:
      raise ValueError(
        f"method {self.name!r}: context {self.context!r} is unknown; choose one of {', '.join(CONTEXTS)}"
      )
    if self.auxiliary is not None and self.context in ("none", "library_rollout"):
      raise ValueError(
        f"method {self.name!r}: an auxiliary loss compares two contexts, but context={self.context!r} gives one"
      )
    if self.auxiliary is None and not self.policy_gradient:
      raise ValueError(f"method {self.name!r}: neither an auxiliary loss nor a policy gradient: nothing to learn from")

  @property
  def needs_skills(self) -> bool:
    """Whether trajectories are analysed and the skill branch is scored."""
    return self.auxiliary is not None

  def loss(self, *, advantages, skill_logprobs=None, skill_mask=None, opd_coef=0.01, opd_beta=5.0, **common):
    """The method's objective on one (micro-)batch, (scalar, metrics): `losses.grpo_loss` or `losses.seed_loss`, see
    there.

    One call for every method: the arguments of the skill branch are ignored where there is none.
    """
    if not self.policy_gradient:
      advantages = jnp.zeros_like(jnp.asarray(advantages, jnp.float32))
    if self.auxiliary is None:
      return losses.grpo_loss(advantages=advantages, **common)
    return losses.seed_loss(
      advantages=advantages,
      skill_logprobs=skill_logprobs,
      skill_mask=skill_mask,
      opd_coef=opd_coef,
      opd_beta=opd_beta,
      token_loss=self.auxiliary,
      **common,
    )


SEED = Method(
  name="seed",
  context="own_hindsight",
  auxiliary=losses.opd_loss,
  policy_gradient=True,
  advantage=losses.group_advantages,
  needs_sft=True,
  source="SEED, section 3: hindsight-skill SFT, then GRPO with self-evolving on-policy distillation, eq. (1)",
)

METHODS = {
  method.name: method
  for method in (
    SEED,
    Method(
      name="grpo",
      context="none",
      auxiliary=None,
      policy_gradient=True,
      advantage=losses.group_advantages,
      needs_sft=False,
      source="GRPO, arXiv:2402.03300, as SEED's baseline runs it: token mean, dual clip 3, k3",
    ),
    dataclasses.replace(
      SEED,
      name="seed_without_sft",
      needs_sft=False,
      source="SEED, table 2, row without hindsight-skill SFT: the base policy analyses its own trajectories",
    ),
    dataclasses.replace(
      SEED,
      name="seed_without_opd",
      context="none",
      auxiliary=None,
      source="SEED, table 2, row without self-evolving OPD: Stage-1 SFT, then GRPO",
    ),
  )
}


def names() -> tuple[str, ...]:
  """The names that `get` knows, in the order of the table."""
  return tuple(METHODS)


def get(name: str) -> Method:
  """The method of that name; ValueError lists the names there are."""
  if name not in METHODS:
    raise ValueError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
  return METHODS[name]
