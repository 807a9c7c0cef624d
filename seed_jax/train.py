"""Stage `train`: on-policy episodes, hindsight skills by the same policy, paired scoring, GRPO + OPD (paper, Stage 2).

Shapes: Q tasks of an iteration, N episodes of a task, B rows, R response tokens of a row.
"""

from __future__ import annotations

import contextlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from seed_jax import batching, credit, instruments, learn, methods, optimizer, preemption, relatives, update
from seed_jax.checkpoint import Checkpoints
from seed_jax.credit import kept_groups
from seed_jax.curve import Curve, metric_of
from seed_jax.metrics import CompileCounter, Timer, Writer, keep_examples, progress, read_rows, say
from seed_jax.profiling import Profiler, timed_play
from seed_jax.regrade import Regrade
from seed_jax.replay_buffer import Replay
from seed_jax.rollout import Episode
from seed_jax.rollout_metrics import engine_metrics, episode_metrics
from seed_jax.run import Run, optimizer_config, process_seed
from seed_jax.skill_branch import SkillBranch, shown
from seed_jax.train_config import check_tasks, loss_config
from seed_jax.unfinished import Plays, policy_of
from seed_jax.update import MethodLoss, Pieces

MEANS = ("parse_rate", "opd_active_ratio", "gate_mean", "gate_std")  # reported as means over the iterations


def run_train(run: Run) -> dict:
  """Trains policy/sft (or policy/base where the method asks for it) and writes policy/final.

  With async_level=1 the episodes of an iteration are played by the policy before the last update, while that update
  fills the pauses in which environments are at work: the metrics mismatch_* and old_kl tell how far the sampler was
  from the policy that is updated, and loss.tis_cap corrects for it.
  """
  c = run.config.train
  method = methods.get(run.config.method)
  start_from = c.start_from or ("sft" if method.needs_sft or run.done("sft") else "base")
  started = time.monotonic()

  # ---- the policy, its frozen copy as reference, the optimizer
  model, params = run.load_policy(start_from)
  loss = loss_config(run.config)
  reference = params if loss.kl_coef else None
  teacher = params if method.teacher == "start" else None
  chain = optimizer.make_optimizer(optimizer_config(c.optimizer), c.iterations * c.minibatches)
  step_fn = update.make_update(model, MethodLoss(method, loss), chain, temperature=loss.temperature)
  scoring = learn.Scoring(model, method, loss, c.rescore)
  with jax.set_mesh(run.mesh):
    state = update.init_state(params, chain)

  # ---- where a former run got to
  often = run.config.checkpoint
  checkpoints = Checkpoints(run.workdir / "checkpoints" / "train", keep=often.keep, keep_best=often.keep_best)
  behaviour = params  # that samples the next episodes: with async_level=1 the policy before the last update
  shapes = run.row_shapes(c)
  regrade = Regrade(run, method, shapes, model, params)

  def kept(behaviour):
    """What a checkpoint holds: the state, and what else changes where there is more."""
    more = [behaviour] * c.async_level + [r.state for r in (regrade.reward_model,) if r is not None]
    return (state, *more) if more else state

  found = checkpoints.restore(kept(params), run.resume_step("train"))
  first, seconds_before, counts = 0, 0.0, None
  if found:
    first, restored, record = found
    state, *more = restored if isinstance(restored, tuple | list) else (restored,)
    behaviour = more.pop(0) if c.async_level else None
    if regrade.reward_model is not None:
      regrade.reward_model.state = more.pop()
    seconds_before, counts = record["seconds"], record["counts"]
    checkpoints.drop_after(first)
    say(f"train: resumed at iteration {first} of {c.iterations}")
  done, row = first, {}  # iterations whose update is in `state`, and the metrics of the last one

  # ---- tasks, environments, engines
  pool_of_tasks = run.benchmark.tasks(c.split, c.num_tasks, process_seed(run.config.seed, "train tasks"))
  check_tasks(run.config, pool_of_tasks)
  plays = Plays(run, "train")
  curve = Curve(run, pool_of_tasks, first, counts, skill=shown(run, method.in_evaluation))
  branch = SkillBranch(run, method, params, resume=first)
  replay = Replay(run, scoring, shapes, resume=first)
  engine = run.engine(model, temperature=loss.temperature, seed=process_seed(run.config.seed, "train samples"))
  timer, compiles = Timer(), CompileCounter()
  trajectories = []

  def sample(iteration, params, on_idle=None):
    """Episodes of an iteration; where the method leaves groups out, further ones until there are enough."""
    engine.set_params(params)
    kept, everything = [], []
    for key in range(iteration * c.max_generations, (iteration + 1) * c.max_generations):
      where = dict(number=key % c.max_generations, rounds=c.max_generations)
      tasks = iteration_tasks(pool_of_tasks, iteration, c.tasks_per_iteration, run.config.seed, **where)
      start = len(everything) // c.group_size
      episodes = [
        Episode(task, group, member, branch.shown)
        for group, task in enumerate(tasks, start)
        for member in range(c.group_size)
      ]
      options = dict(iteration=key, reading=branch.reading, on_idle=on_idle)
      played = timed_play(timer, plays, key, engine, pool, episodes, params, **options)
      everything += played
      if method.group_filter is not None:
        with jax.set_mesh(run.mesh):  # as it was compiled
          played = kept_groups(played, method.group_filter)
      kept += played
      if len(kept) >= c.tasks_per_iteration * c.group_size:
        break
    kept = kept[: c.tasks_per_iteration * c.group_size]
    log = episode_metrics(everything) | engine_metrics(engine.take_stats())
    log["tokens_sampled"] += plays.take_tokens()
    return kept, log | {"episodes_kept": len(kept)}

  def seconds_so_far():
    return seconds_before + time.monotonic() - started - curve.seconds

  def save():
    record = {"seconds": seconds_so_far(), "method": method.name, "counts": curve.counts}
    before = checkpoints.newest
    checkpoints.save(done, kept(behaviour), record, metric=metric_of(often.best_metric, row, curve, done))
    if before is not None:  # it is on disk by now: a run goes on from there or from here
      plays.drop_before(before * c.max_generations)
      curve.plays.drop_before(before)

  def stop():
    """The run was asked to stop: a checkpoint of `state`. What was played since then is kept by `plays`."""
    if done and checkpoints.newest != done:
      save()
    if first < done == c.iterations:
      keep_examples(run.workdir, trajectories, split=c.split, iteration=done)
    for each in (plays, curve.plays):
      each.wait()
    say(f"train: stopped after {done} of {c.iterations} iterations")

  def on_mesh(function):
    def call():
      with jax.set_mesh(run.mesh):
        return function()

    return call

  def advantages_of(trajectories):
    return credit.turn_advantages(
      trajectories,
      reward_scale=c.reward_scale,
      invalid_penalty=c.invalid_penalty,
      normalize=c.normalize,
      per_step=c.per_step,
      advantage=method.advantage,
      step_advantage=method.step_advantage,
      step_weight=c.step_weight,
      gamma=c.gamma,
      num_groups=c.tasks_per_iteration,
      num_turns=c.tasks_per_iteration * c.group_size * run.config.rollout.max_steps,
    )

  def transform_coef(iteration):
    return relatives.linear_decay(iteration, start=loss.transform_coef, iterations=loss.transform_decay)

  engine.set_params(params)
  policy_of(params)  # compiles it
  learning = []
  if method.trains:
    count = c.minibatches if method.replay is None else max(c.minibatches, 2)  # replayed ones are scored as later ones
    learning = learn.programs(step_fn, state, reference, scoring, shapes, run.mesh, minibatches=count, teacher=teacher)
  if c.theory_every:
    learning += instruments.programs(params, scoring, shapes, run.mesh, contexts=c.theory_contexts)
  others = [("advantages", lambda: advantages_of([]))] + [("copy", lambda: copied(params))] * c.async_level
  others += regrade.programs() + replay.programs()
  if method.transform is not None:
    others.append(("transform", lambda: transform_coef(0)))
  if method.group_filter is not None:
    nothing = np.zeros(c.tasks_per_iteration * c.group_size)
    as_played = nothing.astype(np.float32), nothing.astype(np.int32)
    others.append(("groups", lambda: method.group_filter(*as_played, num_groups=c.tasks_per_iteration)))
  warm_up([*engine.programs(), *learning, *others], run)
  del learning  # it holds the state
  say(f"train: {compiles.take()} programs are compiled")

  with (
    checkpoints,
    run.pool(c.tasks_per_iteration * c.group_size) as pool,
    Writer(run.workdir, resume=first, config=run.config.to_dict()) as writer,
    progress(total=c.iterations, initial=first, desc=f"train {method.name}", unit="it", plain=run.plain) as bar,
    Profiler(run.workdir / (run.config.profile.folder or "profile"), run.config.profile.iterations) as profiler,
    preemption.on_preempted(stop),
  ):
    with run.notice.apart():
      curve.point(first, engine, pool, state.params)
      if c.async_level and first < c.iterations:
        ahead = sample(first, behaviour)
    checkpoints.weigh(first, metric_of(often.best_metric, row, curve, first))  # whose panel had been cut short
    for iteration in range(first, c.iterations if method.trains else 0):
      tick = time.monotonic()
      profiler.begin(iteration)

      with run.notice.apart():  # of other processes, which may be faster or slower
        # ---- 1. episodes by the current policy, which reads each one as soon as it has ended and writes its skill
        if c.async_level == 0:
          ahead = sample(iteration, state.params)
        trajectories, log = ahead

        # ---- 2. what the answers say, or another analyzer's
        with timer("analysis"):
          written = branch.write(trajectories, engine, iteration)
        log |= {name: value + log.get(name, 0) for name, value in written.items()}  # tokens of skills are counted too

      # ---- 3. advantages, samples in both contexts, packed mini-batches
      with timer("batch"), jax.set_mesh(run.mesh):
        advantages = advantages_of(trajectories)
        prompts, texts_log = branch.prompts(trajectories, iteration)
        samples = batching.episode_samples(trajectories, advantages, prompts)
        samples, log["samples_dropped"] = batching.that_fit(samples, shapes)
        log["tokens_trained"] = sum(len(sample.targets) for sample in samples)
        parts = learn.mini_batches(samples, c.minibatches, process_seed(run.config.seed, f"mini-batches {iteration}"))
        options = scoring.batch_options
        if method.transform is not None:
          options |= dict(transform_coef=transform_coef(iteration))
        minibatches = [batching.to_batches(part, shapes, run.mesh, **options) for part in parts]
        log |= texts_log
        log["row_fill"] = batching.row_fill(samples, [b for part in minibatches for b in part])

      # ---- now and then, the paper's propositions on this policy
      if c.theory_every and iteration % c.theory_every == 0 and samples:
        with timer("theory"), jax.set_mesh(run.mesh):
          scores = credit.turn_scores(trajectories, reward_scale=c.reward_scale, invalid_penalty=c.invalid_penalty)
          tied = instruments.tied_grids(trajectories, scores, parts, shapes, run.mesh)
          where = dict(contexts=c.theory_contexts, seed=process_seed(run.config.seed, f"theory {iteration}"))
          log |= instruments.measure(state.params, params, minibatches, scoring, tied=tied, **where)

      # ---- 4. what the updates cannot compute themselves: the skill context, the reference, the later mini-batches
      run.notice.meet("the scoring")
      with timer("score"), jax.set_mesh(run.mesh):
        minibatches = jax.block_until_ready(learn.score_all(minibatches, state.params, reference, scoring, teacher))
      run.notice.meet("the update")  # which gives `state` away
      plays.wait()  # and may be killed: then these episodes are there
      if branch.keeps:
        log |= branch.keep(trajectories, learn.skill_pairs(minibatches, parts, shapes), iteration + 1)
      with timer("score"), jax.set_mesh(run.mesh):
        minibatches, weights_log = regrade(minibatches, parts, trajectories, iteration)
        replayed, replay_log = replay(trajectories, samples, iteration, state.params, reference)
      log |= weights_log | replay_log

      # ---- 5. the update; one step ahead, the next episodes are played first, and its programs fill their pauses
      work = Pieces(learn.updates(step_fn, state, minibatches, scoring, replayed))
      if c.async_level and iteration + 1 < c.iterations:
        with jax.set_mesh(run.mesh):
          behaviour = copied(state.params)  # the update gives the buffers of its state away
        with contextlib.suppress(preemption.Preempted):  # the update comes first
          ahead = sample(iteration + 1, behaviour, on_idle=on_mesh(work.advance))
      with timer("update"), jax.set_mesh(run.mesh):
        state, metrics = work.finish()
      log |= metrics

      # ---- 6. what happened
      log |= timer.take() | {"compilations": compiles.take(), "seconds": time.monotonic() - tick}
      done, row = iteration + 1, log
      writer.write(done, row)  # counted from 1: the number of iterations done
      bar.update(1, success=log["success"], gate=log.get("gate_mean", 0.5))
      curve.count(log)
      with run.notice.apart():
        curve.point(done, engine, pool, state.params)
      if done % often.every == 0 and done < c.iterations:
        save()
      if log["skipped"] and not np.isfinite(log["grad_norm"]):
        say(f"train: iteration {iteration} had gradients that are not finite; its update was skipped")

    if not method.trains:
      with run.notice.apart():
        curve.point(c.iterations, engine, pool, state.params)

  run.save_policy("final", model, state.params)
  if first < c.iterations:  # else they were kept when the run was stopped
    keep_examples(run.workdir, trajectories, split=c.split, iteration=c.iterations)
  best = {"best": checkpoints.best()} if often.keep_best else {}  # (metric, iteration), best first
  summary = run.finish("train", _summary(run, method, start_from, seconds_so_far()) | best)
  for each in (plays, curve.plays):
    each.done()
  return summary


def iteration_tasks(tasks, iteration: int, count: int, seed: int, *, number: int = 0, rounds: int = 1):
  """The `count` tasks of an iteration: a fresh permutation an epoch, families mixed, nothing twice within an epoch.

  Where an iteration takes up to `rounds` rounds, the first one, `number` 0, plays what a method of one round plays; the
  others play the tasks of other iterations of the epoch, spread over it.
  """
  per_epoch = len(tasks) // count
  epoch, place = divmod(iteration, per_epoch)
  place = (place + number * max(per_epoch // rounds, 1)) % per_epoch
  order = np.random.default_rng(process_seed(seed, f"task order {epoch}")).permutation(len(tasks))
  return [tasks[i] for i in order[place * count : (place + 1) * count]]


@jax.jit
def copied(params):
  """The same parameters in buffers of their own."""
  return jax.tree.map(jnp.copy, params)


def warm_up(programs, run: Run) -> None:
  """Compiles every program of an iteration before the first one, so that none of them is a surprise later."""
  with jax.set_mesh(run.mesh), progress(total=len(programs), desc="compile", unit="program", plain=run.plain) as bar:
    for name, compile_it in programs:
      run.notice.meet(f"the program {name!r}")
      compile_it()
      bar.update(1)


def _summary(run, method, start_from, seconds) -> dict:
  rows = read_rows(run.workdir / "metrics.jsonl")
  mean = {name: float(np.mean([r[name] for r in rows if r.get(name) is not None] or [0.0])) for name in MEANS}
  return {
    "method": method.name,
    "start_from": start_from,
    "iterations": len(rows),
    "seconds": seconds,
    "parse_rate": mean["parse_rate"],
    "opd_active": mean["opd_active_ratio"],
    "gate_mean": mean["gate_mean"],
    "gate_std": mean["gate_std"],
    "compilations": int(sum(r.get("compilations") or 0 for r in rows)),
  }
