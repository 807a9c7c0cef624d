#!/usr/bin/env bash
# Lint and tests, with their own set-up. Extra arguments go to pytest, from any folder:
#
#   bash launch/test.sh                              all but the long tests, a file at a time on each of up to four cores
#   bash launch/test.sh -m long                      the long ones, minutes each
#   bash launch/test.sh tests/losses_test.py -k opd  a part of it
#   bash launch/test.sh --cov                        with coverage
#
# PYTHON= chooses the interpreter, VENV= the environment's folder (see common.sh).
set -euo pipefail
# shellcheck source=launch/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare dev alfworld smollm2 libtpu
cd "$ROOT"

# Lint and tests both run, so that one call tells everything that is wrong.
lint=0
"$RUNNER" -m ruff check . || lint=1
"$RUNNER" -m ruff format --check . || lint=1

if [ $# -eq 0 ]; then
  set -- -m "not long" --durations=40 --durations-min=10
  cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
  # Every worker holds a model and eight devices: more than four are no faster and take memory.
  [ "$cores" -lt 2 ] || set -- "$@" -n "$((cores < 4 ? cores : 4))" --dist loadfile
fi

code=0
"$RUNNER" -m pytest "$@" || code=$?
[ "$lint" -eq 0 ] || say "ruff found something to mend (above)"
[ "$code" -ne 0 ] || code=$lint
exit "$code"
