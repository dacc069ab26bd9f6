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

import pytest
from conftest import needs

from backstage import ROOT
from workshop.stages import STAGES

pytestmark = pytest.mark.whole

CHROMIUM = "chromium"
FLAGS = ("--headless=new --no-sandbox --disable-gpu --disable-quic "
         "--no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()
TYPO = ("loss = training_step(model, batch, device, hp.precision)",
        "loss = training_step(raw_model, batch, device, hp.precision)")


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
    """Start JupyterLab there, and return its address."""
    servers = []

    def lab(**variables):
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
        log = tmp_path / "lab.log"
        with open(log, "w") as file:
            servers.append(subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", "--no-browser",
                 "--allow-root", "--ip=127.0.0.1", f"--port={port}",
                 "--ServerApp.port_retries=0", "--IdentityProvider.token=",
                 f"--ServerApp.root_dir={repo}"],
                env=env, stdout=file, stderr=subprocess.STDOUT))
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
            executable_path=shutil.which(CHROMIUM), args=FLAGS)
        context = browser.new_context(
            viewport={"width": 1280, "height": 720},
            permissions=["clipboard-read", "clipboard-write"])
        yield context.new_page()
        browser.close()


class Lesson:
    """The lesson on the right, the script on the left."""

    def __init__(self, page, url):
        from playwright.sync_api import expect

        self.page, self.expect = page, expect
        page.goto(f"{url}/lab/tree/notebooks/diff_ddp.ipynb")
        # The toolbar says idle before there is a kernel; this does not.
        expect(page.locator("#jp-bottom-panel")).to_contain_text(
            "| Idle", timeout=90_000)
        assert not page.locator(".jp-Dialog").count()  # no kernel picker
        files = page.locator(".jp-FileBrowser")
        files.locator(".jp-BreadCrumbs-home").click()
        for name in ("code", "train_gpt2.py"):
            files.locator(".jp-DirListing-item", has_text=name).dblclick()
        self.tab = page.locator("#jp-main-dock-panel .lm-TabBar-tab",
                                has_text="train_gpt2.py")
        self.tab.click(button="right")
        page.locator(".lm-Menu-item", has_text="Split Tab").click()
        page.locator(".lm-Menu-item",
                     has_text=re.compile(r"^Left\s*$")).click()
        self.editor = page.locator(".jp-FileEditor .cm-content")
        page.wait_for_function(
            "document.querySelector('.jp-FileEditor')"
            ".getBoundingClientRect().right <= document.querySelector("
            "'.jp-NotebookPanel').getBoundingClientRect().left")
        self.runs = 0

    def run(self, source, which=0):
        """Run the cell; returns what it shows, as text."""
        cell = self.page.locator(".jp-NotebookPanel:visible .jp-CodeCell",
                                 has_text=source).nth(which)
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        self.runs += 1
        self.expect(cell.locator(".jp-InputPrompt")).to_have_text(
            f"[{self.runs}]:", timeout=120_000)
        self.output = cell.locator(".jp-OutputArea-output")
        return "\n".join(self.output.all_inner_texts())

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


@pytest.mark.parametrize("kernel", ["ours", "the portal's"])
def test_the_journey_to_ddp(kernel, page, lab, repo, portal):
    path = portal / "share" / "jupyter" if kernel != "ours" else ""
    url = lab(JUPYTER_PATH=str(path))
    with urllib.request.urlopen(f"{url}/api/kernelspecs") as answer:
        spec = json.load(answer)["kernelspecs"]["python3"]["spec"]
    assert (str(portal) in spec["argv"][0]) == (kernel != "ours")
    lesson = Lesson(page, url)
    lesson.run("import sys")
    assert "12 of 12 changes left" in lesson.run('diff("ddp")')

    # a change made by hand counts as soon as it is saved
    lesson.type_over("one device: model, data, schedule, training loop.",
                     "many devices with DDP: each has a copy of the model.")
    assert "12 of 12 changes left" in lesson.run('diff("ddp")')
    lesson.save()
    assert "11 of 12 changes left" in lesson.run('diff("ddp")')

    # only code can be copied from the view, without the removed lines
    box = page.locator(".ws .code", has_text="use_device(hp.device, local_ran")
    box.evaluate("box => getSelection().selectAllChildren(box)")
    page.keyboard.press("Control+c")
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    added = [line for line in STAGES["ddp"].solution.read_text().splitlines()
             if "use_device(hp.device, local_rank)" in line]
    assert added[0] in copied
    assert "    device = use_device(hp.device)" not in copied
    assert page.evaluate("box => box.scrollWidth <= box.clientWidth",
                         box.element_handle())  # nothing sticks out

    # all changes with one mistake: one is left, and the check names it
    ready = STAGES["ddp"].solution.read_text()
    lesson.paste(ready.replace(*TYPO))
    lesson.save()
    assert "1 of 12 changes left" in lesson.run('diff("ddp")')
    assert page.locator(".ws h4").count() == 1
    assert page.locator(".ws .add mark").all_inner_texts() == ["model"]
    checked = lesson.run('check("ddp")')
    assert "FAIL" in checked and "raw model" in checked

    lesson.paste(ready)
    lesson.save()
    assert "Done: all 12 changes are made" in lesson.run('diff("ddp")')
    checked = lesson.run('check("ddp")')
    assert "4 processes" in checked and "FAIL" not in checked

    # again, from the start
    subprocess.run([sys.executable, "-m", "workshop", "reset", "std"],
                   cwd=repo, check=True, stdout=subprocess.DEVNULL)
    assert "12 of 12 changes left" in lesson.run('diff("ddp")')
    backup, = (repo / "code").glob("train_gpt2.20*.py")
    assert backup.read_text() == ready


@pytest.mark.parametrize("stage", sorted(
    path.stem for path in ROOT.glob("*.jupyterlab-workspace")))
def test_a_workspace_opens_the_script_beside_the_lesson(
        stage, page, lab, repo):
    name = f"{stage}.jupyterlab-workspace"
    shutil.copy(ROOT / name, repo)
    # where `jupyter lab NAME` leads the browser
    page.goto(f"{lab()}/lab/tree/{name}")
    script = page.locator(".jp-FileEditor:visible")
    lesson = page.locator(".jp-NotebookPanel:visible")
    script.locator("text=Train GPT-2").first.wait_for(timeout=90_000)
    lesson.locator(".jp-Cell", has_text="Goal").first.wait_for(timeout=90_000)
    left, right = script.bounding_box(), lesson.bounding_box()
    assert left["x"] + left["width"] <= right["x"]
    assert left["width"] > 500 and right["width"] > 500
    tabs = page.locator("#jp-main-dock-panel .lm-TabBar-tab:visible")
    assert {"train_gpt2.py", f"diff_{stage}.ipynb"} <= set(
        tabs.all_inner_texts())
