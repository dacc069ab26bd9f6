"""The lessons' questions: what an answer quotes of the check, it says."""

import contextlib
import functools
import io
import json
import re

import pytest
from conftest import program

from backstage import ROOT
from rankcheck.engine.workspace import Workspace
from workshop.check import experiment
from workshop.check.command import check_script
from workshop.check.experiment import reference_of
from workshop.check.plan import plan_runs
from workshop.check.questions import ask_about_run
from workshop.check.stage_runs import Bench
from workshop.diff import documents
from workshop.diff.diff import Diff
from workshop.notebook import ranks
from workshop.stages import LESSONS, STAGES

# What the check has to print, quoted in an answer: "The check says: `...`",
# or "The check looks at this and that, and says: `...`". Three dots stand for
# any text, such as a number that depends on the machine.
QUOTE = re.compile(r"The check\b[^`]*\bsays:\s`([^`]+)`")
# Of a script that is right, but slow: all that is quoted up to the end.
WARNS = re.compile(r"the\scheck\spasses,\sand\swarns:(.*)", re.DOTALL)


def left_out():
    """(name, stage, number, answer, script) of the lessons' predictions.

    The script is without this change of its lesson; it is made when called.
    """
    for stage in LESSONS:
        for number, change in enumerate(documents.load_changes(stage), 1):
            if change.checked:
                yield (f"{stage}-{number}", stage, number, change.answer,
                       functools.partial(without, stage, number))


def without(stage, number):
    diff = Diff(stage, STAGES[STAGES[stage].after].solution)
    return diff.apply(set(range(1, diff.total + 1)) - {number})


def broken(quote=QUOTE):
    """The same for the mistakes of "Break it", made in the finished script.

    A notebook shows the lines that go and those that come, without their
    indentation; or lines that go elsewhere: right behind the one that makes
    `raw_model`.
    """
    for stage in LESSONS:
        for cell in read_notebook(f"diff_{stage}").values():
            title = re.search(r"^### (\d\. .*)", cell, re.MULTILINE)
            if title and quote.search(cell):
                block, = re.findall("```diff\n(.*?)```", cell, re.DOTALL)
                yield (f"{stage}-{title[1]}", stage, None, cell,
                       functools.partial(edit_lines, STAGES[
                           stage].solution.read_text(), block))


def edit_lines(text, block):
    lines = text.split("\n")
    old, new = ([line[2:] for line in block.split("\n") if line[:1] == sign]
                for sign in "-+")
    at, = (i for i, line in enumerate(lines) if line.strip() == old[0])
    space = lines[at][:-len(old[0])]
    del lines[at:at + len(old)]
    if not new:
        new = old
        at, = (i + 1 for i, line in enumerate(lines)
               if line.strip().startswith("raw_model = "))
    lines[at:at] = [space + line for line in new]
    return "\n".join(lines)


def read_notebook(name):
    """The text of each cell, by its name."""
    book = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    return {cell["id"]: "".join(cell["source"]) for cell in book["cells"]}


# The last one of those quoted several times, such as for mpi and for ddp.
QUOTED = {" ".join(QUOTE.findall(case[3])[0].split()): case
          for case in (*left_out(), *broken())}


@pytest.mark.whole
@pytest.mark.parametrize("quoted, stage, number, make", [
    pytest.param(quoted, stage, number, make, id=name)
    for quoted, (name, stage, number, _, make) in QUOTED.items()])
def test_the_check_says_what_the_answer_quotes(
        quoted, stage, number, make, tmp_path, monkeypatch):
    """Which change it was is not asked: that takes many runs."""
    monkeypatch.setattr(experiment, "name_faulty_changes", lambda *_: None)
    monkeypatch.chdir(tmp_path)  # of which each run gets a copy
    script = program(tmp_path / "train_gpt2.py", make())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert check_script(stage, script, change=number).failures
    failed = re.search("^  FAIL +(.*)$", out.getvalue(), re.MULTILINE)
    pattern = ".*".join(map(re.escape, quoted.split("...")))
    assert re.search(pattern, failed[1]), out.getvalue()


@pytest.mark.whole
@pytest.mark.parametrize("stage, text, make", [
    pytest.param(stage, text, make, id=name)
    for name, stage, _, text, make in broken(WARNS)])
def test_the_check_warns_of_what_the_answer_quotes(
        stage, text, make, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = program(tmp_path / "train_gpt2.py", make())
    number = Diff(stage, script).remaining[0].number
    assert check_script(stage, script, change=number).ok
    out = capsys.readouterr().out
    quotes = re.findall("`([^`]+)`", WARNS.search(text)[1])
    assert quotes and "  warning  " in out
    assert all(" ".join(quote.split()) in out for quote in quotes), out


SMALL = {  # the ends of lines of rank 0
    "lit-trainer-cell": "y = 3.00 x + 1.00",
    "lit-log-cell": "sync_dist=False:|loss=2.0|lr=0.10000000149011612|"
    "allreduce: 3 times|barrier: 7 times|broadcast: 7 times|sync_dist=True:|"
    "loss=7.0|lr=0.10000000149011612|allreduce: 6 times|barrier: 10 times|"
    "broadcast: 7 times",
    "lit-save-cell": "1 steps saved, 0 rows on the disk|2 steps saved, 1 rows "
    "on the disk|2 steps validated|3 steps saved, 2 rows on the disk|4 steps "
    "saved, 3 rows on the disk|4 steps validated|5 steps saved, 4 rows on the "
    "disk|5 steps validated",
    "lit-resume-cell": "step 2: 2 microbatches, rate 0.33|resumed|step 3: 2 "
    "microbatches, rate 0.00|step 4: 4 microbatches, rate 0.33",
}


@pytest.mark.whole
def test_the_check_knows_a_wrapper_of_ones_own(tmp_path):
    """The lesson's solution of the exercise, on two processes."""
    cell, = (cell for cell in read_notebook("diff_ddp").values()
             if cell.startswith("## Write the wrapper yourself"))
    mine, = re.findall("```python\n(.*?)```", cell, re.DOTALL)
    text = STAGES["ddp"].solution.read_text()
    for block in re.findall("```diff\n(.*?)```", cell, re.DOTALL):
        text = edit_lines(text, block)
    script = tmp_path / "train_gpt2.py"
    script.write_text(text.replace("def main():", f"{mine}\n\ndef main():"))
    (tmp_path / "bench").mkdir()
    bench = Bench(Workspace(tmp_path / "bench"), "ddp", script,
                  script.read_bytes())
    reference = reference_of(bench)
    planned, _ = plan_runs("ddp", quickly=True)
    results = ask_about_run(bench.make(planned), reference, planned.kind)
    assert results.findings and not results.internal_errors
    assert all(finding.verdict == "ok" for finding in results.findings)


def run_cell(name, change=lambda source: source):
    """What the ranks of a cell of diff_ddp print, a line each."""
    head, _, cell = change(read_notebook("diff_ddp")[name]).partition("\n")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ranks.answer("\n" + cell, int(head.split()[1]), 60)
    answers = list(map(json.loads, out.getvalue().splitlines()))
    assert not any("error" in answer for answer in answers)
    return [answer["line"] for answer in answers if "line" in answer]


@pytest.mark.whole
def test_the_backward_pass_waits_for_a_slow_rank():
    said = run_cell("ddp-waits-cell")
    lines = [re.fullmatch(r"rank (\d): (.+): (\d+) ms", line).groups()
             for line in said]
    times = {(rank, name): int(ms) for rank, name, ms in lines}
    assert times.pop(("0", "backward()")) > 250
    assert len(times) == 5 and max(times.values()) < 150


@pytest.mark.whole
def test_which_workers_draw_the_same_numbers():
    """As they are, and with the seeds of the answer."""
    def seeded(source):
        solution, = re.findall(
            "```python\n(.*?)```", read_notebook("diff_ddp")[
                "ddp-workers-after"], re.DOTALL)
        old = re.search(r"torch.manual_seed\(.*num_workers=2\)\n", source,
                        re.DOTALL)[0]
        return source.replace(old, solution)

    def drawn(said):
        """Of each of torch, np.random and the dataset: (rank, worker)'s."""
        rows = [line.split(": ")[2].split() for line in said]
        assert len(rows) == 4
        return [*zip(*rows, strict=True)]

    torchs, numpys, own = drawn(run_cell("ddp-workers-cell"))
    assert len(set(own)) == 1
    for numbers in torchs, numpys:
        assert numbers[:2] == numbers[2:] and len(set(numbers)) == 2
    for numbers in drawn(run_cell("ddp-workers-cell", seeded)):
        assert len(set(numbers)) == 4


@pytest.mark.whole
@pytest.mark.parametrize("name", SMALL)
def test_the_small_trainers_show_what_the_lesson_says(capsys, name):
    """As the notebook's cells run them."""
    source = read_notebook("diff_lit")[name]
    head, _, cell = source.partition("\n")
    ranks.answer("\n" + cell, int(head.split()[1]), 60)
    answers = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert not any("error" in answer for answer in answers)
    said = "|".join(answer["line"].removeprefix("rank 0:").strip()
                    for answer in answers if "line" in answer)
    assert SMALL[name] in said
