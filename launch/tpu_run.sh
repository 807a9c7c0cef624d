#!/usr/bin/env bash
# Cloud TPU from this machine: makes a slice, installs, runs, watches, survives preemption, brings the results home. docs/tpu.md is
# the walk-through; `bash launch/tpu_run.sh --help` lists everything.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/tpu_lib.sh
. "$ROOT/launch/tpu_lib.sh"
# shellcheck source=launch/tpu_memory.sh
. "$ROOT/launch/tpu_memory.sh"
# shellcheck source=launch/tpu_check.sh
. "$ROOT/launch/tpu_check.sh"
# shellcheck source=launch/tpu_slice.sh
. "$ROOT/launch/tpu_slice.sh"
# shellcheck source=launch/tpu_job.sh
. "$ROOT/launch/tpu_job.sh"

usage() {
  cat <<'TEXT'
bash launch/tpu_run.sh VERB [--name=NAME] [settings]
                       [-- arguments of python -m seed_jax.main]

verbs; each may be repeated, what is done is not done again
  create   asks for the slice as a queued resource and waits until it is ready;
           one that was preempted or failed is asked for anew
  setup    sends this repository to all workers and installs it; seconds when
           nothing changed
  run      setup, then starts the program on all workers, detached; refuses
           while another run is in progress there
  status   the request, the slice, and what each worker is doing
  logs     the program's words
  ssh      a shell on one worker, or a command after --
  stop     SIGTERM to the program (it writes a checkpoint), then SIGKILL after
           --grace seconds; the slice stays and costs
  resume   create, setup and run once more with what was given before; goes on
           where the work directory stands
  fetch    report, metrics and the final policy to this machine
  delete   gives the slice back

which slice; after `create` the name is enough
  --name=NAME             or TPU_NAME
  --project=ID            else what `create` had, else PROJECT, else gcloud's
  --zone=ZONE             else what `create` had, else ZONE, else gcloud's
  --topology=v5e:4x4      else what `create` had, else TOPOLOGY;
                          GENERATION:SHAPE of v4, v5e, v5p, v6e

create
  --spot                  cheaper, may be preempted
  --reserved              from the project's reservation
  --on-demand             neither; also where --topology is given without them
  --wait=SECONDS          how long to wait for the slice (default: as long as it
                          takes); 0: only ask
  --valid-until=DURATION  the request lapses when it is not met by then (6h)
  --service-account=EMAIL  --network=NET  --subnetwork=NET  --labels=K=V,...
  --internal-ips  --runtime-version=VERSION
                          as for gcloud compute tpus queued-resources create

setup
  --extras=a,b            extras of pyproject.toml; those that the config names
                          (`# extras:`) are installed anyhow
  --python=3.12           version on the workers (default 3.11)

run, resume; `run` takes over nothing of the run before
  --config=FILE[:ARG]  --workdir=gs://BUCKET/FOLDER  --stages=a,b
  --config.FIELD=VALUE    go to the program, as does all after --
  --secret=NAME           the program gets the environment variable NAME of this
                          shell; the value travels over ssh's stdin only
  --secret=NAME=projects/P/secrets/S[/versions/V]
                          the workers read it from Secret Manager
  --data=NAME=gs://BUCKET/FOLDER
                          copied to every worker before the start; the program
                          finds the copy under the variable NAME
  --env=NAME=VALUE        a variable for the program, not for secrets
  --cache=gs://FOLDER     compiled programs, kept beyond the slice (default:
                          seed_jax/xla in the work directory's bucket)
  --keep-alive            stays here and watches: a slice that is preempted is
                          made again and the run resumed, until it is done
  --max-restarts=N        ends --keep-alive after so many restarts (100)

logs, ssh
  --worker=N              which (0); logs: or all
  --follow  --lines=N     logs: on and on; how many to begin with (100)
stop, fetch, delete
  --grace=SECONDS         stop: before SIGKILL (120)
  --to=FOLDER             fetch: into it (runs/NAME-OF-WORKDIR)
  --all                   fetch: the whole work directory
  --force                 delete: although a run is in progress
everything
  --iap                   ssh through Identity-Aware Proxy, for slices without
                          external addresses
  --internal-ip           ssh inside the network
  --dry-run               prints every command and does nothing
  --help                  this text

Exit codes: 0 done; 1 failed; 2 a wrong command line; 69 the workers do not
answer; 130 interrupted; with --keep-alive the program's own: 75 means preempted
(the checkpoint is written, resume), 76 that another worker failed or is gone.

Environment: seconds between looks TPU_POLL (30), before the second attempt at
ssh TPU_BACKOFF (5, doubling); attempts TPU_SSH_TRIES (6); looks before workers
that outlive another one are ended TPU_PATIENCE (10); MiB of a file and of all
files that are sent TPU_FILE_LIMIT (5), TPU_TOTAL_LIMIT (64).
TEXT
}

# ---------------------------------------------------------------- the command line

# first what the command line says, then what is remembered for the name, then the environment
NAME=${TPU_NAME:-} OUTER_PROJECT=${PROJECT:-} OUTER_ZONE=${ZONE:-} OUTER_TOPOLOGY=${TOPOLOGY:-}
PROJECT="" ZONE="" TOPOLOGY="" KNOWN_PROJECT="" KNOWN_ZONE="" ON_DEMAND="" GIVEN=" "
DRY="" WAIT="" EXTRAS="" PYTHON_VERSION="" RUNTIME_VERSION="" CACHE="" KEEP_ALIVE="" MAX_RESTARTS=100 WORKER="" FOLLOW="" LINES_ASKED=100
GRACE=120 TO="" ALL="" FORCE="" TRACK="" TYPE="" LINES_OF_WORKERS="" DRY_STATE="" DRY_NODE="" CONFIG_TOPOLOGY="" UNCHECKED=""
REQUEST=() ROUTE=() SECRETS=() SETTINGS=() PROGRAM=() WHERE=()

VERB=${1:---help}
case $VERB in
  -h | --help | help)
    usage
    exit 0
    ;;
  create | setup | run | status | logs | ssh | stop | resume | delete | fetch) shift ;;
  *) usage_error "unknown verb '$VERB'; there are create, setup, run, status, logs, ssh, stop, resume, fetch, delete (--help explains)" ;;
esac

while [ $# -gt 0 ]; do
  case $1 in
    *$'\n'*) usage_error "an argument has a line break in it: ${1%%$'\n'*}" ;;
    -h | --help)
      usage
      exit 0
      ;;
    --name=* | --project=* | --zone=* | --topology=*)
      name=${1%%=*} name=${name#--}
      GIVEN="$GIVEN$name "
      case $name in name) NAME=${1#*=} ;; project) PROJECT=${1#*=} ;; zone) ZONE=${1#*=} ;; topology) TOPOLOGY=${1#*=} ;; esac
      ;;
    --dry-run) DRY=yes ;;
    --on-demand) ON_DEMAND=yes ;;
    --spot | --reserved | --internal-ips) REQUEST+=("$1") ;;
    --service-account=* | --network=* | --subnetwork=* | --labels=*) REQUEST+=("$1") ;;
    --valid-until=*) REQUEST+=("--valid-until-duration=${1#*=}") ;;
    --runtime-version=*) RUNTIME_VERSION=${1#*=} ;;
    --wait=*) WAIT=${1#*=} ;;
    --extras=*) EXTRAS=${1#*=} ;;
    --python=*) PYTHON_VERSION=${1#*=} ;;
    --cache=*) CACHE=${1#*=} ;;
    --secret=*) SECRETS+=("${1#*=}") ;;
    --data=* | --env=*) SETTINGS+=("$1") ;;
    --keep-alive) KEEP_ALIVE=yes ;;
    --max-restarts=*) MAX_RESTARTS=${1#*=} ;;
    --iap) ROUTE=(--tunnel-through-iap) ;;
    --internal-ip) ROUTE=(--internal-ip) ;;
    --worker=*) WORKER=${1#*=} ;;
    --follow) FOLLOW=yes ;;
    --lines=*) LINES_ASKED=${1#*=} ;;
    --grace=*) GRACE=${1#*=} ;;
    --to=*) TO=${1#*=} ;;
    --all) ALL=yes ;;
    --force) FORCE=yes ;;
    --config=* | --config.*=* | --workdir=* | --stages=*) PROGRAM+=("$1") ;;
    --)
      shift
      PROGRAM+=("$@")
      break
      ;;
    --secret) usage_error "write --secret=NAME" ;;
    *) usage_error "unknown argument '${1%%=*}'; arguments of the program stand after --; --help lists ours" ;;
  esac
  shift
done
for number in "${WAIT:-0}" "$MAX_RESTARTS" "$LINES_ASKED" "$GRACE"; do
  case $number in "" | *[!0-9]* | ??????????*) usage_error "'$number' is not a number of seconds, lines or restarts" ;; esac
done
LINES_ASKED=$((10#$LINES_ASKED)) GRACE=$((10#$GRACE)) MAX_RESTARTS=$((10#$MAX_RESTARTS)) WAIT=${WAIT:+$((10#$WAIT))} # 08 is no octal
case $EXTRAS$PYTHON_VERSION in *[!A-Za-z0-9_.,-]*) usage_error "--extras takes names with commas, --python a version such as 3.12" ;; esac
case ${WORKER:-0} in all) ;; *[!0-9]*) usage_error "--worker wants a number" ;; esac

TEMP=$(mktemp -d)
trap 'rm -rf "$TEMP"' EXIT
trap interrupted INT TERM
: >"$TEMP/err"
recall
: "${PYTHON_VERSION:=3.11}"
case $VERB in
  create | run | resume) [ -z "$TOPOLOGY" ] || slice "$TOPOLOGY" ;;
  *) if (slice "$TOPOLOGY") 2>/dev/null; then slice "$TOPOLOGY"; else TOPOLOGY=""; fi ;; # what is kept may be damaged
esac
case ${ROUTE[*]-} in *iap*) TRACK=alpha ;; esac
case $VERB in
  run | resume)
    [ "$VERB" = run ] || [ ${#PROGRAM[@]} -gt 0 ] || usage_error "nothing is known of an earlier run of $NAME on this machine; give --config and --workdir"
    check_program
    ;;
  fetch) find_workdir ;;
esac
check
case $VERB in create | run | resume) same_place ;; esac
case $VERB in
  ssh) shell ;;
  setup)
    need_slice
    idle
    setup
    ;;
  run) if [ -n "$KEEP_ALIVE" ]; then keep_alive; else run; fi ;;
  resume)
    if [ -n "$KEEP_ALIVE" ]; then keep_alive; else
      create
      run
    fi
    ;;
  *) "$VERB" ;;
esac
