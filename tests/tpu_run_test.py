"""launch/tpu_run.sh makes slices and installs: against a stand-in cloud (tpu_cloud.py) whose workers are folders."""

import re
import shlex
import subprocess
import sys

import pytest
import tpu_cloud
from tpu_cloud import Cloud

PROGRAM = ("--config=configs/quickstart.py", "--workdir=gs://bucket/run one")
READY = ("--topology=v4:2x2x2",)


@pytest.fixture
def cloud(tmp_path):
  place = Cloud(tmp_path)
  yield place
  place.close()


@pytest.fixture
def slice_there(cloud):
  """A slice of two workers that is set up."""
  cloud.run("create", *READY)
  cloud.run("setup")
  cloud.calls()
  return cloud


def one_error(text):
  """The only line of `text`, without `error: `."""
  assert text.startswith("error: ") and text.count("\n") == 1, text
  return text[len("error: ") : -1]


def last_error(text):
  return one_error(text.splitlines(keepends=True)[-1])


class TestCommandLine:
  def test_the_help_names_every_verb_and_flag(self, cloud):
    out = cloud.run("--help")
    assert cloud.run("create", "--help") == out == cloud.run()
    script = (cloud.root / "launch" / "tpu_run.sh").read_text()
    flags = set(re.findall(r"^ {4}.*?(--[a-z][a-z-]+)", script[script.index("while [ $# -gt 0 ]") :], re.M))
    assert len(flags) > 15 and not {flag for flag in flags if flag not in out}
    verbs = "create setup run status logs ssh stop resume fetch delete".split()
    assert all(re.search(rf"^  {verb}  ", out, re.M) for verb in verbs)
    assert max(map(len, out.splitlines())) <= 80

  @pytest.mark.parametrize(
    "topology,kind,image,workers",
    [
      ("v4:2x2x4", "v4-32", "tpu-ubuntu2204-base", 4),
      ("v5e:2x2", "v5litepod-4", "v2-alpha-tpuv5-lite", 1),
      ("v5e:2x4", "v5litepod-8", "v2-alpha-tpuv5-lite", 1),
      ("v5e:4x4", "v5litepod-16", "v2-alpha-tpuv5-lite", 4),
      ("v5p:2x2x1", "v5p-8", "v2-alpha-tpuv5", 1),
      ("v5p:4x4x4", "v5p-128", "v2-alpha-tpuv5", 16),
      ("v5p:8x8x8", "v5p-1024", "v2-alpha-tpuv5", 128),
      ("v6e:4x4", "v6e-16", "v2-alpha-tpuv6e", 4),
      ("v6e:16x16", "v6e-256", "v2-alpha-tpuv6e", 64),
    ],
  )
  def test_a_topology_names_type_image_and_workers(self, cloud, topology, kind, image, workers):
    out = cloud.run("create", "--dry-run", f"--topology={topology}")
    assert f"--accelerator-type={kind} --runtime-version={image} --quiet" in out and f"{workers} workers" in out

  def test_a_dry_run_prints_everything_and_does_nothing(self, cloud):
    (cloud.stub / "gcloud").unlink()
    cloud.path = cloud.path_without_gcloud()
    out = cloud.run("create", "--dry-run", "--topology=v5e:4x4", "--spot", "--valid-until=6h", "--network=net")
    (create,) = [line for line in out.splitlines() if "queued-resources create" in line]
    assert create == (
      "gcloud compute tpus queued-resources create slice --project=mine --zone=here-a --node-id=slice"
      " --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite"
      " --spot --valid-until-duration=6h --network=net --quiet"
    )
    out = cloud.run(
      "run", "--dry-run", "--topology=v4:2x2x2", "--secret=HF_TOKEN", "--iap", *PROGRAM, HF_TOKEN="hidden"
    )
    commands = [line for line in out.splitlines() if line.startswith("gcloud ")]
    verbs = ["describe", "describe", "ssh", "scp", "ssh", "ssh", "ssh", "ssh", "ssh"]
    assert [re.search(r" (describe|ssh|scp) ", line)[1] for line in commands] == verbs
    assert all("gcloud alpha" in line and "--tunnel-through-iap" in line for line in commands[2:])
    assert (
      out.count("# stdin of the next command, from this shell's environment: HF_TOKEN") == 2 and "hidden" not in out
    )
    # What is printed can be pasted: a shell reads the same words.
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {commands[-1]}"], capture_output=True, text=True).stdout
    assert r"-- --config=configs/quickstart.py --workdir=gs://bucket/run\ one" in words
    for verb in ("status", "logs", "ssh", "stop", "fetch", "delete", "setup"):
      assert "gcloud " in cloud.run(verb, "--dry-run", "--workdir=gs://b/w")
    assert cloud.calls() == [] and not cloud.state.exists()

  @pytest.mark.parametrize(
    "arguments,words",
    [
      (["dance"], "unknown verb 'dance'"),
      (["create", "--spott"], "unknown argument '--spott'"),
      (["create", "--wait=soon"], "'soon' is not a number"),
      (["run"], "run needs --config=FILE"),
      (["run", "--config=configs/quickstart.py", "--workdir=runs/x"], "give gs://BUCKET/FOLDER"),
      (["run", "--config=configs/none.py", "--workdir=gs://b/x"], "the config configs/none.py is not in"),
      (["run", "--config=/configs/none.py", "--workdir=gs://b/x"], "name it from the repository's root"),
      (["run", *PROGRAM, "--secret=HF_TOKEN"], "HF_TOKEN is not set in this shell"),
      (["run", *PROGRAM, "--secret=HF_TOKEN=hf_123"], "is a value that others could see"),
      (["run", *PROGRAM, "--secret=a b"], "--secret wants the name"),
      (["run", *PROGRAM, "--data=gs://b/d"], "write --data=NAME=gs://BUCKET/FOLDER"),
      (["run", *PROGRAM, "--env=A"], "write --env=NAME=VALUE"),
      (["run", *PROGRAM, "--env=A B=c"], "'A B' is no name of a variable"),
      (["run", *PROGRAM, "--env=A=b\nc"], "has a line break in it"),
      (["run", *PROGRAM, "--env=RUN=b"], "belongs to the shell or the launcher"),
      (["run", *PROGRAM, "--data=A;touch /tmp/x;B=gs://b/d"], "'A;touch /tmp/x;B' is no name"),
      (["resume"], "nothing is known of an earlier run of slice"),
      (["fetch"], "fetch from where?"),
    ],
  )
  def test_a_wrong_command_line_gets_one_line_and_code_2(self, cloud, arguments, words):
    error = one_error(cloud.run(*arguments, code=2))
    assert words in error and "hf_123" not in error
    assert cloud.calls() == []

  def test_a_config_is_checked_before_anything_is_paid_for(self, cloud):
    whole = "alfworld.py:qwen2_5_3b,v5e:4x4"
    (cloud.root / "configs" / "alfworld.py").write_text('"""c.model.path: not set."""\n')
    config = lambda name: ("run", "--dry-run", f"--config=configs/{name}", "--workdir=gs://b/w")  # noqa: E731
    weights = "--config.model.path=gs://b/m"
    error = one_error(cloud.run(*config(whole), "--topology=v5e:8x8", weights, code=2))
    assert (
      "the config is for v5e:4x4 and the slice is v5e:8x8; write --config=configs/alfworld.py:qwen2_5_3b,v5e:8x8"
      in error
    )
    assert "config.model.path is empty" in one_error(cloud.run(*config(whole), code=2))
    assert "the config is not checked here" in cloud.run(*config(whole), weights)
    cloud.root = tpu_cloud.ROOT
    cloud.program(cloud.stub / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for arguments, words in {
      (*config("alfworld.py:qwen9,v5p:4x4x4,nomethod"), weights): "nomethod",
      (*config(whole), weights, "--config.trian.iterations=3"): "the config has no field 'trian.iterations'",
      (*config(whole), weights): "add --config.annotate.external.base_url",
      (*config("quickstart.py"), "--topology=v5e:1x1", "--config.mesh.data=2"): "needs 2 chips; the slice has 1",
    }.items():
      assert words in one_error(cloud.run(*arguments, code=2, VENV="/none"))

  def test_the_documented_commands_pass(self, cloud):
    cloud.root = tpu_cloud.ROOT
    cloud.program(cloud.stub / "python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    text = "".join((cloud.root / name).read_text() for name in ("README.md", "docs/tpu.md")).replace("\\\n", "")
    commands = set(re.findall(r"^bash launch/tpu_run.sh (run .*)", text, re.M))
    assert len(commands) == 2
    for command in commands:
      out = cloud.run(*shlex.split(command), "--dry-run", "--topology=v5e:4x4", ANALYZER_API_KEY="k", VENV="/none")
      assert "not checked" not in out and "--config.model.path" in out
      short = re.sub(r"--data=\S+", "", command)
      assert "official ALFWorld games" in one_error(
        cloud.run(*shlex.split(short), "--dry-run", code=2, ANALYZER_API_KEY="k", VENV="/none")
      )

  @pytest.mark.parametrize("topology", ["v5e:3x3", "v7:2x2", "v5p:4x4", "4x4", "v5e"])
  def test_an_unknown_topology_gets_one_line(self, cloud, topology):
    error = one_error(cloud.run("create", f"--topology={topology}", code=2))
    assert f"unknown topology '{topology}'" in error and ("v5e:4x4" in error or "comes as" in error)

  @pytest.mark.parametrize(
    "variables,words",
    [
      ({"TPU_NAME": None}, "the slice has no name"),
      ({"TPU_NAME": "My_slice"}, "the name 'My_slice' will not do"),
      ({"PROJECT": None}, "no project"),
      ({"ZONE": None}, "no zone"),
    ],
  )
  def test_what_is_missing_on_this_machine_gets_one_line(self, cloud, variables, words):
    assert words in one_error(cloud.run("create", *READY, code=2 if "TPU_NAME" in variables else 1, **variables))

  def test_gcloud_must_be_there(self, cloud):
    error = one_error(cloud.run("create", *READY, code=1, PATH=cloud.path_without_gcloud()))
    assert error.startswith("gcloud is missing; install")

  def test_gcloud_knows_project_and_zone(self, cloud):
    cloud["config.project"], cloud["config.zone"] = "theirs", "there-b"
    cloud.run("create", *READY, PROJECT=None, ZONE=None)
    assert cloud.calls("queued-resources create", "--project=theirs", "--zone=there-b")

  def test_one_must_be_logged_in(self, cloud):
    cloud["logged_out"] = ""
    assert one_error(cloud.run("create", *READY, code=1)) == "not logged in; run: gcloud auth login"


class TestCreate:
  def test_once_asked_for_it_is_there(self, cloud):
    assert "slice is ready: 2 workers" in cloud.run("create", *READY, "--spot")
    (call,) = cloud.calls("queued-resources create")
    assert "--spot" in call and "--node-id=slice" in call
    assert "exists and is ready" in cloud.run("create", *READY, "--spot")
    assert "exists and is ready" in cloud.run("create", PROJECT=None, ZONE=None)  # remembered
    assert cloud.calls("queued-resources create") == []

  def test_it_waits_in_the_queue(self, cloud):
    cloud["after_create"] = "ACCEPTED NONE"
    cloud["next"] = "NONE NONE\nWAITING_FOR_RESOURCES NONE\nPROVISIONING NONE\nACTIVE CREATING\nACTIVE READY"
    out = cloud.run("create", *READY)
    assert re.findall(r"request (\w+), slice (\w+)", out) == [
      *(("WAITING_FOR_RESOURCES", "NONE"), ("PROVISIONING", "NONE"), ("ACTIVE", "CREATING"))
    ]
    assert len(cloud.calls("queued-resources create")) == 1

  def test_faults_of_the_service_are_waited_out(self, cloud):
    busy = "1|UNAVAILABLE: 503 the service is busy"
    cloud["fail.queued-resources.create"] = busy
    cloud["after_create"], cloud["next"] = "ACCEPTED NONE", "NONE NONE\nWAITING_FOR_RESOURCES NONE\nACTIVE READY"
    cloud["fail.queued-resources.describe"] = (
      f"{busy}\n\n\n" + f"{busy}\n" * 5
    )  # a look; two that work; five in the queue
    out = cloud.run("create", *READY)
    assert "attempt 2 of 4" in out and "looking on" in out and "slice is ready" in out
    assert len(cloud.calls("queued-resources create")) == 2
    cloud["fail.queued-resources.describe"] = "\n".join([busy] * 4)
    assert "cannot look at slice (gcloud said: ERROR: (gcloud) UNAVAILABLE" in last_error(cloud.run("status", code=1))

  def test_an_interruption_says_what_it_leaves(self, cloud):
    cloud["after_create"] = "WAITING_FOR_RESOURCES NONE"
    for verb in (("create",), ("run", "--keep-alive", *PROGRAM)):
      process = cloud.start(*verb, *READY)
      while "waiting for slice" not in process.stdout.readline():
        pass
      assert "the request for slice stays, and the slice costs once" in cloud.interrupt(process)
    cloud["qr"], cloud["node"] = "ACTIVE", "READY"
    cloud.program(
      cloud.stub / "remote" / "python3.11", tpu_cloud.PYTHON.replace("shift 3;", "echo x >$HOME/at; sleep 20;")
    )
    process = cloud.start("run", "--keep-alive", *PROGRAM)
    cloud.wait_for(0, "at", "x")
    assert "before the program was started; slice stays and costs" in cloud.interrupt(process)
    assert "slice" in cloud.run("resume", "--dry-run")  # it is known what was to be run

  def test_it_need_not_wait(self, cloud):
    cloud["after_create"] = "WAITING_FOR_RESOURCES NONE"
    cloud.run("create", *READY, "--wait=0")
    assert "exists: request WAITING_FOR_RESOURCES" in cloud.run("create", "--wait=0")
    error = last_error(cloud.run("create", "--wait=1", code=1))
    assert "still not ready after 1 s" in error and "stays in the queue" in error

  def test_another_slice_of_that_name_is_not_taken(self, cloud):
    cloud.run("create", *READY)
    error = one_error(cloud.run("create", "--topology=v5e:4x4", code=1))
    assert "exists with v4-16, not v5litepod-16" in error

  @pytest.mark.parametrize("state", ["SUSPENDED NONE", "SUSPENDED PREEMPTED", "FAILED NONE", "ACTIVE PREEMPTED"])
  def test_one_that_is_gone_is_asked_for_anew(self, cloud, state):
    cloud.run("create", *READY, "--spot")
    cloud.calls()
    cloud["next"] = state
    assert "is gone" in cloud.run("create")
    verbs = [re.search(r"queued-resources (\w+)", call)[1] for call in cloud.calls("queued-resources")]
    assert verbs == ["describe", "delete", "describe", "create", "describe"]

  def test_half_created_ones_are_told_apart(self, cloud):
    cloud.run("create", *READY)
    cloud["next"] = "\n".join(["ACTIVE NONE"] * 5)
    assert "half-created" in cloud.run("create") and len(cloud.calls("queued-resources delete", "--force")) == 1
    cloud["next"] = "NONE READY"
    error = last_error(cloud.run("create", code=1))
    assert "half-created: a TPU VM slice (READY) exists without a queued resource" in error

  @pytest.mark.parametrize(
    "message,words",
    [
      ("Quota limit 'TPUV5sPreemptible' has been exceeded. Limit: 0", "quota: project mine may not have these chips"),
      ("PERMISSION_DENIED: The caller does not have permission", "your account needs roles/tpu.admin"),
      (
        "Cloud TPU API has not been used in project 7 before",
        "gcloud services enable tpu.googleapis.com --project=mine",
      ),
      ("INVALID_ARGUMENT: Accelerator type v4-16 not found", "here-a has no v4-16"),
      ("Insufficient reserved capacity", "no capacity in here-a now"),
      ("Something else", "gcloud said: ERROR: (gcloud) Something else"),
    ],
  )
  def test_what_gcloud_says_becomes_one_line(self, cloud, message, words):
    cloud["fail.queued-resources.create"] = f"1|{message}"
    assert words in last_error(cloud.run("create", *READY, code=1))

  def test_a_warning_explains_nothing(self, cloud):
    cloud.program(
      cloud.stub / "gcloud",
      tpu_cloud.GCLOUD.replace(
        'say() { echo "ERROR',
        'say() { printf "WARNING: not the quota project.\\n\\nset-quota-project helps\\n" >&2; echo "ERROR',
      ),
    )
    cloud["fail.queued-resources.create"] = "1|INVALID_ARGUMENT: the zone is wrong"
    error = last_error(cloud.run("create", *READY, code=1))
    assert error == "the slice cannot be asked for (gcloud said: ERROR: (gcloud) INVALID_ARGUMENT: the zone is wrong)"

  def test_what_is_kept_may_be_damaged_or_impossible(self, cloud):
    assert "which slice?" in one_error(cloud.run("create", code=2))
    (cloud.stub / "file").touch()
    assert "cannot write" in last_error(cloud.run("create", *READY, code=1, SEED_JAX_STATE=f"{cloud.stub}/file/x"))
    assert cloud.calls("queued-resources create") == []
    cloud.run("create", *READY)
    for verb in ("logs", "stop"):  # nothing is there yet
      assert "No such file" not in cloud.run(verb, code=verb == "logs")
    assert "exists with v4-16, not v5p-128" in last_error(cloud.run("run", "--topology=v5p:4x4x4", *PROGRAM, code=1))
    (cloud.stub / "qr").unlink()
    assert "half-created" in last_error(cloud.run("run", *PROGRAM, code=1))
    (cloud.state / "slice").write_text("project=mine\nzone=here-a\ntopology=v5e:9x9\n")
    assert "slice is deleted" in cloud.run("delete")

  def test_a_request_that_fails_later_says_why(self, cloud):
    cloud["after_create"], cloud["reason"] = "FAILED NONE", "Quota exceeded for spot chips"
    error = last_error(cloud.run("create", *READY, code=1))
    assert "was not met: quota" in error and "Quota exceeded for spot chips" in error
    assert cloud.calls("queued-resources delete") == []  # it stays to be looked at

  def test_a_slice_that_costs_is_not_forgotten(self, cloud):
    there = ("--name=b", "--zone=there-b")
    cloud.run("create", *READY, *there, TPU_NAME=None)
    assert "in there-b of mine" in last_error(cloud.run("create", "--name=b", "--zone=here-a", code=2))
    cloud["next"] = "NONE NONE"
    error = last_error(cloud.run("delete", "--name=b", "--zone=here-a", code=1))
    assert "is in there-b of mine" in error and (cloud.state / "b").exists()
    cloud["qr"], cloud["node"] = "ACTIVE", "READY"
    out = cloud.run("status", "--name=b", ZONE="here-a", TOPOLOGY="v5e:4x4")
    assert "b in there-b of mine" in out and "not ZONE=here-a" in out
    cloud.run("delete", "--name=b", "--force", ZONE="here-a")
    assert cloud.calls("queued-resources delete b", "--zone=there-b") and not (cloud.state / "b").exists()

  def test_spot_can_be_taken_back(self, cloud):
    cloud["after_create"] = "FAILED NONE"
    cloud.run("create", *READY, "--spot", "--runtime-version=v9", code=1)
    cloud.run("create", code=1)
    cloud.run("create", *READY, code=1)
    assert ["--spot" in call and "=v9" in call for call in cloud.calls("queued-resources create")] == [
      True,
      True,
      False,
    ]
    cloud.run("create", "--spot", code=1)
    assert "on demand" in cloud.run("create", "--on-demand", code=1)


class TestSetup:
  def test_a_second_time_does_nothing(self, slice_there):
    assert "set up already" in slice_there.run("setup")
    assert slice_there.calls("scp") == []
    assert slice_there.worker(1, "pip").strip().endswith(".seed_jax/code[tpu]")

  def test_changed_code_is_sent_again_and_extras_are_added(self, slice_there):
    (slice_there.root / "configs" / "quickstart.py").write_text('"""Quicker."""\n')
    assert "sending" in slice_there.run("setup")
    assert slice_there.worker(1, ".seed_jax/code/configs/quickstart.py") == '"""Quicker."""\n'
    assert slice_there.worker(0, "pip").count("\n") == 1  # the requirements are the same
    slice_there.run("setup", "--extras=alfworld")
    assert slice_there.worker(0, "pip").endswith(".seed_jax/code[alfworld]\n")

  def test_what_git_ignores_stays_here(self, slice_there):
    if subprocess.run(["git", "init", "-q", slice_there.root], capture_output=True).returncode:
      pytest.skip("no git on this system")
    (slice_there.root / ".gitignore").write_text("runs/\n")
    (slice_there.root / "runs").mkdir()
    (slice_there.root / "runs" / "big").touch()
    (slice_there.root / "configs" / "é.py").touch()
    for name in (".env", "qwen/model.safetensors", "big.txt", "key.pem"):
      (slice_there.root / name).parent.mkdir(exist_ok=True)
      (slice_there.root / name).write_bytes(b"0" * (6 * 2**20 if name == "big.txt" else 1))
    out = slice_there.run("setup")
    assert "not sent (weights, keys, files above 5 MiB): .env big.txt key.pem and 1 more" in out
    code = slice_there.stub / "worker-0" / ".seed_jax" / "code"
    assert (code / "configs" / "é.py").exists()
    kept = ("runs", ".env", "qwen", "big.txt", "key.pem")
    assert not [name for name in kept if (code / name).exists()]
    slice_there.program(slice_there.stub / "tar", "#!/bin/sh\nexit 1\n")
    slice_there.run("run", "--dry-run", *PROGRAM)  # packs nothing
    error = last_error(slice_there.run("setup", "--dry-run", code=1, TPU_FILE_LIMIT="9", TPU_TOTAL_LIMIT="5"))
    assert "files of 6 MiB would be sent" in error
    # in a folder that an outer repository ignores, git knows no file
    (slice_there.root / ".git").rename(slice_there.root.parent / ".git")
    (slice_there.root.parent / ".gitignore").write_text("/the*\n")
    assert not re.search("sending 0 files", slice_there.run("setup", "--dry-run"))

  def test_a_failed_installation_names_the_worker(self, cloud):
    cloud.run("create", *READY)
    cloud["pip_fails"] = ""
    assert "the installation failed: worker 0: pip could not install" in last_error(cloud.run("setup", code=1))
    cloud["pip_fails"] = None
    cloud.run("setup")
    assert "set up already" in cloud.run("setup")

  def test_a_worker_with_an_old_python_gets_a_newer_one(self, cloud):
    cloud.run("create", *READY)
    python = cloud.stub / "remote" / "python3.11"
    uv = f'echo "$*" >>"$HOME/uv"; [ "$2" != find ] || echo {cloud.stub}/kept'
    installer = f"echo '{uv}' >$UV_INSTALL_DIR/uv; chmod +x $UV_INSTALL_DIR/uv"
    cloud.program(
      cloud.stub / "remote" / "curl", f"#!/bin/bash\ncat <<'END'\nmkdir -p $UV_INSTALL_DIR\n{installer}\nEND\n"
    )
    python.rename(cloud.stub / "kept")
    cloud.program(python, "#!/bin/bash\nexit 1\n")  # as Ubuntu's, without venv
    cloud.run("setup")
    assert cloud.worker(1, "uv").splitlines() == ["python install 3.11", "python find 3.11"]
    assert "set up already" in cloud.run("setup")

  def test_ssh_that_is_refused_is_tried_again(self, cloud):
    cloud.run("create", *READY)
    refusal = "1|[/usr/bin/ssh] exited with return code [255]."
    cloud["fail.tpu-vm.ssh"] = f"{refusal}\n{refusal}"
    cloud["fail.tpu-vm.scp"] = "1|ssh: connect to host 1.2.3.4 port 22: Connection refused"
    out = cloud.run("setup")
    assert "attempt 2 of 4" in out and "attempt 3 of 4" in out and "sending the code: ssh was refused" in out
    cloud["fail.tpu-vm.ssh"] = "\n".join([refusal] * 4)
    error = last_error(cloud.run("setup", code=69))
    assert "ssh was refused 4 times" in error and "exited with return code [255]" in error

  def test_other_failures_of_ssh_are_not_repeated(self, cloud):
    cloud.run("create", *READY)
    cloud["fail.tpu-vm.ssh"] = "1|SSH Key is not present in the SSH agent"
    assert "ssh-add" in last_error(cloud.run("setup", code=1))
    assert len(cloud.calls("tpu-vm ssh")) == 1

  def test_a_late_worker_is_waited_for_and_named(self, cloud):
    cloud.run("create", *READY)
    cloud["late"] = "1 2"
    assert "worker 1 did not answer" in cloud.run("setup")
    cloud["late"] = "1 99"
    assert "worker 1 of slice did not answer" in last_error(cloud.run("setup", code=69))

  @pytest.mark.parametrize(
    "state,words",
    [("NONE NONE", "there is no slice slice"), ("SUSPENDED NONE", "is gone"), ("PROVISIONING NONE", "is not ready")],
  )
  def test_it_needs_a_slice(self, slice_there, state, words):
    slice_there["next"] = state
    assert words in one_error(slice_there.run("setup", code=1))


def test_the_stand_in_answers_as_the_scripts_ask():
  """Every gcloud command of the scripts is known to the stand-in, so that a new one is not tested by accident."""
  text = "".join(
    (tpu_cloud.ROOT / "launch" / f"tpu_{name}.sh").read_text() for name in ("lib", "memory", "check", "slice", "job")
  )
  asked = set(re.findall(r"compute tpus (queued-resources|tpu-vm) (\w+)", text))
  assert asked and all(f"{group}.{verb}" in tpu_cloud.GCLOUD for group, verb in asked)
