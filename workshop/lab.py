"""Opens JupyterLab with the script and a lesson side by side.

    python -m workshop lab ddp

Only the standard library, from Python 3.9 on.
"""

import importlib.util
import json
import os
import sys

from backstage import ROOT
from backstage.errors import require
from workshop.stages import DESK


def main(stage, flags):
    """Become JupyterLab. flags: JupyterLab's own.

    stage: its lesson is opened, and start_here if it is None.
    """
    require(importlib.util.find_spec("jupyterlab"), f"{sys.executable} has no "
            "jupyterlab: run `source activate.sh` first")
    workspace = write_workspace(stage or "start_here")
    os.execv(sys.executable, [
        sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}",
        f"--LabApp.default_url=/lab/tree/{workspace.relative_to(ROOT)}",
        *flags])


def write_workspace(name, root=ROOT):
    """Write a JupyterLab workspace with the script and, beside it, a lesson.

    name: a stage, or start_here. root: the folder that JupyterLab shows, where
    the workspace's paths begin. Returns the file's path, in notebooks/. Raises
    ValueError if the course is not inside root, OSError if it cannot write.
    """
    here = ROOT.resolve().relative_to(root.resolve())
    notebook = name if name == "start_here" else f"diff_{name}"
    paths = {
        "editor": (here / "code" / DESK.name).as_posix(),
        "notebook": (here / "notebooks" / f"{notebook}.ipynb").as_posix()}
    widgets = {f"{kind}:{path}": {
        "data": {"path": path, "factory": kind.title()}}
        for kind, path in paths.items()}
    halves = [{"type": "tab-area", "currentIndex": 0, "widgets": [widget]}
              for widget in widgets]
    closed = {"collapsed": True, "visible": True, "widgets": []}
    layout = {
        "main": {"dock": {"type": "split-area", "orientation": "horizontal",
                          "sizes": [0.5, 0.5], "children": halves},
                 "current": list(widgets)[-1]},
        "left": closed, "right": closed}
    path = ROOT / "notebooks" / f"beside_{name}.jupyterlab-workspace"
    path.write_text(json.dumps({
        "data": {"layout-restorer:data": layout, **widgets},
        "metadata": {"id": name}}, indent=1) + "\n", "utf-8")
    return path
