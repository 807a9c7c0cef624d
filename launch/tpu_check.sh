#!/usr/bin/env bash
# What is looked at before anything is paid for or sent: part of launch/tpu_run.sh. Sourced, never run.
# shellcheck disable=SC2034,SC2153 # variables in capitals are tpu_lib.sh's

# The program's --workdir and --config, and what follows from them. Fails early, before anything is paid for.
check_program() {
  local item config=""
  WORKDIR=""
  for item in ${PROGRAM[@]+"${PROGRAM[@]}"}; do
    case $item in
      *$'\n'*) usage_error "an argument of the program has a line break in it" ;;
      --workdir=*) WORKDIR=${item#*=} ;;
      --config=*) config=${item#*=} ;;
    esac
  done
  if [ -z "$config" ] || [ -z "$WORKDIR" ]; then usage_error "run needs --config=FILE[:ARG] and --workdir=gs://BUCKET/FOLDER"; fi
  case $config in /*) usage_error "--config=$config: name it from the repository's root, such as configs/quickstart.py" ;; esac
  [ -f "$ROOT/${config%%:*}" ] || usage_error "the config ${config%%:*} is not in $ROOT; only what lies there is sent to the workers"
  CONFIG_TOPOLOGY=$(tr ',' '\n' <<<"${config#*:}" | grep -xE '(v4|v5e|v5p|v6e):[0-9]+(x[0-9]+)+' | head -n 1 || true)
  [ -z "$CONFIG_TOPOLOGY" ] || [ -z "$TOPOLOGY" ] || [ "$CONFIG_TOPOLOGY" = "$TOPOLOGY" ] ||
    usage_error "the config is for $CONFIG_TOPOLOGY and the slice is $TOPOLOGY; write --config=${config//$CONFIG_TOPOLOGY/$TOPOLOGY}, or choose another slice (--name, --topology)"
  case $WORKDIR in
    gs://?*) : "${CACHE:=gs://$(cut -d/ -f3 <<<"$WORKDIR")/seed_jax/xla}" ;;
    /*) ;;
    *) usage_error "--workdir=$WORKDIR: give gs://BUCKET/FOLDER, or on a slice of one worker an absolute path" ;;
  esac
  for item in ${SECRETS[@]+"${SECRETS[@]}"}; do
    case ${item%%=*} in "" | [0-9]* | *[!A-Za-z0-9_]*) usage_error "--secret wants the name of an environment variable" ;; esac
    case $item in
      *=projects/*/secrets/*) ;;
      *=*) usage_error "--secret=${item%%=*}=... is a value that others could see; export ${item%%=*} and give --secret=${item%%=*}" ;;
      *) [ -n "${!item+set}" ] || [ -n "$DRY" ] || usage_error "--secret=$item: $item is not set in this shell; export it" ;;
    esac
  done
  for item in ${SETTINGS[@]+"${SETTINGS[@]}"}; do
    case $item in
      --data=[A-Za-z_]*=gs://?* | --env=[A-Za-z_]*=*) ;;
      --data=*) usage_error "$item: write --data=NAME=gs://BUCKET/FOLDER; the program gets the copy's place as NAME" ;;
      *) usage_error "$item: write --env=NAME=VALUE" ;;
    esac
  done
  for item in $(sed -n 's/^# extras: *//p' "$ROOT/${config%%:*}" | head -n 1); do
    case ",$EXTRAS," in *",$item,"*) ;; *) EXTRAS=$EXTRAS${EXTRAS:+,}$item ;; esac
  done
  check_config "${config%%:*}"
}

# What the program itself would refuse, found by loading the config as it does (launch/check_config.py), with the first Python here
# that has the package. Without one the most frequent mistake is still found, and UNCHECKED says so before the slice is asked for.
check_config() {
  local python item said code variables="" chips=0
  [ -z "$TOPOLOGY" ] || chips=$CHIPS
  for item in ${SECRETS[@]+"${SECRETS[@]}"} ${SETTINGS[@]+"${SETTINGS[@]}"}; do
    item=${item#--data=} item=${item#--env=}
    variables=$variables${variables:+,}${item%%=*}
  done
  for python in "${VENV:-$ROOT/.venv}/bin/python" python3 python; do
    command -v "$python" >/dev/null 2>&1 || continue
    code=0
    said=$(cd "$ROOT" && "$python" launch/check_config.py "$chips" "$variables" "${PROGRAM[@]}" 2>/dev/null) || code=$?
    [ "$code" -ne 0 ] || return 0
    case $code:$said in 2:error:*) usage_error "${said#error: }" ;; esac
  done
  UNCHECKED="the config is not checked here: no Python with this package (bash launch/local_run.sh makes one in .venv)"
  [ -n "$CONFIG_TOPOLOGY" ] || return 0
  case " ${PROGRAM[*]}" in *" --config.model.path="?* | *" --stages="*) return 0 ;; esac
  ! grep -qE '^[^#]*\.model\.path *=' "$ROOT/$1" || return 0
  usage_error "config.model.path is empty: the config for $CONFIG_TOPOLOGY has no weights; add --config.model.path=gs://BUCKET/FOLDER (a Hugging Face directory)"
}

# Once, before something is paid for.
tell_unchecked() {
  [ -z "$UNCHECKED" ] || say "$UNCHECKED"
  UNCHECKED=""
}

# same_type ends where the slice that is there is another one than the command line or the config says.
same_type() {
  local topology=${TOPOLOGY:-${CONFIG_TOPOLOGY:-}} wanted
  if [ -z "$TYPE_THERE" ] || [ -z "$topology" ]; then return 0; fi
  wanted=$(slice "$topology" && echo "$TYPE")
  [ "$TYPE_THERE" = "$wanted" ] || fail "$NAME exists with $TYPE_THERE, not $wanted ($topology); choose another --name, or delete it first"
}

# A name stands for one slice: one elsewhere would be forgotten, and go on costing.
same_place() {
  [ -z "$KNOWN_ZONE" ] || [ "$KNOWN_PROJECT/$KNOWN_ZONE" = "$PROJECT/$ZONE" ] ||
    usage_error "the name $NAME stands for a slice in $KNOWN_ZONE of $KNOWN_PROJECT; choose another --name, or give that one back first: bash launch/tpu_run.sh delete --name=$NAME"
}
