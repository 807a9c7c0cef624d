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
  config=${config#./}
  case $config in /*) usage_error "--config=$config: name it from the repository's root, such as configs/quickstart.py" ;; esac
  [ -f "$ROOT/${config%%:*}" ] || usage_error "the config ${config%%:*} is not in $ROOT; only what lies there is sent to the workers"
  list_files
  grep -qxF "./${config%%:*}" "$TEMP/files" || usage_error "the config ${config%%:*} is not sent to the workers: git ignores it, or it is no small file"
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
    variable --secret "$item"
    case $item in
      *=projects/*/secrets/*) ;;
      *=*) usage_error "--secret=${item%%=*}=... is a value that others could see; export ${item%%=*} and give --secret=${item%%=*}" ;;
      *) [ -n "${!item+set}" ] || [ -n "$DRY" ] || usage_error "--secret=$item: $item is not set in this shell; export it" ;;
    esac
  done
  for item in ${SETTINGS[@]+"${SETTINGS[@]}"}; do
    case $item in
      --data=*=gs://?* | --env=*=*) variable "${item%%=*}" "${item#*=}" ;;
      --data=*) usage_error "$item: write --data=NAME=gs://BUCKET/FOLDER; the program gets the copy's place as NAME" ;;
      *) usage_error "$item: write --env=NAME=VALUE" ;;
    esac
  done
  for item in $(sed -n 's/^# extras: *//p' "$ROOT/${config%%:*}" | head -n 1); do
    case ",$EXTRAS," in *",$item,"*) ;; *) EXTRAS=$EXTRAS${EXTRAS:+,}$item ;; esac
  done
  check_config "${config%%:*}"
}

# variable FLAG NAME=...: ends unless the program can be given a variable of that name.
variable() {
  [[ ${2%%=*} =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
    usage_error "$1=${2%%=*}: '${2%%=*}' is no name of a variable: letters, digits and _, no digit first"
  case ${2%%=*} in
    BASE | RUN | MEMORY | HOME | PATH | IFS | UID | EUID | PPID | SHELLOPTS | BASH*)
      usage_error "$1=${2%%=*}: that variable belongs to the shell or the launcher; choose another name"
      ;;
  esac
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
  local topology=${TOPOLOGY:-${CONFIG_TOPOLOGY:-}} there=$WORKERS
  if [ -z "$TYPE_THERE" ] || [ -z "$topology" ]; then return 0; fi
  slice "$topology"
  WORKERS=$there
  [ "$TYPE_THERE" = "$TYPE" ] || fail "$NAME exists with $TYPE_THERE, not $TYPE ($topology); choose another --name, or delete it first"
}

# A name stands for one slice: one elsewhere would be forgotten, and go on costing.
same_place() {
  [ -z "$KNOWN_ZONE" ] || [ "$KNOWN_PROJECT/$KNOWN_ZONE" = "$PROJECT/$ZONE" ] ||
    usage_error "the name $NAME stands for a slice in $KNOWN_ZONE of $KNOWN_PROJECT; choose another --name, or give that one back first: bash launch/tpu_run.sh delete --name=$NAME"
}

# The repository's files as git knows them or would add them, without what it ignores. Where this folder is in no repository, or in
# one that ignores it, what belongs to the package.
found_files() {
  if [ -n "$(git ls-files -co --exclude-standard -- launch/tpu_run.sh 2>/dev/null || true)" ]; then
    git ls-files -coz --exclude-standard | tr '\0' '\n'
  else
    find ./*.* LICENSE seed_jax envs configs launch benchmarks docs -type f ! -name '*.pyc' 2>/dev/null | sed 's|^\./||' || true
  fi
}

# list_files writes the files that are sent to $TEMP/files, ./NAME a line. Weights, keys and files above FILE_LIMIT MiB stay here, in
# $TEMP/kept; more than TOTAL_LIMIT MiB in all are refused.
list_files() {
  local total
  (
    cd "$ROOT" || exit 1
    found_files | LC_ALL=C sort -u | while IFS= read -r file; do [ ! -f "$file" ] || printf './%s\0' "$file"; done |
      LC_ALL=C xargs -0 wc -c | LC_ALL=C awk -v limit=$((FILE_LIMIT * 1048576)) -v kept="$TEMP/kept" -v sum="$TEMP/total" '
        BEGIN { printf "" >kept }
        {
          size = $1; name = $0; sub(/^ *[0-9]+ /, "", name)
          if (name !~ /^\.\//) next # a total of wc
          base = name; sub(/.*\//, "", base)
          if (size > limit || base ~ /^(\.env|id_rsa|id_ed25519|\.netrc)/ || base ~ /\.(safetensors|gguf|bin|pt|pth|ckpt|pem|key|p12)$/)
            print name >kept
          else { print name; total += size }
        }
        END { printf "%d\n", total >sum }'
  ) >"$TEMP/files" || fail "cannot list the files of $ROOT"
  grep -qxF ./launch/tpu_worker.sh "$TEMP/files" || fail "the files of $ROOT are not what is to be sent: launch/tpu_worker.sh is not among them"
  total=$(($(cat "$TEMP/total") / 1048576))
  [ "$total" -le "$TOTAL_LIMIT" ] ||
    fail "$(wc -l <"$TEMP/files" | tr -d ' ') files of $total MiB would be sent, more than $TOTAL_LIMIT MiB (TPU_TOTAL_LIMIT); data belongs outside of the repository, into the bucket, or into .gitignore"
}

# One line for what is not sent.
tell_kept() {
  local count
  count=$(wc -l <"$TEMP/kept" | tr -d ' ')
  [ "$count" -eq 0 ] || say "not sent (weights, keys, files above $FILE_LIMIT MiB): $(head -n 3 "$TEMP/kept" | sed 's|^\./||' | paste -sd ' ' -)$([ "$count" -le 3 ] || echo " and $((count - 3)) more")"
}
