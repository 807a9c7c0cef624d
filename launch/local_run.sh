#!/usr/bin/env bash
# Trains, evaluates and reports on this machine, and does its own set-up first. Safe to run again: finished work is kept.
#
#   bash launch/local_run.sh                                          the quickstart, into runs/quickstart
#   bash launch/local_run.sh --config=configs/quickstart.py:grpo      another method, into runs/quickstart-grpo
#   bash launch/local_run.sh --workdir=/data/run1 --config.seed=1     everything else goes to `python -m seed_jax.main`
#
# PYTHON= chooses the interpreter, VENV= the environment's folder (see common.sh). A config that needs more packages says so in a
# line `# extras: NAME...`, which is installed too.
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Relative paths are the caller's; at the repository's root the defaults are written relative too.
base=$ROOT/
[ "$(pwd -P)" != "$(cd "$ROOT" && pwd -P)" ] || base=

config="" workdir="" previous=""
arguments=()
for argument in "$@"; do
  case $previous in
    --config | -config) config=$argument ;;
    --workdir | -workdir) workdir=$argument ;;
  esac
  case $argument in
    --config=* | -config=*) config=${argument#*=} ;;
    --workdir=* | -workdir=*) workdir=${argument#*=} ;;
  esac
  previous=$argument
done

if [ -z "$config" ]; then
  config=${base}configs/quickstart.py
  arguments+=("--config=$config")
elif [ ! -f "${config%%:*}" ] && [ -f "$ROOT/${config%%:*}" ]; then
  # Named as in the documentation, from another folder. The last --config counts.
  set -- "$@" "--config=$ROOT/$config"
  config=$ROOT/$config
fi
if [ -z "$workdir" ]; then
  file=${config%%:*} variant=
  case $config in *:*) variant=-${config#*:} ;; esac
  name=$(basename "$file" .py)${variant//[^A-Za-z0-9._-]/-}
  arguments+=("--workdir=${base}runs/$name")
fi

extras=()
if [ -f "${config%%:*}" ]; then
  read -r -a extras <<<"$(sed -n 's/^# extras: *//p' "${config%%:*}" | head -n 1)"
fi

prepare ${extras[@]+"${extras[@]}"}
exec "$RUNNER" -m seed_jax.main ${arguments[@]+"${arguments[@]}"} "$@"
