"""What a lesson's cells import.

Each of them does so for itself: it can be run after a restart of the kernel,
before those above it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from workshop.notebook import cells


def __getattr__(name):
    return getattr(cells, name)
