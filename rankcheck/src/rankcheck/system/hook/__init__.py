"""The folder by which any script's Python starts to watch it, or to guard it.

`sitecustomize.py` in it says how.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HOOK = Path(__file__).resolve().parent


def with_hook(env: Mapping[str, str]) -> str:
    """Return a PYTHONPATH by which every Python imports the hook.

    All else in it stays as it is. To Python an empty entry is the working
    directory, but an empty variable is none at all.

    Args:
        env: the environment variables whose PYTHONPATH is extended.
    """
    given = env.get("PYTHONPATH", "")
    entries = given.split(os.pathsep) if given else []
    others = [entry for entry in entries if entry != str(HOOK)]
    return os.pathsep.join([str(HOOK), *others])
