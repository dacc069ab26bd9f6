"""The notebooks, from top to bottom, in a kernel that is not ours."""

import re
import shutil
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from workshop import ROOT
from workshop.diff import solution

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def repo(tmp_path):
    """A copy of the repository, with the DDP stage on the desk."""
    for folder in ("workshop", "solutions", "notebooks"):
        shutil.copytree(ROOT / folder, tmp_path / folder,
                        ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "code").mkdir()
    shutil.copy(solution("ddp"), tmp_path / "code" / "train_gpt2.py")
    return tmp_path


@pytest.fixture
def execute(repo, portal, monkeypatch):
    """Run a notebook in the portal's kernel: {source: text, html}."""
    monkeypatch.setenv("JUPYTER_PATH", str(portal / "share" / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "WORKSHOP_VENV"):
        monkeypatch.delenv(name, raising=False)

    def execute(name, only=""):
        book = nbformat.read(repo / "notebooks" / name, as_version=4)
        if only:  # the imports, and this cell
            cells = [cell for cell in book.cells if cell.cell_type == "code"]
            book.cells = [cells[0], *(cell for cell in cells[1:]
                                      if cell.source == only)]
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


def test_lesson_ddp_runs_with_the_environment_that_the_site_names(
        repo, execute):
    (repo / "site.sh").write_text(
        f"WORKSHOP_VENV={sys.prefix}\n")
    shown = execute("diff_ddp.ipynb")
    assert shown["cadence()"].count("<rect") == 3 + 18 + 3 * 2 * 12
    assert "Done: all 12 changes are made" in shown['diff("ddp")']
    checked = shown['check("ddp")']
    assert "4 processes" in checked and "FAIL" not in checked, checked


def test_lesson_ddp_says_what_is_wrong_in_a_line(repo, execute):
    script = repo / "code" / "train_gpt2.py"
    script.unlink()
    shown = execute("diff_ddp.ipynb")  # there is no environment, either
    assert "is not there: was it moved" in shown['diff("ddp")']
    assert "source activate.sh" in shown['check("ddp")']
    for text in shown.values():
        assert "Traceback" not in text

    script.write_text(solution("ddp").read_text().replace("def main():",
                                                          "def main()"))
    shown = execute("diff_ddp.ipynb", only='diff("ddp")')
    assert re.search(r"Not Python yet, line \d+", shown['diff("ddp")'])


def test_lesson_lit_runs_with_the_environment_that_the_site_names(
        repo, execute):
    (repo / "site.sh").write_text(
        f"WORKSHOP_VENV={sys.prefix}\n")
    shutil.copy(solution("lit"), repo / "code" / "train_gpt2.py")
    shown = execute("diff_lit.ipynb")
    assert shown["strategies()"].count("<rect") == 2 * 4 * 3 * 4
    assert "Done: all 12 changes are made" in shown['diff("lit")']
    checked = shown['check("lit")']
    assert "trains in bf16" in checked and "FAIL" not in checked, checked


@pytest.mark.parametrize("stage", ["ddp", "lit"])
def test_the_planted_mistakes_are_lines_of_the_solution(stage):
    text = "".join(cell.source for cell in nbformat.read(
        ROOT / "notebooks" / f"diff_{stage}.ipynb", as_version=4).cells)
    lines = [line.strip() for line in
             solution(stage).read_text().splitlines()]
    mistakes = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    assert len(mistakes) == 3
    for mistake in mistakes:
        removed = re.findall("^- (.*)$", mistake, re.MULTILINE)
        assert removed and all(lines.count(line) == 1 for line in removed)
