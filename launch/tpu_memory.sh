#!/usr/bin/env bash
# What is remembered of a slice on this machine: part of launch/tpu_run.sh. Sourced, never run.
# shellcheck disable=SC2034,SC2153 # variables in capitals are tpu_run.sh's

# `create` and `run` write their settings down, one KEY=VALUE a line, so that `resume` needs no more than the name. Secrets are
# remembered by name only.
memory() { printf '%s' "${SEED_JAX_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/seed_jax/tpu}/$NAME"; }

can_remember() {
  [ -n "$DRY" ] || { mkdir -p "$(dirname "$(memory)")" && [ -w "$(dirname "$(memory)")" ]; } 2>/dev/null ||
    fail "cannot write $(memory), which keeps what a slice was made with; SEED_JAX_STATE=FOLDER names another place"
}

remember() {
  local file word
  [ -z "$DRY" ] || return 0
  file=$(memory)
  mkdir -p "$(dirname "$file")"
  {
    printf '%s\n' "project=$PROJECT" "zone=$ZONE" "topology=$TOPOLOGY" "extras=$EXTRAS" "python=$PYTHON_VERSION" "cache=$CACHE" \
      "runtime=$RUNTIME_VERSION"
    for word in ${REQUEST[@]+"${REQUEST[@]}"}; do printf 'request=%s\n' "$word"; done
    for word in ${ROUTE[@]+"${ROUTE[@]}"}; do printf 'route=%s\n' "$word"; done
    for word in ${SECRETS[@]+"${SECRETS[@]}"}; do printf 'secret=%s\n' "$word"; done
    for word in ${SETTINGS[@]+"${SETTINGS[@]}"}; do printf 'setting=%s\n' "$word"; done
    for word in ${PROGRAM[@]+"${PROGRAM[@]}"}; do printf 'program=%s\n' "$word"; done
  } >"$file.new"
  mv "$file.new" "$file"
}

# Fills what this command line leaves open. Lists are taken over whole or not at all. A new `run` takes over nothing of the one
# before, and a `create` that says which slice, nothing of how the last one was asked for.
recall() {
  local again=yes anew="" line request=() route=() secret=() setting=() program=()
  case $VERB in run | ssh) again="" ;; esac
  if [ -n "$ON_DEMAND" ] || [ ${#REQUEST[@]} -gt 0 ] || { [ "$VERB" = create ] && [ -n "$TOPOLOGY" ]; }; then anew=yes; fi
  if [ -f "$(memory)" ]; then recall_from "$(memory)"; fi
  outside project PROJECT "$OUTER_PROJECT"
  outside zone ZONE "$OUTER_ZONE"
  outside topology TOPOLOGY "$OUTER_TOPOLOGY"
}

# outside NAME VARIABLE VALUE: the environment's value where there is no better one.
outside() {
  if [ -z "${!2}" ]; then
    printf -v "$2" '%s' "$3"
  elif [ -n "$3" ] && [ "${!2}" != "$3" ] && [ "${GIVEN/ $1 /}" = "$GIVEN" ]; then
    warn "seed_jax: $NAME was made with --$1=${!2}, which counts, not $2=$3 of the environment (--$1=$3 would)"
  fi
}

recall_from() {
  while IFS= read -r line; do
    case $line in
      project=*) KNOWN_PROJECT=${line#*=} PROJECT=${PROJECT:-${line#*=}} ;;
      zone=*) KNOWN_ZONE=${line#*=} ZONE=${ZONE:-${line#*=}} ;;
      topology=*) TOPOLOGY=${TOPOLOGY:-${line#*=}} ;;
      extras=*) EXTRAS=${EXTRAS:-${line#*=}} ;;
      python=*) PYTHON_VERSION=${PYTHON_VERSION:-${line#*=}} ;;
      cache=*) [ -z "$again" ] || CACHE=${CACHE:-${line#*=}} ;;
      runtime=*) [ -n "$anew" ] || RUNTIME_VERSION=${RUNTIME_VERSION:-${line#*=}} ;;
      request=*) request+=("${line#*=}") ;;
      route=*) route+=("${line#*=}") ;;
      secret=*) secret+=("${line#*=}") ;;
      setting=*) setting+=("${line#*=}") ;;
      program=*) program+=("${line#*=}") ;;
    esac
  done <"$1"
  [ -n "$anew" ] || REQUEST=(${request[@]+"${request[@]}"})
  [ ${#ROUTE[@]} -gt 0 ] || ROUTE=(${route[@]+"${route[@]}"})
  [ -n "$again" ] || return 0
  [ ${#SECRETS[@]} -gt 0 ] || SECRETS=(${secret[@]+"${secret[@]}"})
  [ ${#SETTINGS[@]} -gt 0 ] || SETTINGS=(${setting[@]+"${setting[@]}"})
  [ ${#PROGRAM[@]} -gt 0 ] || PROGRAM=(${program[@]+"${program[@]}"})
}
