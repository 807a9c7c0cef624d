#!/usr/bin/env bash
# What launch/tpu_run.sh is made of: the table of slices, calls of gcloud, their errors in one line, and the workers. Sourced, never
# run. A function leaves its answer in a variable in capitals (OUT, ERR, STATE, NODE, WORKERS), so that `fail` ends the script from
# wherever it is called.
# shellcheck disable=SC2034

SSH_TRIES=${TPU_SSH_TRIES:-6} # attempts at a worker that refuses
BACKOFF=${TPU_BACKOFF:-5}     # seconds before the second attempt; doubled each time, at most 60
POLL=${TPU_POLL:-30}          # seconds between looks at a slice or a run
PATIENCE=${TPU_PATIENCE:-10}  # looks at a run of which some workers have ended, before the others are helped to
FILE_LIMIT=${TPU_FILE_LIMIT:-5}    # MiB of a file that is sent
TOTAL_LIMIT=${TPU_TOTAL_LIMIT:-64} # MiB of all of them
OFFLINE=240                   # looks, or attempts, that fail before one who waits for a slice gives up
UNREACHABLE=69                # our exit code where ssh was refused to the end
OUT="" ERR="" STATE="" NODE="" WORKERS=0 EXPECT="" FEED=""

say() { printf 'seed_jax%s: %s\n' "${DRY:+ (dry run)}" "$*"; }
warn() { printf '%s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
usage_error() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# phase WHAT notes what an interruption would leave behind; in a file, since some of the work is done in subshells.
phase() { printf '%s' "$1" >"$TEMP/phase"; }
interrupted() {
  case $(cat "$TEMP/phase" 2>/dev/null || true) in
    queue) warn "interrupted: the request for $NAME stays, and the slice costs once it is ready; create waits on, delete gives it up" ;;
    setup) warn "interrupted before the program was started; $NAME stays and costs: resume goes on, delete gives it back" ;;
    start) warn "interrupted while the program was being started: status says whether it runs, resume goes on, delete gives $NAME back" ;;
    watch) warn "no longer watching; the run goes on: resume --keep-alive watches again, stop ends it" ;;
    stop) warn "interrupted: the program may still be running on $NAME; status looks, stop asks again" ;;
    *) warn "interrupted" ;;
  esac
  exit 130
}

# ---------------------------------------------------------------- the table of slices

# slice GENERATION:SHAPE sets TYPE (what gcloud calls it), RUNTIME (the image), CHIPS and WORKERS (virtual machines). The shapes are
# those that the accelerator type alone stands for, up to 512 chips. v4 and v5p are counted in cores, two a chip.
slice() {
  local cores=1 most=4 prefix shapes
  case $1 in
    v4:*) prefix=v4 cores=2 RUNTIME=tpu-ubuntu2204-base shapes="2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8" ;;
    v5p:*) prefix=v5p cores=2 RUNTIME=v2-alpha-tpuv5 shapes="2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8" ;;
    v5e:*) prefix=v5litepod most=8 RUNTIME=v2-alpha-tpuv5-lite shapes="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16" ;;
    v6e:*) prefix=v6e most=8 RUNTIME=v2-alpha-tpuv6e shapes="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16" ;;
    *) usage_error "unknown topology '$1'; write GENERATION:SHAPE with v4, v5e, v5p or v6e, for example v5e:4x4" ;;
  esac
  case " $shapes " in
    *" ${1#*:} "*) ;;
    *) usage_error "unknown topology '$1'; ${1%%:*} comes as $shapes" ;;
  esac
  local product=${1#*:}
  CHIPS=$((${product//x/*}))
  TYPE=$prefix-$((CHIPS * cores))
  # one machine where the chips fit into one (8 of v5e and v6e), else 4 chips on each
  if [ "$CHIPS" -le "$most" ]; then WORKERS=1; else WORKERS=$((CHIPS / 4)); fi
}

# ---------------------------------------------------------------- gcloud

# Prints a command as it can be pasted into a shell.
show() {
  local word line="" quote="'" escaped="'\\''"
  for word in "$@"; do
    case $word in "" | *[!A-Za-z0-9_./:=,@+-]*) word="'${word//$quote/$escaped}'" ;; esac
    line="$line $word"
  done
  printf '%s\n' "${line# }"
}

# take VARIABLE FILE: the text without its last line breaks. A trap that comes while bash is in a $(...) fails, so that what waits
# for hours has none.
take() {
  local text=""
  IFS= read -r -d '' text <"$2" || true
  while [ "${text%$'\n'}" != "$text" ]; do text=${text%$'\n'}; done
  printf -v "$1" '%s' "$text"
}

# cloud ARGUMENT...: gcloud without questions; the answer in OUT, complaints in ERR. Its stdin is what the function named by FEED
# writes, or empty: ssh would eat ours.
cloud() {
  local code=0
  OUT="" ERR=""
  if [ -n "$DRY" ]; then
    show gcloud "$@" --quiet
    return 0
  fi
  ${FEED:-:} | gcloud "$@" --quiet >"$TEMP/out" 2>"$TEMP/err" || code=$?
  take OUT "$TEMP/out"
  take ERR "$TEMP/err"
  return "$code"
}

# explain WHAT: ends with one line for what gcloud said last, and what to do about it.
explain() {
  local said ERR=$ERR
  said=$(grep -m 1 '^error: ' <<<"$ERR" || true) # of a worker: written for the user
  [ -z "$said" ] || fail "$1: ${said#error: }"
  # a warning explains nothing: what stands before the error, or in lines of its own after it
  said=$(sed -n '/ERROR/,$p' <<<"$ERR" | sed '/^WARNING/,/^$/d')
  [ -z "$said" ] || ERR=$said
  said=$(tr -s ' \n' ' ' <<<"$said") # an error may go over several lines
  said=${said# }
  [ -n "$said" ] || said=$(grep -v '^ *$' <<<"$ERR" | tail -n 1 || true)
  said="gcloud said: ${said:0:300}"
  said=${said% }
  case $ERR in
    *"not present in the SSH agent"*)
      fail "$1: your ssh key is not in the agent; run: ssh-add ~/.ssh/google_compute_engine"
      ;;
    *SERVICE_DISABLED* | *"has not been used in project"*)
      fail "$1: the project has no Cloud TPU API; run: gcloud services enable tpu.googleapis.com --project=$PROJECT"
      ;;
    *[Qq]uota* | *RESOURCE_EXHAUSTED*)
      fail "$1: quota: project $PROJECT may not have these chips in $ZONE; ask for TPU quota in the console (IAM, Quotas; spot and on-demand count apart) or choose another --zone ($said)"
      ;;
    *"no more capacity"* | *"reserved capacity"* | *stockout*)
      fail "$1: no capacity in $ZONE now; try later, --spot, or another --zone ($said)"
      ;;
    *PERMISSION_DENIED* | *"does not have permission"*)
      fail "$1: not allowed: your account needs roles/tpu.admin and roles/iam.serviceAccountUser in $PROJECT ($said)"
      ;;
    *"ccelerator type"* | *"cceleratorType"*)
      fail "$1: $ZONE has no ${TYPE:-such slice}; see: gcloud compute tpus accelerator-types list --zone=$ZONE ($said)"
      ;;
    *"gcloud auth login"* | *"re-auth"* | *"Reauthentication"*) fail "not logged in; run: gcloud auth login" ;;
    *) fail "$1 ($said)" ;;
  esac
}

# Whether what gcloud said last may be over in a minute: the service or the way to it, not the request. After a preemption also a
# quota, in which the slice that is gone may still count.
passing() {
  local faults='UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|(^|[^A-Z_])INTERNAL([^A-Z_]|$)|[Ii]nternal error|[Tt]imed out|[Tt]emporar|resolve|resolution'
  faults="$faults|[Cc]onnection (reset|refused|aborted|error)|[Uu]nreachable|Unable to find the server|Max retries|SSLError|EOF occurred"
  faults="$faults|([Hh][Tt][Tt][Pp]|[Ee]rror|[Cc]ode|[Ss]tatus)[ =:<\"]*(429|50[0234])"
  [ "${restarts:-0}" -eq 0 ] || faults="$faults|[Qq]uota|RESOURCE_EXHAUSTED"
  ! grep -q '^error: ' <<<"$ERR" && grep -v WARNING <<<"$ERR" | grep -v 'quota project' | grep -E "$faults" >/dev/null
}

# steady WHAT COMMAND...: a command that calls gcloud, tried again with growing pauses while its faults are passing ones; whoever
# keeps a run alive has hours for it.
steady() {
  local what=$1 try=1 pause=$BACKOFF tries=$SSH_TRIES
  [ -z "$KEEP_ALIVE" ] || tries=$OFFLINE
  shift
  until "$@"; do
    if ! passing || [ "$try" -ge "$tries" ]; then return 1; fi
    warn "seed_jax: $what failed ($(tail -n 1 <<<"$ERR" | cut -c 1-120)); attempt $((try + 1)) of $tries in $pause s"
    sleep "$pause"
    pause=$((pause * 2 < 60 ? pause * 2 : 60)) try=$((try + 1))
  done
}

no_capacity() { case $ERR in *"no more capacity"* | *"reserved capacity"* | *stockout*) ;; *) return 1 ;; esac }
missing() { case $ERR in *NOT_FOUND* | *"not found"*) ;; *) return 1 ;; esac }
refused() {
  ! grep -q '^error: ' <<<"$ERR" || return 1 # a worker has spoken
  case $1:$ERR in
    255:* | *"return code [255]"* | *"onnection refused"* | *"timed out"* | *"onnection closed"* | *"onnection reset"*) ;;
    *) return 1 ;;
  esac
}

# Finds gcloud, the account, PROJECT and ZONE, or says in one line what is missing.
check() {
  [ -n "$NAME" ] || usage_error "the slice has no name; give --name=NAME or set TPU_NAME"
  case $NAME in
    *[!a-z0-9-]* | [!a-z]* | *-) usage_error "the name '$NAME' will not do: small letters, digits and dashes, a letter first" ;;
  esac
  if [ -z "$DRY" ]; then
    command -v gcloud >/dev/null 2>&1 ||
      fail "gcloud is missing; install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install) and run: gcloud init"
    cloud auth list --filter=status:ACTIVE '--format=value(account)' || explain "gcloud does not work"
    [ -n "$OUT" ] || fail "not logged in; run: gcloud auth login"
    if [ -z "$PROJECT" ]; then
      cloud config get-value project || true
      PROJECT=${OUT/"(unset)"/}
    fi
    if [ -z "$ZONE" ]; then
      cloud config get-value compute/zone || true
      ZONE=${OUT/"(unset)"/}
    fi
  fi
  [ -n "$PROJECT" ] || fail "no project; give --project=ID, set PROJECT, or run: gcloud config set project ID"
  [ -n "$ZONE" ] || fail "no zone; give --zone=ZONE, set ZONE, or run: gcloud config set compute/zone ZONE"
  WHERE=(--project="$PROJECT" --zone="$ZONE")
}

look() { steady "looking at $NAME" look_once; }

# look_on: a look at what is there whether or not we look. Any fault is waited out for OFFLINE looks.
look_on() {
  local missed=0
  until look_once; do
    missed=$((missed + 1))
    [ "$missed" -lt "$OFFLINE" ] || explain "$NAME could not be looked at $missed times; what was asked for stays (status looks, delete gives it up)"
    [ -z "$WAIT" ] || [ $((SECONDS - ${begun:-$SECONDS})) -lt "$WAIT" ] || explain "$NAME could not be looked at within $WAIT s; it stays in the queue"
    [ "$missed" -ne 1 ] || warn "seed_jax: cannot look at $NAME ($(tail -n 1 <<<"$ERR" | cut -c 1-120)); looking on every $POLL s"
    sleep "$POLL"
  done
}

# look_once: STATE of the queued resource (NONE: there is none), its TYPE_THERE, NODE (the slice itself) and WORKERS. 1: gcloud failed.
look_once() {
  local rest
  STATE="" NODE="" TYPE_THERE=""
  if cloud compute tpus queued-resources describe "$NAME" "${WHERE[@]}" \
    '--format=value(state.state,tpu.nodeSpec[0].node.acceleratorType)'; then
    read -r STATE TYPE_THERE <<<"$OUT" || true
  elif missing; then
    STATE=NONE
  else
    return 1
  fi
  if cloud compute tpus tpu-vm describe "$NAME" "${WHERE[@]}" '--format=value(state,networkEndpoints.len())'; then
    read -r NODE rest <<<"$OUT" || true
    [ -z "$rest" ] || WORKERS=$rest
  elif missing; then
    NODE=NONE
  else
    return 1
  fi
  if [ -n "$DRY" ]; then
    STATE=${DRY_STATE:-ACTIVE} NODE=${DRY_NODE:-READY}
    if [ -n "$TOPOLOGY" ]; then slice "$TOPOLOGY"; else WORKERS=1; fi
  fi
}

half_created() {
  fail "half-created: a TPU VM $NAME ($NODE) exists without a queued resource; choose another --name or run: bash launch/tpu_run.sh delete --name=$NAME"
}

# Ends unless the slice is there and ready.
need_slice() {
  look || explain "cannot look at $NAME"
  case $STATE/$NODE in
    NONE/READY)
      case $VERB in run | setup) half_created ;; esac
      ;;
    */READY) ;;
    NONE/NONE) fail "there is no slice $NAME in $ZONE of $PROJECT; run: bash launch/tpu_run.sh create --name=$NAME" ;;
    SUSPEND*/* | FAILED/* | */PREEMPTED | */TERMINATED)
      fail "$NAME is gone (request $STATE, slice $NODE); run: bash launch/tpu_run.sh resume --name=$NAME"
      ;;
    *) fail "$NAME is not ready (request $STATE, slice $NODE); wait for it with: bash launch/tpu_run.sh create --name=$NAME" ;;
  esac
}

# ---------------------------------------------------------------- the workers

# stubborn WHAT COMMAND...: a cloud call through ssh, tried again with growing pauses where ssh is refused or a worker is late. The
# command must bear a repeat. Ends when the attempts are used up; returns the code of any other failure.
stubborn() {
  local what=$1 try=1 pause=$BACKOFF code late
  shift
  while :; do
    code=0
    cloud "$@" || code=$?
    late=$(late_workers)
    [ "$code" -ne 0 ] || [ -n "$late" ] || return 0
    if [ "$code" -ne 0 ] && ! refused "$code" && ! passing; then return "$code"; fi
    if [ "$try" -ge "$SSH_TRIES" ]; then
      warn "error: $what: ${late:+worker $late of $NAME did not answer: }ssh was refused $SSH_TRIES times; is port 22 open (firewall rule default-allow-ssh, or --iap), and is the machine up (status)?$(last_words)"
      exit "$UNREACHABLE"
    fi
    warn "seed_jax: $what: ${late:+worker $late did not answer, }ssh was refused; attempt $((try + 1)) of $SSH_TRIES in $pause s"
    sleep "$pause"
    pause=$((pause * 2 < 60 ? pause * 2 : 60)) try=$((try + 1))
  done
}

last_words() {
  local said
  said=$(grep -iE 'refused|denied|timed out|closed|reset|\[255\]' <<<"$ERR" | tail -n 1 || true)
  [ -z "$said" ] || printf ' (gcloud said: %s)' "${said:0:200}"
}

# The numbers of the workers that owe an @worker line, for commands that make them write one.
late_workers() {
  local worker late=""
  [ -n "$EXPECT" ] && [ -z "$DRY" ] || return 0
  for ((worker = 0; worker < WORKERS; worker++)); do
    grep -q "^@worker $worker " <<<"$OUT" || late="$late${late:+, }$worker"
  done
  printf '%s' "$late"
}

# ssh_to WHICH COMMAND sets CALL, what gcloud is called with for a command (empty: a shell) on one worker or on `all`.
ssh_to() {
  CALL=(${TRACK:+"$TRACK"} compute tpus tpu-vm ssh "$NAME" "${WHERE[@]}" ${ROUTE[@]+"${ROUTE[@]}"} --worker="$1" ${2:+"--command=$2"})
}

# on_workers WHAT WHICH COMMAND runs a command on one worker or on `all`; one @worker line of each is expected from all.
on_workers() {
  EXPECT=""
  [ "$2" != all ] || EXPECT=yes
  ssh_to "$2" "$3"
  stubborn "$1" "${CALL[@]}"
}

REMOTE="bash ~/.seed_jax/launch/tpu_worker.sh"
THERE="[ -f ~/.seed_jax/launch/tpu_worker.sh ] || { echo 'error: nothing is set up here yet; run does it' >&2; exit 1; }"
# Every worker says what it is doing; one without our code says `none`.
# shellcheck disable=SC2016 # expanded there
PROBE='w=~/.seed_jax/launch/tpu_worker.sh; if [ -f $w ]; then bash $w status; exit; fi
h=$(hostname); h=${h##*-w-}; echo "@worker ${h%%.*} none idle - - -"'

probe() {
  on_workers "asking the workers" all "$PROBE" || explain "the workers cannot be asked"
  if [ -n "$DRY" ]; then OUT=$(for ((i = 0; i < WORKERS; i++)); do echo "@worker $i none idle - - -"; done); fi
  read_lines
}
read_lines() { LINES_OF_WORKERS=$(grep '^@worker ' <<<"$OUT" | sort -u -k 2,2n || true); }

# column N: that part of every worker's line: 3 fingerprint, 4 state, 5 exit code, 6 run, 7- workdir
column() { cut -d ' ' -f "$1" <<<"$LINES_OF_WORKERS"; }

# A hash of the code and of what shall be installed with it.
fingerprint() {
  local sum="shasum -a 256"
  ! command -v sha256sum >/dev/null 2>&1 || sum=sha256sum
  (
    cd "$ROOT" || exit 1
    printf '%s\n' "$PYTHON_VERSION" "$@"
    # shellcheck disable=SC2086
    tr '\n' '\0' <"$TEMP/files" | xargs -0 $sum
  ) | $sum | cut -c 1-16
}
