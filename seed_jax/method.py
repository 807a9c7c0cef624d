"""What a training method is: data. The named ones stand in `methods`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from seed_jax import losses
from seed_jax.replay import ReplayConfig

CONTEXTS = {
  "none": "no skill anywhere",
  "own_hindsight": "a skill written in hindsight (`skill_source` says which), for the re-scoring only",
  "external_hindsight": "another model's skill of the same trajectory, for the re-scoring only",
  "library_teacher": "a fixed library, for the re-scoring only",
  "library_rollout": "a fixed library, in the prompts of the rollouts",
  "library_everywhere": "a fixed library, in the prompts of the rollouts and of the evaluation",
  "library_evaluation": "a fixed library, in the prompts of the evaluation only",
}
RESCORED = ("own_hindsight", "external_hindsight", "library_teacher")  # the same tokens are scored in two contexts
IN_ROLLOUTS = ("library_rollout", "library_everywhere")
IN_EVALUATION = ("library_everywhere", "library_evaluation")

# whose text a trajectory gets -> what it is, and the contexts that it fits
SKILL_SOURCES = {
  "none": "no text",
  "own": "the policy's skill of the same trajectory",
  "group": "the policy's skill of another trajectory of the same group",
  "other_task": "the policy's skill of a trajectory of another task",
  "success_only": "own, of trajectories that succeeded; the others get none",
  "failure_only": "own, of trajectories that failed; the others get none",
  "frozen_analyzer": "the skill of the same trajectory by the policy that training began from",
  "external": "another model's skill of the same trajectory",
  "library": "the text that a fixed library has for the task",
  "random_text": "random tokens, as many as the own skill has",
  "group_contrast": "a skill of a success to follow and one of a failure to avoid, of a group that has both",
}
# whose parameters read the skill context -> what that means
TEACHERS = {
  "current": "the policy itself, as it is when it is scored",
  "start": "the policy that training began from, which stays as it is",
}
_HINDSIGHT = (
  "own",
  "group",
  "other_task",
  "success_only",
  "failure_only",
  "frozen_analyzer",
  "random_text",
  "group_contrast",
)
_SOURCES_OF = {"none": ("none",), "own_hindsight": _HINDSIGHT, "external_hindsight": ("external",)}


@dataclasses.dataclass(frozen=True)
class Method:
  """One training method. Frozen and hashable: a static argument of the update step.

  name: what `--config=FILE:NAME` and the tables call it.
  context: a key of CONTEXTS: where skill text is put.
  auxiliary: loss per token (*, logprobs, skill_logprobs, old_logprobs, beta) added to the RL loss, or None.
  policy_gradient: False leaves the RL term out (the KL to the reference stays).
  advantage: (returns, group_ids, *, num_groups, normalize, eps, weights) -> advantages.
  needs_sft: the method's own recipe starts from the Stage-1 checkpoint; a config may start any method from it.
  source: where it is defined; says so where it is our reconstruction.
  skill_source: a key of SKILL_SOURCES: whose text it is.
  teacher: a key of TEACHERS: whose log-probabilities those of the skill context are.
  transform: (*, advantages, old_logprobs, skill_logprobs, skill_mask, coef) -> advantages [B, T], or None.
  regrade: a transform that needs all turns of a group at once, with turn_ids, group_ids, num_turns and num_groups more;
    applied to all tokens of an iteration after scoring; or None.
  reward_loss: (*, scores, group_ids, success) -> scalar: trains an implicit process reward model, a second policy that
    starts as the first; `regrade` then gets its log-probabilities for those of a skill context. None: there is none.
  ratios: importance ratios (*, logprobs, old_logprobs, mask, sequence_ids) -> [B, T].
  step_advantage: (step_returns, anchors, *, num_groups, normalize, eps, weights) -> advantages that are added, with the
    weight train.step_weight, to each step's own; or None. Step returns are discounted by train.gamma.
  group_filter: (returns, group_ids, *, num_groups) -> [num_groups] bool, which groups stay in the batch (an id of -1:
    an episode that broke off); or None.
  replay: how successes of earlier iterations are replayed; or None.
  settings: what the method's own recipe changes in a config, as (path, value) pairs; see `settings`.
  """

  name: str
  context: str
  auxiliary: Callable | None
  policy_gradient: bool
  advantage: Callable
  needs_sft: bool
  source: str
  skill_source: str = "none"
  teacher: str = "current"
  transform: Callable | None = None
  regrade: Callable | None = None
  reward_loss: Callable | None = None
  ratios: Callable = losses.token_ratios
  step_advantage: Callable | None = None
  group_filter: Callable | None = None
  replay: ReplayConfig | None = None
  settings: tuple[tuple[str, object], ...] = ()

  def __post_init__(self):
    if self.context not in CONTEXTS:
      raise ValueError(
        f"method {self.name!r}: context {self.context!r} is unknown; choose one of {', '.join(CONTEXTS)}"
      )
    if self.needs_skills and self.context not in RESCORED:
      what = "an auxiliary loss" if self.auxiliary is not None else "a transform of advantages"
      raise ValueError(f"method {self.name!r}: {what} compares two contexts, but context={self.context!r} gives one")
    if self.teacher not in TEACHERS or (self.teacher != "current" and not self.needs_skills):
      raise ValueError(
        f"method {self.name!r}: teacher {self.teacher!r} must be one of {', '.join(TEACHERS)}, and without a skill "
        "context that is scored it must be current"
      )
    if self.reward_loss is not None and self.regrade is None:
      raise ValueError(f"method {self.name!r}: it trains a reward model, but no regrade uses what that says")
    if not self.trains and self.context not in ("none", "library_evaluation"):
      raise ValueError(f"method {self.name!r}: neither an auxiliary loss nor a policy gradient: nothing to learn from")
    fitting = _SOURCES_OF.get(self.context, ("library",))
    if self.skill_source not in fitting:
      raise ValueError(
        f"method {self.name!r}: skill_source {self.skill_source!r} does not fit context {self.context!r}; "
        f"choose one of {', '.join(fitting)}"
      )

  @property
  def trains(self) -> bool:
    """Whether there is anything to learn from; the untrained methods are evaluated as they are."""
    return self.auxiliary is not None or self.policy_gradient

  @property
  def needs_skills(self) -> bool:
    """Whether a skill context is scored."""
    compares = self.regrade is not None and self.reward_loss is None
    return self.auxiliary is not None or self.transform is not None or compares

  @property
  def needs_analysis(self) -> bool:
    """Whether trajectories are analysed, by the policy or by another model, to get the text of that context."""
    return self.needs_skills and self.skill_source != "library"

  @property
  def in_rollouts(self) -> bool:
    """Whether the prompts of the training episodes hold library text."""
    return self.context in IN_ROLLOUTS

  @property
  def in_evaluation(self) -> bool:
    """Whether the prompts of the evaluation hold library text."""
    return self.context in IN_EVALUATION

  def loss(
    self,
    *,
    advantages,
    old_logprobs,
    skill_logprobs=None,
    skill_mask=None,
    opd_coef=0.01,
    opd_beta=5.0,
    transform_coef=0.0,
    **common,
  ):
    """The method's objective on one (micro-)batch, (scalar, metrics): `losses.grpo_loss` or `losses.seed_loss`, see
    there.

    One call for every method: the arguments of the skill branch are ignored where there is none. `transform_coef`, a
    number or a traced scalar, is the transform's strength.
    """
    if not self.trains:
      raise ValueError(f"method {self.name!r} is evaluated as it is: there is no loss to train it with")
    if not self.policy_gradient:
      advantages = jnp.zeros_like(jnp.asarray(advantages, jnp.float32))
    common |= dict(old_logprobs=old_logprobs, ratios=self.ratios)
    if not self.needs_skills:
      return losses.grpo_loss(advantages=advantages, **common)
    skill = dict(skill_logprobs=skill_logprobs, skill_mask=skill_mask)
    if self.transform is not None:
      advantages = self.transform(advantages=advantages, old_logprobs=old_logprobs, **skill, coef=transform_coef)
      if jnp.shape(advantages) != jnp.shape(old_logprobs):
        raise ValueError(
          f"the transform of method {self.name!r} gave shape {jnp.shape(advantages)} for old_logprobs of shape "
          f"{jnp.shape(old_logprobs)}; it must give one advantage a token"
        )
    auxiliary, coef = (losses.no_auxiliary_loss, 0.0) if self.auxiliary is None else (self.auxiliary, opd_coef)
    return losses.seed_loss(
      advantages=advantages, **skill, opd_coef=coef, opd_beta=opd_beta, token_loss=auxiliary, **common
    )
