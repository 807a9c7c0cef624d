"""The benchmarks run, and their table says what was measured; no test here looks at how fast anything was."""

import json
import math
import os
import sys

import numpy as np
import pytest

from benchmarks import command, echo, machine, process, table, timing, workload
from benchmarks.peers import seed_grpo, shared
from benchmarks.table import Row
from seed_jax import engine

ROWS = [
  Row("generation, small", 2500.0, 800.0, 3.125, 0.41, "tokens/s", ">= 3x", "32 new tokens"),
  Row("cold start", 6.5, None, None, None, "s"),
  Row("a name that is much longer than what eighty columns leave for a name", 0.0123, 0.4, 32.5, None, "s"),
]


# ---- the table


def test_the_table_fits_eighty_columns_and_numbers_its_notes():
  lines = table.text(ROWS).splitlines()
  assert max(map(len, lines)) <= 80
  assert lines[0].split() == list(table.COLUMNS)
  assert "generation, small [1]" in lines[2] and "3.12x" in lines[2] and "41 %" in lines[2]
  assert lines[-1] == "[1] 32 new tokens"
  assert any("32.5x" in line for line in lines)


@pytest.mark.parametrize(
  "value, shown",
  [(None, ""), (math.nan, ""), (0.07134, "0.0713"), (4.2149, "4.21"), (63.0, "63"), (1240.4, "1,240"),
   (15700.0, "15.7k"), (2.41e6, "2.41M")],
)  # fmt: skip
def test_numbers_have_three_digits(value, shown):
  assert table.number(value) == shown


def test_json_keeps_every_field_and_comes_back():
  content = table.to_json([*ROWS, Row("broken", math.inf)], {"date": "2026-01-01"})
  record = json.loads(content)
  assert record["rows"][0] == {
    "name": "generation, small", "ours": 2500.0, "peer": 800.0, "ratio": 3.125, "limit": 0.41,
    "unit": "tokens/s", "goal": ">= 3x", "note": "32 new tokens",
  }  # fmt: skip
  assert record["rows"][-1]["ours"] is None
  rows, about = table.from_json(content)
  assert rows[:-1] == ROWS and about == {"date": "2026-01-01"}
  with pytest.raises(ValueError, match="not a benchmark result"):
    table.from_json("[1]")


def test_markdown_has_a_line_for_each_row():
  lines = table.markdown([*ROWS, Row("a|b")]).splitlines()
  assert len(lines) == 2 + len(ROWS) + 1
  assert "a\\|b" in lines[-1]
  assert all(line.count("|") - line.count("\\|") == 9 for line in lines)


# ---- timing


def test_functions_run_in_turn_and_the_first_round_is_not_kept():
  calls = []
  taken = timing.in_turn(
    {name: lambda name=name: calls.append(name) or len(calls) for name in "AB"}, 2, measure=lambda f: f()
  )
  assert calls == ["A", "B"] * 3
  assert taken == {"A": [3, 5], "B": [4, 6]}


def test_medians_and_paired_ratios():
  assert timing.median([3.0, 1.0, 2.0]) == 2.0 and timing.median([]) is None
  # pairs 4/2 and 9/3 and 10/1: a machine that slowed down tenfold in the second pair would change nothing
  assert timing.paired_ratio([4.0, 9.0, 10.0], [2.0, 3.0, 1.0]) == 3.0
  assert timing.paired_ratio([], [1.0]) is None


def test_a_share_is_that_of_whatever_binds():
  probe = lambda work: machine.Probe(lambda: None, work)  # noqa: E731
  m = machine.Machine(probe(100.0), probe(10.0), 0.0, 0.0, {})
  probes = {"compute": [1.0, 1.0, 2.0], "memory": [1.0, 1.0, 2.0]}
  # 50 operations take 0.5 s and 8 bytes 0.8 s: memory binds; the third pair ran on a machine half as fast
  share = m.share(work_seconds=[1.0, 1.6, 2.0], flops=50.0, num_bytes=8.0, probes=probes)
  assert share == pytest.approx(0.8)
  assert m.share(work_seconds=[1.0], flops=90.0, num_bytes=8.0, probes=probes) == pytest.approx(0.9)


def test_a_probe_is_repeated_until_it_lasts():
  calls = []
  probe = machine.lasting(machine.Probe(lambda: calls.append(1), 50.0), rate=1000.0, seconds=0.4)
  probe.run()
  assert len(calls) == 8 and probe.work == 400.0


# ---- the command


def test_an_unknown_name_is_one_line_and_code_two(capsys):
  for flag in ("--only=rooflime", "--peers=verl", "--repeats=0", "--only="):
    assert command.main([flag]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1, said
  assert command.main(["--no-such-flag"]) == 2


def test_the_list_names_every_benchmark_and_what_it_measures(capsys):
  assert command.main(["--list"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines] == list(command.BENCHMARKS)
  assert all(len(line.split()) > 4 for line in lines)


def test_a_benchmark_that_fails_is_a_row_and_the_others_go_on(monkeypatch, capsys, tmp_path):
  class Good:
    ABOUT = "good"

    @staticmethod
    def run(options):
      yield Row("good", 1.0, unit="s")

  class Bad:
    ABOUT = "bad"

    @staticmethod
    def run(options):
      yield Row("half", 1.0)
      raise RuntimeError("out of\nmemory")

  monkeypatch.setattr(command, "BENCHMARKS", {"bad": "bad", "good": "good"})
  monkeypatch.setattr(command, "load", lambda name: {"bad": Bad, "good": Good}[name])
  path = tmp_path / "rows.json"
  assert command.main([f"--json={path}"]) == 1
  assert "failed: RuntimeError: out of memory" in capsys.readouterr().out
  rows, about = table.from_json(path.read_text())
  assert [row.name for row in rows] == ["half", "bad", "good"]
  assert about["cores"] and about["jax"]
  assert command.main([f"--markdown={path}"]) == 0
  assert "| good | 1 |" in capsys.readouterr().out


def test_the_roofline_is_measured_and_only_once():
  options = command.Options(quick=True)
  rows = list(command.load("roofline").run(options))
  assert [row.unit for row in rows] == ["GFLOP/s", "GB/s"]
  assert all(row.ours > 0 for row in rows)
  assert options.machine is options.machine


# ---- peers


def fake_peer(folder, monkeypatch, script):
  monkeypatch.setattr(process, "VENVS", folder)
  (folder / "tunix" / "bin").mkdir(parents=True)
  python = folder / "tunix" / "bin" / "python"
  python.write_text(f"#!/bin/sh\n{script}\n")
  os.chmod(python, 0o755)
  (folder / "tunix" / "installed.txt").write_text("\n".join(process.PEERS["tunix"]) + "\n")


def test_a_driver_reports_one_line_of_json(tmp_path, monkeypatch):
  fake_peer(tmp_path, monkeypatch, 'echo noise; echo "{\\"step\\": [1.5], \\"args\\": \\"$3 $4\\"}"')
  result = process.drive("tunix", "tunix_grpo", "--size=tiny")
  assert result["step"] == [1.5] and result["args"] == "--size=tiny " and result["wall"] > 0


@pytest.mark.parametrize(
  "script, message",
  [
    ("echo Traceback >&2; echo 'ValueError: no such size' >&2; exit 3", "tunix: exit code 3: ValueError: no such size"),
    ("echo nothing", "tunix: printed no result: nothing"),
    ("sleep 5", "tunix: no end after 0 s"),
  ],
)
def test_a_peer_that_crashes_says_why_in_one_line(tmp_path, monkeypatch, script, message):
  fake_peer(tmp_path, monkeypatch, script)
  with pytest.raises(process.PeerError) as caught:
    process.drive("tunix", "tunix_grpo", timeout=0.3)
  assert str(caught.value) == message


def test_a_peer_that_cannot_be_installed_says_so(tmp_path, monkeypatch):
  monkeypatch.setattr(process, "VENVS", tmp_path)
  # a virtual environment whose pip finds nothing
  monkeypatch.setattr(process.venv, "create", lambda folder, **unused: (folder / "bin").mkdir(parents=True))
  with pytest.raises(process.PeerError, match="^tunix: no virtual environment in tunix: "):
    process.python_of("tunix")
  assert process.python_of("ours") == sys.executable


# ---- what the drivers share


def test_the_echo_answers_and_ends():
  game = shared.Echo(3)
  assert "Your task is to:" in game.reset() and game.reset().endswith("Game 3.")
  answers = [game.step("Hello there") for _ in range(shared.TURNS)]
  assert answers[0][:1] == ("1: Hello ",) and answers[0][1] == pytest.approx(9 / 11)
  assert [over for _, _, over in answers] == [False] * (shared.TURNS - 1) + [True]


def test_texts_keep_their_length_through_the_byte_tokens():
  ids = [*range(256), 300, 511]
  assert shared.encode(shared.decode(ids)) == ids
  assert shared.decode([shared.PAD, shared.BOS, shared.EOS]) == ""


def test_the_peak_memory_of_a_child_is_its_own():
  held = np.ones(400 * 2**17)  # 400 MiB here
  code = "from benchmarks.peers import shared; shared.report()"
  assert process.child([sys.executable, "-c", code], name="child")["peak_mib"] < 200 < shared.peak_mib()
  assert held.nbytes == 400 * 2**20


def test_a_stopwatch_times_the_phases_of_a_loop():
  class Loop:
    def sample(self):
      return 7

    def update(self):
      return None

  loop, seen = Loop(), []
  watch = shared.Stopwatch()
  watch.wrap(loop, "sample", "generation", after=seen.append)
  watch.wrap(loop, "update", "update", last=True)
  for _ in range(3):
    assert loop.sample() == 7
    loop.update()
  assert seen == [7, 7, 7]
  assert {name: len(taken) for name, taken in watch.seconds.items()} == {"generation": 3, "update": 3}
  assert len(watch.steps()) == 2 and all(s > 0 for s in watch.steps())


# ---- the pieces, at a tiny size


def report(generation, update, first, **more):
  base = dict(tokens=[100, 100], generation=[generation] * 2, scoring=[0.1, 0.1], update=[update] * 2)
  return base | dict(step=[generation + update + 0.1] * 2, first_update=first, peak_mib=100.0) | more


def test_systems_take_turns_and_a_peer_that_breaks_is_left_out(monkeypatch):
  order = []
  answers = {
    "ours": iter([report(1.0, 0.5, 5.0), report(2.0, 1.0, 6.0), report(1.0, 0.5, 4.0)]),
    "tunix": iter([report(4.0, 1.0, 20.0), report(8.0, 2.0, 24.0), report(3.0, 1.5, 20.0)]),
  }

  def drive(name, module, *arguments):
    order.append(name)
    assert module == f"{'seed' if name == 'ours' else name}_grpo" and "--size=micro" in arguments
    if name == "trl":
      raise process.PeerError("trl: exit code 1: no such trainer")
    return next(answers[name])

  monkeypatch.setattr(process, "drive", drive)
  monkeypatch.setattr(command.load("grpo"), "GOALS", {("tunix", "micro", "update"): ">= 2x"})
  options = command.Options(repeats=3, peers=("tunix", "trl"))
  grpo = command.load("grpo")
  rows = list(
    grpo.compare(
      {"ours": "seed_grpo", "tunix": "tunix_grpo", "trl": "trl_grpo"}, "micro", repeats=options.repeats,
      steps={"ours": 1, "tunix": 1, "trl": 1}, quantities=grpo.QUANTITIES, title="grpo micro", goals=grpo.GOALS,
      notes=grpo.NOTES,
    )
  )  # fmt: skip
  assert order == ["ours", "tunix", "trl", "ours", "tunix", "ours", "tunix"]
  found = {row.name: row for row in rows}
  generation = found["grpo micro: generation vs tunix"]
  # 100 tokens in 1, 2, 1 s against 4, 8, 3 s: medians 100 and 25 a second, ratios 4, 4, 3
  assert (generation.ours, generation.peer, generation.ratio) == (100.0, 25.0, 4.0)
  update = found["grpo micro: update vs tunix"]
  assert (update.ours, update.peer, update.ratio, update.goal) == (0.5, 1.5, 2.0, ">= 2x")
  assert found["grpo micro: start to first update vs tunix"].ratio == 4.0
  assert found["grpo micro vs trl"].note == "trl: exit code 1: no such trainer"


def test_ours_alone_gives_rows_without_a_peer(monkeypatch):
  monkeypatch.setattr(process, "drive", lambda *unused: report(1.0, 0.5, 5.0))
  rows = list(command.load("grpo").run(command.Options(quick=True)))
  assert [row.peer for row in rows] == [None] * len(rows) and len(rows) == 6
  monkeypatch.setattr(process, "drive", lambda *unused: (_ for _ in ()).throw(process.PeerError("ours: broke")))
  with pytest.raises(process.PeerError):
    list(command.load("grpo").run(command.Options(quick=True)))


@pytest.mark.parametrize("name, count", [("decode", 1), ("train_step", 4), ("packing", 1), ("utilisation", 4)])
def test_a_benchmark_runs(name, count):
  rows = list(command.load(name).run(command.Options(quick=True, repeats=1)))
  assert len(rows) == count
  assert all(np.isfinite(row.ours) and row.unit for row in rows)


def test_operations_are_counted_as_the_formula_says():
  config = workload.model("micro")  # D 32, N 2, K 1, H 16, F 64, L 1, V 512
  assert workload.matmul_flops(config) == 2 * (32 * 16 * (2 + 1 + 1 + 2) + 3 * 32 * 64)
  assert workload.head_flops(config) == 2 * 32 * 512
  assert workload.attention_flops(config, 10) == 4 * 2 * 16 * 10
  (sample,) = workload.random_samples(config, [8], [3])
  assert len(sample.tokens) == 8 and list(sample.index) == [5, 6, 7] and len(sample.targets) == 3
  # 8 tokens see 1 to 8 keys, 4.5 on average
  expected = 8 * workload.matmul_flops(config) + 4 * 2 * 16 * 36 + 3 * workload.head_flops(config)
  assert workload.forward_flops(config, [sample]) == expected
  weights = 32 * 16 * 6 + 3 * 32 * 64 + 32 * 512
  assert workload.decode_bytes(config, 2, 10) == 4 * (weights + 2 * 10 * 2 * 16)


def test_a_skill_context_predicts_the_same_tokens_from_the_same_place():
  (sample,) = workload.random_samples(workload.model("micro"), [9], [4], skill=5)
  assert len(sample.skill_tokens) == 14 and list(sample.skill_index - sample.index) == [5] * 4
  assert list(sample.skill_tokens[sample.skill_index]) == list(sample.tokens[sample.index])


def test_lengths_are_those_of_alfworld_steps():
  lengths, responses = command.load("packing").step_lengths(4000, longest=2560, mean=600)
  assert lengths.max() <= 2560 and 570 < lengths.mean() < 630
  assert 90 < responses.mean() < 110 and (responses <= lengths / 2).all() and responses.min() >= 4
  again = command.load("packing").step_lengths(4000, longest=2560, mean=600)
  assert (again[0] == lengths).all()


def test_the_echo_game_is_the_same_for_every_system():
  game = echo.Game()
  (episode,) = echo.episodes([2])
  observation, info = game.reset(options={"task": episode.task.payload})
  assert observation == shared.Echo(0).reset() == info["task"]
  assert game.step("hello")[0] == "1: hello" and game.step("x")[2]
  benchmark = echo.Echoes()
  assert benchmark.first_prompt("", observation, ()) == shared.user_turn(observation)
  window = benchmark.window_prompt(observation, [(observation, "hello")], 1, "1: hello", ())
  assert window.count(shared.INSTRUCTIONS) == 1 and window.endswith("hello\nU:1: hello\nA:") and "Step 1." in window


def test_our_driver_rewards_groups_and_keeps_what_was_sampled():
  asked = seed_grpo.requests(2)
  assert len(asked) == shared.PROMPTS * shared.MEMBERS and len({r.coordinates for r in asked}) == len(asked)
  texts = ["ab", "A"] * (len(asked) // 2)
  completions = [
    engine.Completion(np.asarray(shared.encode(t), np.int32), np.zeros(len(t), np.float32), False) for t in texts
  ]
  samples = seed_grpo.samples(asked, completions)
  assert [len(s.targets) for s in samples] == [2, 1] * 8
  assert samples[0].advantages[0] > 0 > samples[1].advantages[0]
  assert list(samples[0].tokens) == list(asked[0].tokens) + shared.encode("a")
  assert list(samples[0].index) == [len(asked[0].tokens) - 1, len(asked[0].tokens)]
