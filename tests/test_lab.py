"""The lesson in a real JupyterLab and a real browser, as an attendee."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from cluster import FLAGS, wait_for
from conftest import needs
from PIL import Image

from backstage import ROOT
from workshop.lesson import documents
from workshop.lesson.diff import Diff
from workshop.stages import STAGES

pytestmark = pytest.mark.whole

CHROMIUM = "chromium"
SWITCHES = ("--headless=new --no-sandbox --disable-gpu --disable-quic "
            "--no-first-run --disable-background-networking "
            "--disable-component-update --disable-sync").split()
TYPO = ("loss = training_step(model, batch, device, hp.precision)",
        "loss = training_step(raw_model, batch, device, hp.precision)")

# What draws, in a cell that several ranks run.
DRAW = ("show", "plot", "run_pipeline")

IN_SIGHT = """where => {
  const box = document.querySelector(where)?.getBoundingClientRect();
  const pane = document.querySelector(".jp-NotebookPanel:not(.lm-mod-hidden) "
    + ".jp-WindowedPanel-outer").getBoundingClientRect();
  return box && box.top >= pane.top && box.bottom <= pane.bottom;
}"""

# Whether words that a cell has put out are in sight.
READABLE = """words => {
  const panel = document.querySelector(
    ".jp-NotebookPanel:not(.lm-mod-hidden)");
  const pane = panel.querySelector(".jp-WindowedPanel-outer")
    .getBoundingClientRect();
  for (const output of panel.querySelectorAll(".jp-OutputArea-output")) {
    const walk = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const at = walk.currentNode.textContent.indexOf(words);
      if (at < 0) continue;
      const range = document.createRange();
      range.setStart(walk.currentNode, at);
      range.setEnd(walk.currentNode, at + words.length);
      const box = range.getBoundingClientRect();
      if (box.height && box.top >= pane.top && box.bottom <= pane.bottom)
        return true;
    }
  }
  return false;
}"""

# The texts in the lesson's views whose contrast is below 4.5:1: the colours
# as the browser computes them, over all that is painted beneath.
FAINT = """() => {
  const read = colour => {
    const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map(
    i => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = colour => {
    const [r, g, b] = colour.map(v => v / 255).map(
      v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const page = node => {  // what is painted under it
    const stack = [];
    for (let n = node; n; n = n.parentElement) {
      stack.push(read(getComputedStyle(n).backgroundColor));
    }
    let colour = [255, 255, 255];
    for (const layer of stack.reverse()) colour = over(layer, colour);
    return colour;
  };
  const opacity = node => node
    ? getComputedStyle(node).opacity * opacity(node.parentElement) : 1;
  const faint = [];
  let seen = 0;
  const judge = (words, ink, ground, alpha) => {
    seen += 1;
    ink = over([...ink.slice(0, 3), ink[3] * alpha], ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) faint.push(`${words}: ${ratio.toFixed(2)}`);
  };
  for (const view of document.querySelectorAll(".ws")) {
    const walk = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const node = walk.currentNode.parentElement, words =
        walk.currentNode.textContent.trim();
      if (!words || /^(STYLE|SCRIPT|title|desc)$/.test(node.nodeName)
          || !node.getClientRects().length) continue;
      if (node.nodeName != "text") {
        judge(words, read(getComputedStyle(node).color), page(node),
              opacity(node));
        continue;
      }
      const svg = node.closest("svg"), box = node.getBoundingClientRect();
      const x = box.x + box.width / 2, y = box.y + box.height / 2;
      let ground = page(svg);
      for (const one of svg.querySelectorAll("rect, text")) {
        if (one === node) break;
        const r = one.getBoundingClientRect(), s = getComputedStyle(one);
        if (one.nodeName == "rect" && s.fill != "none" && r.left <= x
            && x <= r.right && r.top <= y && y <= r.bottom) {
          const fill = read(s.fill);
          ground = over([...fill.slice(0, 3), fill[3] * s.fillOpacity],
                        ground);
        }
      }
      judge(words, read(getComputedStyle(node).fill), ground, opacity(node));
    }
  }
  return seen < 50 ? ["there is too little text"] : faint;
}"""


@pytest.fixture
def repo(tmp_path):
    """A copy of the repository, with std on the desk."""
    repo = tmp_path / "repo"
    for folder in ("backstage", "workshop", "solutions", "notebooks"):
        shutil.copytree(ROOT / folder, repo / folder,
                        ignore=shutil.ignore_patterns("__pycache__"))
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
        settings = home / "settings/@jupyterlab/apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text(
            '{"fetchNews": "false"}')
        env = {key: value for key, value in os.environ.items() if key not in (
            "PYTHONPATH", "VIRTUAL_ENV", "WORKSHOP_VENV")}
        env |= {"HOME": str(home), "IPYTHONDIR": str(home / "ipython"),
                "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
                "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
                "JUPYTER_CONFIG_DIR": str(home / "config"),
                "JUPYTER_DATA_DIR": str(home / "data"),
                "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
                "JUPYTER_PREFER_ENV_PATH": "0", **variables}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
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
            assert servers[0].poll() is None, log.read_text()
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
def page():
    """A page of a browser, as wide as a laptop."""
    needs(CHROMIUM)
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which(CHROMIUM), args=SWITCHES)
        context = browser.new_context(
            viewport={"width": 1280, "height": 720},
            permissions=["clipboard-read", "clipboard-write"])
        yield context.new_page()
        browser.close()


class Lesson:
    """The lesson on the right, the script on the left."""

    def __init__(self, page, url=None, stage="ddp", notebook=None):
        """url: JupyterLab's address; left out, both are open already.

        notebook: one that is no stage's lesson.
        """
        from playwright.sync_api import expect

        self.page, self.expect, self.runs = page, expect, 0
        self.tab = page.locator("#jp-main-dock-panel .lm-TabBar-tab",
                                has_text="train_gpt2.py")
        self.editor = page.locator(".jp-FileEditor .cm-content")
        if url:
            name = notebook or f"diff_{stage}"
            page.goto(f"{url}/lab/workspaces/{name}/tree/notebooks/"
                      f"{name}.ipynb")
        self.wait_for_kernel()
        assert not page.locator(".jp-Dialog").count()  # no kernel picker
        if url:
            self.put_side_by_side()

    def wait_for_kernel(self):
        # The toolbar says idle before there is a kernel; this does not.
        self.expect(self.page.locator("#jp-bottom-panel")).to_contain_text(
            "| Idle", timeout=90_000)

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
        """All that is shown: in both themes, and at 150%.

        least: how many texts there are.
        """
        assert not overflowing(self.page)
        for dark in (False, True):
            self.choose_theme(dark)
            faint = self.page.evaluate(FAINT.replace(
                "seen < 50", f"seen < {least}"))
            assert not faint, faint

    def run(self, source, which=0, key="Control+Enter", timeout=120):
        """Run the cell; returns what it shows, as text."""
        return self.run_cell(self.page.locator(
            ".jp-NotebookPanel:visible .jp-CodeCell", has=self.page.locator(
                ".jp-InputArea", has_text=source)).nth(which), key, timeout)

    def run_cell(self, cell, key="Control+Enter", timeout=120):
        cell.locator(".cm-content").click()
        self.page.keyboard.press(key)
        self.runs += 1
        self.expect(cell.locator(".jp-InputPrompt")).to_have_text(
            f"[{self.runs}]:", timeout=1000 * timeout)
        self.output = cell.locator(".jp-OutputArea-output")
        return "\n".join(self.output.all_inner_texts())

    def run_instead(self, source, new):
        """Replace what is in the cell, and run it."""
        cell = self.page.locator(".jp-NotebookPanel:visible .jp-CodeCell",
                                 has_text=source)
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(new)
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


def overflowing(page):
    """What is cut at the right of the lesson's views, magnified to 150%."""
    size = page.viewport_size
    page.set_viewport_size({side: length * 2 // 3
                            for side, length in size.items()})
    page.wait_for_timeout(300)
    cut = page.evaluate("""() => [...document.querySelectorAll(
      ".jp-NotebookPanel:not(.lm-mod-hidden) .ws")].filter(
      view => view.clientWidth && view.scrollWidth > view.clientWidth + 1)
      .map(view => view.innerText.slice(0, 80))""")
    page.set_viewport_size(size)
    return cut


def test_the_journey_to_ddp(page, lab, repo, portal):
    """In a portal's kernel."""
    url = lab(JUPYTER_PATH=str(portal / "share" / "jupyter"))
    assert str(portal) in kernel(url)
    lesson = Lesson(page, url)
    assert "side by side" in lesson.run("import sys")
    total = len(documents.load("ddp"))
    everything = f"{total} of {total} changes left"
    view = page.locator(".ws", has=page.locator(".strip"))
    assert everything in lesson.run('diff("ddp")')
    # the next change only; Shift+Enter leaves it in sight
    assert page.locator(".ws pre.code:visible").count() == 1
    assert page.locator(".ws .strip > *").count() == total
    for _ in range(2):
        lesson.run('diff("ddp")', key="Shift+Enter")
        page.wait_for_function(IN_SIGHT, arg=".ws .strip")
        page.wait_for_function(IN_SIGHT, arg=".ws h3")

    # a change made by hand counts as soon as it is saved: the last line of
    # the one that names the stage
    number = 1 + next(i for i, change in enumerate(documents.load("ddp"))
                      if "+import os" in change.anchors)
    lines = ("one device: model, data, schedule, training loop.",
             "many devices with DDP: each has a copy of the model.")
    named = Diff("ddp", STAGES["std"].solution).apply([number])
    lesson.paste(named.replace(*lines[::-1]))
    lesson.save()
    lesson.expect(view).to_contain_text(everything)
    lesson.type_over(*lines)
    lesson.expect(view).to_contain_text(everything)
    lesson.save()  # and nothing else: the list follows
    lesson.expect(view).to_contain_text(f"{total - 1} of {total} changes left")
    page.wait_for_function(IN_SIGHT, arg=".ws .strip")

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
    one = page.locator(".ws pre.code span").first.bounding_box()["height"]
    lines = [line.bounding_box() for line in box.locator("span").all()]
    assert max(line["height"] for line in lines) > 1.5 * one
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert view.evaluate("view => view.scrollWidth <= view.clientWidth")
    page.set_viewport_size({"width": 1280, "height": 720})

    # a line's number opens the script there
    place = page.locator(".ws a", has_text=re.compile(r"^line \d+$")).first
    number = place.inner_text().split()[1]
    place.click()
    lesson.expect(page.locator("#jp-bottom-panel")).to_contain_text(
        f"Ln {number}, Col 1", timeout=30_000)

    # all changes with one mistake: one is left, and the check names it
    ready = STAGES["ddp"].solution.read_text()
    lesson.paste(ready.replace(*TYPO))
    lesson.save()
    lesson.expect(page.locator(".ws .add mark")).to_have_text(["model"])
    lesson.expect(view).to_contain_text(f"1 of {total} changes left")
    assert page.locator(".ws h3").count() == 1
    checked = lesson.run('check("ddp")', key="Shift+Enter")
    assert checked.startswith("Not yet.")
    assert "FAIL" in checked and "It is change" in checked
    # the verdict and its reason are in sight
    for words in ("Not yet.", "FAIL"):
        place = page.locator(".ws .beside strong", has_text=words).first
        place.evaluate("place => place.id = 'now'")
        page.wait_for_function(IN_SIGHT, arg="#now")
        place.evaluate("place => place.removeAttribute('id')")
    assert page.locator("table.check:visible td.no").count() == 1
    page.locator(".ws summary", has_text="more follow from it").click()
    assert page.locator(".ws svg desc").count() == 2  # beside it
    lesson.run("cadence()")
    lesson.can_be_read()
    page.add_style_tag(content=".ws h3 { color: #666 !important }")
    assert page.evaluate(FAINT)  # it would be seen

    lesson.paste(ready)
    lesson.save()
    lesson.expect(view).to_contain_text(f"Done: all {total} changes are made")

    # again, from the start
    subprocess.run([sys.executable, "-m", "workshop", "reset", "std"],
                   cwd=repo, check=True, stdout=subprocess.DEVNULL)
    lesson.expect(view).to_contain_text(everything)
    backup, = (repo / "code").glob("train_gpt2.20*.py")
    assert backup.read_text() == ready


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stages", "size", "dark"), [
    (["lit"], (1600, 900), True), (["fsdp", "tp", "3d"], (1280, 720), False)],
    ids=["to Lightning", "to 3d"])
def test_the_journey_from_ddp(stages, size, dark, page, lab, repo):
    """Lesson by lesson, with the cells that make changes for the attendee.

    In a kernel of the environment.
    """
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    shutil.copy(STAGES["ddp"].solution, repo / "code" / "train_gpt2.py")
    url = lab()
    assert kernel(url) == "python"  # JupyterLab's own
    for stage in stages:
        lesson = Lesson(page, url, stage)
        lesson.choose_theme(dark)
        total = len(documents.load(stage))
        lesson.run("import sys")
        assert f"{total} of {total} changes left" in lesson.run(
            f'diff("{stage}")')
        made = lesson.run_instead("# remove a #", f'apply("{stage}", 3)')
        assert "made change 3" in made
        assert f"{total - 1} of {total} changes left" in lesson.run(
            f'diff("{stage}")')
        faint = page.evaluate(FAINT)
        assert not faint, faint
        assert not overflowing(page)
        lesson.run_instead(f'apply("{stage}", 3)', f'apply("{stage}", "all")')
        assert f"Done: all {total} changes are made" in lesson.run(
            f'diff("{stage}")')
    if stage == "lit":
        lesson.run("strategies()")
        assert lesson.page.locator(".ws svg rect").count() == 2 * 4 * 3 * 4


@pytest.mark.timeout(900)
def test_the_journey_to_the_first_submitted_job(page, lab, slurm, tmp_path):
    """From start_here, by Shift+Enter, Ctrl+S and links alone."""
    (slurm.repo / "fineweb" / "demo" / "manifest.json").unlink()
    for file in (ROOT / "fineweb" / "demo").iterdir():
        shutil.copy(file, slurm.repo / "fineweb" / "demo")
    script = slurm.repo / "code" / "train_gpt2.py"
    shutil.copy(STAGES["std"].solution, script)
    opened = tmp_path / "opened"
    lab("workshop", "lab", root=slurm.repo,
        BROWSER=f"sh -c 'echo $0 > {opened}' %s",
        **{name: slurm.env[name] for name in ("SLURM_CONF", "PATH")})
    wait_for(lambda: opened.exists() and opened.read_text(), 30)
    page.goto(opened.read_text().strip())
    lesson = Lesson(page)

    def go(source, words="", seconds=120):
        """Run the cell with Shift+Enter; what it shows stays in sight."""
        said = lesson.run(source, key="Shift+Enter", timeout=seconds)
        assert words in said, said
        if not words:
            return
        page.wait_for_function(READABLE, arg=words, timeout=5000)

    go("import sys")
    go("doctor()", "SLURM")
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
                     ).last.wait_for(timeout=30_000)
        lesson.wait_for_kernel()
        lesson.runs = 0

    follow("From one device to many: DDP", "diff_ddp.ipynb")
    go("import sys")
    go("cadence()")
    go("samples_read()")
    total = len(documents.load("ddp"))
    go('diff("ddp")', f"{total} of {total} changes left")
    steps = Diff("ddp", STAGES["std"].solution)
    for number in range(1, total + 1):
        lesson.paste(steps.apply(range(1, number + 1)))
        lesson.save()
        words = (f"{number + 1} of {total}: " if number < total else
                 f"Done: all {total} changes are made")
        page.wait_for_function(READABLE, arg=words)
    go('check("ddp", 1)')
    go('check("ddp")', "Right: 1, 2 and 4 processes")
    go("slurm()")
    flags = " ".join(map(str, FLAGS)).replace("--data ", "--data ../../")
    cell = page.locator(".jp-NotebookPanel:visible .jp-CodeCell",
                        has_text="submit(\"ddp-1n2g\"")
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(
        f'submit("ddp-1n2g", "{flags} --max-steps 6")')
    page.keyboard.press("Shift+Enter")
    page.locator(".jp-Stdin-input:visible").fill("y")
    page.keyboard.press("Enter")
    lesson.runs += 1
    submitted = cell.get_by_text("Submitted batch job")
    submitted.wait_for(timeout=60_000)
    job = submitted.inner_text().split()[-1]
    go("queue()", job)
    end = slurm.wait(job)
    log = slurm.repo / "notebooks" / f"slurm-{job}.out"
    assert end["JobState"] == "COMPLETED", log.read_text()
    go("log()", "finished:")
    follow("Results", "results.ipynb")
    go("import sys")
    go("runs()", f"ddp-1n2g-{job}")


@pytest.mark.timeout(900)
def test_whatever_else_is_shown_can_be_read(page, lab, repo):
    """The notebooks whose cells no journey runs: contrast, and nothing cut."""
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    url = lab()
    shutil.copytree(ROOT / "example-logs", repo / "example-logs")
    for name in ("results", "collectives", "sharding",
                 "diff_mpi", "your_model"):
        lesson = Lesson(page, url, notebook=name)
        cells = [cell.source for cell in nbformat.read(
            ROOT / "notebooks" / f"{name}.ipynb", 4).cells
            if cell.cell_type == "code"]
        for index, source in enumerate(cells):
            text = source.startswith((  # these show plain text, or a job
                "#", "check(", "submit(", "train(", "torchrun(", "verify(",
                "%%mpi")) and source != "verify(1)"
            if source.startswith("%%ranks"):
                text = not any(f"{call}(" in source for call in DRAW)
            if not text:
                lesson.run_cell(page.locator(
                    ".jp-NotebookPanel:visible .jp-CodeCell").nth(index))
        lesson.can_be_read(1 if name == "your_model" else 50)


def test_git_sees_no_difference_in_a_saved_lesson(page, lab, repo):
    """No outputs, and nothing of the kernel; `git status` compares sizes."""
    for name in ("activate.sh", "environment", "requirements.txt", "fineweb",
                 "constraints.txt", ".gitattributes", ".gitignore"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, repo / name)
    (repo / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "requirements.txt", repo / "tests")

    def git(*words):
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@example.org",
             *words], cwd=repo, check=True, capture_output=True,
            text=True).stdout

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "all")
    lesson = Lesson(page, lab())
    lesson.run("import sys")
    lesson.run('diff("ddp")')
    page.keyboard.press("Control+s")
    notebook = repo / "notebooks" / "diff_ddp.ipynb"
    wait_for(lambda: "changes left" in notebook.read_text(), 60)
    assert "codemirror_mode" in notebook.read_text()
    assert "codemirror_mode" in git("diff")
    subprocess.run(["bash", "-c", "source activate.sh"], cwd=repo, check=True)
    assert git("diff") == ""


def test_the_picture_in_the_readme(page, lab, repo, tmp_path):
    """`WORKSHOP_PICTURES=docs pytest --whole tests/test_lab.py -k picture`

    draws it anew.
    """
    script = repo / "code" / "train_gpt2.py"
    script.write_text(Diff("ddp", script).apply([1, 2, 3, 4]))
    lesson = Lesson(page, lab())
    lesson.choose_theme(False)
    lesson.run("import sys")
    lesson.run('diff("ddp")', key="Shift+Enter")
    page.wait_for_function(IN_SIGHT, arg=".ws .strip")
    place = page.locator(".ws h3 a").first
    line = place.inner_text().split()[1]
    place.click()
    lesson.expect(page.locator("#jp-bottom-panel")).to_contain_text(
        f"Ln {line}, Col 1", timeout=30_000)
    page.wait_for_function(IN_SIGHT, arg=".ws h3")
    file = Path(os.environ.get("WORKSHOP_PICTURES", tmp_path), "lesson.png")
    page.screenshot(path=file)
    drawn = Image.open(file).quantize(64)
    drawn.save(file, optimize=True)
    kept = Image.open(ROOT / "docs" / "lesson.png")
    assert drawn.size == kept.size == (1280, 720)
    total = len(documents.load("ddp"))  # boxes: made, or with a number
    assert page.locator(".ws .strip .made").count() == 4
    assert page.locator(".ws .strip > *").count() == total


def test_the_command_opens_the_script_beside_the_lesson(
        page, lab, repo, tmp_path):
    """It leads the browser there: `opened` stands for the browser."""
    opened = tmp_path / "opened"
    lab("workshop", "lab", "ddp",
        BROWSER=f"sh -c 'echo $0 > {opened}' %s")
    wait_for(lambda: opened.exists() and opened.read_text(), 30)
    page.goto(opened.read_text().strip())
    see_both(page, "start_here")  # nothing has been trained yet
    page.locator("#jp-main-dock-panel .lm-TabBar-tab",
                 has_text="diff_ddp.ipynb").click()
    see_both(page, "ddp")


def test_a_lesson_puts_the_script_beside_it_whatever_the_root(
        page, lab, repo):
    """As in a portal, whose root is the home."""
    page.on("dialog", lambda dialog: dialog.accept())  # leaves the page
    url = lab(root=repo.parent)
    page.goto(f"{url}/lab/tree/repo/notebooks/diff_ddp.ipynb")
    bar = page.locator("#jp-bottom-panel")
    bar.get_by_text("| Idle").wait_for(timeout=90_000)
    cell = page.locator(".jp-CodeCell", has_text="import sys").first
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    cell.get_by_text("side by side").click(timeout=60_000)
    see_both(page, "ddp")


def see_both(page, name):
    script = page.locator(".jp-FileEditor:visible")
    lesson = page.locator(".jp-NotebookPanel:visible")
    script.locator("text=Train GPT-2").first.wait_for(timeout=90_000)
    lesson.locator(".jp-Cell", has_text="Goal" if name in STAGES else
                   "Start here").first.wait_for(timeout=90_000)
    left, right = script.bounding_box(), lesson.bounding_box()
    assert left["x"] + left["width"] <= right["x"]
    assert left["width"] > 500 and right["width"] > 500
    tabs = page.locator("#jp-main-dock-panel .lm-TabBar-tab:visible")
    notebook = f"diff_{name}.ipynb" if name in STAGES else f"{name}.ipynb"
    assert {"train_gpt2.py", notebook} <= set(tabs.all_inner_texts())
