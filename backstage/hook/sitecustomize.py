"""Lets any script leave evidence for `python -m workshop why`.

Python imports it by its name where this folder is in PYTHONPATH:

    export WORKSHOP_WHY=why PYTHONPATH=/.../backstage/hook:$PYTHONPATH

Of the processes that a launcher starts with it, the ranks are watched.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

here = os.path.dirname(os.path.abspath(__file__))
# one of the site's own, which this one hides
spec = PathFinder.find_spec("sitecustomize", [
    path for path in sys.path if os.path.abspath(path or ".") != here])
if spec:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
if os.environ.get("WORKSHOP_WHY"):
    path = os.path.join(os.path.dirname(here), "witness.py")
    spec = importlib.util.spec_from_file_location("backstage.witness", path)
    witness = importlib.util.module_from_spec(spec)
    sys.modules["backstage.witness"] = witness  # the backstage's own, too
    spec.loader.exec_module(witness)
    witness.start()
