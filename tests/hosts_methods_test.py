"""Methods with a part of their own, instruments and comparisons in two processes: losses, parameters and files are
those of one process. All runs go one after another in one job, so that its start is paid for once.
"""

import json
import math

import numpy as np
import pytest
from hosts_job import job
from safetensors.numpy import load_file
from tiny_run import started
from turn_cases import trajectory, turn

from seed_jax.trajectory import save_trajectories

# Command lines, one after another, in a job that goes on between them. The tiny policy wins nothing and its analyses
# seldom parse: outcomes and skills are put in. What a process other than the first does to the files of a run is noted,
# but for checkpoints, of which each writes its share.
PROGRAM = """
import json, os, sys
from seed_jax import hosts, main, skill_branch
from seed_jax.run import Run

folder, touched = sys.argv[1], set()
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def note(event, arguments):
  changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
  if changes or event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
    path = os.fspath(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else ""
    if path.startswith(folder) and "/checkpoints" not in path:
      touched.add(f"{event} {path}")
sys.addaudithook(note)

play, parse, finish, last = Run.play, Run.parse, hosts.finish, {}
def play_and_win(self, *args, **options):
  trajectories = play(self, *args, **options)
  for t in trajectories if "iteration" in options else ():  # of training and its panel
    t.won = t.member % 2 == 0
    t.episode_return = float(t.won)
  return trajectories

def parse_some(self, trajectories):
  log = parse(self, trajectories)
  for t in trajectories:
    t.skill = f"take {t.group} {t.member}" if t.group < 2 else ""
  return log

class Outside:
  patience = 0.0

  def analyze(self, trajectories, *, between):
    between()
    assert hosts.index() == 0
    hosts.advance()
    return ['{"episode_summary": "s", "episode_skill": "heat it"}' for _ in trajectories]

Run.play, Run.parse, skill_branch.make_analyzer = play_and_win, parse_some, lambda run: Outside()
hosts.finish = lambda: hosts.meet("the end of a run")
for line in json.load(open(sys.argv[2])):
  print("#", line, file=sys.stderr, flush=True)
  code = main.cli(["main", *line])
  if code:
    sys.exit(code)
finish()
print(json.dumps(sorted(touched)))
"""
SMALL = {"train.iterations": 2, "checkpoint.every": 2, "evaluate.tasks": 4, "evaluate.mechanism_tasks": 2}
COMPARED = {"compare.methods": "('seed','grpo')", "compare.seeds": "(0,)", "compare.every": 1, "train.panel.tasks": 4}
COMPARED |= {"collect.tasks": 4, "collect.samples": 2, "sft.epochs": 1}
# The two checkpoints that training begins from differ in the last bits, and Adam would make whole steps of that where a
# gradient is nearly 0.
COMPARED |= {"train.optimizer.eps": 1e-5}
RUNS = {  # name: (method, stages, changes)
  "seed": ("seed", "train,evaluate", {"train.theory_every": 1}),
  "istar": ("istar", "train", {}),  # a reward model is trained along
  "spear": ("spear", "train", {}),  # successes are replayed, groups left out
  "grsd": ("grsd", "train", {}),
  "gigpo": ("gigpo", "train", {}),
  "opid": ("opid", "train", {}),  # skills by an analyzer from outside
  "rlsd": ("rlsd", "train", {}),  # a static library, built on the way
  "frozen": ("seed_frozen_analyzer", "train", {}),
  "dapo": ("dapo", "train", {"train.max_generations": 2}),
  "compare": ("seed", "compare", COMPARED),
}
ARMS = ("compare/compare/seed0/seed", "compare/compare/seed0/grpo")
EXACT = ("success", "episodes", "environment_steps", "tokens_sampled", "tokens_trained", "turns")
OF_A_HOST = ("seconds", "tokens_", "decode_steps", "slot_utilisation", "compilations", "checkpoint")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """A work directory that others start from; beside it a config file and a cache of programs."""
  workdir = started(tmp_path_factory.mktemp("hosts") / "start", "seed")
  (workdir.parent / "config.py").write_text("from tiny_run import tiny as get_config\n")
  annotated = []
  for number, skill in enumerate(("look in the fridge first", "never take two things")):
    episode = trajectory([turn([5], [6])], group=number, reward=float(number == 0))
    episode.skill, episode.summary = skill, "it went as it went"
    annotated.append(episode)
  save_trajectories(str(workdir / "trajectories" / "annotated"), annotated)
  return workdir


def lines(start, name):
  """The command lines of a job with eight devices."""
  for run, (method, stages, changes) in RUNS.items():
    fields = SMALL | {"mesh.data": 2, "mesh.fsdp": 4} | changes | ({"start": start} if stages != "compare" else {})
    place = [f"--config={start.parent}/config.py:{method}", f"--workdir={start.parent / name / run}", "--plain"]
    yield [*place, f"--stages={stages}", *(f"--config.{field}={value}" for field, value in fields.items())]


def ran(start, name, count):
  """What each process of the job told at its end."""
  commands = start.parent / f"{name}.json"
  commands.write_text(json.dumps(list(lines(start, name))))
  options = dict(count=count, devices=8 // count, cache=start.parent / "cache", timeout=3000)
  options["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # nearly all of the time goes into compiling
  ended = job(PROGRAM, [start.parent / name, commands], **options)
  assert [code for code, *_ in ended] == [0] * count, "\n".join(told[-3000:] for _, _, told, _ in ended)
  return [json.loads(told.splitlines()[-1]) for _, told, *_ in ended]


def close(path, a, b):
  """Numbers of two JSON values that should be the same."""
  if isinstance(a, dict):
    for key in sorted(key for key in a.keys() | b.keys() if not key.startswith(OF_A_HOST)):
      close(f"{path} {key}", a[key], b[key])
  elif isinstance(a, list):
    assert len(a) == len(b), path
    for i, pair in enumerate(zip(a, b, strict=True)):
      close(f"{path} {i}", *pair)
  elif isinstance(a, float) and isinstance(b, float):
    assert math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5), f"{path}: {a} and {b}"
  else:
    assert a == b, f"{path}: {a} and {b}"


def rows(workdir, name="metrics"):
  return [json.loads(line) for line in (workdir / f"{name}.jsonl").read_text().splitlines()]


def weights(workdir, policy="final"):
  return load_file(workdir / "policy" / policy / "model.safetensors")


def files(folder):
  """What lies there, but for names that hold a time, and checkpoints, of which each host writes its share."""
  names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
  return {name for name in names if "/checkpoints/" not in name and "/tensorboard/" not in name}


@pytest.mark.long
@pytest.mark.slow
def test_two_hosts_do_with_every_method_and_stage_what_one_process_does(start):
  ran(start, "one", 1)
  _, touched = ran(start, "two", 2)
  assert not touched
  one, two = start.parent / "one", start.parent / "two"
  assert files(one) == files(two)
  for place in (*(name for name in RUNS if name != "compare"), *ARMS):
    a, b = rows(one / place), rows(two / place)
    assert len(a) == 2 and [[row[n] for n in EXACT] for row in a] == [[row[n] for n in EXACT] for row in b], place
    close(place, a, b)
    want, got = weights(one / place), weights(two / place)
    before = weights(one / place if place in ARMS else start, "sft")
    assert max(np.abs(want[key] - before[key]).max() for key in want) > 1e-5  # else there was nothing to compare
    largest = max(float(np.abs(got[key] - value).max()) for key, value in want.items())
    print(f"{place}: parameters differ by at most {largest:.1e}")
    assert largest < 1e-5, place
  assert any(name.startswith("theory_prop1") for name in rows(two / "seed")[0])
  for arm in ARMS:
    curves = [[(row["success"], row["outcomes"]) for row in rows(place / arm, "curve")] for place in (one, two)]
    assert len(curves[0]) == 3 and curves[0] == curves[1]
  stages = [f"compare/compare/seed0/start/{stage}" for stage in ("base", "collect", "annotate", "sft")]
  for name in ("seed/evaluate", *stages):
    close(name, *(json.loads((place / f"{name}.json").read_text()) for place in (one, two)))
