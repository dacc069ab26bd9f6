"""The tables in the lessons are those that are computed."""

import re

import pytest

from slides.text import cells
from workshop.results.arithmetic import of_step

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
    head, table = re.search(r"^(\| .*V = .*)\n\|[-:| ]+\n((?:\|.*\n)+)",
                            "\n".join(cells(lesson)), re.M).groups()
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
