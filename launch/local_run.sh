#!/usr/bin/env bash
# Trains, evaluates and reports on this machine, and does its own set-up first. Safe to run again: finished work is kept.
#
#   bash launch/local_run.sh                                          the quickstart, into runs/quickstart
#   bash launch/local_run.sh --config=configs/quickstart.py:grpo      another method, into runs/quickstart-grpo
#   bash launch/local_run.sh --workdir=/data/run1 --config.seed=1     everything else goes to `python -m seed_jax.main`
#
# PYTHON= chooses the interpreter, VENV= the environment's folder (see common.sh). A config that needs more packages says so in a
# line `# extras: NAME...`, which is installed too, and so is what EXTRAS=NAME,... names (EXTRAS=tpu on a TPU machine).
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Relative paths are the caller's; at the repository's root the defaults are written relative too.
base=$ROOT/
[ "$(pwd -P)" != "$(cd "$ROOT" && pwd -P)" ] || base=

# A config named as in the documentation, from another folder, is the repository's.
locate() {
  if [ ! -f "${1%%:*}" ] && [ -f "$ROOT/${1%%:*}" ]; then printf '%s' "$ROOT/$1"; else printf '%s' "$1"; fi
}

config="" workdir="" previous=""
defaults=() given=()
for argument in "$@"; do
  case $previous in
    --config | -config) argument=$(locate "$argument") config=$argument ;;
    --workdir | -workdir) workdir=$argument ;;
  esac
  case $argument in
    --config=* | -config=*)
      config=$(locate "${argument#*=}")
      argument=${argument%%=*}=$config
      ;;
    --workdir=* | -workdir=*) workdir=${argument#*=} ;;
  esac
  given+=("$argument")
  previous=$argument
done

if [ -z "$config" ]; then
  config=${base}configs/quickstart.py
  defaults+=("--config=$config")
fi
if [ -z "$workdir" ]; then
  file=${config%%:*} variant=
  case $config in *:*) variant=-${config#*:} ;; esac
  name=$(basename "$file" .py)${variant//[^A-Za-z0-9._-]/-}
  defaults+=("--workdir=${base}runs/$name")
fi

extras=()
more=()
IFS=, read -r -a more <<<"${EXTRAS:-}"
if [ -f "${config%%:*}" ]; then
  read -r -a extras <<<"$(sed -n 's/^# extras: *//p' "${config%%:*}" | head -n 1)"
fi

prepare ${extras[@]+"${extras[@]}"} ${more[@]+"${more[@]}"}
exec "$RUNNER" -m seed_jax.main ${defaults[@]+"${defaults[@]}"} ${given[@]+"${given[@]}"}
