"""The library that the stage scripts import; attendees do not edit it."""

import sys
from pathlib import Path

if sys.version_info < (3, 10):
    sys.exit(f"error: {sys.executable} is Python {sys.version.split()[0]}, and"
             " the course needs 3.10 or later; fix: run `source activate.sh`")

ROOT = Path(__file__).resolve().parent.parent  # the repository

# With PYTHONSAFEPATH or -P a script would not find what lies beside it.
script = sys.modules["__main__"]
if getattr(sys.flags, "safe_path", False) and not script.__spec__:
    file = getattr(script, "__file__", None)
    if file:
        sys.path.insert(0, str(Path(file).resolve().parent))
