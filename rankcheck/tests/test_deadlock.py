"""Ranks that are idle hang only if that is proven; else verify waits."""

import pytest

from rankcheck.system.errors import NotCompared, UserError
from rankcheck.verification import command
from rankcheck_testing.support import edit
from rankcheck_testing.verify_cases import read

FIRST = "for epoch in"  # before it, a rank may wait


def verified(tmp_path, before, patience=60):
    """Whether verify finds nothing wrong with a right script that does this
    first, on two ranks.
    """
    script = tmp_path / "train.py"
    script.write_text(edit(read("ddp"), (FIRST, f"""\
import sys, time
one = torch.ones(3)
first, second = dist.new_group(), dist.new_group()
if size == 2:
{"".join(f"    {line}" for line in before.splitlines(True))}
{FIRST}""")))
    return command.verify([str(script)], 2, 2, patience=patience)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "RANKS_IDLE", 3)
    monkeypatch.chdir(tmp_path)  # of which each run gets a copy


HANGS = {
    "another collective": """\
(dist.barrier if rank else lambda: dist.all_reduce(one))()""",
    "another size": "dist.all_reduce(one[rank:])",
    "it has ended": "if rank: sys.exit()\ndist.all_reduce(one)",
    "both receive": "dist.recv(one, 1 - rank)",
    "other groups first": """\
for group in (first, second)[::1 - 2 * rank]:
    dist.all_reduce(one, group=group)""",
}


@pytest.mark.whole
@pytest.mark.parametrize("name", HANGS)
def test_what_can_never_go_on(name, tmp_path):
    report = verified(tmp_path, HANGS[name])
    assert report.status == 1 and {
        finding.kind for finding in report.failures} <= {
            "hang", "collective-mismatch", "error", "killed"}, report


@pytest.mark.whole
@pytest.mark.parametrize("wait", [
    "time.sleep(9)", "if rank: time.sleep(9)\ndist.all_reduce(one)",
    "dist.all_reduce(one, group=first)\nif rank: time.sleep(9)"])
def test_what_only_waits(wait, tmp_path):
    report = verified(tmp_path, wait)
    assert report.ok and not report.failures


@pytest.mark.whole
def test_what_is_found_before_a_further_run_waits(tmp_path, capsys):
    """Its third run, with frozen weights, is the one that waits."""
    script = tmp_path / "train.py"
    script.write_text(edit(read("ddp"), ("32 // size", "32"), (FIRST, f"""\
import pathlib, time
starts = pathlib.Path({str(tmp_path / "starts")!r})
if rank == 0:
    starts.touch()
    starts.open("a").write("x")
    if len(starts.read_text()) == 3: time.sleep(99)
{FIRST}""")))
    with pytest.raises(UserError, match="1 process: no step in 4 s"):
        command.verify([str(script)], 2, 2, patience=4)
    assert "global batch size is 64" in capsys.readouterr().out


@pytest.mark.whole
def test_what_waits_too_long(tmp_path):
    """That is no mistake."""
    with pytest.raises(NotCompared, match=r"2 processes: no "
                       r"step in 4 s, .*rank 1 is in line 2\d \(<mod.*"
                       "fix: --patience"):
        verified(tmp_path, "time.sleep(99)", 4)
