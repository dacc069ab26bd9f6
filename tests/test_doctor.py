"""python -m workshop doctor: what is there, and what is to be done."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import needs

from backstage import ROOT, vocabulary
from backstage.errors import UserError
from workshop import doctor


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch):
    """A configuration of SLURM, in case its programs are installed."""
    for name in list(os.environ):
        if name.startswith(("SBATCH_", "SLURM_", "SALLOC_")):
            monkeypatch.delenv(name)
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\n"
                    "NodeName=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    return conf


def run(*command, cwd):
    """The doctor's answers, by their questions; (sign, answer) each."""
    end = subprocess.run(
        [*command, "-m", "workshop", "doctor"], cwd=cwd, text=True,
        env={**os.environ, "WORKSHOP_DATA": "", "PYTHONPATH": str(cwd)},
        capture_output=True)
    assert end.stderr == ""
    answers = {}
    for line in end.stdout.splitlines():
        sign, name, answer = re.fullmatch(
            r"(ok   |TO DO)  ([\w ]+): (.+)", line).groups()
        answers[name] = sign.strip(), answer
    assert list(answers) == [
        "course", "python", "environment", "packages", "device", "processes",
        "data", "vocabulary", "write access", "SLURM"]
    assert end.returncode == any(
        sign == "TO DO" for sign, _ in answers.values())
    return answers


@pytest.fixture
def repo(tmp_path):
    """A copy of the repository with a small demo dataset."""
    for name in ("backstage", "workshop"):
        shutil.copytree(ROOT / name, tmp_path / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    demo = tmp_path / "fineweb" / "demo"
    demo.mkdir(parents=True)
    np.save(demo / "demo_train_000001.npy", np.zeros(1234, np.uint16))
    np.save(demo / "demo_train_000002.npy", np.zeros(1000, np.uint16))
    np.save(demo / "demo_val_000000.npy", np.zeros(56, np.uint16))
    import tiktoken
    vocabulary.save(tiktoken.Encoding(
        "bytes", pat_str=".", special_tokens={vocabulary.END_OF_TEXT: 256},
        mergeable_ranks={bytes([i]): i for i in range(256)}), demo)
    return tmp_path


def test_all_is_well(repo):
    answers = run(sys.executable, cwd=repo)
    answers.pop("environment")  # the tests may run without one
    for name, (sign, answer) in answers.items():
        assert sign == "ok", (name, answer)
    assert "2 processes added up over" in answers["processes"][1]
    assert "2,234 train + 56 val tokens" in answers["data"][1]
    assert "257 tokens" in answers["vocabulary"][1]


def test_it_names_the_commit_and_the_site_file(repo, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", repo)
    assert doctor.ask_course() == (
        "commit unknown, not a git clone that you may read; site file none, "
        f"there is no {repo}/site.sh")
    git = ["git", "-C", repo, "-c", "user.name=me", "-c", "user.email=me@here"]
    subprocess.run([*git, "init", "-q"], check=True)
    (repo / "site.sh").touch()
    subprocess.run([*git, "add", "site.sh"], check=True)
    subprocess.run([*git, "commit", "-qm", "A site"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], text=True,
                            capture_output=True, check=True).stdout
    (repo / "site.sh").write_text("# edited")
    said = re.fullmatch(r"commit (\w{7,})-dirty; site file (.+)",
                        doctor.ask_course())
    assert commit.startswith(said[1]) and said[2] == f"{repo}/site.sh"


def test_without_packages_it_says_what_is_missing(repo):
    answers = run(sys.executable, "-S", cwd=repo)
    to_do = {name for name, (sign, _) in answers.items() if sign == "TO DO"}
    assert to_do - {"environment"} == {
        "packages", "device", "processes", "data", "vocabulary"}
    assert "source activate.sh" in answers["packages"][1]
    assert "torch" in answers["device"][1]


@pytest.mark.parametrize("ask, harm, complaint", [
    (doctor.ask_data, lambda demo: shutil.rmtree(demo), "activate.sh"),
    (doctor.ask_data, lambda demo: (demo / "demo_val_000000.npy").unlink(),
     "no shard *_val_*.npy"),
    (doctor.ask_data, lambda demo: (demo / "demo_train_000002.npy")
     .write_bytes(b"\x93NUMPY"), "damaged"),
    (doctor.ask_vocabulary, lambda demo: (demo / vocabulary.TOKENS).unlink(),
     "damaged"),
])
def test_a_harmed_dataset_is_to_be_done(
        repo, monkeypatch, ask, harm, complaint):
    monkeypatch.setattr(doctor, "ROOT", repo)
    monkeypatch.delenv("WORKSHOP_DATA", raising=False)
    ask()
    harm(repo / "fineweb" / "demo")
    with pytest.raises(UserError, match=re.escape(complaint)):
        ask()


def test_data_that_the_site_names(repo, monkeypatch):
    monkeypatch.setattr(doctor, "ROOT", repo)
    monkeypatch.setenv("WORKSHOP_DATA", str(repo / "fineweb" / "demo"))
    assert doctor.ask_data().count("2,234 train") == 2
    monkeypatch.setenv("WORKSHOP_DATA", str(repo / "lost"))
    with pytest.raises(UserError, match="lost, which does not exist"):
        doctor.ask_data()


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device")
    assert "no accelerator" in doctor.ask_device()
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"SLURM gave .*driver.*site\.sh"):
        doctor.ask_device()


def test_the_libraries_that_are_loaded_are_named(tmp_path, monkeypatch):
    """A module for CUDA has some of its own, which come first."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    maps, line = tmp_path / "maps", "7f00-7f01 r-xp 0000 08:01 42     {}\n"
    packages = tmp_path / "site-packages"
    mine = [packages / "nvidia/nccl/lib/libnccl.so.2",
            packages / "nvidia/cudnn/lib/libcudnn.so.9"]
    maps.write_text("".join(map(line.format, [*mine, "", "[heap]"])))
    assert doctor.name_libraries(packages, maps) == (
        "NCCL 2.29.7, cuDNN 9.10.2")
    maps.write_text("".join(map(line.format, [
        mine[0], "/apps/CUDA 12/lib/libcudnn.so.9"])))
    assert doctor.name_libraries(packages, maps) == (
        "NCCL 2.29.7, cuDNN 9.10.2 (of /apps/CUDA 12/lib/libcudnn.so.9, not "
        "the one that pip has installed)")
    assert doctor.name_libraries(packages, tmp_path / "none") == (
        "NCCL 2.29.7, cuDNN 9.10.2")


def test_the_doctor_asks_for_them_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert doctor.ask_device().endswith(
        "4 x NVIDIA A100, NCCL 2.29.7, cuDNN 9.10.2")


@pytest.mark.parametrize("free, enough", [(4.4e9, False), (4.6e9, True)])
def test_room_for_two_checkpoints_and_a_part(monkeypatch, free, enough):
    monkeypatch.setattr(shutil, "disk_usage",
                        lambda path: shutil._ntuple_diskusage(0, 0, free))
    if enough:
        assert "5 GB free" in doctor.ask_write_access()
    else:
        with pytest.raises(UserError, match=r"only 4\.4 GB.*4\.5 GB for two"):
            doctor.ask_write_access()


def test_processes_that_do_not_reach_each_other(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lost0")
    with pytest.raises(UserError, match=r"do not reach each other: .*lost0"):
        doctor.ask_processes()


def test_slurm_and_what_the_environment_names(monkeypatch, slurm):
    needs("sbatch")
    assert re.match(r"slurm.* \d+\.\d+.*no account or partition",
                    doctor.ask_slurm())
    monkeypatch.setenv("SBATCH_ACCOUNT", "course")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert doctor.ask_slurm().endswith(
        ", SBATCH_ACCOUNT=course SBATCH_PARTITION=gpu")
    slurm.write_text("nonsense\n")
    with pytest.raises(UserError, match=r"^sbatch fails: [^\n]+$"):
        doctor.ask_slurm()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "torchrun" in doctor.ask_slurm()
