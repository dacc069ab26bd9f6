"""Opens JupyterLab with the script and a lesson side by side.

    python -m workshop lab ddp
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from backstage import ROOT
from backstage.errors import UserError, require
from workshop.command_line import Parser
from workshop.diff.working_copy import next_lessons
from workshop.stages import LESSONS, WORKING_COPY, require_writable


def add_arguments(parser: Parser) -> None:
    parser.after, parser.passes_on = "JupyterLab's own flags", True
    parser.description = (f"{parser.description} Further flags are "
                          "JupyterLab's, such as --no-browser.")
    parser.add_argument("stage", nargs="?", choices=LESSONS, help="the stage "
                        "that the lesson makes (left out: start_here)")


def main(args: argparse.Namespace) -> None:
    """Become JupyterLab. args.flags: JupyterLab's own.

    args.stage: its lesson is opened. If it is None, that is what was open
    last, or else start_here. Where nothing has been trained yet, start_here is
    the tab in front of the lesson.
    """
    stage, flags = args.stage, args.flags
    require(importlib.util.find_spec("jupyterlab"), f"{sys.executable} has no "
            "jupyterlab; fix: run `source activate.sh`")
    require_room()
    require_writable()
    names = [stage or "start_here"]
    if stage and not (ROOT / "runs").exists():
        names.insert(0, "start_here")
    workspace = write_workspace(*names)
    page = f"tree/{workspace.relative_to(ROOT)}"
    with contextlib.suppress(UserError):  # the lesson will tell
        line, lessons = next_lessons()
        print(" ".join([line, *lessons]), flush=True)
    last = "" if stage else find_last_workspace()
    if last:
        page = f"workspaces/{last}"
    ours = {
        "--ServerApp.root_dir": ROOT,
        "--LabApp.default_url": f"/lab/{page}",
        # a kernel whose notebook is closed ends after half an hour
        "--MappingKernelManager.cull_idle_timeout": 1800,
        "--MappingKernelManager.cull_interval": 10}
    # labconfig/ beside this: no question about news, which covers the lesson
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, (
        os.environ.get("JUPYTER_CONFIG_PATH"), str(Path(__file__).parent))))
    os.execv(sys.executable, [
        sys.executable, "-m", "jupyterlab",
        *(f"{name}={value}" for name, value in ours.items() if not any(
            flag.startswith(name) for flag in flags)),
        *["--allow-root"] * (os.geteuid() == 0),  # as in a container
        *flags])


def find_last_workspace() -> str:
    """The workspace in which the script was open last, or ""."""
    from jupyterlab.commands import get_workspaces_dir

    for file in sorted(Path(get_workspaces_dir()).glob("*-workspace"),
                       key=os.path.getmtime, reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = json.loads(file.read_text("utf-8"))
            if f"editor:code/{WORKING_COPY.name}" in saved["data"]:
                return saved["metadata"]["id"]
    return ""


def require_room() -> None:
    """Raise a `UserError` unless JupyterLab can write where it has to."""
    from jupyter_core.paths import jupyter_runtime_dir

    folder = Path(jupyter_runtime_dir())
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"x")  # a full disk refuses this alone
    except OSError as error:
        raise UserError(
            f"JupyterLab cannot write to {folder} ({error.strerror}); fix: "
            "free some space, or give it another home: export "
            "HOME=$(mktemp -d)"
        ) from error


def write_workspace(*names: str, root: Path = ROOT) -> Path:
    """Write a JupyterLab workspace with the script and, beside it, lessons.

    names: a stage, or start_here; several are tabs, the first of them in
    front. root: the folder that JupyterLab shows, where the workspace's paths
    begin. Returns the file's path, in notebooks/. Raises ValueError if the
    course is not inside root, OSError if it cannot write.
    """
    here, name = ROOT.resolve().relative_to(root.resolve()), names[-1]

    def widget(kind: str, path: str) -> tuple[str, dict[str, Any]]:
        path = (here / path).as_posix()
        return f"{kind}:{path}", {
            "data": {"path": path, "factory": kind.title()}}

    script = widget("editor", f"code/{WORKING_COPY.name}")
    lessons = [widget("notebook", "notebooks/" + (
        f"{name}.ipynb" if name == "start_here" else f"diff_{name}.ipynb"))
        for name in names]
    widgets = dict([script, *lessons])
    halves = [{"type": "tab-area", "currentIndex": 0,
               "widgets": [key for key, _ in tabs]}
              for tabs in ([script], lessons)]
    closed = {"collapsed": True, "visible": True, "widgets": []}
    layout = {
        "main": {"dock": {"type": "split-area", "orientation": "horizontal",
                          "sizes": [0.5, 0.5], "children": halves},
                 "current": lessons[0][0]},
        "left": closed, "right": closed}
    path = ROOT / "notebooks" / f"beside_{name}.jupyterlab-workspace"
    path.write_text(json.dumps({
        "data": {"layout-restorer:data": layout, **widgets},
        "metadata": {"id": name}}, indent=1) + "\n", "utf-8")
    return path
