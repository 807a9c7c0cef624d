"""A stand-in for Google Cloud: a `gcloud` that plays a slice with folders as its workers, and fails on request.

Files of its folder: `calls` (what it was asked, a call a line), `qr` and `node` (the states of the queued resource and
of the slice), `type`, `after_create` (both states after a creation), `next` ("QR NODE" lines that `describe` steps
through), `fail.GROUP.VERB` ("CODE|MESSAGE" lines, one a call; an empty line is a call that works), `late` (a worker,
how often it does not answer, and to which commands), `reason` (of a request that failed), `worker-N` (home folders),
`bucket`. The program on the workers runs as long as `hold` exists; it ends with 75 on SIGTERM, else with the next line
of `exits.N`, else with 0.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]

GCLOUD = r"""#!/bin/bash
{ printf '%q ' "$@"; echo; } >>"$STUB/calls"
pop() { [ -s "$STUB/$1" ] && head -n 1 "$STUB/$1" && sed -i 1d "$STUB/$1"; }
say() { echo "ERROR: (gcloud) $2" >&2; exit "$1"; }
option() { local item; for item in "${all[@]}"; do case $item in "$1="*) printf '%s' "${item#*=}" ;; esac; done; }
all=("$@")
[ "$1" != alpha ] || shift
case "$1 $2" in
  "auth list") [ -e "$STUB/logged_out" ] || echo me@example.com; exit ;;
  "config get-value") cat "$STUB/config.${3##*/}" 2>/dev/null; exit 0 ;;
  "storage "*) group=storage verb=$2; shift 2 ;;
  *) group=$3 verb=$4; shift 4 ;;
esac
if line=$(pop "fail.$group.$verb") && [ -n "$line" ]; then say "${line%%|*}" "${line#*|}"; fi
case "$group.$verb" in
  queued-resources.describe)
    case $(option --format) in *failedData*) cat "$STUB/reason" 2>/dev/null; exit 0 ;; esac
    if line=$(pop next); then
      set -- $line
      echo "$1" >"$STUB/qr"; echo "$2" >"$STUB/node"
      [ "$1" != NONE ] || rm -f "$STUB/qr"
      [ "$2" != NONE ] || rm -f "$STUB/node"
    fi
    [ -e "$STUB/qr" ] || say 1 "NOT_FOUND: Resource was not found"
    printf '%s\t%s\n' "$(cat "$STUB/qr")" "$(cat "$STUB/type")" ;;
  tpu-vm.describe)
    [ -e "$STUB/node" ] || say 1 "NOT_FOUND: Resource was not found"
    printf '%s\t%s\n' "$(cat "$STUB/node")" "$(cat "$STUB/workers")" ;;
  queued-resources.create)
    option --accelerator-type >"$STUB/type"
    set -- $(cat "$STUB/after_create" 2>/dev/null || echo ACTIVE READY)
    rm -rf "$STUB"/worker-*
    echo "$1" >"$STUB/qr"; [ "$2" = NONE ] || echo "$2" >"$STUB/node" ;;
  queued-resources.delete | tpu-vm.delete) rm -f "$STUB/qr" "$STUB/node" ;;
  tpu-vm.scp)
    for ((n = 0; n < $(cat "$STUB/workers"); n++)); do
      mkdir -p "$STUB/worker-$n"
      cp "$1" "$STUB/worker-$n/${2#*:}"
    done ;;
  tpu-vm.ssh)
    which=$(option --worker) code=0
    [ "$which" != all ] || which=$(seq 0 $(($(cat "$STUB/workers") - 1)))
    for n in $which; do
      if read -r who times what 2>/dev/null <"$STUB/late" && [ "$who" = "$n" ] && [ "$times" -gt 0 ]; then
        case $(option --command) in *"$what"*)
          echo "$who $((times - 1)) $what" >"$STUB/late"
          code=255
          continue ;;
        esac
      fi
      home=$STUB/worker-$n
      mkdir -p "$home/bin" "$home/memory"
      printf '#!/bin/sh\necho t1v-n-abc-w-%s\n' "$n" >"$home/bin/hostname"
      chmod +x "$home/bin/hostname"
      path=$home/bin:$STUB/remote:/usr/bin:/bin
      env -i HOME="$home" STUB="$STUB" PATH="$path" SEED_JAX_MEMORY="$home/memory" \
        bash -c "$(option --command)" || code=$?
    done
    exit "$code" ;;
  storage.rsync)
    from=${1/gs:\/\//$STUB/bucket/}
    case " ${all[*]} " in
      *" --recursive "*) cp -r "$from/." "$2" ;;
      *) find "$from" -maxdepth 1 -type f -exec cp {} "$2" ';' ;;
    esac ;;
  storage.ls) [ -d "${1/gs:\/\//$STUB/bucket/}" ] || say 1 "One or more URLs matched no objects." ;;
  *) say 99 "the stand-in does not know $group $verb" ;;
esac
"""

PYTHON = r"""#!/bin/bash
case "$*" in
  -V) echo "Python 3.11.7" ;;
  "-c "*) echo 3.11.7 ;;
  "-m venv "*) mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python" ;;
  "-m pip install "*) shift 3; echo "$*" >>"$HOME/pip"; [ ! -e "$STUB/pip_fails" ] || exit 1 ;;
  "-m seed_jax.main "*)
    shift 2
    printf '[%s]' "$@" >>"$HOME/main"; echo >>"$HOME/main"
    printf '%s %s %s\n' "${HF_TOKEN:-}" "${WANDB:-}" "${SEED_JAX_CACHE:-}" >"$HOME/environment"
    printf '%s|%s\n' "${NOTE:-}" "$(cat "${GAMES:-/none}/game" 2>/dev/null)" >"$HOME/settings"
    trap 'echo asked to end; sleep 0.2; exit 75' TERM
    echo "the program begins"
    echo $$ >"$HOME/ready"
    while [ -e "$STUB/hold" ]; do sleep 0.1; done
    number=$(hostname) number=${number##*-}
    exit "$(sed -n "$(wc -l <"$HOME/main")p" "$STUB/exits.$number" 2>/dev/null | grep . || echo 0)" ;;
  "- "*) cksum ;;
  *) echo "unknown to the stand-in: $*" >&2; exit 99 ;;
esac
"""

SECRETS_GCLOUD = r"""#!/bin/bash
[ -e "$STUB/no_access" ] && { echo "ERROR: PERMISSION_DENIED" >&2; exit 1; }
case "$*" in
  "secrets versions access 3 --secret=wandb --project=mine") echo from-the-manager ;;
  "storage rsync "*" --recursive --quiet") cp -r "${3/gs:\/\//$STUB/bucket/}/." "$4" ;;
  *) exit 9 ;;
esac
"""


class Cloud:
  """A copy of the launch scripts beside a stand-in cloud; `run` calls launch/tpu_run.sh.

  `like`: the folder of another one, whose state is taken over.
  """

  def __init__(self, path, workers=2, like=None):
    self.root, self.stub, self.state = path / "the repository", path / "stub", path / "state"
    self.path = f"{self.stub}:/usr/bin:/bin"
    if like:
      shutil.copytree(like, path, dirs_exist_ok=True)
      return
    shutil.copytree(ROOT / "launch", self.root / "launch")
    for name in ("requirements.txt", "pyproject.toml"):
      shutil.copy(ROOT / name, self.root)
    for name, text in {"configs/quickstart.py": '"""Quick."""\n', "configs/game.py": "# extras: alfworld\n"}.items():
      (self.root / name).parent.mkdir(exist_ok=True)
      (self.root / name).write_text(text)
    self.program(self.stub / "gcloud", GCLOUD)
    self.program(self.stub / "remote" / "python3.11", PYTHON)
    self.program(self.stub / "remote" / "gcloud", SECRETS_GCLOUD)
    self["workers"] = str(workers)

  def program(self, path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)

  def path_without_gcloud(self):
    """A PATH with the system's programs but gcloud, which may be installed here."""
    folder = self.stub / "programs"
    folder.mkdir()
    for place in ("/bin", "/usr/bin"):
      for program in pathlib.Path(place).iterdir():
        if program.name != "gcloud" and not (folder / program.name).is_symlink():
          (folder / program.name).symlink_to(program)
    return str(folder)

  def __setitem__(self, name, text):
    """Writes a file of the stand-in; None removes it."""
    (self.stub / name).write_text(text + "\n") if text is not None else (self.stub / name).unlink()

  def start(self, *arguments, **variables):
    environment = {"PATH": self.path, "STUB": str(self.stub), "HOME": str(self.stub)}
    environment |= {"SEED_JAX_STATE": str(self.state), "TPU_POLL": "0.2", "TPU_BACKOFF": "0", "TPU_SSH_TRIES": "4"}
    environment["TPU_PATIENCE"] = "100000"  # one program may begin long after another one has ended
    environment |= {"TPU_NAME": "slice", "PROJECT": "mine", "ZONE": "here-a"} | variables
    return subprocess.Popen(
      ["bash", str(self.root / "launch" / "tpu_run.sh"), *arguments],
      env={key: value for key, value in environment.items() if value is not None},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
      # a shell ignores Ctrl-C for good where the tests were started in the background
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

  def interrupt(self, process):
    """Ctrl-C: the words since then of a call, which ends with 130."""
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 130, out
    return out

  def run(self, *arguments, code=0, **variables):
    """The words of a call that ends with `code`."""
    process = self.start(*arguments, **variables)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == code, out
    return out

  def calls(self, *words):
    """gcloud's calls since the last call of this method, those that hold all the words."""
    file = self.stub / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [line for line in lines if all(word in line for word in words)]

  def worker(self, number, name):
    """A file in the home folder of a worker, or '' where there is none."""
    path = self.stub / f"worker-{number}" / name
    return path.read_text() if path.exists() else ""

  def wait_for(self, number, name, text=""):
    """Waits for a worker's file with that text in it."""
    end = time.monotonic() + 300
    while text not in self.worker(number, name) or not self.worker(number, name):
      assert time.monotonic() < end, f"worker {number} never wrote {text!r} into {name}"
      time.sleep(0.05)

  def wait_for_the_program(self, after=()):
    """Waits until it listens to signals on all workers; its process ids there, none of them one of `after`."""
    workers, end = range(int((self.stub / "workers").read_text())), time.monotonic() + 300
    while True:
      found = [self.worker(number, "ready").strip() for number in workers]
      if all(found) and not set(found) & set(after):
        return found
      assert time.monotonic() < end, f"the program does not run on all workers: {found}"
      time.sleep(0.05)

  def close(self):
    """Lets every program end."""
    (self.stub / "hold").unlink(missing_ok=True)
    for path in self.stub.glob("worker-*/.seed_jax/run/supervisor"):
      pid, end = path.read_text().strip(), time.monotonic() + 20
      while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.05)
