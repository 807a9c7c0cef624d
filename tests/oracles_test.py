"""The comparison with other libraries: a wrong number fails, an unanswered case does not count, drivers share cases."""

import json

import numpy as np
import pytest

from benchmarks import oracle_cases, oracles, process
from benchmarks.peers import oracle

NAMES = (
  "loss token_mean",
  "loss token_mean + KL",
  "loss token_mean without dual clip",
  "loss sequence_mean_token_sum_norm",
  "loss GSPO-token",
  "KL k3",
  "entropy",
  "advantages mean_std",
  "advantages RLOO",
  "advantages REINFORCE++-baseline",
)


def own_answers(cases):
  return {f"{name}#{i}": oracles.ours(name, i) for name in NAMES for i in range(cases)}


def test_cases_are_those_of_their_numbers_and_hold_what_they_should():
  cases = list(oracle_cases.cases(30))
  assert len(cases) == 30 and oracle_cases.COUNT == 200
  np.testing.assert_array_equal(cases[7]["logprobs"], oracle_cases.case(7)["logprobs"])
  assert any(not c["mask"].any() for c in cases)
  assert any(c["mask"].any() and not c["mask"].any(1).all() for c in cases)
  assert any(c["members"] == 1 for c in cases)
  assert any(c["members"] > 1 and np.ptp(c["rewards"][: c["members"]]) == 0 for c in cases)
  assert any(np.any(np.diff(c["mask"]) > 0) for c in cases)  # a hole
  big = oracle_cases.padded(cases[1])
  assert big["mask"].shape == (12, 12) and big["groups"][-1] == -1 and big["mask"].sum() == cases[1]["mask"].sum()


def test_equal_answers_pass_and_a_wrong_one_shows():
  theirs = own_answers(6)
  assert all(row == (0.0, 6) for row in oracles.compare(theirs, 6).values())
  theirs["KL k3#4"] = theirs["KL k3#4"] + 3e-6
  theirs["entropy#2"] = np.full_like(theirs["entropy#2"], np.nan)  # no answer
  rows = oracles.compare(theirs, 6)
  assert rows["KL k3"][0] == pytest.approx(3e-6, rel=1e-2) and rows["entropy"] == (0.0, 5)
  theirs["advantages RLOO#0"] = np.zeros(2)
  with pytest.raises(ValueError, match="advantages RLOO, case 0: ours has shape"):
    oracles.compare(theirs, 6)


def test_the_command_fails_on_a_difference_and_on_a_library_that_does_not_answer(monkeypatch, capsys):
  answers = {"trl": {"KL k1#0": oracles.ours("KL k1", 0)}, "verl": {"KL k1#0": oracles.ours("KL k1", 0) + 1.0}}

  def answers_of(peer, cases):
    if peer not in answers:
      raise process.PeerError(f"{peer}: pip could not install it")
    return answers[peer]

  monkeypatch.setattr(oracles, "answers_of", answers_of)
  assert oracles.main(["--peers=trl", "--cases=1"]) == 0
  assert oracles.main(["--peers=trl,verl", "--cases=1"]) == 1
  out = capsys.readouterr().out
  assert "pass" in out and "FAIL" in out
  assert oracles.main(["--peers=tunix", "--cases=1"]) == 1
  assert oracles.main(["--peers=nobody"]) == 2 and oracles.main(["--cases=0"]) == 2 and oracles.main(["--what"]) == 2


def test_a_driver_writes_every_case(tmp_path, monkeypatch, capsys):
  path = tmp_path / "answers.npz"
  monkeypatch.setattr("sys.argv", ["driver", f"--out={path}", "--cases=3"])
  oracle.main(lambda case, logits: {"rows": [len(logits), oracle.sequences(case)]})
  assert json.loads(capsys.readouterr().out) == {"answers": 3}
  with np.load(path) as file:
    assert sorted(file) == ["rows#0", "rows#1", "rows#2"] and file["rows#0"][0] == 8
