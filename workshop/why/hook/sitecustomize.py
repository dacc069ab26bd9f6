"""Lets any script leave evidence for `python -m workshop why`.

Python imports it by its name where this folder is in PYTHONPATH, as in a shell
in which activate.sh was sourced. In a launcher such as torchrun it names a new
folder for this start, unless WORKSHOP_WHY names one; all other processes with
that variable are watched if they are ranks, or become ranks later.
"""

import importlib.util
import os
import sys
import time
from importlib.machinery import PathFinder

FOLDER = "WORKSHOP_WHY"
LAUNCHERS = {"torchrun", "torch.distributed.run", "torch.distributed.launch",
             "accelerate", "accelerate-launch", "accelerate.commands.launch",
             "deepspeed", "deepspeed.launcher.launch"}

here = os.path.dirname(os.path.abspath(__file__))
tools = os.path.dirname(here)
# one of the site's own, which this one hides: never another clone's
paths = list(map(os.path.abspath, sys.path))
spec = PathFinder.find_spec("sitecustomize", [
    path for path in paths[paths.index(here) + 1:]
    if not path.endswith("/workshop/why/hook")])
if spec:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
words = getattr(sys, "orig_argv", [])[1:4]  # from Python 3.10 on
if LAUNCHERS & {os.path.basename(word) for word in words}:
    # start.py, too, knows this place
    root = os.path.dirname(os.path.dirname(tools))
    starts = (os.path.join(root, ".why")
              if os.path.exists(os.path.join(root, "activate.sh"))
              else os.path.expanduser("~/.cache/workshop-why"))
    os.environ.setdefault(FOLDER, os.path.join(
        starts, time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")))
elif os.environ.get(FOLDER):
    spec = importlib.util.spec_from_file_location(
        "workshop.why.witness", os.path.join(tools, "witness.py"))
    witness = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(witness)
    witness.start(os.environ[FOLDER])
