"""Analyzers that are not the policy: a script, and a language model behind an OpenAI-compatible endpoint.

Both answer `analyze(trajectories)` with one raw text per trajectory, or None where there is no usable analysis;
`between` is called between two answers and may raise. The policy as its own analyzer is a matter of the rollout, which
has the weights.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import email.utils
import hashlib
import json
import logging
import os
import random
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from seed_jax import skills

PROMPT_VERSION = "seed-1"  # part of the cache key: raise it when the wording of `skills.FULL` changes
MAX_BODY_BYTES = 4 << 20
RETRIED = (408, 409, 429)  # and every 5xx
REFUSED_ONE = (400, 413, 422)  # this prompt is refused (too long, filtered); the endpoint itself is well
LOOK, LAST = 0.5, 10.0  # seconds between two calls of `between`, and that requests get which are under way at the end

log = logging.getLogger(__name__)


class AnalyzerError(ValueError):
  """The analyzer cannot be used: one line with the address, what was tried, and the last error."""


def nothing() -> None:
  """Stands for no work between two answers."""


class Analyzer(Protocol):
  """patience: seconds that may pass between two signs of progress although all is well."""

  patience: float

  def analyze(self, trajectories: Sequence[Any], *, between: Callable[[], None] = nothing) -> list[str | None]:
    """Raw analysis of every trajectory, in order; None where there is none."""


class ScriptedAnalyzer:
  """Calls `script(task, steps, won)` with steps of (observation, action, valid): what an episode's text shows, no more.

  The script returns {"episode_summary", "episode_skill"} or None; a benchmark's `analyze` is one.
  """

  patience = 0.0

  def __init__(self, script: Callable[[str, Sequence[tuple[str, str, bool]], bool], Mapping[str, str] | None]):
    self.script = script

  def analyze(self, trajectories: Sequence[Any], *, between: Callable[[], None] = nothing) -> list[str | None]:
    out = []
    for each in trajectories:
      between()
      analysis = self.script(each.task, each.action_steps, each.won)
      out.append(None if analysis is None else json.dumps(dict(analysis), ensure_ascii=False))
    return out


@dataclasses.dataclass
class Counters:
  """What happened in one call of `ExternalAnalyzer.analyze`. Trajectories with equal prompts share one request."""

  trajectories: int = 0
  requests: int = 0  # HTTP requests sent, retries included
  retries: int = 0
  cache_hits: int = 0  # prompts answered from disk
  failures: int = 0  # prompts without an answer
  parse_failures: int = 0  # prompts whose answer holds no usable skill
  cut: int = 0  # of these, answers that ended at max_tokens
  prompt_tokens: int = 0  # as reported by the endpoint, cached answers not counted
  completion_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class _Reply:
  content: str | None
  reason: str = ""  # why there is no content
  reached: bool = True  # the endpoint took the request, whatever came back
  refused: bool = False  # this prompt only
  cut: bool = False
  usage: tuple[int, int] = (0, 0)


class _Retry(Exception):
  def __init__(self, reason: str, after: float = 0.0):
    super().__init__(reason)
    self.after = after


class ExternalAnalyzer:
  """Asks a chat-completions endpoint about every trajectory, greedily, with retries and a cache on disk.

  Args:
    base_url: up to and with the version, e.g. "http://localhost:8000/v1"; requests go to {base_url}/chat/completions.
    model: the model's name at that endpoint.
    api_key_env: name of the environment variable that holds the key; the key itself is never stored, logged or shown.
    cache_dir: answers are kept here as they arrive, one file per prompt, so that a killed run pays for nothing twice.
    template: see `skills.analysis_prompt`; with `fits` for the endpoint's context length.
    max_tokens, temperature, parameters: of the request; `parameters` adds fields to its body. All are part of the key.
    min_words: a shorter skill is no skill (a guard against one-word answers of foreign models).
    timeout: seconds for one attempt as a whole.
    max_attempts: per prompt; between attempts backoff * 2^k seconds, at most `max_backoff`, times a jitter in
      [0.5, 1) that depends on `seed`, prompt and k only. A longer Retry-After is honoured up to `max_retry_after`.
    concurrency: requests in flight at most.
    give_up_after: failed prompts in a row after which the endpoint counts as lost.
    progress: called as progress(done, prompts, counters) on the calling thread.
  """

  def __init__(
    self,
    base_url: str,
    model: str,
    *,
    api_key_env: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    template: skills.AnalysisTemplate | str | None = None,
    fits: Callable[[str], bool] | None = None,
    prompt_version: str = PROMPT_VERSION,
    max_tokens: int = 1024,
    temperature: float = 0.0,
    parameters: Mapping[str, Any] | None = None,
    min_words: int = 5,
    timeout: float = 120.0,
    max_attempts: int = 5,
    backoff: float = 1.0,
    max_backoff: float = 60.0,
    max_retry_after: float = 300.0,
    concurrency: int = 8,
    give_up_after: int = 16,
    seed: int = 0,
    progress: Callable[[int, int, Counters], None] | None = None,
  ):
    parts = urllib.parse.urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
      raise ValueError(f"analyzer base_url {base_url!r} is no http(s) address; example: http://localhost:8000/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:  # it is shown in messages, so it must hold no secret
      raise ValueError(
        "analyzer base_url must have no password, query or fragment; name the key's variable in api_key_env"
      )
    if concurrency < 1 or max_attempts < 1 or timeout <= 0:
      raise ValueError(
        f"analyzer needs concurrency, max_attempts >= 1 and timeout > 0; got {concurrency}, {max_attempts}, {timeout}"
      )
    self.url = base_url.rstrip("/") + "/chat/completions"
    self.body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(parameters or {})}
    self.api_key_env, self.template, self.fits, self.prompt_version = api_key_env, template, fits, prompt_version
    self.cache_dir = epath.Path(cache_dir) if cache_dir is not None else None  # may be gs://
    self.min_words, self.timeout, self.max_attempts = min_words, timeout, max_attempts
    self.backoff, self.max_backoff, self.max_retry_after = backoff, max_backoff, max_retry_after
    # every attempt at one prompt as slow as may be, and the longest pause after each
    self.patience = max_attempts * (timeout + max(max_backoff, max_retry_after))
    self.concurrency, self.give_up_after, self.seed, self.progress = concurrency, give_up_after, seed, progress
    self.counters = Counters()
    self.problems: collections.Counter[str] = collections.Counter()  # why prompts failed -> how often

  def analyze(self, trajectories: Sequence[Any], *, between: Callable[[], None] = nothing) -> list[str | None]:
    """Raw text of every trajectory whose answer holds a usable skill, None for the others; `counters` tells how many.

    The first prompt goes out alone. Raises AnalyzerError if the endpoint does not take it, if `give_up_after` prompts
    in a row fail later on, or if no trajectory got a usable analysis. Answers that arrived stay in the cache, also
    where `between` raises: then nothing more is sent, and the requests under way get `LAST` seconds.
    """
    self.counters, self.problems = Counters(trajectories=len(trajectories)), collections.Counter()
    prompts = [skills.analysis_prompt(each, self.template, fits=self.fits) for each in trajectories]
    prompts = [prompt.encode("utf-8", "replace").decode() for prompt in prompts]  # half a surrogate pair cannot be sent
    keys = [self._key(prompt) for prompt in prompts]
    unique = dict(zip(keys, prompts, strict=True))
    answers: dict[str, str | None] = {}
    for key in unique:
      cached = self._cached(key)
      if cached is not None:
        self.counters.cache_hits += 1
        answers[key] = self._usable(cached["content"], cached["cut"])
    missing = {key: prompt for key, prompt in unique.items() if key not in answers}
    if missing:
      self._ask_all(missing, answers, len(unique), between)
    elif self.progress:
      self.progress(len(unique), len(unique), self.counters)
    if trajectories and not any(answers.values()):
      raise AnalyzerError(f"analyzer {self.url}: no usable analysis of {len(unique)} prompts: {self._told()}")
    return [answers[key] for key in keys]

  def _ask_all(self, missing: dict[str, str], answers: dict[str, str | None], total: int, between) -> None:
    import httpx  # only for those who ask an endpoint

    lock, stop = threading.Lock(), threading.Event()
    limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
    reached, row = False, 0  # failed prompts in a row
    answers_before = len(answers)

    def settle(key: str, reply: _Reply) -> None:
      nonlocal reached, row
      reached = reached or reply.reached
      if reply.content is None:
        self.counters.failures += 1
        self.problems[self._redact(reply.reason)] += 1
        answers[key] = None
        row += not reply.refused
      else:
        row = 0
        self.counters.prompt_tokens += reply.usage[0]
        self.counters.completion_tokens += reply.usage[1]
        answers[key] = self._usable(reply.content, reply.cut)
      if self.progress:
        self.progress(len(answers), total, self.counters)
      if not reached or row >= self.give_up_after:
        when = f"stopped answering ({row} prompts in a row failed)" if reached else "cannot be used"
        raise AnalyzerError(f"analyzer {self.url} {when}: {self._told()}")

    waiting = iter(missing.items())
    with httpx.Client(timeout=self.timeout, limits=limits, headers=self._headers()) as client:
      running: dict[concurrent.futures.Future, str] = {}
      try:
        while True:
          most = self.concurrency if answers_before < len(answers) else 1  # a dead endpoint is met once, not by all
          while len(running) < most and (item := next(waiting, None)):
            running[_apart(self._ask, client, lock, stop, *item)] = item[0]
          if not running:
            break
          between()
          done, _ = concurrent.futures.wait(running, LOOK, return_when=concurrent.futures.FIRST_COMPLETED)
          for future in done:
            settle(running.pop(future), future.result())
      finally:
        stop.set()  # ends the pauses of threads that are still at work
        concurrent.futures.wait(running, LAST)

  def _ask(self, client, lock: threading.Lock, stop: threading.Event, key: str, prompt: str) -> _Reply:
    """One prompt with all its attempts; a good answer is on disk before this returns."""
    import httpx

    reason = "not asked"
    for attempt in range(self.max_attempts):
      if stop.is_set():
        break
      with lock:
        self.counters.requests += 1
        self.counters.retries += attempt > 0
      after = 0.0
      try:
        reply = self._post(client, prompt)
        if reply.content is not None:
          self._store(key, reply)
        return reply
      except _Retry as error:
        reason, after = str(error), error.after
      except httpx.RequestError as error:
        reason = f"{type(error).__name__}: {error}"
      log.warning("analyzer attempt %d of %d: %s", attempt + 1, self.max_attempts, self._redact(reason))
      if attempt + 1 < self.max_attempts:
        jitter = 0.5 + 0.5 * random.Random(f"{self.seed} {key} {attempt}").random()
        stop.wait(max(min(self.max_backoff, self.backoff * 2**attempt) * jitter, min(after, self.max_retry_after)))
    return _Reply(None, f"{reason} (after {self.max_attempts} attempts)", reached=False)

  def _post(self, client, prompt: str) -> _Reply:
    body = {**self.body, "messages": [{"role": "user", "content": prompt}]}
    deadline, raw = time.monotonic() + self.timeout, bytearray()
    with client.stream("POST", self.url, json=body) as response:
      for chunk in response.iter_bytes():
        raw += chunk
        if time.monotonic() > deadline:  # the client's own limit is one for each read; a drip would never end
          raise _Retry(f"no complete answer within {self.timeout:g} s")
        if len(raw) > MAX_BODY_BYTES:
          return _Reply(None, f"answer of more than {MAX_BODY_BYTES >> 20} MiB")
    status = response.status_code
    if status in RETRIED or status >= 500:
      raise _Retry(f"HTTP {status} {_excerpt(raw)}", _retry_after(response.headers.get("retry-after")))
    if status != 200:
      refused = status in REFUSED_ONE
      return _Reply(None, f"HTTP {status} {_excerpt(raw)}", reached=refused, refused=refused)
    return _read_answer(raw)

  def _usable(self, content: str, cut: bool) -> str | None:
    if skills.parse_analysis(content, min_words=self.min_words):
      return content
    self.counters.parse_failures += 1
    self.counters.cut += cut
    self.problems["answer ended at max_tokens" if cut else "answer holds no usable skill"] += 1
    return None

  # ---- cache

  def _key(self, prompt: str) -> str:
    parts = json.dumps([self.body, self.prompt_version, prompt], sort_keys=True)  # the body names model and parameters
    return hashlib.sha256(parts.encode()).hexdigest()

  def _cached(self, key: str) -> dict[str, Any] | None:
    if self.cache_dir is None:
      return None
    try:
      entry = json.loads((self.cache_dir / key[:2] / f"{key}.json").read_text())
      return entry if isinstance(entry["content"], str) and isinstance(entry["cut"], bool) else None
    except (OSError, ValueError, KeyError, TypeError):
      return None  # absent or damaged: ask again and write it anew

  def _store(self, key: str, reply: _Reply) -> None:
    if self.cache_dir is None:
      return
    path = self.cache_dir / key[:2] / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model": self.body["model"], "content": reply.content, "cut": reply.cut})
    if "://" in str(path):  # an object appears as a whole
      path.write_text(text)
      return
    beside = path.parent / f".{key}.{os.getpid()}"
    beside.write_text(text)
    os.replace(beside, path)

  # ---- what may be shown

  def _headers(self) -> dict[str, str]:
    return {"Authorization": f"Bearer {self._api_key()}"} if self.api_key_env else {}

  def _api_key(self) -> str:
    key = os.environ.get(self.api_key_env or "", "").strip()
    if self.api_key_env and not key:
      raise AnalyzerError(f"the environment variable {self.api_key_env} of the analyzer's key is not set or empty")
    return key

  def _redact(self, text: str) -> str:
    key = self._api_key()
    return text.replace(key, "***") if key else text

  def _told(self) -> str:
    c = self.counters
    reasons = "; ".join(f"{reason} x{count}" for reason, count in self.problems.most_common(3))
    return f"{c.requests} requests, {c.failures} failures, {c.parse_failures} unusable answers. Most often: {reasons}"


def _apart(function: Callable, *args) -> concurrent.futures.Future:
  """What a call gives, on a thread of its own. The end of the process does not wait for it, as it would for a pool's:
  an answer may take minutes.
  """
  future: concurrent.futures.Future = concurrent.futures.Future()

  def work():
    try:
      future.set_result(function(*args))
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=work, daemon=True).start()
  return future


def _read_answer(raw: bytes) -> _Reply:
  try:
    answer = json.loads(raw)
    choice = answer["choices"][0]
    content = choice["message"]["content"]
  except (ValueError, RecursionError):
    return _Reply(None, f"answer is not JSON: {_excerpt(raw)}")
  except (KeyError, IndexError, TypeError):
    return _Reply(None, f"answer has no choices[0].message.content: {_excerpt(raw)}")
  if not isinstance(content, str) or not content.strip():
    return _Reply(None, "answer is empty")
  usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
  counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
  tokens = tuple(count if isinstance(count, int) else 0 for count in counts)
  return _Reply(content, cut=choice.get("finish_reason") == "length", usage=tokens)


def _retry_after(value: str | None) -> float:
  """Seconds of a Retry-After header, which holds a number or a date; 0 where it holds neither."""
  if not value:
    return 0.0
  try:
    return max(float(value), 0.0)
  except ValueError:
    pass
  try:
    return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
  except (ValueError, TypeError, OverflowError):
    return 0.0


def _excerpt(raw: bytes) -> str:
  return repr(skills.clean(bytes(raw[:2000]).decode("utf-8", "replace"), 120))
