"""The batch files, on a SLURM of three nodes with four fake GPUs each.

The CPU and gloo stand in for the GPUs. How else jobs end: test_slurm_ends.py.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest
from cluster import COUNTS, FLAGS, holding, site, wait_for, world
from conftest import needs, program
from stages import agree, train

from backstage import ROOT
from workshop.jobs.mpirun import OPEN_MPI
from workshop.stages import STAGES, batch_files

pytestmark = pytest.mark.whole


# ------------------------------------------------------------ without a run


def test_slurm_accepts_every_file(slurm):
    """Every stage has one, which asks for what its name says."""
    names = batch_files()
    assert {*STAGES} <= {name.partition("-")[0] for name in names}
    for name in names:
        file = ROOT / "batchfiles" / f"batch-{name}.sh"
        said = slurm("sbatch", "--test-only", file, check=False)
        assert "to start at" in said.stderr, said.stderr
        text = file.read_text()
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))
        assert options["job-name"] == name
        if shape := re.fullmatch(r"\w+-(\d)n(\d)g", name):
            nodes, gpus = shape.groups()
            assert options["nodes"] == nodes
            assert options["gpus-per-node"] == gpus
            # a process for each GPU: from srun, or from the node's torchrun
            alone = "torchrun.sh" in text
            assert options["ntasks-per-node"] == ("1" if alone else gpus)
        for flag in re.findall(r"--(\w+-parallel) \d", text):
            script = STAGES[options["job-name"]].solution.read_text()
            assert f"\n    {flag.replace('-', '_')}: int" in script


WAYS = [  # to ask: by srun alone and by torchrun; nodes, cores and GPUs
    ("mpi", "--nodes=2 --gpus-per-node=h100:2", 2, 8, "0,1"),
    ("mpi", "--gres=gpu:4", 1, 8, "0,1,2,3"),
    ("tp", "--gpus-per-node=0 --gpus=4", 1, 8, "0,1,2,3"),
    ("mpi", "--gpus-per-node=0 --ntasks-per-node=2", 1, 1, None),
    ("tp", "--gpus-per-node=0 --ntasks-per-node=2", 1, 1, None),
    ("tp", "--gpus-per-node=4 --gpus-per-task=1 --ntasks-per-node=4", 1, 8,
     "0,1,2,3"),
    # a site that gives out whole nodes gives more GPUs than the job's
    ("mpi", "--gpus-per-node=2 --exclusive", 1, 8, "0,1"),
    ("3d", "--nodes=1 --gpus-per-node=2 --exclusive", 1, 8, "0,1")]


def test_the_days_table():
    """It is short, and each of its lines is a test."""
    text = (ROOT / "batchfiles" / "README.md").read_text()
    rows = re.findall(r"^\|.*\| `(test_\w+)`(?:, `(test_\w+)`)? \|$", text,
                      re.M)
    tests = "".join(next(ROOT.glob(f"tests/*/test_{name}.py")).read_text()
                    for name in ("slurm", "slurm_ends", "pbs", "fineweb"))
    assert 20 < len(rows) <= 30
    for name in filter(None, sum(rows, ())):
        assert f"def {name}(" in tests


def test_sbatch_says_the_size(slurm):
    """Each GPU has a process, with its cores, or each task without GPUs.

    What another job passes on is not asked for.
    """
    inherited = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "7",
                 "SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "3",
                 "SLURM_CPUS_PER_TASK": "5", "SLURM_CPUS_PER_GPU": "5",
                 "SLURM_GPUS_PER_NODE": "3"}
    with (slurm.counting("mpi"), slurm.counting("tp"), slurm.counting("3d"),
          site(slurm, "export SLURM_MPI_TYPE=none")):  # it asks no MPI
        jobs = [slurm.submit(stage, "--max-steps", 1, options=options.split(),
                             **inherited) for stage, options, *_ in WAYS]
        for job in jobs:
            assert slurm.wait(job)["JobState"] == "COMPLETED", slurm.log(job)
    ports = set()
    for job, (stage, _, nodes, cores, gpus) in zip(jobs, WAYS, strict=True):
        said = re.findall("^(node .*) port (.*)", slurm.log(job), re.M)
        assert sorted(line for line, _ in said) == [
            f"node {node} cores {cores} gpus {gpus}" for node in range(nodes)
            for _ in (gpus or "0,1").split(",")]
        ports |= {port for _, port in said}
        assert world(slurm.repo / f"runs/{stage}-{job}")[0] == nodes
    assert len(ports) == len(WAYS)  # jobs may be on a node at the same time
    assert "--pipeline-parallel 2 --tensor-parallel 2" in slurm.log(job)


def test_a_size_that_does_not_fit(slurm):
    """It is one line, before anything starts; so is another folder."""
    more = r"has 4 GPUs and 2 tasks, .* --ntasks-per-node=4$"
    uneven = "--nodes=2 --gpus-per-node=0 --gpus=3"
    few = slurm.repo / "batchfiles" / "batch-few.sh"
    text = few.with_name("batch-tp.sh").read_text()
    few.write_text(re.sub("--gpus-per-node=2|--cpus-per-gpu=8", "--gres=gpu:2",
                          text))
    jobs = {slurm.submit(name, options=options.split()): reason
            for name, options, reason in (
        ("lit-1n2g", "--gpus-per-node=4", more),
        ("ddp-1n4g", "--ntasks-per-node=2", more),
        ("ddp-1n1g", uneven, "one node has 2 GPUs, another 1; fix: "),
        ("few", "", "has 2 processes, and fewer cores; .*per-gpu=8$"))}
    jobs[slurm.submit("std", "--run-dir", "mine")] = (
        r"; fix: .*: WORKSHOP_RUN=DIR sbatch \.\.\.$")
    for job, reason in jobs.items():
        assert slurm.wait(job)["JobState"] == "FAILED"
        log = slurm.log(job)
        assert re.search(reason, log) and log.count("\n") == 1, log
    few.unlink()


def test_a_job_from_a_shell_without_activate(slurm):
    """It says so in one line; so does one that gets no variables."""
    submit = ("sbatch --parsable --output=%j.log {} 'my clone/batchfiles/"
              "batch-lit-1n1g.sh' --max-steps 1")
    activated = f". 'my clone/activate.sh' >/dev/null; {submit}"
    with slurm.counting("lit"):
        jobs = [slurm("bash", "-c", f"unset WORKSHOP; {command}",
                      WORKSHOP_INSTALL="no").stdout.strip() for command in (
            activated.format("--cpus-per-gpu=1"), submit.format(""),
            activated.format("--export=NONE"))]
        states = [slurm.wait(job)["JobState"] for job in jobs]
    assert states == ["COMPLETED", "FAILED", "FAILED"], slurm.log(jobs[0])
    for log in map(slurm.log, jobs[1:]):
        assert log.count("\n") == 1 and "source activate.sh" in log, log


@pytest.mark.parametrize(("line", "reason"), [
    ("false", "a command in .*site.sh failed"),
    ("exit", "site.sh calls exit, .*; fix: use return"),
    ("WORKSHOP_VENV=", r"\.venv is not up to date, and a job installs nothing"
     r"; fix: run `source .*/my\\ clone/activate\.sh`"),
    ("export WORKSHOP_DATA=/proc/nowhere",
     "/proc/nowhere, .* not exist; fix: correct it in site"),
    ("readonly run=/x", "site.sh makes run read-only, .* rename it"),
    ("kill -USR1 $$", "no time is left to train; .* longer --time"),  # SLURM's
])
def test_a_site_that_is_wrong(slurm, line, reason):
    """A job says so in one line, at once, and installs nothing."""
    with site(slurm, line):
        job = slurm.submit("ddp-1n1g", *FLAGS)
        end = slurm.wait(job)
    assert end["JobState"] == "FAILED" and end["Restarts"] == "0"
    log = slurm.log(job)
    assert re.search(reason, log) and log.count("\n") == 1, log
    assert not (slurm.repo / ".venv").exists()
    assert not (slurm.repo / "runs" / f"ddp-1n1g-{job}").exists()


# What a site or a user may have, and what is no business of a job's.
PROFILE = """\
set -euo pipefail
set -o noclobber
shopt -s expand_aliases nocasematch
alias srun='srun --label' grep='grep --color=always'
IFS=: run=/x job=77
echo Welcome
"""
NAMES = """\
run=/x job=77 flags=(--seed 5) gpus=9 tasks=7 element=_9 before=9
export processes=3 cores=2 after=9
fail() { :; }; train() { :; }; stage() { :; }; end_job() { :; }
cd() { builtin cd "$@" && ls; }
shopt -s expand_aliases nocasematch failglob
trap '' USR1 TERM
trap 'echo bye' EXIT
alias srun='srun --label'
IFS=:
"""
NAMED = "../../x JobState=FAILED Reason=no Restarts=7 Requeue=0 ArrayTaskId=1"


def test_what_others_print_and_set(slurm, tmp_path):
    """A job reads its own lines alone, and has names of its own."""
    (tmp_path / ".bash_profile").write_text(PROFILE)
    noisy = tmp_path / "noisy"
    noisy.write_text("printf Welcome\n")
    prolog = program(tmp_path / "prolog", "#!/bin/sh\necho print Welcome\n")
    names = tmp_path / "names"
    names.write_text(NAMES)
    ways = (  # variables of sbatch, its options, a line in site.sh
        ({"BASH_ENV": str(noisy)}, [], ""),
        ({"HOME": str(tmp_path), "POSIXLY_CORRECT": "1"}, [], ""),
        ({}, [], f"export SLURM_TASK_PROLOG='{prolog}' SLURM_LABELIO=1"),
        ({}, [], f". '{names}'"),
        ({}, [f"--job-name={NAMED}"], ""))
    for variables, options, line in ways:
        with slurm.counting("ddp"), site(slurm, line):
            job = slurm.submit("ddp-2n1g", "--max-steps", 2, "--prompt", "a b",
                               options=["--cpus-per-gpu=1", *options],
                               **variables)
            end = slurm.wait(job)
        log = slurm.log(job)
        assert end["JobState"] == "COMPLETED", log
        name, = (file.name for file in (slurm.repo / "runs").iterdir()
                 if file.name.endswith(f"-{job}"))
        assert name.startswith("_._.._x JobState" if options else "ddp-2n1g-")
        assert world(slurm.repo / "runs" / name) == (2, 2)
        assert re.search(f" {job}: 2 x 1 GPUs, on ", log)
        assert "--max-steps 2 --prompt a\\ b\n" in log


def test_nodes_that_do_not_answer(slurm, tmp_path):
    """A job says what they have printed in place of an answer."""
    own = program(tmp_path / "bash", "#!/bin/sh\necho Welcome\n")
    with site(slurm, f"PATH={own.parent}:$PATH"):
        job = slurm.submit("ddp-2n1g")
        assert slurm.wait(job)["JobState"] == "FAILED"
    assert re.fullmatch("ddp-2n1g: only 0 of 2 nodes reported .*; srun "
                        "printed: Welcome\n", slurm.log(job))


@pytest.mark.parametrize("name", [
    name for name in batch_files() if not re.search("-.n[12]g|-1n", name)])
def test_bash_instead_of_sbatch(slurm, name):
    """It says in one line what to type; both commands do what the file does.

    So it does in a shell that is inside another job, such as salloc's.
    """
    file = slurm.repo / "batchfiles" / f"batch-{name}.sh"
    flags = ("--max-steps", "1", "--prompt", "it's $1")
    said = slurm("bash", file, *flags, check=False)
    assert said.returncode == 1 and not said.stdout
    assert said.stderr.count("\n") == 1
    start = f"{file.name}: this shell is not a SLURM job; fix: "
    assert said.stderr.startswith(start)
    submit, _, here = said.stderr[:-1].partition("; or run it here: ")
    submit = submit.removeprefix(f"{start}submit it: ")
    job = slurm("bash", "-c", f"cd /; {submit}",
                SBATCH_PARTITION="closed").stdout.split()[-1]
    about = slurm("scontrol", "show", "job", job).stdout
    slurm("scancel", job)
    assert f"Command={file} {' '.join(flags)}\n" in about
    text = file.read_text()
    stage = re.search(r"\(stage (\w+)\)|workshop (doctor)", text)
    assert bool(stage) == bool(here)
    if stage:
        # with what the file itself gives to the script, such as its mesh
        own = re.findall(r" (--\w+-parallel) (\d)", text)
        given = [word for pair in own for word in pair]
        if '"$@"' in text:
            given += flags
        words = shlex.split(here)[1:]
        assert words == ["-m", "workshop", "launch", stage[1] or stage[2],
                         *["--"] * bool(given), *given]
        dry = slurm("bash", "-c", here.replace("launch", "launch --dry-run"),
                    PYTHONPATH=str(slurm.repo)).stdout
        assert dry.endswith(f"{shlex.join(given)}\n"), dry


@pytest.mark.parametrize("shell", ["dash", "zsh"])
def test_another_shell_instead_of_sbatch(slurm, shell):
    needs(shell)
    file = slurm.repo / "batchfiles" / "batch-std.sh"
    said = slurm(shell, file, "--max-steps", 1, check=False)
    assert said.returncode == 1 and not said.stdout
    assert said.stderr == ("batch file: this shell is not a SLURM job; fix: "
                           "use sbatch\n")


def test_bash_inside_another_job(slurm):
    """salloc's shell, a rank of srun, and a portal's terminal are no batch
    job: nothing trains, or requeues the other job.
    """
    needs("script")
    file = slurm.repo / "batchfiles" / "batch-std.sh"
    typed = f"bash '{file}' --max-steps 1"
    said = [slurm(*start, "bash", file, "--max-steps", 1, check=False).stderr
            for start in (("salloc", "--gpus=1"), ("srun", "--gpus=1"))]
    job = slurm("sbatch", "--parsable", "--output=%j.log", "--gpus=1",
                "--wrap", f'script -qec "{typed}" /dev/null </dev/null'
                ).stdout.strip()
    assert slurm.wait(job)["JobState"] == "FAILED"
    for text in *said, slurm.log(job):
        assert len(re.findall(
            r"^batch-std.sh: this shell is inside another job, \d+; fix: "
            r"submit it: sbatch .* --max-steps 1; or run it here: python -m "
            r"workshop launch std -- --max-steps 1\r?$", text, re.M)) == 1, (
                text)
    # a job that is the batch file's, by another way
    with slurm.counting("std"):
        job = slurm("sbatch", "--parsable", "--output=%j.log",
                    "--gpus-per-node=1", "--wrap", typed).stdout.strip()
        assert slurm.wait(job)["JobState"] == "COMPLETED", slurm.log(job)


def test_a_cell_submits_without_activate(slurm):
    """As in a portal's kernel: flags for the script, options for sbatch."""
    cell = ("from workshop.notebook.cells import submit; print(submit("
            "'std', '--max-steps 3', '--gpus-per-node=2'))")
    with slurm.counting("std"):
        said = slurm("bash", "-c", 'unset WORKSHOP; echo y | "$0" -c "$1"',
                     sys.executable, cell, PYTHONPATH=str(slurm.repo)).stdout
        job = re.search(r"batch job (\d+)", said)[1]
        assert slurm.wait(job)["JobState"] == "COMPLETED", said
    log = (slurm.repo.parent / f"slurm-{job}.out").read_text()
    assert f"job       std {job}: 1 x 2 GPUs" in log
    assert log.startswith("warning: one process trains, on one of 2 GPUs\n")
    assert slurm.result("std", job).column("step") == [0, 1, 2]


def test_a_greeting_is_no_variable(slurm, tmp_path):
    """A profile prints it: a cell that submits asks for what site.sh sets."""
    (tmp_path / ".bash_profile").write_text("echo Welcome\n")
    ask = ("from workshop.jobs import interpreter\n"
           "print(*interpreter.site_variables(), sep='\\n')")
    with site(slurm, "export SBATCH_QOS=b"):
        names = slurm(sys.executable, "-c", ask, HOME=str(tmp_path),
                      PYTHONPATH=str(slurm.repo)).stdout.split("\n")
    assert {"SBATCH_QOS", "HOME", "PATH"} < {*names}
    assert not [name for name in names if "Welcome" in name]


def test_all_sizes(slurm):
    """Six jobs, which do not run because the partition is closed."""
    said = slurm(slurm.repo / "batchfiles" / "all-sizes.sh", "lit",
                 "--seed", 5, SBATCH_PARTITION="closed")
    jobs = re.findall(r"batch job (\d+)", said.stdout)
    commands = [slurm("scontrol", "show", "job", job).stdout for job in jobs]
    slurm("scancel", *jobs)
    for text, nodes, gpus in zip(commands, "111222", "124124", strict=True):
        assert re.search(
            rf"Command=.*/batch-lit-{nodes}n{gpus}g.sh --max-steps 100 "
            "--eval-every 100 --seed 5", text)
    wrong = slurm(slurm.repo / "batchfiles" / "all-sizes.sh", check=False)
    assert wrong.returncode == 1 and "no such stage" in wrong.stderr


# ------------------------------------------------------------ to their end


JOINS = ("from backstage import mpi\n"  # as stage mpi does, without torch
         "mpi.name_mpi_ranks(mpi.join_mpi())\n")


@pytest.mark.parametrize("line", ["export SLURM_MPI_TYPE=pmix", ""])
def test_mpi_on_three_nodes(slurm, data, tmp_path, line):
    """By Open MPI: srun's PMIx says who is there, or mpirun; std's losses."""
    needs("mpiexec")
    if line and not list(Path("/usr/lib").glob("*/pmix2")):
        pytest.skip("needs SLURM's PMIx")
    flags = ("--max-steps", 3, "--minibatch-size", 6)
    with site(slurm, line):
        job = slurm.submit("mpi", *FLAGS, *flags, **OPEN_MPI,
                           options=["--nodes=3", "--gpus-per-node=1"])
        assert slurm.wait(job)["JobState"] == "COMPLETED", slurm.log(job)
    asks_srun = "by mpirun: srun does not pass" not in slurm.log(job)
    assert asks_srun == bool(line)
    assert world(slurm.repo / f"runs/mpi-{job}") == (3, 3)
    agree(slurm.result("mpi", job),
          train("std", tmp_path / "alone", *flags, data=data))


def test_who_tells_mpi(slurm):
    """MPICH's: srun, which site.sh says to SLURM, else its mpirun."""
    needs("mpiexec.mpich")
    library = slurm.folder / "libmpi.so.12"  # as docs/launching.md says
    library.symlink_to(next(Path("/usr/lib").glob("*/libmpich.so.12")))
    own = program(slurm.folder / "mpirun",
                  '#!/bin/sh\nexec mpiexec.mpich "$@"\n')
    with slurm.counting("mpi", JOINS):
        for line, state, said in (
                ("export SLURM_MPI_TYPE=pmi2", "COMPLETED", "command   srun"),
                (f"PATH={own.parent}:$PATH", "COMPLETED", "by mpirun: srun "),
                ("", "FAILED", "is not this mpirun's MPI")):  # Open MPI's
            with site(slurm, line):
                job = slurm.submit(
                    "mpi", "--max-steps", 1, **OPEN_MPI, options=[
                        "--cpus-per-gpu=1",
                        f"--export=ALL,LD_LIBRARY_PATH={library.parent}"])
                log = slurm.wait(job)["JobState"], slurm.log(job)
            assert log[0] == state and said in log[1], log
            if state == "COMPLETED":
                assert world(slurm.repo / f"runs/mpi-{job}") == (1, 2)


def test_from_inside_another_job(slurm):
    """As from a portal's JupyterLab: its variables are not the new job's."""
    file = slurm.repo / "batchfiles" / "batch-lit-2n2g.sh"
    with slurm.counting("lit"):
        outer = slurm("sbatch", "--parsable", "--output=outer.log",
                      "--ntasks=3", "--mem-per-cpu=10", "--wrap", f"""
            srun --ntasks=1 env SLURM_MEM_PER_NODE=7 SLURM_EXACT=1 \
                SLURM_TRES_PER_TASK=cpu:3 SLURM_STEP_NUM_TASKS=3 \
                sbatch --parsable --output=inner.log --cpus-per-gpu=2 \
                '{file}' --max-steps 9
            sleep 600""").stdout.strip()
        said = slurm.repo.parent / "outer.log"
        wait_for(lambda: said.exists() and said.read_text().strip())
        job = said.read_text().strip()
        end = slurm.wait(job)
    slurm("scancel", outer)
    log = (slurm.repo.parent / "inner.log").read_text()
    assert end["JobState"] == "COMPLETED" and end["Restarts"] == "0", log
    run = slurm.repo / "runs" / f"lit-2n2g-{job}"
    assert world(run) == (2, 4)
    commit = slurm("git", "-C", slurm.repo, "rev-parse", "--short", "HEAD")
    for what in (f"lit-2n2g {job}: 2 x 2 GPUs, on", f" {commit.stdout[:-1]}",
                 "solutions/train_gpt2_lit.py --run-dir", "torch 2."):
        assert what in log[:log.index("| step")]
    files = list(run.glob("gpus-*.txt"))
    assert len(files) == 2  # hostnames
    assert all("dmon" in file.read_text() for file in files)
    wait_for(lambda: not slurm.processes(job))


def test_a_job_runs_the_working_copy(slurm):
    """It passed the check, and is edited since; bad input ends the job."""
    script = slurm.repo / "code" / "train_gpt2.py"
    with slurm.counting("lit"), holding(script, f"{COUNTS}# mine\n"):
        slurm(sys.executable, "-c",
              "import sys; from workshop.diff import passed_checks\n"
              "passed_checks.record('lit', sys.argv[1].encode())", COUNTS,
              PYTHONPATH=str(slurm.repo))
        job = slurm.submit("lit-1n1g", "--max-steps", 0)
        end = slurm.wait(job)
    script.with_name(".checked.json").unlink()
    log = slurm.log(job)
    assert f"{script.name} --run-dir" in log and log.startswith("warning: ")
    assert log.count("nothing to do: check --max-steps") == 1
    assert end["JobState"] == "FAILED" and end["Restarts"] == "0", log



def test_the_steps_of_another_job(slurm):
    """In the same run: they do not send a job that fails to the queue."""
    with slurm.counting("std", """import os, sys
saved = sys.argv[2] + "/checkpoints"
os.makedirs(saved)
open(saved + "/step_00000009.pt", "w")
sys.exit("another process is training in this run")
"""):
        job = slurm.submit("std")
        end = slurm.wait(job)
    assert end["JobState"] == "FAILED" and end["Restarts"] == "0"
    assert "no further step was saved; fix: find" in slurm.log(job)


def test_a_command_that_fails_in_a_finished_run(slurm):
    """The job fails; that the run was finished before is no success."""
    folder = str(slurm.repo / "runs" / "finished")
    with slurm.counting("std"):
        states = [slurm.wait(slurm.submit(
            "std", "--max-steps", steps, options=["--cpus-per-gpu=1"],
            WORKSHOP_RUN=folder))["JobState"] for steps in (2, 0, 2)]
    assert states == ["COMPLETED", "FAILED", "COMPLETED"]


def test_the_doctor_as_a_job(slurm):
    """More ranks than nodes are in test_launchers.py."""
    job = slurm.submit("doctor", options=[
        "--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-gpu=1"])
    state, log = slurm.wait(job)["JobState"], slurm.log(job)
    assert state == "COMPLETED", log
    for line, pattern in zip(re.findall("^ok     (.*)", log, re.M), (
            "rank 0: local rank 0 on node1, cpu",
            "rank 1: local rank 0 on node2, cpu",
            "training: .*, the same weights on all ranks",
            r"all-reduce: 2 ranks over gloo, 4 MB in [\d.]+ ms: [\d.]+ "
            "GB/s per rank",
            "node1 communicates over eth0.*",
            "node2 communicates over eth0.*"),
            strict=True):
        assert re.fullmatch(pattern, line)
