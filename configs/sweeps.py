"""What a hyper-parameter does, and what every method does: sweeps of the quickstart on training rooms that training
does not play.

Every sweep is a comparison (docs/compare.md) on the split `valid`; nothing of it is measured on the test panel. All of
them may share one work directory: a run that two sweeps have in common is made once.

  python -m seed_jax.main --config=configs/sweeps.py:beta --workdir=runs/sweeps --stages=compare
  ... configs/sweeps.py:lambda | group_size | gate | analyzer | teacher | ties | methods | all
"""

import dataclasses

from ml_collections import ConfigDict

from configs import quickstart
from seed_jax import methods

COEF, BETA = "train.loss.opd_coef", "train.loss.opd_beta"


def _arm(name: str, method: str = "seed", coef: float = 0.1, **fields) -> tuple:
  """An arm that ends in the fields' values; a dot in a field's name is written `__`. Every method with a distillation
  loss has the coefficient, but for those whose own recipe sets one.
  """
  known = methods.get(next((base for base, change in VARIANTS if f"{base}_{change}" == method), method))
  values = {COEF: coef} if known.auxiliary is not None and COEF not in dict(known.settings) else {}
  values |= {field.replace("__", "."): value for field, value in fields.items()}
  return name, method, tuple(f"{field}={value}" for field, value in values.items())


def _groups(size: int) -> dict:
  """The same 64 episodes of an iteration in groups of another size."""
  return {"train__group_size": size, "train__tasks_per_iteration": 64 // size}


_ON_TIES = methods.get("seed_on_ties")
_TIES = dict(group_filter=_ON_TIES.group_filter, settings=_ON_TIES.settings)
# (method, what is other in it): known by the name METHOD_CHANGE while this file is the config
VARIANTS = {
  ("seed_centred_gate", "on_ties"): _TIES,
  ("seed_frozen_teacher", "on_ties"): _TIES,
  ("seed_centred_frozen_teacher", "on_ties"): _TIES,
  ("seed_centred_gate", "frozen_analyzer"): dict(skill_source="frozen_analyzer"),
  ("seed_centred_gate", "success_only"): dict(skill_source="success_only"),
  ("seed_centred_gate", "other_task"): dict(skill_source="other_task"),
  ("seed_centred_frozen_teacher", "other_task"): dict(skill_source="other_task"),
}

SWEEPS = {
  "gate": [_arm(f"centred {x}", "seed_centred_gate", x) for x in (0.1, 0.3, 1.0, 3.0)],
  "lambda": [_arm(f"lambda {x}", coef=x) for x in (0.003, 0.01, 0.03, 0.1, 0.3)],
  "beta": [_arm(f"beta {x}", train__loss__opd_beta=x) for x in (0.0, 1.0, 20.0)] + [_arm("lambda 0.1")],
  "group_size": [
    arm
    for size in (2, 4)
    for arm in (
      _arm(f"N {size}, no OPD", "seed_without_opd", **_groups(size)),
      _arm(f"N {size}", **_groups(size)),
    )
  ]
  + [_arm("lambda 0.1")],
  "teacher": [_arm(f"frozen teacher {x}", "seed_frozen_teacher", x) for x in (0.1, 1.0)]
  + [_arm(f"centred, frozen teacher {x}", "seed_centred_frozen_teacher", x) for x in (0.1, 0.3, 1.0)]
  + [_arm("centred, frozen teacher 0.3, other task", "seed_centred_frozen_teacher_other_task", 0.3)],
  "ties": [
    _arm("ties, GRPO", "grpo_on_ties", **_groups(2)),
    _arm("ties, SEED", "seed_on_ties", **_groups(2)),
    _arm("ties, SEED 1.0", "seed_on_ties", 1.0, **_groups(2)),
    _arm("ties, centred", "seed_centred_gate_on_ties", 1.0, **_groups(2)),
    _arm("ties, frozen teacher", "seed_frozen_teacher_on_ties", 1.0, **_groups(2)),
    _arm("ties, centred, frozen teacher", "seed_centred_frozen_teacher_on_ties", 1.0, **_groups(2)),
  ],
  "analyzer": [
    _arm(f"centred 1.0, {source}", f"seed_centred_gate_{source}", 1.0)
    for source in ("frozen_analyzer", "success_only", "other_task")
  ],
  "methods": [_arm(name, name) for name in methods.names() if name != "seed_without_opd"],
}


def get_config(sweep: str = "all") -> ConfigDict:
  if sweep != "all" and sweep not in SWEEPS:
    raise ValueError(f"sweep {sweep!r} is unknown; choose one of {', '.join(SWEEPS)}, all")
  for (method, change), fields in VARIANTS.items():
    methods.register(dataclasses.replace(methods.get(method), name=f"{method}_{change}", **fields))
  c = quickstart.get_config()
  c.analysis.ask = "turn"  # an iteration takes a fifth less time
  c.train.iterations = 40
  c.train.panel.update(dict(every=20, split="valid"))
  c.compare.methods = ("seed_without_opd",)
  c.compare.baseline = "seed_without_opd"
  c.compare.seeds = (0, 1, 2)
  arms = [arm for name, arms in SWEEPS.items() if sweep in (name, "all") for arm in arms]
  c.compare.arms = tuple(dict.fromkeys(arms))  # what two sweeps share, once
  return c
