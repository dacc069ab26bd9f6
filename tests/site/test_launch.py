"""`python -m workshop launch`: where it is, and the command it becomes."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cluster import world
from conftest import CLONE_PATH, needs, program, python

from backstage import ROOT
from backstage.errors import UserError
from workshop import __main__ as workshop
from workshop.jobs import launch
from workshop.stages import STAGES

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
         "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_CPUS_ON_NODE": "32"}


RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1"}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    def say(**texts):
        for name, text in texts.items():
            program(tmp_path / name, f"#!/bin/sh\necho '{text}'\n")

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return say


def command(stage, env, devices=0):
    place = launch.find_job_place(env, lambda: devices)
    return " ".join(launch.make_command(
        place, STAGES[stage].launcher, ["s.py", "--seed", "1"], env))


@pytest.mark.parametrize(("more", "per_node", "cores"), [
    ({"SLURM_GPUS_ON_NODE": "4"}, 4, 8),
    ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4, 8),
    ({"SLURM_GPUS_PER_NODE": "2"}, 2, 16),
    ({"SLURM_GPUS_PER_NODE": "a100:1,h100:3"}, 4, 8),
    ({"SLURM_GPUS_ON_NODE": "0", "SLURM_TASKS_PER_NODE": "8(x2)"}, 8, 4),
    ({"SLURM_TASKS_PER_NODE": "8(x2)"}, 8, 4),
    ({"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_ON_NODE": "",
      "SLURM_JOB_CPUS_PER_NODE": "72,36"}, 4, 9)])  # in salloc's shell
def test_in_a_slurm_job(programs, more, per_node, cores):
    programs(scontrol="n1\nn2")
    assert command("ddp", SLURM | more) == (
        f"srun --nodes=2 --ntasks={2 * per_node} "
        f"--ntasks-per-node={per_node} --cpus-per-task={cores} --overlap "
        "--kill-on-bad-exit=1 python s.py --seed 1")


@pytest.mark.parametrize(("says", "options"), [
    ("HYDRA build details", "--ppn"),
    ("mpiexec (OpenRTE) 4, Open MPI",
     "-x OMP_NUM_THREADS -x WORKSHOP_DATA --bind-to none -N")])
def test_in_a_pbs_job(programs, tmp_path, says, options):
    programs(mpiexec=says)
    (tmp_path / "nodes").write_text("b\nb\na\na\n")
    env = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "3.pbs",
           "OMP_NUM_THREADS": "3", "NCPUS": "8", "WORKSHOP_DATA": "/data",
           "CUDA_VISIBLE_DEVICES": "GPU-1"}  # the other node's is another
    place = launch.find_job_place(env, lambda: 0)
    assert str(place) == "PBS job 3.pbs: 2 x 2 processes, on b a"
    start = f"mpiexec -n 4 {options} 2 python"
    assert command("mpi", env) == f"{start} s.py --seed 1"
    assert command("fsdp", env) == (
        f"{start} -m workshop.as_torchrun s.py --seed 1")
    # PBS has counted the node's cores, which two processes share
    assert command("mpi", env | {"OMP_NUM_THREADS": "8"}) == start.replace(
        "python", "env OMP_NUM_THREADS=4 python s.py --seed 1")


@pytest.mark.parametrize(("stage", "env", "devices", "expected"), [
    ("std", {}, 4, "python s.py"),
    ("mpi", {}, 4, "mpirun -n 4 --bind-to none python s.py"),
    ("ddp", {}, 4, "torchrun --standalone --nproc-per-node 4 s.py"),
    # torchrun takes no flag from a variable
    ("lit", {"PET_NNODES": "1", "PET_RDZV_ID": "7"}, 0, "env -u PET_NNODES -u "
     "PET_RDZV_ID torchrun --standalone --nproc-per-node 2 s.py")])
def test_on_a_machine_without_a_job(programs, stage, env, devices, expected):
    programs(mpirun="mpirun (Open MPI) 4")
    assert command(stage, env, devices) == f"{expected} --seed 1"


def test_the_doctor_is_launched_as_a_stage_is(
        programs, capsys, monkeypatch):
    programs(mpirun="HYDRA build details")
    for name in ("RANK", "SLURM_JOB_ID", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [
        "workshop", "launch", "doctor", "--dry-run"])
    launch.main(workshop.parse_command())
    assert re.search(r"^command   mpirun -n \d+ python -m workshop doctor "
                     "--ranks$", capsys.readouterr().out, re.M)


def test_what_is_wrong_is_one_line(programs, tmp_path):
    programs(scontrol="n1\nn2")
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\n")
    for env, words in (
            ({"RANK": "0"}, "is a rank already"),
            (SLURM | {"SLURM_TASKS_PER_NODE": "2,1"}, "--ntasks-per-node"),
            (SLURM | {"SLURM_TASKS_PER_NODE": "2(x2),1"}, r"2\(x2\),1 tasks"),
            *((SLURM | {name: junk}, f"unset {name}$") for name in (
                "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE",
                "SLURM_TASKS_PER_NODE", "SLURM_CPUS_ON_NODE")
              for junk in ("N/A", "-1", "4x", "1e3", "9" * 5000)),
            ({"PET_NNODES": "1:4"}, "PET_NNODES is 1:4"),
            ({"PBS_NODEFILE": str(nodes)}, "not name all nodes equally")):
        with pytest.raises(UserError, match=words):
            command("ddp", env)
    programs(scontrol="n1\n' >&2; exit 1; echo '")
    with pytest.raises(UserError, match=r"^`scontrol .*` fails; fix: [^\n]+$"):
        command("ddp", SLURM)


@pytest.mark.whole
@pytest.mark.skipif(sys.version_info < (3, 11), reason="no PYTHONSAFEPATH")
@pytest.mark.parametrize("words", [
    "fineweb/countfineweb.py fineweb/demo", "code/hellaswag.py --help",
    "code/train_gpt2.py --help", "benchmarks/ladder.py --help",
    "-m workshop diff ddp", "-m workshop.as_torchrun {}/main.py"])
def test_scripts_find_what_lies_beside_them_with_a_safe_path(words, tmp_path):
    (tmp_path / "main.py").write_text("import beside, backstage\n"
                                      "print(backstage.__file__)")
    (tmp_path / "beside.py").touch()
    end = python(ROOT, *words.format(tmp_path).split(), PYTHONSAFEPATH="1",
                 PYTHONPATH=CLONE_PATH,
                 **(RANK if "torchrun" in words else {}))
    assert end.returncode == 0, end.stderr
    if "torchrun" in words:
        assert end.stdout.startswith(str(ROOT))


def test_the_flags_after_the_dashes_are_the_scripts(monkeypatch):
    for words in (["--dry-run", "ddp"], ["ddp", "--dry-run"]):
        monkeypatch.setattr(sys, "argv", ["workshop", "launch", *words, "--",
                                          "--preset", "tiny"])
        args = workshop.parse_command()
        assert args.dry and args.flags == ["--preset", "tiny"]


def test_a_job_of_two_nodes(slurm):
    """As typed in salloc's shell: its variables are not the step's options.

    Nor are they of the command that is printed, if somebody types that.
    """
    run = slurm.repo / "runs" / "mine"
    with slurm.counting("ddp"):
        job = slurm("sbatch", "--parsable", "--output=%j.log", "--nodes=2",
                    "--gpus-per-node=2", "--ntasks-per-node=1",
                    "--cpus-per-task=4", "--wrap", f"""
            export SLURM_TRES_PER_TASK=cpu:3 SLURM_EXACT=1
            launch() {{ '{sys.executable}' -m workshop launch "$@"; }}
            launch ddp -- --max-steps 2 --run-dir '{run}'
            eval "$(launch ddp --dry-run -- --max-steps 3 --run-dir '{run}' |
                sed -n 's/^command//p')" """, PYTHONPATH=str(slurm.repo),
                    SBATCH_MEM_PER_NODE="100").stdout.strip()
        slurm.wait(job)
    assert slurm.job(job)["JobState"] == "COMPLETED", slurm.log(job)
    log = slurm.log(job)
    assert re.search(rf"^place     SLURM job {job}: 2 x 2 processes, on "
                     + " ".join(slurm.nodes[:2]), log, re.M), log
    assert re.search(r"^command   env -u SLURM_EXACT -u SLURM_MEM_PER_NODE -u "
                     r"SLURM_TRES_PER_TASK srun --nodes=2 --ntasks=4 ", log,
                     re.M)
    assert world(run) == (2, 4)
    steps = (run / "metrics.csv").read_text().split("\n")[1:-1]
    assert [int(line.partition(",")[0]) for line in steps] == [0, 1, 2]


def test_each_node_unpacks_an_archive(slurm, tmp_path):
    """Both a job of a batch file and launch: each node has its own disk."""
    needs("uv")
    venv, folder = tmp_path / "venv", slurm.repo.parent
    disk, archive, script = (
        folder / name for name in ("disk", "venv.tar", "job.sh"))
    disk.mkdir()
    subprocess.run(["uv", "venv", "-q", "--relocatable", "--python",
                    sys.executable, venv], check=True)
    site, = venv.glob("lib/python*/site-packages")
    (site / "all.pth").write_text(sysconfig.get_path("purelib"))
    shutil.copy(Path(sys.prefix, "workshop-base"), venv)
    pack = "bash", ROOT / "setup.sh", "pack", archive
    subprocess.run(pack, check=True,
                   env=os.environ | {"VIRTUAL_ENV": str(venv)})
    shutil.rmtree(venv)
    script.write_text(f"""#!/bin/bash
        #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1
        set -e
        srun mount -t tmpfs tmpfs '{disk}'
        export TMPDIR='{disk}' WORKSHOP_VENV='{archive}' WORKSHOP_INSTALL=no
        cd '{slurm.repo}'
        sed -i '/^WORKSHOP_VENV=/d' site.sh
        . ./activate.sh
        python -m workshop launch lit -- --max-steps 2 \\
            --run-dir runs/unpacked
        srun rm -r '{disk}/gpt2-workshop-{os.getuid()}'
        """.replace("\n        ", "\n"))
    submit = "sbatch", "--parsable", "--output=%j.log"
    with slurm.counting("lit"):
        by_hand = slurm(*submit, script).stdout.strip()
        slurm.wait(by_hand)
        batch = slurm(*submit, "--nodes=2", slurm.repo / "batchfiles" /
                      "batch-lit-1n1g.sh", "--max-steps", 2, TMPDIR=str(disk),
                      WORKSHOP_VENV=str(archive)).stdout.strip()
        slurm.wait(batch)
    for job, run in (by_hand, "unpacked"), (batch, f"lit-1n1g-{batch}"):
        assert slurm.job(job)["JobState"] == "COMPLETED", slurm.log(job)
        assert slurm.log(job).count("unpacking") == 2  # once on each node
        assert world(slurm.repo / "runs" / run) == (2, 2)
