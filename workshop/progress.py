"""python -m workshop progress RUN: how far a run is.

The batch files use it to find out whether there is something left to do.
"""

import json
from pathlib import Path


def show(folder):
    """Print how many steps are saved; return 0 if it is all, else 1."""
    folder = Path(folder)
    files = sorted((folder / "checkpoints").glob("step_*.pt"))
    step = int(files[-1].stem.rpartition("_")[2]) if files else 0
    try:
        record = json.loads((folder / "hyperparameters.json").read_text())
        steps = record["max_steps"]
    except (OSError, ValueError, KeyError):  # the run has not started yet
        steps = None
    print(f"{step} of {'?' if steps is None else steps} steps are saved")
    return int(steps is None or step < steps)
