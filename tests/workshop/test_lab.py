"""The lesson in a real JupyterLab and a real browser, as an attendee."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from cluster import FLAGS, wait_for
from conftest import (
    ENVIRONMENT,
    commit_all,
    copy_clone,
    copy_course,
    git,
    python,
    read_book,
    workshop,
)
from lab import Lesson
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from backstage import ROOT
from slides.text import cells
from workshop.diff import documents
from workshop.diff.diff import Diff
from workshop.notebook.lab import find_last_workspace
from workshop.stages import STAGES

pytestmark = pytest.mark.whole

TYPO = ("loss = training_step(model, batch, device, hp.precision)",
        "loss = training_step(raw_model, batch, device, hp.precision)")


@pytest.fixture
def repo(tmp_path):
    """A copy of the repository, with std as the working copy."""
    repo = copy_clone(tmp_path / "repo", "notebooks")
    (repo / "site.sh").write_text(f"WORKSHOP_VENV={sys.prefix}\n")
    return repo


def kernel(url):
    """The program that JupyterLab starts for a notebook."""
    with urllib.request.urlopen(f"{url}/api/kernelspecs") as answer:
        spec = json.load(answer)["kernelspecs"]["python3"]["spec"]
    return spec["argv"][0]


def follow_line(page, link):
    """Click: the editor goes to the line."""
    number = link.inner_text().split()[-1]
    link.click()
    page.locator("#jp-bottom-panel", has_text=f"Ln {number}, Col 1").wait_for()
    well_in_sight(page, number)


LINK_IS_FOLLOWED = re.compile(r"/code/train_gpt2\.py\?content=0")


def answer_late(route):
    """As a busy server does."""
    time.sleep(2)
    route.continue_()


def well_in_sight(page, number):
    """The editor shows the line, well away from its edges."""
    page.wait_for_function("""number => {
        const pane = document.querySelector(".jp-FileEditor .cm-scroller");
        const line = [...pane.querySelectorAll(".cm-gutterElement")].find(
            one => one.textContent === number && one.offsetHeight);
        const at = line?.getBoundingClientRect().top
            - pane.getBoundingClientRect().top;
        return pane.clientHeight / 4 < at && at < pane.clientHeight / 2; }""",
                           arg=number)


def test_what_is_written_fits_half_a_page(page):
    """Tables and code in the lessons' texts, also where they are folded."""
    from nbconvert import HTMLExporter
    from nbformat.v4 import new_notebook

    page.set_viewport_size({"width": 600, "height": 720})  # 479 for a text
    page.set_content(HTMLExporter().from_notebook_node(new_notebook(cells=[
        cell for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for cell in read_book(path).cells if cell.cell_type == "markdown"]
    ))[0].replace("<details>", "<details open>"))
    texts = page.locator(".jp-MarkdownOutput")
    assert texts.count() > 200 and not texts.evaluate_all("""texts =>
        texts.filter(text => text.scrollWidth > text.clientWidth + 2).map(
            text => text.innerText.slice(0, 99))""")


def passes(repo):
    """As if the script had passed the check for ddp."""
    python(repo, "-c", "from workshop.diff.passed_checks import record\n"
           "from workshop.stages import WORKING_COPY\n"
           "record('ddp', WORKING_COPY.read_bytes())")


@pytest.fixture
def keep(page, tmp_path):
    """Draw a picture of the page, for the slides and the README.

    `WORKSHOP_PICTURES=docs pytest --whole -k to_ddp` draws them anew. They say
    which texts they show.
    """
    def keep(name, shown):
        page.wait_for_timeout(500)
        file = Path(os.environ.get("WORKSHOP_PICTURES", tmp_path),
                    f"{name}.png")
        page.screenshot(path=file)
        image = Image.open(file).quantize(64)
        about = PngInfo()
        about.add_text("lesson", repr(shown))
        image.save(file, optimize=True, pnginfo=about)
        assert image.size == Image.open(ROOT / "docs" / file.name).size
    return keep


def come_to_start_here(page, url, shell, keep):
    """From a portal's first page to the first notebook."""
    for name in (".bashrc", ".bash_profile"):  # it notes each prompt
        (shell / name).write_text(
            "PS1='\\W$ '; PROMPT_COMMAND='echo >> ~/prompts'\n")
    page.set_viewport_size({"width": 960, "height": 460})
    page.goto(f"{url}/lab")
    files, tile = page.locator(".jp-FileBrowser"), page.locator(
        ".jp-LauncherCard", has_text="Terminal")
    tile.scroll_into_view_if_needed()
    folder = files.locator(".jp-DirListing-item", has_text="gpt2-workshop")
    folder.wait_for()
    start = cells("start_here")[:2]
    keep("portal-1", start)
    tile.click()
    for number, line in enumerate(("cd gpt2-workshop\n",
                                   "source activate.sh")):
        wait_for(lambda n=number: (shell / "prompts").exists() and len(
            (shell / "prompts").read_text()) > n, 60)
        page.locator(".jp-Terminal").click()
        page.keyboard.type(line)
    keep("portal-2", start)
    folder.dblclick()
    for name in ("notebooks", "start_here.ipynb"):
        files.locator(".jp-DirListing-item", has_text=name).dblclick()
    lesson = Lesson(page)
    # as a newcomer sees it
    assert "Your script is std. Next lessons:" in lesson.run("journey()")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Home")
    page.locator(".jp-NotebookPanel h1").scroll_into_view_if_needed()
    keep("portal-3", start)
    page.set_viewport_size({"width": 1280, "height": 720})
    files.locator(".jp-DirListing-item", has_text="diff_ddp.ipynb").dblclick()


def test_the_journey_to_ddp(page, lab, repo, portal, tmp_path, keep):
    """In a portal's kernel, from its first page: its root is the home.

    The lesson is saved without its outputs.
    """
    home, shell = tmp_path / "portal", tmp_path / "home"
    for folder in home, shell:
        folder.mkdir()
    repo = repo.rename(home / "gpt2-workshop")
    copy_course(repo, *ENVIRONMENT, ".gitattributes", ".gitignore")
    (repo / "fineweb" / "demo").symlink_to(ROOT / "fineweb" / "demo")
    commit_all(repo)
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    url = lab(home, SHELL="/bin/bash",
              JUPYTER_PATH=str(portal / "share" / "jupyter"))
    assert str(portal) in kernel(url)
    come_to_start_here(page, url, shell, keep)
    script = repo / "code" / "train_gpt2.py"
    script.write_text(Diff("ddp", script).apply([1, 2, 3, 4]))
    lesson = Lesson(page)
    lesson.run("beside(")
    page.get_by_role("link", name="side by side").click()
    see_both(page, "Goal")
    lesson.wait_for_kernel()
    total = len(documents.load_changes("ddp"))
    everything = f"{total} of {total} changes left"
    view = page.locator(".ws", has=page.locator(".strip"))
    # the next change only; Shift+Enter leaves it in sight
    assert f"{total - 4} of {total} changes left" in lesson.run(
        'diff("ddp")', key="Shift+Enter")
    lesson.in_sight(".ws .strip")
    # saved without outputs; `git status` compares sizes
    notebook = repo / "notebooks" / "diff_ddp.ipynb"
    page.keyboard.press("Control+s")
    wait_for(lambda: "changes left" in notebook.read_text(), 60)
    assert "codemirror_mode" in git(repo, "diff", "notebooks")
    subprocess.run(
        ["bash", "-c", "unset WORKSHOP_INSTALL; source activate.sh"],
        cwd=repo, check=True)
    assert git(repo, "diff", "notebooks") == ""
    assert view.locator("pre.code:visible").count() == 1
    assert page.locator(".ws .strip > *").count() == total
    page.route(LINK_IS_FOLLOWED, answer_late)
    follow_line(page, page.locator(".ws h3 a").first)
    page.unroute(LINK_IS_FOLLOWED)
    lesson.in_sight(".ws h3")
    assert page.locator(".ws .strip .made").count() == 4
    keep("lesson", documents.load_changes("ddp")[4])

    # a change made by hand counts as soon as it is saved: a line of the one
    # that imports
    number = 1 + next(i for i, change
                      in enumerate(documents.load_changes("ddp"))
                      if "+import os" in change.anchors)
    lines = ("import io", "import os")
    named = Diff("ddp", STAGES["std"].solution).apply([number])
    lesson.paste(named.replace(*lines[::-1]))
    lesson.expect(view).to_contain_text(everything)
    lesson.type_over(*lines)
    lesson.expect(view).to_contain_text(everything)
    lesson.save()  # and nothing else: the list follows
    lesson.expect(view).to_contain_text(f"{total - 1} of {total} changes left")
    lesson.in_sight(".ws .strip")

    # only code can be copied from the view, without the removed lines
    page.locator(".ws summary",
                 has_text=re.compile(rf"\b2 of {total}")).click()
    box = page.locator(".ws .code", has_text="use_device(hp.device, local_ran")
    box.evaluate("box => getSelection().selectAllChildren(box)")
    page.keyboard.press("Control+c")
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    added = [line for line in STAGES["ddp"].solution.read_text().splitlines()
             if "use_device(hp.device, local_rank)" in line]
    assert added[0] in copied
    assert "    device = use_device(hp.device)" not in copied
    assert copied[0] and all(map(str.strip, copied[:3]))  # no line is two
    # what is to be typed is all in sight: long lines go on below, indented
    page.set_viewport_size({"width": 1000, "height": 720})
    wait_for(lambda: box.evaluate("""box => {
        const lines = [...box.querySelectorAll("span")].map(
            line => line.getBoundingClientRect().height).filter(Boolean);
        return Math.max(...lines) > 1.5 * Math.min(...lines); }"""), 60)
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth"
                        " && box.scrollHeight <= box.clientHeight")
    assert view.evaluate("view => view.scrollWidth <= view.clientWidth")
    page.set_viewport_size({"width": 1280, "height": 720})

    # a line's end is the line's, also where it is wider than the editor
    long = page.locator(".jp-FileEditor .cm-line", has_text=re.compile(
        ".{73}")).first
    end = len(long.inner_text()) + 1
    long.click(position={"x": 99, "y": 5})
    page.keyboard.press("End")
    lesson.expect(page.locator("#jp-bottom-panel")).to_contain_text(
        f"Col {end}")

    # the end of a long change was in sight: the next one begins in sight
    lesson.paste(STAGES["std"].solution.read_text())
    lesson.expect(view.locator("h3")).to_contain_text(f"{number} of {total}: ")
    page.locator(f"#ws-ddp-{total} > summary").click()
    lesson.paste(Diff("ddp", STAGES["std"].solution).apply(range(1, 5)))
    lesson.readable(f"5 of {total}: ")
    page.wait_for_timeout(500)  # it has been brought there
    lesson.expect(page.locator(f"#ws-ddp-{total}[open]")).to_be_visible()
    page.wait_for_function("scroll_to_its_end()")
    # and so does what is left of it, which was above
    five = Diff("ddp", STAGES["std"].solution).apply(range(1, 6))
    lesson.paste(five.replace("= rank * B,", "= rank,"))
    lesson.readable("self.offset, self.stride = rank, ")
    lesson.paste(five)
    lesson.readable(f"6 of {total}: ")

    # what a cell says that makes a change is read first
    lesson.run_instead("# remove a #", 'apply("ddp", 6)')
    lesson.expect(view).to_contain_text(f"7 of {total}: ")
    page.wait_for_timeout(500)
    shown = view.element_handle()
    script.touch()  # shown anew once more, as on a busy machine
    page.wait_for_function("old => !old.isConnected", arg=shown)
    page.wait_for_timeout(500)
    lesson.readable("File > Reload Python File from Disk")
    assert page.locator(".ws strong", has_text="Reload Python").count()
    lesson.editor.click(position={"x": 200, "y": 5})
    lesson.readable(f"7 of {total}: ")
    page.locator(".lm-MenuBar-item", has_text="File").first.click()
    with page.expect_response(lambda answer: "content=1" in answer.url
                              and answer.request.method == "GET"):
        page.locator(".lm-Menu-item", has_text="Reload Python File").click()
    page.wait_for_timeout(500)  # it is shown

    # it has several places, and is linked to each
    lesson.expect(page.locator("#ws-ddp-11 .place a").nth(1)).to_have_text(
        re.compile(r"^line \d+$"))

    # all changes with one mistake: one is left, and the check names it
    ready = STAGES["ddp"].solution.read_text()
    lesson.paste(ready.replace(*TYPO))
    lesson.expect(page.locator(".ws .add mark")).to_have_text(["model"])
    lesson.expect(view).to_contain_text(f"1 of {total} changes left")
    lesson.readable(f"1 of {total} changes left")  # though it was clicked
    assert page.locator(".ws h3").count() == 1
    checked = lesson.run('check("ddp")', key="Shift+Enter")
    assert checked.startswith("Not correct yet.")
    assert "FAIL" in checked and "The error is in change" in checked
    # the verdict, its reason and the row that failed are in sight
    for place in ("strong:has-text('Not correct yet.')",
                  "strong:has-text('FAIL')",
                  "tr:has(td.no)"):
        lesson.in_sight(f".ws .beside {place}")
    assert page.locator("table.check:visible td.no").count() == 1
    follow_line(page, page.locator(".ws .beside a", has_text="line ").first)
    page.locator(".ws summary", has_text="follow from this one").click()
    assert page.locator(".ws svg desc").count() == 1  # who read what
    lesson.run("cadence()")
    lesson.can_be_read()
    page.add_style_tag(content=".ws h3 { color: #666 !important }")
    assert page.evaluate("faint_texts(50)")  # it would be seen

    script.rename(script.with_suffix(".gone"))  # which ends no watching
    lesson.expect(page.locator(
        ".ws", has_text="does not exist")).to_be_visible()
    script.with_suffix(".gone").rename(script)
    lesson.expect(view).to_contain_text(f"1 of {total} changes left")
    lesson.paste(ready)
    lesson.expect(view).to_contain_text(f"Done: all {total} changes are made")
    passes(repo)  # the list hears of it
    lesson.expect(view).to_contain_text("It passed the check, too.")
    lesson.expect(page.locator(
        ".ws", has_text="Not correct yet.")).to_contain_text(
        "Your script has changed since this check.")

    # again, from the start
    workshop(repo, "reset", "std")
    lesson.expect(view).to_contain_text(everything)


def of_a_busy_kernel(route):
    """The time as a kernel would have written it that was held up."""
    said = route.fetch().json()
    route.fulfill(json={**said, "content": str(float(said["content"]) - 60)})


def server_of(repo):
    """The process of the course's Python, which writes that it is alive."""
    newest = max((repo / "notebooks" / "__pycache__").glob("alive-*"),
                 key=os.path.getmtime)
    return int(newest.name.removeprefix("alive-"))


def parent_of(pid):
    """The kernel that has started it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^PPid:\s+(\d+)$", status, re.M)[1])


def test_the_journey_from_ddp(page, lab, repo):
    """With the cells that make changes for the attendee, in a kernel of the
    environment.

    How to reload the script stays in sight, and what Overwrite has undone is
    said. A view that is dead says so: in a second tab, and with a new kernel;
    while it lives, and during a check, it does not. Run again, it lives.
    """
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    script = repo / "code/train_gpt2.py"
    total = len(documents.load_changes("lit"))
    shutil.copy(STAGES["ddp"].solution, script)
    url = lab(repo, all_cells=True)
    assert kernel(url) == "python"  # JupyterLab's own
    lesson = Lesson(page, url, "diff_lit")
    lesson.run("beside(")
    assert f"{total} of {total} changes left" in lesson.run('diff("lit")')
    made = lesson.run_instead("# remove a #", 'apply("lit", 2, 3)',
                              "Shift+Enter")
    assert "made change 3" in made
    advice = "Reopen the script if", "Overwrite would undo this command."
    for words in advice:
        lesson.readable(words)
    page.wait_for_timeout(1000)  # the list has followed
    assert all(page.evaluate("readable", words) for words in advice)
    assert f"{total - 2} of {total} changes left" in lesson.run('diff("lit")')
    lesson.editor.click(position={"x": 200, "y": 5})
    page.keyboard.type("# mine\n")
    page.keyboard.press("Control+s")
    page.locator(".jp-Dialog button", has_text="Overwrite").click()
    lesson.expect(page.locator(".ws .bad", has_text="apply made changes 2 3, "
                               "but the script no longer").first
                  ).to_contain_text('apply("lit", 2, 3)')

    words = "does not follow your script any more"
    dead = page.get_by_text(words).first
    notebook = repo / "notebooks" / "diff_lit.ipynb"
    cell = page.locator(".jp-CodeCell", has_text='check("lit", "next")')
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    cell.get_by_text("The processes start").wait_for()
    page.keyboard.press("Control+s")
    wait_for(lambda: "The processes start" in notebook.read_text(), 30)
    tab = page.context.new_page()
    tab.route("**/alive-*", of_a_busy_kernel, times=1)
    tab.goto(page.url)
    lesson.expect(tab.get_by_text(words).first).to_be_visible()
    lesson.expect(dead).to_be_hidden()
    tab.close()
    os.kill(server_of(repo), 9)
    lesson.expect(dead).to_be_visible()
    lesson.runs += 1  # the check
    assert "changes left" in lesson.run('diff("lit")')
    lesson.expect(dead).to_be_hidden()
    os.kill(parent_of(server_of(repo)), 9)  # JupyterLab starts another one
    lesson.expect(dead).to_be_visible()
    lesson.expect(page.get_by_text(words).nth(1)).to_be_visible()
    page.locator(".jp-Dialog button", has_text="Ok").click()
    lesson.runs = 0
    assert "changes left" in lesson.run('diff("lit")')
    lesson.expect(dead).to_be_hidden()
    cell = page.locator(".jp-CodeCell", has_text="beside(")
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("%%mpi 2\nprint(1)")
    lesson.run_cell(page.locator(".jp-CodeCell", has_text="%%mpi"))
    lesson.readable("Run the cell that has %load_ext lesson")
    lesson.run_instead("%%mpi 2", "1")

    lesson.run_instead('submitapply("lit", 2, 3)',  # of two lines
                       'apply("lit", "all")')
    assert f"Done: all {total} changes are made" in lesson.run('diff("lit")')
    # a lesson's text shows its mistakes with a link, and in colours
    mistake = "return self.model(*batch)"
    text = page.locator(".jp-MarkdownOutput .ws", has_text=mistake)
    text.locator("a").click()
    line, = (number for number, line in enumerate(
        script.read_text().splitlines(), 1) if line.strip() == mistake)
    lesson.expect(text.locator("a")).to_have_text(f"line {line}")
    well_in_sight(page, str(line))
    signs = "el => getComputedStyle(el).backgroundColor"
    assert len({text.locator(f".{kind}").evaluate(signs)
                for kind in ("add", "del")} - {"rgba(0, 0, 0, 0)"}) == 2
    assert "['']" in lesson.run_instead(  # nobody answers
        'apply("lit", "all")', "import course_process as c; "
        "print([c.ask('Submit? ', 1)])")
    page.locator(".jp-Stdin-input").press("Enter")  # as submit() says


def test_the_editor_follows_the_script(page, lab, repo):
    """In the course's own JupyterLab, unless it has unsaved edits."""
    pytest.importorskip("jupyter_live_content")
    script = repo / "code/train_gpt2.py"
    shutil.copy(STAGES["std"].solution, script)
    page.goto(lab(repo, "workshop", "lab", "ddp", "--no-browser"))
    lesson = Lesson(page)
    shown = lesson.expect(lesson.editor)
    workshop(repo, "apply", "ddp", "4")
    shown.to_contain_text("with DDP: each has a copy of the model")
    workshop(repo, "reset", "--undo")
    shown.to_contain_text("on one device: model")
    saved = script.read_text()
    lesson.editor.click(position={"x": 200, "y": 5})
    page.keyboard.type("# mine ")
    workshop(repo, "apply", "ddp", "4")
    page.wait_for_timeout(3000)
    shown.to_contain_text("# mine ")  # nothing is taken away
    assert "# mine " not in script.read_text() != saved
    page.keyboard.press("Control+s")
    page.locator(".jp-Dialog button", has_text="Revert").click()
    shown.to_contain_text("with DDP: each has a copy of the model")
    shown.not_to_contain_text("# mine ")


def test_a_view_that_comes_late_lives(page, lab, repo):
    """In a cell that has had one, though the machine was busy for so long.

    If the notebook is closed and opened again, it is dead at once.
    """
    shutil.copy(STAGES["ddp"].solution, repo / "code/train_gpt2.py")
    file = repo / "workshop" / "notebook" / "following.py"
    shown = "output = frontend.LiveOutput(alive(shown).bundle())"
    text = file.read_text()
    assert shown in text
    file.write_text(text.replace(shown, f"""bundle = alive(shown).bundle()
    time.sleep(12 * (ROOT / "busy").exists())
    {shown.replace("alive(shown).bundle()", "bundle")}"""))
    lesson = Lesson(page, lab(repo, all_cells=True), "diff_lit")
    lesson.run('diff("lit")')
    dead = page.get_by_text("does not follow your script any more")
    lesson.expect(dead).to_be_hidden()
    page.keyboard.press("Control+s")
    tab = page.locator("#jp-main-dock-panel .lm-TabBar-tab",
                       has_text="diff_lit")
    lesson.expect(tab).not_to_have_class(re.compile("jp-mod-dirty"))
    tab.locator(".lm-TabBar-tabCloseIcon").click()
    page.locator('.lm-TabBar-tab[data-id="filebrowser"]').click()
    files = page.locator(".jp-FileBrowser")
    files.locator(".jp-BreadCrumbs-home").click()
    for name in ("notebooks", "diff_lit.ipynb"):
        files.locator(".jp-DirListing-item", has_text=name).dblclick()
    lesson.expect(dead).to_be_visible()
    lesson.wait_for_kernel()
    lesson.run('diff("lit")')
    lesson.expect(dead).to_be_hidden()
    page.wait_for_timeout(1500)  # its file has been read
    (repo / "busy").touch()
    lesson.run('diff("lit")')
    page.wait_for_timeout(3000)
    assert dead.is_hidden()
    os.kill(server_of(repo), 9)
    lesson.expect(dead).to_be_visible()


def test_the_list_in_a_second_window_takes_over(page, lab, repo):
    """The first one says so, until its cell is run again."""
    url = lab(repo, all_cells=True)
    first = Lesson(page, url)
    first.run('diff("ddp")')
    window = page.context.new_page()
    window.goto(f"{url}/lab/workspaces/two/tree/notebooks/diff_ddp.ipynb")
    second = Lesson(window)
    second.runs = first.runs
    second.run('diff("ddp")')
    here, there = (one.get_by_text("does not follow your script any more")
                   for one in (page, window))
    first.expect(here.first).to_be_visible()
    first.expect(there).to_have_count(1)
    assert there.is_hidden()
    workshop(repo, "apply", "ddp", "1")
    total = len(documents.load_changes("ddp"))
    words = f"{total - 1} of {total} changes left"
    second.expect(window.get_by_text(words).first).to_be_visible()
    assert not page.get_by_text(words).count()
    first.runs = second.runs
    assert words in first.run('diff("ddp")')
    first.expect(there.first).to_be_visible()
    assert here.is_hidden()


def test_the_journey_to_the_first_submitted_job(
        page, lab, slurm, tmp_path, monkeypatch):
    """From start_here, by Shift+Enter, Ctrl+S and links alone.

    A kernel without a page ends; the command without a name then finds what
    was open last.
    """
    (slurm.repo / "fineweb" / "demo" / "manifest.json").unlink()
    for file in (ROOT / "fineweb" / "demo").iterdir():
        shutil.copy(file, slurm.repo / "fineweb" / "demo")
    shutil.copy(STAGES["std"].solution, slurm.repo / "code/train_gpt2.py")
    with open(slurm.repo / "site.sh", "a") as site:
        site.write("export SBATCH_TIMELIMIT=7 SBATCH_PARTITION=gpu\n")
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    opened = tmp_path / "opened"
    lab(slurm.repo, "workshop", "lab", "ddp",
        "--MappingKernelManager.cull_idle_timeout=2",
        BROWSER=f"sh -c 'echo $0 > {opened}' %s",
        **{name: slurm.env[name] for name in ("SLURM_CONF", "PATH")})
    wait_for(lambda: opened.exists() and opened.read_text(), 30)
    page.goto(opened.read_text().strip())
    see_both(page, "Start here")  # nothing has been trained yet
    assert "Your script is std. Next lessons: ddp mpi kernels" in (
        tmp_path / "lab.log").read_text()
    lesson = Lesson(page)

    def go(source, words="", seconds=120):
        """Run the cell with Shift+Enter; what it shows stays in sight."""
        said = lesson.run(source, key="Shift+Enter", timeout=seconds)
        assert words in said, said
        if words:
            lesson.readable(words)
        return said

    assert "SBATCH_PARTITION=gpu" in go("doctor()", "course: commit")
    go("train(", "finished:")

    def follow(words, name):
        page.locator(".jp-NotebookPanel:visible .jp-MarkdownOutput a",
                     has_text=words).last.click()
        page.locator("#jp-main-dock-panel .lm-mod-current", has_text=name
                     ).last.wait_for()
        lesson.wait_for_kernel()
        lesson.runs = 0

    follow("From one device to many: DDP", "diff_ddp.ipynb")
    total = len(documents.load_changes("ddp"))
    go('diff("ddp")', f"{total} of {total} changes left")
    steps = Diff("ddp", STAGES["std"].solution)
    for number in (1, total):
        lesson.paste(steps.apply(range(1, number + 1)))
        words = (f"{number + 1} of {total}: " if number < total else
                 f"Done: all {total} changes are made")
        lesson.readable(words)
    go('check("ddp", "next")', "no change is left")
    passes(slurm.repo)
    go("slurm()", "SBATCH_PARTITION=gpu")
    flags = " ".join(map(str, FLAGS)).replace("--data ", "--data ../../")
    for answer, words in (("", "Nothing is submitted"),
                          ("y", "Submitted batch job")):
        cell = lesson.write_instead('submit("ddp-1n', "submit("
                                    f'"ddp-1n1g", "{flags} --max-steps 6")')
        page.keyboard.press("Shift+Enter")
        page.locator(".jp-Stdin-input:visible").fill(answer)
        page.keyboard.press("Enter")
        lesson.runs += 1
        said = cell.get_by_text(words)
        said.wait_for()
    job = said.inner_text().split()[-1]
    assert slurm.job(job)["TimeLimit"] == "00:07:00"
    go("queue()", job)
    end = slurm.wait(job)
    log = slurm.repo / "notebooks" / f"slurm-{job}.out"
    assert end["JobState"] == "COMPLETED", log.read_text()
    go("log()")  # it is as long as the page: which end is in sight is chance
    said = "\n".join(lesson.output.all_inner_texts())
    for words in ("passed the check", "5/6", "finished:"):
        assert words in said, said
    follow("Results", "results.ipynb")
    go("runs()", f"ddp-1n1g-{job}")

    url, _, last = page.url.partition("/lab/workspaces/")
    last, kernels = last.partition("/")[0], f"{url}/api/kernels"
    assert json.load(urllib.request.urlopen(kernels))
    page.goto("about:blank")
    wait_for(lambda: not json.load(urllib.request.urlopen(kernels)), 40)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert last == find_last_workspace()


def see_both(page, words):
    """The script on the left, the notebook with these words on the right."""
    script = page.locator(".jp-FileEditor:visible")
    lesson = page.locator(".jp-NotebookPanel:visible")
    script.locator("text=Train GPT-2").first.wait_for()
    lesson.locator(".jp-Cell", has_text=words).first.wait_for()
    left, right = script.bounding_box(), lesson.bounding_box()
    assert left["x"] + left["width"] <= right["x"]
    assert left["width"] > 500 and right["width"] > 500
