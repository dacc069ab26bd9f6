"""python -m workshop progress RUN: how far a run is.

The batch files use it to find out whether there is something left to do.
"""

from pathlib import Path

from backstage.errors import UserError
from workshop.results.runs import read_started


def show(folder):
    """Print how many steps are saved; return 0 if it is all, else 1."""
    folder = Path(folder)
    files = sorted((folder / "checkpoints").glob("step_*.pt"))
    step = int(files[-1].stem.rpartition("_")[2]) if files else 0
    try:
        steps = read_started(folder)["max_steps"]
    except (FileNotFoundError, UserError):  # the run has not started yet
        steps = None
    print(f"{step} of {'?' if steps is None else steps} steps are saved")
    return int(steps is None or step < steps)
