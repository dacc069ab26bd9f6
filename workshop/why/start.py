"""Starts a job whose ranks leave evidence: python -m workshop why run -- X"""

import os
import shlex
import time
from pathlib import Path

from workshop.errors import UserError

HOOK = Path(__file__).resolve().parent / "hook"
ROOT = HOOK.parents[2]
# A folder for each start: in the clone, or in the home where pip has installed
# this. The hook knows it, too.
STARTS = (ROOT / ".why" if (ROOT / "activate.sh").exists()
          else Path("~/.cache/workshop-why").expanduser())


def switch_on(env):
    """These variables, with which what a launcher starts is watched.

    In the folder that they name already, or in a new one.
    """
    paths = [str(HOOK), *filter(None, env.get("PYTHONPATH", "").split(
        os.pathsep))]
    name = time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    return {"WORKSHOP_WHY": str(STARTS / name), **env,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def run(command):
    """Become this command, in a new folder."""
    env = switch_on({name: value for name, value in os.environ.items()
                     if name != "WORKSHOP_WHY"})
    print("while it runs, or afterwards: python -m workshop why "
          f"{shlex.quote(env['WORKSHOP_WHY'])}", flush=True)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}") from error
