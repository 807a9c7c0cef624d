"""A bar on a terminal, lines in a log."""

import io

import pytest

from seed_jax import metrics, progress


class TestProgress:
  def test_lines_where_there_is_no_terminal(self):
    file = io.StringIO()
    with metrics.progress(total=8, initial=2, desc="train", unit="iteration", every=0.0, file=file) as bar:
      bar.update(2, success=0.5, note="ok")
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("train:  50%") and "4/8" in lines[0] and lines[0].endswith("success 0.5, note ok")
    assert len(lines) == 1  # Closing repeats nothing.
    assert "\r" not in file.getvalue()

  def test_lines_come_seldom_and_the_last_state_is_shown(self):
    file = io.StringIO()
    assert list(metrics.progress(5, desc="play", unit="episode", every=60.0, file=file)) == [0, 1, 2, 3, 4]
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 and "5/5" in lines[0] and "episode/s" in lines[0]

  def test_a_bar_on_a_terminal(self):
    class Terminal(io.StringIO):
      def isatty(self):
        return True

    file = Terminal()
    for _ in metrics.progress([1, 2, 3], desc="play", file=file):
      pass
    assert "\r" in file.getvalue() and "3/3" in file.getvalue()
    plain = Terminal()
    list(metrics.progress([1], plain=True, file=plain))
    assert "\r" not in plain.getvalue() and "1/1" in plain.getvalue()

  def test_the_variable_asks_for_lines(self, monkeypatch):
    monkeypatch.setenv("SEED_JAX_PLAIN", "1")

    class Terminal(io.StringIO):
      def isatty(self):
        return True

    file = Terminal()
    list(metrics.progress([1], file=file))
    assert "\r" not in file.getvalue()

  def test_an_exception_inside_the_loop_still_closes(self):
    file = io.StringIO()
    with pytest.raises(KeyError), metrics.progress(total=None, desc="x", every=60.0, file=file) as bar:
      bar.update(3)
      raise KeyError
    assert "3" in file.getvalue()


def test_a_process_that_is_not_the_first_stays_silent(monkeypatch, capsys):
  monkeypatch.setattr(progress, "is_writer", lambda: False)
  file = io.StringIO()
  assert list(metrics.progress(3, file=file)) == [0, 1, 2]
  metrics.say("nothing")
  assert file.getvalue() == "" and capsys.readouterr().err == ""
