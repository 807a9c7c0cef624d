"""Analyzers against a real HTTP server on the loopback interface."""

import http.server
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time

import fake_store
import pytest

from seed_jax import analyzers, skills
from seed_jax.preemption import Notice, Preempted

SKILL = "Heat the potato before you carry it to the table."
ANSWER = json.dumps({"episode_summary": "The potato stayed cold.", "episode_skill": SKILL})


class Episode:
  """What an analyzer needs of a trajectory."""

  def __init__(self, number: int, won: bool = True):
    self.task, self.won, self.outcome = f"task {number}", won, "success" if won else "failure"
    self.steps = [("you see a fridge", f"open fridge {number}", True)]
    self.action_steps = self.steps


def chat(content, finish="stop", **extra) -> bytes:
  return json.dumps({"choices": [{"message": {"content": content}, "finish_reason": finish}], **extra}).encode()


class Endpoint:
  """Serves `script(number of the request, its body) -> (status, headers, body)` and keeps what it saw."""

  def __init__(self, script):
    self.script, self.bodies, self.headers, self.times = script, [], [], []
    self.active = self.most_active = 0
    self.lock = threading.Lock()
    endpoint = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with endpoint.lock:
          number = len(endpoint.bodies)
          endpoint.bodies.append((self.path, body))
          endpoint.headers.append(dict(self.headers))
          endpoint.times.append(time.monotonic())
          endpoint.active += 1
          endpoint.most_active = max(endpoint.active, endpoint.most_active)
        try:
          status, headers, answer = endpoint.script(number, body)
        finally:
          with endpoint.lock:
            endpoint.active -= 1
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(answer))} | headers).items():
          self.send_header(name, value)
        self.end_headers()
        try:
          self.wfile.write(answer)
        except OSError:
          pass  # the client has given up
        if "Content-Length" in headers:
          self.close_connection = True

      def log_message(self, *args):
        pass

    self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self.server.daemon_threads = True
    self.server.handle_error = lambda request, address: None  # clients that give up are part of the tests
    self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
    threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def serve(monkeypatch):
  for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
    monkeypatch.delenv(name, raising=False)
  endpoints = []

  def start(script):
    endpoints.append(Endpoint(script))
    return endpoints[-1]

  yield start
  for endpoint in endpoints:
    endpoint.server.shutdown()
    endpoint.server.server_close()


def external(endpoint, **changes) -> analyzers.ExternalAnalyzer:
  url = endpoint if isinstance(endpoint, str) else endpoint.url
  return analyzers.ExternalAnalyzer(url, "judge", **{"backoff": 0.001, "timeout": 5.0, **changes})


# ---- scripted


def test_scripted_analyzer_passes_the_text_and_answers_json():
  seen = []

  def script(task, steps, won):
    seen.append((task, steps, won))
    return {"episode_summary": "é", "episode_skill": "go"} if won else None

  answers = analyzers.ScriptedAnalyzer(script).analyze([Episode(0), Episode(1, won=False)])
  assert skills.parse_analysis(answers[0]) == skills.Analysis("é", "go")
  assert answers[1] is None
  assert seen[0] == ("task 0", [("you see a fridge", "open fridge 0", True)], True) and seen[1][2] is False


# ---- the endpoint answers


def test_answers_come_in_order_with_a_greedy_request(serve):
  endpoint = serve(
    lambda number, body: (
      200,
      {},
      chat(
        json.dumps(
          {"episode_skill": "always look at " + body["messages"][0]["content"].split("Task: ")[1].split("\n")[0]}
        ),
        usage={"prompt_tokens": 7, "completion_tokens": 2},
      ),
    )
  )
  progress = []
  analyzer = external(endpoint, progress=lambda done, total, counters: progress.append((done, total)))
  answers = analyzer.analyze([Episode(i) for i in range(6)])
  assert [skills.parse_analysis(a).skill for a in answers] == [f"always look at task {i}" for i in range(6)]
  path, body = endpoint.bodies[0]
  assert path == "/v1/chat/completions"
  assert {k: body[k] for k in ("model", "temperature", "max_tokens")} == {
    "model": "judge",
    "temperature": 0,
    "max_tokens": 1024,
  }
  assert body["messages"] == [{"role": "user", "content": skills.analysis_prompt(Episode(0))}]
  assert "Authorization" not in endpoint.headers[0]
  c = analyzer.counters
  assert (c.trajectories, c.requests, c.retries, c.failures, c.parse_failures) == (6, 6, 0, 0, 0)
  assert (c.prompt_tokens, c.completion_tokens) == (42, 12)
  assert progress == [(i, 6) for i in range(1, 7)]


def test_no_trajectories_ask_nothing():
  assert external("http://127.0.0.1:9/v1").analyze([]) == []


def test_the_key_comes_from_the_environment_and_is_never_shown(serve, monkeypatch, tmp_path, caplog):
  caplog.set_level("DEBUG")
  monkeypatch.setenv("JUDGE_KEY", "tell-nobody")
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  external(endpoint, api_key_env="JUDGE_KEY", cache_dir=tmp_path).analyze([Episode(0)])
  assert endpoint.headers[0]["Authorization"] == "Bearer tell-nobody"
  rejecting = serve(lambda number, body: (401, {}, b'{"error": "wrong key tell-nobody"}'))
  with pytest.raises(analyzers.AnalyzerError) as caught:
    external(rejecting, api_key_env="JUDGE_KEY").analyze([Episode(0)])
  failing = serve(lambda number, body: (500, {}, b"echo tell-nobody"))
  with pytest.raises(analyzers.AnalyzerError, match=r"\*\*\*"):
    external(failing, api_key_env="JUDGE_KEY", max_attempts=2).analyze([Episode(0)])
  assert "401" in str(caught.value) and len(rejecting.bodies) == 1
  stored = "".join(file.read_text() for file in tmp_path.rglob("*.json"))
  assert stored and "tell-nobody" not in str(caught.value) + caplog.text + stored
  monkeypatch.setenv("JUDGE_KEY", "")
  with pytest.raises(analyzers.AnalyzerError, match="JUDGE_KEY"):
    external(endpoint, api_key_env="JUDGE_KEY").analyze([Episode(0)])


def test_concurrency_limit_holds_on_the_server(serve):
  def script(number, body):
    time.sleep(0.05)
    return 200, {}, chat(ANSWER)

  endpoint = serve(script)
  external(endpoint, concurrency=3).analyze([Episode(i) for i in range(12)])
  assert endpoint.most_active == 3


def test_equal_prompts_are_asked_once(serve):
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  assert external(endpoint).analyze([Episode(0), Episode(1), Episode(0)]) == [ANSWER] * 3
  assert len(endpoint.bodies) == 2


# ---- retries


def test_server_error_then_success(serve):
  endpoint = serve(lambda number, body: (500, {}, b"busy") if number < 2 else (200, {}, chat(ANSWER)))
  analyzer = external(endpoint)
  assert analyzer.analyze([Episode(0)]) == [ANSWER]
  assert (analyzer.counters.requests, analyzer.counters.retries, analyzer.counters.failures) == (3, 2, 0)


@pytest.mark.parametrize("value", ["0.4", None])
def test_retry_after_is_honoured(serve, value):
  def script(number, body):
    return (429, {"Retry-After": value} if value else {}, b"slow down") if number == 0 else (200, {}, chat(ANSWER))

  endpoint = serve(script)
  assert external(endpoint).analyze([Episode(0)]) == [ANSWER]
  pause = endpoint.times[1] - endpoint.times[0]
  assert pause >= 0.4 if value else pause < 0.4


def test_retry_after_reads_seconds_and_dates():
  assert analyzers._retry_after("7") == 7.0
  assert analyzers._retry_after(
    time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
  ) == pytest.approx(100, abs=3)
  for nothing in (None, "", "soon", "-3", "Thu, 01 Jan 1970 00:00:00 GMT"):
    assert analyzers._retry_after(nothing) == 0.0


def test_backoff_grows_with_a_jitter_fixed_by_the_seed(serve, monkeypatch):
  pauses = []
  wait = threading.Event.wait

  def noted(self, timeout=None):  # all but what the collecting thread waits for
    return wait(self, timeout) if timeout in (None, analyzers.LOOK, analyzers.LAST) else pauses.append(timeout)

  monkeypatch.setattr(threading.Event, "wait", noted)
  endpoint = serve(lambda number, body: (503, {}, b""))
  runs = []
  for seed in (0, 0, 1):
    with pytest.raises(analyzers.AnalyzerError):
      external(endpoint, backoff=1.0, max_backoff=3.0, seed=seed).analyze([Episode(0)])
    runs.append(pauses[:])
    pauses.clear()
  assert len(runs[0]) == 4 and runs[0] == runs[1] != runs[2]
  for pause, full in zip(runs[0], (1.0, 2.0, 3.0, 3.0), strict=True):
    assert full / 2 <= pause < full


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_prompt_is_one_failure_and_not_retried(serve, status):
  endpoint = serve(lambda number, body: (status, {}, b"too long") if number == 0 else (200, {}, chat(ANSWER)))
  analyzer = external(endpoint, concurrency=1)
  assert analyzer.analyze([Episode(0), Episode(1)]) == [None, ANSWER]
  assert (analyzer.counters.requests, analyzer.counters.failures) == (2, 1)


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_a_wrong_address_or_key_ends_the_call_at_once(serve, status):
  endpoint = serve(lambda number, body: (status, {}, b"no"))
  with pytest.raises(analyzers.AnalyzerError, match=f"{endpoint.url}/chat/completions cannot be used.*HTTP {status}"):
    external(endpoint).analyze([Episode(i) for i in range(5)])
  assert len(endpoint.bodies) == 1


def test_truncated_body_is_retried(serve):
  whole = chat(ANSWER)

  def script(number, body):
    return (200, {"Content-Length": str(len(whole))}, whole[:20]) if number == 0 else (200, {}, whole)

  analyzer = external(serve(script))
  assert analyzer.analyze([Episode(0)]) == [ANSWER]
  assert analyzer.counters.retries == 1


def test_slow_answer_times_out_and_is_retried(serve):
  def script(number, body):
    time.sleep(0.6 if number == 0 else 0)
    return 200, {}, chat(ANSWER)

  analyzer = external(serve(script), timeout=0.2)
  assert analyzer.analyze([Episode(0)]) == [ANSWER]
  assert analyzer.counters.retries >= 1


def test_a_drip_of_bytes_does_not_outlast_the_timeout(serve):
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  handler = endpoint.server.RequestHandlerClass
  post = handler.do_POST

  def drip(self):
    write = self.wfile.write
    self.wfile = type("Slow", (), {"write": lambda _, data: slowly(data), "flush": lambda _: None, "closed": True})()

    def slowly(data):
      for i in range(len(data)):
        write(data[i : i + 1])
        if not data.startswith(b"HTTP"):
          time.sleep(0.05)

    post(self)

  handler.do_POST = drip
  start = time.monotonic()
  with pytest.raises(analyzers.AnalyzerError, match="no complete answer within 0.3 s"):
    external(endpoint, timeout=0.3, max_attempts=1).analyze([Episode(0)])
  assert time.monotonic() - start < 2


# ---- the endpoint is down, or answers garbage


def test_connection_refused_is_one_clear_line(serve):
  endpoint = serve(lambda number, body: (200, {}, b""))
  endpoint.server.shutdown()
  endpoint.server.server_close()
  analyzer = external(endpoint, max_attempts=3)
  with pytest.raises(analyzers.AnalyzerError) as caught:
    analyzer.analyze([Episode(i) for i in range(20)])
  line = str(caught.value)
  assert endpoint.url in line and "after 3 attempts" in line and "refused" in line and "\n" not in line
  assert analyzer.counters.requests == 3  # the other 19 prompts were not tried


GARBAGE = {
  "not JSON": b"<html>gateway</html>",
  "has no choices": b'{"error": "overloaded"}',
  "has no choices[0]": b'{"choices": []}',
  "has no choices[0].message": b'{"choices": [{"text": "old style"}]}',
  "is empty": chat("  "),
  "answer is empty": chat(None),
  "answer is not JSON": b"[" * 100_000,
  "no choices": b"null",
}


@pytest.mark.parametrize("reason", GARBAGE)
def test_garbage_from_every_request_raises_with_counts(serve, reason):
  endpoint = serve(lambda number, body: (200, {}, GARBAGE[reason]))
  with pytest.raises(analyzers.AnalyzerError) as caught:
    external(endpoint).analyze([Episode(i) for i in range(3)])
  assert "3 requests, 3 failures, 0 unusable answers" in str(caught.value) and reason in str(caught.value)
  assert len(endpoint.bodies) == 3


def test_garbage_from_one_request_is_one_failure(serve):
  endpoint = serve(lambda number, body: (200, {}, b"garbage" if number == 1 else chat(ANSWER)))
  analyzer = external(endpoint, concurrency=1)
  assert analyzer.analyze([Episode(i) for i in range(3)]) == [ANSWER, None, ANSWER]
  assert (analyzer.counters.failures, analyzer.counters.parse_failures) == (1, 0)


def test_a_huge_answer_is_cut_off(serve):
  endpoint = serve(lambda number, body: (200, {}, b" " * (analyzers.MAX_BODY_BYTES + 100_000)))
  with pytest.raises(analyzers.AnalyzerError, match="more than 4 MiB"):
    external(endpoint).analyze([Episode(0)])


def test_unusable_analyses_are_counted_and_all_of_them_raise(serve):
  texts = ["I would rather not.", json.dumps({"episode_skill": "too short"}), '{"episode_skill": "cut in the mid']
  endpoint = serve(
    lambda number, body: (
      200,
      {},
      chat(texts[number] if number < 3 else ANSWER, finish="length" if number == 2 else "stop"),
    )
  )
  analyzer = external(endpoint, concurrency=1)
  assert analyzer.analyze([Episode(i) for i in range(4)]) == [None, None, None, ANSWER]
  c = analyzer.counters
  assert (c.failures, c.parse_failures, c.cut) == (0, 3, 1)
  with pytest.raises(
    analyzers.AnalyzerError, match="no usable analysis of 2 prompts: 2 requests, 0 failures, 2 unusable"
  ):
    external(serve(lambda number, body: (200, {}, chat("hello")))).analyze([Episode(0), Episode(1)])


def test_an_endpoint_that_is_lost_midway_ends_the_call_and_loses_nothing(serve, tmp_path):
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)) if number < 4 else (503, {}, b"gone"))
  analyzer = external(endpoint, concurrency=2, give_up_after=3, max_attempts=2, cache_dir=tmp_path)
  with pytest.raises(analyzers.AnalyzerError, match="stopped answering.*HTTP 503"):
    analyzer.analyze([Episode(i) for i in range(40)])
  assert len(endpoint.bodies) <= 4 + 2 * 5
  endpoint.script = lambda number, body: (200, {}, chat(ANSWER))
  again = external(endpoint, cache_dir=tmp_path)
  assert again.analyze([Episode(i) for i in range(40)]) == [ANSWER] * 40
  assert (again.counters.cache_hits, again.counters.requests) == (4, 36)


# ---- cache


def test_cache_answers_without_requests(serve, tmp_path):
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  episodes = [Episode(i) for i in range(3)]
  assert external(endpoint, cache_dir=tmp_path).analyze(episodes) == [ANSWER] * 3
  analyzer = external("http://127.0.0.1:9/v1", cache_dir=tmp_path)
  assert analyzer.analyze(episodes) == [ANSWER] * 3
  assert (analyzer.counters.requests, analyzer.counters.cache_hits) == (0, 3)
  assert not list(tmp_path.rglob(".*")), "nothing half written is left"


def test_a_cache_in_object_storage_is_there_for_the_next_machine(serve, tmp_path, monkeypatch):
  bucket = fake_store.install(tmp_path, monkeypatch)
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  assert external(endpoint, cache_dir="gs://bucket/run/analyzer_cache").analyze([Episode(0)]) == [ANSWER]
  assert len(list((bucket / "run" / "analyzer_cache").rglob("*.json"))) == 1
  analyzer = external("http://127.0.0.1:9/v1", cache_dir="gs://bucket/run/analyzer_cache")
  assert analyzer.analyze([Episode(0)]) == [ANSWER] and analyzer.counters.cache_hits == 1


@pytest.mark.parametrize(
  "change", [{"max_tokens": 64}, {"prompt_version": "2"}, {"temperature": 0.5}, {"parameters": {"top_p": 0.9}}]
)
def test_cache_key_covers_parameters_and_version(serve, tmp_path, change):
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  external(endpoint, cache_dir=tmp_path).analyze([Episode(0)])
  external(endpoint, cache_dir=tmp_path, **change).analyze([Episode(0)])
  assert len(endpoint.bodies) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"content": 3, "cut": false}', '{"content": "x"}'])
def test_a_damaged_cache_entry_is_asked_again_and_repaired(serve, tmp_path, damage):
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  external(endpoint, cache_dir=tmp_path).analyze([Episode(0)])
  (file,) = tmp_path.rglob("*.json")
  file.write_text(damage)
  assert external(endpoint, cache_dir=tmp_path).analyze([Episode(0)]) == [ANSWER]
  assert len(endpoint.bodies) == 2 and json.loads(file.read_text())["content"] == ANSWER


def test_garbage_is_not_cached(serve, tmp_path):
  endpoint = serve(lambda number, body: (200, {}, b"garbage" if number == 0 else chat(ANSWER)))
  with pytest.raises(analyzers.AnalyzerError):
    external(endpoint, cache_dir=tmp_path).analyze([Episode(0)])
  assert not list(tmp_path.rglob("*.json"))
  assert external(endpoint, cache_dir=tmp_path).analyze([Episode(0)]) == [ANSWER]


def test_a_killed_run_pays_for_nothing_twice(serve, tmp_path):
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  program = f"""
import os, signal, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import analyzers_test as t
stop = lambda done, total, counters: done == 5 and os.kill(os.getpid(), signal.SIGKILL)
analyzer = t.external({endpoint.url!r}, cache_dir={str(tmp_path)!r}, concurrency=2, progress=stop)
analyzer.analyze([t.Episode(i) for i in range(20)])
"""
  assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
  asked = len(endpoint.bodies)
  analyzer = external(endpoint, cache_dir=tmp_path)
  assert asked < 20 and analyzer.analyze([Episode(i) for i in range(20)]) == [ANSWER] * 20
  assert analyzer.counters.cache_hits >= 5 and len(endpoint.bodies) <= 20 + 2  # two were in flight


class Stopped(Exception):
  pass


def test_a_run_that_is_asked_to_stop_keeps_the_answers_that_came_and_asks_others_later(serve, tmp_path, monkeypatch):
  """One request of three under way never ends, and one ends a moment later: the first is left, the other awaited."""
  monkeypatch.setattr(analyzers, "LAST", 1.0)
  over = threading.Event()

  def script(number, body):
    if number == 6:
      over.wait(30)
    time.sleep(0.3 * (number == 5))
    return 200, {}, chat(ANSWER)

  endpoint, calls = serve(script), []

  def between():
    calls.append(len(endpoint.bodies))
    if calls[-1] >= 7:
      raise Stopped

  began = time.monotonic()
  with pytest.raises(Stopped):
    external(endpoint, cache_dir=tmp_path, concurrency=3, timeout=60.0).analyze(
      [Episode(i) for i in range(12)], between=between
    )
  assert time.monotonic() - began < 10 and calls[0] <= 1
  kept = len(list(tmp_path.rglob("*.json")))
  assert 6 <= kept < len(endpoint.bodies) <= 9
  over.set()
  analyzer = external(endpoint, cache_dir=tmp_path)
  assert analyzer.analyze([Episode(i) for i in range(12)]) == [ANSWER] * 12 and analyzer.counters.cache_hits >= kept


def test_a_script_stops_between_two_episodes():
  seen, notice = [], Notice()

  def script(task, steps, won):
    seen.append(task)
    if len(seen) == 2:
      notice.give("a test")

  with pytest.raises(Preempted):
    analyzers.ScriptedAnalyzer(script).analyze([Episode(i) for i in range(5)], between=notice.check)
  assert seen == ["task 0", "task 1"]


# ---- settings


@pytest.mark.parametrize(
  "url", ["localhost:8000", "", "ftp://host/v1", "http://", "http://me:secret@host/v1", "http://host/v1?key=secret"]
)
def test_a_bad_address_is_refused(url):
  with pytest.raises(ValueError, match="base_url") as caught:
    analyzers.ExternalAnalyzer(url, "judge")
  assert "secret" not in str(caught.value)


def test_bad_limits_are_refused():
  for change in ({"concurrency": 0}, {"max_attempts": 0}, {"timeout": 0}):
    with pytest.raises(ValueError, match="concurrency"):
      external("http://host/v1", **change)


def test_patience_is_the_longest_time_of_one_prompt():
  assert external("http://host/v1", timeout=10, max_attempts=3, max_retry_after=50, max_backoff=20).patience == 180
  assert analyzers.ScriptedAnalyzer(None).patience == 0


def test_half_a_surrogate_pair_in_an_observation_can_be_sent(serve):
  endpoint = serve(lambda number, body: (200, {}, chat(ANSWER)))
  episode = Episode(0)
  episode.steps = [("odd \ud83d text", "go", True)]
  assert external(endpoint).analyze([episode]) == [ANSWER]
