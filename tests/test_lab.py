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
from conftest import ENVIRONMENT, calls, copy_course, git, read_book, workshop
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from backstage import ROOT
from slides.text import cells
from workshop.lesson import documents
from workshop.lesson.diff import Diff
from workshop.processes import free_port
from workshop.stages import STAGES

pytestmark = pytest.mark.whole

TYPO = ("loss = training_step(model, batch, device, hp.precision)",
        "loss = training_step(raw_model, batch, device, hp.precision)")


@pytest.fixture
def repo(tmp_path):
    """A copy of the repository, with std on the desk."""
    repo = tmp_path / "repo"
    copy_course(repo, "backstage", "workshop", "solutions", "notebooks")
    (repo / "code").mkdir()
    shutil.copy(STAGES["std"].solution, repo / "code" / "train_gpt2.py")
    (repo / "site.sh").write_text(f"WORKSHOP_VENV={sys.prefix}\n")
    return repo


@pytest.fixture
def lab(repo, tmp_path):
    """Start JupyterLab, or a command that becomes one; returns its address.

    root: the folder that it shows, and where a command runs.
    """
    servers = []

    def lab(*command, root=repo, **variables):
        home = tmp_path / "home"
        settings = (home / ".jupyter/lab/user-settings/@jupyterlab"
                    / "apputils-extension")
        settings.mkdir(parents=True, exist_ok=True)
        (settings / "notification.jupyterlab-settings").write_text(
            '{"fetchNews": "false"}')
        env = {key: value for key, value in os.environ.items()
               if not key.startswith("JUPYTER") and key not in (
                   "PYTHONPATH", "VIRTUAL_ENV", "WORKSHOP_VENV")}
        env |= {"HOME": str(home), "JUPYTER_PREFER_ENV_PATH": "0",
                **variables}
        port = free_port()
        command = command or ("jupyterlab", "--no-browser",
                              f"--ServerApp.root_dir={root}")
        log = tmp_path / "lab.log"
        with open(log, "w") as file:
            servers.append(subprocess.Popen(
                [sys.executable, "-m", *command, "--allow-root",
                 "--ip=127.0.0.1", f"--port={port}",
                 "--ServerApp.port_retries=0", "--IdentityProvider.token="],
                cwd=root, env=env, stdout=file, stderr=subprocess.STDOUT))
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert servers[-1].poll() is None, log.read_text()
            try:
                urllib.request.urlopen(f"{url}/api/status", timeout=1)
                return url
            except OSError:
                time.sleep(0.1)
        raise AssertionError(log.read_text())

    yield lab
    for server in servers:
        server.terminate()  # shuts its kernels down, too
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture
def page(browser):
    """A page of a browser, as wide as a laptop."""
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    context = browser.new_context(
        viewport={"width": 1280, "height": 720},
        permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(120_000)
    context.add_init_script(path=Path(__file__).with_name("lab.js"))
    yield context.new_page()
    context.close()


class Lesson:
    """The lesson on the right, the script on the left."""

    def __init__(self, page, url=None, notebook="diff_ddp"):
        """url: JupyterLab's address; left out, both are open already."""
        from playwright.sync_api import expect

        self.page, self.expect, self.runs = page, expect, 0
        self.tab = page.locator("#jp-main-dock-panel .lm-TabBar-tab",
                                has_text="train_gpt2.py")
        self.editor = page.locator(".jp-FileEditor .cm-content")
        if url:
            page.goto(f"{url}/lab/workspaces/{notebook}/tree/notebooks/"
                      f"{notebook}.ipynb")
        self.wait_for_kernel()
        assert not page.locator(".jp-Dialog").count()  # no kernel picker
        if url:
            self.put_side_by_side()

    def wait_for_kernel(self):
        # The toolbar says idle before there is a kernel, and the status bar
        # may still speak of the notebook that was shown before.
        self.page.wait_for_function("kernels_are_idle()")
        self.expect(self.page.locator("#jp-bottom-panel")).to_contain_text(
            "| Idle")

    def put_side_by_side(self):
        page, files = self.page, self.page.locator(".jp-FileBrowser")
        files.locator(".jp-BreadCrumbs-home").click()
        for name in ("code", "train_gpt2.py"):
            files.locator(".jp-DirListing-item", has_text=name).dblclick()
        self.tab.click(button="right")
        page.locator(".lm-Menu-item", has_text="Split Tab").click()
        page.locator(".lm-Menu-item",
                     has_text=re.compile(r"^Left\s*$")).click()
        page.locator('.lm-TabBar-tab[data-id="filebrowser"]').click()  # close
        page.wait_for_function(
            "document.querySelector('.jp-FileEditor')"
            ".getBoundingClientRect().right <= document.querySelector("
            "'.jp-NotebookPanel').getBoundingClientRect().left")

    def in_sight(self, place):
        self.expect(self.page.locator(place).first).to_be_in_viewport(
            ratio=0.99)

    def choose_theme(self, dark):
        name = "Dark" if dark else "Light"
        self.page.locator(".lm-MenuBar-item", has_text="Settings").click()
        self.page.locator(".lm-Menu-item", has_text="Theme").first.hover()
        self.page.locator(".lm-Menu-item", has_text=re.compile(
            f"JupyterLab {name}$")).click()
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight == light",
            arg=str(not dark).lower())
        self.page.wait_for_timeout(300)  # the style sheets are there

    def can_be_read(self, least=50):
        """All that is shown: in both themes, and at 150%."""
        self.fits()
        for dark in (False, True):
            self.choose_theme(dark)
            self.clear(least)

    def clear(self, least=50):
        """Nothing is hard to read, of so many texts or more."""
        self.none(f"faint_texts({least})")

    def fits(self):
        """No word is broken; nothing is cut, also magnified to 150%."""
        self.none("broken(5)")
        size = self.page.viewport_size
        self.page.set_viewport_size({side: length * 2 // 3
                                     for side, length in size.items()})
        self.page.wait_for_timeout(300)
        self.none("overflowing()")
        self.page.set_viewport_size(size)

    def none(self, mistakes):
        """Once JupyterLab has laid out the page."""
        wait_for(lambda: not self.page.evaluate(mistakes), 30,
                 lambda: self.page.evaluate(mistakes))

    def readable(self, words):
        """Wait until a cell has put them out, and they are in sight."""
        self.page.wait_for_function("readable", arg=words)

    def run(self, source, which=0, key="Control+Enter", timeout=400):
        """Run the cell; returns what it shows, as text."""
        return self.run_cell(self.page.locator(
            ".jp-NotebookPanel:visible .jp-CodeCell", has=self.page.locator(
                ".jp-InputArea", has_text=source)).nth(which), key, timeout)

    def run_cell(self, cell, key="Control+Enter", timeout=400):
        cell.locator(".cm-content").click()
        self.page.keyboard.press(key)
        self.runs += 1
        self.expect(cell.locator(".jp-InputPrompt")).to_have_text(
            f"[{self.runs}]:", timeout=1000 * timeout)
        self.output = cell.locator(".jp-OutputArea-output")
        return "\n".join(self.output.all_inner_texts())

    def write_instead(self, source, new):
        """Replace what is in the cell."""
        cell = self.page.locator(".jp-NotebookPanel:visible .jp-CodeCell",
                                 has_text=source)
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(
            f"from lesson import apply, submit\n{new}")
        return cell

    def run_instead(self, source, new):
        self.write_instead(source, new)
        return self.run(new)

    def type_over(self, line, new):
        """Replace the end of the line that ends with `line`."""
        self.page.evaluate("document.querySelector('.jp-FileEditor"
                           " .cm-scroller').scrollTop = 0")
        self.editor.locator(".cm-line", has_text=line).first.click()
        self.page.keyboard.press("End")
        for _ in line:
            self.page.keyboard.press("Backspace")
        self.page.keyboard.type(new)

    def paste(self, text):
        """Replace the whole script."""
        self.editor.click(position={"x": 200, "y": 5})
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(text)

    def save(self):
        self.editor.press("Control+s")
        self.expect(self.tab).not_to_have_class(re.compile("jp-mod-dirty"))


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


def test_the_journey_to_ddp(page, lab, repo, portal):
    """In a portal's kernel."""
    url = lab(JUPYTER_PATH=str(portal / "share" / "jupyter"))
    assert str(portal) in kernel(url)
    lesson = Lesson(page, url)
    assert "side by side" in lesson.run("beside(")
    total = len(documents.load("ddp"))
    everything = f"{total} of {total} changes left"
    view = page.locator(".ws", has=page.locator(".strip"))
    assert everything in lesson.run('diff("ddp")')
    # the next change only; Shift+Enter leaves it in sight
    assert view.locator("pre.code:visible").count() == 1
    assert page.locator(".ws .strip > *").count() == total
    for _ in range(2):
        lesson.run('diff("ddp")', key="Shift+Enter")
        lesson.in_sight(".ws .strip")
        lesson.in_sight(".ws h3")

    # a change made by hand counts as soon as it is saved: a line of the one
    # that imports
    number = 1 + next(i for i, change in enumerate(documents.load("ddp"))
                      if "+import os" in change.anchors)
    lines = ("import io", "import os")
    named = Diff("ddp", STAGES["std"].solution).apply([number])
    lesson.paste(named.replace(*lines[::-1]))
    lesson.save()
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

    # a line's number opens the script there
    place = page.locator(".ws a", has_text=re.compile(r"^line \d+$")).first
    follow_line(page, place)
    # its end is the line's, also where it is wider than the editor
    long = page.locator(".jp-FileEditor .cm-line", has_text=re.compile(
        ".{73}")).first
    end = len(long.inner_text()) + 1
    long.click(position={"x": 99, "y": 5})
    page.keyboard.press("End")
    lesson.expect(page.locator("#jp-bottom-panel")).to_contain_text(
        f"Col {end}")

    # the end of a long change was in sight: the next one begins in sight
    lesson.paste(STAGES["std"].solution.read_text())
    lesson.save()
    lesson.expect(view.locator("h3")).to_contain_text(f"{number} of {total}: ")
    page.locator(f"#ws-ddp-{total} > summary").click()
    lesson.paste(Diff("ddp", STAGES["std"].solution).apply(range(1, 5)))
    lesson.save()
    lesson.readable(f"5 of {total}: ")
    page.wait_for_timeout(500)  # it has been brought there
    lesson.expect(page.locator(f"#ws-ddp-{total}[open]")).to_be_visible()
    page.wait_for_function("scroll_to_its_end()")
    # and so does what is left of it, which was above
    five = Diff("ddp", STAGES["std"].solution).apply(range(1, 6))
    lesson.paste(five.replace("= rank * B,", "= rank,"))
    lesson.save()
    lesson.readable("self.offset, self.stride = rank, ")
    lesson.paste(five)
    lesson.save()
    lesson.readable(f"6 of {total}: ")

    # what a cell says that makes a change is read first
    lesson.run_instead("# remove a #", 'apply("ddp", 6)')
    lesson.expect(view).to_contain_text(f"7 of {total}: ")
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
    lesson.save()
    lesson.expect(page.locator(".ws .add mark")).to_have_text(["model"])
    lesson.expect(view).to_contain_text(f"1 of {total} changes left")
    lesson.readable(f"1 of {total} changes left")  # though it was clicked
    assert page.locator(".ws h3").count() == 1
    checked = lesson.run('check("ddp")', key="Shift+Enter")
    assert checked.startswith("Not yet.")
    assert "FAIL" in checked and "It is change" in checked
    # the verdict, its reason and the row that failed are in sight
    for place in ("strong:has-text('Not yet.')", "strong:has-text('FAIL')",
                  "tr:has(td.no)"):
        lesson.in_sight(f".ws .beside {place}")
    assert page.locator("table.check:visible td.no").count() == 1
    follow_line(page, page.locator(".ws .beside a", has_text="line ").first)
    page.locator(".ws summary", has_text="more follow from it").click()
    assert page.locator(".ws svg desc").count() == 2  # beside it
    lesson.run("cadence()")
    lesson.can_be_read()
    page.add_style_tag(content=".ws h3 { color: #666 !important }")
    assert page.evaluate("faint_texts(50)")  # it would be seen

    script = repo / "code" / "train_gpt2.py"
    script.rename(script.with_suffix(".gone"))  # which ends no watching
    lesson.expect(page.locator(".ws", has_text="is not there")).to_be_visible()
    script.with_suffix(".gone").rename(script)
    lesson.expect(view).to_contain_text(f"1 of {total} changes left")
    lesson.paste(ready)
    lesson.save()
    lesson.expect(view).to_contain_text(f"Done: all {total} changes are made")
    workshop(repo, "check", "ddp")  # the list hears of it
    lesson.expect(view).to_contain_text("It passed the check, too.")
    lesson.expect(page.locator(".ws", has_text="Not yet.")).to_contain_text(
        "Your script has changed since this check.")

    # again, from the start
    workshop(repo, "reset", "std")
    lesson.expect(view).to_contain_text(everything)
    backup = max((repo / "code").glob("train_gpt2.20*.py"))
    assert backup.read_text() == ready


@pytest.mark.parametrize("lost", ["reload", "restart"])
def test_a_view_that_is_dead_says_so(page, lab, repo, lost):
    """After a reload, or with a new kernel; while it lives, it does not.

    In a second tab it does, too, and during a check. Run again, it lives.
    """
    url = lab()
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    lesson = Lesson(page, url)
    lesson.run('diff("ddp")')
    words = "does not follow your script any more"
    dead = page.get_by_text(words).first
    page.wait_for_timeout(4000)
    lesson.expect(dead).to_be_hidden()
    notebook = repo / "notebooks" / "diff_ddp.ipynb"
    if lost == "reload":
        cell = page.locator(".jp-CodeCell", has_text='check("ddp", "next")')
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+Enter")
        cell.get_by_text("The processes start").wait_for()
        page.keyboard.press("Control+s")
        wait_for(lambda: "The processes start" in notebook.read_text(), 30)
        tab = page.context.new_page()
        tab.goto(page.url)
        lesson.expect(tab.get_by_text(words).first).to_be_visible()
        lesson.expect(dead).to_be_hidden()
        tab.close()
        page.reload()
        lesson.expect(page.get_by_text(words).nth(1)).to_be_visible()
    else:
        pid, = re.findall(r"alive-(\d+)", " ".join(map(str, (
            repo / "notebooks" / "__pycache__").iterdir())))
        os.kill(int(pid), 9)  # JupyterLab starts another one
    lesson.expect(dead).to_be_visible()
    if lost == "restart":
        page.locator(".jp-Dialog button", has_text="Ok").click()
        lesson.runs = 0
        assert "changes left" in lesson.run('diff("ddp")')
        lesson.expect(dead).to_be_hidden()
        cell = page.locator(".jp-CodeCell", has_text="beside(")
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+a")
        page.keyboard.insert_text("%%mpi 2\nprint(1)")
        lesson.run_cell(page.locator(".jp-CodeCell", has_text="%%mpi"))
        lesson.readable("Run the cell that has %load_ext lesson")


def test_the_journey_from_ddp(page, lab, repo):
    """Lesson by lesson, with the cells that make changes for the attendee.

    In a kernel of the environment.
    """
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    url = lab()
    assert kernel(url) == "python"  # JupyterLab's own
    for stage in ("lit", "fsdp", "tp", "3d"):
        if STAGES[stage].after == "ddp":
            shutil.copy(STAGES["ddp"].solution, repo / "code/train_gpt2.py")
        lesson = Lesson(page, url, f"diff_{stage}")
        lesson.choose_theme(stage == "lit")
        total = len(documents.load(stage))
        lesson.run("beside(")
        assert f"{total} of {total} changes left" in lesson.run(
            f'diff("{stage}")')
        made = lesson.run_instead("# remove a #", f'apply("{stage}", 3)')
        assert "made change 3" in made
        assert f"{total - 1} of {total} changes left" in lesson.run(
            f'diff("{stage}")')
        lesson.clear()
        lesson.fits()
        lesson.run_instead(f'apply("{stage}", 3)', f'apply("{stage}", "all")')
        assert f"Done: all {total} changes are made" in lesson.run(
            f'diff("{stage}")')
        if stage == "lit":
            lesson.run("strategies()")
            assert page.locator(".ws svg rect").count() == 2 * 4 * 3 * 4
            assert "['']" in lesson.run_instead(  # nobody answers
                'apply("lit", "all")', "import workshop.notebook.jobs as c; "
                "print([c.answer('Submit? ', 1)])")
            page.locator(".jp-Stdin-input").press("Enter")  # as submit() says
            lesson.run("beside(")  # else JupyterLab refuses to


def test_the_journey_to_the_first_submitted_job(page, lab, slurm, tmp_path):
    """From start_here, by Shift+Enter, Ctrl+S and links alone."""
    (slurm.repo / "fineweb" / "demo" / "manifest.json").unlink()
    for file in (ROOT / "fineweb" / "demo").iterdir():
        shutil.copy(file, slurm.repo / "fineweb" / "demo")
    shutil.copy(STAGES["std"].solution, slurm.repo / "code/train_gpt2.py")
    with open(slurm.repo / "site.sh", "a") as site:
        site.write("export SBATCH_TIMELIMIT=7 SBATCH_PARTITION=gpu\n")
    follow_command(page, lab, tmp_path, root=slurm.repo, **{
        name: slurm.env[name] for name in ("SLURM_CONF", "PATH")})
    lesson = Lesson(page)

    def go(source, words="", seconds=120):
        """Run the cell with Shift+Enter; what it shows stays in sight."""
        said = lesson.run(source, key="Shift+Enter", timeout=seconds)
        assert words in said, said
        if words:
            lesson.readable(words)
        return said

    assert "SBATCH_PARTITION=gpu" in go("doctor()", "course: commit")
    for picture in ("data_parallel()", "words()", "cadence()", "nodes()",
                    "script_map()"):
        go(picture)
    go("train(", "finished:")
    go("gpus()")
    lesson.can_be_read()

    def follow(words, name):
        page.locator(".jp-NotebookPanel:visible .jp-MarkdownOutput a",
                     has_text=words).last.click()
        page.locator("#jp-main-dock-panel .lm-mod-current", has_text=name
                     ).last.wait_for()
        lesson.wait_for_kernel()
        lesson.runs = 0

    follow("From one device to many: DDP", "diff_ddp.ipynb")
    go("beside(")
    go("cadence()")
    go("samples_read()")
    total = len(documents.load("ddp"))
    go('diff("ddp")', f"{total} of {total} changes left")
    steps = Diff("ddp", STAGES["std"].solution)
    for number in (1, 2, total - 1, total):
        lesson.paste(steps.apply(range(1, number + 1)))
        lesson.save()
        words = (f"{number + 1} of {total}: " if number < total else
                 f"Done: all {total} changes are made")
        lesson.readable(words)
    go('check("ddp", "next")', "no change is left")
    go('check("ddp")', "Right: 1, 2 and 4 processes")
    go("slurm()", "SBATCH_PARTITION=gpu")
    flags = " ".join(map(str, FLAGS)).replace("--data ", "--data ../../")
    for answer, words in (("", "Nothing is submitted"),
                          ("y", "Submitted batch job")):
        cell = lesson.write_instead('submit("ddp-1n2g"', "submit("
                                    f'"ddp-1n2g", "{flags} --max-steps 6")')
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
    go("runs()", f"ddp-1n2g-{job}")


def show_all_cells(folder):
    """Not only those in sight."""
    settings, = folder.glob("home/.jupyter/lab/user-settings/@jupyterlab")
    (settings / "notebook-extension").mkdir()
    (settings / "notebook-extension" / "tracker.jupyterlab-settings"
     ).write_text('{"windowingMode": "none"}')


def test_the_lines_of_a_text_are_found_in_the_script(
        page, lab, repo, tmp_path):
    """A lesson's text shows its mistakes with a link, and in colours."""
    script = STAGES["ddp"].solution.read_text()
    (repo / "code" / "train_gpt2.py").write_text("# mine\n" + script)
    url = lab()
    show_all_cells(tmp_path)
    lesson = Lesson(page, url)
    lesson.run('diff("ddp")')
    text = page.locator(".jp-MarkdownOutput .ws", has_text=TYPO[0])
    text.locator("a").click()
    line, = (number for number, line in enumerate(script.splitlines(), 2)
             if line.strip() == TYPO[0])
    lesson.expect(text.locator("a")).to_have_text(f"line {line}")
    well_in_sight(page, str(line))
    lesson.clear(1)
    signs = "el => getComputedStyle(el).backgroundColor"
    assert len({text.locator(f".{kind}").evaluate(signs)
                for kind in ("add", "del")} - {"rgba(0, 0, 0, 0)"}) == 2


def test_whatever_else_is_shown_can_be_read(page, lab, repo, tmp_path):
    """The notebooks whose cells no journey runs: contrast, and nothing cut."""
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    url = lab()
    show_all_cells(tmp_path)
    shutil.copytree(ROOT / "example-logs", repo / "example-logs")
    for name in ("results", "collectives", "sharding",
                 "diff_mpi", "diff_kernels", "your_model", "hangs"):
        lesson = Lesson(page, url, name)
        cells = [calls(cell) for cell in read_book(
            ROOT / "notebooks" / f"{name}.ipynb").cells
            if cell.cell_type == "code"]
        left = ["show(", "plot(", "run_pipeline("]  # in cells of ranks
        for index, source in enumerate(cells):
            text = source.startswith((  # a journey runs such ones
                "#", "check(", "submit(", "train(", "torchrun(", "verify(",
                "plant(")) and source not in ("verify(1)", "plant(1)")
            text |= source == "why()" and cells[index - 1] != "plant(1)"
            if source.startswith(("%%ranks", "%%mpi")):  # one of each kind
                drawn = [call for call in left if call in source]
                text, left = not drawn, [
                    call for call in left if call not in drawn]
            if not text:
                lesson.run_cell(page.locator(
                    ".jp-NotebookPanel:visible .jp-CodeCell").nth(index))
        lesson.can_be_read(1 if name in ("your_model", "hangs") else 50)


def test_a_lesson_beside_the_script_and_saved(page, lab, repo, tmp_path):
    """As in a portal, whose root is the home; git sees no difference.

    `WORKSHOP_PICTURES=docs pytest --whole tests/test_lab.py -k saved` draws
    the README's picture anew, which says of which lesson it is.
    """
    copy_course(repo, *ENVIRONMENT, ".gitattributes", ".gitignore")
    (repo / "fineweb" / "demo").symlink_to(ROOT / "fineweb" / "demo")
    script = repo / "code" / "train_gpt2.py"
    script.write_text(Diff("ddp", script).apply([1, 2, 3, 4]))
    about = PngInfo()
    about.add_text("lesson", repr(documents.load("ddp")[4]))

    for command in ("init -q", "add -A", "commit -qm all"):
        git(repo, *command.split())
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    page.goto(f"{lab(root=repo.parent)}/lab/tree/repo/notebooks/"
              "diff_ddp.ipynb")
    lesson = Lesson(page)
    lesson.choose_theme(False)
    lesson.run("beside(")
    page.get_by_role("link", name="side by side").click()
    see_both(page, "ddp")
    lesson.wait_for_kernel()
    lesson.run('diff("ddp")', key="Shift+Enter")
    lesson.in_sight(".ws .strip")
    place = page.locator(".ws h3 a").first
    line = place.inner_text().split()[1]
    place.click()
    lesson.expect(page.locator("#jp-bottom-panel")).to_contain_text(
        f"Ln {line}, Col 1")
    lesson.in_sight(".ws h3")
    assert page.locator(".ws .strip .made").count() == 4
    file = Path(os.environ.get("WORKSHOP_PICTURES", tmp_path), "lesson.png")
    page.screenshot(path=file)
    drawn = Image.open(file).quantize(64)
    drawn.save(file, optimize=True, pnginfo=about)

    # no outputs, and nothing of the kernel; `git status` compares sizes
    notebook = repo / "notebooks" / "diff_ddp.ipynb"
    page.locator(".jp-NotebookPanel .jp-Cell").first.click()
    page.keyboard.press("Control+s")
    wait_for(lambda: "changes left" in notebook.read_text(), 60)
    assert "codemirror_mode" in git(repo, "diff", "notebooks")
    subprocess.run(["bash", "-c", "source activate.sh"], cwd=repo, check=True)
    assert git(repo, "diff", "notebooks") == ""


def test_the_pictures_of_a_portal(page, lab, repo, tmp_path):
    """`WORKSHOP_PICTURES=docs pytest tests/test_lab.py -k portal`

    draws those of the slides anew.
    """
    home, shell = tmp_path / "portal", tmp_path / "home"
    for folder in home, shell:
        folder.mkdir()
    repo.rename(home / "gpt2-workshop")
    for name in (".bashrc", ".bash_profile"):  # it notes each prompt
        (shell / name).write_text(
            "PS1='\\W$ '; PROMPT_COMMAND='echo >> ~/prompts'\n")
    page.set_viewport_size({"width": 960, "height": 460})
    drawn = Path(os.environ.get("WORKSHOP_PICTURES", tmp_path))

    def keep(number):
        page.wait_for_timeout(500)
        file = drawn / f"portal-{number}.png"
        page.screenshot(path=file)
        image = Image.open(file).quantize(64)
        about = PngInfo()
        about.add_text("lesson", repr(cells("start_here")[:2]))
        image.save(file, optimize=True, pnginfo=about)
        kept = Image.open(ROOT / "docs" / file.name)
        assert image.size == kept.size == (960, 460)

    page.goto(f"{lab(root=home, SHELL='/bin/bash')}/lab")
    files, tile = page.locator(".jp-FileBrowser"), page.locator(
        ".jp-LauncherCard", has_text="Terminal")
    tile.scroll_into_view_if_needed()
    folder = files.locator(".jp-DirListing-item", has_text="gpt2-workshop")
    folder.wait_for()
    keep(1)
    tile.click()
    for number, line in enumerate(("cd gpt2-workshop\n",
                                   "source activate.sh")):
        wait_for(lambda n=number: (shell / "prompts").exists() and len(
            (shell / "prompts").read_text()) > n, 60)
        page.locator(".jp-Terminal").click()
        page.keyboard.type(line)
    keep(2)
    folder.dblclick()
    for name in ("notebooks", "start_here.ipynb"):
        files.locator(".jp-DirListing-item", has_text=name).dblclick()
    lesson = Lesson(page)
    for call in ("journey()", "doctor()"):
        assert "Traceback" not in lesson.run(call)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Home")
    page.locator(".jp-NotebookPanel h1").scroll_into_view_if_needed()
    keep(3)


def follow_command(page, lab, folder, *words, **options):
    """Where `python -m workshop lab` leads the browser."""
    opened = folder / "opened"
    opened.unlink(missing_ok=True)
    lab("workshop", "lab", *words, **options,
        BROWSER=f"sh -c 'echo $0 > {opened}' %s")
    wait_for(lambda: opened.exists() and opened.read_text(), 30)
    page.goto(opened.read_text().strip())


def test_the_command_opens_the_script_beside_the_lesson(
        page, lab, tmp_path):
    """Without a name, what was open last. A kernel without a page ends."""
    follow_command(page, lab, tmp_path, "ddp",
                   "--MappingKernelManager.cull_idle_timeout=2")
    see_both(page, "start_here")  # nothing has been trained yet
    page.locator("#jp-main-dock-panel .lm-TabBar-tab",
                 has_text="diff_ddp.ipynb").click()
    see_both(page, "ddp")
    page.wait_for_function("kernels_are_idle()")
    kernels = page.url.partition("/lab")[0] + "/api/kernels"
    page.wait_for_timeout(14_000)
    assert json.load(urllib.request.urlopen(kernels))
    page.goto("about:blank")
    wait_for(lambda: not json.load(urllib.request.urlopen(kernels)), 40)

    follow_command(page, lab, tmp_path)
    see_both(page, "ddp")
    assert "Your script is std. What can follow: ddp mpi kernels" in (
        tmp_path / "lab.log").read_text()


def see_both(page, name):
    """The script on the left, the notebook on the right."""
    script = page.locator(".jp-FileEditor:visible")
    lesson = page.locator(".jp-NotebookPanel:visible")
    script.locator("text=Train GPT-2").first.wait_for()
    lesson.locator(".jp-Cell", has_text="Goal" if name in STAGES else
                   "Start here").first.wait_for()
    left, right = script.bounding_box(), lesson.bounding_box()
    assert left["x"] + left["width"] <= right["x"]
    assert left["width"] > 500 and right["width"] > 500
