"""Let any script write records for `rankcheck why`.

Python imports it by its name where this folder is in PYTHONPATH, as `why run`,
`launch` and the batch files set it. A process in which RANKCHECK_WHY names a
folder is watched if it is a rank, or becomes one later. A Python before 3.9,
which may be anything that a job calls, is left alone. One in which
RANKCHECK_GUARD names a sandbox, its module and folder, does not leave it.
"""

import os
import sys

if os.environ.get("RANKCHECK_GUARD") and sys.version_info >= (3, 9):
    from importlib import import_module

    here = os.path.abspath(__file__)
    sys.path.append(here[:here.rindex("/rankcheck/")])
    module, top = os.environ["RANKCHECK_GUARD"].split(":", 1)
    import_module(module).Sandbox(os.path.dirname(top), top)()
    sys.path.pop()
elif os.environ.get("RANKCHECK_WHY") and sys.version_info >= (3, 9):
    from importlib import import_module

    # A name of its own: the script may have another `rankcheck`
    package = type(sys)("rankcheck_watcher")
    package.__path__ = [os.path.abspath(__file__).rsplit(os.sep, 3)[0]]
    sys.modules[package.__name__] = package
    try:
        watcher = import_module("rankcheck_watcher.why.watcher")
        watcher.start_watching(os.environ["RANKCHECK_WHY"])
    except Exception as error:  # never the script's problem
        sys.modules.pop(package.__name__, None)
        sys.stderr.write("warning: no record for `why`: " + str(error) + "\n")

# One of the site's own, which this one hides, takes its place; if there is
# none, Python passes over this ImportError. Another clone's is not the site's.
this = sys.modules.pop(__name__)  # Python 2 empties a module nobody holds
# Today's, and before
HOOK_FOLDERS = "/rankcheck/system/hook", "/rankcheck/why/hook"
sys.path[:] = [path for path in sys.path if not path.endswith(HOOK_FOLDERS)]
import sitecustomize  # type: ignore[import-not-found, unused-ignore]  # noqa: E402, F401 the site's, if any
