"""launch/tpu_run.sh runs, watches, resumes and fetches: against a stand-in cloud (tpu_cloud.py).

Its workers are folders. The script for the workers, launch/tpu_worker.sh, runs for real in them: locks, exit codes,
signals.
"""

import os
import pathlib
import signal

import pytest
from tpu_cloud import Cloud
from tpu_run_test import PROGRAM, READY, last_error, one_error

WORKDIR = "gs://bucket/run one"
SECRET = "hf_do-not-show-me"
SIGTERM_WAS_SEEN = "asked to end"


@pytest.fixture(scope="module")
def set_up(tmp_path_factory):
  """A folder with a slice of two workers that is set up."""
  path = tmp_path_factory.mktemp("set_up")
  place = Cloud(path)
  place.run("create", *READY, "--spot")
  place.run("setup")
  place.calls()
  return path


@pytest.fixture
def cloud(tmp_path, set_up):
  place = Cloud(tmp_path, like=set_up)
  yield place
  place.close()


def words_of(arguments):
  return "".join(f"[{argument}]" for argument in arguments) + "\n"


class TestRun:
  def test_it_starts_on_all_workers_and_keeps_the_exit_codes(self, cloud):
    cloud["exits.1"] = "3"
    odd = "--config.note=a 'quote', $HOME and \"more\""
    out = cloud.run("run", *PROGRAM, "--", odd)
    assert "started on 2 workers of slice in gs://bucket/run one" in out and "logs --follow" in out
    for worker, code in ((0, "0\n"), (1, "3\n")):
      cloud.wait_for(worker, ".seed_jax/run/exit_code")
      assert cloud.worker(worker, "main") == words_of([*PROGRAM, odd])
      assert cloud.worker(worker, ".seed_jax/run/exit_code") == code
      assert cloud.worker(worker, "environment").split() == ["gs://bucket/seed_jax/xla"]
    out = cloud.run("status")
    assert f"the run in {WORKDIR}\nworker 0: ended, exit code 0\nworker 1: ended, exit code 3\n" in out
    cloud.run("run", *PROGRAM)  # what has ended may be run again
    cloud.wait_for(1, "main", words_of(PROGRAM))

  def test_it_outlives_the_connection_and_refuses_a_second_run(self, cloud):
    cloud["hold"] = ""
    cloud.run("run", *PROGRAM)
    cloud.wait_for_the_program()
    assert "worker 1: running" in cloud.run("status")
    for verb in (("run", *PROGRAM), ("setup",), ("run", PROGRAM[0], "--workdir=gs://bucket/other")):
      assert f"a run is in progress on slice in {WORKDIR}" in one_error(cloud.run(*verb, code=1))
    assert cloud.worker(0, "main").count("\n") == 1

  def test_a_connection_that_breaks_starts_nothing_twice(self, cloud):
    cloud["hold"] = ""
    cloud["late"] = "1 1 worker.sh start"  # worker 0 starts, worker 1 does not hear of it the first time
    assert "starting: worker 1 did not answer" in cloud.run("run", *PROGRAM)
    cloud.wait_for_the_program()
    (first, start, again) = cloud.calls("tpu_worker.sh", "start")
    assert first.replace("--worker=0", "--worker=all") == start == again
    assert cloud.worker(0, "main") == cloud.worker(1, "main") == words_of(PROGRAM)

  def test_a_busy_machine_that_takes_long_to_begin_is_waited_for(self, cloud):
    cloud.program(cloud.stub / "remote" / "setsid", '#!/bin/sh\n/bin/sleep 2\nexec /usr/bin/setsid "$@"\n')
    cloud.program(cloud.stub / "remote" / "sleep", "#!/bin/sh\n")  # seconds pass at once
    assert "started on 2 workers" in cloud.run("run", *PROGRAM)

  def test_several_workers_need_a_bucket(self, cloud):
    error = one_error(cloud.run("run", PROGRAM[0], "--workdir=/data/run", code=1))
    assert "slice has 2 workers" in error and "gs://BUCKET/FOLDER" in error
    cloud["workers"] = "1"
    cloud.run("run", PROGRAM[0], "--workdir=/data/run")

  def test_the_config_names_its_extras(self, cloud):
    cloud.run("run", "--config=configs/game.py:a,b", PROGRAM[1])
    assert cloud.worker(1, "pip").endswith(".seed_jax/code[alfworld]\n")

  def test_data_is_copied_and_variables_are_set(self, cloud):
    (cloud.stub / "bucket" / "games v1").mkdir(parents=True)
    (cloud.stub / "bucket" / "games v1" / "game").write_text("a game")
    cloud.run("run", *PROGRAM, "--data=GAMES=gs://games v1", "--env=NOTE=a b=c")
    for worker in range(2):
      cloud.wait_for(worker, ".seed_jax/run/exit_code")
      assert cloud.worker(worker, "settings") == "a b=c|a game\n"
    cloud["next"] = "SUSPENDED NONE"  # a new slice gets them again
    cloud.run("resume")
    cloud.wait_for(1, "settings", "a b=c|a game")
    error = last_error(cloud.run("run", *PROGRAM, "--data=GAMES=gs://none", code=1))
    assert "cannot copy gs://none" in error

  def test_stop_lets_the_program_write_its_checkpoint(self, cloud):
    cloud["hold"] = ""
    cloud.run("run", *PROGRAM)
    cloud.wait_for_the_program()
    assert "the slice stays and costs" in cloud.run("stop")
    out = cloud.run("status")
    assert out.count("stopped, exit code 75 (checkpoint written; resume)") == 2
    out = cloud.run("logs", "--worker=all")
    assert out.count(SIGTERM_WAS_SEEN) == 2 and "[w1] the program begins" in out
    cloud.run("stop")

  def test_a_program_without_its_supervisor_is_seen_and_stopped(self, cloud):
    cloud["hold"] = ""
    cloud.run("run", *PROGRAM)
    cloud.wait_for_the_program()
    for worker in range(2):
      os.kill(int(cloud.worker(worker, ".seed_jax/run/supervisor")), signal.SIGKILL)
    assert cloud.run("status").count(": running") == 2
    assert "a run is in progress" in one_error(cloud.run("run", *PROGRAM, code=1))
    process = cloud.start("stop")
    while "stop" not in (cloud.stub / "calls").read_text():
      pass
    assert "may still be running on slice; status looks" in cloud.interrupt(process)
    cloud.run("stop", "--grace=08")
    assert cloud.run("status").count(": stopped") == 2
    script = cloud.stub / "worker-1" / ".seed_jax" / "launch" / "tpu_worker.sh"
    script.write_text(script.read_text().replace("\nstop() {", "\nrunning() { true; }\nstop() { return 0\n"))
    assert "is still running on worker 1 of slice" in one_error(cloud.run("stop", code=1))

  def test_of_two_runs_at_once_one_begins(self, cloud):
    cloud["hold"] = ""
    names = ("one", "two")
    both = [cloud.start("run", PROGRAM[0], f"--workdir=gs://bucket/{name}") for name in names]
    codes = [(process.communicate(timeout=600), process.returncode)[1] for process in both]
    assert sorted(codes) == [0, 1]
    cloud.wait_for_the_program()
    won = f"gs://bucket/{names[codes.index(0)]}\n"
    assert cloud.worker(0, ".seed_jax/run/workdir") == cloud.worker(1, ".seed_jax/run/workdir") == won

  def test_a_program_that_does_not_end_is_killed(self, cloud):
    cloud["hold"] = ""
    python = cloud.stub / "worker-0" / ".seed_jax" / "venv" / "bin" / "python"
    python.write_text(python.read_text().replace("sleep 0.2; exit 75", ":"))
    cloud.run("run", *PROGRAM)
    cloud.wait_for_the_program()
    cloud.run("stop", "--grace=1")
    assert "worker 0: stopped, exit code 137" in cloud.run("status")

  def test_logs_follow_until_the_end_and_over_a_broken_connection(self, cloud):
    assert "nothing was run here yet" in one_error(cloud.run("logs", code=1))
    cloud["hold"] = ""
    cloud.run("run", *PROGRAM)
    cloud.wait_for_the_program()
    cloud["fail.tpu-vm.ssh"] = "255|Connection reset by peer"
    process = cloud.start("logs", "--follow")
    assert process.stdout.readline() == "[w0] the program begins\n"
    cloud["hold"] = None
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "[w0] seed_jax: the program ended with exit code 0" in rest

  def test_a_new_run_takes_over_nothing_of_the_one_before(self, cloud):
    first = ("--env=NOTE=first", "--secret=HF_TOKEN", "--cache=gs://other/cache")
    cloud.run("run", *PROGRAM, *first, HF_TOKEN=SECRET)
    for worker in range(2):
      cloud.wait_for(worker, ".seed_jax/run/exit_code")
    assert cloud.run("ssh", "--", "echo", "a shell") == "a shell\n"
    cloud.run("ssh")
    assert cloud.calls("tpu-vm ssh slice")[-1].strip().endswith("--worker=0")  # no command of the run's
    assert "run needs --config" in one_error(cloud.run("run", code=2))
    cloud.run("run", *PROGRAM)
    cloud.wait_for(1, "settings", "|\n")
    assert cloud.worker(1, "environment").split() == ["gs://bucket/seed_jax/xla"]

  def test_ssh_runs_a_command_on_one_worker(self, cloud):
    assert cloud.run("ssh", "--worker=1", "--", "echo", "a  b;", "c").splitlines() == ["a  b; c"]
    cloud.run("ssh")
    assert cloud.calls("tpu-vm ssh slice")[-1].strip().endswith("--worker=0")


class TestSecrets:
  def test_a_value_reaches_the_program_and_nothing_else(self, cloud):
    cloud["hold"] = ""
    manager = "--secret=WANDB=projects/mine/secrets/wandb/versions/3"
    out = cloud.run("run", *PROGRAM, "--secret=HF_TOKEN", manager, HF_TOKEN=SECRET)
    for worker in range(2):
      cloud.wait_for(worker, "ready")
      assert cloud.worker(worker, "environment").split()[:2] == [SECRET, "from-the-manager"]
      (cloud.stub / f"worker-{worker}" / "environment").unlink()
    calls = cloud.calls()
    assert sum(r"tpu_worker.sh\ secrets" in call for call in calls) == 2
    assert "from-the-manager" not in out + "".join(calls)
    leaks = [
      file for file in cloud.stub.parent.rglob("*") if file.is_file() and SECRET in file.read_text(errors="ignore")
    ]
    assert SECRET not in out + "".join(calls) and leaks == []
    assert f"secret={manager[9:]}\n" in (cloud.state / "slice").read_text()

  def test_a_broken_connection_sends_it_again(self, cloud):
    cloud["fail.tpu-vm.ssh"] = "\n\n255|Connection refused"
    cloud.run("run", *PROGRAM, "--secret=HF_TOKEN", HF_TOKEN=SECRET)
    for worker in range(2):
      cloud.wait_for(worker, "environment", SECRET)

  def test_what_the_manager_refuses_gets_one_line(self, cloud):
    cloud["no_access"] = ""
    out = cloud.run("run", *PROGRAM, "--secret=WANDB=projects/mine/secrets/wandb/versions/3", code=1)
    error = last_error(out)
    assert "worker 0: cannot read projects/mine/secrets/wandb" in error and "secretAccessor" in error
    assert cloud.worker(0, "main") == ""


class TestKeepAlive:
  def keep(self, cloud, *arguments, code=0, **variables):
    return cloud.run("run", "--keep-alive", *PROGRAM, *arguments, code=code, **variables)

  def test_a_run_that_ends_well_ends_it(self, cloud):
    assert f"the run in {WORKDIR} is done" in self.keep(cloud)
    assert cloud.calls("queued-resources delete") == []

  def test_code_75_is_resumed_on_the_same_slice(self, cloud):
    cloud["exits.0"] = cloud["exits.1"] = "75\n75\n0"
    out = self.keep(cloud)
    assert "restart 2" in out and "is done" in out
    assert cloud.worker(1, "main") == words_of(PROGRAM) * 3
    assert cloud.calls("queued-resources delete") == [] and cloud.calls("scp") == []

  def test_a_preempted_slice_is_made_again_set_up_and_resumed(self, cloud):
    cloud["hold"] = ""
    process = cloud.start("run", "--keep-alive", *PROGRAM, "--secret=HF_TOKEN", HF_TOKEN=SECRET)
    before = cloud.wait_for_the_program()
    cloud.calls()
    cloud["next"] = "ACTIVE PREEMPTED\nSUSPENDING PREEMPTED\nSUSPENDED NONE"
    cloud.wait_for_the_program(after=before)
    assert len(cloud.calls("queued-resources create", "--spot")) == 1
    assert cloud.worker(1, "environment").split()[0] == SECRET
    cloud["hold"] = None
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "is done" in rest
    assert cloud.worker(0, "main") == words_of(PROGRAM)  # the folder is new: the run began once in it

  def test_faults_and_full_zones_do_not_end_it(self, cloud):
    cloud["hold"], cloud["reason"] = "", "There is no more capacity in the zone"
    process = cloud.start("run", "--keep-alive", *PROGRAM)
    before = cloud.wait_for_the_program()
    cloud["fail.queued-resources.create"] = cloud["fail.queued-resources.delete"] = "1|UNAVAILABLE: 503"
    cloud["next"] = "SUSPENDED NONE\nSUSPENDED NONE\nNONE NONE\nFAILED NONE\nNONE NONE"
    cloud.wait_for_the_program(after=before)
    cloud["hold"] = None
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "asking again" in out and "is done" in out, out

  def test_a_failure_ends_it_with_the_programs_code_and_last_words(self, cloud):
    cloud["exits.1"] = "9"
    out = self.keep(cloud, code=9)
    assert "[w1] the program begins" in out and "the program failed on worker 1 of slice with exit code 9" in out
    assert cloud.worker(1, "main").count("\n") == 1

  def test_the_worker_that_failed_is_named_not_those_that_noticed(self, cloud):
    cloud["exits.0"], cloud["exits.1"] = "76", "9"
    assert "the program failed on worker 1 of slice with exit code 9" in self.keep(cloud, code=9)

  def test_a_program_ended_before_it_could_listen_starts_again(self, cloud):
    cloud["exits.0"], cloud["exits.1"] = "143\n0", "76\n0"
    assert "restart 1" in self.keep(cloud)

  def test_workers_that_lost_each_other_start_again(self, cloud):
    cloud["exits.0"], cloud["exits.1"] = "76\n0", "76\n0"
    assert "restart 1" in self.keep(cloud)

  def test_others_that_hang_after_one_has_failed_are_ended(self, cloud):
    cloud["hold"], cloud["exits.1"] = "", "4"
    python = cloud.stub / "worker-1" / ".seed_jax" / "venv" / "bin" / "python"
    python.write_text(python.read_text().replace('-e "$STUB/hold"', '! -e "$STUB/worker-0/ready"'))
    python = cloud.stub / "worker-0" / ".seed_jax" / "venv" / "bin" / "python"
    python.write_text(python.read_text().replace("exit 75", "exit 1"))
    assert "exit code 1" in self.keep(cloud, code=1, TPU_POLL="0.05", TPU_PATIENCE="10")
    assert SIGTERM_WAS_SEEN in cloud.run("logs")

  def test_restarts_within_one_second_are_runs_of_their_own(self, cloud):
    cloud.program(cloud.stub / "date", "#!/bin/sh\necho 20300101-000000\n")
    cloud["exits.0"] = "75\n75"
    assert "restart 2" in self.keep(cloud) and cloud.worker(0, "main").count("\n") == 3

  def test_restarts_have_a_limit(self, cloud):
    cloud["exits.0"] = "75\n75\n75\n75"
    error = last_error(self.keep(cloud, "--max-restarts=2", code=1))
    assert "preempted 3 times, more than --max-restarts=2" in error
    assert cloud.worker(0, "main").count("\n") == 3

  def test_code_that_is_changed_meanwhile_is_not_sent(self, cloud):
    cloud["hold"] = ""
    process = cloud.start("run", "--keep-alive", *PROGRAM)
    before = cloud.wait_for_the_program()
    (cloud.root / "configs" / "quickstart.py").write_text("broken")
    cloud["next"] = "SUSPENDED NONE"
    cloud.wait_for_the_program(after=before)
    cloud["hold"] = None
    process.communicate(timeout=600)
    assert cloud.worker(1, ".seed_jax/code/configs/quickstart.py") == '"""Quick."""\n'

  def test_a_slice_that_is_deleted_stays_deleted(self, cloud):
    cloud["hold"] = ""
    process = cloud.start("run", "--keep-alive", *PROGRAM)
    cloud.wait_for_the_program()
    cloud.run("delete", "--force")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "slice was deleted; this command again, with --topology=v4:2x2x2" in last_error(
      out
    )
    assert cloud.calls("queued-resources create") == []

  def test_workers_that_do_not_answer_at_first_are_asked_again(self, cloud):
    cloud["late"] = "1 7 worker.sh"  # more than the attempts of one start
    out = self.keep(cloud)
    assert "worker 1 of slice did not answer" in out and "is done" in out
    cloud["late"] = "1 99 worker.sh"
    self.keep(cloud, code=69)

  def test_a_run_in_progress_is_taken_up(self, cloud):
    cloud["hold"] = ""
    cloud.run("run", *PROGRAM)
    process = cloud.start("resume", "--keep-alive")
    assert "exists and is ready" in process.stdout.readline()
    assert "is in progress; watching it" in process.stdout.readline()
    cloud["hold"] = None
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "is done" in rest and cloud.worker(0, "main") == words_of(PROGRAM)

  def test_a_stop_ends_it(self, cloud):
    cloud["hold"] = ""
    process = cloud.start("run", "--keep-alive", *PROGRAM)
    cloud.wait_for_the_program()
    cloud.run("stop")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "the run was stopped; resume goes on" in out

  def test_a_start_that_fails_for_another_reason_is_told(self, cloud):
    cloud["no_access"] = ""
    error = last_error(self.keep(cloud, "--secret=WANDB=projects/mine/secrets/wandb/versions/3", code=1))
    assert "cannot read" in error


class TestAfterwards:
  def test_resume_knows_what_was_asked_for(self, cloud):
    cloud.run("run", *PROGRAM, "--secret=HF_TOKEN", HF_TOKEN=SECRET)
    cloud.wait_for(1, ".seed_jax/run/exit_code")
    cloud.calls()
    cloud["next"] = "SUSPENDED PREEMPTED"
    bare = dict(PROJECT=None, ZONE=None)
    assert "HF_TOKEN is not set" in one_error(cloud.run("resume", code=2, **bare))
    cloud.run("resume", HF_TOKEN=SECRET, **bare)
    cloud.wait_for(1, "main", words_of(PROGRAM))
    (create,) = cloud.calls("queued-resources create")
    assert "--spot" in create and "--accelerator-type=v4-16" in create and "--project=mine" in create

  def test_fetch_brings_report_metrics_and_policy(self, cloud, tmp_path):
    files = ("report.html", "metrics.jsonl", "train.json", "policy/base/weights", "checkpoints/1/state")
    place = cloud.stub / "bucket" / "bucket" / "run one"
    for name in files:
      (place / name).parent.mkdir(parents=True, exist_ok=True)
      (place / name).write_text(name)
    assert "no final policy yet" in cloud.run("fetch", f"--workdir={WORKDIR}")
    (place / "policy" / "final").mkdir()
    (place / "policy" / "final" / "weights").touch()
    target = cloud.root / "runs" / "run one"
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {"report.html", "metrics.jsonl", "train.json"}
    cloud.run("fetch", f"--workdir={WORKDIR}/", f"--to={tmp_path}/here")
    assert (tmp_path / "here" / "policy" / "final" / "weights").exists()
    cloud.run("fetch", f"--workdir={WORKDIR}", f"--to={tmp_path}/all", "--all")
    assert (tmp_path / "all" / "checkpoints" / "1" / "state").exists()
    cloud["fail.storage.rsync"] = "1|One or more URLs matched no objects"
    assert "cannot fetch gs://bucket/run one" in one_error(cloud.run("fetch", f"--workdir={WORKDIR}", code=1))

  def test_fetch_from_a_single_worker(self, cloud, tmp_path):
    place = tmp_path / "data dir"
    (place / "policy" / "final").mkdir(parents=True)
    for name in ("report.html", "notes.bin", "policy/final/weights"):
      (place / name).write_bytes(b"\0\n\0")
    cloud.run("fetch", f"--workdir={place}", f"--to={tmp_path}/here")
    target = pathlib.Path(tmp_path / "here")
    assert (target / "policy" / "final" / "weights").read_bytes() == b"\0\n\0" and not (target / "notes.bin").exists()
    assert "there is no folder" in one_error(cloud.run("fetch", "--workdir=/no/such", code=1))

  def test_delete_spares_a_run_in_progress(self, cloud):
    cloud["hold"] = ""
    cloud.run("run", *PROGRAM)
    cloud.wait_for_the_program()
    assert "a run is in progress on slice" in one_error(cloud.run("delete", code=1))
    assert cloud.calls("queued-resources delete") == []
    assert "slice is deleted" in cloud.run("delete", "--force")
    assert cloud.calls("queued-resources delete", "--force")
    assert "there is no slice slice" in cloud.run("delete") and not (cloud.state / "slice").exists()
    assert "request NONE, slice NONE" in cloud.run("status")
