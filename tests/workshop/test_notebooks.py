"""The notebooks, from top to bottom, in a kernel that is not ours."""

import contextlib
import copy
import io
import json
import os
import re
import shutil
import sys
import time
from html import unescape
from itertools import chain, pairwise, repeat
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from cluster import wait_for
from conftest import calls, copy_clone, needs, program, python, read_book
from huggingface import export_run
from lab import Lesson

from backstage import ROOT
from backstage.errors import UserError
from notebooks.experiments import hangs, your_model
from rankcheck.engine.ranks import launch
from rankcheck.verification.command import verify
from slides import figures, schedules
from workshop.diff import documents, page, passed_checks, render, working_copy
from workshop.diff.diff import Diff
from workshop.notebook import cells, following, frontend, magics, pictures
from workshop.notebook import lab as opener
from workshop.notebook.output import COMPLAINT, Shown
from workshop.results import plot as panels
from workshop.stages import LESSONS, STAGES

if TYPE_CHECKING:
    import nbformat

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TAUGHT = [stage for stage in LESSONS if (  # in a notebook
    ROOT / "notebooks" / f"diff_{stage}.ipynb").exists()]


@pytest.fixture
def repo(tmp_path):
    return copy_clone(tmp_path, "notebooks", stage="ddp")


def code_of(name):
    """The cells of a notebook that are run, without outputs."""
    return [cell for cell in read_book(ROOT / "notebooks" / f"{name}.ipynb"
                                       ).cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def execute(portal):
    """Run notebooks' cells in one kernel of the portal, as one notebook.

    It returns that, and of each notebook {its calls: text, html}.
    """
    def execute(repo, books):
        from nbclient import NotebookClient
        from nbformat.v4 import new_code_cell, new_notebook

        whose = new_code_cell("import sys; print(sys.prefix)")
        book = new_notebook(cells=[whose])
        for name, those in books.items():
            for cell in those:
                cell.metadata["of"] = name
            book.cells += those
        for number, cell in enumerate(book.cells):
            cell.id = str(number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JUPYTER_PATH", str(portal / "share" / "jupyter"))
            patch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
            for name in ("PYTHONPATH", "VIRTUAL_ENV", "WORKSHOP_VENV"):
                patch.delenv(name, raising=False)
            NotebookClient(
                book, timeout=600, kernel_name="python3",
                resources={"metadata": {"path": str(repo / "notebooks")}}
            ).execute()
        assert whose.outputs[0].text.strip() == str(portal)
        shown = {name: {} for name in books}
        for cell in book.cells[1:]:
            said = shown[cell.metadata["of"]]
            said[calls(cell)] = said.get(calls(cell), "") + "".join(
                output.get("text", "") + output.get("data", {}).get(
                    "text/html", "") for output in cell.outputs)
            assert not re.search(  # who waited, and who waited for them
                r"Traceback|rank \d: line \d+: "
                r"(?!\w*Error: (Timed out|Connection closed by peer))",
                said[calls(cell)]), said[calls(cell)]
        return book, shown
    return execute


def said_by(shown, *words):
    """What the only cell with these words shows."""
    said, = (text for source, text in shown.items()
             if all(word in source for word in words))
    return said


def numbers(html):
    """What is drawn, column by column."""
    return re.findall(r'text-anchor="middle">(\d+)<', html)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs_for_any_python3(path):
    import nbformat

    book = read_book(path)
    nbformat.validate(book)
    assert book.metadata.kernelspec.name == "python3"
    assert "version" not in book.metadata.language_info
    for cell in book.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            # fits half a screen, without wrapping
            assert max(map(len, cell.source.splitlines())) <= 62


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_headings_do_not_jump(path, monkeypatch):
    """Those of the texts, and those that the cells show below them."""
    monkeypatch.setattr(following, "follow_script", lambda view: view())
    last = 0
    for cell in read_book(path).cells:
        text = re.sub("```.*?```", "", calls(cell), flags=re.DOTALL)
        levels = [len(marks) for marks in re.findall("^(#+) ", text, re.M)]
        if cell.cell_type == "code":
            shows = text.startswith("diff(")
            levels = map(int, re.findall(r"<h(\d)", eval(
                text, vars(cells)).html) if shows else [])
        for level in levels:
            assert level <= last + 1, text
            last = level


def test_a_check_is_read_aloud_a_line_at_a_time(monkeypatch):
    """What is shown is replaced as a whole: one line of the page says it.

    An old verdict says that it is old, once the script is another one.
    """
    shown, scripts = [], iter(["mine", "mine", "another"])
    looks = chain(["old", "new", "new"], repeat("newer"))
    monkeypatch.setattr(following, "saved_state", lambda: next(looks))
    monkeypatch.setattr(cells, "read_working_script", lambda: next(scripts))
    monkeypatch.setattr(cells, "live", lambda make: (
        lambda now=False: shown.append(make().html)))
    monkeypatch.setattr(cells.interpreter, "run_python", lambda *_, on_line: [
        on_line(json.dumps(event)) for event in (
            {"columns": ["1"]}, {"run": "1"}, {"say": "1 process ..."},
            {"answer": ["it is right", "ok"]},
            {"say": "Right: </script> `python -m workshop reset std`"},
            {"right": True})])
    cells.check("ddp")
    assert "FAIL" not in shown[-1]
    lines = [re.search(r"\}\)\((.*)\)</script>", html)[1] for html in shown]
    assert list(dict.fromkeys(map(json.loads, lines))) == [
        "The processes start, which takes some seconds.", "1 process ...",
        'Right: </script> `reset("std")`']
    assert not any("<" in line for line in lines)
    wait_for(lambda: "has changed since this check" in shown[-1])
    assert next(scripts, None) is None


def test_a_view_follows_the_script_once_it_is_whole(monkeypatch):
    looks, done = iter(["old", "old", "emptied", "new", "new"]), Event()

    def saved_at():
        look = next(looks, None)
        if not look:
            following.followed = None
            done.set()
        return look

    shown = []
    monkeypatch.setattr(frontend, "current", SimpleNamespace(
        is_notebook=True, display=lambda *_: None,
        update=lambda bundle, _: shown.append(bundle["text/plain"])))
    monkeypatch.setattr(following, "saved_state", saved_at)
    following.follow_script(lambda: Shown("", "view"))
    assert done.wait(60)
    wait_for(lambda: len(shown) > 1)  # the second says that it follows no more
    assert shown == ["view", "view"]


def test_a_view_says_that_another_one_follows_the_script(monkeypatch):
    ids, updates = [], {}
    monkeypatch.setattr(frontend, "current", SimpleNamespace(
        is_notebook=True, display=lambda _, name: ids.append(name),
        update=lambda bundle, name: updates.update({
            name: bundle["text/html"]})))
    monkeypatch.setattr(following, "saved_state", lambda: "as it was")
    for text in "first", "second":
        following.follow_script(lambda text=text: Shown(
            f"<p>{text}</p><script>scroll()</script>", text))
    wait_for(lambda: updates)
    html = updates[ids[0]]
    assert "does not follow your script any more" in html
    assert "<p>first</p>" in html and "<script>" not in html
    assert list(updates) == ids[:1]
    following.followed = None


def test_where_jobs_are_submitted_with_pbs(tmp_path, monkeypatch):
    program(tmp_path / "qsub", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    for cell in (cells.slurm, cells.queue, lambda: cells.submit("ddp-1n2g")):
        assert "PBS is here: submit the job in a term" in cell().html


def test_what_a_cell_started_was_killed():
    """As where a portal's session has too little memory."""
    lines = []
    status = cells.interpreter.run_python(
        "-c", "import os; os.kill(os.getpid(), 9)", on_line=lines.append)
    assert status == -9 and lines[0].startswith("error: the system killed a")


def test_the_stop_button_lets_a_run_say_how_to_go_on():
    lines = []

    def on_line(line):
        lines.append(line)
        if line == "begun\n":
            raise KeyboardInterrupt

    cells.interpreter.run_python("-c", """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
print("begun", flush=True)
time.sleep(60)
""", on_line=on_line)
    assert lines == ["begun\n", "saved\n"]


def test_the_newest_job_is_that_of_the_largest_number(tmp_path, monkeypatch):
    """A copied log has the time of its copy."""
    for age, name in enumerate(("x", "9", "10_2", "10_11")):
        log = tmp_path / f"slurm-{name}.out"
        log.write_text(name)
        os.utime(log, (10**9 - age, 10**9 - age))
    monkeypatch.chdir(tmp_path)
    assert "slurm-10_11.out" in cells.log().text


def test_what_is_printed_is_shown_as_it_is(tmp_path, monkeypatch):
    lines = ["run    steps", "   <b>   7", *map(str, range(2000)), "`end`"]
    (tmp_path / "slurm-1.out").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    printed = re.search('class="said".*<pre>(.*)</pre>', cells.log(3).html,
                        re.DOTALL)[1]
    assert printed == (f"{tmp_path}/slurm-1.out:\nrun    steps\n"
                       "   &lt;b&gt;   7\n...\n1998\n1999\n`end`")
    assert len(cells.log().text.splitlines()) == 1 + len(lines)
    assert "599\n...\n" not in cells.log(2000).html


def test_lesson_mpi_runs_with_the_environment_that_the_site_names(shown):
    needs("mpirun")
    shown = shown["diff_mpi"]
    assert (f"Done: all {len(documents.load_changes('mpi'))} changes are made"
            in shown['diff("mpi")'])
    assert "no change is left" in shown['check("mpi", "next")']
    assert "DistributedDataParallel" in shown['compare("mpi", "ddp")']
    assert said_by(shown, "Read_at_all").count("right: True") == 5
    assert said_by(shown, "10.0**rank", "Allreduce").count(">1111<") == 16
    for rank in range(4):
        assert (f"rank {rank}: did not finish: it still waits in line 4"
                in said_by(shown, "comm.Send"))
        assert (f"rank {rank}: received {10 ** ((rank - 1) % 4)}"
                in said_by(shown, "Isend"))


def test_cells_make_changes_and_take_them_back(repo):
    """As the line says that one has removed the # from."""
    script = repo / "code" / "train_gpt2.py"
    shutil.copy(STAGES["std"].solution, script)

    def say(cells):
        """Run the cells, each of which has to say its words."""
        end = python(repo, "-c", "from workshop.notebook.cells import *\n"
                     + "".join(f"print({cell}, end='---')\n"
                               for cell in cells))
        *out, _ = end.stdout.split("---")
        for (cell, words), said in zip(cells.items(), out, strict=True):
            assert words in said, (cell, said)

    say({'apply("ddp", 3)': f"3: {documents.load_changes('ddp')[2].title}\n",
         'apply("ddp", 3, 3)': "already made", 'apply("ddp", "all")': "0 of "})
    assert script.read_text() == STAGES["ddp"].solution.read_text()
    say({"undo()": "is now as it was before `apply ddp",
         'reset("std")': "is now std",
         'apply("ddp", 99)': "no such change: 99",
         'apply("ddp")': "no changes are named",
         'apply("ddp", "3")': "by their numbers",
         "apply(3)": "no such stage: 3",
         'reset("gpt")': "no such stage: gpt"})
    assert script.read_text() == STAGES["std"].solution.read_text()


def test_where_one_is(tmp_path, monkeypatch, snapshot):
    """Each state of the script, what has passed a check, and the runs."""
    script = tmp_path / "train_gpt2.py"
    monkeypatch.setattr(working_copy, "WORKING_COPY", script)
    monkeypatch.setattr(passed_checks, "PASSED_FILE",
                        tmp_path / "checked.json")
    monkeypatch.setattr(working_copy.runs, "RUNS", ROOT / "example-logs")

    def now(text):
        script.write_text(text)
        return cells.journey()

    std, ddp = (STAGES[name].solution for name in ("std", "ddp"))
    said = [now(text).text for text in (
        std.read_text(), *(Diff("ddp", std).apply(numbers) for numbers in (
            [1, 2], range(3, 14))), ddp.read_text())]
    passed_checks.record("ddp", script.read_bytes())
    shown, when = now(ddp.read_text()), passed_checks.last_passed("ddp")[:16]
    snapshot("journey.txt", "\n".join([*said, shown.text]))
    assert f"<td>{when}</td>" in shown.html
    snapshot("journey.html", shown.html.replace(when, "today"))


def test_a_workspace_for_the_root_that_the_server_has(repo, monkeypatch):
    """test_lab.py opens it."""
    monkeypatch.setattr(opener, "ROOT", repo)
    file = repo / "notebooks" / "beside_ddp.jupyterlab-workspace"
    for root, inside in ((repo, ""), (repo.parent, f"{repo.name}/")):
        monkeypatch.setattr(following, "server_root", lambda root=root: root)
        assert f'href="{file.name}"' in cells.beside("ddp").html
        assert f'"notebook:{inside}notebooks/diff_ddp' in file.read_text()
        file.unlink()
    for root in (repo / "code", None):
        monkeypatch.setattr(following, "server_root", lambda root=root: root)
        assert "side by side" not in cells.beside("ddp").html
        assert not file.exists()


def test_a_home_that_cannot_be_written_is_a_line(monkeypatch):
    """Not JupyterLab's thirty."""
    monkeypatch.setattr(opener.os, "execv", pytest.fail)
    for name in ("JUPYTER_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc")
    with pytest.raises(UserError, match="cannot write to /proc/"):
        opener.main(SimpleNamespace(stage="ddp", flags=[]))


@pytest.mark.parametrize("stage", TAUGHT)
def test_the_planted_mistakes_are_lines_of_the_solution(stage):
    text = "".join(cell.source for cell in read_book(
        ROOT / "notebooks" / f"diff_{stage}.ipynb").cells)
    lines = [line.strip() for line in
             STAGES[stage].solution.read_text().splitlines()]
    mistakes = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    assert mistakes
    for mistake in mistakes:
        removed = re.findall("^- +(.*)$", mistake, re.MULTILINE)
        assert removed and all(lines.count(line) == 1 for line in removed)


@pytest.fixture(scope="module")
def executed(execute, single, tmp_path_factory):
    """The copy with an environment, a dataset and the example runs; the
    notebooks' cells, run in it as one notebook, and what they show.

    Exercises are solved with what is folded in their lessons. Not run is what
    takes long, and what test_lab.py runs. The lists of changes, and pictures
    that one command draws, are made in this process.
    """
    from nbformat.v4 import new_code_cell, new_output

    repo = copy_clone(tmp_path_factory.mktemp("ready"), "notebooks",
                      "example-logs", "code", stage="mpi")
    (repo / "site.sh").write_text(f"WORKSHOP_VENV={sys.prefix}\n")
    (repo / "fineweb").mkdir()
    (repo / "fineweb" / "demo").symlink_to(ROOT / "fineweb" / "demo")
    books = {name: code_of(name) for name in (
        "collectives", "sharding", "diff_kernels", "diff_mpi", "diff_lit",
        "hangs", "results", "start_here", "your_model")}
    kernels, lit = books["diff_kernels"], books["diff_lit"]
    kernels[:] = [cell for cell in kernels if "%%ranks" in cell.source]
    lit[:] = [cell for cell in lit if "class Line(" in cell.source
              or calls(cell) == "strategies()"]
    del books["hangs"][2:-1]  # the first of them: test_why_course.py has all
    plots = [calls(cell) for cell in books["results"]
             if calls(cell).startswith("plot(")][1:]
    for name, left_out in (
            ("diff_mpi", ('check("mpi")', "slurm(", "submit(", "queue(",
                          "log(")),
            ("results", tuple(plots)),
            ("start_here", ("journey(", "doctor(", "train(")),
            ("your_model", ("verify(", "torchrun(", "train("))):
        books[name] = [cell for cell in books[name]
                       if not calls(cell).startswith(left_out)]
    export_run(single.folder, repo / "notebooks/your_model/theirs")
    shutil.copytree(single.folder, repo / "notebooks/your_model/run")
    for cell in chain(*books.values()):
        for long, short in (  # ranks that wait for ever, at full speed
                ("%%mpi 4 10", "%%mpi 4 2"), (", 64, 256, 1024, 4096)", ")"),
                ("(times)[3]", "(times)[0]"), ("2**23", "2**20"),
                ("total = 2**20", "total = 2**14"), ("10, 25, 2", "10, 13, 2"),
                ("[4**k for k in range(5)]", "[1, 4]")):
            cell.source = re.sub(r"for _ in range\(\d+\):", "for _ in [0]:",
                                 cell.source.replace(long, short))
    for name in "sharding", "diff_kernels":
        *_, solution = re.findall(r"```python\n(.*?)```", "\n".join(
            cell.source for cell in read_book(
                ROOT / "notebooks" / f"{name}.ipynb").cells), re.DOTALL)
        exercise, = (cell for cell in books[name] if "# yours" in cell.source)
        books[name].append(copy.deepcopy(exercise))
        books[name][-1].source = re.sub(
            "(.*# yours\n)+", lambda _, new=solution: new, exercise.source)
    book, shown = execute(repo, books)
    made = {f'diff("{stage}")': render.to_html(Diff(
        stage, STAGES[STAGES[stage].after].solution))
        for stage in ("fsdp", "tp", "3d")}  # in test_lab.py: ddp, lit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels.results, "RUNS", repo / "runs")
        for number, call in enumerate(plots):
            file = repo / f"panel-{number}.svg"
            patch.setattr(sys, "argv", ["", call.split('"')[1], file])
            panels.write_panel()
            made[call] = shown["results"][call] = cells.picture(
                file.read_text()).html
    book.cells += [new_code_cell(call, outputs=[new_output(
        "display_data", {"text/html": html})]) for call, html in made.items()]
    return repo, book, shown


@pytest.fixture
def shown(executed):
    return executed[-1]


@pytest.mark.parametrize("follows", [True, False])
def test_a_result_of_verify_does_not_grow_old(follows, monkeypatch):
    """In JupyterLab: only that of the check is about a script that changes."""
    drawn = []

    class Output:
        """Keeps what is drawn."""

        def __init__(self, bundle):
            self.update(bundle)

        def update(self, bundle):
            drawn.append(bundle["text/html"])

    monkeypatch.setattr(frontend, "LiveOutput", Output)
    monkeypatch.setattr(following, "pulse",
                        lambda: "notebooks/__pycache__/alive-1")
    cells.on_board("-c", "", follows_script=follows)
    is_marked = ["does not follow your script" in html for html in drawn]
    assert len(drawn) > 1 and is_marked[0]  # while it runs
    assert is_marked[-1] == follows


def shown_without_a_question(
        book: "nbformat.NotebookNode", *shows: str) -> list[str]:
    """Return the calls of cells that show something nobody was asked about.

    shows: how such cells begin, as "%%ranks".
    """
    found = []
    for before, cell in pairwise(book.cells):
        call = calls(cell).strip()
        if cell.cell_type == "code" and call.startswith(shows) and (
                "**Predict**" not in before.source):
            found.append(call)
    return found


@pytest.mark.parametrize(("name", "shows"), [
    ("collectives", ("%%ranks",)),
    ("start_here", ("data_parallel(", "cadence(", "nodes(", "train("))])
def test_a_lesson_asks_before_it_shows(name, shows):
    book = read_book(ROOT / "notebooks" / f"{name}.ipynb")
    assert shown_without_a_question(book, *shows) == []
    asking = next(cell for cell in book.cells
                  if "**Predict**: what" in cell.source)
    asking.source = asking.source.replace("**Predict**", "Here")
    assert len(shown_without_a_question(book, *shows)) == 1


def test_collectives_are_run_for_real(shown):
    shown = shown["collectives"]
    # DDP's three optimisations: a message a weight, a bucket, a minibatch
    for words, messages in (("in reversed(step", 6), ("        lambda w", 6),
                            ("torch.cat(bucket)", 3), ("if last:", 6)):
        text = said_by(shown, words)
        assert f"rank 0: {messages} messages with " in text
    first = said_by(shown, "        lambda w")  # while others are computed
    sent, computed = ([float(x) for x in re.findall(
        rf'<rect x="([\d.]+)"[^>]* fill="{pictures.RANK_COLOURS[kind]}"',
        first)]
        for kind in (2, 1))
    assert len(sent) == len(computed) == 2 * 6 and min(sent) < max(computed)

    before = [str(10**rank) for rank in range(4) for _ in range(4)]
    for name, held in figures.COLLECTIVES.items():  # as on the slides
        if name != "reduce":  # which leaves to the others what it likes
            assert numbers(said_by(
                shown, f"dist.{name.replace('-', '_')}(", '"after")')) == [
                str(n) for ranks in held for row in ranks for n in row or ()]
    ring = numbers(said_by(shown, "dist.isend"))
    assert ring[:16] == before and ring[-16:] == ["1111"] * 16
    assert ring[-64:-48].count("1111") == 4  # after the reduce-scatter
    alone = said_by(shown, "sleep")
    assert "rank 3: done" in alone
    assert re.search(r"rank [012]: line 6: \w*Error: Timed out .*5000ms",
                     alone)
    assert not re.search("rank [012]: done", alone)


@pytest.mark.whole
def test_cells_of_ranks_share_an_interpreter_but_no_names(monkeypatch):
    """It stays warm, and ends with its kernel."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    warm = magics.Warm()

    def run(cell):
        answers = list(warm.ask({"cell": cell, "ranks": 2, "seconds": 20}))
        return answers[-1], [answer["line"] for answer in answers[:-1]]

    last, said = run("mine = rank\nprint(mine, torch.__name__)\n"
                     "show(torch.ones(2), 'now', 1, 1 - rank)")
    assert said == ["rank 0: 0 torch", "rank 1: 1 torch"]
    assert last["shown"] == [[["now", [1, 1], 1, 1]], [["now", [1, 1], 1, 0]]]
    first = warm.process.pid
    _, said = run("print(mine)")
    assert said == [f"rank {rank}: line 1: NameError: name 'mine' is not "
                    "defined" for rank in (0, 1)]
    assert warm.process.pid == first
    last, _ = run("print(")
    assert last["error"].startswith("line 1 of this cell: ")
    begin = time.monotonic()
    run("""import sys
from torch.nn.parallel import DistributedDataParallel
sys.setswitchinterval(100)  # gloo's thread waits for the GIL
model = DistributedDataParallel(torch.nn.Linear(500, 500))
model(torch.randn(100, 500)).mean().backward()
dist.all_reduce(torch.ones(1))""")
    assert time.monotonic() - begin < 60  # it is killed after 120
    warm.process.kill()
    warm.process.wait()
    warm.start()  # another one
    warm.process.stdin.close()
    assert warm.process.wait(20) == 0


def test_sharding_measures_what_its_formulas_say(shown):
    shown = shown["sharding"]
    assert said_by(shown, "# yours").count("not yet") == 4
    assert len(re.findall(r"rank \d: right", said_by(shown, "dcp.load"))) == 4
    compared = {}
    for text in shown.values():
        assert "did not finish" not in text, text
        for what, measured, formula in re.findall(
                r"rank 0: (.+): ([\d,]+) bytes, by the formula ([\d,]+)",
                text):
            assert measured == formula, what
            compared[what] = int(measured.replace(",", ""))
    assert len(compared) == 4 + 2 + 3 + 4
    table = said_by(shown, 'Comparison("ZeRO-3", "ZeRO-2")')
    rows = {}  # what -> measured and by the formula, of ZeRO-3 and of ZeRO-2
    for what, *numbers in re.findall(
            r"rank 0: (\S.*?)" + 4 * r" +([\d,]+)" + "$", table, re.M):
        rows[what] = [int(number.replace(",", "")) for number in numbers]
        first, by_formula, second, also = rows[what]
        assert first == by_formula and second == also, table
    assert len(rows) == 4
    assert compared["moments"] == 2 * compared["parameters"]
    for column, whole in ((0, 1.1), (2, 4)):
        assert rows["whole in between"][column] <= (
            whole * rows["mine, afterwards"][column])
    assert compared["pp, 4 sends"] < compared["dp, 11 all-gathers"] < (
        compared["tp, 36 all-reduces"])

    for schedule, order, most in (
            ("ScheduleGPipe", schedules.GPIPE, [8, 8, 8, 8]),
            ("Schedule1F1B", schedules.ONE_F_ONE_B, [4, 3, 2, 1])):
        text = said_by(shown, f"run_pipeline({schedule}")
        flying = re.findall(r"rank (\d): (\d) microbatches in flight", text)
        assert flying == [(str(rank), str(number))
                          for rank, number in enumerate(most)]
        waited, formula = re.search(
            r"waited ([\d.]+)% .* formula ([\d.]+)%", text).groups()
        assert formula == "27.3" and 0 < float(waited) < 100
        for rank in range(4):  # as on the slides
            assert re.findall(r"[FB]\d", re.search(
                rf"Rank {rank}: (.*?)\.", text)[1]) == [
                f"{kind}{number}" for kind, number in order(rank, 4, 8)]


def test_hangs_are_named(shown):
    shown = shown["hangs"]
    assert "rank 0: step 20 loss" in shown["plant(1)"]
    seconds, = re.findall(r"After (\d+) s 4 of 4 processes run, with nothing "
                          r"new for \d s\.", shown["plant(1)"])
    assert int(seconds) <= hangs.SECONDS + 3
    assert "collective mismatch" in shown["why()"]
    assert hangs.last_lines(
        "who\nException raised from run at socket.cpp:820 (most recent call "
        "first):\n<omitting python frames>\nframe #1: _start\n\n") == ["who"]


def test_kernels_run_in_their_cells(shown):
    needs("triton")
    shown = shown["diff_kernels"]
    assert "rank 0: not yet: off by " in said_by(shown, "# yours")
    assert "rank 0: right" in said_by(shown, "tl.dot(")


def test_your_model_says_what_its_answers_quote(
        shown, tmp_path, monkeypatch):
    """In this process, by one server: test_verify.py has those with hashes of
    their own."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.chdir(tmp_path)  # of which each run gets a copy
    needs("transformers")
    book, shown = read_book(ROOT / "notebooks" / "your_model.ipynb").cells, {
        **shown["your_model"]}
    asked = [k for k, cell in enumerate(book)
             if calls(cell).startswith("verify(")]
    assert len(asked) == 12
    for call in {calls(book[k]) for k in asked}:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            eval(call, {"verify": lambda number, mistake=0, *flags:
                        verify([f"{ROOT}/{number}".split()[0],
                                *number.split()[1:]], 2, 4)
                        if isinstance(number, str) else
                        your_model.ask(number, mistake, flags)})
        shown[call] = re.sub(" *still waiting.*\n", "", out.getvalue())
    shown = {source: " ".join(unescape(re.sub("<.*?>", "", text)).split())
             for source, text in shown.items()}
    example = (ROOT / "example-logs" / "verify.txt").read_text().split()
    assert re.sub(r"\d+", "0", shown["verify(0)"]) == re.sub(
        r"\d+", "0", " ".join(example))  # it is on a slide
    for k in asked:
        said, (answer, *_) = shown[calls(book[k])], book[k + 1].source.split(
            "</details>")
        quotes = re.findall(r"verify says: `([^`]+)`(?:\s+and\s+`([^`]+)`)?",
                            answer)
        assert quotes, answer
        for quote in filter(None, chain(*quotes)):
            assert " ".join(quote.split()) in said, (quote, said)
    assert "0 failures, 1 warning" in shown["verify(4)"]
    assert "0 failures, 0 warnings" in shown["verify(5)"]
    assert "0 failures, 3 warnings" in shown["verify(5, 2)"]
    alike, _ = launch(ROOT / "notebooks" / "your_language_model.py", "--save",
                      tmp_path / "sharded", world_size=2, hashes=0)
    assert "its logits differ by 0e+00 at most" in alike.out, alike.err
    apart = said_by(shown, "%%ranks")
    for name in ("run", "again.pt"):
        assert float(re.search(rf"{name}: (\S+) apart", apart)[1]) < 1e-5


@pytest.mark.whole
def test_the_mean_over_all_tokens_is_that_of_one_process(
        tmp_path, monkeypatch, capsys):
    """The folded answer's lines, in the script with padding."""
    needs("transformers")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.chdir(tmp_path)
    cell, = (cell.source for cell in read_book(
        ROOT / "notebooks" / "your_model.ipynb").cells
        if cell.id == "your-model-means-after")
    lines, = re.findall("```python\n(.*?)```", cell, re.DOTALL)
    text = (ROOT / "notebooks" / "your_language_model.py").read_text()
    old = "            loss = model(input_ids=tokens, labels=labels).loss\n"
    assert text.count(old) == 1
    script = tmp_path / "train.py"
    script.write_text(text.replace(old, lines))
    verify([str(script), "--padded"], 2, 4)
    out = capsys.readouterr().out
    assert "gradients match the single-process run" in out, out
    assert "FAIL" not in out


@pytest.mark.whole
def test_the_finished_script_of_your_model_trains(tmp_path):
    """To its end, which verify does not see."""
    script, saved = tmp_path / "train.py", tmp_path / "model.pt"
    script.write_text(your_model.edited(5))
    first, second = launch(script, "--save", saved, world_size=2, hashes=0)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    epochs = re.findall("^epoch (\\d): .* accuracy (.*)$", first.out, re.M)
    assert len(epochs) == 5 and float(epochs[-1][1]) > 0.95
    assert not second.out
    assert next(iter(torch.load(saved))) == "features.0.weight"  # as alone


def test_all_that_is_shown_can_be_read(executed, page, lab, tmp_path):
    """In a JupyterLab: the contrast, in both themes, and nothing is cut."""
    import nbformat
    from nbformat.sign import NotebookNotary

    repo, book, shown = executed
    needs("lightning")  # which draws a table and a bar, without colours
    drawn = said_by(shown["diff_lit"], "class Line(")
    assert "Epoch 49/49" in drawn and "\x1b" not in drawn
    shown = shown["results"]
    assert "No run to show in runs/ yet" in shown["runs()"]
    for name in panels.IN_NOTEBOOK:
        picture = shown[f'plot("{name}")']
        assert "currentColor" in picture and "#010203" not in picture
    file = repo / "notebooks" / "all.ipynb"
    nbformat.write(book, file)
    trusted = tmp_path / "home/.local/share/jupyter"
    trusted.mkdir(parents=True)
    NotebookNotary(data_dir=str(trusted)).sign(nbformat.read(file, 4))
    lesson = Lesson(page, lab(repo, all_cells=True), "all")
    outputs = page.locator(".jp-OutputArea-output .ws")
    assert outputs.count() > 60 and outputs.locator("svg").count() > 30
    lesson.can_be_read(1000)


@pytest.fixture
def bare(repo, monkeypatch):
    """The copy, without SLURM and a script that is Python; a run has begun."""
    programs = repo / "bin"
    programs.mkdir()
    for name in ("bash", "env", "tail"):
        (programs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("SHELL", str(programs / "bash"))  # what ! starts
    (repo / "runs" / "just-begun").mkdir(parents=True)
    (repo / "code" / "train_gpt2.py").write_text("def main()\n")
    return repo


def kind_of(cell):
    """The first function or magic of a cell."""
    return calls(cell).split("(")[0].split()[0]


def test_lessons_say_what_is_wrong_in_a_line(bare, execute):
    (bare / "site.sh").write_text(
        f"WORKSHOP_VENV={sys.prefix}\nexport PATH={bare}/bin\n")
    expected = {
        "diff": "Not Python yet, line 1", "slurm": "There is no SLURM",
        "queue": "There is no SLURM", "submit": "There is no SLURM",
        "log": "no job of yours has written a log yet",
        "runs": "runs/just-begun: no hyperparameters.json",
        "plot": "runs/just-begun: no hyperparameters.json"}
    books = {name: [cell for cell in code_of(name)
                    if kind_of(cell) in expected]
             for name in ("diff_ddp", "results")}
    shown = [*chain(*map(dict.items, execute(bare, books)[1].values()))]
    for kind, complaint in expected.items():
        said = [text for source, text in shown if source.startswith(kind)]
        assert said and all(complaint in text for text in said), kind


def test_lessons_without_an_environment_say_so_in_a_line(bare, execute):
    books = {name: {kind_of(cell): cell for cell in code_of(name)}.values()
             for name in ("start_here", "diff_ddp", "results", "collectives",
                          "hangs", "batch", "one_gpu", "your_model")}
    kinds = set()
    for shown in execute(bare, books)[1].values():
        for source, text in shown.items():
            kind = re.match(r"\W*(\w+)", source)[1]
            if kind in ("load_ext", "remove"):  # the next cell says it
                continue
            kinds.add(kind)
            assert "source activate.sh" in text, source
    assert {"diff", "check", "ranks", "train", "plant", "runs"} <= kinds


def test_a_message_in_a_cell_names_what_one_can_call_there():
    for said, shown in (
            ("`python -m workshop reset std`", '`reset("std")`'),
            ("`python -m workshop reset --list`", "`reset()`"),
            ("`python -m workshop reset --undo` restores it",
             "`undo()` restores it"),
            ("`python -m workshop check ddp 12`", '`check("ddp", 12)`'),
            ("`python -m workshop diff ddp --no-hints`",
             '`diff("ddp", hints=False)`'),
            ("`python -m workshop lab`", "`python -m workshop lab`")):
        assert page.as_calls(said) == shown


@pytest.mark.parametrize("call", [
    "diff()", "diff('std')", "diff(3)", "diff(['ddp'])", "diff('ddp', no=1)",
    "apply('ddp', 10**30)", "apply('no', 1)", "apply('ddp', 2.5)",
    "beside('../../x')", "bills('x')", "bills(-1)", "bills(float('nan'))",
    "cadence(3)", "compare('std')", "compare('std', 'no')", "experiment()",
    "plot(b'x')", "reset(5)", "runs(3)", "train('a\\0b')", "plant('x')",
    "check('\\ud800')", "check('no')", "check('ddp', 'nxt')",
    "check('ddp', -1)", "verify('un\"closed')", "verify(None)",
    "magics.ranks('²', '')", "magics.ranks('9', '')", "magics.mpi('2 x', '')",
    "magics.ranks('2 3 4', '')", f"magics.mpi('2 {'9' * 5000}', '')"])
def test_a_cell_with_a_wrong_argument_says_so_in_a_line(call, capsys):
    said = eval(call, vars(cells))
    if call.startswith("magics"):  # which show it
        text = capsys.readouterr().out.rstrip()
    else:
        text = said.more[COMPLAINT]
    assert text and "\n" not in text and len(text) < 200


def test_two_equal_stages_have_no_changes():
    assert cells.compare("std", "std").text == ""


def test_a_notebook_is_as_the_filter_of_git_leaves_it():
    """Else git would call it changed in each clone that has the filter."""
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = file.read_text("utf-8")
        written = json.dumps(json.loads(text), indent=1, sort_keys=True,
                             ensure_ascii=False)
        assert text == f"{written}\n", file.name
