"""python -m workshop doctor: what is there, and what is to be done."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import copy_course, git, needs, program, python, workshop
from stages import BYTES, write_shards

from backstage import dataset
from backstage.errors import UserError
from rankcheck.engine import scratch
from rankcheck.engine.ranks import launch
from workshop.jobs import doctor, doctor_ranks, originals
from workshop.stages import STAGES
from workshop.vocabulary import save_vocabulary


@pytest.fixture(autouse=True)
def slurm_conf(tmp_path, monkeypatch):
    """A configuration of SLURM, in case its programs are installed."""
    for name in list(os.environ):
        if name.startswith(("SBATCH_", "SLURM_", "SALLOC_")):
            monkeypatch.delenv(name)
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\n"
                    "NodeName=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    return conf


def run(repo, *flags):
    """The doctor's answers, by their questions; (sign, answer) each."""
    end = python(repo, *flags, "-m", "workshop", "doctor", WORKSHOP_DATA="")
    assert end.stderr == ""
    answers = {}
    for line in end.stdout.splitlines():
        sign, name, answer = re.fullmatch(
            r"(ok   |FAIL )  ([\w ]+): (.+)", line).groups()
        answers[name] = sign.strip(), answer
    assert list(answers) == [
        "course", "python", "environment", "packages", "device", "processes",
        "MPI", "data", "vocabulary", "write access", "SLURM"]
    assert end.returncode == any(
        sign == "FAIL" for sign, _ in answers.values())
    return answers


@pytest.fixture
def repo(tmp_path):
    """A copy of the repository with a small demo dataset."""
    copy_course(tmp_path, "backstage", "workshop")
    demo = write_shards(tmp_path / "fineweb" / "demo",
                        [[0] * 1234, [0] * 1000], [0] * 56, name="demo")
    save_vocabulary(BYTES, demo)
    return tmp_path


@pytest.mark.whole
def test_all_is_well(repo):
    answers = run(repo)
    answers.pop("environment")  # the tests may run without one
    for name, (sign, answer) in answers.items():
        assert sign == "ok", (name, answer)
    for name, words in (("processes", "all-reduce over 2 processes with"),
                        ("data", "2,234 train + 56 val tokens"),
                        ("vocabulary", "257 tokens")):
        assert words in answers[name][1]


def test_it_names_the_commit_and_the_site_file(repo, monkeypatch):
    for module in (doctor, doctor.git):
        monkeypatch.setattr(module, "ROOT", repo)
    monkeypatch.setattr(originals, "ORIGINALS_FILE", repo / "originals.json")
    assert doctor.ask_course() == (
        "commit unknown (not a git clone that you may read); site file none "
        f"({repo}/site.sh does not exist)")
    (repo / "site.sh").touch()
    for words in ("init", "add site.sh", "commit -m all"):
        git(repo, *words.split())
    (repo / "site.sh").write_text("# edited")
    said = re.fullmatch(r"commit (\w{7,})-dirty; site file (.+)",
                        doctor.ask_course())
    assert git(repo, "rev-parse", "HEAD").startswith(said[1])
    assert said[2] == f"{repo}/site.sh"


def test_without_packages_it_says_what_is_missing(repo):
    answers = run(repo, "-S")
    to_do = {name for name, (sign, _) in answers.items() if sign == "FAIL"}
    assert to_do - {"environment"} == {
        "packages", "device", "processes", "data", "vocabulary",
        *["MPI"] * bool(shutil.which("mpirun"))}
    assert "source activate.sh" in answers["packages"][1]
    assert "torch" in answers["device"][1]


def test_it_says_what_pytest_needs(repo):
    def ask():
        return python(repo, "-c", "from workshop.jobs import doctor; "
                      "print(doctor.ask_packages())").stdout

    answer = ask()
    assert "torch" in answer and "pytest" not in answer
    (repo / "tests").mkdir()
    (repo / "tests" / "requirements.txt").write_text("pytest\nnowhere\n")
    assert ask().endswith("; for pytest: source activate.sh tests\n")


def test_a_torch_that_does_not_load_is_one_line(repo):
    (repo / "torch").mkdir()
    copy_course(repo, "solutions", "code")
    for error, words in (
            ("ImportError", ["check", "ddp"]),
            ("OSError", ["verify", "--", "code/train_gpt2.py"])):
        (repo / "torch" / "__init__.py").write_text(
            f'raise {error}("libtorch_cpu.so: file too short")\n')
        assert "cannot be loaded (libtorch_cpu.so: file too short)" in (
            workshop(repo, *words, status=1))
    assert "file too short" in run(repo)["device"][1]


@pytest.mark.parametrize("ask, harm, complaint", [
    (doctor.ask_data, lambda demo: shutil.rmtree(demo), "activate.sh"),
    (doctor.ask_data, lambda demo: (demo / "demo_val_000000.npy").unlink(),
     "no shard *_val_*.npy"),
    (doctor.ask_data, lambda demo: (demo / "demo_train_000002.npy")
     .write_bytes(b"\x93NUMPY"), "corrupt"),
    (doctor.ask_vocabulary, lambda demo: (demo / dataset.TOKENS).unlink(),
     "corrupt"),
    (doctor.ask_data, lambda demo: os.environ.update(
        WORKSHOP_DATA=f"{demo}/lost"), "lost, which does not exist"),
])
def test_a_harmed_dataset_is_to_be_done(
        repo, monkeypatch, ask, harm, complaint):
    """The course's own, or the one that the site names."""
    demo = repo / "fineweb" / "demo"
    monkeypatch.setattr(doctor, "ROOT", repo)
    monkeypatch.setenv("WORKSHOP_DATA", str(demo))
    assert doctor.ask_data().count("2,234 train") == 2
    ask()
    os.environ.pop("WORKSHOP_DATA")
    harm(demo)
    with pytest.raises(UserError, match=re.escape(complaint)):
        ask()


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device")
    assert "no accelerator" in doctor.ask_device()
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), (
            "LOCAL_RANK", "0"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for ask in doctor.ask_device, partial(
            doctor.main, SimpleNamespace(ranks=True)):
        with pytest.raises(UserError, match=r"has GPUs .*driver.*site\.sh"):
            ask()


def test_the_driver_is_named(tmp_path):
    assert doctor.name_driver(tmp_path) == "no NVIDIA driver is loaded"
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb "
        "22 01:44:30 UTC 2024\nGCC version:  gcc version 12.2.0 (Debian)\n")
    assert doctor.name_driver(tmp_path) == "the NVIDIA driver is 550.54.14"


def test_room_for_two_checkpoints_and_a_part(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path:
                        shutil._ntuple_diskusage(0, 0, free))
    free = 4.6e9
    assert "5 GB free" in doctor.ask_write_access()
    free = 4.4e9
    with pytest.raises(UserError, match=r"only 4\.4 GB.*4\.5 GB for two"):
        doctor.ask_write_access()


@pytest.mark.whole
def test_processes_that_do_not_reach_each_other(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lost0")
    with pytest.raises(UserError, match=r"do not reach each other: "
                       "GLOO_SOCKET_IFNAME names lost0, .*one of lo"):
        doctor.ask_processes()


@pytest.mark.whole
def test_a_machine_that_cannot_connect_to_itself():
    """In a network of its own, where the loopback interface is down."""
    alone = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("unshare has no network to give here")
    code = ("from workshop.jobs import doctor\n"
            "doctor.run_main(doctor.ask_processes)")
    end = subprocess.run(
        [*alone, sys.executable, "-c", code], capture_output=True, text=True)
    (line,) = end.stderr.splitlines()
    assert end.returncode == 1 and line.startswith("error: "), line
    assert "ip link set lo up" in line


def test_trial_processes_meet_whatever_network_the_site_names(
        monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lost0")
    ranks = launch(doctor.__file__, "cpu", world_size=2,
                   env=scratch.quiet_environment(tmp_path))
    assert ranks[0].out == "all-reduce over 2 processes with gloo\n", ranks


def test_a_doctor_that_is_ended_leaves_nothing(monkeypatch):
    """A stranger's folders stay."""
    with tempfile.TemporaryDirectory() as name:  # short, for sockets in it
        monkeypatch.setattr(tempfile, "tempdir", name)
        other = Path(name, "ranks-mine")
        other.mkdir()
        asking = os.fork()
        if asking == 0:
            with contextlib.suppress(BaseException):
                doctor.ask_processes()
            os._exit(1)
        while not any(path != other for path in Path(name).rglob("ranks-*")):
            assert os.waitpid(asking, os.WNOHANG) == (0, 0)
            time.sleep(0.01)
        os.kill(asking, signal.SIGTERM)
        os.waitpid(asking, 0)
        assert [*Path(name).iterdir()] == [other]


def test_slurm_and_what_the_environment_names(monkeypatch, slurm_conf):
    needs("sbatch")
    assert re.match(r"slurm.* \d+\.\d+.*no account or partition",
                    doctor.ask_slurm())
    monkeypatch.setenv("SBATCH_ACCOUNT", "course")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert doctor.ask_slurm().endswith(
        ", SBATCH_ACCOUNT=course SBATCH_PARTITION=gpu")
    slurm_conf.write_text("nonsense\n")
    with pytest.raises(UserError, match=r"^SLURM does not answer \([^\n]+\); "
                       "fix: .* in a terminal, "
                       "`python -m workshop launch ddp -- --preset tiny`"):
        doctor.ask_slurm()
    # else another script than the attendee's would start
    monkeypatch.setattr(doctor, "WORKING_COPY", STAGES["fsdp"].solution)
    with pytest.raises(UserError, match="`python -m workshop launch fsdp -- "):
        doctor.ask_slurm()


def test_without_slurm_it_may_be_pbs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "torchrun" in doctor.ask_slurm()
    program(tmp_path / "qsub", "#!/bin/sh\n")
    assert "but PBS is" in doctor.ask_slurm()


# ---------------------------------------------------------------- --ranks


ASKS = """\
import os, socket, sys
from pathlib import Path
from workshop.jobs import doctor_ranks

socket.gethostname = lambda: f"node{int(os.environ['RANK']) // 2 + 1}"
doctor_ranks.NETWORK_FILE = Path(sys.argv[1])
sys.exit(doctor_ranks.ask_ranks())
"""


def test_the_speeds_in_and_between_two_nodes(tmp_path):
    """Four ranks that name two; test_slurm.py has real ones."""
    script, speeds = tmp_path / "asks.py", tmp_path / "network.json"
    script.write_text(ASKS)
    first, *others = launch(script, speeds, world_size=4,
                            preload=["workshop.jobs.doctor_ranks"])
    assert first.status == 0, first.err
    assert not any(rank.out or rank.err for rank in others)
    assert re.findall("^ok     (.* ranks) over gloo", first.out, re.M) == [
        "all-reduce: 4 ranks", "in the nodes: 2 ranks",
        "between nodes: 2 ranks"]
    assert [*json.loads(speeds.read_text())] == [
        "between nodes", "in the nodes"]


def test_the_interface_of_a_connection(monkeypatch):
    """Of a real connection, which is not the store's; no other's."""
    with (socket.create_server(("127.0.0.1", 0)) as door,
          socket.create_connection(door.getsockname()),
          socket.socketpair()[0]):  # of no network
        monkeypatch.setenv("MASTER_PORT", "1")
        assert set(doctor_ranks.find_interfaces()) == {"lo"}
        monkeypatch.setenv("MASTER_PORT", str(door.getsockname()[1]))
        assert not set(doctor_ranks.find_interfaces())


def test_what_a_network_is(tmp_path):
    for name, kind in (("eth0", 1), ("ib0", 32)):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "type").write_text(f"{kind}\n")
    assert doctor_ranks.describe_interface("eth0", tmp_path) == (
        "eth0, not InfiniBand, which this node does not have")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert doctor_ranks.describe_interface("eth0", tmp_path) == (
        "eth0, not InfiniBand, although this node has mlx5_0")
    described = doctor_ranks.describe_interface("ib0", tmp_path)
    assert described == "ib0, InfiniBand by TCP"
    assert "names no network" in doctor_ranks.read_nccl_log("")


@pytest.mark.parametrize("lines, words", [
    # a plugin's, which knows how to talk to Slingshot or EFA
    (["NET/OFI Initializing aws-ofi-nccl 1.14.0",
      "NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)",
      "NET/Socket : Using [0]hsn0:10.1.1.1<0>",
      "Using network AWS Libfabric"], "AWS Libfabric (cxi), by NCCL"),
    (["NET/OFI Selected Provider is efa (found 4 nics)",
      "Using network OFI"], "OFI (efa), by NCCL"),
    (["Using network UCX"], "UCX, by NCCL"),
    # none: NCCL goes on with TCP
    (["NET/OFI Selected provider is tcp, fabric is hsn0",
      "NET/IB : No device found.",
      "NET/Socket : Using [0]lost0:10.1.1.1<0> [1]lost1:10.1.1.2<0>",
      "Using network Socket"], "lost0, by NCCL"),
    (["NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.1.1.1<0>",
      "NET/Socket : Using [0]eth0:10.1.1.1<0>", "Using network IB"],
     "mlx5_0, InfiniBand or RoCE, by NCCL"),
    (["NET/Socket : Using [0]eno9:10.1.1.1<0>"], "eno9, by NCCL"),
])
def test_the_network_that_nccl_names(lines, words):
    log = "".join(f"n1:7:9 [0] NCCL INFO {line}\n" for line in lines)
    assert doctor_ranks.read_nccl_log(log) == f"{words} between the nodes"
