"""What the lessons say about PyTorch and its launchers, held against them.

What a step of DDP and of fsdp2 sends is counted in test_lit.py.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from stages import run_command
from torch.nn.parallel import DistributedDataParallel

from backstage import ROOT
from backstage.flops import (
    PEAKS,
    block_parameters,
    flops_per_token,
    num_parameters,
    padded_vocab_size,
)
from backstage.launchers import name_ranks
from workshop import arithmetic
from workshop.arithmetic import of_step
from workshop.processes import free_port
from workshop.results.runs import PUBLISHED
from workshop.stages import STAGES


@pytest.mark.whole
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
        assert done.stdout == "0 1\n"  # both believe they are rank 0


def test_what_torchrun_says_without_the_dashes(tmp_path):
    """It takes the script's --run for one of its own options."""
    script = tmp_path / "script.py"
    script.write_text("")
    for dashes in ([], ["--"]):
        done = run_command(sys.executable, "-m", "torch.distributed.run",
                           "--standalone", *dashes, script, "--run", "DIR")
        assert (done.returncode == 0) == bool(dashes), done.stderr
        if not dashes:
            said = re.search("ambiguous option: --run could match",
                             done.stderr)[0]
    assert f'"torchrun: error: {said} ..."' in (
        ROOT / "INSTRUCTOR.md").read_text()


TINY = {"block_size": 32, "n_layer": 4, "n_head": 4, "n_embd": 32}
TABLES = {  # a lesson's table: (split, mesh, A, B), the rows' collectives
    "diff_fsdp": ("parameters", (1, 2, 1), 2, 2, {
        "DDP": "reduce_scatter_base", "FSDP": "allgather_base",
        "": "reduce_scatter_base"}),
    "diff_lit": ("parameters", (1, 2, 1), 2, 2, {
        "`ddp`": "reduce_scatter_base", "`fsdp2`": "allgather_base",
        "": "reduce_scatter_base"}),
    "diff_3d": ("layers", (2, 2, 2), 4, 1, {
        "pipeline": "send", "tensor parallel": "all_reduce",
        "FSDP": "allgather_base", "": "reduce_scatter_base"}),
}


@pytest.mark.parametrize("lesson", TABLES)
def test_the_byte_tables_name_their_model(lesson):
    """Of each vocabulary in their heads; test_traffic.py counts the same."""
    split, mesh, A, B, rows = TABLES[lesson]
    cells = json.loads((ROOT / "notebooks" / f"{lesson}.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in cells["cells"])
    head, table = re.search(r"^(\| .*V = .*)\n\|[-:| ]+\n((?:\|.*\n)+)", text,
                            re.M).groups()
    sizes = [int(size.replace(",", "")) for size in
             re.findall(r"V = ([\d,]+)", head)]
    assert 2048 in sizes  # the demo dataset's, which attendees have
    for row in table.splitlines():
        name, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        if name not in rows:
            continue
        found = [int(cell.split()[-1].replace(",", ""))
                 for cell in row.strip("|").split("|")[-len(sizes):]]
        times = A if (lesson, name) == ("diff_lit", "") else 1  # each reduces
        assert found == [times * of_step(
            split, {**TINY, "vocab_size": size}, mesh, A, B, 32)[0][
                rows[name]][1] for size in sizes], row


def numbers_of_lessons():
    """(a document, its words), where the numbers in the words are computed."""
    small, large = arithmetic.GPT2, arithmetic.XL
    P, P_xl = num_parameters(small), num_parameters(large)
    b = block_parameters(small["n_embd"])
    r = P - small["n_layer"] * b  # what is in no block
    V, C, T = padded_vocab_size(small["vocab_size"]), 768, 1024
    state = {(config["n_embd"], sharded): arithmetic.state(config, 8, sharded)
             for config in (small, large) for sharded in (
                 (), ("moments",), ("gradients", "moments"),
                 arithmetic.ACCUMULATING, tuple(arithmetic.STATE))}
    logits = 4 * T * V / 2**30  # GiB, of a sample
    ends = 3 * b + V * C  # of four pipeline stages, the first and the last

    def gb(size, digits=1):
        return f"{size / 1e9:.{digits}f} GB"

    def wait(p, m):
        return f"{p - 1}/{m + p - 1} = {(p - 1) / (m + p - 1):.0%}"

    yield from (("workshop/lessons/fsdp.md", words) for words in (
        f"they take {gb(4 * P_xl)}, while an eighth of 16 bytes each is "
        f"{gb(16 * P_xl / 8)}",
        f"every device keeps {gb(16 * P)}, and now its part of all that is "
        f"{gb(16 * P / 4)}. While it computes, the root group is whole as "
        f"well ({gb(4 * r, 2)}), and a block or two of {gb(4 * b, 2)}",
        f"as many parameters as {r / b:.1f} blocks",
        f"{gb(state[1600, arithmetic.ACCUMULATING])} or "
        f"{gb(16 * P_xl / 8)}. Where",
        f"copies, for GPT-2 XL {gb(2 * P_xl)}"))
    yield from (("workshop/lessons/tp.md", words) for words in (
        f"take {logits:.2f} GiB", f"needs {64 * logits * 4 / 2:.0f} GiB for "
        f"its loss, where a single device needs {64 * logits * 3:.0f}. But "
        f"with groups of 1 it needs {64 * logits * 4:.0f}",
        f"has {V:,} tokens", f"half: {V // 2:,} numbers"))
    yield from (("workshop/lessons/3d.md", words) for words in (
        f"three blocks, {3 * b / 1e6:.1f} million parameters",
        f"so {(ends + T * C) / 1e6:.1f} million in all",
        f"lm_head and {(ends + 2 * C) / 1e6:.1f} million",
        f"wait {wait(2, 4)} of the time", f"{wait(2, 16)} for 2 pipeline "
        f"stages, {wait(4, 32)} for 4, and always less than 11%",
        f"2 pipeline stages wait {wait(2, 8)} of the time, 4 wait "
        f"{wait(4, 8)}"))
    yield "notebooks/collectives.ipynb", (
        f"are {4 * P / 1e6:.0f} MB in fp32, so in a step each of four GPUs "
        f"sends {arithmetic.ring(4, 4 * P) / 1e6:.0f} MB")
    tokens_per_second = 10e9 / (90 * 60) / 8
    mfu = (tokens_per_second * flops_per_token(
        SimpleNamespace(**small), T) / PEAKS["A100"][0] / 1e12)
    yield "notebooks/results.ipynb", f"which is an MFU of {mfu:.0%}"
    yield from (("notebooks/diff_fsdp.ipynb", words) for words in (
        f"(GPT-2) | {gb(16 * P)} | {gb(2 * P, 2)} | "
        f"{gb(state[768, arithmetic.ACCUMULATING], 2)} |",
        f"(GPT-2 XL) | {gb(16 * P_xl)} | {gb(2 * P_xl)} | "
        f"{gb(state[1600, arithmetic.ACCUMULATING])} |",
        f"| 7B | {16 * 7} GB | {2 * 7} GB | {4 * 7 + 12 * 7 / 8} GB |"))
    yield from (("notebooks/sharding.ipynb", f"| {gb(size)} |") for
                (width, _), size in state.items() if width == 1600)
    yield from (("notebooks/diff_lit.ipynb", words) for words in (
        f"nothing | {gb(16 * P)} | {gb(16 * P_xl)} |",
        f"all three | {gb(2 * P, 2)} | {gb(2 * P_xl)} |",
        f"states | {gb(P * (4 + 12 / 8))} | {gb(P_xl * (4 + 12 / 8))} |",
        f"gradients, too | {gb(P * (2 + 14 / 8))} | "
        f"{gb(P_xl * (2 + 14 / 8))} |"))


@pytest.mark.parametrize("path, words", [*numbers_of_lessons()])
def test_the_numbers_of_the_lessons_are_computed(path, words):
    text = (ROOT / path).read_text()
    if path.endswith(".ipynb"):
        text = "\n".join("".join(cell["source"]) for cell in
                         json.loads(text)["cells"])
    assert words in " ".join(text.split())


def test_whether_the_larger_batch_scales_further():
    """On the A100s a little, on the Max 1550 not: as the slide says."""
    speedup = {name: points[1] / points[16]
               for name, points in PUBLISHED.items()}
    assert speedup["A100-40, batch 256"] > speedup["A100-40, batch 16"]
    assert speedup["Max 1550, batch 256"] < speedup["Max 1550, batch 16"]
