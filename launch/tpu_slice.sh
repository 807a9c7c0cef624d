#!/usr/bin/env bash
# The slice itself, and what one looks at it with: verbs of launch/tpu_run.sh. Sourced, never run.
# shellcheck disable=SC2034,SC2153 # variables in capitals are tpu_lib.sh's

# create: asks for the slice once, and waits until it is ready; what is there is taken, what is gone is asked for anew.
create() {
  local now asked="" told="" odd=0 begun=$SECONDS pause=$((BACKOFF * 6))
  [ -z "$DRY" ] || DRY_STATE=NONE DRY_NODE=NONE
  while :; do
    if [ -n "$asked$told" ] || [ "${restarts:-0}" -gt 0 ]; then look_on; else look || explain "cannot look at $NAME"; fi
    same_type
    case $STATE/$NODE in
      ACTIVE/READY)
        if [ "$VERB" = create ]; then phase ""; else phase setup; fi
        if [ -n "$asked" ]; then say "$NAME is ready: $WORKERS workers"; else say "$NAME exists and is ready: $WORKERS workers"; fi
        return 0
        ;;
      NONE/NONE)
        [ -z "$asked" ] || fail "the request for $NAME has vanished; was it deleted elsewhere?"
        request
        asked=yes
        [ "$WAIT" != 0 ] || return 0
        continue
        ;;
      NONE/*)
        half_created
        ;;
      FAILED/* | SUSPENDED/* | ACTIVE/PREEMPTED | ACTIVE/TERMINATED | ACTIVE/STOPPED)
        if [ -n "$asked" ]; then
          cloud compute tpus queued-resources describe "$NAME" "${WHERE[@]}" '--format=value(state.failedData.error.message)' || true
          ERR=${OUT:-request $STATE, slice $NODE}
          if [ -n "$KEEP_ALIVE" ] && { passing || no_capacity; }; then
            say "the request for $NAME was not met ($(head -n 1 <<<"$ERR" | cut -c 1-120)); asking again in $pause s"
            discard
            sleep "$pause"
            asked="" odd=0 pause=$((pause * 2 < 600 ? pause * 2 : 600))
            continue
          fi
          explain "the request for $NAME was not met"
        fi
        discard
        odd=0
        continue
        ;;
      ACTIVE/NONE) # its slice is being entered in the books, or was deleted by hand
        odd=$((odd + 1))
        if [ "$odd" -ge 5 ]; then
          say "half-created: the request for $NAME is ACTIVE and there is no slice"
          discard
          odd=0
          continue
        fi
        ;;
    esac
    if [ "$WAIT" = 0 ]; then
      say "$NAME exists: request $STATE, slice $NODE"
      return 0
    fi
    [ -z "$WAIT" ] || [ $((SECONDS - begun)) -lt "$WAIT" ] ||
      fail "$NAME is still not ready after $WAIT s (request $STATE, slice $NODE); it stays in the queue: the same command waits on, delete gives it up"
    if [ "$told" != "$STATE/$NODE" ]; then
      told=$STATE/$NODE
      phase queue
      date '+%H:%M' >"$TEMP/now"
      take now "$TEMP/now"
      say "waiting for $NAME: request $STATE, slice $NODE ($now)"
    fi
    sleep "$POLL"
  done
}

request() {
  local kind="on demand"
  [ -n "$TOPOLOGY" ] || usage_error "which slice? give --topology=GENERATION:SHAPE, for example --topology=v5e:4x4"
  slice "$TOPOLOGY"
  can_remember
  tell_unchecked
  case " ${REQUEST[*]-} " in *" --spot "*) kind=spot ;; *" --reserved "*) kind=reserved ;; esac
  say "asking for $NAME: $TYPE ($TOPOLOGY, $CHIPS chips, $WORKERS workers, $kind) in $ZONE of $PROJECT"
  phase queue
  steady "asking for $NAME" cloud compute tpus queued-resources create "$NAME" "${WHERE[@]}" --node-id="$NAME" --accelerator-type="$TYPE" \
    --runtime-version="${RUNTIME_VERSION:-$RUNTIME}" ${REQUEST[@]+"${REQUEST[@]}"} ||
    case $ERR in *ALREADY_EXISTS*) ;; *) explain "the slice cannot be asked for" ;; esac
  remember
  DRY_STATE=ACTIVE DRY_NODE=READY
}

discard() {
  say "$NAME is gone (request $STATE, slice $NODE): deleting the old request"
  steady "deleting the request" cloud compute tpus queued-resources delete "$NAME" "${WHERE[@]}" --force || missing || explain "cannot delete $NAME"
}

delete() {
  look || explain "cannot look at $NAME"
  if [ "$NODE" = READY ] && [ -z "$FORCE$DRY" ]; then
    if glance && { [ "$RESULT" = running ] || [ "$RESULT" = mixed ]; }; then
      fail "a run is in progress on $NAME; stop it first (it writes a checkpoint), or delete --force"
    fi
  fi
  case $STATE/$NODE in
    NONE/NONE) say "there is no slice $NAME in $ZONE of $PROJECT" ;;
    NONE/*) steady "deleting $NAME" cloud compute tpus tpu-vm delete "$NAME" "${WHERE[@]}" || missing || explain "cannot delete $NAME" ;;
    *) steady "deleting $NAME" cloud compute tpus queued-resources delete "$NAME" "${WHERE[@]}" --force || missing || explain "cannot delete $NAME" ;;
  esac
  [ "$STATE/$NODE" = NONE/NONE ] || say "$NAME is deleted"
  [ -z "$KNOWN_ZONE" ] || [ "$KNOWN_PROJECT/$KNOWN_ZONE" = "$PROJECT/$ZONE" ] ||
    fail "the slice that was made as $NAME is in $KNOWN_ZONE of $KNOWN_PROJECT, and is not deleted by this; leave --zone and --project out"
  [ -n "$DRY" ] || rm -f "$(memory)"
}

status() {
  local worker print state code workdir places
  look || explain "cannot look at $NAME"
  say "$NAME in $ZONE of $PROJECT: request $STATE, slice $NODE${TYPE_THERE:+, $TYPE_THERE}"
  [ "$NODE" = READY ] || return 0
  probe
  places=$(column 7- | grep -v '^-$' | sort -u || true)
  if [ -n "$places" ] && [ "$(wc -l <<<"$places")" -eq 1 ]; then say "the run in $places"; else places=""; fi
  while read -r _ worker print state code _ workdir; do
    case $code in
      -) code="" ;;
      75) code=", exit code 75 (checkpoint written; resume)" ;;
      76) code=", exit code 76 (another worker failed or is gone)" ;;
      *) code=", exit code $code" ;;
    esac
    if [ "$workdir" = - ] || [ -n "$places" ]; then workdir=""; else workdir=", $workdir"; fi
    [ "$print" = none ] && print=", not set up" || print=""
    printf 'worker %s: %s\n' "$worker" "$state$code$workdir$print"
  done <<<"$LINES_OF_WORKERS"
}

# logs goes straight to the terminal; a connection that breaks while it follows is made again.
logs() {
  local code try=1 pause=$BACKOFF begun
  need_slice
  ssh_to "${WORKER:-0}" "$THERE; $REMOTE logs $LINES_ASKED ${FOLLOW:+follow}"
  while :; do
    code=0 begun=$SECONDS
    if [ -n "$DRY" ]; then
      show gcloud "${CALL[@]}" --quiet
    else
      gcloud "${CALL[@]}" --quiet </dev/null 2>"$TEMP/err" || code=$?
    fi
    [ "$code" -ne 0 ] || return 0
    ERR=$(cat "$TEMP/err")
    refused "$code" || explain "no logs"
    [ $((SECONDS - begun)) -lt 60 ] || try=1 pause=$BACKOFF
    [ "$try" -lt "$SSH_TRIES" ] || fail "logs: ssh was refused $SSH_TRIES times; look with: status"
    sleep "$pause"
    try=$((try + 1)) pause=$((pause * 2))
  done
}

shell() {
  local word line=""
  need_slice
  for word in ${PROGRAM[@]+"${PROGRAM[@]}"}; do line="$line$(printf '%q' "$word") "; done
  ssh_to "${WORKER:-0}" "${line% }"
  if [ -n "$DRY" ]; then show gcloud "${CALL[@]}"; else exec gcloud "${CALL[@]}"; fi
}

find_workdir() {
  local item
  WORKDIR=""
  for item in ${PROGRAM[@]+"${PROGRAM[@]}"}; do case $item in --workdir=*) WORKDIR=${item#*=} ;; esac done
  [ -n "$WORKDIR" ] || usage_error "fetch from where? give --workdir=gs://BUCKET/FOLDER"
  WORKDIR=${WORKDIR%/}
}

fetch() {
  : "${TO:=$ROOT/runs/${WORKDIR##*/}}"
  [ -n "$DRY" ] || mkdir -p "$TO" || fail "cannot make the folder $TO"
  case $WORKDIR in
    gs://*) fetch_bucket ;;
    *)
      need_slice
      ssh_to 0 "$THERE; $REMOTE pack $(printf '%q' "$WORKDIR") ${ALL:+all}"
      if [ -n "$DRY" ]; then
        show gcloud "${CALL[@]}" --quiet
      elif ! gcloud "${CALL[@]}" --quiet </dev/null 2>"$TEMP/err" | tar -xf - -C "$TO" 2>/dev/null; then
        ERR=$(cat "$TEMP/err")
        explain "cannot fetch $WORKDIR"
      fi
      ;;
  esac
  [ -n "$DRY" ] || say "the results of $WORKDIR are in $TO"
}

fetch_bucket() {
  if [ -n "$ALL" ]; then
    cloud storage rsync "$WORKDIR" "$TO" --recursive || explain "cannot fetch $WORKDIR"
    return 0
  fi
  # without --recursive: the files right in the work directory, that is report, metrics and the results of stages
  cloud storage rsync "$WORKDIR" "$TO" || explain "cannot fetch $WORKDIR"
  if cloud storage ls "$WORKDIR/policy/final/"; then
    [ -n "$DRY" ] || mkdir -p "$TO/policy/final"
    cloud storage rsync "$WORKDIR/policy/final" "$TO/policy/final" --recursive || explain "cannot fetch the policy"
  else
    say "no final policy yet"
  fi
}
