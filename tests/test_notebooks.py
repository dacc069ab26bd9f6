"""The notebooks, from top to bottom, in a kernel that is not ours."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from html import unescape
from itertools import chain
from xml.etree import ElementTree

import nbformat
import pytest
import torch
from conftest import needs
from nbclient import NotebookClient

from backstage import ROOT
from backstage.errors import UserError
from workshop import lab
from workshop.lesson import documents
from workshop.lesson.diff import Diff
from workshop.notebook import cells, pictures, your_model
from workshop.processes import launch
from workshop.stages import LESSONS, STAGES

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TAUGHT = [stage for stage in LESSONS if (  # in a notebook
    ROOT / "notebooks" / f"diff_{stage}.ipynb").exists()]


@pytest.fixture
def repo(tmp_path):
    """A copy of the repository, with the DDP stage on the desk."""
    for folder in ("backstage", "workshop", "solutions", "notebooks"):
        shutil.copytree(ROOT / folder, tmp_path / folder,
                        ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "code").mkdir()
    shutil.copy(STAGES["ddp"].solution, tmp_path / "code" / "train_gpt2.py")
    return tmp_path


def done(stage):
    """What the diff says of the finished script."""
    return f"Done: all {len(documents.load(stage))} changes are made"


@pytest.fixture
def execute(repo, portal, monkeypatch):
    """Run a notebook in the portal's kernel: {source: text, html}."""
    monkeypatch.setenv("JUPYTER_PATH", str(portal / "share" / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "WORKSHOP_VENV"):
        monkeypatch.delenv(name, raising=False)

    def execute(name, only="", without=""):
        book = nbformat.read(repo / "notebooks" / name, as_version=4)
        if only:  # the imports, and this cell
            cells = [cell for cell in book.cells if cell.cell_type == "code"]
            book.cells = [cells[0], *(cell for cell in cells[1:]
                                      if cell.source == only)]
        book.cells = [cell for cell in book.cells if cell.source != without]
        whose = "import sys; print(sys.prefix)"
        book.cells.insert(0, nbformat.v4.new_code_cell(whose))
        NotebookClient(
            book, timeout=170, kernel_name="python3",
            resources={"metadata": {"path": str(repo / "notebooks")}}
        ).execute()
        shown = {}
        for cell in book.cells:
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                shown[cell.source] = shown.get(cell.source, "") + output.get(
                    "text", "") + data.get("text/html", "")
        assert shown.pop(whose).strip() == str(portal)
        return shown
    return execute


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs_for_any_python3(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert book.metadata.kernelspec.name == "python3"
    assert "version" not in book.metadata.language_info
    for cell in book.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            # fits half a screen, without wrapping
            assert max(map(len, cell.source.splitlines())) <= 62
        else:
            for line in cell.source.splitlines():
                assert len(line) <= 80 or line[0] == "|" or "](" in line, line


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_headings_do_not_jump(path, monkeypatch):
    """Those of the texts, and those that the cells show below them."""
    monkeypatch.setattr(cells, "follow_script", lambda view: view())
    monkeypatch.setattr(cells, "DESK", STAGES["std"].solution)
    last = 0
    for cell in nbformat.read(path, as_version=4).cells:
        prose = re.sub("```.*?```", "", cell.source, flags=re.DOTALL)
        levels = [len(marks) for marks in re.findall("^(#+) ", prose, re.M)]
        if cell.cell_type == "code":
            shows = cell.source == "script_map()" or (
                cell.source.startswith("diff("))
            levels = [int(level) for level in re.findall(
                r"<h(\d)", eval(cell.source, vars(cells)).html)
                ] if shows else []
        for level in levels:
            assert level <= last + 1, cell.source
            last = level


def test_a_check_is_read_aloud_a_line_at_a_time(monkeypatch):
    """What is shown is replaced as a whole: one line of the page says it."""
    shown = []
    monkeypatch.setattr(cells, "live", lambda make: (
        lambda now=False: shown.append(make().html)))
    monkeypatch.setattr(cells.interpreter, "run", lambda *_, on_line: [
        on_line(json.dumps(event)) for event in (
            {"columns": ["1"]}, {"trial": "1"}, {"say": "1 process ..."},
            {"answer": ["it is right", "ok"]},
            {"say": "Right: </script> `python -m workshop reset std`"},
            {"right": True})])
    cells.check("ddp")
    lines = [re.search(r"\}\)\((.*)\)</script>", html)[1] for html in shown]
    assert list(dict.fromkeys(map(json.loads, lines))) == [
        "The processes start, which takes some seconds.", "1 process ...",
        'Right: </script> `reset("std")`']
    assert not any("<" in line for line in lines)


def test_a_tables_headings_name_rows_and_columns():
    drawn = cells.table([("run", "steps"), ("ddp", 20), ("lit", 30)])
    assert re.findall('<th scope="(.*?)">(.*?)</th>', drawn) == [
        ("col", "run"), ("col", "steps"), ("row", "ddp"), ("row", "lit")]
    assert re.findall("<td>(.*?)</td>", drawn) == ["20", "30"]


def test_lesson_ddp_says_what_is_wrong_in_a_line(
        repo, execute, monkeypatch):
    programs = repo / "bin"
    programs.mkdir()
    for name in ("bash", "env", "tail"):
        (programs / name).symlink_to(shutil.which(name))
    script = repo / "code" / "train_gpt2.py"
    script.unlink()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("SHELL", str(programs / "bash"))  # what ! starts
    shown = execute("diff_ddp.ipynb")  # without an environment or SLURM
    assert "is not there: was it moved" in shown['diff("ddp")']
    assert "source activate.sh" in shown['check("ddp")']
    assert "There is no SLURM" in shown["slurm()"]
    for cell in ("queue()", 'submit("ddp-1n2g", "--max-steps 100")'):
        assert "There is no SLURM" in shown[cell]
    assert "no job of yours has written a log yet" in shown["log()"]
    for text in shown.values():
        assert "Traceback" not in text

    script.write_text(STAGES["ddp"].solution.read_text().replace("def main():",
                                                          "def main()"))
    shown = execute("diff_ddp.ipynb", only='diff("ddp")')
    assert re.search(r"Not Python yet, line \d+", shown['diff("ddp")'])


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_lesson_mpi_runs_with_the_environment_that_the_site_names(
        repo, execute):
    needs("mpirun")
    (repo / "site.sh").write_text(
        f"WORKSHOP_VENV={sys.prefix}\n")
    shutil.copy(STAGES["mpi"].solution, repo / "code" / "train_gpt2.py")
    shown = execute("diff_mpi.ipynb", without='check("mpi")')  # takes long
    assert done("mpi") in shown['diff("mpi")']
    checked = shown['check("mpi", 1)']
    assert "Change 1 is made as the lesson has it" in checked, checked
    assert "DistributedDataParallel" in shown['compare("mpi", "ddp")']

    def said(words):
        (text,) = (text for source, text in shown.items()
                   if all(word in source for word in words))
        assert "Traceback" not in text
        return text

    assert "rank 3: rank 3 of 4, local 3" in said(["Split_type"])
    assert said(["10.0**rank", "Allreduce"]).count(">1111<") == 16
    for rank in range(4):
        assert (f"rank {rank}: did not finish: it still waits in line 4"
                in said(["comm.Send"]))
        assert (f"rank {rank}: received {10 ** ((rank - 1) % 4)}"
                in said(["Isend"]))
    speed = said(["plot("])
    assert "4096 messages" in speed and "<svg" in speed


def test_cells_make_changes_and_take_them_back(repo, monkeypatch, capsys):
    """As the line says that one has removed the # from."""
    run = functools.partial(subprocess.run, cwd=repo, text=True,
                            capture_output=True, check=True)
    script = repo / "code" / "train_gpt2.py"
    shutil.copy(STAGES["std"].solution, script)
    begin = "from workshop.notebook.cells import *\n"

    def said(source):
        return run([sys.executable, "-c", f"{begin}print({source})"],
                   env=os.environ | {"PYTHONPATH": ""}).stdout

    titles = [change.title for change in documents.load("ddp")]
    assert f"made change 3: {titles[2]}\n" in said('apply("ddp", 3)')
    assert "already made" in said('apply("ddp", 3)')
    assert f"0 of {len(titles)} changes left" in said('apply("ddp", "all")')
    assert script.read_text() == STAGES["ddp"].solution.read_text()
    assert "is now 20" in said("undo()")
    assert "is now std" in said('reset("std")')
    assert script.read_text() == STAGES["std"].solution.read_text()
    assert "there is no change 99" in said('apply("ddp", 99)')
    assert "which changes?" in said('apply("ddp")')
    assert "by their numbers" in said('apply("ddp", "3")')
    assert "there is no stage gpt" in said('reset("gpt")')


def test_a_workspace_for_the_root_that_the_server_has(
        repo, tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "ROOT", repo)
    file = repo / "notebooks" / "beside_ddp.jupyterlab-workspace"
    for root, inside in ((repo, ""), (repo.parent, f"{repo.name}/"),
                         (repo / "code", None), (None, None)):
        file.unlink(missing_ok=True)
        monkeypatch.setattr(cells, "server_root", lambda root=root: root)
        link = cells.write_workspace("ddp")
        assert ("side by side" in cells.beside("ddp").html) == bool(link)
        assert link == ("" if inside is None else file.name)
        assert file.exists() == bool(link)
        if not link:
            continue
        layout = json.loads(file.read_text())["data"]
        for kind, path in (("editor", "code/train_gpt2.py"),
                           ("notebook", "notebooks/diff_ddp.ipynb")):
            name = f"{kind}:{inside}{path}"
            assert layout[name]["data"]["path"] == f"{inside}{path}"
            assert file.read_text().count(f'"{name}"') >= 2
    assert not list(repo.glob("beside*"))


@pytest.mark.parametrize("stage", TAUGHT)
def test_the_planted_mistakes_are_lines_of_the_solution(stage):
    text = "".join(cell.source for cell in nbformat.read(
        ROOT / "notebooks" / f"diff_{stage}.ipynb", as_version=4).cells)
    lines = [line.strip() for line in
             STAGES[stage].solution.read_text().splitlines()]
    mistakes = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    assert len(mistakes) >= 3
    for mistake in mistakes:
        removed = re.findall("^- (.*)$", mistake, re.MULTILINE)
        assert removed and all(lines.count(line) == 1 for line in removed)


@pytest.fixture
def ready(repo):
    """The copy with an environment, a dataset and the example runs."""
    (repo / "site.sh").write_text(f"WORKSHOP_VENV={sys.prefix}\n")
    shutil.copytree(ROOT / "example-logs", repo / "example-logs")
    (repo / "fineweb").mkdir()
    (repo / "fineweb" / "demo").symlink_to(ROOT / "fineweb" / "demo")
    return repo


@pytest.mark.whole
def test_start_here_shows_the_words_and_runs_the_script(ready, execute):
    shown = execute("start_here.ipynb")
    assert "python:" in shown["doctor()"]
    for name in ("data_parallel()", "words()", "cadence()", "nodes()"):
        ElementTree.fromstring(re.search("<svg.*</svg>", shown[name])[0])
    assert "rank 7" in shown["nodes()"]
    scripts_map = shown["script_map()"]
    for name in re.findall(r"^(?:class|def) (\w+)",
                           STAGES["ddp"].solution.read_text(), re.MULTILINE):
        assert f"<strong>{name}</strong>" in scripts_map
    assert "<h3>model</h3>" in scripts_map
    trained = shown['train("--preset", "tiny")']
    assert "| step   19/20 |" in trained and "finished" in trained
    assert len(list((ready / "runs").glob("*/metrics.csv"))) == 1


@pytest.mark.whole
def test_collectives_are_run_for_real(ready, execute):
    shown = execute("collectives.ipynb")

    def numbers(call):
        """What is drawn by the cell with this call, column by column."""
        (html,) = (html for source, html in shown.items() if call in source)
        return re.findall(r'text-anchor="middle">(\d+)<', html)

    before = [str(10**rank) for rank in range(4) for _ in range(4)]
    assert numbers("dist.all_reduce(x)\nshow") == before + ["1111"] * 16
    assert numbers("dist.reduce(")[:20] == before + ["1111"] * 4
    assert numbers("dist.broadcast") == before + ["1"] * 16
    gathered = ["1", "10", "100", "1000"]
    assert numbers("dist.all_gather") == gathered * 5
    assert numbers("dist.scatter") == ["1", "2", "3", "4"] * 2
    assert numbers("dist.reduce_scatter") == before + ["1111"] * 4
    ring = numbers("dist.isend")
    assert ring[:16] == before and ring[-16:] == ["1111"] * 16
    assert ring[-64:-48].count("1111") == 4  # after the reduce-scatter
    (drawn,) = (html for source, html in shown.items()
                if "dist.isend" in source)
    assert drawn.count('stroke-width="2.5"') == 6 * 4
    assert "4 processes, " in drawn
    (alone,) = (text for source, text in shown.items() if "sleep" in source)
    assert "rank 3: done" in alone
    assert re.search(r"rank [012]: line 6: \w*Error: Timed out .*5000ms",
                     alone)
    assert not re.search("rank [012]: done", alone)
    (speed,) = (text for source, text in shown.items() if "plot(" in source)
    assert "GB/s with 16 MB" in speed and "<svg" in speed
    for text in shown.values():
        assert "Traceback" not in text


@pytest.mark.whole
def test_cells_of_ranks_share_an_interpreter_but_no_names(monkeypatch):
    """It stays warm, and ends with its kernel."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    warm = cells.Warm()

    def run(cell):
        answers = list(warm.ask({"cell": cell, "ranks": 2, "seconds": 20}))
        return answers[-1], [answer["line"] for answer in answers[:-1]]

    last, said = run("mine = rank\nprint(mine, torch.__name__)\n"
                     "show(torch.ones(2), 'now', 1, 1 - rank)")
    assert said == ["rank 0: 0 torch", "rank 1: 1 torch"]
    assert last["shown"] == [[["now", [1, 1], 1, 1]], [["now", [1, 1], 1, 0]]]
    first = warm.process.pid
    begin = time.monotonic()
    _, said = run("print(mine)")
    took = time.monotonic() - begin
    assert said == [f"rank {rank}: line 1: NameError: name 'mine' is not "
                    "defined" for rank in (0, 1)]
    assert warm.process.pid == first
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    assert took < time.monotonic() - begin  # without importing it again
    last, _ = run("print(")
    assert last["error"].startswith("line 1 of this cell: ")
    warm.process.kill()
    warm.process.wait()
    assert run("print(rank)")[1] == ["rank 0: 0", "rank 1: 1"]
    warm.process.stdin.close()
    assert warm.process.wait(20) == 0


def test_the_picture_of_a_ring_marks_what_was_passed():
    shown = [[["at the start", [1], None, None], ["sum", [1], 0, 2]],
             [["at the start", [10], None, None], ["sum", [11], 0, 0]],
             [["at the start", [100], None, None], ["sum", [110], 0, 1]]]
    drawn = pictures.tensors(shown)
    assert drawn.count('stroke-width="2.5"') == 3  # not at the start
    assert drawn.count("<path") == 3
    assert drawn.count(">from 2<") == 1  # rank 0 is not below it
    assert "rank 1 holds 11; number 0 came from rank 0;" in drawn


@pytest.mark.whole
def test_sharding_measures_what_its_formulas_say(ready, execute):
    shown = execute("sharding.ipynb")
    compared = {}
    for text in shown.values():
        assert "Traceback" not in text and "did not finish" not in text, text
        for what, measured, formula in re.findall(
                r"rank 0: (.+): ([\d,]+) bytes, by the formula ([\d,]+)",
                text):
            assert measured == formula, what
            compared[what] = int(measured.replace(",", ""))
    assert len(compared) == 4 + 2 + 3 + 2 * 4 + 4
    assert compared["moments"] == 2 * compared["parameters"]
    for name, whole in (("ZeRO-2", 4), ("ZeRO-3", 1.1)):
        assert compared[f"{name}: whole in between"] <= (
            whole * compared[f"{name}: my parameters, afterwards"])
    assert compared["pp, 4 sends"] < compared["dp, 11 all-gathers"] < (
        compared["tp, 36 all-reduces"])

    def cell(call):
        (found,) = (text for source, text in shown.items() if call in source)
        return found

    recomputed = re.search(r"([\d.]+) times as long",
                           cell("recompute, model in"))
    assert 1 < float(recomputed[1]) < 1.8
    assert "all weights: [-2.5]" in cell("reduce_scatter_tensor")
    # the digits say whose numbers are in a sum
    handed = re.findall(r'text-anchor="middle">(\d+)<', cell('"with all'))
    assert handed == [number for number in ("2", "20", "200", "2", "22", "222")
                      for _ in range(3)]
    layer = re.findall(r'text-anchor="middle">(\d+)<', cell('"by columns'))
    assert layer == ["4"] * 2 + ["40"] * 2 + ["2"] * 4 + ["20"] * 4 + (
        ["22"] * 8)
    columns, rows = re.findall("first: (.*) off", cell("gelu"))[:2]
    assert float(columns) < 1e-12 and float(rows) > 1
    assert float(re.findall("rank 1: (.*) off", cell("CausalSelf"))[0]) < 1e-5
    qkv = re.findall(r'text-anchor="middle">(\d+)<', cell("all_alike"))
    assert qkv[:6] == ["1"] * 4 + ["10"] * 2  # and no value
    assert qkv[12:] == ["1", "10", "100"] * 4
    for schedule, most in (("ScheduleGPipe", [8, 8, 8, 8]),
                           ("Schedule1F1B", [4, 3, 2, 1])):
        text = cell(f"run_pipeline({schedule}")
        flying = re.findall(r"rank (\d): (\d) microbatches in flight", text)
        assert flying == [(str(rank), str(number))
                          for rank, number in enumerate(most)]
        assert len(re.findall(r">[FB]\d<", text)) == 4 * 2 * 8
        waited, formula = re.search(
            r"waited ([\d.]+)% .* formula ([\d.]+)%", text).groups()
        assert formula == "27.3" and 27 < float(waited) < 45
    table = cell("decisions()")
    for number in ("24.9 GB is too much", "9 or 58 samples",
                   "only groups of 5 or 25 are possible", "they wait 3.0%"):
        assert number in table


@pytest.mark.whole
def test_hangs_are_named(ready, execute):
    """The first of them: test_why.py has all."""
    file = ready / "notebooks" / "hangs.ipynb"
    book = nbformat.read(file, as_version=4)
    at = [cell.source for cell in book.cells].index("plant(1)")
    book.cells = [book.cells[1], *book.cells[at:at + 2], book.cells[-1]]
    nbformat.write(book, file)
    shown = execute("hangs.ipynb")
    assert "rank 0: step 20 loss" in shown["plant(1)"]
    assert "different collectives" in shown["why()"]
    assert "Traceback" not in shown["why()"]


def test_each_edit_of_your_model_can_be_made():
    edits, mistakes = your_model.read_lesson()
    assert len(edits) == 5 and len(mistakes) == 4
    for number, mistake in (*((n, 0) for n in range(6)),
                            *((5, n) for n in range(1, 5))):
        text = your_model.edited(number, mistake)
        compile(text, "your_model.py", "exec")
        assert max(map(len, text.splitlines())) <= 79
    with pytest.raises(UserError, match="5 edits and 4 mistakes"):
        your_model.edited(6)


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_your_model_says_what_its_answers_quote(ready, execute):
    needs("transformers")
    shown = {source: " ".join(unescape(re.sub("<.*?>", "", text)).split())
             for source, text in execute("your_model.ipynb").items()}
    book = nbformat.read(ready / "notebooks" / "your_model.ipynb", 4).cells
    asked = [k for k, cell in enumerate(book)
             if cell.source.startswith("verify(")]
    assert len(asked) == 11
    for k in asked:
        said, (answer, *_) = shown[book[k].source], book[k + 1].source.split(
            "</details>")
        quotes = re.findall(r"verify says: `([^`]+)`(?:\s+and\s+`([^`]+)`)?",
                            answer)
        assert quotes, answer
        for quote in filter(None, chain(*quotes)):
            assert " ".join(quote.split()) in said, (quote, said)
    for source in ("verify(4)", "verify(5)"):
        assert "0 wrong, 0 to look at" in shown[source]
    alike, = (said for source, said in shown.items() if "torchrun(" in source)
    assert "its logits differ by 0e+00 at most" in alike, alike
    apart, = (said for source, said in shown.items() if "%%ranks" in source)
    for name in ("run", "again"):
        assert float(re.search(rf"{name}: (\S+) apart", apart)[1]) < 1e-5


@pytest.mark.whole
def test_the_finished_script_of_your_model_trains(tmp_path):
    """To its end, which verify does not see."""
    script, saved = tmp_path / "train.py", tmp_path / "model.pt"
    script.write_text(your_model.edited(5))
    names = {}
    for size in (1, 2):
        ranks = launch(script, "--save", saved, world_size=size)
        assert not any(rank.status for rank in ranks), ranks[-1].err
        epochs = re.findall("^epoch (\\d): .* accuracy (.*)$", ranks[0].out,
                            re.MULTILINE)
        assert len(epochs) == 5 and float(epochs[-1][1]) > 0.95
        assert not any(rank.out for rank in ranks[1:])
        names[size] = [*torch.load(saved)]
    assert names[1] == names[2] and names[1][0] == "features.0.weight"


@pytest.mark.whole
def test_results_fall_back_on_the_examples(ready, execute):
    shown = execute("results.ipynb")
    assert "No run to show in runs/ yet" in shown["runs()"]
    for name in ("std x 1", "ddp x 4", "lit x 2"):
        assert f"<td>{name}</td>" in shown["runs()"]
    for panel in ("loss", "speed", "scaling", "model", "published", "ladder",
                  "gpus"):
        picture = shown[f'plot("{panel}")']
        assert "currentColor" in picture and "#010203" not in picture
    assert "no MFU" in shown['plot("speed")']
    assert "A = 2" in shown['plot("model")']
    assert "no GPU metrics in these runs" in shown['plot("gpus")']


@pytest.mark.whole
def test_other_lessons_say_what_is_wrong_in_a_line(repo, execute):
    (repo / "runs" / "just-begun").mkdir(parents=True)
    script = repo / "code" / "train_gpt2.py"
    script.write_text("def main()\n")
    for name in ("start_here", "results", "collectives", "sharding",
                 "hangs", "batch", "one_gpu", "your_model"):
        shown = execute(f"{name}.ipynb")  # there is no environment
        for source, text in shown.items():
            assert "Traceback" not in text
            if source.startswith(("doctor", "train", "%%ranks", "plant",
                                  "experiment", "verify", "export",
                                  "torchrun", "step")):
                assert "source activate.sh" in text, source
            elif source.startswith("script_map"):
                assert "is not Python yet: line 1" in text
            elif source.startswith(("runs(", "plot(")):
                assert ("runs/just-begun: there is no hyperparameters.json"
                        in text), source


@pytest.fixture
def kernel(repo, monkeypatch):
    """A real kernel, in the notebooks' folder: run(source, until=None).

    It yields the messages that the source causes, until it has ended, or until
    `until(message)` is true.
    """
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("PYTHONPATH", str(repo))
    manager, client = start_new_kernel(cwd=str(repo / "notebooks"))

    def run(source, until=None):
        said = []
        asked = client.execute(source, allow_stdin=True)
        while True:
            message = client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            said.append((kind, content))
            if until and until(kind, content):
                return said
            if (not until and kind == "status"
                    and message["parent_header"]["msg_id"] == asked
                    and content["execution_state"] == "idle"):
                return said

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_the_list_of_changes_follows_each_save(repo, kernel):
    script = repo / "code" / "train_gpt2.py"
    shutil.copy(STAGES["std"].solution, script)
    begin = "from workshop.notebook.cells import *\n"
    total = len(documents.load("ddp"))
    said = kernel(f'{begin}diff("ddp")')
    shown, = (content for kind, content in said if kind == "display_data")
    place = shown["transient"]["display_id"]
    assert f"{total} of {total} changes left" in shown["data"]["text/html"]

    def updated(words):
        return lambda kind, content: (
            kind == "update_display_data"
            and content["transient"]["display_id"] == place
            and words in content["data"]["text/html"])

    script.write_text(Diff("ddp", script).apply([2]))
    kernel("pass", until=updated(f"{total - 1} of {total} changes left"))
    script.unlink()  # it does not end what watches it
    kernel("pass", until=updated("is not there"))
    shutil.copy(STAGES["ddp"].solution, script)
    kernel("pass", until=updated("Done"))

    # another view takes its place: only one is shown anew
    said = kernel('diff("fsdp")')
    place = next(content for kind, content in said
                 if kind == "display_data")["transient"]["display_id"]
    script.write_text(Diff("fsdp", script).apply([1]))
    said = kernel("pass", until=updated("changes left"))
    assert {content["transient"]["display_id"] for kind, content in said
            if kind == "update_display_data"} == {place}


def test_a_question_that_nobody_answers_ends(kernel):
    """Run All goes on after it."""
    said = kernel("from workshop.notebook.cells import answer\n"
                  "print([answer('Submit? ', 1)])")
    assert ("stream", {"name": "stdout", "text": "['']\n"}) in said
    assert ("stream", {"name": "stdout", "text": "2\n"}) in kernel(
        "print(1 + 1)")


def test_a_message_in_a_cell_names_what_one_can_call_there(repo, monkeypatch):
    from workshop.lesson.render import as_calls

    for said, shown in (
            ("`python -m workshop reset std`", '`reset("std")`'),
            ("`python -m workshop reset --list`", "`reset()`"),
            ("`python -m workshop reset --undo` puts it back",
             "`undo()` puts it back"),
            ("`python -m workshop check ddp 12`", '`check("ddp", 12)`'),
            ("`python -m workshop diff ddp --no-hints`",
             '`diff("ddp", hints=False)`'),
            ("`python -m workshop lab`", "`python -m workshop lab`")):
        assert as_calls(said) == shown
