"""The quickstart: SEED end to end on a laptop CPU, no download, eight minutes on two cores.

A decoder of 0.6 M parameters plays `seed/Household-v0`, an ALFWorld-like text game of generated rooms. The stages: a
starting policy (a stand-in for a pre-trained language model), episodes by it, skills for them by a scripted analyzer,
supervised training on those skills, SEED, and an evaluation in unseen rooms with no skill in any prompt.

  bash launch/local_run.sh                                          # SEED
  bash launch/local_run.sh --config=configs/quickstart.py:grpo      # another method from the same SFT checkpoint
"""

from ml_collections import ConfigDict, config_dict

from seed_jax import methods


def optimizer(**changes) -> ConfigDict:
  values = dict(
    rule="adamw",
    learning_rate=1e-3,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.01,
    clip_norm=1.0,
    schedule="cosine",
    warmup=0.05,
    adam_rate=0.15,
    final_fraction=0.1,
    moment_dtype="float32",
  )
  return ConfigDict(values | changes)


def get_config(method: str = "seed") -> ConfigDict:
  c = ConfigDict()
  c.seed = 0
  c.method = method
  c.start = ""  # work directory of a run whose SFT checkpoint this one shall start from
  c.mesh = ConfigDict(dict(data=1, fsdp=1, tp=1))
  c.actor_mesh = ConfigDict(
    dict(data=0, fsdp=1, tp=0)
  )  # of each host, for the engine; 0: as the learner's, or what fits a host
  c.benchmark = ConfigDict(dict(name="household", options=ConfigDict()))

  c.model = ConfigDict()
  c.model.path = ""  # empty: the `base` stage makes the starting policy
  c.model.preset = ""  # of seed_jax/models/presets.py: the sizes of the weights at `path`, known without them
  c.model.dtype = "float32"
  c.model.scan_layers = False  # True on accelerators: one compiled layer; unrolled is faster on a CPU
  c.model.remat = "none"  # full | dots | ...: what the backward pass computes again instead of keeping
  c.model.tokenizer_options = ConfigDict()
  c.model.shape = ConfigDict(
    dict(
      architecture="Qwen3ForCausalLM",
      hidden_size=128,
      num_layers=3,
      num_heads=2,
      num_kv_heads=1,
      head_dim=64,
      intermediate_size=384,
    )
  )
  c.model.shape.update(dict(qk_norm=True, rope_theta=10_000.0, max_positions=1024))

  c.rollout = ConfigDict(dict(mode="transcript", history=5, max_steps=20, max_prompt=256, max_response=8, capacity=384))
  c.rollout.update(
    dict(slots=64, environments=0, smallest_bucket=16, prefill_buckets=(16, 96), prefill_tokens=1_536, share_prefix=8)
  )
  c.rollout.update(dict(capacity_buckets=(192,), refill=0.25, answer_after=0, workers=0))
  c.rollout.update(dict(step_timeout=60.0, reset_timeout=60.0))
  c.rollout.update(dict(temperature=1.0, top_k=0, top_p=1.0, stop_strings=()))

  # ask="turn" goes on from the episode's own conversation: an iteration takes a fifth less time
  c.analysis = ConfigDict(dict(ask="message", max_prompt=320, max_response=64, template="compact"))

  # every so many iterations; the newest `keep` stay. `keep_best` more stay by best_metric, higher is better: a column
  # of metrics.jsonl ("success"), or SPLIT/COLUMN of curve.jsonl ("valid/success", with train.panel.split="valid")
  c.checkpoint = ConfigDict(dict(every=20, keep=2, keep_best=0, best_metric=""))

  c.base = ConfigDict(dict(episodes=15_000, vocab_size=512, vocabulary_episodes=2_000, observation_weight=True))
  c.base.update(dict(epochs=1, batch_tokens=2_500, row_lengths=(320,), micro_tokens=1_280, response_fraction=1.0))
  c.base.update(dict(log_every=100, save_every=200, optimizer=optimizer(rule="muon", learning_rate=1e-2)))

  c.collect = ConfigDict(dict(split="train", tasks=180, samples=8, tasks_per_part=60, temperature=0.4))
  c.annotate = ConfigDict(dict(analyzer="scripted"))
  c.sft = ConfigDict(
    dict(epochs=3, replay=1.0, validation=0.1, check=128, batch_tokens=2_500, row_lengths=(384,), micro_tokens=1_536)
  )
  c.sft.update(
    dict(response_fraction=1.0, log_every=50, save_every=100, optimizer=optimizer(rule="muon", learning_rate=1e-2))
  )

  c.train = ConfigDict(
    dict(split="train", num_tasks=2_400, tasks_per_iteration=8, group_size=8, iterations=100, minibatches=2)
  )
  c.train.update(
    dict(
      reward_scale=10.0, invalid_penalty=0.0, normalize="mean_std", per_step=False, rescore="iteration", start_from=""
    )
  )
  c.train.update(dict(gamma=0.95, step_weight=1.0))  # of methods that credit single steps
  c.train.max_generations = 1  # rounds of episodes an iteration may take, for methods that leave groups out
  c.train.keep_skills = 64  # skills of an iteration that stay in DIR/skills, with what each is worth; 0: none
  c.train.update(
    dict(theory_every=0, theory_contexts=32)
  )  # iterations between measurements of the propositions; 0: none
  c.train.async_level = 0  # 1: the next episodes are played before the update, with importance weights (loss.tis_cap)
  c.train.update(dict(row_lengths=(320,), micro_tokens=1_280, response_fraction=0.75))
  c.train.loss = ConfigDict(
    dict(clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl_coef=0.01, kl_estimator="k3", entropy_coef=0.0)
  )
  c.train.loss.update(dict(opd_coef=0.01, opd_beta=5.0, tis_cap=config_dict.placeholder(float)))
  c.train.loss.update(dict(aggregation="token_mean", aggregation_length=config_dict.placeholder(float)))
  c.train.loss.update(dict(transform_coef=0.0, transform_decay=0))
  c.train.optimizer = optimizer(learning_rate=3e-4, schedule="constant")
  # The learning curve: every so many iterations (0: never) the policy plays these tasks without a skill. `valid` holds
  # training rooms that training does not play: there hyper-parameters are chosen, and nothing is on `unseen`.
  c.train.panel = ConfigDict(dict(every=0, split="unseen", tasks=240, samples=1, seed=0, temperature=0.4))

  c.evaluate = ConfigDict(dict(split="unseen", tasks=240, samples=1, seed=0, temperature=0.4))
  c.evaluate.update(dict(mechanism_tasks=60, mechanism_samples=4, mechanism_split="unseen"))

  # iterations (counted from 0) of which a jax.profiler trace is written into `folder` (empty: DIR/profile)
  c.profile = ConfigDict(dict(iterations=(), folder=""))

  # Methods with a static library: DIR/library.json is built from the annotated episodes, or `path` names one.
  c.library = ConfigDict(dict(path="", retrieval="family", rules="alfworld", embedder="", render="compact"))
  c.library.update(dict(top_k=2, max_mistakes=1, max_tokens=64, build=ConfigDict(dict(per_family=6, general=12))))

  # Stage `preflight`: dollars per chip-hour (0: unknown); which programs are compiled, as "update,decode" (empty: all;
  # "none": predictions alone); how many other choices it compiles where they do not fit; chips of the
  # smallest slice that it may name (where the config refuses smaller ones); mean numbers of tokens to predict with, see
  # roofline.Work.
  c.preflight = ConfigDict(dict(price=0.0, programs="", tries=6, fewest=1, prompt=30.0, response=6.0))
  c.preflight.update(dict(analysis_prompt=250.0, analysis_response=40.0, environment_seconds=0.001))

  # Stage `compare`: every arm with every seed, all arms of a seed from one SFT checkpoint, measured on train.panel.
  c.compare = ConfigDict(dict(methods=("seed", "grpo"), seeds=(0, 1, 2, 3, 4), every=10))
  c.compare.baseline = ""  # an arm's name; empty: grpo where it is an arm, else the first arm
  c.compare.vary = ""  # a sweep, all methods with each value: "train.loss.opd_beta=0,1,5,20"
  c.compare.arms = ()  # more arms: (name, method, ("FIELD=VALUE", ...))
  c.update_from_flattened_dict(methods.settings(method))
  return c
