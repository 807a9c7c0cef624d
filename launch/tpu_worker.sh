#!/usr/bin/env bash
# The part of launch/tpu_run.sh that runs on the workers of a slice; it is sent there with the code and never called by hand.
#
#   status                         one line: @worker NUMBER FINGERPRINT STATE CODE RUN WORKDIR
#   setup FINGERPRINT PYTHON [EXTRA...]   unpacks ~/seed_jax-FINGERPRINT.tgz and installs
#   secrets RUN COUNT              NAME=VALUE records, NUL after each, from stdin into memory, for the start of RUN
#   data NAME gs://FOLDER          copies a folder to this machine, for start --data=NAME
#   start RUN --code=FINGERPRINT [--cache=FOLDER] [--env=NAME=VALUE]... [--data=NAME]... [--secret=NAME=projects/...]... -- ARGUMENT...
#   stop SECONDS [quiet]           SIGTERM, then SIGKILL after so many seconds; quiet: as if it had ended by itself
#   logs LINES [follow]
#   pack FOLDER [all]              the results in FOLDER as a tar file on stdout
#
# STATE is idle (nothing was run), running, ended, stopped (by `stop`) or lost (no exit code: the machine went away). CODE is the
# program's exit code, which lies in run/exit_code. Every verb may be repeated: an ssh connection may break after the work is done.
set -euo pipefail

BASE=${SEED_JAX_HOME:-$HOME/.seed_jax}
RUN=$BASE/run
MEMORY=${SEED_JAX_MEMORY:-/dev/shm}/seed_jax.$(id -un) # a file system in memory: secrets touch no disk
mkdir -p "$BASE" "$BASE/logs"

number() {
  local name
  name=$(hostname)
  name=${name##*-w-}
  name=${name%%.*}
  case $name in
    "" | *[!0-9]*)
      curl -sf -m 5 -H 'Metadata-Flavor: Google' \
        http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number || echo 0
      ;;
    *) echo "$name" ;;
  esac
}

fail() {
  printf 'error: worker %s: %s\n' "$(number)" "$*" >&2
  exit 1
}

read_or() { cat "$1" 2>/dev/null || printf '%s' "$2"; }

# The supervisor holds this lock as long as it lives, whatever happens to the ssh connection that started it. Its program may
# outlive it.
running() { ! flock -n "$BASE/lock" true || orphan; }
orphan() {
  local pid
  pid=$(read_or "$RUN/pid" "")
  [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q ' seed_jax\.main '
}

status() {
  local state=idle
  if running; then
    state=running
  elif [ -e "$RUN/stopped" ]; then
    state=stopped
  elif [ -e "$RUN/exit_code" ]; then
    state=ended
  elif [ -e "$RUN/id" ]; then
    state=lost
  fi
  printf '@worker %s %s %s %s %s %s\n' "$(number)" "$(read_or "$BASE/ready" none)" "$state" \
    "$(read_or "$RUN/exit_code" -)" "$(read_or "$RUN/id" -)" "$(read_or "$RUN/workdir" -)"
}

# Prints a Python of that version. The images of Cloud TPU come with 3.10; uv brings a newer one without root.
find_python() {
  if "python$1" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    command -v "python$1"
  else
    export UV_PYTHON_PREFERENCE=only-managed
    if [ ! -x "$BASE/bin/uv" ]; then
      curl -LsSf https://astral.sh/uv/install.sh | UV_INSTALL_DIR=$BASE/bin UV_NO_MODIFY_PATH=1 sh >&2 ||
        fail "cannot fetch uv for Python $1; has the slice a way to the internet (external addresses or Cloud NAT)?"
    fi
    "$BASE/bin/uv" python install "$1" >&2 || fail "uv could not install Python $1"
    "$BASE/bin/uv" python find "$1"
  fi
}

setup() {
  local print=$1 version=$2
  shift 2
  exec 8>"$BASE/setup.lock"
  flock 8 # two launchers at once: one after the other
  [ "$(read_or "$BASE/ready" none)" != "$print" ] || return 0
  running && fail "a run is in progress in $(read_or "$RUN/workdir" '?')"
  rm -rf "$BASE/ready" "$BASE/new"
  mkdir "$BASE/new"
  tar -xzf "$HOME/seed_jax-$print.tgz" -C "$BASE/new" || fail "the code did not arrive whole"
  rm -rf "$BASE/code"
  mv "$BASE/new" "$BASE/code"
  PYTHON=$(find_python "$version") || fail "no Python $version"
  export PYTHON VENV=$BASE/venv
  # shellcheck source=launch/common.sh
  if ! (set -e && . "$BASE/code/launch/common.sh" && prepare tpu "$@") 2>"$BASE/setup.log"; then
    sed "s/^error: /error: worker $(number): /" "$BASE/setup.log" >&2
    exit 1
  fi
  echo "$print" >"$BASE/ready"
  find "$HOME" -maxdepth 1 -name 'seed_jax-*.tgz' -mmin +60 -delete
}

start() {
  local id=$1 workdir="" item variable place version cache="" given=()
  shift
  [ "$(read_or "$RUN/id" none)" != "$id" ] || return 0 # this very run was started, whether or not it is over
  exec 9>"$BASE/lock"
  if ! flock -w 5 9 || orphan; then # who asks whether it is held holds it for a moment
    exec 9>&-
    return 0 # the caller sees in the status whose run it is
  fi
  if [ -f "$MEMORY.$id" ]; then
    while IFS= read -r -d '' item; do given+=("$item"); done <"$MEMORY.$id"
    rm -f "$MEMORY".*
  fi
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
      --code=*) [ "$(read_or "$BASE/ready" none)" = "${1#*=}" ] || fail "other code was installed here in the meantime; run again" ;;
      --cache=*) cache=${1#*=} ;;
      --env=*) given+=("${1#--env=}") ;;
      --data=*) given+=("${1#--data=}=$BASE/data/${1#--data=}") ;;
      --secret=*)
        variable=${1#--secret=}
        place=${variable#*=} variable=${variable%%=*} version=latest
        case $place in */versions/*) version=${place##*/} place=${place%/versions/*} ;; esac
        item=$(gcloud secrets versions access "$version" --secret="${place##*/}" --project="$(cut -d/ -f2 <<<"$place")") ||
          fail "cannot read $place: the slice's service account needs roles/secretmanager.secretAccessor, and its scopes cloud-platform"
        given+=("$variable=$item")
        ;;
    esac
    shift
  done
  shift
  for item in "$@"; do case $item in --workdir=*) workdir=${item#*=} ;; esac done
  [ -z "$cache" ] || given+=("SEED_JAX_CACHE=$cache")
  rm -rf "$RUN"
  mkdir -p "$RUN"
  printf '%s\n' "$workdir" >"$RUN/workdir"
  set -- "$id" "$@"
  # the last thing in a shell of its own: the program's variables may have the names of ours
  (
    [ ${#given[@]} -eq 0 ] || export "${given[@]}"
    exec setsid bash "${BASH_SOURCE[0]}" supervise "$@"
  ) </dev/null >>"$BASE/logs/$id.log" 2>&1 &
  exec 9>&-
  # not before it has begun, on a busy machine too: what is asked next is how it goes
  while [ ! -s "$RUN/id" ] && running; do sleep 0.1; done
}

# Runs the program, outlives the ssh connection and writes the exit code down. When the machine is taken away, the system sends
# SIGTERM to the program itself; this shell only has to live until the program has put its checkpoint in safety.
supervise() {
  local child code=0
  trap : TERM HUP INT
  echo $$ >"$RUN/supervisor"
  echo "$1" >"$RUN/id" # from here on this run has been started, whoever asks
  shift
  cd "$BASE/code"
  "$BASE/venv/bin/python" -m seed_jax.main "$@" 9>&- &
  child=$!
  echo "$child" >"$RUN/pid"
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done # a signal ends `wait` early
  wait "$child" || code=$?
  echo "seed_jax: the program ended with exit code $code"
  echo "$code" >"$RUN/exit_code.new"
  mv "$RUN/exit_code.new" "$RUN/exit_code"
}

stop() {
  local left=$((10#$1))
  running || return 0
  [ "${2:-}" = quiet ] || touch "$RUN/stopped"
  [ ! -s "$RUN/pid" ] || kill -TERM "$(cat "$RUN/pid")" 2>/dev/null || true
  while running && [ "$left" -gt 0 ]; do
    sleep 1
    left=$((left - 1))
  done
  if running; then
    [ ! -s "$RUN/supervisor" ] || kill -KILL -- "-$(cat "$RUN/supervisor")" 2>/dev/null || true
    if [ "${2:-}" = quiet ]; then echo 76; else echo 137; fi >"$RUN/exit_code" # quiet: it hung, for another worker is gone
    for _ in 1 2 3 4 5; do ! running || sleep 1; done
  fi
}

logs() {
  local log follow=()
  log=$BASE/logs/$(read_or "$RUN/id" none).log
  [ -f "$log" ] || fail "nothing was run here yet"
  [ "${2:-}" != follow ] || follow=(-F --pid="$(read_or "$RUN/supervisor" 1)")
  if [ "${2:-}" = follow ] && ! running; then follow=(); fi
  tail -n "$1" ${follow[@]+"${follow[@]}"} "$log" 2>/dev/null | sed -u "s/^/[w$(number)] /"
}

pack() {
  local name names=()
  cd "$1" || fail "there is no folder $1"
  if [ "${2:-}" = all ]; then
    names=(.)
  else
    for name in *.html *.json *.jsonl *.md policy/final; do [ ! -e "$name" ] || names+=("$name"); done
  fi
  [ ${#names[@]} -gt 0 ] || fail "there is nothing to fetch in $1 yet"
  tar -cf - "${names[@]}"
}

data() {
  mkdir -p "$BASE/data/$1"
  gcloud storage rsync "$2" "$BASE/data/$1" --recursive --quiet >/dev/null ||
    fail "cannot copy $2: does it exist, and has the slice's service account roles/storage.objectViewer on the bucket?"
}

secrets() {
  (umask 077 && cat >"$MEMORY.$1")
  [ "$(tr -cd '\0' <"$MEMORY.$1" | wc -c)" -eq "$2" ] || fail "not all secrets arrived"
}

verb=$1
shift
"$verb" "$@"
case $verb in setup | data | start | stop | secrets) status ;; esac
