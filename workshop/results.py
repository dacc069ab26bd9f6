"""What came of the runs: read from their folders, and fitted.

Needs only the standard library, so that a portal's kernel can list the runs;
`fit` alone takes NumPy.
"""

import csv
import json
import statistics
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from workshop import ROOT
from workshop.errors import UserError, check
from workshop.peaks import num_parameters

RUNS, EXAMPLES = ROOT / "runs", ROOT / "example-logs"
ALIKE = ("preset", "data", "minibatch_size", "sequence_length")

# The course's own scaling plots: seconds an epoch, by GPUs and by samples
# (of other data and another length than here).
PUBLISHED = {
    "A100-40, batch 16": {1: 155.5, 4: 43.7, 8: 21.4, 16: 11.3},
    "A100-40, batch 256": {1: 54.0, 4: 13.9, 8: 7.1, 16: 3.8},
    "Max 1550, batch 16": {1: 122.1, 4: 37.5, 8: 24.8, 16: 14.7},
    "Max 1550, batch 256": {1: 41.0, 4: 11.8, 8: 8.3, 16: 6.0},
}


@dataclass
class Result:
    """A run: what hyperparameters.json and metrics.csv say."""

    folder: Path
    stage: str
    world_size: int
    device: str
    config: dict
    hyperparameters: dict
    rows: list = field(repr=False)  # a dictionary of floats for each step

    @property
    def name(self):
        return f"{self.stage} x {self.world_size}"

    @property
    def preset(self):
        return self.hyperparameters["preset"]

    @property
    def accumulation(self):
        """Microbatches that a process takes in a step, one after another."""
        hp = self.hyperparameters
        return hp["minibatch_size"] // (
            hp["microbatch_size"] * self.world_size)

    @property
    def seconds(self):
        """Of a step: the median, without the first fifth, which warms up."""
        return self.median("seconds")

    @property
    def tokens_per_second(self):
        return self.median("tokens_per_second")

    @property
    def mfu(self):
        """Or None where the device's peak is not known."""
        return self.median("mfu")

    def median(self, column):
        values = [row[column] for row in self.rows[len(self.rows) // 5:]
                  if row[column] is not None]
        return statistics.median(values) if values else None

    def alike(self, other):
        """Whether both train the same model on the same minibatches."""
        return all(self.hyperparameters.get(key)
                   == other.hyperparameters.get(key) for key in ALIKE)


def read(folder):
    """The run in a folder; a `UserError` where there is nothing to show."""
    try:
        record = json.loads((folder / "hyperparameters.json").read_text())
        with open(folder / "metrics.csv", newline="") as file:
            rows = [{key: float(value) if value else None
                     for key, value in row.items()}
                    for row in csv.DictReader(file)]
        check(rows, f"{show(folder)}: no step is finished yet")
        return Result(folder, record["stage"], record["world_size"],
                      record["device"], record["config"],
                      record["hyperparameters"], rows)
    except FileNotFoundError as error:
        raise UserError(f"{show(folder)}: there is no "
                        f"{Path(error.filename).name}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{show(folder)}: damaged, or not a run of this "
                        f"course ({error})") from error


def find(folders=()):
    """The runs to show, and lines about what is not shown and why.

    With no folders, those in runs/ that train what the newest one trains, of
    several with one stage and world size the newest; or, where runs/ holds
    none, the examples. Raises `UserError` where nothing can be shown.
    """
    named = [Path(folder) for folder in folders]
    results, notes = read_all(named or list_folders(RUNS))
    if not (results or named):
        notes.append("No run to show in runs/ yet: these are the examples "
                     "in example-logs/.")
        results, problems = read_all(list_folders(EXAMPLES))
        notes += problems
    check(results, "; ".join(notes) or "there is no run to show")
    if not named:
        newest = results[-1]
        same = [result for result in results if result.alike(newest)]
        if len(same) < len(results):
            notes.append(f"Left out: {len(results) - len(same)} runs with "
                         "another preset, data, minibatch or length than "
                         f"{show(newest.folder)}.")
        results = list({result.name: result for result in same}.values())
    order = {"std": 0, "ddp": 1, "lit": 2}
    results.sort(key=lambda result: (order.get(result.stage, 3),
                                     result.world_size))
    return results, notes


def read_all(folders):
    """Runs, and for those that cannot be read a line."""
    results, problems = [], []
    for folder in folders:
        try:
            results.append(read(folder))
        except UserError as error:
            problems.append(str(error))
    return results, problems


def list_folders(parent):
    """The run folders in a folder, the one written to last at the end."""
    def written(folder):
        file = folder / "metrics.csv"
        return (file if file.exists() else folder).stat().st_mtime

    folders = [path for path in parent.glob("*") if path.is_dir()]
    return sorted(folders, key=written)


def show(folder):
    """The folder as it is named from the repository."""
    folder = folder.resolve()
    return folder.relative_to(ROOT) if ROOT in folder.parents else folder


# ----------------------------------------------------------------- scaling


def efficiency(results):
    """Tokens/s of a process, relative to one alone: {stage: {n: ratio}}.

    Compared with the stage's own run on one process, else with stage std;
    a stage with neither is left out.
    """
    single = {result.stage: result.tokens_per_second
              for result in results if result.world_size == 1}
    stages = {}
    for result in results:
        one = single.get(result.stage, single.get("std"))
        if one:
            stages.setdefault(result.stage, {})[result.world_size] = (
                result.tokens_per_second / result.world_size / one)
    return stages


def traffic(n, num_bytes):
    """What a ring all-reduce sends from each of n processes, in bytes."""
    return 2 * (n - 1) / n * num_bytes


@dataclass
class Model:
    """t_step = A * t_microbatch + t_optimizer + t_exposed, in seconds.

    t_exposed = traffic / bandwidth: the part of the all-reduce that does not
    hide behind the backward pass, and the bandwidth that it seems to have.
    """

    microbatch: float
    optimizer: float  # with what is exposed, where they are not told apart
    per_byte: float  # 1 / bandwidth
    num_bytes: int  # of the gradients
    told_apart: bool = True

    def parts(self, n, accumulation):
        return (accumulation * self.microbatch, self.optimizer,
                traffic(n, self.num_bytes) * self.per_byte)

    def seconds(self, n, accumulation):
        return sum(self.parts(n, accumulation))


def fit(points, num_bytes):
    """The `Model` nearest to {(n, accumulation): seconds}, or None.

    Least squares of the relative errors with no time below zero, for three
    world sizes or more. With a single minibatch size A and the traffic are
    both straight lines in 1/n, so that any times of the optimizer and of the
    all-reduce with the same sum fit as well: they stay together then.
    """
    import numpy as np

    if len({n for n, _ in points}) < 3:
        return None
    matrix = np.array([[A, 1, traffic(n, num_bytes)] for n, A in points])
    scale = matrix.max(axis=0)
    rank = np.linalg.matrix_rank(matrix / scale)  # 2 or 3
    matrix = matrix / scale / np.array(list(points.values()))[:, None]
    best, least = None, np.inf
    for size in range(1, rank + 1):  # which of the times are above zero
        for columns in combinations(range(rank), size):
            part = np.linalg.lstsq(matrix[:, columns], np.ones(len(points)),
                                   rcond=None)[0]
            error = np.sum((matrix[:, columns] @ part - 1) ** 2)
            if (part >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[list(columns)] = part
    return Model(*(best / scale).tolist(), num_bytes, bool(rank == 3))


def fit_stage(results, stage):
    """The model of a stage's runs, or None where they are too few."""
    runs = [result for result in results if result.stage == stage]
    if not runs:
        return None
    points = {(run.world_size, run.accumulation): run.seconds for run in runs}
    return fit(points, 4 * num_parameters(runs[0].config))  # fp32 gradients


# --------------------------------------------------------- GPU utilisation


def utilisation(folder):
    """{"node GPU 0": [percent, ...]} from the run's files of GPU metrics.

    A batch file has them written on each node, every ten seconds, by
    `nvidia-smi dmon` (words under a header) or `xpu-smi dump` (commas).
    """
    gpus = {}
    for file in sorted(folder.glob("gpus-*.txt")):
        node, header = file.stem[len("gpus-"):], []
        for line in file.read_text(errors="replace").splitlines():
            cells = line.split("," if "," in line else None)
            cells = [cell.strip("# ").lower() for cell in cells]
            cells = [cell for cell in cells if cell]
            if "gpu" in cells or "deviceid" in cells:
                header = cells  # comes again and again
                continue
            values = dict(zip(header, cells))
            gpu = values.get("gpu", values.get("deviceid"))
            busy = values.get("sm", values.get("gpu utilization (%)"))
            try:
                percent = float(busy)
            except (TypeError, ValueError):  # units, "-", a line cut short
                continue
            gpus.setdefault(f"{node} GPU {gpu}", []).append(percent)
    return gpus
