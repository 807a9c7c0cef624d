#!/usr/bin/env bash
# The program on the workers of a slice: installing, starting, watching, starting again. Verbs of launch/tpu_run.sh; sourced, never
# run.
# shellcheck disable=SC2034,SC2153 # variables in capitals are tpu_lib.sh's

# idle ends where a run is in progress.
idle() {
  probe
  if column 4 | grep -qx running; then
    fail "a run is in progress on $NAME in $(column 7- | grep -m 1 -v '^-$'); one at a time: watch it (logs --follow), or stop it first"
  fi
}

# setup installs where the lines of the workers that `idle` has read say that this code is not there.
setup() {
  local print unpack
  if [ ! -s "$TEMP/print" ]; then # packed once: --keep-alive goes on with the code that it began with
    list_files
    [ -n "$DRY" ] || tar -czf "$TEMP/seed_jax.tgz" -C "$ROOT" -T "$TEMP/files" || fail "cannot pack $ROOT"
    fingerprint "$EXTRAS" >"$TEMP/print"
  fi
  print=$(cat "$TEMP/print")
  if [ "$(column 3 | sort -u)" = "$print" ]; then
    say "$NAME is set up already"
    return 0
  fi
  phase setup
  tell_kept
  say "sending $(wc -l <"$TEMP/files" | tr -d ' ') files to $WORKERS workers of $NAME"
  EXPECT=""
  stubborn "sending the code" ${TRACK:+"$TRACK"} compute tpus tpu-vm scp "$TEMP/seed_jax.tgz" "$NAME:seed_jax-$print.tgz" "${WHERE[@]}" \
    ${ROUTE[@]+"${ROUTE[@]}"} --worker=all || explain "the code cannot be sent"
  say "installing (minutes the first time)"
  unpack="mkdir -p ~/.seed_jax && tar -xzf ~/seed_jax-$print.tgz -C ~/.seed_jax ./launch/tpu_worker.sh"
  on_workers "installing" all "$unpack && $REMOTE setup $print $PYTHON_VERSION ${EXTRAS//,/ }" || explain "the installation failed"
}

# Secrets that are named only go over stdin, as the workers' `secrets` reads them: never on a command line, never printed.
secret_names() {
  local item
  for item in ${SECRETS[@]+"${SECRETS[@]}"}; do case $item in *=*) ;; *) echo "$item" ;; esac done
}
secret_values() {
  local item
  for item in $(secret_names); do printf '%s=%s\0' "$item" "${!item}"; done
}

# One gcloud for each worker, since the workers of one gcloud would share its stdin.
send_secrets() {
  local id=$1 worker count pid pids=()
  count=$(secret_names | wc -l | tr -d ' ')
  [ "$count" -gt 0 ] || return 0
  for ((worker = 0; worker < WORKERS; worker++)); do
    send_secrets_to "$worker" "$id" "$count" &
    pids+=($!)
    if [ -n "$DRY" ] || [ ${#pids[@]} -ge 16 ] || [ "$((worker + 1))" -eq "$WORKERS" ]; then
      for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
      pids=()
    fi
  done
}

send_secrets_to() {
  local TEMP=$TEMP/$1 FEED=secret_values
  mkdir -p "$TEMP"
  [ -z "$DRY" ] || echo "# stdin of the next command, from this shell's environment: $(secret_names | tr '\n' ' ')"
  on_workers "sending secrets" "$1" "$REMOTE secrets $2 $3" || explain "the secrets cannot be sent"
}

run() {
  local id item command place
  need_slice
  same_type
  case $WORKERS:$WORKDIR in
    1:* | *:gs://*) ;;
    *) fail "$NAME has $WORKERS workers, which share the work directory: it must be gs://BUCKET/FOLDER, not $WORKDIR" ;;
  esac
  idle
  can_remember
  remember
  setup
  for item in ${SETTINGS[@]+"${SETTINGS[@]}"}; do
    case $item in --data=*) place=${item#--data=} ;; *) continue ;; esac
    say "copying ${place#*=} to the workers (what is there already stays)"
    on_workers "copying data" all "$REMOTE data ${place%%=*} $(printf '%q' "${place#*=}")" || explain "the data cannot be copied"
  done
  tell_unchecked
  id=$(date -u +%Y%m%d-%H%M%S)-$$-${restarts:-0} # of this start alone: two restarts may fall into one second
  send_secrets "$id"
  command="$REMOTE start $id --code=$(cat "$TEMP/print")"
  [ -z "$CACHE" ] || command="$command $(printf '%q' "--cache=$CACHE")"
  for item in ${SECRETS[@]+"${SECRETS[@]}"}; do
    case $item in *=*) command="$command $(printf '%q' "--secret=$item")" ;; esac
  done
  for item in ${SETTINGS[@]+"${SETTINGS[@]}"}; do
    case $item in --data=*) command="$command ${item%%=gs://*}" ;; *) command="$command $(printf '%q' "$item")" ;; esac
  done
  command="$command --"
  for item in "${PROGRAM[@]}"; do command="$command $(printf '%q' "$item")"; done
  phase start
  [ "$WORKERS" -eq 1 ] || start_on 0 # it decides between two that start at once, so that the slice is never split between them
  start_on all
  phase ""
  say "run $id started on $WORKERS workers of $NAME in $WORKDIR"
  [ -n "$KEEP_ALIVE" ] || say "watch it: bash launch/tpu_run.sh logs --follow --name=$NAME; results: bash launch/tpu_run.sh fetch --name=$NAME"
}

# start_on 0|all runs `command` there, and ends unless it is this run, `id`, that has begun.
start_on() {
  on_workers "starting" "$1" "$command" || explain "the program cannot be started"
  [ -z "$DRY" ] || return 0
  read_lines
  ! column 6 | grep -qx -e - || fail "the program did not begin on all workers of $NAME; look with: status, logs --worker=all"
  [ "$(column 6 | sort -u)" = "$id" ] || fail "another run was started on $NAME at the same time; look with: status"
}

stop() {
  local left
  need_slice
  phase stop
  on_workers "stopping" all "${PROBE/ status;/ stop $GRACE;}" || explain "cannot stop the run"
  [ -z "$DRY" ] || return 0
  read_lines
  left=$(awk '$4 == "running" { print $2 }' <<<"$LINES_OF_WORKERS" | paste -sd ' ' -)
  [ -z "$left" ] || fail "a program is still running on worker $left of $NAME; look with: status, logs; stop asks again"
  say "no run is in progress on $NAME; the slice stays and costs until: bash launch/tpu_run.sh delete --name=$NAME"
}

# judge sets RESULT from the workers' lines: running, finished, stopped, preempted, failed (with CODE and WORST), or mixed (some have
# ended, some are still at it). The program says 75 when it was asked to stop (143: before it could listen), and 76 when another worker
# failed or is gone: of such codes the first that says more counts.
judge() {
  local states codes
  states=$(column 4 | sort -u | tr '\n' ' ') codes=$(column 5)
  CODE=0 WORST=0
  case " $states" in
    " running ") RESULT=running ;;
    *" running "*) RESULT=mixed ;;
    *" stopped "*) RESULT=stopped ;;
    " ended ") RESULT=failed ;;
    *) RESULT=preempted ;; # lost or idle: the machine went away, or is a new one
  esac
  [ "$RESULT" = failed ] || return 0
  if [ "$(sort -u <<<"$codes")" = 0 ]; then
    RESULT=finished
  elif grep -qxE '75|143' <<<"$codes" || ! grep -qvxE '0|76' <<<"$codes"; then
    RESULT=preempted
  else
    read -r WORST CODE <<<"$(awk '$5 != 0 && $5 != 76 { print $2, $5; exit }' <<<"$LINES_OF_WORKERS")"
  fi
}

# glance: probe and judge without ending the script; 1 where not all workers answer.
glance() {
  (trap 'exit 130' INT TERM && SSH_TRIES=1 && probe >/dev/null 2>&1 && printf '%s\n' "$LINES_OF_WORKERS" >"$TEMP/lines") || return 1
  take LINES_OF_WORKERS "$TEMP/lines"
  judge
}

# watch looks at a run until it is over: RESULT as of judge, or gone, where somebody has deleted the request (a preempted one stays).
# A look that fails is repeated, since this machine may be offline for a while.
watch() {
  local mixed=0 blind=0 offline=0
  while [ "$blind" -lt 20 ] && [ "$offline" -lt "$OFFLINE" ]; do
    sleep "$POLL"
    offline=$((offline + 1))
    look_once || continue
    offline=0
    if [ "$STATE/$NODE" != ACTIVE/READY ]; then
      RESULT=preempted
      [ "$STATE" != NONE ] || RESULT=gone
      return 0
    fi
    blind=$((blind + 1))
    glance || continue
    blind=0
    case $RESULT in
      running) mixed=0 ;;
      mixed) # the others should notice within a minute that a worker has ended; they are helped after some looks
        mixed=$((mixed + 1))
        [ "$mixed" -ne "$PATIENCE" ] || (on_workers "stopping" all "$REMOTE stop 30 quiet") || true
        ;;
      *) return 0 ;;
    esac
  done
  fail "$NAME could not be looked at $((blind + offline)) times (request $STATE, slice $NODE); the run may go on: look with status, go on with resume --keep-alive"
}

# Starts the run, or takes up one in the same work directory that is in progress (this machine may have been asleep).
begin() {
  if glance && { [ "$RESULT" = running ] || [ "$RESULT" = mixed ]; } && column 7- | grep -qxF -- "$WORKDIR"; then
    say "the run in $WORKDIR is in progress; watching it"
    remember
  else
    run
  fi
}

keep_alive() {
  local restarts=0 pause=$((BACKOFF * 6)) code unreachable=0
  while :; do
    create
    code=0
    (trap 'exit 130' INT TERM && begin) || code=$?
    [ -z "$DRY" ] || return "$code"
    if [ "$code" -eq 0 ]; then
      unreachable=0
      phase watch
      watch
      phase ""
    else # an error of its own, or the slice has gone in the meantime, which its state may say a little later
      unreachable=$((unreachable + 1))
      look_on
      [ "$STATE/$NODE" != ACTIVE/READY ] || { [ "$code" -eq "$UNREACHABLE" ] && [ "$unreachable" -lt 5 ]; } || exit "$code"
      RESULT=preempted
      [ "$STATE" != NONE ] || RESULT=gone
    fi
    case $RESULT in
      finished)
        say "the run in $WORKDIR is done; fetch brings the results, delete gives the slice back"
        return 0
        ;;
      stopped)
        say "the run was stopped; resume goes on"
        return 0
        ;;
      gone) fail "$NAME was deleted; this command again, with --topology=${TOPOLOGY:-...}, makes a new slice and goes on in $WORKDIR" ;;
      failed)
        if on_workers "reading the log" "$WORST" "$REMOTE logs 20"; then printf '%s\n' "$OUT" >&2; fi
        warn "error: the program failed on worker $WORST of $NAME with exit code $CODE; its last words are above"
        exit "$CODE"
        ;;
    esac
    restarts=$((restarts + 1))
    [ "$restarts" -le "$MAX_RESTARTS" ] || fail "preempted $restarts times, more than --max-restarts=$MAX_RESTARTS; resume goes on"
    say "preempted (request $STATE, slice $NODE); restart $restarts"
    if [ "$STATE/$NODE" = ACTIVE/READY ]; then # a notice goes before the end of the machine, or passes
      sleep "$pause"
      pause=$((pause * 2 < 300 ? pause * 2 : 300))
    else
      pause=$((BACKOFF * 6))
    fi
  done
}
