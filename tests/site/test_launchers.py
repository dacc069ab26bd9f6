"""Any launcher: who a process is, where rank 0 is, and what is missing."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields

import pytest
from conftest import CLONE_PATH, needs, program, python
from stages import refused, run_command, start_stage

from backstage import ROOT, process
from backstage.errors import UserError
from backstage.process import find_launcher, name_ranks
from rankcheck.engine.ranks import free_port
from rankcheck.system.sources import INSTALLED, SCRIPT, Sources
from rankcheck_testing.support import wait_for
from workshop.as_torchrun import find_rank_0, join_world

OPEN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
HYDRA = {**PMI, "MPI_LOCALRANKID": "1"}
PALS = {**PMI, "PALS_RANKID": "5"}
STEP = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[03-04,07]"}
DAEMON = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
          "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "nowhere.invalid",
            "MASTER_PORT": "29500"}
SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}  # of a job, in no step


@pytest.mark.parametrize(("env", "launcher"), [
    ({**STEP, "SLURM_STEP_NUM_TASKS": ""}, ""), (OPEN, "Open MPI"),
    (HYDRA, "MPICH or Intel MPI"), (PALS, "PALS"),
    (PMI, "PMI"), (STEP, "srun"), ({**STEP, **PMI}, "srun"),
    # mpirun has started its own daemons by srun
    ({**DAEMON, **OPEN}, "Open MPI"), ({**DAEMON, **HYDRA},
                                       "MPICH or Intel MPI")])
def test_who_has_started_it(env, launcher):
    assert find_launcher(env) == (launcher, 8 if launcher else 1)


@pytest.mark.parametrize(("loaded", "launcher"), [
    ({"lightning": None}, "Lightning"), ({}, "python")])
def test_a_sites_variable_is_not_lightnings(loaded, launcher, monkeypatch):
    monkeypatch.setattr(sys, "modules", {**{
        name: module for name, module in sys.modules.items()
        if name != "lightning"}, **loaded})
    assert process.find_start({"NODE_RANK": "0"})["launcher"] == launcher


@pytest.mark.parametrize(("tasks", "nodes", "node"), [
    ("4(x2)", "gpu[03-04,07]", "gpu03"), ("4", "gpu3", "gpu3"),
    ("2(x2)", "a1,b[1-2]", "a1"), ("4(x2)", "n-[7,9]-gpu", "n-7-gpu")])
def test_names_of_a_step(tasks, nodes, node):
    named = {**SHELL, **STEP, "SLURM_STEP_TASKS_PER_NODE": tasks,
             "SLURM_STEP_NODELIST": nodes}
    assert join_world(named) == "srun"
    assert named | TORCHRUN | {
        "LOCAL_WORLD_SIZE": tasks[0], "MASTER_ADDR": node,
        "MASTER_PORT": "20007"} == named


def test_what_is_named_already_or_by_nobody_stays():
    lightning = {name: TORCHRUN[name] for name in (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    for env in (SHELL, {"PMI_RANK": "0", "PMI_SIZE": "1"},
                {**STEP, **TORCHRUN}, TORCHRUN, lightning):
        named = dict(env)
        name_ranks(named)
        assert named == env
    with pytest.raises(UserError, match="equally many on each"):
        name_ranks({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4,3"})


@pytest.mark.parametrize("size", ["1", "8"])
def test_the_ranks_of_one_node_meet_there(size):
    env = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size,
           "LOCAL_WORLD_SIZE": size}
    name_ranks(env)
    assert env["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("env", [
    {"RANK": "0"}, {"WORLD_SIZE": "4"}, {"LOCAL_RANK": "0"},
    {"LOCAL_WORLD_SIZE": "2"}, {"RANK": "", "WORLD_SIZE": ""},
    {**STEP, "RANK": "2"},
    *({**TORCHRUN, name: value} for name, value in (
        ("RANK", "8"), ("RANK", "-1"), ("RANK", "one"), ("LOCAL_RANK", "4"),
        ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "9"), ("MASTER_PORT", ""),
        ("LOCAL_WORLD_SIZE", "all"), ("MASTER_ADDR", ""))),
    *({other: TORCHRUN[other] for other in TORCHRUN if other != name}
      for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
], ids=str)
def test_names_that_say_no_rank(env):
    """Pods of Kubernetes have some of them, and old shells may."""
    with pytest.raises(UserError) as error:
        name_ranks(dict(env))
    for name in set(env) & set(TORCHRUN):
        assert f"{name}={env[name]}" in str(error.value)
    for name in {*TORCHRUN} - {*env} - {"LOCAL_WORLD_SIZE"}:
        assert f"no {name}" in str(error.value)


@pytest.mark.parametrize("name", STEP)
@pytest.mark.parametrize("value", [None, "", "x", "9" * 5000])
def test_some_variables_of_a_step(name, value):
    """One line, or as if srun had not started it."""
    env = {**STEP, name: value}
    if value is None:
        del env[name]
    try:
        name_ranks(env)
    except UserError as error:
        assert len(str(error)) < 600 and "\n" not in str(error)
    else:
        assert name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
                        "SLURM_STEP_NODELIST") and (
            "RANK" not in env or env["MASTER_ADDR"] == value)


def test_the_flag_of_the_launcher_before_torchrun(monkeypatch):
    """torch.distributed.launch says the local rank twice."""
    monkeypatch.setattr(sys, "argv", ["--local-rank=1", "--local-rank=0"])
    name_ranks(dict(TORCHRUN))
    assert sys.argv == ["--local-rank=0"]  # which tyro does not know


@pytest.mark.parametrize(("env", "words"), [
    (SHELL, "no launcher has started"),
    ({"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0"}, "the world size")])
def test_without_a_launcher_there_is_no_world(env, words):
    with pytest.raises(UserError, match=re.escape(words)):
        join_world(env)


@pytest.mark.parametrize(("host", "words"), [
    ("nowhere.invalid", "rank 0 should be on nowhere.invalid"),
    # an address for documentation: no machine has it
    ("192.0.2.77", f"export MASTER_ADDR={socket.gethostname()}")])
def test_rank_0_is_not_where_it_is_said(host, words):
    with pytest.raises(UserError, match=re.escape(words)):
        find_rank_0({"RANK": "0", "MASTER_ADDR": host})


@pytest.mark.parametrize(("stage", "env", "words"), [
    ("mpi", {"RANK": "x", "WORLD_SIZE": "four"},
     ("RANK=x", "WORLD_SIZE=four", "no LOCAL_RANK")),
    *((stage, {**OPEN, "OMPI_COMM_WORLD_RANK": "0"},
       ("Open MPI has started 8 processes",
        "`torchrun --nproc-per-node 8 "))
      for stage in ("std", "ddp"))], ids=str)
def test_a_stage_that_cannot_know_its_rank_says_so(
        stage, env, words, data, tmp_path):
    refused(start_stage(stage, tmp_path / "run", data=data, env={
        **os.environ, **env}).result(tmp_path), *words)
    assert not (tmp_path / "run").exists()


def test_the_other_ranks_leave_it_to_rank_0(monkeypatch):
    monkeypatch.setattr(process.time, "sleep", lambda seconds: None)
    for number in range(1, 4):
        with pytest.raises(SystemExit) as end:
            name_ranks({**HYDRA, "PMI_RANK": str(number)})
        assert end.value.code == 1


@pytest.mark.whole
def test_a_script_that_joins_nobody_does_not_train_twice(data, tmp_path):
    ranks = start_stage(
        "std", tmp_path / "run", data=data, world_size=2,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "none"}).wait()
    lines = [line for rank in ranks for line in rank.err.splitlines()]
    assert [rank.status for rank in ranks] == [1, 1] and len(lines) == 1
    assert "does not connect them" in lines[0]
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------- the real launchers


TORCH = [sys.executable, "-m", "torch.distributed.run"]


DIES = """\
import os
import torch
import torch.distributed as dist
from backstage import process

process.name_ranks()
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] > os.environ["TORCHELASTIC_RESTART_COUNT"]:
    os.kill(os.getpid(), 9)
dist.all_reduce(torch.ones(1))
os.write(1, f"met again, {process.find_start()}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.whole
def test_torchrun_restarts_after_a_killed_rank(tmp_path):
    """The README's command, with --max-restarts; nobody knows the machine."""
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in (
        ROOT / "activate.sh").read_text()  # as run_command
    script = program(tmp_path / "dies.py", DIES)
    done = run_command(
        *TORCH, "--standalone", "--local-addr", "nowhere.invalid",
        "--nproc-per-node", 2, "--max-restarts", 1, script)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^met again.*'launcher': 'torchrun'.* "
                          "--max-restarts 1 ", done.stdout, re.M)) == 2


def test_no_flag_begins_an_option_of_a_launcher():
    """A launcher would take it for its own: argparse completes options."""
    import train_gpt2_3d
    import train_gpt2_lit
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    flags = {"--" + field.name.replace("_", "-") for script in (
        train_gpt2_3d, train_gpt2_lit) for field in fields(
            script.Hyperparameters)}
    options = {
        option for parser in (
            get_args_parser(), launch_command_parser())
        for action in parser._actions for option in action.option_strings}
    assert {flag for flag in flags for option in options
            if option.startswith(flag)} == set()


@pytest.mark.whole
def test_torchrun_says_an_error_once(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("from backstage.errors import require, run_main\n"
                      "run_main(lambda: require(False, 'not divisible'))\n")
    done = run_command(
        *TORCH, "--nnodes", 1, "--nproc-per-node", 2, "--rdzv-backend",
        "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", script)
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines()
               if line.startswith("error"))
    assert line == "error: not divisible"


@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec.mpich"])
@pytest.mark.parametrize("end", ["kill(os.getpid(), 9)", "_exit(3)"])
def test_the_end_of_one_rank_ends_all(launcher, end, tmp_path, mpich):
    """Because MPI knows them: else MPICH would let the others wait."""
    needs(launcher)
    script = tmp_path / "ends.py"
    script.write_text("import os, time\n"
                      f"if os.environ['RANK'] == '1':\n    os.{end}\n"
                      "time.sleep(300)\n")
    assert run_command(launcher, "-n", 2, sys.executable, "-m",
                       "workshop.as_torchrun", script,
                       **mpich if "mpich" in launcher else {}).returncode


@pytest.mark.whole
def test_ranks_follow_the_order_of_slurms_nodes(tmp_path):
    """A stage of a pipeline is then on a node, whatever the nodes' names."""
    script = tmp_path / "script.py"
    script.write_text(
        "from os import environ, write\n"  # in one piece
        "write(1, f'node {environ[\"SLURM_NODEID\"]} rank '\n"
        "         f'{environ[\"RANK\"]}\\n'.encode())\n")
    env = {**os.environ, "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "2",
           "SLURM_JOB_ID": "7", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port())}
    nodes = []
    for number in "10":  # the second node is the first to come
        nodes.append(subprocess.Popen(
            [ROOT / "batchfiles" / "torchrun.sh", script], text=True,
            env={**env, "SLURM_NODEID": number}, stdout=subprocess.PIPE))
        time.sleep(1)
    said = "".join(node.communicate(timeout=100)[0] for node in nodes)
    assert sorted(said.splitlines()) == [
        "node 0 rank 0", "node 0 rank 1", "node 1 rank 2", "node 1 rank 3"]


@pytest.mark.whole
def test_crays_mpi_needs_no_part_for_gpus(tmp_path):
    """Where a site's modules ask for it, its library would end Python."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text(  # loaded, it calls MPI_Init
        "import os\nprint(os.environ['MPICH_GPU_SUPPORT_ENABLED'])\n")
    end = python(
        tmp_path, "-c", "from backstage.mpi import load_mpi; load_mpi()",
        MPICH_GPU_SUPPORT_ENABLED="1", PYTHONPATH=CLONE_PATH)
    assert end.stdout == "0\n", end.stderr


def test_no_line_of_ours_is_taken_for_the_scripts(monkeypatch):
    """Of two that say it, neither takes the other's place."""
    monkeypatch.setenv("RANKCHECK_LIBRARY", "/workshop/jobs/")
    process.add_library("/backstage/")
    process.add_library("/backstage/")
    patterns = os.environ["RANKCHECK_LIBRARY"]
    assert patterns == "/workshop/jobs/|/backstage/"
    sources = Sources({}, patterns)
    for file in "backstage/run.py", "workshop/jobs/blocking_mpi.py":
        assert sources.owner(str(ROOT / file)) == INSTALLED
    assert sources.owner(str(ROOT / "code/train_gpt2.py")) == SCRIPT


def test_a_rank_whose_proxy_is_gone_says_nothing(tmp_path):
    """As mpirun ends them all after one that failed."""
    rank = subprocess.Popen(
        [sys.executable, "-c", "from workshop.jobs import mpirun_proxy\n"
         "mpirun_proxy.meet('door')"], stderr=subprocess.PIPE, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": CLONE_PATH})
    with socket.socket(socket.AF_UNIX) as proxy:
        wait_for(lambda: not proxy.connect_ex(f"{tmp_path}/door"), 60)
    assert rank.communicate() == (None, b"")
    assert rank.returncode == -signal.SIGKILL
