"""The batch files, on a SLURM of two nodes with four fake GPUs each.

Jobs are real, and so are their ends: signals, crashed nodes, killed ranks.
The CPU and gloo stand in for the GPUs.
"""

import contextlib
import csv
import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import nbformat
import pytest
import tiktoken
from cluster import FLAGS, wait_for
from conftest import needs
from nbclient import NotebookClient
from stages import train, weight_distance
from tiktoken_ext import openai_public

from backstage import ROOT, vocabulary
from workshop.stages import FIRST, LESSONS, SIZES, STAGES

pytestmark = pytest.mark.whole

BATCHFILES = sorted((ROOT / "batchfiles").glob("batch-*.sh"))
SUBMITTED = [stage for stage in LESSONS  # in every size
             if set(STAGES[stage].jobs) == set(SIZES)]
FEW = (*FLAGS, "--max-steps", 6)
LONG = (*FLAGS, "--max-steps", 400, "--checkpoint-every", 20,
        "--eval-every", 200, "--generate-every", 400,
        "--learning-rate", 2e-4)  # so low that rounding errors do not grow


@pytest.fixture(scope="module")
def single(slurm, tmp_path_factory):
    """A run of the single-device stage with these flags, without SLURM."""
    @functools.cache
    def run(*flags):
        folder = tmp_path_factory.mktemp("single") / "run"
        return train("std", folder, *flags[4:], data=flags[3])

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(slurm.repo.parent)  # where the jobs are submitted
        yield run


def agree(result, single):
    """The same losses at the same steps, and the same weights."""
    for column in ("step", "loss", "val_loss"):
        values, expected = ([-1 if value is None else value for value in
                             run.column(column)] for run in (result, single))
        assert values == pytest.approx(expected, rel=1e-5, abs=0), column
    assert weight_distance(result.checkpoint()["model"],
                           single.checkpoint()["model"]) <= 0.02 * 3e-3


def world(result):
    """How many nodes and processes trained, as the run says."""
    record = json.loads((result.folder / "hyperparameters.json").read_text())
    return record["nodes"], record["world_size"]


# ------------------------------------------------------------ without a run


def test_every_job_is_there():
    names = [file.stem.removeprefix("batch-") for file in BATCHFILES]
    assert {"ddp", "lit", "fsdp"} <= set(SUBMITTED)
    assert sorted(names) == sorted([
        "doctor", "fineweb", *(f"{stage.name}-{size}"
                               for stage in STAGES.values()
                               for size in stage.jobs)])


@pytest.mark.parametrize("file", BATCHFILES, ids=lambda file: file.stem)
def test_a_file_asks_for_what_its_name_says(slurm, file):
    said = slurm("sbatch", "--test-only", file, check=False)
    assert "to start at" in said.stderr, said.stderr
    text = file.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))
    assert file.stem == f"batch-{options['job-name']}"
    shape = re.fullmatch(rf"({'|'.join(STAGES)})-(\d)n(\d)g",
                         options["job-name"])
    if shape:
        stage, nodes, gpus = shape[1], shape[2], shape[3]
        assert options["nodes"] == nodes
        assert options["gpus-per-node"] == gpus
        # a process for each GPU: from srun, or from the node's torchrun
        alone = stage == FIRST or "torchrun.sh" in text
        assert options["ntasks-per-node"] == ("1" if alone else gpus)
        assert f'"$(stage {stage})"' in text


def test_what_slurm_refuses(slurm):
    """One line each, SLURM's own."""
    name = slurm.repo / "batchfiles" / "batch-ddp-1n1g.sh"
    for options, variables, reason in (
            ((), {"SBATCH_ACCOUNT": "nobody"}, "Invalid account"),
            ((), {"SBATCH_QOS": "none"}, "Invalid qos"),
            (("--gpus-per-node=5",), {}, "node configuration is not")):
        said = slurm("sbatch", *options, name, check=False, **variables)
        assert said.returncode and not said.stdout
        line, = (line for line in said.stderr.splitlines())
        assert reason in line


@pytest.mark.parametrize(("site", "reason"), [
    ("false", "a command in .*site.sh failed"),
    ("WORKSHOP_VENV=", r"\.venv is not up to date, and a job installs nothing"
     r": run `source .*/my clone/activate\.sh`"),
    ("export WORKSHOP_DATA=/nowhere", "/nowhere, .* not exist: fix site"),
])
def test_a_site_that_is_wrong(slurm, site, reason):
    """A job says so in one line, at once, and installs nothing."""
    file = slurm.repo / "site.sh"
    right = file.read_text()
    try:
        file.write_text(f"{right}{site}\n")
        job = slurm.submit("ddp-1n1g", *FLAGS)
        end = slurm.wait(job, timeout=30)
    finally:
        file.write_text(right)
    assert end["JobState"] == "FAILED" and end["Restarts"] == "0"
    log = slurm.log(job)
    assert re.search(reason, log) and log.count("\n") == 1, log
    assert not (slurm.repo / ".venv").exists()
    assert not (slurm.repo / "runs" / f"ddp-1n1g-{job}").exists()


def test_all_sizes(slurm):
    """Six jobs, which do not run because the partition is closed."""
    said = slurm(slurm.repo / "batchfiles" / "all-sizes.sh", "lit",
                 "--seed", 5, SBATCH_PARTITION="closed")
    jobs = re.findall(r"batch job (\d+)", said.stdout)
    commands = [slurm("scontrol", "show", "job", job).stdout for job in jobs]
    slurm("scancel", *jobs)
    sizes = [re.search(r"Command=.*/batch-lit-(\dn\dg).sh (.*)", text).groups()
             for text in commands]
    flags = "--max-steps 100 --eval-every 100 --seed 5"
    assert sizes == [(size, flags) for size in SIZES]
    wrong = slurm(slurm.repo / "batchfiles" / "all-sizes.sh", check=False)
    assert wrong.returncode == 1 and "name a stage" in wrong.stderr


# ------------------------------------------------------------ to their end


def test_runs_to_their_end(slurm, single):
    """The right world, the losses of one device; two jobs on one node."""
    one_node = ("--cpus-per-task=2", f"--nodelist={slurm.nodes[0]}")
    jobs = {
        ("std-1n1g", 1): slurm.submit("std-1n1g", *FEW, options=one_node),
        ("ddp-1n2g", 2): slurm.submit("ddp-1n2g", *FEW, options=one_node),
        ("ddp-1n2g", 2, "too"): slurm.submit(
            "ddp-1n2g", *FEW, options=one_node),
        ("lit-2n2g", 4): slurm.submit(
            "lit-2n2g", *FEW, options=["--cpus-per-task=1"]),
        ("fsdp-1n2g", 2): slurm.submit(
            "fsdp-1n2g", *FEW, options=["--cpus-per-task=1"])}
    expected = single(*FEW)
    for (name, n, *_), job in jobs.items():
        end = slurm.wait(job)
        log = slurm.log(job)
        assert end["JobState"] == "COMPLETED", log
        assert end["Restarts"] == "0"
        result = slurm.result(name, job)
        assert world(result) == (int(name[-4]), n)
        agree(result, expected)
        assert f"world size {n}" in log or n == 1


@pytest.mark.parametrize(("name", "n", "microbatch"), [
    ("tp-1n4g", 4, 4), ("3d-2n4g", 8, 2)])  # as large as they can be
def test_a_mesh_on_the_nodes(slurm, single, name, n, microbatch):
    """With its batch file's flags, the losses of one device."""
    job = slurm.submit(name, *FEW, "--microbatch-size", microbatch,
                       options=["--cpus-per-task=1"])
    assert slurm.wait(job)["JobState"] == "COMPLETED", slurm.log(job)
    result = slurm.result(name, job)
    assert world(result) == (int(name[-4]), n)
    agree(result, single(*FEW))


def test_srun_tells_mpi(slurm, single):
    """Where site.sh names what SLURM calls the MPI library; else an error."""
    needs("mpiexec.mpich")
    library = slurm.lab_folder / "libmpi.so.12"  # as docs/launching.md says
    library.symlink_to(next(Path("/usr/lib").glob("*/libmpich.so.12")))
    file = slurm.repo / "site.sh"
    right = file.read_text()
    options = ["--cpus-per-task=1",
               f"--export=ALL,LD_LIBRARY_PATH={library.parent}"]
    try:
        file.write_text(f"{right}export SLURM_MPI_TYPE=pmi2\n")
        job = slurm.submit("mpi-1n2g", *FEW, options=options)
        end = slurm.wait(job)
    finally:
        file.write_text(right)
    assert end["JobState"] == "COMPLETED", slurm.log(job)
    result = slurm.result("mpi-1n2g", job)
    assert world(result) == (1, 2)
    agree(result, single(*FEW))
    job = slurm.submit("mpi-1n2g", *FEW, options=options)
    assert slurm.wait(job)["JobState"] == "FAILED", slurm.log(job)
    assert "srun --mpi=list" in slurm.log(job)


def test_from_inside_another_job(slurm, single):
    """As from a portal's JupyterLab: its variables are not the new job's."""
    file = slurm.repo / "batchfiles" / "batch-ddp-2n4g.sh"
    outer = slurm("sbatch", "--parsable", "--output=outer.log", "--ntasks=3",
                  "--mem-per-cpu=10", "--wrap", f"""
        srun --ntasks=1 env SLURM_MEM_PER_NODE=7 SLURM_TRES_PER_TASK=cpu:3 \
            SLURM_EXACT=1 SLURM_STEP_NUM_TASKS=3 \
            sbatch --parsable --output=inner.log --cpus-per-task=4 \
            '{file}' {" ".join(map(str, FEW))}
        sleep 600""").stdout.strip()
    said = slurm.repo.parent / "outer.log"
    wait_for(lambda: said.exists() and said.read_text().strip(), 30)
    job = said.read_text().strip()
    state = slurm.wait(job)["JobState"]
    log = (slurm.repo.parent / "inner.log").read_text()
    assert state == "COMPLETED", log
    slurm("scancel", outer)
    result = slurm.result("ddp-2n4g", job)
    assert world(result) == (2, 8)
    agree(result, single(*FEW))

    head = log[:log.index("| step")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], text=True,
                            cwd=slurm.repo, capture_output=True).stdout.strip()
    for what in (f"ddp-2n4g {job}: 2 x 4 GPUs, on", f" {commit}", "torch 2.",
                 "solutions/train_gpt2_ddp.py --run", "world size "
                 "8", "preset tiny, data data, "):
        assert what in head
    files = list(result.folder.glob("gpus-*.txt"))
    assert len(files) == (2 if slurm.mode == "ns" else 1)  # hostnames
    assert all("dmon" in file.read_text() for file in files)
    wait_for(lambda: not slurm.processes(job), 10)


@pytest.mark.parametrize("state", ["passed", "edited since", "never checked"])
def test_the_script_on_the_desk(slurm, state):
    """It is used if it has passed the check; bad input ends the job."""
    desk = slurm.repo / "code" / "train_gpt2.py"
    kept = desk.read_text()
    ddp = (slurm.repo / "solutions" / "train_gpt2_ddp.py").read_text()
    try:
        desk.write_text(ddp)
        if state != "never checked":
            subprocess.run(
                [sys.executable, "-c",
                 "from workshop.lesson import checked\n"
                 "from workshop.stages import DESK\n"
                 "checked.record('ddp', DESK.read_bytes())"],
                cwd=slurm.repo, check=True,
                env=os.environ | {"PYTHONPATH": str(slurm.repo)})
        if state == "edited since":
            desk.write_text(f"{ddp}# mine\n")
        job = slurm.submit("ddp-1n1g", "--preset", "tiny", "--data", "none",
                           "--device", "cpu")
        end = slurm.wait(job)
    finally:
        desk.write_text(kept)
        desk.with_name(".checked.json").unlink(missing_ok=True)
    log = slurm.log(job)
    said = log.splitlines()[0]
    if state == "never checked":
        assert "train_gpt2.py has never passed the check for ddp" in said
        assert f"{slurm.repo}/solutions/train_gpt2_ddp.py --run" in log
    else:
        assert f"{desk} --run" in log
        assert ("which has passed the check" in said) == (state == "passed")
        assert said.startswith("warning: ") == (state == "edited since")
    assert log.count("none: there is no such folder: check --data") == 1
    assert end["JobState"] == "FAILED" and end["Restarts"] == "0", log


def test_a_lesson_submits(slurm, monkeypatch):
    """Its cells for SLURM, in a notebook, with what the site names."""
    site = slurm.repo / "site.sh"
    right = site.read_text()
    book = nbformat.read(
        slurm.repo / "notebooks" / "diff_ddp.ipynb", as_version=4)
    book.cells = [cell for cell in book.cells if cell.source.startswith(
        ("import sys", "slurm()", "submit(", "queue(", "log("))]
    silent, queue, log = book.cells[2:]
    submit = nbformat.v4.new_code_cell(silent.source)
    book.cells.insert(3, submit)
    book.cells.insert(3, nbformat.v4.new_code_cell(  # somebody answers
        "get_ipython().kernel.raw_input = lambda question: 'y'"))
    submit.source = submit.source.replace("--max-steps 100", " ".join(
        map(str, FLAGS)).replace("--data ", "--data ../../"))
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_", "WORKSHOP_")):
            monkeypatch.delenv(name)
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm.env[name])
    client = NotebookClient(book, timeout=60, resources={
        "metadata": {"path": str(slurm.repo / "notebooks")}})
    try:
        site.write_text(f"{right}export SBATCH_TIMELIMIT=7 "
                        "SBATCH_PARTITION=gpu\n")
        with client.setup_kernel():
            for index, cell in enumerate(book.cells):
                client.execute_cell(cell, index)
                if cell is queue:
                    job, = re.findall(r"batch job (\d+)", shown(submit))
                    assert slurm.wait(job)["JobState"] == "COMPLETED"
    finally:
        site.write_text(right)
    assert "SBATCH_PARTITION=gpu" in shown(book.cells[1])
    assert "Nothing is submitted:" in shown(silent)  # Run All: nobody does
    assert slurm.job(job)["TimeLimit"] == "00:07:00"
    assert job in shown(queue)
    assert f"finished: {slurm.repo}/runs/ddp-1n2g-{job}" in shown(log)


def shown(cell):
    return "".join(output.get("text", "") + output.get("data", {}).get(
        "text/plain", "") for output in cell.outputs)


def test_fineweb_as_a_job(slurm):
    """Documents become shards, which the tools find whole."""
    texts, words = slurm.repo.parent / "texts", slurm.repo.parent / "words"
    for folder in (texts, words):
        folder.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"text number {number} " * 100)
    vocabulary.save(tiktoken.Encoding(
        "bytes", pat_str=openai_public.r50k_pat_str,
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={vocabulary.END_OF_TEXT: 256}), words)
    job = slurm.submit(
        "fineweb", "--dataset", "texts", "--files", "*.txt", "--vocabulary",
        "words", "--shard-size", 20_000, "--out", "shards",
        options=["--cpus-per-task=2"])
    assert slurm.wait(job)["JobState"] == "COMPLETED", slurm.log(job)
    count = slurm(sys.executable, slurm.repo / "fineweb" / "countfineweb.py",
                  "shards", "--verify", PYTHONPATH=str(slurm.repo))
    expected = sum(len(file.read_bytes()) + 1 for file in texts.iterdir())
    assert f"{expected - 20_000:,}" in count.stdout, count.stdout


def test_the_doctor_misses_the_gpus(slurm):
    """SLURM gives some, which torch does not find."""
    job = slurm.submit("doctor", options=[
        "--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=1"])
    state, log = slurm.wait(job)["JobState"], slurm.log(job)
    assert state == "FAILED", log
    line, = [line for line in log.splitlines() if line.startswith("error: ")]
    assert "SLURM gave this job GPUs" in line and "driver" in line


def test_the_doctor_as_a_job(slurm):
    job = slurm.submit("doctor", options=[
        "--gpus-per-node=0", "--ntasks-per-node=2", "--cpus-per-task=1"])
    state, log = slurm.wait(job)["JobState"], slurm.log(job)
    assert state == "COMPLETED", log
    answers = [line for line in log.splitlines() if line.startswith("ok")]
    speed = r"in [\d.]+ ms: [\d.]+ GB/s per rank"
    if slurm.mode != "ns":  # one machine, by one name
        assert len(answers) == 7
        assert re.fullmatch("ok     all-reduce: 4 ranks over gloo, 4 MB "
                            + speed, answers[5])
        return
    assert answers[:4] == [
        f"ok     rank {rank}: local rank {rank % 2} on node{rank // 2 + 1}, "
        "cpu" for rank in range(4)]
    assert "the same weights on all ranks" in answers[4]
    for answer, name in zip(answers[5:8], (
            "all-reduce: 4", "in the nodes: 2", "between nodes: 2"),
            strict=True):
        assert re.fullmatch(f"ok     {name} ranks over gloo, 4 MB {speed}",
                            answer)
    assert [answer.split(",")[0] for answer in answers[8:]] == [
        f"ok     node{node} talks over eth0" for node in (1, 2)]


# ------------------------------------------------------- before their end


class Disturbed:
    """A job that is about to be disturbed."""

    def __init__(self, slurm, stage):
        self.slurm = slurm
        self.name = f"{stage}-2n1g"
        self.job = slurm.submit(self.name, *LONG,
                                options=["--cpus-per-task=1"])
        self.result = slurm.result(self.name, self.job)
        self.starts = 0

    def get_going(self):
        """Wait until it has started again, and saved a step since then."""
        self.starts += 1
        wait_for(lambda: self.log.count("\njob  ") + self.log.startswith("job")
                 == self.starts, explain=lambda: self.log)
        first = self.last_step()
        wait_for(lambda: self.log.rpartition("\njob  ")[2].count("| step")
                 and self.last_step() >= first + 22,
                 explain=lambda: self.log)

    @property
    def log(self):
        return self.slurm.log(self.job)

    def last_step(self):
        try:
            with open(self.result.folder / "metrics.csv", newline="") as file:
                return max([int(row[0]) for row in csv.reader(file)
                            if row and row[0].isdigit()], default=0)
        except FileNotFoundError:
            return 0

    def kill_rank(self):
        """On the second node."""
        pid, = (pid for pid, node in self.slurm.ranks(self.job)
                if node == self.slurm.nodes[1])
        os.kill(pid, signal.SIGKILL)

    def crash(self):
        """The second node, which comes back."""
        node = self.slurm.nodes[1]
        self.slurm.lab("kill-node", node)
        self.slurm("scontrol", "update", f"nodename={node}", "state=down",
                   "reason=x")
        self.slurm.lab("start-node", node)
        self.get_going()

    def cancel(self):
        """And requeue it after that."""
        self.slurm("scancel", self.job)
        assert self.slurm.wait(self.job)["JobState"] == "CANCELLED"
        wait_for(lambda: not self.slurm.processes(self.job), 20)
        newest = sorted((self.result.folder / "checkpoints").iterdir())[-1]
        assert newest.suffix == ".pt" and ZipFile(newest).testzip() is None
        self.slurm("scontrol", "requeue", self.job)


@pytest.mark.parametrize(("stage", "disturb"), [  # torchrun, srun alone
    ("ddp", Disturbed.crash), ("lit", Disturbed.cancel)], ids=["ddp", "lit"])
def test_nothing_is_lost(slurm, single, stage, disturb):
    """A killed rank, and what happens to the whole job.

    The run ends as if nothing had happened.
    """
    expected = single(*LONG)
    job = Disturbed(slurm, stage)
    job.get_going()
    job.kill_rank()
    job.get_going()
    disturb(job)
    assert slurm.wait(job.job)["JobState"] == "COMPLETED", job.log
    assert job.log.count("requeueing, to go on after") == 1
    agree(job.result, expected)


def test_a_stuck_job_says_why(slurm):
    """It ends by itself; its log says whom to ask, who names the rank."""
    job = slurm("sbatch", "--parsable", "--output=%j.log",
                slurm.repo / "batchfiles" / "batch-ddp-2n1g.sh", *FLAGS,
                "--max-steps", 100_000, "--checkpoint-every", 100_000,
                WORKSHOP_TIMEOUT="8").stdout.strip()
    wait_for(lambda: "| step   20/" in slurm.log(job), 200,
             lambda: slurm.log(job))
    (pid,) = (pid for pid, node in slurm.ranks(job) if node == slurm.nodes[1])
    send(signal.SIGSTOP, [pid])
    assert slurm.wait(job)["JobState"] == "FAILED"
    folder = slurm.repo / "runs" / f"ddp-2n1g-{job}"
    last = slurm.log(job).splitlines()[-1]
    assert last.endswith(f"python -m workshop why '{folder}'")
    said = slurm(sys.executable, "-m", "workshop", "why", job, check=False,
                 PYTHONPATH=str(slurm.repo))
    assert said.returncode == 1
    assert f"rank 1 on {slurm.nodes[1]}" in said.stdout.splitlines()[0], (
        said.stdout)


def send(number, processes):
    """Send a signal to those that have not ended."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_preempted_and_out_of_time(slurm):
    """An urgent job takes the node; later the time limit comes near.

    One job alone, for it keeps a core busy all the time: with srun and
    torchrun, through which a signal has the longest way.
    """
    node = f"--nodelist={slurm.nodes[0]}"
    job = slurm.submit(
        "ddp-1n1g", *FLAGS, "--max-steps", 10**6,
        options=["--time=9", "--cpus-per-task=1", node])

    def wait(count, text):
        wait_for(lambda: slurm.log(job).count(text) >= count,
                 explain=lambda: f"{slurm.job(job)}{slurm.log(job)}")

    wait(1, "| step   1")
    urgent = slurm("sbatch", "--parsable", "--partition=urgent", node,
                   "--exclusive", "--wrap", "true").stdout.strip()
    wait(1, "resuming after step")
    assert slurm.wait(urgent)["JobState"] == "COMPLETED"
    # SLURM looks twice a minute whose end is near
    slurm("scontrol", "update", f"jobid={job}", "timelimit=2")
    wait(1, "stopped by SIGUSR1")
    slurm("scontrol", "update", f"jobid={job}", "timelimit=9")
    wait(2, "resuming after step")
    log = slurm.log(job)
    assert "stopped by SIGTERM, checkpoint saved" in log
    assert "stopped by SIGUSR1, checkpoint saved" in log
    slurm("scancel", job)
    slurm.wait(job)
    steps = slurm.result("ddp-1n1g", job).column("step")
    assert steps == list(range(len(steps)))
