"""The report: all that a run left, nothing that it did not, and every text only as text."""

import html.parser
import json

import pytest

from seed_jax import intervals, metrics, report

EVIL = "<img src=x onerror=alert(1)>\"'&</pre></details><script>alert(2)</script>\u202e\x00\ud800"


class Page(html.parser.HTMLParser):
  """Checks that tags close in order and collects tags, attributes and text."""

  VOID = {"meta", "path", "use", "br"}

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text, self.stack = [], [], [], []
    self.feed(text)
    self.close()
    assert self.stack == []
    self.text = " ".join(" ".join(self.text).split())

  def handle_starttag(self, tag, attributes):
    self.tags.append(tag)
    self.attributes += attributes
    if tag not in self.VOID:
      self.stack.append(tag)

  def handle_startendtag(self, tag, attributes):
    self.tags.append(tag)
    self.attributes += attributes

  def handle_endtag(self, tag):
    if tag not in self.VOID:
      assert self.stack and self.stack.pop() == tag, f"</{tag}> closes nothing"

  def handle_data(self, data):
    if self.stack and self.stack[-1] != "style":
      self.text.append(data)


def evaluation(rates, count=20):
  outcomes = [(f"{family}/{i}", family, i < rate * count) for family, rate in rates.items() for i in range(count)]
  return intervals.summarize(outcomes)


@pytest.fixture
def workdir(tmp_path):
  """A finished run, small."""
  final = evaluation({"heat": 0.8, "cool": 0.6}) | {"start": evaluation({"heat": 0.2, "cool": 0.3})}
  final["mechanism"] = {"tasks": 9, "none": 0.25, "own": 0.75, "foreign": 0.3, "own_gain": [0.5, 0.4, 0.6]}
  train = {
    "iterations": 3,
    "seconds": 412.0,
    "parse_rate": 0.985,
    "opd_active": 0.9,
    "gate_mean": 0.5,
    "gate_std": 0.08,
  }
  metrics.write_json(tmp_path / "evaluate.json", final)
  metrics.write_json(tmp_path / "train.json", train | {"compilations": 14})
  metrics.write_json(tmp_path / "sft.json", {"seconds": 95.0})
  metrics.write_json(tmp_path / "config.json", {"method": "seed", "analyzer": {"api_key": "sk-secret"}})
  with metrics.Writer(tmp_path, tensorboard=False) as writer:
    for i in range(1, 4):
      writer.write(
        i, {"success": i / 10, "return": float(i), "mystery": 1.5, "seconds/rollout": 2.0, "seconds/update": 1.0}
      )
  turns = [
    {"observation": "You see a fridge 1.", "action": "open fridge 1", "valid": True, "response": "open fridge 1"}
  ]
  turns.append({"observation": "Nothing.", "action": "fly", "valid": False, "response": "I think I fly"})
  example = {"task": "heat a potato", "family": "heat", "won": True, "split": "train", "iteration": 2, "parsed": True}
  example |= {"skill": "Look in the fridge first.", "summary": "It was in the fridge.", "turns": turns}
  metrics.write_json(tmp_path / "examples.json", [example, example | {"won": False, "parsed": False, "skill": ""}])
  return tmp_path


def page(path, **options):
  out = report.build(path, **options)
  assert out.name == "report.html"
  return Page(out.read_text())


def test_the_whole_page(workdir):
  shown = page(workdir, command="bash launch/local_run.sh", title="My run")
  for text in (
    "My run",
    "25.0 % → 70.0 %",  # (0.2 + 0.3) / 2 and (0.8 + 0.6) / 2 of equal families
    "success on 40 tasks, skills removed",
    "gain +45.0 points",
    "heat 20 episodes 20.0 % 8–42 %",
    "What a skill in context is worth",
    "+50.0 +40 to +60",
    "Success of training episodes",
    "mystery 1.5 → 1.5",
    "Seconds an iteration",
    "Look in the fridge first.",
    "2. fly not valid I think I fly",
    "did not parse",
    "98.5 %",
    "0.500 ± 0.080",
    "train 7 min",
    "bash launch/local_run.sh",
    "(hidden)",
  ):
    assert text in shown.text, text
  assert "Not done yet: base, collect, annotate." in shown.text
  assert "open fridge 1 open fridge 1" not in shown.text  # A response that is the action is not repeated.
  assert "sk-secret" not in shown.text and '"outcomes"' not in shown.text


def test_it_needs_nothing_from_elsewhere(workdir):
  shown = page(workdir)
  assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(shown.tags)
  for name, value in shown.attributes:
    assert not name.startswith("on")
    assert name not in ("src", "srcset", "action", "data")
    assert name not in ("href", "xlink:href") or value.startswith("#")
  text = (workdir / "report.html").read_text()
  assert "url(http" not in text and "@import" not in text
  assert ("content", "width=device-width, initial-scale=1") in shown.attributes
  assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in shown.attributes


def test_texts_of_others_stay_texts(workdir):
  """Every text of every file that a model, an environment or a person may have written."""
  turn = {"observation": EVIL, "action": EVIL, "valid": False, "response": EVIL + "x"}
  example = {"task": EVIL, "family": EVIL, "split": EVIL, "summary": EVIL, "skill": EVIL, "turns": [turn], "won": EVIL}
  (workdir / "examples.json").write_text(json.dumps([example]))
  final = evaluation({EVIL: 0.5, "heat": 1.0}) | {"checkpoint": EVIL, "mechanism": {"tasks": EVIL, "none": 0.5}}
  (workdir / "evaluate.json").write_text(json.dumps(final | {"start": evaluation({EVIL: 0.1, "heat": 0.0})}))
  (workdir / "config.json").write_text(json.dumps({EVIL: EVIL}))
  (workdir / "train.json").write_text(json.dumps({"iterations": EVIL, "seconds": EVIL, "compilations": EVIL}))
  (workdir / "metrics.jsonl").write_text(json.dumps({"iteration": 1, EVIL: 1.0, "seconds/" + EVIL: 1.0}) + "\n")
  shown = page(workdir, command=EVIL, title=EVIL)
  assert not {"script", "img"} & set(shown.tags)
  assert all(not name.startswith("on") for name, _ in shown.attributes)
  raw = (workdir / "report.html").read_text()
  assert "\u202e" not in raw and "\x00" not in raw
  assert shown.text.count("alert(1)") > 10


def test_long_texts_and_many_turns_are_cut(workdir):
  turn = {"observation": "o" * 10_000, "action": "a", "valid": True, "response": "a"}
  short = {"task": "t" * 9_999, "turns": [turn]}
  metrics.write_json(workdir / "examples.json", [short | {"turns": [turn] * 100}] + [short] * 40)
  shown = page(workdir)
  assert "60. a" in shown.text and "61. a" not in shown.text
  assert "8000 more characters" in shown.text and "… 40 more turns" in shown.text and shown.tags.count("ol") == 24
  assert (workdir / "report.html").stat().st_size < 2e6


def test_an_empty_work_directory_gives_a_page_that_says_so(tmp_path):
  shown = page(tmp_path)
  assert "Not done yet: base, collect, annotate, sft, train, evaluate." in shown.text
  assert "No evaluation yet." in shown.text and "No training iteration yet." in shown.text


def test_files_that_cannot_be_read_are_named(workdir):
  (workdir / "evaluate.json").write_text('{"success": 0.')
  (workdir / "examples.json").write_text('{"not": "a list"}')
  (workdir / "config.json").write_bytes(b"\xff")
  with open(workdir / "metrics.jsonl", "a") as file:
    file.write('{"iteration": 4, "succ')
  shown = page(workdir)
  assert "evaluate.json cannot be read" in shown.text and "config.json cannot be read" in shown.text
  assert "examples.json does not hold a list" in shown.text
  assert "3 iterations." in shown.text and "No evaluation yet." in shown.text


@pytest.mark.parametrize(
  "value",
  [None, "x", -1, 2, [], {}, {"a": "b"}, True, float("nan"), [1, 2, 3], {"heat": None}, {"heat": 7}, {"heat": 0.5}],
)
def test_values_of_a_wrong_kind_do_no_harm(workdir, value):
  good = json.loads((workdir / "evaluate.json").read_text())
  fields = "success interval episodes macro macro_interval families family_episodes family_intervals outcomes start"
  for field in fields.split():
    report.text_table(good | {field: value})
    report.text_table(good | {"start": good["start"] | {field: value}})
  mechanism = {
    "tasks": value,
    "none": value,
    "own": 0.5,
    "own_gain": value,
    "foreign": 0.5,
    "foreign_gain": [value] * 3,
  }
  train = {"seconds": value, "gate_mean": value, "gate_std": 0.1, "iterations": value, "parse_rate": value}
  (workdir / "evaluate.json").write_text(json.dumps({"mechanism": mechanism, "families": value, "start": value}))
  (workdir / "train.json").write_text(json.dumps(train))
  (workdir / "examples.json").write_text(json.dumps([value, {"turns": value}, {"turns": [value], "iteration": value}]))
  (workdir / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "success": value, "seconds/x": value}))
  page(workdir)
  (workdir / "evaluate.json").write_text(json.dumps({"mechanism": value}))
  (workdir / "metrics.jsonl").write_text("")
  page(workdir)


def test_the_table_for_the_terminal():
  start, final = evaluation({"heat": 0.2, "cool": 0.3}), evaluation({"heat": 0.8, "cool": 0.6})
  assert report.text_table(final | {"start": start}).splitlines()[:5] == [
    "               before   after     95 %  points",
    "cool           30.0 %  60.0 %  39–78 %   +30.0",
    "heat           20.0 %  80.0 %  58–92 %   +60.0",
    "all tasks      25.0 %  70.0 %  55–82 %   +45.0",
    report.text_table(final | {"start": start}).splitlines()[4],
  ]
  last = report.text_table(final | {"start": start}).splitlines()[-1]
  assert last.startswith("success 25.0 % -> 70.0 %: +45.0 points (95 %: +27 to +58)") and last.endswith(", 40 episodes")
  assert report.text_table(final).splitlines()[1] == "cool            60.0 %  39–78 %"
  assert report.text_table({}) == "  success  95 %"


def test_the_stage_writes_its_file_and_prints_the_table(workdir, capsys):
  class Run:
    def __init__(self):
      self.workdir = workdir

    def finish(self, stage, values):
      metrics.write_json(workdir / f"{stage}.json", values)
      return values

  assert report.run_report(Run()) == {"path": str(workdir / "report.html")}
  out = capsys.readouterr().out
  assert "all tasks" in out and out.splitlines()[-1] == f"report: {workdir / 'report.html'}"
  assert (workdir / "report.json").exists()


def test_the_panel_played_during_training_has_its_own_curve(workdir):
  assert "Success on the panel, no skill" not in page(workdir).text
  rows = [{"iteration": i, "success": i / 40, "macro": None, "outcomes": {"t": 0.0}} for i in (0, 10, 20)]
  (workdir / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  text = page(workdir).text
  assert "Success on the panel, no skill" in text and "success 0 → 0.5" in text


@pytest.mark.parametrize(
  "method, title",
  [(name, "Success on the panel, no skill") for name in ("seed", "skill_grpo")]
  + [(name, "Success on the panel, library text in the prompts") for name in ("skill_prompt", "skill_grpo_star")]
  + [("registered elsewhere", "Success on the panel")],
)
def test_the_title_of_the_panel_says_what_the_prompts_of_the_method_hold(workdir, method, title):
  row = {"iteration": 0, "success": 0.5, "macro": 0.5, "outcomes": {}}
  (workdir / "curve.jsonl").write_text(json.dumps(row) + "\n")
  metrics.write_json(workdir / "config.json", {"method": method})
  assert f"<h3>{title}</h3>" in report.build(workdir).read_text()
