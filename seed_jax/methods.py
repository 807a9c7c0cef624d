"""The named methods: context x skill source x auxiliary loss x ratios x advantage x transform x settings.

What differs between methods is data here: functions that are passed in, names of where text comes from, and the
settings that a method's own recipe changes. Rows marked [R] are our reconstruction or our control, the others follow
the paper or code that `source` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from seed_jax import losses
from seed_jax.advantages import equal_groups, most_unequal_groups, rloo_advantages, unequal_groups
from seed_jax.replay import ReplayConfig
from seed_jax.step_advantages import istar_turn_advantages, pairwise_prm_loss, step_advantages

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
    auxiliary, coef = (losses.no_auxiliary_loss, 0.0) if self.auxiliary is None else (self.auxiliary, opd_coef)
    return losses.seed_loss(
      advantages=advantages, **skill, opd_coef=coef, opd_beta=opd_beta, token_loss=auxiliary, **common
    )


GRPO = Method(
  name="grpo",
  context="none",
  auxiliary=None,
  policy_gradient=True,
  advantage=losses.group_advantages,
  needs_sft=False,
  source="GRPO, arXiv:2402.03300, as SEED's baseline runs it: token mean, dual clip 3, k3",
)
SEED = dataclasses.replace(
  GRPO,
  name="seed",
  context="own_hindsight",
  skill_source="own",
  auxiliary=losses.opd_loss,
  needs_sft=True,
  source="SEED, section 3: hindsight-skill SFT, then GRPO with self-evolving on-policy distillation, eq. (1)",
)
SDAR = dataclasses.replace(
  SEED,
  name="sdar",
  context="library_teacher",
  skill_source="library",
  needs_sft=False,
  source="SDAR, arXiv:2605.15155: SEED's gated term with a static library as the teacher's context",
)


def _variant(base: Method, name: str, source: str, **changes) -> Method:
  """`base` with other data; a key that is no field, like loss_clip_high, is a setting train.loss.clip_high."""
  fields = {f.name for f in dataclasses.fields(Method)}
  settings = tuple((f"train.loss.{k.removeprefix('loss_')}", v) for k, v in changes.items() if k not in fields)
  changes = {k: v for k, v in changes.items() if k in fields}
  changes["settings"] = base.settings + changes.get("settings", ()) + settings
  return dataclasses.replace(base, name=name, source=source, **changes)


_untrained = dict(policy_gradient=False)
_library = dict(skill_source="library")
_TABLE = (
  SEED,
  GRPO,
  # --- SEED's table 2, and what stands beside it
  _variant(
    SEED,
    "seed_without_sft",
    "SEED, table 2, row without hindsight-skill SFT: the base policy analyses its own trajectories",
    needs_sft=False,
    settings=(("train.start_from", "base"),),  # also where another method's Stage-1 checkpoint is there
  ),
  _variant(
    GRPO, "seed_without_opd", "SEED, table 2, row without self-evolving OPD: Stage-1 SFT, then GRPO", needs_sft=True
  ),
  _variant(
    SDAR, "seed_static_library", "SEED, table 2, row without on-policy skills: a static library", needs_sft=True
  ),
  # --- SEED's table 1
  _variant(GRPO, "vanilla", "SEED, table 1: the policy as it is", **_untrained),
  _variant(
    GRPO,
    "skill_prompt",
    "SEED, table 1: the policy as it is, library text in its prompts",
    context="library_evaluation",
    **_library,
    **_untrained,
  ),
  _variant(
    GRPO,
    "skill_grpo",
    "SEED, table 1: GRPO, library text in the prompts of the rollouts",
    context="library_rollout",
    **_library,
  ),
  _variant(
    GRPO,
    "skill_grpo_star",
    "SEED, table 1, Skill-GRPO*: library text in the prompts of the evaluation, too",
    context="library_everywhere",
    **_library,
  ),
  _variant(
    SDAR,
    "opsd",
    "SEED, table 1, OPSD as run there: the gated term and the KL without a policy gradient (arXiv:2601.18734's own "
    "form: losses.opsd_loss)",
    policy_gradient=False,
  ),
  _variant(SDAR, "grpo_opsd", "SEED, table 1, GRPO+OPSD: SDAR with the constant gate 1/2", loss_opd_beta=0.0),
  _variant(
    SDAR,
    "skill_sd",
    "Skill-SD, arXiv:2604.10674, as SEED's table 1 runs it: static library, no warm-down",
    auxiliary=losses.skill_sd_loss,
    loss_opd_coef=0.001,
  ),
  _variant(
    SDAR,
    "rlsd",
    "RLSD, arXiv:2604.03128, as SEED's table 1 runs it: static library, mix 0.5 to 0 over 100 iterations",
    auxiliary=None,
    transform=losses.rlsd_advantages,
    loss_transform_coef=0.5,
    loss_transform_decay=100,
  ),
  SDAR,
  _variant(
    SDAR,
    "opid",
    "OPID, arXiv:2606.26790; [R] episode skills only, no critical-step skills",
    context="external_hindsight",
    skill_source="external",
    auxiliary=None,
    transform=losses.opid_advantages,
    loss_transform_coef=0.001,
  ),
  _variant(
    SEED,
    "grsd",
    "GRSD, public code BinbZheng1/GRSD: turns re-weighed within their group by what its own contrastive text says of "
    "them; [R] the text is built from SEED's skills, no policy gradient on the reflections",
    skill_source="group_contrast",
    auxiliary=None,
    regrade=losses.grsd_advantages,
    needs_sft=False,
    loss_transform_coef=0.5,
  ),
  # --- other advantages and policy gradients
  _variant(
    GRPO,
    "gigpo",
    "GiGPO, arXiv:2505.10978: groups of equal observations credit single steps",
    step_advantage=step_advantages,
    settings=(("train.gamma", 0.95), ("train.step_weight", 1.0)),
  ),
  _variant(
    GRPO,
    "istar",
    "iStar, arXiv:2509.19199: step credit by an implicit process reward model that is trained along, no KL; [R] one "
    "update of it an iteration, at twice the policy's learning rate",
    regrade=istar_turn_advantages,
    reward_loss=pairwise_prm_loss,
    loss_transform_coef=1.0,
    loss_kl_coef=0.0,
  ),
  _variant(
    GRPO,
    "rloo",
    "RLOO, arXiv:2402.14740: leave-one-out baseline; [R] with the clipped surrogate and the KL of the GRPO baseline",
    advantage=rloo_advantages,
  ),
  _variant(
    GRPO,
    "dr_grpo",
    "Dr. GRPO, arXiv:2503.20783: no deviation, sums of tokens over a constant, no KL; [R] the constant is 512",
    settings=(("train.normalize", "mean"),),
    loss_aggregation="sequence_mean_token_sum_norm",
    loss_aggregation_length=512.0,
    loss_kl_coef=0.0,
    loss_dual_clip=None,
  ),
  _variant(
    GRPO,
    "dapo",
    "DAPO, arXiv:2503.14476: clip 0.2 / 0.28, token mean, no KL, groups of equal returns left out; [R] the overlong "
    "penalty is not here",
    group_filter=unequal_groups,
    settings=(("train.max_generations", 10),),
    loss_clip_high=0.28,
    loss_kl_coef=0.0,
  ),
  _variant(
    GRPO,
    "spear",
    "SPEAR, arXiv:2509.22601: its own successes replayed with advantages of today; clip 0.2 / 0.28, no deviation, no "
    "KL, the 75 % most unequal groups; [R] the constant of sums is 512, no intrinsic reward, no filters of episodes",
    group_filter=most_unequal_groups,
    replay=ReplayConfig(),
    settings=(("train.normalize", "mean"),),
    loss_clip_high=0.28,
    loss_dual_clip=10.0,
    loss_aggregation="sequence_mean_token_sum_norm",
    loss_aggregation_length=512.0,
    loss_kl_coef=0.0,
  ),
  _variant(
    GRPO,
    "gspo",
    "GSPO, arXiv:2507.18071: ratios of sequences, clip 3e-4 / 4e-4, mean of sequences",
    ratios=losses.sequence_ratios,
    loss_clip_low=3e-4,
    loss_clip_high=4e-4,
    loss_aggregation="sequence_mean_token_mean",
    loss_dual_clip=None,
  ),
  # --- controls, all [R]: SEED with one thing replaced
  *(
    _variant(
      base,
      f"{base.name}_on_ties",
      "[R] control, proposition 2: trained on groups of equal returns alone, of which the policy gradient says nothing",
      group_filter=equal_groups,
      settings=(("train.max_generations", 10),),
    )
    for base in (SEED, GRPO)
  ),
  _variant(
    SEED,
    "seed_centred_gate",
    "[R] control: SEED with the gate less 1/2, the same expectation without the push on every sampled token",
    auxiliary=losses.centred_opd_loss,
  ),
  _variant(SEED, "seed_constant_gate", "[R] control: SEED with the constant gate 1/2", loss_opd_beta=0.0),
  *(
    _variant(SEED, f"seed_{name}", f"[R] control: SEED with {SKILL_SOURCES[source]}", skill_source=source)
    for name, source in (
      ("skill_of_group", "group"),
      ("skill_of_other_task", "other_task"),
      ("success_only", "success_only"),
      ("failure_only", "failure_only"),
      ("frozen_analyzer", "frozen_analyzer"),
      ("random_text", "random_text"),
    )
  ),
)
METHODS = {method.name: method for method in _TABLE}


def names() -> tuple[str, ...]:
  """The names that `get` knows, in the order of the table."""
  return tuple(METHODS)


def get(name: str) -> Method:
  """The method of that name; ValueError lists the names there are."""
  if name not in METHODS:
    raise ValueError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
  return METHODS[name]


def register(method: Method) -> Method:
  """Makes a method of one's own known by its name, to `get`, to configs and to comparisons; returns it.

  A config file defines and registers it above its `get_config`: docs/methods.md has an example. ValueError where the
  name is that of another method; the very same one may be registered again.
  """
  if METHODS.setdefault(method.name, method) != method:
    raise ValueError(f"the name {method.name!r} is taken ({METHODS[method.name].source}); give the method another one")
  return method


def settings(name: str) -> dict[str, object]:
  """What the method's own recipe changes in a config, {path: value}, before the changes of the command line."""
  return dict(get(name).settings)


def loss_settings(name: str) -> dict[str, object]:
  """Of `settings` those of the loss: {field of update.LossConfig: value}."""
  prefix = "train.loss."
  return {path.removeprefix(prefix): value for path, value in get(name).settings if path.startswith(prefix)}
