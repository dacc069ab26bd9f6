"""What the lessons say about PyTorch and its launchers, held against them.

What a step of DDP and of fsdp2 sends is counted in test_lit.py.
"""

import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from stages import run_command
from torch.nn.parallel import DistributedDataParallel

from backstage import ROOT
from backstage.launchers import name_ranks
from workshop.processes import free_port
from workshop.stages import STAGES


def test_torchrun_numbers_the_nodes_by_their_sorted_names():
    """As text, so .10 is before .2, although .2 has made the meeting place."""
    port = free_port()

    def start(name, is_host):
        return run_command(
            sys.executable, "-m", "torch.distributed.run", "--nnodes", 2,
            "--nproc-per-node", 1, "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf",
            f"is_host={is_host}", "--local-addr", name, "--no-python",
            sys.executable, "-c", "import os; print(os.environ['RANK'])")

    with ThreadPoolExecutor() as pool:  # other addresses of this machine
        first = pool.submit(start, "127.0.0.2", 1)
        second = pool.submit(start, "127.0.0.10", 0)
    assert first.result().stdout == "1\n", first.result().stderr
    assert second.result().stdout == "0\n", second.result().stderr


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0,
                            world_size=1)
    yield
    dist.destroy_process_group()


def test_the_buckets_that_ddp_makes_of_gpt2(group):
    """The first is small; the last has the embedding, which is tied."""
    stage = runpy.run_path(str(STAGES["ddp"].solution))
    layers = 2  # of GPT-2's twelve: between them the buckets are the same
    raw_model = stage["GPT"](stage["GPTConfig"](n_layer=layers))
    model = DistributedDataParallel(raw_model, gradient_as_bucket_view=True)
    buckets = []

    def see(_, bucket):
        buckets.append(bucket.parameters())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, see)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    for _ in range(2):  # DDP makes new buckets after its first step
        buckets.clear()
        model(tokens, tokens).backward()
    sizes = [sum(weight.nbytes for weight in bucket) for bucket in buckets]
    assert [round(size / 1e6) for size in sizes] == [
        9, *[28] * (layers - 1), 177]
    embedding = raw_model.transformer.wte.weight
    assert embedding is raw_model.lm_head.weight
    assert any(weight is embedding for weight in buckets[-1])
    assert round(embedding.nbytes / 1e6) == 155


def test_srun_supplies_no_rank_and_we_translate():
    step = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node1"}
    named = dict(step)
    name_ranks(named)
    assert {name: named[name] for name in named.keys() - step.keys()} == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
        "MASTER_PORT": "20007"}


def test_without_a_translation_there_are_worlds_of_one(tmp_path):
    """Change 3 of the DDP lesson, in a script that does nothing else."""
    text = STAGES["ddp"].solution.read_text()
    (lines,) = re.findall(r'^    if "RANK" not in os\.environ:\n.*'
                          r'world_size = \S+\n', text, re.M | re.S)
    script = tmp_path / "bare.py"
    script.write_text(f"import os\nif True:\n{lines}"
                      "    print(rank, world_size)\n")
    for rank in range(2):
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True,
            env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank),
                 "OMPI_COMM_WORLD_SIZE": "2"})
        assert done.stdout == "0 1\n"  # both take themselves for rank 0


def test_the_lesson_says_what_the_counts_are():
    text = (ROOT / "notebooks" / "collectives.ipynb").read_text()
    said = re.sub(r'[\s",]+|\\n', " ", text)
    for words in ("one of 9 MB", "eleven of 28 MB", "a last one of 177 MB"):
        assert words in re.sub(" +", " ", said), words
