"""The numbers in the lessons are those that are computed."""

import json
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest

from backstage import ROOT
from backstage.flops import (
    PEAKS,
    block_parameters,
    flops_per_token,
    num_parameters,
    padded_vocab_size,
)
from workshop import arithmetic
from workshop.arithmetic import of_step

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


def read(notebook):
    """The texts of its cells."""
    return "\n".join("".join(cell["source"]) for cell in json.loads(
        (ROOT / notebook).read_text())["cells"])


@pytest.mark.parametrize("lesson", TABLES)
def test_the_byte_tables_name_their_model(lesson):
    """Of each vocabulary in their heads; test_traffic.py counts the same."""
    split, mesh, A, B, rows = TABLES[lesson]
    head, table = re.search(r"^(\| .*V = .*)\n\|[-:| ]+\n((?:\|.*\n)+)",
                            read(f"notebooks/{lesson}.ipynb"), re.M).groups()
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


def test_the_tables_of_decisions_have_one_order():
    """One takes the first row that fits."""
    rows = "fits on one GPU|on.* one node|several nodes|layer is too large|" \
        "FSDP waits for the network|3D|even when .*sharded"
    for table in (str(arithmetic.decisions()), read(
            "notebooks/start_here.ipynb").partition("The table<")[2]):
        at = [re.search(row, table).start() for row in rows.split("|")]
        assert at == sorted(at)


def numbers_of_lessons():
    """(a document, its words), in which the numbers are computed."""
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
    kept, again = (arithmetic.activations(small, recompute)
                   for recompute in (False, True))
    yield "notebooks/one_gpu.ipynb", (
        f"keeps {gb(kept, 2)} for the backward pass, recomputed "
        f"{gb(again, 2)}")
    (*_, late, cheap), *_, (*_, soon, dear) = arithmetic.bills(3.3)
    critical = arithmetic.critical_tokens(3.3) / 16 / 1024  # GPUs
    costs = [int(row[4].replace(",", "")) for row in arithmetic.bills(
        3.3, 1e18, gpus=[critical * 2**k for k in range(4)])]
    first, second, third = (f"{b / a:.3g}" for a, b in pairwise(costs))
    yield from (("notebooks/batch.ipynb", words) for words in (
        f"need {soon} minutes instead of {late}, a sixth, and {dear} "
        f"GPU-hours instead of {cheap},",
        f"cost {first}, {second}, {third} times as much"))


@pytest.mark.parametrize("path, words", [*numbers_of_lessons()])
def test_the_numbers_of_the_lessons_are_computed(path, words):
    text = read(path) if path.endswith("b") else (ROOT / path).read_text()
    assert words in " ".join(text.split())
