"""The tools of the course: python -m workshop diff | check | ..."""

import sys

from backstage import ROOT

# Where the packages of a clone are. activate.sh names both in PYTHONPATH; a
# portal's kernel, or a shell of an earlier version, may know the first alone.
SOURCES = [str(ROOT), str(ROOT / "rankcheck" / "src")]
if SOURCES[1] not in sys.path:
    sys.path.insert(0, SOURCES[1])
