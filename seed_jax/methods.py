"""The named methods: context x skill source x auxiliary loss x ratios x advantage x transform x settings.

What differs between methods is data here: functions that are passed in, names of where text comes from, and the
settings that a method's own recipe changes. Rows marked [R] are our reconstruction or our control, the others follow
the paper or code that `source` names.
"""

from __future__ import annotations

import dataclasses

from seed_jax import losses
from seed_jax.advantages import equal_groups, most_unequal_groups, rloo_advantages, unequal_groups
from seed_jax.method import CONTEXTS, SKILL_SOURCES, Method  # noqa: F401  (re-exported)
from seed_jax.replay import ReplayConfig
from seed_jax.step_advantages import istar_turn_advantages, pairwise_prm_loss, step_advantages

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


_CENTRED = _variant(
  SEED,
  "seed_centred_gate",
  "[R] control: SEED with the gate less 1/2, the same expectation without the push on every sampled token",
  auxiliary=losses.centred_opd_loss,
)
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
  _CENTRED,
  *(
    _variant(
      base,
      name,
      "[R] control: the policy that training began from reads the skill context, and does not move with the student",
      teacher="start",
    )
    for base, name in ((SEED, "seed_frozen_teacher"), (_CENTRED, "seed_centred_frozen_teacher"))
  ),
  _variant(
    SEED,
    "seed_external_analyzer",
    f"[R] control: SEED with {SKILL_SOURCES['external']}",
    context="external_hindsight",
    skill_source="external",
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
OURS = frozenset(METHODS)  # names that no other method may take


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
  name is one of this table's; a method of one's own replaces an earlier one of the name, for a file or a notebook's
  cell is read more than once.
  """
  if method.name in OURS and METHODS[method.name] != method:
    raise ValueError(f"the name {method.name!r} is taken ({METHODS[method.name].source}); give the method another one")
  METHODS[method.name] = method
  return method


def settings(name: str) -> dict[str, object]:
  """What the method's own recipe changes in a config, {path: value}, before the changes of the command line."""
  return dict(get(name).settings)


def loss_settings(name: str) -> dict[str, object]:
  """Of `settings` those of the loss: {field of update.LossConfig: value}."""
  prefix = "train.loss."
  return {path.removeprefix(prefix): value for path, value in get(name).settings if path.startswith(prefix)}
